"""A plan carried to the kernel (pyroute2), read back and compared: `LinkState -> plan -> kernel -> read back`.

A live link is only ever *changed*: deleting a qdisc and adding it again loses its queue and lets a burst of three times
the rate through. pyroute2's units are met here and nowhere else: an int rate is bytes/s, a burst is bytes, and what the
kernel keeps of a burst is a time in ticks; netem's delay is whole microseconds, its loss percent. What a netem is not
told it keeps, so it is told everything each time.
"""

from __future__ import annotations

import asyncio
import errno
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from pyroute2 import AsyncIPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.tcmsg import plugins, sched_netem, sched_pfifo
from pyroute2.netlink.rtnl.tcmsg.common import tick_in_usec

from netem.link import LinkError, LinkState
from netem.plan import (
    CONTROL_CLASS,
    KV_CLASS,
    MIN_RATE_OF_A_FLOW_BPS,
    NETEM_ORDER_BPS,
    ROOT_HANDLE,
    AnyClass,
    Command,
    Layout,
    Leaf,
    Netem,
    PortFilter,
    Queue,
    RateClass,
    Root,
    ShareClass,
    plan,
)

# pyroute2 0.9 does not know bfifo and would send it without its limit, to the interface's root. Same message as pfifo.
plugins["bfifo"] = sched_pfifo
# It would send netem's rate a second time, as an attribute of the message that is a text, and stumble over the number.
plugins["netem"] = SimpleNamespace(
    parent=sched_netem.parent,
    options=sched_netem.options,
    get_parameters=sched_netem.get_parameters,
    fix_request=lambda request: request.pop("rate", None),
)

_TC_H_ROOT = 0xFFFFFFFF
_ETH_P_IP = 0x0800
_PORT_OFFSET = {"sport": 20, "dport": 22}  # in an IPv4 header without options
_PROTOCOL_KEY = (0x06000000, 0xFF000000, 9)  # TCP: value, mask, offset
_LOSS_SCALE = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ClassCounters:
    """One class since it was made. Bytes on the wire (Ethernet headers of every segment included); backlog is now."""

    sent_bytes: int
    packets: int
    drops: int
    backlog_bytes: int
    backlog_packets: int


@dataclass(frozen=True, slots=True)
class Counters:
    """One direction. `t_ns` is CLOCK_MONOTONIC just after the read; `direct_packets` went out unshaped (must be 0)."""

    t_ns: int
    kv: ClassCounters
    control: ClassCounters
    direct_packets: int


@dataclass(frozen=True, slots=True)
class Applied:
    """When a state took hold: asked, and acknowledged by the kernel, CLOCK_MONOTONIC ns; `commands` sent (0: no-op)."""

    t_asked_ns: int
    t_applied_ns: int
    commands: int


def handle(text: str) -> int:
    """`"1:10"` (hexadecimal, as tc writes it) -> 0x10010."""
    major, _, minor = text.partition(":")
    return int(major, 16) << 16 | int(minor or "0", 16)


def encode(command: Command, index: int, change: bool = False) -> tuple[str, str, dict[str, Any]]:
    """(verb, kind, keywords) for pyroute2's `tc()` on interface number `index`. Rates in bytes/s there."""
    verb = "change" if change else "add"
    match command:
        case Root():
            keywords = {"handle": handle(command.handle), "default": handle(command.default) & 0xFFFF}
            return verb, "htb", {"index": index, **keywords}
        case RateClass():
            rate, burst = round(command.rate_bps / 8), command.burst_bytes
            keywords = {"rate": rate, "ceil": rate, "burst": burst, "cburst": burst}
            keywords |= {"quantum": command.quantum_bytes, "prio": command.prio}
            return f"{verb}-class", "htb", {"index": index, **_place(command), **keywords}
        case ShareClass():
            keywords = {"rate": round(MIN_RATE_OF_A_FLOW_BPS / 8), "ceil": round(command.ceil_bps / 8)}
            keywords |= {"burst": command.burst_bytes, "cburst": command.cburst_bytes}
            keywords |= {"quantum": command.quantum_bytes, "prio": command.prio}
            return f"{verb}-class", "htb", {"index": index, **_place(command), **keywords}
        case Leaf():
            return verb, "bfifo", {"index": index, **_place(command), "limit": command.limit_bytes}
        case Netem():
            shape = {"delay": command.delay_us, "loss": command.loss * 100, "limit": command.limit_packets}
            return verb, "netem", {"index": index, **_place(command), **shape, "rate": round(NETEM_ORDER_BPS / 8)}
        case PortFilter():
            ports = f"{command.port:#06x}/{command.mask:#06x}+{_PORT_OFFSET[command.end]}"
            keywords = {"parent": handle(command.parent), "target": handle(command.target), "prio": command.prio}
            match_ = {"protocol": _ETH_P_IP, "keys": ["0x06/0xff+9", ports]}
            return f"{verb}-filter", "u32", {"index": index, **keywords, **match_}


