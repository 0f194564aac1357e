"""Work conservation: no instance is idle while its own queue holds a request that it may start."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.invariants.finding import Finding, Run, at_most, not_checked
from testbed.scheduler.api import PRFAAS

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

ROUNDING_S: Final = 1e-6
IDLE_SHARE: Final = 1e-6
WIRE_IDLE_SHARE: Final = 0.01
"""Of the time in which instances worked. On the wire orders take time to arrive, and a few come late."""

_NUMBERS: Final = (
    "arrive_s",
    "route_s",
    "prefill_start_s",
    "prefill_end_s",
    "landed_s",
    "admitted_s",
    "finished_s",
    "kv_bytes",
    "output_tokens",
)


def work_conserved(run: Run) -> Finding:
    """A prefill node computes while a request waits there, and a decode node has no free slot while KV has landed that
    waits for one.

    A prefill may not start while its KV does not fit into the node's outbox; with a cache, while its prefix is being
    fetched, or while anything the node made has not landed (its transfer room may be taken). What a retried or failed
    request kept busy is not known: the time in which it may have done so is left out. On the wire an order has the
    meter's bound on lateness to arrive.

    value: seconds in which an instance was idle beside the request that it started next, over all the seconds in which
    instances worked; bound: rounding, on the wire 1 %.
    """
    if run.disturbed or run.scenario.backend != "timing":
        return not_checked("work", "who was frozen, slowed down or at work on a real model is not in the rows")
    work = _Work(run)
    idle_s = busy_s = worst_s = 0.0
    where = ""
    for column, idle_of in (("prefill_node", work.prefill), ("decode_node", work.decode)):
        for node, rows in _by_node(run.requests[column]).items():
            idle, busy = idle_of(rows)
            busy_s += busy
            idle_s += float(idle.sum())
            if idle.max() > worst_s:
                at = int(idle.argmax())
                worst_s = float(idle[at])
                where = f"{node} for {worst_s:.3g} s beside {run.requests['request_id'].iloc[int(rows[at])]!s}"
    if not busy_s:
        return not_checked("work", "no instance did anything")
    share, bound = idle_s / busy_s, WIRE_IDLE_SHARE if run.on_wire else IDLE_SHARE
    words = f"no instance was idle beside its own queue ({share:.2g} of the time in which they worked)"
    if share > bound:
        words = f"instances were idle beside their own queue for {share:.2%} of the time they worked: {where} at most"
    return at_most("work", share, bound, "invalid", words)


def idle_beside(ready_s: Floats, start_s: Floats, from_s: Floats, until_s: Floats, capacity: float) -> Floats:
    """Of each request, how long there was room for it while it waited, ready_s .. start_s: fewer than `capacity` of the
    spans from_s .. until_s. Shapes (n,), (n,), (m,), (m,); every start is among from_s."""
    times = np.concatenate((from_s, until_s))
    order = np.argsort(times, kind="stable")
    times = times[order]
    taken = np.cumsum(np.concatenate((np.ones(len(from_s)), -np.ones(len(until_s))))[order])
    free_s = np.concatenate(([0.0], np.cumsum(np.diff(times) * (taken[:-1] < capacity))))
    before_s = np.maximum(0.0, times[0] - ready_s)  # nothing was there yet
    idle: Floats = before_s + np.interp(start_s, times, free_s) - np.interp(ready_s, times, free_s)
    return idle


class _Work:
    """The stamps of a run as plain arrays, and who was idle when. Rows are given by their places in the table."""

    def __init__(self, run: Run) -> None:
        rows, link = run.requests, run.scenario.link
        self._of = {name: rows[name].to_numpy(np.float64) for name in _NUMBERS}
        self._away = (rows["prefill_site"] == PRFAAS).to_numpy()
        self._fetches = (rows["cache_node"] != "").to_numpy()
        self._again = np.flatnonzero((rows["attempts"] > 1).to_numpy())
        self._ok = (rows["status"] == "ok").to_numpy()
        self._cached = bool(run.scenario.cache_bytes)
        self._outbox_bytes = run.scenario.transport.outbox_bytes
        self._across_s = link.delay_s + link.jitter_s
        self._late_s = run.scenario.meter.late_p99_s * run.scenario.scale.time_scale if run.on_wire else 0.0
        self._profile = run.scenario.profile(run.scenario.deployments[0], "pd")
        self._steady_step = run.scenario.decode.step is None

    def prefill(self, rows: Indices) -> tuple[Floats, float]:
        """(idle seconds beside each of a node's requests, seconds in which it worked)."""
        route_s, start_s, end_s = (self._of[name][rows] for name in ("route_s", "prefill_start_s", "prefill_end_s"))
        idle, ran = np.zeros(len(rows)), np.flatnonzero(~np.isnan(end_s))
        if not ran.size:
            return idle, 0.0
        order = ran[np.argsort(start_s[ran], kind="stable")]
        ready_s = route_s + np.where(self._away[rows], self._across_s, 0.0) + self._late_s
        ready_s[order[1:]] = np.maximum(ready_s[order[1:]], start_s[order[:-1]])  # until then another one was next
        waited = ran[(start_s[ran] > ready_s[ran]) & ~self._disturbed(rows, route_s, start_s)[ran]]
        if self._cached:
            waited = waited[~self._fetches[rows[waited]]]
        idle[waited] = idle_beside(ready_s[waited], start_s[waited], start_s[ran], end_s[ran], 1)
        idle[idle < ROUNDING_S] = 0.0
        for at in np.flatnonzero(idle).tolist():  # few: most wait for nothing but the prefill before them
            if self._outbox_full(rows, start_s[at], self._of["kv_bytes"][rows[at]]):
                idle[at] = 0.0
        return idle, float((end_s - start_s)[ran].sum())

    def decode(self, rows: Indices) -> tuple[Floats, float]:
        """The same of a decode node's slots."""
        landed_s, admitted_s, finished_s = (self._of[name][rows] for name in ("landed_s", "admitted_s", "finished_s"))
        idle, ended = np.zeros(len(rows)), np.flatnonzero(~np.isnan(finished_s))
        if not ended.size or self._profile is None:
            return idle, 0.0
        tokens = self._of["output_tokens"][rows]
        step_s = np.where(
            tokens > 1, (finished_s - admitted_s) / np.maximum(1, tokens - 1), self._profile.decode_step_s
        )
        freed_s = finished_s + step_s  # a slot is held for one step after the last token
        slack_s = self._late_s + (0.0 if self._steady_step else float(np.nanmax(step_s)))  # a batch's step varies
        ready_s = landed_s + slack_s
        waited = ended[(admitted_s > ready_s)[ended] & ~self._disturbed(rows, landed_s, admitted_s)[ended]]
        idle[waited] = idle_beside(
            ready_s[waited], admitted_s[waited], admitted_s[ended], freed_s[ended], self._profile.decode_slots
        )
        idle[idle < ROUNDING_S] = 0.0
        return idle, float((freed_s - admitted_s)[ended].sum())

    def _outbox_full(self, rows: Indices, at_s: float, kv_bytes: float) -> bool:
        """Whether a prefill of so many bytes could not start just before `at_s`."""
        start_s, landed_s = self._of["prefill_start_s"][rows], self._of["landed_s"][rows]
        told_s = ROUNDING_S + self._across_s + self._late_s  # until its sender hears that something has landed
        used = float(self._of["kv_bytes"][rows][(start_s < at_s - ROUNDING_S) & ~(landed_s < at_s - told_s)].sum())
        return used > 0 and (self._cached or used + kv_bytes > self._outbox_bytes)

    def _disturbed(self, rows: Indices, from_s: Floats, until_s: Floats) -> Bools:
        """Which of the waits, from_s .. until_s, may have been beside an attempt that no row has any more: of a request
        that was tried again, who knows where, or of one that did not complete, here, who knows until when."""
        cut, arrive_s = rows[~self._ok[rows]], self._of["arrive_s"]
        starts = np.concatenate((arrive_s[self._again], arrive_s[cut]))
        ends = np.concatenate((self._of["route_s"][self._again] + self._late_s, np.full(len(cut), np.inf)))
        out = np.zeros(len(rows), dtype=np.bool_)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            out |= (from_s < end) & (until_s > start)
        return out


def _by_node(column: pd.Series) -> dict[str, Indices]:
    """The places of each node's rows."""
    codes, names = pd.factorize(column)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))
    parts = np.split(order, ends[:-1])
    return {str(name): part for name, part in zip(names, parts, strict=True) if name}
