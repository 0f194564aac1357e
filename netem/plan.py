"""What it takes to get a LinkState out of the kernel: qdiscs, classes and filters of one egress interface, as data.

`plan` is pure; `tc.py` carries a plan to the kernel and reads it back. How an interface is laid out (`Layout`) stays as
it is for as long as the interface lives; states only change rates, limits, delays and losses in it.

    root htb ── 1:10 KV ── its queue            or, with caps a flow:   1:10 KV ── 1:100.. one class a connection
             └─ 1:20 control ── its queue                                       ├─ 1:12 what acknowledges them
                                                                                └─ 1:11 everything else
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from netem.link import CONTROL_PORTS, ETHERNET_BYTES, LinkState, burst_bytes, queue_bytes, refuse

ROOT_HANDLE = "1:0"
KV_CLASS = "1:10"
CONTROL_CLASS = "1:20"
REST_CLASS = "1:11"
ACK_CLASS = "1:12"

DATA_PORTS = (7296, 0xFF80)  # first port, mask: where KV is received, docs/contracts.md
FLOW_PORTS = (0x4000, 0xC000)  # 16384-32767: a connection's end there is numbered, its low byte is the flow's number
FLOWS = 248
PROBE_FLOWS = range(FLOWS, 256)
"""The numbers of the transport's connections are below, those of the probe's above."""

NETEM_ORDER_BPS = 32e9
"""Where netem has a rate, it keeps packets in order, also when a delay gets shorter. This one limits nothing."""
MIN_RATE_OF_A_FLOW_BPS = 3000.0
"""What a flow's class is guaranteed: next to nothing, all of them less than 1 Mbit/s. What it has, it borrows."""

_QUANTUM_BYTES = 60_000


@dataclass(frozen=True, slots=True)
class Layout:
    """`netem`: queues delay and lose by netem; else they are plain and the delay line does that. `flows`: how many of
    the transport's connections have a class of their own, capped at `per_flow_bps`; None for no caps."""

    netem: bool = False
    flows: int | None = None

    def __post_init__(self) -> None:
        if self.flows is None:
            return
        if isinstance(self.flows, bool) or not isinstance(self.flows, int) or not 0 <= self.flows <= FLOWS:
            refuse("flows", self.flows, "is no number of connections", f"give 0 to {FLOWS}")


@dataclass(frozen=True, slots=True)
class Root:
    """The htb root. `default`: the class of what no filter selects; htb takes its *number* ("1:10" -> 0x10)."""

    handle: str
    default: str


@dataclass(frozen=True, slots=True)
class RateClass:
    """An htb class: rate = ceil, burst = cburst. Bits/s and bytes."""

    handle: str
    parent: str
    rate_bps: float
    burst_bytes: int
    quantum_bytes: int
    prio: int


@dataclass(frozen=True, slots=True)
class ShareClass:
    """An htb class that borrows what it has from its parent, up to `ceil_bps` (burst: `cburst_bytes`).

    `burst_bytes`: of MIN_RATE_OF_A_FLOW_BPS, its own. Those that are busy share the parent by `quantum_bytes`, evenly.
    """

    handle: str
    parent: str
    ceil_bps: float
    cburst_bytes: int
    burst_bytes: int
    quantum_bytes: int
    prio: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A class's queue (bfifo), in bytes, as super-packets make a count of packets mean nothing."""

    handle: str
    parent: str
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Netem:
    """A class's queue where netem delays: each packet by `delay_us`; `loss` is the fraction that never arrives.

    `limit_packets`: of the MTU each (the WAN's links carry no super-packets then), waiting for delay and for the rate.
    """

    handle: str
    parent: str
    delay_us: int
    loss: float
    limit_packets: int


@dataclass(frozen=True, slots=True)
class PortFilter:
    """TCP over IPv4 whose source ("sport") or destination ("dport") & mask == port goes to `target`."""

    parent: str
    target: str
    prio: int
    end: str
    port: int
    mask: int


AnyClass = RateClass | ShareClass
Queue = Leaf | Netem
Command = Root | AnyClass | Queue | PortFilter


def flow_class(number: int) -> str:
    """The class of a numbered connection."""
    return f"1:{0x100 + number:x}"


