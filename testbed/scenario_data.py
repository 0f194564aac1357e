"""A scenario's text as plain data: YAML read strictly, and `key=value` overrides laid over it.

YAML here has YAML 1.2's numbers (`1e6` is one) and no key twice: what the common parser would take for a text, or
forget silently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import yaml

EITHER: Final = {"rate_rps": "load_fraction", "load_fraction": "rate_rps"}
"""The two ways of giving a load exclude each other: setting one on the command line replaces the other."""


class ScenarioError(ValueError):
    """A scenario, or something set in it, that cannot be used. The message names file, key, value and remedy."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an error, with its space after it: the name that was meant, if one is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def text_of(name_or_path: str, what: str, names: Sequence[str], folder: Traversable) -> tuple[str, str]:
    """The YAML of something that is shipped under one of `names` in `folder`, or lies at a path, and what messages call
    it. what: it is, for messages. Raises ScenarioError."""
    path = Path(name_or_path)
    if "/" in name_or_path or path.suffix in (".yaml", ".yml"):
        try:
            return path.read_text(encoding="utf-8-sig"), name_or_path
        except FileNotFoundError:
            remedy = f"give a file with the {what}, or one of {', '.join(names)}"
            raise ScenarioError(f"{name_or_path}: no such file; {remedy}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ScenarioError(f"{name_or_path}: cannot be read: {reason}; give a YAML file") from None
    if name_or_path not in names:
        raise ScenarioError(
            f"{what} {name_or_path!r}: not one of the shipped ones ({', '.join(names)}); "
            f"{did_you_mean(name_or_path, names)}a file needs its .yaml ending"
        )
    return (folder / f"{name_or_path}.yaml").read_text(encoding="utf-8"), f"{name_or_path}.yaml"


def read(text: str, source: str) -> dict[str, Any]:
    """The mapping a YAML text holds. `source` is what errors call it. Raises ScenarioError."""
    try:
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ScenarioError(f"{source}: {line}not YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ScenarioError(f"{source}: must be a mapping of keys, is {kind(data)}; scenarios/toy.yaml is an example")
    return data


def kind(value: Any) -> str:
    """What a YAML value is, in words."""
    if value is None:
        return "empty"
    words: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return words.get(type(value), "a mapping" if isinstance(value, dict) else type(value).__name__)


def apply_set(data: dict[str, Any], item: str) -> None:
    """Lay one `key=value` over the data: dotted keys, a YAML value; list items by their `name` or their index."""
    key, equals, text = item.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ScenarioError(f"--set {item!r}: must be key=value, such as workload.load_fraction=0.8")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ScenarioError(f"--set {item!r}: {text!r} is not a YAML value; quote it for YAML") from None
    target: Any = data
    for depth, step in enumerate(path):
        where = _place(target, step, ".".join(path[:depth]), item)
        if depth == len(path) - 1:
            target[where] = value
            if path[0] in ("workload", "phases") and step in EITHER and value is not None:
                target[EITHER[step]] = None
        elif isinstance(target, dict) and target.get(where) is None:
            target[where] = {}
            target = target[where]
        else:
            target = target[where]


def _place(target: Any, step: str, parent: str, item: str) -> str | int:
    """Where in a mapping or a list `step` is."""
    if isinstance(target, dict):
        return step
    if not isinstance(target, list):
        raise ScenarioError(f"--set {item!r}: {parent} is {target!r}, which has no keys; set {parent} itself")
    names = [one.get("name") if isinstance(one, dict) else None for one in target]
    if step in names:
        return names.index(step)
    if step.isdigit() and int(step) < len(target):
        return int(step)
    known = [str(name) for name in names if name is not None] or [f"items 0 to {len(target) - 1}"]
    raise ScenarioError(f"--set {item!r}: {parent} has no item {step!r}; it has {', '.join(known)}")
