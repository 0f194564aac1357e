"""What is wrong with a scenario, in words: Pydantic's errors as one line each: key, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from testbed.scenario_data import did_you_mean, kind


def explain(error: Any, data: dict[str, Any], known_keys: Callable[[list[str]], list[str]]) -> str:
    """One Pydantic error of `data` as: key = value: what is wrong; remedy.

    known_keys: the keys that a place, given by its path, may have.
    """
    loc = [str(step) for step in error["loc"] if step not in ("lognormal", "mix")]
    key = ".".join(_named(loc, data))
    match error["type"]:
        case "extra_forbidden":
            known = known_keys(loc[:-1])
            whole = [name for name in known if name.startswith(f"{loc[-1]}_")]  # its unit was left out
            hint = f"did you mean {whole[0]}? " if whole else did_you_mean(loc[-1], known)
            return f"{key}: unknown key; {hint}known here: {', '.join(known)}"
        case "invalid_key":
            return f"{key}: unknown key; a key is a text"
        case "missing":
            return f"{key}: missing; add it"
        case "union_tag_not_found" | "union_tag_invalid":
            return f"{key}.kind = {error['input'].get('kind')!r}: must be lognormal or mix"
        case "value_error" if not loc or isinstance(error["input"], dict | BaseModel):
            return f"{key}: {message(error)}" if loc else message(error)
    return f"{key} = {_shown(error['input'])}: {message(error, _unit(loc))}"


def message(error: Any, unit: str = "") -> str:
    """What is wrong with a value."""
    limits, given = error.get("ctx", {}), error["input"]
    plainly = ", without quotes or a unit" if isinstance(given, str) else ""
    match error["type"]:
        case "value_error":
            return str(limits["error"])
        case _ if isinstance(given, float) and math.isnan(given):
            return "must be a finite number"
        case "greater_than":
            return f"must be above {limits['gt']:g}"
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}"
        case "less_than_equal":
            return f"must be at most {limits['le']:g}"
        case "float_type":
            return f"must be a number{unit}{plainly}"
        case "int_type":
            return f"must be a whole number{unit}{plainly}"
        case "string_type":
            return "must be a text; quote it"
        case "string_pattern_mismatch":
            return "must be letters, digits, dots, dashes and underscores"
        case "literal_error":
            return f"must be {limits['expected']}"
        case "list_type":
            return "must be a list"
        case "too_short":
            return "must have an item at least"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a mapping of keys"
    return str(error["msg"]).replace("Input should", "must")


def _unit(loc: list[str]) -> str:
    units = {"s": "seconds", "bytes": "bytes", "tokens": "tokens", "rps": "requests a second"}
    unit = units.get(loc[-1].rpartition("_")[2]) if "_" in loc[-1] else None
    return f" of {unit}" if unit else ""


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return kind(value)
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named(loc: list[str], data: Any) -> list[str]:
    """The location with list indices of named things replaced by their names."""
    out: list[str] = []
    for step in loc:
        data = (
            data[int(step)]
            if isinstance(data, list) and step.isdigit() and int(step) < len(data)
            else (data.get(step) if isinstance(data, dict) else None)
        )
        named = step.isdigit() and isinstance(data, dict) and isinstance(data.get("name"), str)
        out.append(data["name"] if named else step)
    return out
