"""`prfaas explain`: one request of a run, as a person would tell it: its life, why it went where it went, and what the
scheduler had changed just before.

Everything is from the run's own files; nothing is run again.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pandas as pd

from emulator.profile import Profile, ProfileError
from testbed.report.rows import PARTS, SCHEDULER_STATES, WORDS
from testbed.runs import RunError, find_run, read_scenario, read_summary
from testbed.scenario import ScenarioError

STAMPS: Final = (
    ("sched_s", "scheduled by the workload"),
    ("send_s", "sent by the client"),
    ("arrive_s", "arrived at control"),
    ("route_s", "routed (the last attempt)"),
    ("prefill_start_s", "prefill began"),
    ("prefill_end_s", "prefill ended"),
    ("landed_s", "last KV byte landed"),
    ("admitted_s", "decode slot taken"),
    ("first_token_s", "first token at the client"),
    ("finished_s", "last token left"),
    ("done_s", "answer whole at the client"),
)
"""The stamps of a request's life in their order, and what each says."""

TEXTS: Final = ("request_id", *WORDS, "client_error")
EVENTS: Final = (*SCHEDULER_STATES, "link", "cross")
_COLUMNS: Final = ("t_s", "direction", "event", "node", "before", "after", "trigger")


def explain(run: str, request_id: str) -> dict[str, Any]:
    """What there is to say of a request, JSON-ready; times in model seconds, None for what did not happen.

    Raises RunError for a run or a request that there is not, and for a run that kept no rows.
    """
    return Explainer(find_run(run)).tell(request_id)


class Explainer:
    """A run's files, read once, for what there is to say of any of its requests. requests: its request table. Raises
    RunError, as `explain`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = read_summary(folder)
        self.requests = _requests(folder)
        self._events = _events(folder)
        self._profiles: dict[str, Profile | None] = {}

    def tell(self, request_id: str) -> dict[str, Any]:
        """`explain` of one of them."""
        row, same_id = _find(self.requests, self.folder, request_id)
        number = _numbers(row)
        return {
            "run": str(self.folder),
            **{key: self.summary[key] for key in ("scenario", "deployment", "policy", "clock")},
            "knows_future": self.summary.get("knows_future", False),
            "request_id": request_id,
            "same_id": same_id,
            **{key: str(row[key]) for key in ("status", "error", "error_message", "client_error")},
            "attempts": int(number("attempts") or 0),
            "input_tokens": int(row["input_tokens"]),
            "output_tokens": number("output_tokens"),
            "output_tokens_asked": int(row["output_tokens_asked"]),
            "kv_bytes": number("kv_bytes"),
            "stamps": _stamps(row),
            "ttft_s": number("ttft_s"),
            "ttft_parts_s": {part: number(f"ttft_{part}_s") for part in PARTS},
            "tpot_s": number("tpot_s"),
            "e2e_s": number("e2e_s"),
            "decision": _decision(row),
            "cache": _cache(row, self._profile),
            "changes_before": _changes(
                self._events, number("route_s") or number("arrive_s") or number("sched_s") or 0.0
            ),
        }

    def _profile(self, site: str) -> Profile | None:
        if site not in self._profiles:
            self._profiles[site] = _profile(self.folder, site)
        return self._profiles[site]


def _requests(folder: Path) -> pd.DataFrame:
    if (folder / "requests.csv").is_file():
        path = folder / "requests.csv"
        numbers = [name for name in pd.read_csv(path, nrows=0).columns if name not in TEXTS]
        return pd.read_csv(
            path,
            dtype=dict.fromkeys(TEXTS, "str"),
            keep_default_na=False,
            na_values={name: [""] for name in numbers},
        )
    if (folder / "requests.parquet").is_file():
        return pd.read_parquet(folder / "requests.parquet")
    raise RunError(f"{folder}: it kept no row a request; prfaas simulate keeps them with --requests csv")


def _find(table: pd.DataFrame, folder: Path, request_id: str) -> tuple[pd.Series, int]:
    """The request's row, and how many there are of its id. Raises RunError, with near ids."""
    found = table[table["request_id"] == request_id]
    if found.empty:
        ids = table["request_id"].tolist()
        near = [one for one in ids if request_id and request_id in one][:5]
        near = near or difflib.get_close_matches(request_id, ids[:100_000], 5, 0.5)
        of = f"{ids[0]} to {ids[-1]}" if ids else "none"
        raise RunError(
            f"{folder}: no request {request_id!r} among its {len(ids)} ({of})"
            + (f"; near it: {', '.join(near)}" if near else "")
        )
    return found.iloc[-1], len(found)


