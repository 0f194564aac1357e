"""The driver of virtual time: one heap that carries messages between the pure machines, and decides nothing.

What happens at one time happens in this order: the link steps, KV lands, machines wake, converted nodes join, nodes
give an account of themselves, control looks around, cross-traffic comes and goes, requests arrive; messages without a
delay are delivered, first in first out, before time moves. Nothing is left to chance.

Messages between the sites take the link's delay; while it is cut (a rate of 0) they wait for it, as the KV does.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

from emulator.batching import decode_instance
from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.kvcache import CacheShape, NodePool
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    AnyMessage,
    Convert,
    Expect,
    Landed,
    PathSample,
    StopTransmit,
    Telemetry,
    Transmit,
)
from netem.cross import Present, present
from netem.fluid import TCP_EFFICIENCY, FluidLink
from netem.link import burst_bytes
from netem.token_bucket import TokenBucket, TokenBucketSpec
from testbed.assemble import control_rules, cost_functions, instances, profiles
from testbed.control import (
    CLIENT,
    Arrive,
    Control,
    NodeSpec,
    NodeUp,
    PolicyCall,
    Record,
    Tick,
    TickCall,
    call_policy,
    tick_policy,
)
from testbed.report.little import GATE_OF, Passages
from testbed.scenario import Deployment, Scenario
from testbed.scenario_cross import sources
from testbed.scheduler.api import INTRA_BPS, PD, PRFAAS, Policy, Role, Site
from testbed.scheduler.baselines import Homogeneous
from traces.request import Request

# What comes first at one time. Arrivals come last of all; being sorted, they need no place in the heap.
FAULT: Final = -1
LINK_STEP: Final = 0
LANDING: Final = 1
WAKE_UP: Final = 2
JOIN: Final = 3
TELL: Final = 4
LOOK: Final = 5
METER: Final = 6
MESSAGE: Final = 7
CROSS: Final = 8
LANDED: Final = GATE_OF[Landed]
_NEVER: Final = float("inf")

TICK: Final = Tick()
AnyInstance = PrefillInstance | DecodeInstance


class _Port:
    """A machine as the driver reaches it. armed_s: the wake-up that it waits for. quiet: a fault has taken it away."""

    __slots__ = ("armed_s", "handle", "index", "machine", "name", "next_s", "quiet", "role", "site")

    def __init__(self, name: str, index: int, site: Site, role: Role, machine: AnyInstance) -> None:
        self.name, self.index, self.site = name, index, site
        self.armed_s: float | None = None
        self.quiet = False
        self.begin(role, machine)

    def begin(self, role: Role, machine: AnyInstance) -> None:
        """A machine takes its place."""
        self.role, self.machine, self.armed_s = role, machine, None
        self.handle, self.next_s = machine.handle, machine.next_s

    def convert(self, role: Role, machine: AnyInstance) -> None:
        """A machine of another role takes its place: what is still said to the former one is not for it."""
        self.begin(role, machine)
        self.handle = lambda now_s, message: machine.handle(now_s, message) if machine.accepts(message) else []


class _Pipe:
    """One direction of the link between the sites. armed_s: when it is looked at next."""

    __slots__ = ("armed_s", "link")

    def __init__(self, link: FluidLink) -> None:
        self.link = link
        self.armed_s: float | None = None


@dataclass(slots=True)
class _Meter:
    """A cloud's token bucket on one direction of the link."""

    direction: str
    pipe: _Pipe
    bucket: TokenBucket


@dataclass(slots=True)
class _Rivals:
    """What competes with the KV in one direction, now and later."""

    direction: str
    pipe: _Pipe
    later: Iterator[Present]
    now: Present
    next: Present | None = None


