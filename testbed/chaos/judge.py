"""What the requests of a run say about an experiment's hypothesis. Pure; the same on both clocks.

A window is judged by the requests that were due in it. Fewer than LEAST of them judge nothing: the run is inconclusive.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.chaos.experiment import Bounds, Experiment
from testbed.report.window import TPOT_TOLERANCE, completed
from testbed.scenario import Scenario, Slo
from traces.client_rows import LEFT

LEAST: Final = 30
"""Requests in a window, for its shares and percentiles to say something."""

AT_LEAST: Final = ("goodput",)


def judge(experiment: Experiment, scenario: Scenario, requests: pd.DataFrame) -> dict[str, Any]:
    """The hypothesis against the request table (with its column ended_s: when each request was over, model seconds).

    Answers {"windows": {name: {from_s, to_s, requests, values, bounds, broken}}, "recovered_s", "verdict": {status:
    passed | broken | inconclusive, reasons}}. recovered_s: from the last healing until no more requests wait for their
    first token than ever did before the faults; None where that never comes.
    """
    windows: dict[str, Any] = {}
    broken, few = [], []
    members = _members(experiment, scenario, requests)
    for name, (start_s, end_s) in experiment.windows(scenario).items():
        bounds: Bounds = getattr(experiment.hypothesis, name)
        values = figures(requests, members[name], start_s, end_s, scenario.slo)
        wrong = [_sentence(name, key, values[key], bound) for key, bound in bounds.given.items() if
                 _breaks(key, values[key], bound)]  # fmt: skip
        if bounds.given and values["requests"] < LEAST:
            few.append(f"{name}: {values['requests']} requests, {LEAST} are needed to judge; lengthen the window")
        broken += wrong
        windows[name] = {"from_s": start_s, "to_s": end_s, "bounds": bounds.given, "values": values, "broken": wrong}
    status = "inconclusive" if few else "broken" if broken else "passed"
    return {
        "windows": windows,
        "recovered_s": _recovered_s(experiment, requests, windows["before"]),
        "verdict": {"status": status, "reasons": [*few, *broken]},
    }


def _members(experiment: Experiment, scenario: Scenario, requests: pd.DataFrame) -> dict[str, pd.Series]:
    """Which requests each window is judged by: what is under way when a fault comes, is hit by it."""
    spans = experiment.windows(scenario)
    due_s, begins_s = requests["sched_s"], experiment.begins_s
    due = {name: (due_s >= start_s) & (due_s < end_s) for name, (start_s, end_s) in spans.items()}
    under_way = due["before"] & ~(requests["ended_s"] < begins_s)
    return {"before": due["before"] & ~under_way, "during": due["during"] | under_way, "after": due["after"]}


def figures(requests: pd.DataFrame, members: pd.Series, start_s: float, end_s: float, slo: Slo) -> dict[str, Any]:
    """What `Bounds` bounds, of those requests, and the queue in [start_s, end_s); None where there is nothing to take
    it of."""
    due = requests[members]
    ok = completed(due)
    left = ~ok & ((due["error"] == "client_gone") | (due["client_error"] == LEFT))
    asked = int((~left).sum())
    good = ok & (due["ttft_s"] <= slo.ttft_p90_s) & ~(due["tpot_s"] > slo.tpot_s * (1 + TPOT_TOLERANCE))
    ttft = due.loc[ok, "ttft_s"].to_numpy(dtype=np.float64)
    points = np.percentile(ttft, [50, 90, 99]).tolist() if ttft.size else [None] * 3
    return {
        "requests": len(due),
        "left": int(left.sum()),
        "goodput": int(good.sum()) / asked if asked else None,
        "errors": (asked - int(ok.sum())) / asked if asked else None,
        **dict(zip(("ttft_p50_s", "ttft_p90_s", "ttft_p99_s"), points, strict=True)),
        "queue": largest_queue(requests, start_s, end_s),
    }


def waiting(requests: pd.DataFrame) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(times, how many requests were without a first token from each of them on), model seconds, in order."""
    begun = requests["sched_s"].to_numpy(dtype=np.float64)
    over = requests["first_token_s"].fillna(requests["ended_s"]).fillna(math.inf).to_numpy(dtype=np.float64)
    times = np.concatenate([begun, over])
    steps = np.concatenate([np.ones(len(begun)), -np.ones(len(over))])
    order = np.lexsort((steps, times))
    return times[order], np.cumsum(steps[order]).astype(int)


def largest_queue(requests: pd.DataFrame, start_s: float, end_s: float) -> int:
    """Most requests without a first token at any time in [start_s, end_s)."""
    times, depth = waiting(requests)
    before = int(np.searchsorted(times, start_s, side="right"))
    inside = depth[before : int(np.searchsorted(times, end_s, side="left"))]
    at_start = int(depth[before - 1]) if before else 0
    return max(at_start, int(inside.max()) if inside.size else 0)


def _recovered_s(experiment: Experiment, requests: pd.DataFrame, before: dict[str, Any]) -> float | None:
    usual = before["values"]["queue"]
    times, depth = waiting(requests)
    healed_s = experiment.healed_s
    if depth[: int(np.searchsorted(times, healed_s, side="right"))][-1:] <= usual:
        return 0.0
    calm = np.flatnonzero((depth <= usual) & (times > healed_s) & np.isfinite(times))
    return float(times[calm[0]]) - healed_s if calm.size else None


def _breaks(key: str, value: float | None, bound: float) -> bool:
    if value is None:
        return True
    return value < bound if key in AT_LEAST else value > bound


def _sentence(window: str, key: str, value: float | None, bound: float) -> str:
    found = "nothing to take it of" if value is None else f"{value:.3g}"
    return f"{window}: {key} {found}, at {'least' if key in AT_LEAST else 'most'} {bound:g}"