def _numbers(row: pd.Series) -> Callable[[str], float | None]:
    """Its columns as numbers; None where there is none, or no finite one."""

    def number(column: str) -> float | None:
        value = row.get(column, math.nan)
        return None if pd.isna(value) or math.isinf(value) else float(value)

    return number


def _stamps(row: pd.Series) -> list[dict[str, Any]]:
    """Those that there are: when, and how long after the one before."""
    there = [(name, what, float(row[name])) for name, what in STAMPS if pd.notna(row[name])]
    after = [None, *(at_s - before_s for (_, _, before_s), (_, _, at_s) in pairwise(there))]
    return [
        {"stamp": name, "what": what, "at_s": at_s, "after_s": after_s}
        for (name, what, at_s), after_s in zip(there, after, strict=True)
    ]


def _decision(row: pd.Series) -> dict[str, Any] | None:
    """The decision of the last attempt and what it was made of; None for a request that control never decided on."""
    if not row["reason"]:
        return None
    number = _numbers(row)
    total = int(row["input_tokens"])
    l_pd, l_prfaas = (int(number(name) or 0) for name in ("l_pd", "l_prfaas"))
    threshold = row["threshold_tokens"]
    return {
        **{name: str(row[name]) for name in ("reason", "prefill_site", "prefill_node", "decode_node", "policy_error")},
        "regime": str(row.get("regime", "")),
        "threshold_tokens": None if pd.isna(threshold) else float(threshold),
        "l_total": total,
        "l_pd": l_pd,
        "l_prfaas": l_prfaas,
        "uncached_pd": total - l_pd,
        "uncached_best": total - max(l_pd, l_prfaas),
        "prefill_queue_s": number("prefill_queue_s"),
        "prefill_cost_s": number("prefill_cost_s"),
    }


def _cache(row: pd.Series, profile_of: Callable[[str], Profile | None]) -> dict[str, Any] | None:
    """Where its cached prefix came from and what that saved; None when nothing was meant to be reused, or was.

    profile_of: a site's profile, where it can still be found.
    """
    number = _numbers(row)
    used, to_compute = int(number("cached_tokens") or 0), number("prefill_tokens")
    meant = int(row["input_tokens"] - to_compute) if to_compute and row["prefill_node"] else 0
    if not used and not meant:
        return None
    found: dict[str, Any] = {
        "meant_tokens": meant,
        "used_tokens": used,
        "from": str(row.get("cache_node", "") or row["prefill_node"]),
        "saved_s": None,
        "saved_kv_bytes": None,
    }
    profile = profile_of(str(row["prefill_site"])) if used else None
    if profile is not None:
        total = int(row["input_tokens"])
        found["saved_s"] = profile.t_prefill(total) - profile.t_prefill(total - used)
        found["saved_kv_bytes"] = profile.s_kv(total) - profile.s_kv(total - used)
    return found


def _profile(folder: Path, site: str) -> Profile | None:
    """The profile of a site, where it can still be found."""
    try:
        scenario = read_scenario(folder)
        return scenario.profile(scenario.deployments[0], site)  # type: ignore[arg-type]
    except (ScenarioError, ProfileError, ValueError):
        return None


def _events(folder: Path) -> list[dict[str, Any]]:
    """The events of the timeline that may bear on a request, in their order."""
    path = folder / "timeline.csv"
    if not path.is_file():
        return []
    table = pd.read_csv(path, keep_default_na=False, dtype="str", usecols=lambda name: name in _COLUMNS)
    rows = table[table["event"].isin(EVENTS) & (table["direction"] != "to_prfaas")].to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def _changes(events: list[dict[str, Any]], until_s: float) -> list[dict[str, Any]]:
    """The latest change of each kind and node before a time, in their order."""
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for one in events:
        at_s = float(one["t_s"])
        if at_s <= until_s:
            latest.pop((one["event"], one["node"]), None)
            latest[one["event"], one["node"]] = {
                "t_s": at_s,
                "ago_s": until_s - at_s,
                "kind": one["event"],
                **{key: one[key] for key in ("node", "before", "after", "trigger")},
            }
    return list(latest.values())
