"""A scheduler that is at rest when the world is: it does not change its mind all the time, and not in circles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np

from testbed.invariants.finding import Finding, Run, at_most, held, not_checked
from testbed.report.changes import Thresholds, thresholds
from testbed.report.rows import SCHEDULER_EVENTS

Floats = np.ndarray[Any, np.dtype[np.float64]]

THRESHOLD_WINDOW_S: Final = 60.0
ROLE_WINDOW_S: Final = 600.0

SAMPLE_S: Final = 5.0
SETTLES_S: Final = 60.0
"""After whatever changed about the world, a scheduler may look for its threshold so long."""
LEAST_SPAN_S: Final = 180.0
"""A shorter time at rest shows no circles: three of a minute."""
STILL: Final = 0.05
"""A threshold that moves by less than this share is still."""
LEAST_TURNS: Final = 4
WORLD: Final = ("link", "cross", "node", "joined", "policy")
"""The events of the timeline after which a scheduler has a reason to move."""


def threshold_changes(run: Run) -> Finding:
    """The most changes of the threshold in any 60 s. bound: `bounds.threshold_changes` (8)."""
    return _most(run, "threshold", "threshold_changes", THRESHOLD_WINDOW_S)


def role_changes(run: Run) -> Finding:
    """The most changes of roles in any 600 s. bound: `bounds.role_changes` (3)."""
    return _most(run, "role", "role_changes", ROLE_WINDOW_S)


def _most(run: Run, kind: str, name: str, window_s: float) -> Finding:
    times = np.sort(run.timeline.loc[run.timeline["event"] == kind, "t_s"].to_numpy(np.float64))
    within = np.searchsorted(times, times + window_s, "left") - np.arange(len(times))
    value = float(within.max()) if times.size else 0.0
    bound, means = run.bound(name)
    at = "" if not times.size else f", from {times[int(within.argmax())]:.6g} s on"
    return at_most(name, value, bound, means, f"at most {value:g} {kind} changes in {window_s:g} s{at}")


def no_cycle(run: Run) -> Finding:
    """The threshold does not go in circles while nothing about the world changes.

    The world is at rest between two changes of the link, of what competes on it, of the nodes, of the policy, and of
    what is offered (a phase; a ramp is never at rest), a minute after each, for three minutes or more. There ln t is
    sampled every 5 s. Where it turns round by more than 5 % less than four times (two periods), it is no cycle: a
    threshold that looks for its place goes one way, or overshoots. Else its autocorrelation r(k), over n - k pairs,
    falls from 1 at k = 0; the value is its highest point after its first zero, up to a third of the time: a cycle comes
    back at its period, noise does not.

    bound: `bounds.cycle` (0.5).
    """
    events = run.timeline[run.timeline["event"].isin(SCHEDULER_EVENTS)]
    moves = events[events["event"] == "threshold"]
    bound, means = run.bound("cycle")
    if moves.empty:
        return held("no_cycle", "the threshold never moved", 0.0, bound)
    over_time = thresholds(
        [
            {"kind": "threshold", "t_s": at_s, "before": _tokens(was), "after": _tokens(now)}
            for at_s, was, now in zip(moves["t_s"], moves["before"], moves["after"], strict=True)
        ],
        None,
    )
    assert over_time is not None
    worst, words = 0.0, "the threshold did not go in circles"
    spans = at_rest(run)
    for start_s, end_s in spans:
        value = recurrence(_sampled(over_time, start_s, end_s))
        if value > worst:
            worst = value
            words = f"the threshold's autocorrelation comes back to {value:.2f} in {start_s:.6g} .. {end_s:.6g} s"
    if not spans:
        return not_checked("no_cycle", f"nothing was at rest for {LEAST_SPAN_S:g} s")
    return at_most("no_cycle", worst, bound, means, words)


def at_rest(run: Run) -> list[tuple[float, float]]:
    """The spans of model time in which nothing about the world changed, each from a minute after its last change."""
    timeline, scenario = run.timeline, run.scenario
    cuts = [0.0, float(scenario.workload.duration_s)]
    cuts += timeline.loc[timeline["event"].isin(WORLD), "t_s"].astype(float).tolist()
    ramps, at_s = [], 0.0
    for phase in scenario.phases:
        if phase.ramp:
            ramps.append((at_s, at_s + phase.duration_s))
        at_s += phase.duration_s
        cuts.append(at_s)
    edges = sorted({cut for cut in cuts if 0 <= cut <= scenario.workload.duration_s})
    spans = [(start + SETTLES_S, end) for start, end in pairwise(edges)]
    return [
        (start, end)
        for start, end in spans
        if end - start >= LEAST_SPAN_S and not any(low < end and start < high for low, high in ramps)
    ]


def recurrence(values: Floats) -> float:
    """How much a series comes back: the highest autocorrelation after its first zero, up to a third of it; 0 when it
    hardly turns round. values: ln t, evenly sampled, shape (n,)."""
    n = len(values)
    if n < 9 or turns(values) < LEAST_TURNS:
        return 0.0
    left = values - values.mean()
    power = float(left @ left) / n
    r = np.array([float(left[: n - k] @ left[k:]) / (n - k) / power for k in range(n // 3 + 1)])
    below = np.flatnonzero(r <= 0)
    return float(np.clip(r[below[0] :].max(), 0.0, 1.0)) if below.size else 0.0


def turns(values: Floats) -> int:
    """How often a series turns round by more than STILL."""
    count, way, low, high = 0, 0, values[0], values[0]
    for value in values.tolist():
        low, high = min(low, value), max(high, value)
        if way <= 0 and value > low + STILL:
            count, way, high = count + (way < 0), 1, value
        elif way >= 0 and value < high - STILL:
            count, way, low = count + (way > 0), -1, value
    return count


def _sampled(over_time: Thresholds, start_s: float, end_s: float) -> Floats:
    """ln t every SAMPLE_S; an infinite threshold counts as 2^20 tokens, one of 0 as 1."""
    times = np.arange(start_s, end_s, SAMPLE_S)
    starts = np.array(over_time.starts_s)
    at = np.array(over_time.values)[np.searchsorted(starts, times, "right") - 1]
    logs: Floats = np.log(np.clip(at, 1.0, 2.0**20))
    return logs


def _tokens(value: Any) -> float | None:
    """Of a timeline's cell: an infinite threshold may be empty there."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None
