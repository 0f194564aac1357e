"""Goodput is counted at the receivers over one common window; the first second and a step are told apart."""

from __future__ import annotations

import pytest

from netem.link import LinkError
from netem.timelines import bytes_at, first_second_bps, goodput_bps, step_response_s

MS = 1_000_000


def steady(start_ms: int, end_ms: int, bytes_per_ms: int, first_burst: int = 0) -> list[tuple[int, int]]:
    return [(t * MS, first_burst + (t - start_ms) * bytes_per_ms) for t in range(start_ms, end_ms + 1, 5)]


def test_the_first_burst_does_not_count() -> None:
    rate_bps, window_s = goodput_bps([steady(0, 3000, 1000, first_burst=5_000_000)], seconds=3.0, skip_s=1.0)
    assert rate_bps == pytest.approx(8e6)
    assert window_s == pytest.approx(2.0)


def test_connections_add_up_over_the_window_they_share() -> None:
    rate_bps, window_s = goodput_bps([steady(0, 3000, 1000), steady(200, 3200, 3000)], seconds=3.0, skip_s=1.0)
    assert rate_bps == pytest.approx(32e6)
    assert window_s == pytest.approx(1.8)


def test_the_tail_after_the_senders_stopped_does_not_count() -> None:
    tail = [*steady(0, 3000, 1000), (9000 * MS, 3_000_001)]
    assert goodput_bps([tail], seconds=3.0, skip_s=1.0)[0] == pytest.approx(8e6)


def test_a_stall_inside_the_window_counts_as_time() -> None:
    resumed = [(t * MS, (t - 1000) * 1000) for t in range(2505, 3001, 5)]
    stalled = [*steady(0, 1500, 1000), (2500 * MS, 1_500_000), *resumed]
    assert goodput_bps([stalled], seconds=3.0, skip_s=1.0)[0] == pytest.approx(4e6, rel=1e-2)


def test_a_connection_that_starves_at_the_end_does_not_shorten_the_window() -> None:
    rate_bps, window_s = goodput_bps([steady(0, 3000, 1000), steady(0, 1200, 1000)], seconds=3.0, skip_s=1.0)
    assert rate_bps == pytest.approx(8e6 + 0.8e6)
    assert window_s == pytest.approx(2.0)


@pytest.mark.parametrize("timelines", [[], [[]], [steady(0, 3000, 1000), []], [steady(0, 500, 1000)]])
def test_nothing_received_is_an_error_not_a_zero(timelines: list[list[tuple[int, int]]]) -> None:
    with pytest.raises(LinkError, match="probe"):
        goodput_bps(timelines, seconds=3.0, skip_s=1.0)


def test_bytes_between_two_notes_are_in_proportion_and_before_the_first_there_are_none() -> None:
    timeline = [(10 * MS, 100), (20 * MS, 300)]
    assert [bytes_at(timeline, at * MS) for at in (5, 10, 15, 20, 99)] == [0, 100, 200, 300, 300]


@pytest.mark.parametrize("held_from_ms", [4000, 9000, 9800])
def test_what_a_lost_packet_holds_back_changes_nothing(held_from_ms: int) -> None:
    """One of two connections gets nothing for 1.2 s, and then all of it in turn: the link was never idle."""
    until_ms = held_from_ms + 1200
    before = [note for note in steady(0, 12_000, 1000) if note[0] <= held_from_ms * MS]
    missed = [(until_ms * MS + n * MS, before[-1][1] + n * 10_000) for n in range(1, 120)]
    after = [note for note in steady(0, 12_000, 1000) if note[0] >= (until_ms + 200) * MS]
    rate_bps, _ = goodput_bps(
        [before + missed + after, steady(0, 12_000, 1000)], seconds=10.0, skip_s=1.0, catch_up_s=2.0
    )
    assert rate_bps == pytest.approx(16e6, rel=0.01)


def test_a_link_that_gives_out_is_not_taken_for_a_lost_packet() -> None:
    """Half the rate from the middle on: over the whole window, not the better half of it."""
    half = [*steady(0, 5000, 1000), *((t * MS, 5_000_000 + (t - 5000) * 500) for t in range(5005, 12_001, 5))]
    rate_bps, window_s = goodput_bps([half], seconds=10.0, skip_s=1.0, catch_up_s=2.0)
    assert rate_bps == pytest.approx(8e6 * (4 + 2.5) / 9)
    assert window_s == pytest.approx(9)


def test_the_first_second_begins_when_the_sender_does_and_has_the_burst() -> None:
    timeline = steady(20, 3000, 1000, first_burst=70_000)
    assert first_second_bps([timeline], began_ns=0) == pytest.approx((980_000 + 70_000) * 8)


def test_the_first_second_is_of_all_connections_together() -> None:
    assert first_second_bps([steady(0, 3000, 1000), steady(500, 3000, 2000)], began_ns=0) == pytest.approx(16e6)


def test_a_step_is_answered_when_the_new_rate_is_there_and_stays() -> None:
    slow = [(t * MS, t * 1000) for t in range(0, 1301, 5)]
    fast = [(t * MS, 1_300_000 + (t - 1300) * 5000) for t in range(1305, 4001, 5)]
    assert step_response_s([slow + fast], 1000 * MS, 40e6, 0.05) == pytest.approx(0.3, abs=0.02)


def test_a_rate_that_is_only_passed_is_not_the_answer() -> None:
    """It rises through 40 Mbit/s and settles at 80."""
    rise = [(t * MS, round(5 * t * t)) for t in range(0, 1001, 5)]
    settled = [(t * MS, 5_000_000 + (t - 1000) * 10_000) for t in range(1005, 4001, 5)]
    assert step_response_s([rise + settled], 0, 40e6, 0.05) is None
    assert step_response_s([rise + settled], 0, 80e6, 0.05) == pytest.approx(0.95, abs=0.06)


def test_timelines_that_end_too_soon_answer_nothing() -> None:
    assert step_response_s([steady(0, 400, 1000)], 0, 8e6, 0.05) is None
    assert step_response_s([], 0, 8e6, 0.05) is None


def test_what_waits_behind_anothers_super_packet_has_not_arrived() -> None:
    """Four connections take turns on a link of 8 Mbit/s, 50 kB each time: at no moment more came than it carries."""
    turns = [[((50 * (4 * turn + one + 1)) * MS, 50_000 * (turn + 1)) for turn in range(10)] for one in range(4)]
    for began_ms in range(0, 200, 7):
        after = [[(at_ns + began_ms * MS, had) for at_ns, had in timeline] for timeline in turns]
        assert first_second_bps(after, began_ns=0) <= 8e6 * (1 - began_ms / 1e3)
