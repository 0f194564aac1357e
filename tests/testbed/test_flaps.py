"""A link that flaps is reckoned with at its mean; one that falls, or rises, and stays there is followed."""

import pytest

from testbed.scheduler.flaps import REMEMBERED_S, Flaps


def seen(*steps: tuple[float, float], until_s: float) -> Flaps:
    """What it is after ticks every second; steps: (s, bits/s)."""
    flaps = Flaps()
    for now_s in range(int(until_s) + 1):
        flaps.see(float(now_s), [bps for at_s, bps in steps if at_s <= now_s][-1])
    return flaps


def test_a_dip_is_followed_and_so_is_its_end() -> None:
    assert seen((0, 16e9), (60, 2e9), until_s=65).lasting_bps(65.0) == 2e9
    assert seen((0, 16e9), (60, 2e9), (70, 16e9), until_s=75).lasting_bps(75.0) == 16e9


def test_the_second_dip_within_two_minutes_is_not_followed() -> None:
    flaps = seen((0, 16e9), (100, 2e9), (110, 16e9), (125, 2e9), until_s=130)
    assert flaps.flapping
    assert flaps.lasting_bps(130.0) == pytest.approx((90 * 16e9 + 10 * 2e9 + 15 * 16e9 + 5 * 2e9) / 120)


def test_one_that_then_stays_down_is_followed_when_the_turns_are_forgotten() -> None:
    steps = (0, 16e9), (100, 2e9), (110, 16e9), (125, 2e9)
    assert seen(*steps, until_s=180).lasting_bps(180.0) < 12e9
    assert seen(*steps, until_s=220).lasting_bps(220.0) == 2e9, "the first of three turns was 120 s ago"


def test_a_slow_course_and_a_noisy_one_are_no_turns() -> None:
    staircase = [(10.0 * step, 16e9 - step * 1e9) for step in range(14)]
    assert not seen(*staircase, until_s=140).flapping
    noise = [(float(step), 10e9 if step % 2 else 12e9) for step in range(60)]
    assert not seen(*noise, until_s=60).flapping


def test_the_mean_is_over_what_was_seen_when_that_is_less() -> None:
    flaps = seen((0, 16e9), (10, 2e9), (20, 16e9), (30, 2e9), until_s=40)
    assert flaps.lasting_bps(40.0) == pytest.approx(9e9)


def test_it_remembers_no_more_than_it_needs() -> None:
    flaps = seen(*((float(at), 1e9 + at) for at in range(1000)), until_s=999)
    assert len(flaps._seen) <= REMEMBERED_S + 2
