"""When requests come: arrival processes of a given mean rate, drawn from a random stream of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from traces.request import TraceError
from traces.rows import Floats

KINDS = ("poisson", "gamma", "uniform", "mmpp", "diurnal")

States = tuple[tuple[float, float], ...]
"""Of an MMPP: (rate multiplier, mean sojourn in s) each, entered in turn, the first again after the last."""


def check_states(states: States) -> None:
    """Raises TraceError unless there are two or more, multipliers >= 0 and not all 0, sojourns > 0."""
    if len(states) < 2:
        raise TraceError(
            f"synthetic: states = {list(states)}: mmpp arrivals need at least two (rate multiplier, mean sojourn s); "
            "for one use poisson"
        )
    for multiplier, sojourn_s in states:
        if not (math.isfinite(multiplier) and multiplier >= 0 and math.isfinite(sojourn_s) and sojourn_s > 0):
            raise TraceError(
                f"synthetic: state ({multiplier}, {sojourn_s}): the rate multiplier must be 0 or more, the mean "
                "sojourn above 0 s, both finite"
            )
    if not any(multiplier for multiplier, _ in states):
        raise TraceError("synthetic: every state of the mmpp has rate multiplier 0; give one above 0")


def check_wave(period_s: float | None, amplitude: float | None) -> None:
    """Raises TraceError unless period_s > 0 and 0 <= amplitude <= 1."""
    if period_s is None or not (math.isfinite(period_s) and period_s > 0):
        raise TraceError(f"synthetic: period_s = {period_s}: diurnal arrivals need a finite period above 0 s")
    if amplitude is None or not 0 <= amplitude <= 1:
        raise TraceError(
            f"synthetic: amplitude = {amplitude}: diurnal arrivals need one from 0 (steady) to 1 (down to no arrivals)"
        )


def uniform(rate_rps: float, length_s: float) -> Floats:
    """One every 1/rate_rps s from 0 on."""
    times = np.arange(math.ceil(rate_rps * length_s) + 1) / rate_rps
    return np.asarray(times[times < length_s], dtype=np.float64)


def poisson(rng: np.random.Generator, rate_rps: float, length_s: float) -> Floats:
    """Independent exponential gaps, the first one whole: as if a request had come at 0. Times in [0, length_s)."""
    return _renewal(lambda count: rng.exponential(1 / rate_rps, count), rate_rps, length_s)


def gamma(rng: np.random.Generator, rate_rps: float, length_s: float, cv: float) -> Floats:
    """Independent gamma gaps with coefficient of variation cv, the first one whole. Times in [0, length_s)."""
    return _renewal(lambda count: rng.gamma(1 / cv**2, cv**2 / rate_rps, count), rate_rps, length_s)


def mmpp(rng: np.random.Generator, rate_rps: float, length_s: float, states: States) -> Floats:
    """A Markov-modulated Poisson process in [0, length_s): Poisson, at a rate that a Markov chain switches.

    The chain stays in a state for an exponential time of its mean sojourn, then enters the next of the list. It starts
    in its stationary distribution, in which a state's share of time is that of its sojourn, and the multipliers are
    divided by their mean over time: the mean rate is rate_rps, exactly, in expectation, from 0 on. Arrivals are a
    Poisson process of rate 1, read through the inverse of the integrated rate.
    """
    multipliers, sojourns_s = np.array(states, dtype=np.float64).T
    shares = sojourns_s / sojourns_s.sum()
    rates = rate_rps * multipliers / float(multipliers @ shares)
    state = int(rng.choice(len(states), p=shares))
    spans_s: list[Floats] = []
    span_rates: list[Floats] = []
    covered_s = 0.0
    while covered_s < length_s:
        rounds = max(1, math.ceil((length_s - covered_s) / float(sojourns_s.sum())))
        order = np.tile(np.roll(np.arange(len(states)), -state), rounds)  # whole rounds: the next begins there again
        spans_s.append(rng.exponential(sojourns_s[order]))
        span_rates.append(rates[order])
        covered_s += float(spans_s[-1].sum())
    spans, per_span = np.concatenate(spans_s), np.concatenate(span_rates)
    ends_s = np.concatenate([[0.0], np.cumsum(spans)])
    expected = np.concatenate([[0.0], np.cumsum(spans * per_span)])
    if expected[-1] == 0:
        return np.empty(0)
    times = np.interp(poisson(rng, 1.0, float(expected[-1])), expected, ends_s)
    return np.asarray(times[times < length_s], dtype=np.float64)


def diurnal(
    rng: np.random.Generator, rate_rps: float, length_s: float, period_s: float, amplitude: float, start_s: float = 0.0
) -> Floats:
    """A Poisson process in [0, length_s) of rate rate_rps (1 + amplitude sin(2 pi (t + start_s) / period_s)).

    The mean rate is rate_rps over whole periods. By thinning: candidates at the highest rate are kept with the
    probability that the rate at their time is of it.
    """
    highest = rate_rps * (1 + amplitude)
    times = poisson(rng, highest, length_s)
    rates = rate_rps * (1 + amplitude * np.sin(2 * np.pi * (times + start_s) / period_s))
    return times[rng.random(len(times)) * highest < rates]


def _renewal(gaps: Callable[[int], Floats], rate_rps: float, length_s: float) -> Floats:
    count = math.ceil(rate_rps * length_s) + 64
    chunks: list[Floats] = []
    now_s = 0.0
    while now_s < length_s:
        chunks.append(now_s + np.cumsum(gaps(count)))
        now_s = float(chunks[-1][-1])
    times = np.concatenate(chunks)
    return np.asarray(times[times < length_s], dtype=np.float64)