def _place(command: AnyClass | Queue) -> dict[str, int]:
    return {"handle": handle(command.handle), "parent": handle(command.parent)}


@dataclass(slots=True)
class _Look:
    """What the kernel had at `t_ns`: the classes as they came, and what they and their queues are in a plan."""

    classes: Sequence[Any]
    direct_packets: int | None
    commands: list[Command]
    t_ns: int


class Shaper:
    """The shaping of one egress interface: an async context manager, entered in the interface's network namespace.

    `layout` is how it is laid out, for good.

    Each state is read back after it is applied: a kernel that keeps something else is a LinkError, never a no-op. What
    no step changes, the filters, is read back when they are made.
    Calls may overlap: they take turns, as a netlink socket answers a dump during another with EBUSY.
    """

    def __init__(self, interface: str, layout: Layout = Layout()) -> None:  # noqa: B008
        self._interface = interface
        self._layout = layout
        self._index = 0
        self._applied: tuple[Command, ...] | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Shaper:
        self._ip = await AsyncIPRoute().__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._ip.__aexit__(*failure)

    async def apply(self, state: LinkState, *, netem_delays: bool = True) -> Applied:
        """Bring the interface to `state`: the first time by adding, then by changing in place; a no-op sends nothing.

        `netem_delays` as for `netem.plan.plan`. Raises LinkError when the kernel refuses or keeps something else, when
        someone else shapes the interface, and when a packet has left unshaped.
        """
        t_asked_ns = time.monotonic_ns()
        wanted = plan(state, self._layout, netem_delays=netem_delays)
        async with self._turn:
            if self._applied is None:
                self._applied = await self._adopt(wanted)
            change = self._applied is not None
            pending = [command for command in wanted if command not in (self._applied or ())]
            if change and pending:
                self._applied = ()  # unknown until verified: a failed change is sent again in full
                pending = [command for command in pending if isinstance(command, AnyClass | Queue)]
            for command in pending:
                await self._send(command, change)
            t_applied_ns = time.monotonic_ns()
            look = await self._look()
            kept = [*look.commands, *await self._filters()] if not change else look.commands
            self._verify([one for one in wanted if not (change and isinstance(one, PortFilter))], kept)
            unshaped(self._counted(look), self._interface)
            self._applied = wanted
        return Applied(t_asked_ns, t_applied_ns, len(pending))

    async def read_back(self) -> tuple[Command, ...]:
        """What the kernel has, in the order of `plan`. A burst is exact to 1 us of its rate."""
        async with self._turn:
            return await self._read_back()

    async def counters(self) -> Counters:
        """Both classes and the unshaped packets, read now. Raises LinkError when the shaping is gone."""
        async with self._turn:
            return await self._counters()

    async def _adopt(self, wanted: Sequence[Command]) -> tuple[Command, ...] | None:
        """None on a bare interface; () where an agent before this one left the same plan at other rates."""
        found = await self._ip.link_lookup(ifname=self._interface)
        if not found:
            raise LinkError(f"interface {self._interface}: not in this network namespace; run the agent in the WAN's")
        self._index = found[0]
        qdiscs = [message async for message in await self._ip.get_qdiscs(index=self._index) if message["handle"] != 0]
        if not qdiscs:
            return None
        try:
            if list(map(_place_of, await self._read_back())) == list(map(_place_of, wanted)):
                return ()
        except LinkError:
            pass
        what = f"{qdiscs[0].get_attr('TCA_KIND')} {_text(qdiscs[0]['handle'])}"
        remedy = f"if nobody needs it: tc qdisc del dev {self._interface} root"
        raise LinkError(f"interface {self._interface}: already shaped by {what}, not by this agent; {remedy}")

    async def _read_back(self) -> tuple[Command, ...]:
        return (*(await self._look()).commands, *await self._filters())

    async def _counters(self) -> Counters:
        return self._counted(await self._look(decoded=False))

    async def _look(self, decoded: bool = True) -> _Look:
        """One dump of the classes and one of the queues: with many flows they are what a step costs."""
        classes = sorted(
            [message async for message in await self._ip.get_classes(index=self._index)], key=itemgetter("handle")
        )
        qdiscs = [message async for message in await self._ip.get_qdiscs(index=self._index)]
        look = _Look(classes, None, [], time.monotonic_ns())
        queues: dict[int, Queue] = {}
        for message in qdiscs:
            kind = message.get_attr("TCA_KIND")
            if kind == "htb":
                init = message.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_INIT")
                look.direct_packets = init["direct_pkts"]
                look.commands.append(Root(_text(message["handle"]), _text(message["handle"] | init["defcls"])))
            elif decoded and kind == "bfifo":
                limit_bytes = message.get_attr("TCA_OPTIONS")["limit"]
                queues[message["parent"]] = Leaf(_text(message["handle"]), _text(message["parent"]), limit_bytes)
            elif decoded and kind == "netem":
                queues[message["parent"]] = _decode_netem(message)
        for message in classes if decoded else []:
            look.commands.append(_decode_class(message))
            if message["handle"] in queues:
                look.commands.append(queues[message["handle"]])
        return look

    async def _filters(self) -> list[PortFilter]:
        filters = []
        async for message in await self._ip.get_filters(index=self._index, parent=handle(ROOT_HANDLE)):
            options = message.get_attr("TCA_OPTIONS")
            if options is not None and options.get_attr("TCA_U32_CLASSID") is not None:
                filters.append(_decode_filter(message))
        return sorted(filters, key=lambda kept: kept.prio)

    def _counted(self, look: _Look) -> Counters:
        counted = {message["handle"]: _decode_counters(message) for message in look.classes}
        shares = [counted[message["handle"]] for message in look.classes if message["parent"] == handle(KV_CLASS)]
        if look.direct_packets is None or not {handle(KV_CLASS), handle(CONTROL_CLASS)} <= counted.keys():
            raise LinkError(f"interface {self._interface}: its shaping is gone; nothing but this agent may change it")
        kv = _together(counted[handle(KV_CLASS)], shares)
        return Counters(look.t_ns, kv, counted[handle(CONTROL_CLASS)], look.direct_packets)

    async def _send(self, command: Command, change: bool) -> None:
        verb, kind, keywords = encode(command, self._index, change)
        try:
            await self._ip.tc(verb, kind, **keywords)
        except NetlinkError as refused:
            missing = f"this kernel has no {kind}: modprobe {'cls' if kind == 'u32' else 'sch'}_{kind}"
            gone = "its shaping is gone: nothing but this agent may change it"
            remedy = {
                errno.ENOENT: gone if change else missing,
                errno.EPERM: "shaping needs CAP_NET_ADMIN in the WAN's network namespace",
            }.get(refused.code, "see 'prfaas doctor' for what this kernel carries")
            what = f"interface {self._interface}: {command}: the kernel refused ({refused})"
            raise LinkError(f"{what}; {remedy}") from refused

    def _verify(self, wanted: Sequence[Command], kept: Sequence[Command]) -> None:
        if len(wanted) != len(kept) or not all(map(_same, wanted, kept)):
            raise LinkError(
                f"interface {self._interface}: the kernel kept another state than asked. Asked: {list(wanted)}. "
                f"Kept: {list(kept)}. Nothing but this agent may change it; see 'prfaas doctor'"
            )


