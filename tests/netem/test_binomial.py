"""Losses are judged by the exact binomial distribution; known values, and what an interval has to be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.binomial import at_most, interval


@pytest.mark.parametrize(
    ("k", "n", "p", "expected"),
    [
        (0, 10, 0.1, 0.9**10),
        (1, 3, 0.5, 0.5),
        (3, 3, 0.2, 1.0),
        (-1, 3, 0.2, 0.0),
        (20, 20_000, 0.001, 0.55909),  # Poisson(20) has 0.5591
    ],
)
def test_the_distribution_is_the_binomial_one(k: int, n: int, p: float, expected: float) -> None:
    assert at_most(k, n, p) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("lost", "sent", "confidence", "low", "high"),
    [
        (0, 20_000, 0.999, 0.0, 1 - 0.0005 ** (1 / 20_000)),
        (5, 10, 0.95, 0.1871, 0.8129),  # Clopper-Pearson's own table
        (1, 100, 0.95, 0.00025, 0.0545),
        (10, 10, 0.95, 0.025 ** (1 / 10), 1.0),
    ],
)
def test_the_interval_is_clopper_and_pearsons(lost: int, sent: int, confidence: float, low: float, high: float) -> None:
    assert interval(lost, sent, confidence) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@given(st.integers(1, 50_000), st.data())
def test_an_interval_holds_what_was_counted(sent: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, min(sent, 2_000)))
    low, high = interval(lost, sent)
    assert low <= lost / sent <= high
    assert not math.isnan(low + high)
