"""The state of the shaped link: pure values, in wall units (s, bytes, bit/s).

`LinkState` is what is asked of one direction, `plan.py` says what it takes to get it, `tc.py` carries that to the
kernel and reads it back. Nothing here touches a kernel, so shaping is tested without root.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, NoReturn, get_args

DIRECTIONS = ("to_pd", "to_prfaas")
OutageKind = Literal["stall", "blackhole", "down"]
OUTAGES: tuple[OutageKind, ...] = get_args(OutageKind)
"""From the mildest to the hardest: where two hold at once, the later in this order is what happens."""

MIN_RATE_BPS = 1e6  # below, an htb class stays dead for a minute after a step; an outage is not a tiny rate
MAX_RATE_BPS = 400e9  # a packet then takes 30 ns; htb counts whole nanoseconds
MIN_DELAY_S = 1e-6
MAX_DELAY_S = 2.0  # one way; a geostationary satellite takes 0.25
MAX_LOSS = 0.5
CONTROL_PORTS = (7168, 0xFF80)  # first port, mask: 7168-7295, docs/contracts.md

ETHERNET_BYTES = 14
_IP_TCP_BYTES = 52  # IPv4 20, TCP 20, time stamps 12
_BURST_FLOOR_BYTES = 70_000  # one 64 kB super-packet with the headers of all its segments
_BURST_S = 0.004
_QUEUE_FLOOR_BYTES = 4 * _BURST_FLOOR_BYTES
_QUEUE_S = 0.010
_DELAY_LINE_FLOOR = 10_000  # packets
_UNIT = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*$")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


class LinkError(ValueError):
    """A link that cannot be had. The message alone is for the user: field, value, remedy (also kept as attributes)."""

    def __init__(self, message: str, field: str | None = None, value: object = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.field, self.value, self.remedy = field, value, remedy


def refuse(field: str, value: object, problem: str, remedy: str) -> NoReturn:
    """Raise the LinkError that says what is wrong with a field, and what to do about it."""
    raise LinkError(f"{field}: {value!r} {problem}; {remedy}", field, value, remedy)


@dataclass(frozen=True, slots=True)
class LinkState:
    """One direction of the link.

    `rate_bps` is what the KV class may send, Ethernet headers included; `control_rate_bps` is the control class's own
    guaranteed rate beside it, not borrowed from the KV's. `mtu` is the interfaces' (bytes), fixed when they are made.
    `delay_s` is one-way, on top of what the queue takes; `jitter_s` moves it by at most that much either way, without
    reordering; `loss` is the fraction of packets that never arrive, whichever class they are of. `per_flow_bps` caps
    each TCP connection of the KV under the aggregate; None for no caps, which is settled when the link is laid out.

    `outage`: nothing arrives, of either class, until it is None again. "stall": packets wait in the delay line, as if
    its clock stood still, and then go on in order; at most `Impairment.limit_packets` wait, and what is let go at once
    has the room of the shaper's queue (`queue_bytes`). "blackhole": packets are dropped before the delay line; those in
    it or in the shaper's queue still arrive. "down": the direction's interface in the WAN is down, which cuts *both*
    directions at that end of the link and loses what waited there; senders are told that there is no route.
    Raises LinkError for what cannot be had.
    """

    rate_bps: float
    control_rate_bps: float = 2e6
    mtu: int = 1500
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    outage: OutageKind | None = None
    per_flow_bps: float | None = None

    def __post_init__(self) -> None:
        for field in ("rate_bps", "control_rate_bps"):
            _check_rate(field, getattr(self, field))
        if self.per_flow_bps is not None:
            _check_rate("per_flow_bps", self.per_flow_bps)
        if isinstance(self.mtu, bool) or not isinstance(self.mtu, int) or not 576 <= self.mtu <= 9000:
            refuse("mtu", self.mtu, "is no MTU in bytes", "give an integer from 576 to 9000, usually 1500")
        for field in ("delay_s", "jitter_s"):
            _check_delay(field, getattr(self, field))
        if self.jitter_s > self.delay_s:
            remedy = "a packet cannot arrive before it is sent; lower jitter_s, or raise delay_s"
            refuse("jitter_s", self.jitter_s, f"is more than delay_s = {self.delay_s}", remedy)
        _check_loss("loss", self.loss)
        if self.outage is not None and self.outage not in OUTAGES:
            refuse("outage", self.outage, "is no outage", f"use {', '.join(OUTAGES)}, or null for none")


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, value, "is not a number", "give a plain number in the unit of the field's name")
    if not math.isfinite(value):
        refuse(field, value, "is not finite", "give a plain number in the unit of the field's name")
    return float(value)


def _check_rate(field: str, value: object) -> None:
    rate = _number(field, value)
    if rate <= 0:
        refuse(field, value, "is no rate", "a link that is down is an outage, not a rate; give at least 1e6 bits/s")
    if rate < MIN_RATE_BPS:
        remedy = "give at least 1e6 (is it Mbit/s, or bytes? the field is bits/s), or raise scale.byte_scale"
        refuse(field, value, "bits/s is below the 1 Mbit/s floor of htb", remedy)
    if rate > MAX_RATE_BPS:
        refuse(field, value, "bits/s is more than htb can time", f"give at most {MAX_RATE_BPS:.0e}")


def _check_delay(field: str, value: object) -> None:
    delay_s = _number(field, value)
    if delay_s < 0:
        refuse(field, value, "is negative", "give seconds, such as 0.015, or 0 for none")
    if 0 < delay_s < MIN_DELAY_S:
        refuse(field, value, "s is below the kernel's microsecond", "give at least 1e-6, or 0 for none")
    if delay_s > MAX_DELAY_S:
        remedy = f"give at most {MAX_DELAY_S:g} (is it milliseconds? the field is seconds: 15 ms is 0.015)"
        refuse(field, value, "s is longer than any link", remedy)


def _check_loss(field: str, value: object) -> None:
    loss = _number(field, value)
    if loss < 0:
        refuse(field, value, "is negative", "give a fraction, such as 0.001, or 0 for none")
    if loss > MAX_LOSS:
        remedy = "give a fraction (is it percent? 1 % is 0.01); a link that loses everything is an outage, not a loss"
        refuse(field, value, f"is more than {MAX_LOSS:g}, through which no TCP gets", remedy)


def parse_rate(text: str | float, field: str = "rate") -> float:
    """Bits per second from `'16gbps'`, `'160mbit'`, `'2.5 Gbit/s'`, `'1e8'` or a number. Decimal prefixes (k = 1000).

    Refuses (LinkError) what people read in two ways: bytes (`MB/s`, `mb`) and binary prefixes (`Mibit`). tc's own
    `mbps` means megabytes; here `bps` is bits per second, as networks are sold.
    """
    if isinstance(text, bool) or not isinstance(text, str):
        rate = _number(field, text)
    else:
        match = _UNIT.match(text)
        if match is None:
            refuse(field, text, "is not a rate", "write e.g. 160mbit, 16gbps or a number of bits/s")
        rate = _number(field, float(match[1].replace("_", "")) * _scale_of(field, text, match[2]))
    if rate <= 0:
        refuse(field, text, "is no rate", "a link that is down is an outage, not a rate; give at least 1mbit")
    return rate


def _scale_of(field: str, text: str, unit: str) -> float:
    if "B" in unit or re.fullmatch(r"[kmgt]?b(/s)?|[kmgt]?bytes?(/s|ps)?", unit.lower()):
        refuse(field, text, "may mean bytes", "write bits: 1 MB/s is 8mbit")
    known = re.fullmatch(r"([kmgt]?)(bit|bits|bps|bit/s|bits/s|bitps)|", unit.lower())
    if known is None:
        refuse(field, text, f"has the unknown unit {unit!r}", "write kbit, mbit, gbit or kbps, mbps, gbps (decimal)")
    return _PREFIXES[known[1] or ""]


def expected_goodput_bps(rate_bps: float, mtu: int = 1500) -> float:
    """TCP payload that fits in `rate_bps`: 1448/1514 of it at MTU 1500 (IPv4, time stamps; Ethernet header counted)."""
    return rate_bps * (mtu - _IP_TCP_BYTES) / (mtu + ETHERNET_BYTES)


def update(states: Mapping[str, LinkState], body: object) -> dict[str, LinkState]:
    """`states` (direction -> LinkState) with a partial state laid over them.

    `body` is a JSON object: fields of LinkState for both directions, `{"to_pd": {...}}` for one (takes precedence).
    Raises LinkError for an unknown field or a state that cannot be had; `mtu` cannot change on a live link.
    """
    if not isinstance(body, Mapping):
        refuse("link", body, "is not an object", 'send e.g. {"rate_bps": 1e8} or {"to_pd": {"rate_bps": 1e8}}')
    both = {key: value for key, value in body.items() if key not in DIRECTIONS}
    updated = {direction: _overlay(state, both, "") for direction, state in states.items()}
    for direction in (key for key in body if key in DIRECTIONS):
        if direction not in states:
            refuse(direction, body[direction], "is not shaped here", f"use {', '.join(states)}")
        if not isinstance(body[direction], Mapping):
            refuse(direction, body[direction], "is not an object", 'send e.g. {"to_pd": {"rate_bps": 1e8}}')
        updated[direction] = _overlay(updated[direction], body[direction], f"{direction}.")
    return updated


def _overlay(state: LinkState, given: Mapping[str, object], prefix: str) -> LinkState:
    known = [field.name for field in fields(LinkState)]
    for key, value in given.items():
        if key not in known:
            usable = known if prefix else [*known, *DIRECTIONS]
            refuse(prefix + str(key), value, "is no field of the link", f"use one of {', '.join(usable)}")
    if given.get("mtu", state.mtu) != state.mtu:
        refuse(prefix + "mtu", given["mtu"], "cannot change on a live link", "set it where the topology is built")
    try:
        return replace(state, **given)  # type: ignore[arg-type]
    except LinkError as refused:
        raise LinkError(prefix + str(refused), prefix + str(refused.field), refused.value, refused.remedy) from None


def burst_bytes(rate_bps: float) -> int:
    """4 ms of the rate, at least 70 kB: htb's own default loses up to 28 % above 1 Gbit/s, over 10 ms leaks."""
    return max(_BURST_FLOOR_BYTES, math.ceil(rate_bps / 8 * _BURST_S))


