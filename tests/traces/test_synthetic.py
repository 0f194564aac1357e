"""Synthetic workloads have the distributions that they state, and are repeatable from their parameters."""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.info import describe
from traces.request import TraceError
from traces.sessions import Sessions
from traces.synthetic import DiscreteLengths, LogNormalLengths, Synthetic

PAPER = Synthetic(rate_rps=3.24, duration_s=600)
TOY = DiscreteLengths((1024, 32768), (1, 1))


SWITCHED = ((0.5, 20.0), (4.0, 5.0))
NEEDED: dict[str, dict[str, Any]] = {
    "poisson": {},
    "gamma": {"cv": 1.5},
    "uniform": {},
    "mmpp": {"states": SWITCHED},
    "diurnal": {"period_s": 60.0, "amplitude": 0.5},
}
"""What each kind of arrivals needs besides."""


def middles(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return (np.arange(count) + 0.5) / count


def test_the_papers_lengths() -> None:
    tokens = LogNormalLengths().quantile(middles(200_000))
    assert tokens.mean() == pytest.approx(27_486, rel=1e-3)
    assert (tokens > 19_400).mean() == pytest.approx(0.4957, abs=1e-4)
    assert tokens[tokens > 19_400].mean() == pytest.approx(44 * 1024, rel=2e-3)
    assert np.percentile(tokens, 90) == pytest.approx(62_400, rel=1e-3)


def test_the_quantile_inverts_the_truncated_cdf_exactly() -> None:
    lengths = LogNormalLengths(7.0, 0.5, 800, 2000)
    normal = NormalDist(7.0, 0.5)
    low, high = normal.cdf(log(800)), normal.cdf(log(2000))
    for share in (0.001, 0.25, 0.5, 0.999):
        tokens = float(lengths.quantile(np.array([share]))[0])
        assert (normal.cdf(log(tokens)) - low) / (high - low) == pytest.approx(share, abs=1e-9)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(6, 11), st.floats(0.3, 3))
def test_lengths_stay_in_their_bounds(share: float, mu: float, sigma: float) -> None:
    assert 128 <= LogNormalLengths(mu, sigma).quantile(np.array([share]))[0] <= 131072


def test_a_discrete_mix_has_its_values_and_weights() -> None:
    tokens = [r.input_tokens for r in Synthetic(10, 2000, TOY, seed=1).generate().requests]
    assert set(tokens) == {1024, 32768}
    assert np.mean(np.array(tokens) == 1024) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 2.0), ("uniform", 0.0)])
def test_arrivals_have_their_rate_and_their_burstiness(arrivals: Any, cv: float) -> None:
    spec = Synthetic(10, 5000, TOY, arrivals=arrivals, cv=cv if arrivals == "gamma" else None, seed=3)
    figures = describe(spec.generate())
    assert figures["kept"] == pytest.approx(50_000, rel=0.03)
    assert figures["interarrival_cv"] == pytest.approx(cv, rel=0.03, abs=1e-6)
    assert figures["dispersion"]["60s"] == pytest.approx(cv**2, rel=0.35, abs=0.1)


def test_an_identity_is_the_same_in_every_version() -> None:
    """Results are compared by it: a new kind of workload changes none of those that there were."""
    assert PAPER.identity() == "1f3636ab1bf64ade040fb4e37a155cf884d733cf4a8792db7155adb0c180ef6e"
    bursty = Synthetic(10, 2000, TOY, (1, 5), "gamma", 2.0, 7)
    assert bursty.identity() == "fc905f080610083237742219986178c77b2b2db8f2999052e72aee72d940326c"


def test_uniform_arrivals_are_evenly_spaced_from_zero() -> None:
    assert [r.arrival_s for r in Synthetic(2, 2, TOY, arrivals="uniform").generate().requests] == [0, 0.5, 1, 1.5]


