"""The link's states and plans: units, refusals, the burst and queue rules. Pure; no kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest

from netem.link import (
    LinkError,
    LinkState,
    burst_bytes,
    expected_goodput_bps,
    impairment,
    parse_rate,
    queue_bytes,
    update,
)
from netem.plan import Leaf, plan


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("16gbps", 16e9),
        ("160mbit", 160e6),
        ("1 Mbit/s", 1e6),
        ("1Mbps", 1e6),
        ("2.5 Gbit", 2.5e9),
        ("40gbit", 40e9),  # pyroute2#715
        ("800kbit", 800e3),
        ("1e8", 1e8),
        ("1_000_000 bit/s", 1e6),
        (20e6, 20e6),
        (160_000_000, 160e6),
    ],
)
def test_parse_rate_reads_decimal_bits_per_second(text: str | float, bps: float) -> None:
    assert parse_rate(text) == bps


@pytest.mark.parametrize("text", ["1MB", "1MB/s", "8MBps", "1mb", "1 mb/s", "1Gb/s", "1mbytes", "1mbyte/s", "9B/s"])
def test_parse_rate_refuses_what_may_mean_bytes(text: str) -> None:
    with pytest.raises(LinkError, match="rate"):
        parse_rate(text)


def test_parse_rate_of_bytes_names_the_remedy() -> None:
    with pytest.raises(LinkError, match=r"link\.rate: '20MB/s' may mean bytes; write bits: 1 MB/s is 8mbit"):
        parse_rate("20MB/s", "link.rate")


@pytest.mark.parametrize("text", ["", "fast", "-5mbit", "nan", "inf", "1Mibit", "1e400", "1mbit/h", "1,5gbit", "0mbit"])
def test_parse_rate_refuses_nonsense(text: str) -> None:
    with pytest.raises(LinkError):
        parse_rate(text)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, None, [1e6]])
def test_parse_rate_refuses_numbers_that_are_no_rate(value: Any) -> None:
    with pytest.raises(LinkError):
        parse_rate(value)


@pytest.mark.parametrize("rate", [0, -5e6, math.nan, math.inf, 999_999, 20, 401e9, "20mbit", [1e6], True])
@pytest.mark.parametrize("field", ["rate_bps", "control_rate_bps", "per_flow_bps"])
def test_a_state_refuses_a_rate_that_cannot_be_had(field: str, rate: Any) -> None:
    with pytest.raises(LinkError, match=field) as refused:
        LinkState(**{"rate_bps": 20e6, field: rate})
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize("delay_s", [0, 0.0, 1e-6, 0.0005, 5e-3, 0.25, 2])
def test_delays_are_taken_exactly_from_a_microsecond_to_two_seconds(delay_s: float) -> None:
    assert impairment(LinkState(20e6, delay_s=delay_s)).delay_s == delay_s


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("delay_s", -0.001, "negative"),
        ("delay_s", 5e-7, "microsecond"),
        ("delay_s", 15, "is it milliseconds"),  # 15 ms
        ("delay_s", 50_000, "is it milliseconds"),  # chaos-mesh#4545
        ("delay_s", math.nan, "not finite"),
        ("delay_s", math.inf, "not finite"),
        ("delay_s", "15ms", "not a number"),
        ("delay_s", True, "not a number"),
        ("delay_s", None, "not a number"),
        ("jitter_s", 0.02, "more than delay_s = 0.01"),
        ("jitter_s", -0.001, "negative"),
        ("jitter_s", math.nan, "not finite"),
        ("loss", -0.1, "negative"),
        ("loss", 1, "is it percent"),  # 1 %
        ("loss", 1.0, "an outage"),
        ("loss", 0.51, "more than 0.5"),
        ("loss", math.nan, "not finite"),
        ("loss", "1%", "not a number"),
    ],
)
def test_a_state_refuses_a_delay_or_loss_that_cannot_be_meant(field: str, value: Any, why: str) -> None:
    with pytest.raises(LinkError, match=f"^{field}: .*{why}") as refused:
        LinkState(**{"rate_bps": 20e6, "delay_s": 0.01, field: value})
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize("loss", [0, 0.001, 0.01, 0.5])
def test_loss_is_a_fraction(loss: float) -> None:
    assert impairment(LinkState(20e6, loss=loss)).loss == loss


def test_the_delay_line_holds_one_and_a_half_times_what_is_under_way_and_a_burst() -> None:
    # 1.5 x 125 MB/s x 25 ms = 4 687 500 bytes in packets of 1514
    assert impairment(LinkState(1e9, delay_s=0.02, jitter_s=0.005)).limit_packets == 10_000 + 3097
    assert impairment(LinkState(1e9)).limit_packets == 10_000


def test_only_delay_or_loss_needs_the_delay_line() -> None:
    assert not impairment(LinkState(1e9)).does_something
    assert impairment(LinkState(1e9, delay_s=1e-3)).does_something
    assert impairment(LinkState(1e9, loss=1e-3)).does_something


def test_the_queue_holds_a_round_trip_of_the_delay() -> None:
    assert queue_bytes(1e9, 0.03) == 7_500_000 + burst_bytes(1e9)
    assert queue_bytes(1e9, 0.001) == queue_bytes(1e9)
    leaf = next(c for c in plan(LinkState(1e9, delay_s=0.03)) if isinstance(c, Leaf))
    assert leaf.limit_bytes == queue_bytes(1e9, 0.03)


@pytest.mark.parametrize("mtu", [0, 1500.0, 100_000, True, "1500"])
def test_a_state_refuses_an_mtu_that_is_none(mtu: Any) -> None:
    with pytest.raises(LinkError, match="mtu"):
        LinkState(rate_bps=20e6, mtu=mtu)


@pytest.mark.parametrize(
    ("rate_bps", "expected"),
    [(1e6, 70_000), (56e6, 70_000), (140e6, 70_000), (200e6, 100_000), (2e9, 1_000_000), (40e9, 20_000_000)],
)
def test_burst_is_four_milliseconds_but_one_super_packet_at_least(rate_bps: float, expected: int) -> None:
    assert burst_bytes(rate_bps) == expected


@pytest.mark.parametrize("rate_bps", [56e6, 100e6, 1e9, 100e9])
def test_burst_never_leaks_more_than_ten_milliseconds_above_the_floor(rate_bps: float) -> None:
    assert burst_bytes(rate_bps) <= rate_bps / 8 * 0.010


@pytest.mark.parametrize("rate_bps", [1e6, 20e6, 1e9, 40e9])
def test_the_queue_holds_super_packets_ten_milliseconds_and_a_burst(rate_bps: float) -> None:
    assert queue_bytes(rate_bps) >= max(4 * 65536, rate_bps / 8 * 0.010) + burst_bytes(rate_bps)
    assert queue_bytes(rate_bps) < 2**31  # bfifo's limit


def test_expected_goodput_is_what_headers_leave() -> None:
    assert expected_goodput_bps(1514.0) == pytest.approx(1448.0)
    assert expected_goodput_bps(20e6) == pytest.approx(0.9564 * 20e6, rel=1e-4)
    assert expected_goodput_bps(9014.0, mtu=9000) == pytest.approx(8948.0)


STATES = {"to_pd": LinkState(20e6), "to_prfaas": LinkState(30e6)}


def test_an_update_holds_for_both_directions_unless_it_names_one() -> None:
    assert update(STATES, {"rate_bps": 1e8}) == {"to_pd": LinkState(1e8), "to_prfaas": LinkState(1e8)}
    assert update(STATES, {"to_pd": {"rate_bps": 1e8}}) == {"to_pd": LinkState(1e8), "to_prfaas": LinkState(30e6)}
    assert update(STATES, {"to_pd": {"rate_bps": 1e8}, "rate_bps": 5e7})["to_pd"] == LinkState(1e8)
    assert update(STATES, {}) == STATES


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rate": 1e8}, "rate"),
        ({"rate_bps": "100mbit"}, "rate_bps"),
        ({"rate_bps": 0}, "rate_bps"),
        ({"to_pd": {"rate_bps": -1}}, "to_pd.rate_bps"),
        ({"to_pd": {"speed": 1}}, "to_pd.speed"),
        ({"to_pd": 1e8}, "to_pd"),
        ({"mtu": 9000}, "mtu"),
        ({"delay_s": 20}, "delay_s"),
        ({"to_pd": {"loss": 1}}, "to_pd.loss"),
        ([1e8], "link"),
        (None, "link"),
    ],
)
def test_an_update_that_cannot_be_had_names_the_field(body: object, field: str) -> None:
    with pytest.raises(LinkError) as refused:
        update(STATES, body)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


def test_an_update_of_a_direction_that_is_not_shaped_is_refused() -> None:
    with pytest.raises(LinkError, match="to_prfaas"):
        update({"to_pd": LinkState(20e6)}, {"to_prfaas": {"rate_bps": 1e8}})
