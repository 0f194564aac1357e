"""The figures of a load phase by phase, beside the closed form's, and how its scheduler did against the optimum.

A request belongs to the phase in which it was scheduled. What was scheduled before the end of the warm-up counts in no
phase; a threshold is judged from the phase's start all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from testbed.report.changes import (
    REACTION_S,
    Change,
    Target,
    Thresholds,
    count,
    mean_ratio,
    near_fraction,
    settle_s,
    thresholds,
)
from testbed.report.window import Targets, completed, window_figures

_NOT_OF_A_PHASE = ("tpot_s", "e2e_s", "slo", "ttft_by_route_s")


def scheduler_figures(
    changes: Sequence[Change], present: float | None, optima: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What the scheduler did over the whole load, against the optimum of each of its phases in its time.

    present: its threshold in the end. optima: as `testbed.closed_form.optima`. changes_per_minute: of the threshold, a
    model minute, from when it had settled to the load's end; None when it never did.
    """
    over_time, targets = thresholds(changes, present), [_target(one) for one in optima]
    settled_s, end_s = settle_s(over_time, targets), targets[-1].end_s
    later = None if settled_s is None else count(changes, "threshold", targets[0].start_s + settled_s, end_s)
    return {
        "threshold_tokens": present,
        "threshold_changes": count(changes, "threshold"),
        "role_changes": count(changes, "role"),
        "recalled": count(changes, "recall"),
        "replicated_bytes": sum(one["after"] for one in changes if one["kind"] == "replicated"),
        "settle_s": settled_s,
        "changes_per_minute": None if settled_s is None or later is None else later / (end_s - settled_s) * 60,
        "threshold_over_optimum": _over(present, targets[-1].threshold_tokens),
    }


def phase_figures(
    requests: pd.DataFrame,
    changes: Sequence[Change],
    present: float | None,
    optima: Sequence[dict[str, Any]],
    *,
    warmup_s: float,
    slo: Targets,
) -> list[dict[str, Any]]:
    """One dict a phase, in order; none for a scenario without phases. For the parameters see `scheduler_figures`."""
    over_time = thresholds(changes, present)
    return [_of_phase(requests, changes, over_time, one, warmup_s, slo) for one in optima if one["name"] is not None]


def _of_phase(
    requests: pd.DataFrame,
    changes: Sequence[Change],
    over_time: Thresholds | None,
    optimum: dict[str, Any],
    warmup_s: float,
    slo: Targets,
) -> dict[str, Any]:
    target = _target(optimum)
    start_s, end_s = max(target.start_s, warmup_s), target.end_s
    scheduled = requests[(requests["sched_s"] >= start_s) & (requests["sched_s"] < end_s)]
    ok = int(completed(scheduled).sum())
    figures = window_figures(requests, start_s, max(start_s, end_s), slo)
    at_start, at_end = (_finite(over_time, at_s) for at_s in (target.start_s, math.nextafter(end_s, -math.inf)))
    return {
        "name": optimum["name"],
        "start_s": target.start_s,
        "end_s": end_s,
        "requests": {"scheduled": len(scheduled), "completed": ok, "failed": len(scheduled) - ok},
        **{key: value for key, value in figures.items() if key not in _NOT_OF_A_PHASE},
        "threshold_tokens": {"start": at_start, "end": at_end},
        "threshold_over_optimum": {
            "mean": mean_ratio(over_time, target),
            "end": _over(at_end, target.threshold_tokens),
            "near_fraction": near_fraction(over_time, target),
            "near_fraction_later": near_fraction(over_time, replace(target, start_s=target.start_s + REACTION_S)),
        },
        "settle_s": settle_s(over_time, [target]),
        "threshold_changes": count(changes, "threshold", target.start_s, end_s),
        "role_changes": count(changes, "role", target.start_s, end_s),
        "closed_form": {key: value for key, value in optimum.items() if key not in ("name", "start_s", "end_s")},
    }


def _target(optimum: dict[str, Any]) -> Target:
    return Target(optimum["start_s"], optimum["end_s"], optimum["threshold_tokens"])


def _finite(over_time: Thresholds | None, at_s: float) -> float | None:
    value = None if over_time is None else over_time.at(at_s)
    return value if value is not None and math.isfinite(value) else None


def _over(value: float | None, optimum: float | None) -> float | None:
    return value / optimum if value is not None and math.isfinite(value) and optimum else None