@settings(deadline=None)
@given(st.floats(5, 50), st.floats(5, 20), st.integers(0, 2**31), st.sampled_from(sorted(NEEDED)))
def test_arrivals_lie_in_the_duration_and_are_sorted(rate: float, duration: float, seed: int, arrivals: Any) -> None:
    trace = Synthetic(rate, duration, TOY, (3, 5), arrivals, seed=seed, **NEEDED[arrivals]).generate()
    times = [request.arrival_s for request in trace.requests]
    assert times == sorted(times)
    assert all(0 <= time < duration for time in times)
    assert all(3 <= request.output_tokens <= 5 for request in trace.requests)
    assert trace.rows_read == len(trace.requests)


def test_equal_parameters_give_equal_requests_and_seeds_differ() -> None:
    assert PAPER.generate().requests == PAPER.generate().requests
    assert PAPER.generate().requests != replace(PAPER, seed=1).generate().requests


def test_global_random_state_is_neither_read_nor_changed() -> None:
    np.random.seed(1)
    first = PAPER.generate().requests
    assert np.random.random() == np.random.RandomState(1).random()
    np.random.seed(2)
    assert PAPER.generate().requests == first


def test_the_lengths_do_not_depend_on_the_arrivals() -> None:
    slow, fast = PAPER.generate().requests, replace(PAPER, rate_rps=6.0, arrivals="gamma", cv=2.0).generate().requests
    shared = min(len(slow), len(fast))
    assert [r.input_tokens for r in slow[:shared]] == [r.input_tokens for r in fast[:shared]]


def test_the_identity_is_that_of_the_parameters() -> None:
    assert PAPER.generate().sha256 == PAPER.identity()
    assert replace(PAPER, duration_s=600.0, output_tokens=(1024, 1024)).identity() == PAPER.identity()
    assert replace(PAPER, lengths=TOY).identity() == replace(PAPER, lengths=replace(TOY, weights=(0.5, 0.5))).identity()


