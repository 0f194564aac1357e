"""The link in virtual time: what it delivers, when, and to whom it gives how much."""

import math
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netem.fluid import LEAST_LEFT, TCP_EFFICIENCY, FluidLink


def drain(link: FluidLink, until_s: float = math.inf) -> dict[int, float]:
    """Run the link until nothing is left to happen (or `until_s`); when each token landed."""
    landed: dict[int, float] = {}
    for _ in range(100_000):
        due_s = link.next_s()
        if due_s is None or due_s > until_s:
            return landed
        for at_s, token in link.advance(due_s):
            landed[token] = at_s
    raise AssertionError("the link does not come to an end")


def integral_bits(steps: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Bits that a link of the given (time, rate) steps can carry between two times: the bound on what is delivered."""
    total, rate, at_s = 0.0, 0.0, start_s
    for step_s, step_bps in steps:
        if step_s > at_s:
            total += rate * (min(step_s, end_s) - at_s)
            at_s = min(step_s, end_s)
        rate = step_bps
        if at_s >= end_s:
            return total
    return total + rate * (end_s - at_s)


def link_of(bytes_a_second: float, **options: float) -> FluidLink:
    return FluidLink(bytes_a_second * 8, efficiency=1.0, **options)


def test_tcp_gets_the_payload_share_of_every_packet() -> None:
    assert pytest.approx(0.956, abs=0.001) == TCP_EFFICIENCY
    link = FluidLink(8000.0)
    link.transmit(0.0, "p", "d", 1, 1000.0, 1, 0.0, 0.0001)
    assert drain(link)[1] == pytest.approx(0.0001 + 1 / TCP_EFFICIENCY)


def test_a_wide_link_hides_all_but_the_last_piece() -> None:
    link = link_of(1000.0)
    link.transmit(0.0, "p", "d", 1, 800.0, 8, 0.0, 4.0)  # 200 bytes/s produced
    assert drain(link)[1] == pytest.approx(4.0 + 100 / 1000)


def test_a_narrow_link_is_busy_from_the_first_piece_to_the_end() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "p", "d", 1, 800.0, 8, 0.0, 4.0)
    assert drain(link)[1] == pytest.approx(4.0 / 8 + 800 / 100, rel=1e-6)


def test_a_late_grant_sends_what_is_there_at_once() -> None:
    link = link_of(1000.0)
    link.transmit(10.0, "p", "d", 1, 800.0, 8, 0.0, 4.0)
    assert drain(link)[1] == pytest.approx(10.8)


def test_two_pairs_share_evenly_and_the_first_to_end_leaves_its_share() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "a", "d", 1, 100.0, 1, -1.0, 0.0)
    link.transmit(0.0, "b", "d", 2, 300.0, 1, -1.0, 0.0)
    landed = drain(link)
    assert landed[1] == pytest.approx(2.0)  # 50 bytes/s each
    assert landed[2] == pytest.approx(4.0)  # 100 of 300 by then, 200 at 100 bytes/s


def test_transfers_of_two_pairs_that_end_at_the_same_time_both_land() -> None:
    link = link_of(100.0)
    for token in range(6):
        link.transmit(0.0, "p", "x", token, 1.0, 1, 0.0, 1.0)
    link.transmit(0.0, "p", "y", 6, 1.0, 1, 0.0, 1.0)
    landed = drain(link)
    assert landed[0] == landed[6] == pytest.approx(1.02)  # 50 bytes/s each
    assert landed[5] == pytest.approx(1.07)
    assert link.idle


def test_a_pair_that_wants_less_than_its_share_leaves_the_rest_to_others() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "slow", "d", 1, 110.0, 11, 0.0, 11.0)  # 10 bytes/s
    link.transmit(0.0, "fast", "d", 2, 450.0, 1, -1.0, 0.0)
    assert drain(link)[2] == pytest.approx(1.0 + 350 / 90)  # alone until the other's first piece exists, then at 90


def test_one_pairs_transfers_land_in_the_order_of_their_grants() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "p", "d", 1, 100.0, 1, -1.0, 0.0)
    link.transmit(0.0, "p", "d", 2, 50.0, 1, -1.0, 0.0)
    landed = drain(link)
    assert (landed[1], landed[2]) == (pytest.approx(1.0), pytest.approx(1.5))


def test_a_flow_cap_binds_below_the_aggregate() -> None:
    link = link_of(100.0, per_flow_bps=200.0)
    link.transmit(0.0, "p", "d", 1, 100.0, 1, -1.0, 0.0)
    assert drain(link)[1] == pytest.approx(4.0)


def test_a_step_re_times_what_is_under_way() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "p", "d", 1, 300.0, 1, -1.0, 0.0)
    link.advance(1.0)
    link.set_capacity(1.0, 50.0 * 8)
    assert drain(link)[1] == pytest.approx(5.0)


def test_nothing_moves_in_an_outage_and_it_goes_on_afterwards() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "p", "d", 1, 200.0, 1, -1.0, 0.0)
    link.set_capacity(1.0, 0.0)
    assert drain(link) == {}
    assert link.next_s() is None
    link.set_capacity(11.0, 100.0 * 8)
    assert drain(link)[1] == pytest.approx(12.0)


def test_delay_adds_to_the_landing_only() -> None:
    link = link_of(100.0, delay_s=0.5)
    link.transmit(0.0, "p", "d", 1, 100.0, 1, -1.0, 0.0)
    assert drain(link)[1] == pytest.approx(1.5)


def test_a_stopped_transfer_gives_its_share_back_and_is_not_counted_as_produced() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "a", "d", 1, 1000.0, 1, -1.0, 0.0)
    link.transmit(0.0, "b", "d", 2, 100.0, 1, -1.0, 0.0)
    link.stop(1.0, 1)
    landed = drain(link)
    assert landed == {2: pytest.approx(1.5)}
    assert link.delivered_bytes(1e9) == pytest.approx(link.produced_bytes)
    assert link.idle


def test_stopping_the_head_lets_the_next_of_its_pair_go_first() -> None:
    link = link_of(100.0)
    link.transmit(0.0, "p", "d", 1, 1000.0, 1, -1.0, 0.0)
    link.transmit(0.0, "p", "d", 2, 100.0, 1, -1.0, 0.0)
    link.stop(1.0, 1)
    assert drain(link)[2] == pytest.approx(2.0)


def test_an_idle_link_lets_a_bucket_through_at_once() -> None:
    link = link_of(100.0, burst_bytes=60.0)
    link.transmit(5.0, "p", "d", 1, 160.0, 1, 3.0, 4.0)
    assert drain(link)[1] == pytest.approx(6.0)  # 60 bytes at once, 100 at the rate


def test_a_whole_transfer_may_fit_the_bucket() -> None:
    link = link_of(100.0, burst_bytes=60.0)
    link.transmit(5.0, "p", "d", 1, 50.0, 1, 3.0, 4.0)
    assert drain(link)[1] == pytest.approx(5.0)


def test_the_bucket_fills_at_the_rate_that_is_left_over() -> None:
    link = link_of(100.0, burst_bytes=60.0)
    link.transmit(5.0, "p", "d", 1, 60.0, 1, 3.0, 4.0)
    drain(link, 5.0)
    link.transmit(5.3, "p", "d", 2, 40.0, 1, 3.0, 4.0)
    assert drain(link)[2] == pytest.approx(5.4)  # 30 bytes had come back


class TestCrossTraffic:
    """Elastic flows beside pairs of four connections each, and datagrams."""

    def test_one_elastic_flow_has_the_share_of_one_connection(self) -> None:
        link = link_of(100.0)
        link.set_cross(0.0, 1 / 4, 0.0)
        link.transmit(0.0, "a", "d", 1, 100.0, 1, -1.0, 0.0)
        link.transmit(0.0, "b", "d", 2, 100.0, 1, -1.0, 0.0)
        assert drain(link) == {1: pytest.approx(2.25), 2: pytest.approx(2.25)}  # 4/9 of the link each
        assert link.crossed_bytes(2.25) == pytest.approx(25.0)

    def test_a_pair_that_wants_less_than_its_share_gets_it_and_the_elastic_flows_the_rest(self) -> None:
        link = link_of(100.0)
        link.set_cross(0.0, 2.0, 0.0)
        link.transmit(0.0, "p", "d", 1, 110.0, 11, 0.0, 11.0)  # 10 bytes/s; its share would be 33
        assert drain(link)[1] == pytest.approx(11.0 + 10 / (100 / 3))
        assert link.crossed_bytes(11.3) == pytest.approx(100.0 * 11.3 - 110)

    def test_a_pair_that_has_caught_up_falls_back_when_flows_come(self) -> None:
        link = link_of(100.0)
        link.transmit(0.0, "p", "d", 1, 800.0, 10, 0.0, 10.0)  # 80 bytes/s
        link.set_cross(5.0, 1.0, 0.0)
        assert drain(link)[1] == pytest.approx(5.0 + (800 - 320) / 50)  # 80 x 4 s until then, then 50 bytes/s

    def test_elastic_flows_that_go_leave_the_link_to_the_pairs(self) -> None:
        link = link_of(100.0)
        link.set_cross(0.0, 1.0, 0.0)
        link.transmit(0.0, "p", "d", 1, 200.0, 1, -1.0, 0.0)
        link.set_cross(2.0, 0.0, 0.0)
        assert drain(link)[1] == pytest.approx(3.0)
        assert link.crossed_bytes(50.0) == pytest.approx(100.0)

    def test_datagrams_take_their_rate_first(self) -> None:
        link = link_of(100.0)
        link.set_cross(0.0, 0.0, 60.0 * 8)
        link.transmit(0.0, "p", "d", 1, 80.0, 1, -1.0, 0.0)
        assert drain(link)[1] == pytest.approx(2.0)
        assert link.crossed_bytes(2.0) == pytest.approx(120.0)

    def test_datagrams_beyond_the_link_leave_tcp_a_little(self) -> None:
        link = link_of(100.0)
        link.set_cross(0.0, 0.0, 1000.0 * 8)
        link.transmit(0.0, "p", "d", 1, 8.0, 1, -1.0, 0.0)
        assert drain(link)[1] == pytest.approx(8.0 / (100.0 * LEAST_LEFT))

    def test_what_datagrams_had_of_a_link_that_steps_is_what_they_had_before_and_after(self) -> None:
        link = link_of(100.0)
        link.set_cross(0.0, 0.0, 50.0 * 8)
        link.set_capacity(2.0, 0.0)
        link.set_capacity(5.0, 200.0 * 8)
        assert link.crossed_bytes(6.0) == pytest.approx(50.0 * 2 + 50.0)

    def test_elastic_flows_are_capped_as_connections_are(self) -> None:
        link = link_of(100.0, per_flow_bps=20.0 * 8)  # of a pair: 5 bytes/s a connection
        link.set_cross(0.0, 2 / 4, 0.0)
        link.transmit(0.0, "p", "d", 1, 100.0, 1, -1.0, 0.0)
        assert drain(link)[1] == pytest.approx(5.0)
        assert link.crossed_bytes(5.0) == pytest.approx(50.0)

    def test_elastic_flows_leave_the_bucket_empty(self) -> None:
        link = link_of(100.0, burst_bytes=60.0)
        link.set_cross(1.0, 1.0, 0.0)
        link.set_cross(2.0, 0.0, 0.0)
        link.transmit(2.3, "p", "d", 1, 130.0, 1, 0.0, 1.0)
        assert drain(link)[1] == pytest.approx(3.3)  # 30 bytes had come back
        assert link.crossed_bytes(3.3) == pytest.approx(160.0)


orders = st.lists(
    st.tuples(
        st.floats(0, 20),  # when granted, after the one before
        st.sampled_from("abc"),
        st.sampled_from("xy"),
        st.floats(1, 1e4),
        st.integers(1, 16),
        st.floats(0.01, 5),  # how long its prefill takes
        st.floats(0, 5),  # how long before the grant it began
    ),
    min_size=1,
    max_size=25,
)
cross_steps = st.lists(
    st.tuples(st.floats(0, 20), st.sampled_from([0.0, 0.25, 3.0]), st.sampled_from([0.0, 100.0, 900.0])), max_size=6
)
link_steps = st.lists(st.tuples(st.floats(0.1, 30), st.sampled_from([0.0, 40.0, 400.0, 8000.0])), max_size=6)


@settings(max_examples=150, deadline=None)
@given(orders, link_steps, st.one_of(st.none(), st.floats(100, 1000)), st.sampled_from([0.0, 30.0, 500.0]), cross_steps)
def test_all_that_is_produced_is_delivered_and_never_faster_than_the_link(
    given_orders: list[tuple[float, str, str, float, int, float, float]],
    steps: list[tuple[float, float]],
    cap: float | None,
    burst: float,
    cross: list[tuple[float, float, float]],
) -> None:
    link = FluidLink(800.0, efficiency=1.0, per_flow_bps=cap, burst_bytes=burst)
    at_s, capacity = 0.0, [(0.0, 800.0)]
    events: list[tuple[float, object]] = []
    for gap_s, *order in given_orders:
        at_s += gap_s
        events.append((at_s, order))
    at_s = 0.0
    for gap_s, rate in steps:
        at_s += gap_s
        events.append((at_s, rate))
        capacity.append((at_s, rate))
    at_s = 0.0
    for gap_s, *competing in cross:
        at_s += gap_s
        events.append((at_s, tuple(competing)))
    events.append((max(at for at, _ in events) + 1, 800.0))  # outages end
    capacity.append((events[-1][0], 800.0))
    samples = [(0.0, 0.0)]
    landed: dict[int, float] = {}
    ends: dict[int, float] = {}
    for token, (now_s, event) in enumerate(sorted(events, key=lambda pair: pair[0])):
        landed |= drain(link, now_s)
        link.advance(now_s)
        samples.append((now_s, link.delivered_bytes(now_s) + link.crossed_bytes(now_s)))
        if isinstance(event, float):
            link.set_capacity(now_s, event)
        elif isinstance(event, tuple):
            link.set_cross(now_s, *event)
        else:
            sender, receiver, size, pieces, length_s, before_s = event  # type: ignore[misc]
            link.transmit(now_s, sender, receiver, token, size, pieces, now_s - before_s, now_s - before_s + length_s)
            ends[token] = now_s - before_s + length_s
    landed |= drain(link)
    assert link.idle
    assert landed.keys() == ends.keys()
    assert all(landed[token] >= ends[token] for token in landed)
    assert link.delivered_bytes(1e9) == pytest.approx(link.produced_bytes)
    capacity.sort()
    for (from_s, before), (to_s, after) in pairwise(samples):
        assert (after - before) * 8 <= integral_bits(capacity, from_s, to_s) * (1 + 1e-9) + burst * 8 + 1e-3


def test_integral_of_steps() -> None:
    steps = [(0.0, 10.0), (5.0, 20.0), (8.0, 0.0)]
    assert integral_bits(steps, 0, 10) == 50 + 60
    assert integral_bits(steps, 4, 6) == 10 + 20
    assert integral_bits(steps, 9, 12) == 0


def test_what_the_bucket_took_of_the_next_transfer_is_not_taken_again() -> None:
    """Two transfers of one pair, both computed when the first is granted: the bucket passes 60 bytes, no more."""
    link = link_of(100.0, burst_bytes=60.0)
    link.transmit(5.0, "q", "d", 9, 1000.0, 1, 6.0, 20.0)  # somebody else is busy, with nothing to send yet
    link.transmit(5.0, "p", "d", 1, 50.0, 1, 6.0, 7.0)
    link.transmit(5.0, "p", "d", 2, 110.0, 1, 3.0, 4.0)
    landed = drain(link)
    assert landed[1] == pytest.approx(7.0)
    assert landed[2] == pytest.approx(8.0)  # 50 + 10 by the bucket at 7 s, 100 at the rate


def test_what_is_withdrawn_is_what_was_not_sent_and_lands_when_it_is_sent_on() -> None:
    link = link_of(100)
    link.transmit(0.0, "p", "d", 1, 1000.0, 1, 0.0, 0.0)
    link.transmit(0.0, "q", "d", 2, 1000.0, 1, 0.0, 0.0)
    [rest] = link.withdraw(10.0, "p")
    assert rest == ("p", "d", 1, pytest.approx(500.0), 1, 0.0, 0.0)
    assert drain(link) == {2: pytest.approx(15.0)}
    link.transmit(20.0, *rest)
    assert drain(link) == {1: pytest.approx(25.0)}
    assert link.delivered_bytes(30.0) == pytest.approx(link.produced_bytes) == pytest.approx(2000.0)


def test_a_node_is_withdrawn_as_sender_and_as_receiver() -> None:
    link = link_of(100)
    for token, (sender, receiver) in enumerate((("p", "d"), ("d", "q"), ("p", "q"))):
        link.transmit(0.0, sender, receiver, token, 100.0, 1, 0.0, 0.0)
    assert {rest[2] for rest in link.withdraw(0.5, "d")} == {0, 1}
    assert set(drain(link)) == {2}