class World:
    """Everything of one run in virtual time.

    on_end(record): each request as it ends. steps: (model second, bits/s) at which the link's rate changes. metered:
    the token bucket of each direction, instead. ask, tick: how the policy is called. throttled: what the buckets made
    of the link: (model second, direction, bits/s before and after). link_history: five numbers whenever the nodes give
    an account of themselves: the model second, and of each direction the KV sent so far and the KV that waits, bytes.
    crossings: what cross-traffic came and went: (direction, before, from then on).
    """

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        policy: Policy,
        requests: Sequence[Request],
        on_end: Callable[[Record], None],
        *,
        steps: Sequence[tuple[float, float]] = (),
        metered: TokenBucketSpec | None = None,
        ask: PolicyCall = call_policy,
        tick: TickCall = tick_policy,
    ) -> None:
        self.now_s = 0.0
        self.events = 0
        self.passages = Passages()
        self._scenario, self._deployment = scenario, deployment
        self._profiles = profiles(scenario, deployment)
        self._on_end = on_end
        self._requests = requests
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = 0
        self._due: deque[tuple[str, Any]] = deque()  # who, and a machine's message or control's event
        self._held: list[tuple[str, Any]] | None = None  # messages between the sites, while the link is cut
        self._delay_s = scenario.link.delay_s
        self._apart = self._delay_s > 0  # whether messages between the sites take time
        self._clear_s = 0.0  # nothing between the sites overtakes what left before the delay became shorter
        self._ports: dict[str, _Port] = {}
        fleet = []
        slots = self._profiles[PD].decode_slots
        for index, (name, site, role) in enumerate(instances(deployment)):
            fleet.append(NodeSpec(name, site, role, slots if site == PD else 0))
            self._ports[name] = _Port(name, index, site, role, self._machine(name, index, site, role))
        self._by_index = list(self._ports.values())
        self.control = Control(
            fleet,
            cost_functions(scenario, deployment),
            scenario.link.rate_bps,
            policy,
            Homogeneous(),
            control_rules(scenario, deployment),
            ask=ask,
            tick=tick,
        )
        bucket = self._bucket_bytes(scenario.link.rate_bps)
        flow_bps = scenario.link.per_flow_bps
        pair_bps = None if flow_bps is None else flow_bps * scenario.transport.connections * TCP_EFFICIENCY
        shape: dict[str, Any] = {"burst_bytes": bucket, "per_flow_bps": pair_bps, "delay_s": scenario.link.delay_s}
        self.link = FluidLink(scenario.link.rate_bps, **shape)
        self._to_pd = _Pipe(self.link)
        self._to_prfaas = _Pipe(FluidLink(scenario.link.rate_bps, **shape))
        self._next_request = 0
        for spec in fleet:
            self._tell_control(NodeUp(spec.name, spec.role))
        for at_s, rate_bps in steps:
            self._push(at_s, LINK_STEP, rate_bps)
        self.throttled: list[tuple[float, str, float, float]] = []
        self.link_history = array("d")
        if metered is not None:
            for direction, pipe in (("to_pd", self._to_pd), ("to_prfaas", self._to_prfaas)):
                self._meter(0.0, _Meter(direction, pipe, TokenBucket(metered)), scenario.link.rate_bps)
        self.crossings: list[tuple[str, Present, Present]] = []
        cross = sources(scenario.link.cross_traffic, scenario.seed)
        for direction, pipe in (("to_pd", self._to_pd), ("to_prfaas", self._to_prfaas)):
            self._await_rivals(_Rivals(direction, pipe, present(cross, direction), Present(0.0, 0, 0.0)))
        self._await_arrival()
        self._push(scenario.telemetry_s, TELL, None)
        self._push(self.control.next_s(), LOOK, None)

    @property
    def machines(self) -> dict[str, AnyInstance]:
        """Every instance by name."""
        return {name: port.machine for name, port in self._ports.items()}

    def crossed_bytes(self) -> dict[str, float]:
        """What competed with the KV and crossed, by direction, model bytes, as payload of TCP."""
        return {
            "to_pd": self._to_pd.link.crossed_bytes(self.now_s),
            "to_prfaas": self._to_prfaas.link.crossed_bytes(self.now_s),
        }

    def at(self, at_s: float, happens: Callable[[], None]) -> None:
        """Let a fault happen at a model second, before all else at that time (`testbed.chaos.virtual`)."""
        self._push(at_s, FAULT, happens)

    def run(self) -> None:
        """Until nothing is left to happen: every request has ended and every slot is free."""
        collecting = gc.isenabled()
        gc.disable()  # nothing here makes cycles, and looking for them costs a tenth of the time
        try:
            self._go(None)
        finally:
            if collecting:
                gc.enable()

    def step(self) -> bool:
        """Let the next thing happen, and all that follows from it at that time. False when nothing is left."""
        return self._go(1)

    def _go(self, steps: int | None) -> bool:
        """Let `steps` things happen, or all; whether they did. One loop with its names at hand: it runs 20,000 times a
        thousand requests."""
        heap, due, ports = self._heap, self._due, self._ports
        next_message, later, gate_of = due.popleft, due.append, GATE_OF.get
        counts, sums_s = self.passages.counts, self.passages.sums_s
        tell_control, on_end = self.control.handle, self._on_end
        events, budget = 0, -1 if steps is None else steps
        while budget:
            if heap and heap[0][0] <= self._arrival_s:
                now_s, kind, _, what = heappop(heap)
                if kind == WAKE_UP:
                    if what.armed_s != now_s:
                        continue  # an older wish: the machine has asked for another time since
                    what.armed_s = None
                    self.now_s = now_s
                    later((what.name, WAKE))
                elif kind == LANDING:
                    if type(what) is int:
                        self.now_s = now_s
                        self._landed(what)
                    elif now_s == what.armed_s:
                        self.now_s = now_s
                        what.armed_s = None
                        self._land(what)
                    else:
                        continue
                elif not self._other(now_s, kind, what):
                    continue
            elif self._arrival_s == _NEVER:
                break
            else:
                now_s = self.now_s = self._arrival_s
                self._arrive()
            apart = self._apart
            while due:
                destination, message = next_message()
                if destination == CONTROL:
                    for whom, command in tell_control(now_s, message):
                        if whom == CLIENT:
                            on_end(command.record)  # type: ignore[union-attr]
                        elif apart and ports[whom].site == PRFAAS:
                            self._across((whom, command))
                        elif type(command) is Convert:
                            self._convert(ports[whom], command)
                        else:
                            later((whom, command))
                    continue
                port = ports[destination]
                for out in port.handle(now_s, message):
                    destination, message = out
                    if destination == WIRE:
                        if type(message) is not Expect:
                            self._tell_wire(port, message)
                        continue
                    gate = gate_of(type(message))
                    if gate is not None:  # as Passages.passes; a call would show in the innermost loop
                        counts[gate] += 1
                        sums_s[gate] += now_s
                    if apart and self._crosses(port, destination):
                        self._across(out)
                    else:
                        later(out)
                due_s = port.next_s()
                if due_s is not None and due_s != port.armed_s:
                    port.armed_s = due_s
                    self._order += 1
                    heappush(heap, (due_s, WAKE_UP, self._order, port))
            events += 1
            budget -= 1
        self.events += events
        return budget == 0

    def _other(self, now_s: float, kind: int, what: Any) -> bool:
        """What happens rarely. False: nothing did, and time has not moved."""
        if kind in (TELL, LOOK, METER, CROSS) and self._arrival_s == _NEVER and not self.control.busy:
            return False  # the last request has ended: nobody needs to know
        self.now_s = now_s
        if kind == LINK_STEP:
            self._step_link(now_s, what)
        elif kind == JOIN:
            self._due.append((CONTROL, NodeUp(what.name, what.role)))
        elif kind == TELL:
            self._tell_all()
            self._push(now_s + self._scenario.telemetry_s, TELL, None)
        elif kind == MESSAGE:
            self._due.append(what)
        elif kind == FAULT:
            what()
        elif kind == METER:
            self._meter(now_s, what, what.bucket.rate_bps)
        elif kind == CROSS:
            self._cross(now_s, what)
        else:
            self._tell_control(TICK)
            self._push(self.control.next_s(), LOOK, None)
        return True

    def _convert(self, port: _Port, order: Convert) -> None:
        """As a worker does: the machine of the new role is there at once, and says so when it has reloaded."""
        if port.quiet:  # a dead worker hears nothing, a stopped one later
            port.handle(self.now_s, order)
            return
        role: Role = "prefill" if order.role == "prefill" else "decode"
        if port.machine.accepts(order):
            for out in port.machine.handle(self.now_s, order):  # who waits for a prefix of it is told
                if self._apart and self._crosses(port, out[0]):
                    self._across(out)
                else:
                    self._due.append(out)
        port.convert(role, self._machine(port.name, port.index, port.site, role))
        self._push(self.now_s + order.reload_s, JOIN, port)

    def _machine(self, name: str, index: int, site: Site, role: Role) -> AnyInstance:
        scenario, profile = self._scenario, self._profiles[site]
        if role == "decode":
            return decode_instance(
                name,
                slots=profile.decode_slots,
                step_s=profile.decode_step_s,
                timing=profile.decode_step,
                landing_bytes=scenario.transport.landing_bytes,
                token_base=self._token_base(index),
            )
        pool = None
        if scenario.cache_bytes:
            shape = CacheShape.of(
                profile.s_kv,
                scenario.cache.block_tokens,
                first_tokens=profile.first_tokens,
                last_tokens=profile.last_tokens,
            )
            pool = NodePool(scenario.cache_bytes, shape)
        return PrefillInstance(
            name,
            profile.timing,
            pieces=scenario.pieces(self._deployment, site),
            outbox_bytes=scenario.transport.outbox_bytes,
            pool=pool,
            token_base=self._token_base(index),
            sends_whole=scenario.backend == "hybrid",
        )

    def _token_base(self, index: int) -> int:
        """Where a machine's tokens begin: a later machine of the same node gives none of an earlier one's again."""
        return (index << 40) + (int(self.now_s) << 16 if self.now_s else 0)

    # arrivals
    def _await_arrival(self) -> None:
        """The next request, which comes after everything else that happens at its time."""
        index = self._next_request
        self._arrival_s = self._requests[index].arrival_s if index < len(self._requests) else _NEVER

    def _arrive(self) -> None:
        index = self._next_request
        request = self._requests[index]
        self._next_request = index + 1
        self._await_arrival()
        self.passages.passes(self.now_s, 0)
        event = Arrive(
            f"r{index:07d}",
            request.input_tokens,
            request.output_tokens,
            request.block_hashes,
            request.block_size,
            request.session,
        )
        self._due.append((CONTROL, event))

    # messages
    def _push(self, at_s: float, kind: int, what: Any) -> None:
        self._order += 1
        heappush(self._heap, (at_s, kind, self._order, what))

    def _tell_control(self, event: Any) -> None:
        for destination, command in self.control.handle(self.now_s, event):
            if destination == CLIENT:
                self._on_end(command.record)  # type: ignore[union-attr]
            elif self._apart and self._ports[destination].site == PRFAAS:
                self._across((destination, command))
            elif type(command) is Convert:
                self._convert(self._ports[destination], command)
            else:
                self._due.append((destination, command))

    def _across(self, out: tuple[str, Any]) -> None:
        """A message between the sites: it takes the link's delay, and waits while the link is cut."""
        if self._held is not None:
            self._held.append(out)
        elif self._delay_s:
            self._push(max(self.now_s + self._delay_s, self._clear_s), MESSAGE, out)
        else:
            self._due.append(out)

    def _crosses(self, sender: _Port, destination: str) -> bool:
        """Whether a message goes from one site to the other; control is in the pd site."""
        site = PD if destination == CONTROL else self._ports[destination].site
        return sender.site != site

    def _tell_all(self) -> None:
        """Every node's account of itself. Between the sites it is one more message."""
        now_s = self.now_s
        unsent: dict[str, float] = {}
        landed: dict[str, dict[str, int]] = {}
        for sender, receiver, sent, waiting in self.link.paths(now_s):
            unsent[sender] = unsent.get(sender, 0.0) + waiting
            landed.setdefault(receiver, {})[sender] = round(sent)
        back = self._to_prfaas.link
        returning = 0.0 if back.idle else sum([waiting for _, _, _, waiting in back.paths(now_s)])
        sent_both = (self.link.delivered_bytes(now_s), back.delivered_bytes(now_s))
        self.link_history.extend((now_s, sent_both[0], sum(unsent.values()), sent_both[1], returning))
        for port in self._by_index:
            if port.quiet:
                continue
            machine = port.machine
            outbox = landing = grants = tokens = 0
            paths: tuple[PathSample, ...] = ()
            if isinstance(machine, PrefillInstance):
                outbox, tokens = machine.outbox_used, machine.queued_tokens
                waits = unsent.get(port.name, 0.0)
                if waits:
                    paths = (PathSample("", 0.0, 0, 0, 0.0, round(waits)),)
            else:
                landing, grants = machine.landing_used, machine.waiting_grants
            told = Telemetry(
                node=port.name,
                t_s=now_s,
                queued_requests=machine.queued_requests,
                queued_tokens=tokens,
                running_requests=machine.running_requests(now_s),
                outbox_bytes=outbox,
                landing_bytes=landing,
                waiting_grants=grants,
                kv_sent_bytes=0,
                kv_landed_bytes=landed.get(port.name, {}),
                wire_landed_bytes={},
                refused_frames=0,
                late_p99_s=0.0,
                late_max_s=0.0,
                paths=paths,
            )
            if self._apart and port.site == PRFAAS:
                self._across((CONTROL, told))
            else:
                self._due.append((CONTROL, told))

    # KV
    def _step_link(self, now_s: float, rate_bps: float) -> None:
        for pipe in (self._to_pd, self._to_prfaas):
            pipe.link.set_capacity(now_s, rate_bps, self._bucket_bytes(rate_bps) if rate_bps > 0 else None)
            self._land(pipe)
        if rate_bps <= 0:
            self._held = [] if self._held is None else self._held
        elif self._held is not None:
            held, self._held = self._held, None
            for out in held:
                self._across(out)
        self._apart = self._held is not None or self._delay_s > 0

    def _meter(self, now_s: float, meter: _Meter, before_bps: float) -> None:
        """Tell the bucket what has been sent, and the link what it may send from now on."""
        link = meter.pipe.link
        rate_bps = meter.bucket.advance(now_s, self._sent_bytes(link) * 8 / TCP_EFFICIENCY)
        if rate_bps != before_bps:
            link.set_capacity(now_s, rate_bps, self._bucket_bytes(rate_bps))
            self.throttled.append((now_s, meter.direction, before_bps, rate_bps))
        self._land(meter.pipe)
        self._push(meter.bucket.next_s(), METER, meter)

    def _sent_bytes(self, link: FluidLink) -> float:
        """All that one direction has sent, KV and what competes with it, as payload."""
        return link.delivered_bytes(self.now_s) + link.crossed_bytes(self.now_s)

    def _await_rivals(self, rivals: _Rivals) -> None:
        rivals.next = next(rivals.later, None)
        if rivals.next is not None:
            self._push(rivals.next.at_s, CROSS, rivals)

    def _cross(self, now_s: float, rivals: _Rivals) -> None:
        """Cross-traffic comes or goes. TCP shares by connection: a flow of it weighs as one of a pair's connections."""
        assert rivals.next is not None
        self.crossings.append((rivals.direction, rivals.now, rivals.next))
        rivals.now = rivals.next
        flows = rivals.now.flows / self._scenario.transport.connections
        rivals.pipe.link.set_cross(now_s, flows, rivals.now.constant_bps)
        self._land(rivals.pipe)
        self._await_rivals(rivals)

    def _bucket_bytes(self, rate_bps: float) -> float:
        """The bucket of the shaper that a run of this scenario on the wire has, in model bytes of payload."""
        scale = self._scenario.scale
        return burst_bytes(scale.wall_bps(rate_bps)) / scale.byte_scale * TCP_EFFICIENCY

    def _tell_wire(self, sender: _Port, message: AnyMessage) -> None:
        if type(message) is Transmit:
            to_site = self._ports[message.decode_node].site
            if sender.site == to_site:
                self._push(self._intra_landing_s(message), LANDING, message.token)
                return
            pipe = self._to_pd if to_site == PD else self._to_prfaas
            pipe.link.transmit(
                self.now_s,
                sender.name,
                message.decode_node,
                message.token,
                message.kv_bytes,
                message.pieces,
                message.start_s,
                message.end_s,
            )
            self._land(pipe)
        elif type(message) is StopTransmit:
            to_site = self._ports[message.decode_node].site
            if sender.site != to_site:
                pipe = self._to_pd if to_site == PD else self._to_prfaas
                pipe.link.stop(self.now_s, message.token)
                self._land(pipe)

    def _intra_landing_s(self, order: Transmit) -> float:
        """When a transfer inside the site lands: the first piece waits for the grant, the last for the computation."""
        piece_s = order.kv_bytes * 8 / INTRA_BPS / order.pieces
        first_s = order.start_s + (order.end_s - order.start_s) / order.pieces
        return max(max(self.now_s, first_s) + piece_s * order.pieces, max(self.now_s, order.end_s) + piece_s)

    def _land(self, pipe: _Pipe) -> None:
        """Deliver what the link has landed by now, and wait for what it does next."""
        link = pipe.link
        for _, token in link.advance(self.now_s):
            self._landed(token)
        due_s = link.next_s()
        if due_s is not None and due_s != pipe.armed_s:
            pipe.armed_s = due_s
            self._push(due_s, LANDING, pipe)

    def _landed(self, token: int) -> None:
        port = self._by_index[token >> 40]
        if port.role == "decode":
            self.passages.counts[LANDED] += 1
            self.passages.sums_s[LANDED] += self.now_s
        self._due.append((port.name, Landed(token)))
