"""Shape a trace into a load: slice it, change its rate or clock, spread quantised stamps, cut it to rate and duration.

Every tool returns a new Trace with a note of what it did; rows it leaves out are counted in ``dropped``. Nothing is
random. ``concat`` joins traces one after another.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import orjson

from traces.load import JOINED, Trace
from traces.request import Request, TraceError
from traces.rows import Floats

OUTSIDE_SLICE = "outside the slice"
AFTER_LOAD = "after the load"


def arrivals_s(trace: Trace) -> Floats:
    """The arrivals as an array, in order."""
    return np.array([request.arrival_s for request in trace.requests], dtype=np.float64)


def rate_rps(trace: Trace) -> float | None:
    """Mean rate: (requests - 1) / (last arrival - first arrival). None for one request, or when all come at once."""
    span_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    return (len(trace.requests) - 1) / span_s if span_s > 0 else None


def slice_time(trace: Trace, start_s: float, duration_s: float) -> Trace:
    """The requests with start_s <= arrival < start_s + duration_s, their clock starting anew at start_s.

    A slice that reaches beyond the last request is short, and says so. Raises TraceError for start_s < 0, duration_s
    <= 0, or an empty slice.
    """
    if not (math.isfinite(start_s) and start_s >= 0):
        raise TraceError(f"{trace.source}: slice start_s = {start_s}: must be a finite number of seconds, 0 or more")
    _positive(trace, "slice duration_s", duration_s)
    times = arrivals_s(trace)
    keep = slice(*np.searchsorted(times, [start_s, start_s + duration_s], side="left").tolist())
    if keep.start == keep.stop:
        raise TraceError(
            f"{trace.source}: no request from {start_s:g} s to {start_s + duration_s:g} s; "
            f"its requests come from {times[0]:g} s to {times[-1]:g} s"
        )
    note = f"slice: {duration_s:g} s from {start_s:g} s on"
    if start_s + duration_s > times[-1] and keep.stop == len(times):
        note += f"; its last request comes {times[-1] - start_s:g} s into it"
    return _moved(trace, times[keep] - start_s, note, trace.requests[keep], OUTSIDE_SLICE)


def scale_time(trace: Trace, factor: float) -> Trace:
    """The whole clock stretched: every arrival times ``factor`` (2 lasts twice as long at half the rate).

    A Request has no other time; whoever also slows the served system by ``factor`` keeps the load the same. Raises
    TraceError unless the factor is above 0.
    """
    _positive(trace, "time factor", factor)
    return _moved(trace, arrivals_s(trace) * factor, f"time scaled by {factor:g}")


def scale_rate(trace: Trace, target_rps: float) -> Trace:
    """The mean rate (see ``rate_rps``) made ``target_rps``, by stretching time: no request is added or left out.

    The shape of the bursts stays (CV, order, shared prefixes), their length in seconds does not. Raises TraceError
    for a target not above 0, or a trace without a rate.
    """
    _positive(trace, "target rate", target_rps)
    rate = _rate(trace)
    note = f"rate scaled from {rate:.6g} to {target_rps:.6g} requests/s, by stretching time"
    return _moved(trace, arrivals_s(trace) * (rate / target_rps), note)


def with_arrivals(trace: Trace, arrivals: Literal["as_is", "spread"]) -> Trace:
    """Quantised stamps as they are, or spread.

    ``spread`` spaces the n requests of one stamp evenly up to the next stamp, the first on its stamp, in order
    (Mooncake's stamps are 3 s apart). The last stamp takes the median distance between stamps. Raises TraceError for
    another word, or for fewer than two stamps.
    """
    if arrivals == "as_is":
        return replace(trace, notes=[*trace.notes, "arrivals as is"])
    if arrivals != "spread":
        raise TraceError(f"{trace.source}: arrivals = {arrivals!r}: must be as_is or spread")
    times = arrivals_s(trace)
    stamps, stamp_of, count = np.unique(times, return_inverse=True, return_counts=True)
    if len(stamps) < 2:
        raise TraceError(
            f"{trace.source}: all {len(times)} requests have one stamp, there is no next to spread up to; use as_is"
        )
    distances = np.diff(stamps)
    end_s = np.append(stamps[1:], stamps[-1] + np.median(distances))
    place = np.arange(len(times)) - (np.cumsum(count) - count)[stamp_of]
    spread = stamps[stamp_of] + (end_s - stamps)[stamp_of] * place / count[stamp_of]
    note = f"arrivals spread: {len(times)} requests on {len(stamps)} stamps, each spaced evenly up to the next stamp"
    return _moved(trace, np.minimum(spread, end_s[stamp_of]), note)


def take_load(trace: Trace, target_rps: float, duration_s: float) -> Trace:
    """A load of exactly ``target_rps`` for ``duration_s``: the first round(target_rps x duration_s) requests,
    stretched to fill it.

    The rate is that of the rows taken, not of the whole trace, whose rate drifts: a load asked for at 0.8 Lambda_max
    is offered at 0.8. Arrivals lie in [0, duration_s); the first comes at 0; the period of the rows ends at the next
    stamp after them.
    Raises TraceError when the trace has too few rows (and says how long it lasts at that rate), or all of one stamp.
    """
    _positive(trace, "target rate", target_rps)
    _positive(trace, "duration_s", duration_s)
    needed = max(1, round(target_rps * duration_s))
    held = len(trace.requests)
    if needed > held:
        raise TraceError(
            f"{trace.source}: {duration_s:g} s at {target_rps:.6g} requests/s need {needed} requests, the trace has "
            f"{held} and lasts {held / target_rps:.6g} s at that rate; shorten duration_s, lower the "
            "rate, or take a longer trace"
        )
    times = arrivals_s(trace)
    taken = times[:needed] - times[0]
    later = times[times > times[needed - 1]]
    if len(later):
        period_s = float(later[0] - times[0])
    else:
        stamps = np.unique(taken)
        if len(stamps) < 2:
            raise TraceError(
                f"{trace.source}: all {held} requests have one stamp, so they have no rate; use a trace that lasts"
            )
        period_s = float(taken[-1]) * len(stamps) / (len(stamps) - 1)
    factor = duration_s / period_s
    note = (
        f"load: the first {needed} requests, {period_s:.6g} s of the trace, stretched by {factor:.6g} "
        f"to {duration_s:g} s at {needed / duration_s:.6g} requests/s"
    )
    inside = np.minimum(taken * factor, np.nextafter(duration_s, 0))
    return _moved(trace, inside, note, trace.requests[:needed], AFTER_LOAD)


def concat(parts: Sequence[tuple[float, Trace]]) -> Trace:
    """Traces one after another in time: (start_s, trace) each, a trace's own 0 at its start_s.

    Rows read and rows dropped are those of all parts. The identity is the sha256 of the starts and the parts' own
    identities. Parts of one source (equal sha256) keep what they share; block ids and session names of different
    sources are kept apart: an id says nothing outside its own file. Raises TraceError without parts, for a start that
    is negative or not finite, and when a part begins before the one before it has sent its last request.
    """
    if not parts:
        raise TraceError("concat: no parts; give at least one (start_s, trace)")
    last_s = 0.0
    for start_s, trace in parts:
        if not (math.isfinite(start_s) and start_s >= 0):
            raise TraceError(f"{trace.source}: part start_s = {start_s}: must be a finite number of seconds, 0 or more")
        if start_s < last_s:
            raise TraceError(
                f"{trace.source}: part start_s = {start_s:g}: the part before it ends with a request at {last_s:g} s; "
                "start later, or cut that part with a slice"
            )
        last_s = start_s + trace.requests[-1].arrival_s
    sources = list(dict.fromkeys(trace.sha256 for _, trace in parts))
    ids: dict[tuple[str, int], int] = {}
    requests = []
    for start_s, trace in parts:
        for request in trace.requests:
            moved = replace(request, arrival_s=start_s + request.arrival_s)
            if len(sources) > 1:
                moved = replace(
                    moved,
                    block_hashes=tuple(
                        ids.setdefault((trace.sha256, block), len(ids)) for block in request.block_hashes
                    ),
                    session=f"{sources.index(trace.sha256)}:{request.session}" if request.session else "",
                )
            requests.append(moved)
    dropped: Counter[str] = Counter()
    for _, trace in parts:
        dropped.update(trace.dropped)
    return Trace(
        requests,
        sum(trace.rows_read for _, trace in parts),
        dict(dropped),
        [
            f"part {number}, {len(trace.requests)} requests from {start_s:g} s on, {trace.source}: {note}"
            for number, (start_s, trace) in enumerate(parts, 1)
            for note in trace.notes or ["as it is"]
        ],
        " + ".join(dict.fromkeys(trace.source for _, trace in parts)),
        hashlib.sha256(orjson.dumps([[float(start_s), trace.sha256] for start_s, trace in parts])).hexdigest(),
        JOINED,
    )


def _rate(trace: Trace) -> float:
    rate = rate_rps(trace)
    if rate is None:
        raise TraceError(
            f"{trace.source}: all its requests have one stamp, so it has no rate to scale; use a trace that lasts"
        )
    return rate


def _positive(trace: Trace, name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise TraceError(f"{trace.source}: {name} = {value}: must be a finite number above 0")


def _moved(
    trace: Trace, times: Floats, note: str, requests: Sequence[Request] | None = None, reason: str = ""
) -> Trace:
    """The trace with new arrivals for ``requests`` (all, unless given); the others are counted under ``reason``."""
    kept = trace.requests if requests is None else requests
    dropped = dict(trace.dropped)
    left_out = len(trace.requests) - len(kept)
    if left_out:
        dropped[reason] = dropped.get(reason, 0) + left_out
    moved = [replace(request, arrival_s=time) for request, time in zip(kept, times.tolist(), strict=True)]
    return replace(trace, requests=moved, dropped=dropped, notes=[*trace.notes, note])
