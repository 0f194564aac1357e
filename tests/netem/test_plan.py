"""The link's plans: what is asked of a kernel for a state, with and without netem, with and without caps. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from netem.link import LinkError, LinkState, burst_bytes, queue_bytes
from netem.plan import (
    ACK_CLASS,
    CONTROL_CLASS,
    FLOWS,
    KV_CLASS,
    MIN_RATE_OF_A_FLOW_BPS,
    PROBE_FLOWS,
    REST_CLASS,
    Command,
    Layout,
    Leaf,
    Netem,
    PortFilter,
    RateClass,
    Root,
    ShareClass,
    flow_class,
    plan,
)

NETEM = Layout(netem=True)
CAPPED = LinkState(100e6, per_flow_bps=20e6)
FLOWS_4 = Layout(flows=4)


def classes(commands: tuple[Command, ...]) -> dict[str, Any]:
    return {c.handle: c for c in commands if isinstance(c, RateClass | ShareClass)}


def queues(commands: tuple[Command, ...]) -> dict[str, Any]:
    """By the class that it is of."""
    return {c.parent: c for c in commands if isinstance(c, Leaf | Netem)}


def selected(commands: tuple[Command, ...], sport: int, dport: int) -> str:
    """The class of a TCP packet, as the kernel would find it."""
    root = commands[0]
    assert isinstance(root, Root)
    ends = {"sport": sport, "dport": dport}
    for one in sorted((c for c in commands if isinstance(c, PortFilter)), key=lambda c: c.prio):
        if ends[one.end] & one.mask == one.port:
            return one.target
    return root.default


@pytest.mark.parametrize("rate_bps", [1e6, 20e6, 1e9, 40e9, 400e9])
def test_the_kv_class_has_the_rate_exactly(rate_bps: float) -> None:
    kv = classes(plan(LinkState(rate_bps)))[KV_CLASS]
    assert (kv.rate_bps, kv.burst_bytes) == (rate_bps, burst_bytes(rate_bps))


def test_a_plan_is_a_value() -> None:
    assert plan(LinkState(20e6)) == plan(LinkState(20e6))
    assert hash(plan(LinkState(20e6))) == hash(plan(LinkState(20e6)))
    assert plan(LinkState(20e6)) != plan(LinkState(21e6))


@pytest.mark.parametrize(
    ("state", "layout"), [(LinkState(20e6), Layout()), (LinkState(20e6), NETEM), (CAPPED, Layout(True, 12))]
)
def test_a_plan_names_every_class_before_what_refers_to_it(state: LinkState, layout: Layout) -> None:
    commands = plan(state, layout)
    seen: set[str] = set()
    for command in commands:
        if not isinstance(command, Root):
            assert command.parent in seen
        if isinstance(command, PortFilter):
            assert command.target in seen
        else:
            assert command.handle not in seen
            seen.add(command.handle)
    leaves = {handle for handle in classes(commands) if layout.flows is None or handle != KV_CLASS}
    assert queues(commands).keys() == leaves
    assert isinstance(commands[0], Root)
    assert commands[0].default in leaves  # of another class everything would go unshaped


def test_the_control_class_is_served_first_at_its_own_rate() -> None:
    found = classes(plan(LinkState(20e6, control_rate_bps=3e6)))
    assert found[CONTROL_CLASS].rate_bps == 3e6
    assert found[CONTROL_CLASS].prio < found[KV_CLASS].prio


def test_control_is_selected_by_its_ports_at_either_end() -> None:
    commands = plan(LinkState(20e6))
    for port in range(7100, 7500):
        expected = CONTROL_CLASS if 7168 <= port <= 7295 else KV_CLASS
        assert selected(commands, port, 40000) == selected(commands, 40000, port) == expected


@pytest.mark.parametrize(("layout", "queue"), [(Layout(), Leaf), (NETEM, Netem)])
def test_a_new_rate_differs_in_a_class_and_its_queue_only(layout: Layout, queue: type) -> None:
    """So that a live link is changed in place: neither the root nor a filter depends on the rate."""
    before = plan(LinkState(20e6, delay_s=0.01), layout)
    stepped = [command for command in plan(LinkState(2e9, delay_s=0.01), layout) if command not in before]
    assert [type(c) for c in stepped] == [RateClass, queue]


# ---- netem


def test_netem_is_the_queue_of_both_classes_and_has_delay_and_loss() -> None:
    found = queues(plan(LinkState(1e9, delay_s=0.0005, loss=0.001), NETEM))
    assert found.keys() == {KV_CLASS, CONTROL_CLASS}
    assert [(one.delay_us, one.loss) for one in found.values()] == [(500, 0.001)] * 2


@pytest.mark.parametrize(
    ("delay_s", "us"), [(0.0, 0), (1e-6, 1), (0.0005, 500), (0.005, 5000), (0.04, 40_000), (2.0, 2_000_000)]
)
def test_a_delay_is_whole_microseconds(delay_s: float, us: int) -> None:
    """chaos-mesh#4545: 50 ms became 50000."""
    delay_us = queues(plan(LinkState(20e6, delay_s=delay_s), NETEM))[KV_CLASS].delay_us
    assert (delay_us, type(delay_us)) == (us, int)