def unshaped(counters: Counters, interface: str) -> None:
    """Raise LinkError if any packet left `interface` without passing a class."""
    if counters.direct_packets:
        raise LinkError(f"interface {interface}: {counters.direct_packets} packets left unshaped; the run is invalid")


def _place_of(command: Command) -> PortFilter | tuple[str, str]:
    """What of a command no state changes."""
    return command if isinstance(command, PortFilter) else (type(command).__name__, command.handle)


def _text(number: int) -> str:
    return f"{number >> 16:x}:{number & 0xFFFF:x}"


def _same(wanted: Command, kept: Command) -> bool:
    """Within what the kernel rounds to: half a byte/s, a microsecond of a burst, a tick of a delay."""
    match wanted, kept:
        case RateClass(), RateClass():
            return (
                (wanted.handle, wanted.parent, wanted.prio) == (kept.handle, kept.parent, kept.prio)
                and wanted.quantum_bytes == kept.quantum_bytes
                and abs(wanted.rate_bps - kept.rate_bps) <= 4.0
                and abs(wanted.burst_bytes - kept.burst_bytes) <= wanted.rate_bps / 8 * 1e-6 + 1
            )
        case ShareClass(), ShareClass():
            return (
                (wanted.handle, wanted.parent, wanted.prio) == (kept.handle, kept.parent, kept.prio)
                and (wanted.quantum_bytes, wanted.burst_bytes) == (kept.quantum_bytes, kept.burst_bytes)
                and abs(wanted.ceil_bps - kept.ceil_bps) <= 4.0
                and abs(wanted.cburst_bytes - kept.cburst_bytes) <= wanted.ceil_bps / 8 * 1e-6 + 1
            )
        case Netem(), Netem():
            return (
                (wanted.handle, wanted.parent, wanted.limit_packets) == (kept.handle, kept.parent, kept.limit_packets)
                and wanted.delay_us == kept.delay_us
                and abs(wanted.loss - kept.loss) <= 2 / _LOSS_SCALE
            )
    return wanted == kept


