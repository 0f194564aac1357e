"""What the stopwatch makes of its times."""

from __future__ import annotations

import pytest

from emulator.backends.hybrid.measure import Measured, Timed


def test_a_figure_is_a_median_and_its_spread_is_the_middle_halfs() -> None:
    timed = Timed((1.0, 2.0, 2.0, 2.2, 9.0))
    assert timed.median_s == 2.0
    assert timed.spread == pytest.approx(0.1)


@pytest.mark.parametrize(("leaves", "pieces"), [(1.0, 1), (0.83, 2), (0.75, 2), (0.66, 3), (0.625, 4), (0.5, 64)])
def test_pieces_leave_in_the_mean_when_the_bytes_do(leaves: float, pieces: int) -> None:
    assert Measured(leaves={1024: leaves}).pieces == pieces


def test_a_measurement_is_as_certain_as_its_least_certain_figure() -> None:
    """Times of 1, 2 and 3: half of them lie in [1.5, 2.5]."""
    steady, wild = Timed((1.0, 1.0, 1.0)), Timed((1.0, 2.0, 3.0))
    assert Measured({8: steady}, {(1, 8): wild}).uncertain == pytest.approx(0.93 * 0.5 / 3**0.5)
    assert Measured({8: steady}, {(1, 8): steady}).uncertain == 0
