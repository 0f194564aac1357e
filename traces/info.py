"""What a trace is, in figures: rows, rate, burstiness at several time scales, lengths, and how much of it a perfect
cache would hit.

Burstiness is the index of dispersion of counts beside the CV of the gaps: a CV sees one gap at a time and misses slow
swings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.load import Trace
from traces.request import Request
from traces.rows import Floats
from traces.tools import arrivals_s, rate_rps

WINDOWS_S = (1, 10, 60)


def describe(trace: Trace) -> dict[str, Any]:
    """The figures of a trace, as plain values for JSON; None where a figure is not defined.

    Keys: source, format, sha256 (of the file), rows_sha256 (of the requests as they are now), rows_read, kept,
    dropped {reason: rows}, duration_s (first to last arrival), rate_rps, stamps (distinct arrivals), interarrival_cv,
    dispersion {"1s", "10s", "60s"}, input_tokens and output_tokens {mean, p50, p90, p99, min, max}, sessions
    (distinct names), prefix {block_size, blocks, distinct_blocks, hit_ratio} or None without hashes, notes.
    """
    requests, times = trace.requests, arrivals_s(trace)
    return {
        "source": trace.source,
        "format": trace.format,
        "sha256": trace.sha256,
        "rows_sha256": trace.rows_sha256,
        "rows_read": trace.rows_read,
        "kept": len(requests),
        "dropped": dict(trace.dropped),
        "duration_s": float(times[-1] - times[0]),
        "rate_rps": rate_rps(trace),
        "stamps": len(np.unique(times)),
        "interarrival_cv": interarrival_cv(times),
        "dispersion": {f"{window_s}s": dispersion(times, window_s) for window_s in WINDOWS_S},
        "input_tokens": _percentiles([request.input_tokens for request in requests]),
        "output_tokens": _percentiles([request.output_tokens for request in requests]),
        "sessions": len({request.session for request in requests if request.session}),
        "prefix": prefix(requests),
        "notes": list(trace.notes),
    }


def interarrival_cv(times: Floats) -> float | None:
    """Standard deviation / mean of the gaps between arrivals (Poisson: 1). None below 2 gaps or without a span."""
    gaps = np.diff(times)
    if len(gaps) < 2 or gaps.sum() == 0:
        return None
    return float(gaps.std() / gaps.mean())


def dispersion(times: Floats, window_s: float) -> float | None:
    """Variance / mean of the arrivals counted in whole windows of ``window_s`` from the first arrival on (Poisson: 1).

    None when fewer than two whole windows fit.
    """
    from_first = times - times[0]
    windows = int(from_first[-1] // window_s)
    if windows < 2:
        return None
    index = (from_first // window_s).astype(np.int64)
    counts: npt.NDArray[np.int64] = np.bincount(index[index < windows], minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())


def prefix(requests: Iterable[Request]) -> dict[str, Any] | None:
    """Blocks that an unlimited cache, warm with every earlier request, would have held: the leading run of known
    blocks, summed.

    Ids of different block sizes never match. None when no request has hashes; requests without hashes are not counted.
    """
    known: dict[int, set[int]] = {}
    hits = blocks = 0
    for request in requests:
        if not request.block_hashes:
            continue
        seen = known.setdefault(request.block_size, set())
        blocks += len(request.block_hashes)
        for block in request.block_hashes:
            if block not in seen:
                break
            hits += 1
        seen.update(request.block_hashes)
    if not blocks:
        return None
    sizes = sorted(known)
    return {
        "block_size": sizes[0] if len(sizes) == 1 else sizes,
        "blocks": blocks,
        "distinct_blocks": sum(map(len, known.values())),
        "hit_ratio": hits / blocks,
    }


def _percentiles(tokens: list[int]) -> dict[str, float]:
    values = np.array(tokens, dtype=np.float64)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {
        "mean": float(values.mean()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "min": float(values.min()),
        "max": float(values.max()),
    }