def plan(state: LinkState, layout: Layout = Layout(), *, netem_delays: bool = True) -> tuple[Command, ...]:
    """What one egress interface needs for `state`, in the order to add it: every class before what refers to it.

    KV and control stand side by side: KV gets exactly its rate, whatever control does, and control is served first.
    Where connections have classes of their own, each gets at most `per_flow_bps`, and so does all that is not numbered,
    together; what only acknowledges is not capped. `netem_delays`: False where the delay line delays all the same, and
    netem is a queue. Raises LinkError for a state that this layout cannot have.
    """
    _check(state, layout)
    delay_s, loss = (state.delay_s, state.loss) if netem_delays else (0.0, 0.0)

    def queue(number: int, parent: str, rate_bps: float) -> Queue:
        limit_bytes = queue_bytes(rate_bps, state.delay_s)
        if not layout.netem:
            return Leaf(f"{number:x}:0", parent, limit_bytes)
        waiting_bytes = limit_bytes + 1.5 * rate_bps / 8 * delay_s
        limit_packets = math.ceil(waiting_bytes / (state.mtu + ETHERNET_BYTES))
        return Netem(f"{number:x}:0", parent, round(delay_s * 1e6), loss, limit_packets)

    def rate(handle: str, rate_bps: float, prio: int) -> RateClass:
        return RateClass(handle, ROOT_HANDLE, rate_bps, burst_bytes(rate_bps), _QUANTUM_BYTES, prio)

    def share(handle: str, ceil_bps: float) -> ShareClass:
        frame_bytes = state.mtu + ETHERNET_BYTES
        return ShareClass(handle, KV_CLASS, ceil_bps, burst_bytes(ceil_bps), frame_bytes, _QUANTUM_BYTES, 1)

    commands: list[Command] = [Root(ROOT_HANDLE, KV_CLASS if layout.flows is None else REST_CLASS)]
    commands.append(rate(KV_CLASS, state.rate_bps, 1))
    numbers = [] if layout.flows is None else [*range(layout.flows), *PROBE_FLOWS]
    if state.per_flow_bps is not None:
        commands += [share(REST_CLASS, state.per_flow_bps), queue(0x11, REST_CLASS, state.per_flow_bps)]
        commands += [share(ACK_CLASS, state.rate_bps), queue(0x12, ACK_CLASS, state.rate_bps)]
    else:
        commands.append(queue(0x10, KV_CLASS, state.rate_bps))
    commands.append(rate(CONTROL_CLASS, state.control_rate_bps, 0))
    commands.append(queue(0x20, CONTROL_CLASS, state.control_rate_bps))
    if state.per_flow_bps is not None:
        for number in numbers:
            handle = flow_class(number)
            commands += [share(handle, state.per_flow_bps), queue(0x100 + number, handle, state.per_flow_bps)]
    return (*commands, *_filters(numbers))


def _check(state: LinkState, layout: Layout) -> None:
    if (state.per_flow_bps is not None) != (layout.flows is not None):
        remedy = "a cap can get another value, but neither come nor go: set link.per_flow_bps where the link is started"
        refuse("per_flow_bps", state.per_flow_bps, "cannot be had on this link as it is laid out", remedy)
    if layout.netem and state.rate_bps > NETEM_ORDER_BPS:
        remedy = f"give at most {NETEM_ORDER_BPS:.0e}, or take delay_by: nfqueue"
        refuse("rate_bps", state.rate_bps, "bits/s is more than netem keeps in order", remedy)


def _filters(numbers: list[int]) -> list[PortFilter]:
    """In the order in which they are asked. A sender is known by its own end; of the probe's connections, whose server
    may be the sender, by the client's; a receiver of KV by its port."""
    found = [
        PortFilter(ROOT_HANDLE, CONTROL_CLASS, prio, end, *CONTROL_PORTS)
        for prio, end in enumerate(("sport", "dport"), start=1)
    ]
    base, mask = FLOW_PORTS
    for prio, end, told_apart in ((3, "sport", numbers), (4, "dport", [n for n in numbers if n in PROBE_FLOWS])):
        for number in told_apart:
            found.append(PortFilter(ROOT_HANDLE, flow_class(number), prio, end, base | number, mask | 0xFF))
    if numbers:
        found.append(PortFilter(ROOT_HANDLE, ACK_CLASS, 5, "sport", *DATA_PORTS))
    return found
