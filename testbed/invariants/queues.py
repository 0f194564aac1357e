"""Queues end: they drain after a burst and at the end, and nobody waits for ever."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

import numpy as np

from testbed.invariants.finding import Finding, Run, at_most, not_checked
from testbed.scenario import Scenario

Floats = np.ndarray[Any, np.dtype[np.float64]]

BURST: Final = 1.2
"""A phase is a burst when it offers so many times what the one before it does, and the next one less again."""


def drained(run: Run) -> Finding:
    """After a burst the number of requests that wait for their first token comes back to what it was in all but a
    hundredth of the time before, within `drain_s`; and after the last arrival nobody waits longer than that.

    A burst is a phase that offers 1.2 times as much as the one before it and is followed by one that offers less. When
    a request that was never admitted stopped waiting is not known: it does not count.
    value: the longest that it took, model seconds; bound: `bounds.drain_s` (300).
    """
    rows = run.requests.dropna(subset="admitted_s")
    arrived, admitted = (rows[name].to_numpy(np.float64) for name in ("arrive_s", "admitted_s"))
    if not admitted.size:
        return not_checked("drained", "no request was admitted")
    bound, means = run.bound("drain_s")
    took_s = max(0.0, float(admitted.max() - arrived.max()))
    words = f"{took_s:.3g} s after the last arrival nobody waited"
    times = np.concatenate((arrived, admitted))
    order = np.argsort(times, kind="stable")
    times = times[order]
    waiting = np.cumsum(np.concatenate((np.ones(len(arrived)), -np.ones(len(admitted))))[order])
    for name, start_s, end_s in bursts(run.scenario):
        before = waiting[(times >= run.scenario.workload.warmup_s) & (times < start_s)]
        if not before.size:
            continue
        calm = np.flatnonzero((times >= end_s) & (waiting <= np.quantile(before, 0.99)))
        drained_s = float(times[calm[0]] - end_s) if calm.size else 0.0  # nobody waited any more
        if drained_s > took_s:
            took_s, words = drained_s, f"{drained_s:.3g} s after phase {name} the queues were what they had been"
    return at_most("drained", took_s, bound, means, words)


def bursts(scenario: Scenario) -> list[tuple[str, float, float]]:
    """(name, start, end) of every phase that is a burst, model seconds."""
    phases, found = scenario.phases, []
    ends = list(accumulate(phase.duration_s for phase in phases))
    offered = [phase.workload(scenario.workload) for phase in phases]
    for i in range(1, len(phases) - 1):
        before, during, after = (
            one.rate_rps if offered[i].rate_rps is not None else one.load_fraction for one in offered[i - 1 : i + 2]
        )
        if before and during and after and during >= BURST * before and after < during:
            found.append((phases[i].name, ends[i - 1], ends[i]))
    return found


def not_starved(run: Run) -> Finding:
    """Nobody waits for ever: the longest time that a request spent between its arrival and its first token, but for its
    own prefill.

    value: model seconds; bound: `bounds.wait_s` (300).
    """
    rows = run.requests
    waited = (rows["admitted_s"] - rows["arrive_s"] - (rows["prefill_end_s"] - rows["prefill_start_s"])).to_numpy(
        np.float64
    )
    if np.isnan(waited).all():
        return not_checked("not_starved", "no request was admitted")
    at = int(np.nanargmax(waited))
    bound, means = run.bound("wait_s")
    words = f"the longest wait for a first token, of {rows['request_id'].iloc[at]}, was {waited[at]:.3g} s"
    return at_most("not_starved", float(waited[at]), bound, means, words)
