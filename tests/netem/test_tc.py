"""What goes to the kernel, byte by byte: pyroute2 reads an int rate as bytes/s and drops what it does not know."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyroute2.iproute.linux as pyroute2_linux
import pytest
from pyroute2 import AsyncIPRoute

from netem.link import LinkError, LinkState
from netem.plan import KV_CLASS, Command, Layout, Leaf, Netem, PortFilter, RateClass, Root, ShareClass, plan
from netem.tc import ClassCounters, Counters, _together, encode, handle, unshaped

TCMSG = struct.Struct("=BxxxiIIII")
RTM_NEWQDISC, RTM_NEWTCLASS, RTM_NEWTFILTER = 36, 40, 44
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400


class Recorder(pyroute2_linux.NetlinkRequest):  # type: ignore[misc]
    messages: list[bytes] = []  # noqa: RUF012

    async def send(self) -> None:
        self.msg.encode()
        self.messages.append(bytes(self.msg.data))

    async def response(self) -> AsyncIterator[Any]:
        return
        yield


async def wire(command: Command, monkeypatch: pytest.MonkeyPatch, change: bool = False) -> dict[str, Any]:
    """The netlink message pyroute2 makes of `command` on interface 7, decoded by hand from linux/pkt_sched.h."""
    monkeypatch.setattr(pyroute2_linux, "NetlinkRequest", Recorder)
    monkeypatch.setattr(Recorder, "messages", [])
    verb, kind, keywords = encode(command, 7, change)
    async with AsyncIPRoute() as ip:
        Recorder.messages.clear()
        await ip.tc(verb, kind, **keywords)
    (message,) = Recorder.messages
    length, number, flags = struct.unpack_from("=IHH", message)
    _, index, own, parent, info = TCMSG.unpack_from(message, 16)[:5]
    found = dict(attributes(message[36:length]))
    assert index == 7
    sent = {"type": number, "flags": flags, "handle": own, "parent": parent, "info": info}
    return sent | {"kind": found[1].rstrip(b"\0").decode(), "options": found[2]}


def attributes(raw: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 4 <= len(raw):
        length, number = struct.unpack_from("=HH", raw, at)
        found.append((number & 0x3FFF, raw[at + 4 : at + length]))
        at += (length + 3) & ~3
    return found


def one(kind: type, state: LinkState, name: str = KV_CLASS) -> Any:
    of_kind = [c for c in plan(state) if isinstance(c, kind)]
    return next((c for c in of_kind if getattr(c, "handle", None) == name), of_kind[0])


def test_handles_are_hexadecimal() -> None:
    assert handle("1:10") == 0x10010
    assert handle("1:0") == 0x10000
    assert handle("20:0") == 0x200000


async def test_the_root_sends_the_default_as_a_class_number(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = await wire(one(Root, LinkState(20e6)), monkeypatch)
    (_, init) = attributes(sent["options"])[0]
    version, _, default, _, _ = struct.unpack("=5I", init)
    assert (sent["type"], sent["kind"], sent["handle"], sent["parent"]) == (RTM_NEWQDISC, "htb", 0x10000, 0xFFFFFFFF)
    assert (version, default) == (3, 0x10)


@pytest.mark.parametrize(
    ("rate_bps", "bytes_per_s", "burst_ticks"),
    [(1e6, 125_000, 560_000), (20e6, 2_500_000, 28_000), (1e9, 125_000_000, 4_000), (40e9, 5_000_000_000, 4_000)],
)
async def test_a_class_sends_bytes_per_second_and_the_burst_as_time(
    rate_bps: float, bytes_per_s: int, burst_ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = await wire(one(RateClass, LinkState(rate_bps)), monkeypatch)
    options = dict(attributes(sent["options"]))
    parameters = struct.unpack("=BBHhHI BBHhHI IIIII".replace(" ", ""), options[1])
    rate, ceil, buffer, cbuffer, quantum, _, prio = *parameters[5::6][:2], *parameters[12:]
    rate64 = struct.unpack("=Q", options[6])[0] if 6 in options else rate
    ceil64 = struct.unpack("=Q", options[7])[0] if 7 in options else ceil
    us_in_ticks = ticks_per_us()
    assert (sent["type"], sent["kind"], sent["handle"], sent["parent"]) == (RTM_NEWTCLASS, "htb", 0x10010, 0x10000)
    assert (rate64, ceil64) == (bytes_per_s, bytes_per_s)
    assert buffer == cbuffer == pytest.approx(burst_ticks * us_in_ticks, rel=1e-3)
    assert (quantum, prio) == (60_000, 1)


def ticks_per_us() -> float:
    t2us, us2t, clock, _ = (int(word, 16) for word in Path("/proc/net/psched").read_text().split())
    return t2us / us2t * clock / 1e6


async def test_a_leaf_sends_its_limit_in_bytes_under_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf("10:0", KV_CLASS, 350_000)
    sent = await wire(leaf, monkeypatch)
    assert (sent["type"], sent["kind"], sent["handle"], sent["parent"]) == (RTM_NEWQDISC, "bfifo", 0x100000, 0x10010)
    assert struct.unpack("=I", sent["options"]) == (350_000,)


@pytest.mark.parametrize(("end", "offset"), [("sport", 20), ("dport", 22)])
async def test_a_filter_sends_tcp_and_the_masked_port(end: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = next(c for c in plan(LinkState(20e6)) if isinstance(c, PortFilter) and c.end == end)
    sent = await wire(command, monkeypatch)
    options = dict(attributes(sent["options"]))
    selector = options[5]
    keys = [struct.unpack_from(">II", selector, at) + struct.unpack_from("=ii", selector, at + 8) for at in (16, 32)]
    assert (sent["type"], sent["kind"], sent["parent"]) == (RTM_NEWTFILTER, "u32", 0x10000)
    assert sent["info"] & 0xFFFF == struct.unpack("=H", struct.pack(">H", 0x0800))[0]
    assert struct.unpack("=I", options[1]) == (0x10020,)
    assert (selector[0], selector[2]) == (1, 2)  # terminal, two keys
    assert sorted(keys) == sorted([(0xFF000000, 0x06000000, 9, 0), (0xFF800000, 0x1C000000, offset, 0)])


@pytest.mark.parametrize(
    ("delay_us", "loss", "loss_u32"), [(500, 0.0, 0), (5_000, 0.001, 4_294_967), (2_000_000, 0.5, 2_147_483_647)]
)
async def test_netem_sends_ticks_and_a_share_of_the_largest_number(
    delay_us: int, loss: float, loss_u32: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = await wire(Netem("10:0", KV_CLASS, delay_us, loss, 4321), monkeypatch)
    ticks, limit, lost, gap, duplicate, jitter = struct.unpack_from("=6I", sent["options"])
    assert (sent["type"], sent["kind"], sent["handle"], sent["parent"]) == (RTM_NEWQDISC, "netem", 0x100000, 0x10010)
    assert (ticks, limit, lost) == (int(delay_us * ticks_per_us()), 4321, loss_u32)
    assert (gap, duplicate, jitter) == (0, 0, 0)


async def test_netem_is_told_each_time_the_rate_that_keeps_packets_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a change leaves out, netem keeps; and the rate must be none that a link has."""
    for change in (False, True):
        sent = await wire(Netem("10:0", KV_CLASS, 500, 0.0, 1000), monkeypatch, change=change)
        ((number, rate),) = attributes(sent["options"][24:])
        assert (number, struct.unpack_from("=I", rate)[0]) == (6, 4_000_000_000)