def _decode_class(message: Any) -> AnyClass:
    options = message.get_attr("TCA_OPTIONS")
    parameters = options.get_attr("TCA_HTB_PARMS")
    rate = options.get_attr("TCA_HTB_RATE64") or parameters["rate"]
    ceil = options.get_attr("TCA_HTB_CEIL64") or parameters["ceil"]
    own = _text(message["handle"])
    burst, cburst = (
        round(ticks / tick_in_usec / 1e6 * per_s)
        for ticks, per_s in ((parameters["buffer"], rate), (parameters["cbuffer"], ceil))
    )
    if message["parent"] == handle(KV_CLASS) and rate == round(MIN_RATE_OF_A_FLOW_BPS / 8):
        return ShareClass(own, KV_CLASS, ceil * 8.0, cburst, burst, parameters["quantum"], parameters["prio"])
    if rate != ceil or parameters["buffer"] != parameters["cbuffer"]:
        raise LinkError(f"class {own}: its rate {rate} and ceil {ceil} (bytes/s) or bursts differ")
    parent = ROOT_HANDLE if message["parent"] == _TC_H_ROOT else _text(message["parent"])
    return RateClass(own, parent, rate * 8.0, burst, parameters["quantum"], parameters["prio"])


def _decode_netem(message: Any) -> Netem:
    """Raises LinkError for one that does more than this agent asks of one."""
    options, own = message.get_attr("TCA_OPTIONS"), _text(message["handle"])
    rate = options.get_attr("TCA_NETEM_RATE")
    order = rate["rate"] if rate is not None else 0
    if options["jitter"] or options["duplicate"] or options["gap"] or order != round(NETEM_ORDER_BPS / 8):
        raise LinkError(
            f"netem {own}: jitters, duplicates, reorders, or has a rate ({order} bytes/s) of somebody else's"
        )
    delay_us = round(options["delay"] / tick_in_usec)
    return Netem(own, _text(message["parent"]), delay_us, options["loss"] / _LOSS_SCALE, options["limit"])


def _together(whole: ClassCounters, shares: Sequence[ClassCounters]) -> ClassCounters:
    """A class whose queues are its children's: what was sent is counted by itself, what waits or was lost by them."""
    if not shares:
        return whole
    return ClassCounters(
        whole.sent_bytes,
        whole.packets,
        sum(share.drops for share in shares),
        sum(share.backlog_bytes for share in shares),
        sum(share.backlog_packets for share in shares),
    )


def _decode_counters(message: Any) -> ClassCounters:
    statistics = message.get_attr("TCA_STATS2")
    sent, queue = statistics.get_attr("TCA_STATS_BASIC"), statistics.get_attr("TCA_STATS_QUEUE")
    return ClassCounters(sent["bytes"], sent["packets"], queue["drops"], queue["backlog"], queue["qlen"])


def _decode_filter(message: Any) -> PortFilter:
    options = message.get_attr("TCA_OPTIONS")
    raw = b"".join(
        struct.pack(">II", key["key_mask"], key["key_val"]) + struct.pack("=ii", key["key_off"], key["key_offmask"])
        for key in options.get_attr("TCA_U32_SEL")["keys"]
    )
    if raw[:4] == bytes(4):  # pyroute2 0.9 decodes keys four bytes early; no key of ours has mask 0
        raw = raw[4:] + bytes(4)
    starts = range(0, len(raw), 16)
    keys = [(*struct.unpack_from(">II", raw, at), *struct.unpack_from("=i", raw, at + 8)) for at in starts]
    ends = {offset: end for end, offset in _PORT_OFFSET.items()}
    ports = [(mask >> 16, value >> 16, ends[offset]) for mask, value, offset in keys if offset in ends]
    protocols = [(value, mask, offset) for mask, value, offset in keys if offset not in ends]
    if protocols != [_PROTOCOL_KEY] or len(ports) != 1 or message["info"] & 0xFFFF != 0x0008:
        raise LinkError(f"filter of {_text(message['parent'])}: holds keys {keys} that are not this agent's")
    mask, port, end = ports[0]
    prio = message["info"] >> 16
    return PortFilter(_text(message["parent"]), _text(options.get_attr("TCA_U32_CLASSID")), prio, end, port, mask)