@pytest.mark.parametrize(
    "change",
    [
        {"rate_rps": 3.25},
        {"duration_s": 601},
        {"output_tokens": 1025},
        {"output_tokens": (1, 1024)},
        {"arrivals": "uniform"},
        {"arrivals": "gamma", "cv": 1.0},
        {"arrivals": "mmpp", "states": SWITCHED},
        {"arrivals": "diurnal", "period_s": 60, "amplitude": 0.5},
        {"sessions": Sessions(2, 10), "lengths": TOY},
        {"seed": 1},
        {"lengths": LogNormalLengths(mu=9.91)},
        {"lengths": LogNormalLengths(high_tokens=131071)},
        {"lengths": TOY},
    ],
)
def test_every_parameter_enters_the_identity(change: dict[str, Any]) -> None:
    assert replace(PAPER, **change).identity() != PAPER.identity()


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"arrivals": "mmpp", "states": SWITCHED}, {"arrivals": "mmpp", "states": ((0.5, 20.0), (4.0, 6.0))}),
        ({"arrivals": "mmpp", "states": SWITCHED}, {"arrivals": "mmpp", "states": ((0.6, 20.0), (4.0, 5.0))}),
        (
            {"arrivals": "diurnal", "period_s": 60, "amplitude": 0.5},
            {"arrivals": "diurnal", "period_s": 61, "amplitude": 0.5},
        ),
        (
            {"arrivals": "diurnal", "period_s": 60, "amplitude": 0.5},
            {"arrivals": "diurnal", "period_s": 60, "amplitude": 0.6},
        ),
        *(
            ({"sessions": Sessions(2, 10), "lengths": TOY}, {"sessions": Sessions(**shape), "lengths": TOY})
            for shape in (
                {"turns_mean": 3, "think_s": 10},
                {"turns_mean": 2, "think_s": 11},
                {"turns_mean": 2, "think_s": 10, "turns_max": 9},
                {"turns_mean": 2, "think_s": 10, "system_tokens": 9},
                {"turns_mean": 2, "think_s": 10, "max_input_tokens": 50_000},
                {"turns_mean": 2, "think_s": 10, "block_size": 16},
            )
        ),
    ],
)
def test_every_parameter_of_a_kind_enters_the_identity(first: dict[str, Any], other: dict[str, Any]) -> None:
    assert replace(PAPER, **first).identity() != replace(PAPER, **other).identity()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate_rps": 0}, "rate_rps = 0"),
        ({"rate_rps": float("nan")}, "rate_rps = nan"),
        ({"duration_s": -1}, "duration_s = -1"),
        ({"rate_rps": 1e9}, "more than 20,000,000 requests"),
        ({"arrivals": "bursty"}, "arrivals = 'bursty'"),
        ({"arrivals": "gamma"}, "cv = None"),
        ({"arrivals": "gamma", "cv": 0.0}, "for 0 use uniform"),
        ({"cv": 2.0}, "cv = 2.0 with poisson"),
        ({"arrivals": "mmpp"}, "states = []: mmpp arrivals need at least two"),
        ({"arrivals": "mmpp", "states": ((1, 9),)}, "for one use poisson"),
        ({"arrivals": "mmpp", "states": ((1, 9), (-1, 9))}, "state (-1, 9): the rate multiplier must be 0 or more"),
        ({"arrivals": "mmpp", "states": ((1, 9), (2, 0))}, "state (2, 0)"),
        ({"arrivals": "mmpp", "states": ((1, 9), (float("nan"), 9))}, "state (nan, 9)"),
        ({"arrivals": "mmpp", "states": ((0, 9), (0, 9))}, "every state of the mmpp has rate multiplier 0"),
        ({"arrivals": "mmpp", "states": ((1, 1e-7), (0, 1e-7))}, "switch more than 20,000,000 times"),
        ({"states": SWITCHED}, "with poisson arrivals: leave it out, or use mmpp"),
        ({"arrivals": "diurnal", "amplitude": 0.5}, "period_s = None: diurnal arrivals need"),
        ({"arrivals": "diurnal", "period_s": 0, "amplitude": 0.5}, "period_s = 0"),
        ({"arrivals": "diurnal", "period_s": 60}, "amplitude = None: diurnal arrivals need"),
        ({"arrivals": "diurnal", "period_s": 60, "amplitude": 1.5}, "amplitude = 1.5"),
        ({"arrivals": "diurnal", "period_s": 60, "amplitude": float("nan")}, "amplitude = nan"),
        ({"amplitude": 0.0}, "amplitude = 0.0 with poisson arrivals: leave it out, or use diurnal"),
        ({"sessions": Sessions(2, 10, system_tokens=1)}, "system_tokens = 1 and up to 131072 user tokens a turn"),
        ({"sessions": Sessions(2, 1e7), "lengths": TOY}, "s of conversations before it) is more than 20,000,000"),
        ({"output_tokens": 0}, "output_tokens = 0"),
        ({"output_tokens": (5, 4)}, "low <= high"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_parameters_without_a_meaning_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError) as refusal:
        replace(PAPER, **change)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (lambda: LogNormalLengths(sigma=0), "sigma = 0"),
        (lambda: LogNormalLengths(mu=float("inf")), "mu = inf"),
        (lambda: LogNormalLengths(low_tokens=0), "low_tokens = 0"),
        (lambda: LogNormalLengths(low_tokens=9, high_tokens=9), "low < high"),
        (lambda: LogNormalLengths(mu=100), "widen the bounds"),
        (lambda: DiscreteLengths((), ()), "one or more"),
        (lambda: DiscreteLengths((0,), (1,)), "at least 1 token"),
        (lambda: DiscreteLengths((1, 2), (1,)), "1 weights for 2 values"),
        (lambda: DiscreteLengths((1, 2), (0, 0)), "not all 0"),
        (lambda: DiscreteLengths((1, 2), (2, -1)), "not all 0"),
    ],
)
def test_lengths_without_a_meaning_are_refused(lengths: Any, said: str) -> None:
    with pytest.raises(TraceError, match="lengths: ") as refusal:
        lengths()
    assert said in str(refusal.value)


def test_a_workload_without_a_request_is_refused() -> None:
    with pytest.raises(TraceError, match=r"no arrival in 0\.001 s"):
        Synthetic(1, 0.001, TOY).generate()