async def test_a_share_sends_its_cap_as_a_ceiling_over_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = LinkState(40e9, per_flow_bps=36e9)  # more than 32 bits of bytes/s
    share = next(c for c in plan(state, Layout(flows=1)) if isinstance(c, ShareClass))
    sent = await wire(share, monkeypatch)
    options = dict(attributes(sent["options"]))
    parameters = struct.unpack("=BBHhHIBBHhHIIIIII", options[1])
    rate, ceil, buffer, cbuffer, quantum, _, prio = *parameters[5::6][:2], *parameters[12:]
    ceil64 = struct.unpack("=Q", options[7])[0] if 7 in options else ceil
    assert (sent["handle"], sent["parent"], rate, ceil64) == (0x10011, 0x10010, 375, 4_500_000_000)
    assert buffer == pytest.approx(1514 / 375 * 1e6 * ticks_per_us(), rel=1e-3)
    assert cbuffer == pytest.approx(4_000 * ticks_per_us(), rel=1e-3)
    assert (quantum, prio) == (60_000, 1)


def test_the_kv_is_all_of_its_flows() -> None:
    whole, share = ClassCounters(1000, 10, 0, 0, 0), ClassCounters(500, 5, 2, 300, 1)
    assert _together(whole, [share, share]) == ClassCounters(1000, 10, 4, 600, 2)
    assert _together(share, []) == share


@pytest.mark.parametrize(
    "command",
    [one(RateClass, LinkState(20e6)), Leaf("10:0", KV_CLASS, 350_000), Netem("10:0", KV_CLASS, 500, 0.0, 1000)],
)
async def test_a_change_never_creates(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    added, changed = await wire(command, monkeypatch), await wire(command, monkeypatch, change=True)
    assert added["flags"] & (NLM_F_CREATE | NLM_F_EXCL) == NLM_F_CREATE | NLM_F_EXCL
    assert changed["flags"] & (NLM_F_CREATE | NLM_F_REPLACE) == NLM_F_REPLACE


def test_unshaped_packets_are_an_error() -> None:
    empty = ClassCounters(0, 0, 0, 0, 0)
    unshaped(Counters(0, empty, empty, 0), "w-pd")
    with pytest.raises(LinkError, match="w-pd: 3 packets left unshaped"):
        unshaped(Counters(0, empty, empty, 3), "w-pd")