def queue_bytes(rate_bps: float, delay_s: float = 0.0) -> int:
    """The leaf's limit: what the link holds in a round trip, 10 ms of the rate and four super-packets at least (else
    TCP starves), and what a burst lets in. `delay_s` is one-way, and taken to be the same both ways."""
    queue_s = max(_QUEUE_S, 2 * delay_s)
    return max(_QUEUE_FLOOR_BYTES, math.ceil(rate_bps / 8 * queue_s)) + burst_bytes(rate_bps)


@dataclass(frozen=True, slots=True)
class Impairment:
    """What the delay line does to one direction; one-way, wall seconds, `loss` a fraction of packets.

    `limit_packets`: what may wait in it, 1.5 x rate x delay in packets of the MTU and a burst, so that it loses none.
    `stalled`: nothing leaves.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    limit_packets: int = _DELAY_LINE_FLOOR
    stalled: bool = False

    @property
    def does_something(self) -> bool:
        return bool(self.delay_s or self.loss or self.stalled)


def impairment(state: LinkState) -> Impairment:
    """What `state` asks of the delay line."""
    waiting_bytes = 1.5 * state.rate_bps / 8 * (state.delay_s + state.jitter_s)
    packets = math.ceil(waiting_bytes / (state.mtu + ETHERNET_BYTES))
    limit_packets = _DELAY_LINE_FLOOR + packets
    return Impairment(state.delay_s, state.jitter_s, state.loss, limit_packets, state.outage == "stall")