def test_netem_holds_its_queue_and_one_and_a_half_times_what_is_under_way() -> None:
    """iproute2#56, comcast#28: at the default of 1000 packets, delay alone loses."""
    state = LinkState(1e9, delay_s=0.04)
    limit = queues(plan(state, NETEM))[KV_CLASS].limit_packets
    assert limit == -(-(queue_bytes(1e9, 0.04) + 7_500_000) // 1514)
    assert queues(plan(LinkState(1e9), NETEM))[KV_CLASS].limit_packets == -(-queue_bytes(1e9) // 1514)


def test_a_rate_step_keeps_the_delay_and_a_delay_step_the_rate() -> None:
    before, narrow, far = (
        plan(LinkState(rate, delay_s=delay), NETEM) for rate, delay in ((1e9, 0.005), (1e8, 0.005), (1e9, 0.04))
    )
    assert queues(narrow)[KV_CLASS].delay_us == queues(before)[KV_CLASS].delay_us
    assert classes(far)[KV_CLASS] == classes(before)[KV_CLASS]


def test_where_the_delay_line_delays_netem_is_a_queue() -> None:
    """So that no packet is delayed twice (chaos-mesh#3399)."""
    found = queues(plan(LinkState(1e9, delay_s=0.04, loss=0.01), NETEM, netem_delays=False))
    assert [(one.delay_us, one.loss) for one in found.values()] == [(0, 0.0)] * 2
    assert found[KV_CLASS].limit_packets == -(-queue_bytes(1e9, 0.04) // 1514)


def test_a_rate_that_netem_does_not_keep_in_order_is_refused() -> None:
    assert classes(plan(LinkState(32e9), NETEM))[KV_CLASS].rate_bps == 32e9
    with pytest.raises(LinkError, match="nfqueue") as refused:
        plan(LinkState(40e9), NETEM)
    assert refused.value.field == "rate_bps"


# ---- caps a flow


@pytest.mark.parametrize("layout", [FLOWS_4, Layout(True, 4)])
def test_each_connection_is_capped_under_the_kv_class(layout: Layout) -> None:
    commands = plan(CAPPED, layout)
    found = classes(commands)
    assert found[KV_CLASS].rate_bps == 100e6
    flows = [flow_class(number) for number in (0, 1, 2, 3, *PROBE_FLOWS)]
    assert found.keys() == {KV_CLASS, CONTROL_CLASS, REST_CLASS, ACK_CLASS, *flows}
    for handle in (REST_CLASS, *flows):
        assert (found[handle].parent, found[handle].ceil_bps) == (KV_CLASS, 20e6)
        assert found[handle].cburst_bytes == burst_bytes(20e6)
    assert found[ACK_CLASS].ceil_bps == 100e6


def test_what_the_flows_are_guaranteed_never_exceeds_the_slowest_link() -> None:
    """htb serves what is guaranteed whatever the parent says; at 1 Mbit/s it would be more than the link."""
    shares = [c for c in plan(CAPPED, Layout(flows=FLOWS)) if isinstance(c, ShareClass)]
    assert len(shares) * MIN_RATE_OF_A_FLOW_BPS < 1e6
    assert all(share.burst_bytes == 1514 for share in shares)


def test_no_two_connections_share_a_class() -> None:
    commands = plan(CAPPED, Layout(flows=FLOWS))
    for turn in range(64):  # a connection that is dialled again takes another port of the same number
        found = {selected(commands, 16384 + 256 * turn + number, 7296) for number in range(FLOWS)}
        assert found == {flow_class(number) for number in range(FLOWS)}


def test_the_probe_is_told_apart_both_ways_and_never_shares_with_the_transport() -> None:
    commands = plan(CAPPED, FLOWS_4)
    probe = {flow_class(number) for number in PROBE_FLOWS}
    assert {selected(commands, 16384 + number, 7424) for number in PROBE_FLOWS} == probe
    assert {selected(commands, 7424, 16384 + number) for number in PROBE_FLOWS} == probe
    assert not probe & {flow_class(number) for number in range(FLOWS)}


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ((7296, 16384 + 2), ACK_CLASS),  # acknowledges what comes from the other site
        ((50000, 7296), REST_CLASS),  # a stranger
        ((16384 + 200, 7296), REST_CLASS),  # a number that nobody was given
        ((7168, 16384 + 2), CONTROL_CLASS),
    ],
)
def test_what_is_not_numbered(ports: tuple[int, int], expected: str) -> None:
    assert selected(plan(CAPPED, FLOWS_4), *ports) == expected


def test_a_rate_step_under_caps_does_not_touch_the_flows() -> None:
    before, after = (plan(LinkState(rate_bps, per_flow_bps=20e6), FLOWS_4) for rate_bps in (1e9, 5e8))
    stepped = [c for c in after if c not in before]
    assert {getattr(c, "handle", "") for c in stepped} == {KV_CLASS, ACK_CLASS, "12:0"}


@pytest.mark.parametrize(("state", "layout"), [(CAPPED, Layout()), (LinkState(100e6), FLOWS_4)])
def test_a_cap_neither_comes_nor_goes_on_a_live_link(state: LinkState, layout: Layout) -> None:
    with pytest.raises(LinkError, match="where the link is started"):
        plan(state, layout)


@pytest.mark.parametrize("flows", [-1, 249, 1.5, True, "4"])
def test_a_layout_refuses_flows_it_cannot_number(flows: Any) -> None:
    with pytest.raises(LinkError, match="flows"):
        Layout(flows=flows)
