"""Arrival processes whose rate changes: their mean rate is what was asked for, and the changes are those described."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from traces import arrivals
from traces.arrivals import States
from traces.info import dispersion


def stream(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@pytest.mark.parametrize("states", [((0.5, 20.0), (4.0, 5.0)), ((0.0, 10.0), (1.0, 10.0)), ((1, 9), (2, 5), (0, 30))])
def test_an_mmpp_has_its_mean_rate_from_the_very_start(states: States) -> None:
    """Over many seeds, also in a window far shorter than a sojourn: the chain starts in its stationary distribution."""
    counts = np.array([len(arrivals.mmpp(stream(seed), 10.0, 4.0, states)) for seed in range(6000)])
    assert counts.mean() == pytest.approx(40, abs=4 * counts.std() / np.sqrt(len(counts)))
    assert counts.std() / np.sqrt(len(counts)) < 1


def test_an_mmpp_has_the_dispersion_of_its_states() -> None:
    """Of two states with rates a, b left at rates p, q, in windows far longer than both:
    1 + 2 p q (a - b)^2 / ((p + q)^2 (a q + b p))."""
    a, b, p, q = 4.0, 34.0, 1 / 4.0, 1 / 1.0
    expected = 1 + 2 * p * q * (a - b) ** 2 / ((p + q) ** 2 * (a * q + b * p))
    mean_rps = (a * 4 + b * 1) / 5
    times = arrivals.mmpp(stream(1), mean_rps, 100_000.0, ((a, 4.0), (b, 1.0)))
    assert dispersion(times, 100) == pytest.approx(expected, rel=0.15)


def test_an_mmpp_of_equal_states_is_poisson() -> None:
    times = arrivals.mmpp(stream(1), 10.0, 20_000.0, ((2.0, 3.0), (2.0, 30.0)))
    assert dispersion(times, 10) == pytest.approx(1, abs=0.1)
    assert len(times) == pytest.approx(200_000, rel=0.01)


def test_the_states_of_an_mmpp_follow_each_other_in_order() -> None:
    """Silent, slow, fast: from the fast one it goes to the silent one. A stay too short to be seen in whole seconds
    looks like a jump over it, which is rare."""
    times = arrivals.mmpp(stream(2), 100.0, 20_000.0, ((0.0, 50.0), (1.0, 50.0), (30.0, 50.0)))
    counts = np.bincount(times.astype(int), minlength=20_000)
    level = np.digitize(counts, [1, 100])
    steady = level[(level == np.roll(level, 1)) & (level == np.roll(level, -1))].tolist()
    changes = Counter((was, now) for was, now in pairwise(steady) if was != now)
    in_order = min(changes[0, 1], changes[1, 2], changes[2, 0])
    assert in_order > 50
    assert max(changes[1, 0], changes[2, 1], changes[0, 2]) < in_order / 5


def test_a_silent_state_is_silent() -> None:
    times = arrivals.mmpp(stream(3), 50.0, 2000.0, ((0.0, 40.0), (1.0, 10.0)))
    assert np.diff(times).max() > 20


def test_diurnal_arrivals_follow_the_sine() -> None:
    period_s, amplitude = 100.0, 0.8
    times = arrivals.diurnal(stream(1), 20.0, 20_000.0, period_s, amplitude)
    assert len(times) == pytest.approx(400_000, rel=0.01)
    counts, edges = np.histogram(times % period_s, bins=20, range=(0, period_s))
    middle = (edges[:-1] + edges[1:]) / 2
    expected = 20_000 * (1 + amplitude * np.sin(2 * np.pi * middle / period_s))
    assert counts == pytest.approx(expected, rel=0.05)


def test_diurnal_arrivals_may_begin_at_another_hour() -> None:
    times = arrivals.diurnal(stream(1), 20.0, 20_000.0, 100.0, 1.0, start_s=75.0)
    counts, _ = np.histogram(times % 100, bins=4, range=(0, 100))
    assert np.argmin(counts) in (0, 3)
    assert counts[0] == pytest.approx(counts[3], rel=0.1)


def test_diurnal_arrivals_of_no_amplitude_are_poisson() -> None:
    times = arrivals.diurnal(stream(1), 10.0, 20_000.0, 100.0, 0.0)
    assert dispersion(times, 100) == pytest.approx(1, abs=0.2)
