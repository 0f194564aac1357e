"""Means over replications and their 95 % intervals (Student's t), and the figures of a run that are worth one.

Requests of one run are correlated, so its own spread says nothing: an interval is over runs that differ in their seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

CONFIDENCE: Final = 0.95

Interval = dict[str, float | None]


def interval(values: Sequence[float | None]) -> Interval:
    """mean, low, high of one figure over independent runs; the interval holds the true mean with 95 % confidence.

    mean +- t(0.975, n - 1) s / sqrt(n). None counts as missing; low and high are None below two values, all of them
    without any.
    """
    given = np.array([value for value in values if value is not None], dtype=np.float64)
    if given.size == 0:
        return {"mean": None, "low": None, "high": None}
    mean = float(given.mean())
    if given.size == 1:
        return {"mean": mean, "low": None, "high": None}
    half = student_t(given.size - 1) * float(given.std(ddof=1)) / math.sqrt(given.size)
    return {"mean": mean, "low": mean - half, "high": mean + half}


@cache
def student_t(df: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence for Student's t of `df` >= 1 degrees of freedom.

    The probability is Abramowitz and Stegun 26.7.3 and 26.7.4 (exact finite sums), inverted by bisection on
    theta = atan(t / sqrt(df)).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _within(theta, df) < confidence else (low, theta)
    return math.tan(low) * math.sqrt(df)


def _within(theta: float, df: int) -> float:
    cos, sin = math.cos(theta), math.sin(theta)
    odd = df % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, df, 2):
        total += term
        term *= k / (k + 1) * cos * cos
    return 2 / math.pi * (theta + sin * total) if odd else sin * total


def main_figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a summary that repeats are averaged over: seconds, req/s, bits/s and shares."""
    ttft = {f"ttft_{key}_s": summary["ttft_s"][key] for key in ("mean", "p50", "p90", "p99")}
    waits = {f"egress_queue_{key}_s": summary["egress_queue_s"][key] for key in ("mean", "p90")}
    plain = ("offered_rps", "throughput_rps", "goodput_rps", "offload_fraction", "egress_bps")
    return {
        **ttft,
        "tpot_p90_s": summary["tpot_s"]["p90"],
        "e2e_mean_s": summary["e2e_s"]["mean"],
        **waits,
        **{key: summary[key] for key in plain},
        "slo_met_fraction": summary["slo"]["met_fraction"],
    }


def over_runs(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Interval]:
    """The interval of every figure over runs: `runs` holds one `main_figures` a run."""
    return {key: interval([run[key] for run in runs]) for key in runs[0]}


def repeated(
    seeds: Sequence[int], verdicts: Sequence[str], runs: Sequence[Mapping[str, float | None]]
) -> dict[str, Any]:
    """What runs under several seeds come to. A run that is not valid is named by its verdict, and counts."""
    return {"n": len(runs), "seeds": list(seeds), "verdicts": list(verdicts), "figures": over_runs(runs)}
