"""An experiment in virtual time: the same faults, brought about in the driver of virtual time (`testbed.world`).

A killed worker's machine is gone; control and the other workers hear of it as they do on the wire, by the connection
that breaks (between the sites: the link's delay later). A frozen one hears and says nothing, gives no account of
itself, and the KV that it sends or takes stands still; when it goes on it first catches up with its schedule, as a
stopped process does. Faults of the link are steps of its rate and delay.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify
from typing import Any

import pandas as pd

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.messages import CONTROL, WAKE, WIRE, Convert, Out, PeerLost
from testbed.assemble import build_workload, instances, policy_setup, workload_lengths
from testbed.chaos import faults
from testbed.chaos.experiment import Experiment
from testbed.chaos.journal import Check, Journal
from testbed.chaos.load import leaving, stalled
from testbed.chaos.orders import hinder
from testbed.control import ClientGone, NodeLost, NodeUp, Record
from testbed.link_schedule import bucket_of, link_steps
from testbed.policies import load_policy, start_policy, wants_future
from testbed.report.collect import Collector
from testbed.scenario import Scenario, ScenarioError
from testbed.told import KnownFuture
from testbed.world import JOIN, LANDING, WAKE_UP, World

KILLED = "the connection was reset"


Rest = tuple[str, str, int, float, int, float, float]
"""What is left of a transfer, as `FluidLink.transmit` takes it."""


@dataclass(slots=True)
class _Frozen:
    """What a frozen worker finds when it goes on: what came for it, and the KV that stood still."""

    held: list[Any] = field(default_factory=list)
    transfers: list[Rest] = field(default_factory=list)
    events: list[tuple[float, int, Any]] = field(default_factory=list)


def run(experiment: Experiment, scenario: Scenario, policy: str, journal: Journal) -> pd.DataFrame:
    """Run it under a policy; the request table, with ended_s. scenario: `experiment.resolved`."""
    experiment.check_clock("virtual")
    loaded = scenario.only(None, policy)
    deployment = loaded.deployments[0]
    trace, _ = build_workload(scenario, scenario.deployments[0])  # the same requests for every policy
    trace = stalled(trace, experiment)
    lengths = workload_lengths(loaded, trace)
    made = load_policy(policy)
    future = KnownFuture.of(loaded, deployment, trace).told() if wants_future(made) else None
    start_policy(made, policy, policy_setup(loaded, deployment, lengths, deployment.policy.told, future))
    ends: dict[str, float] = {}
    collector = Collector()

    def ended(record: Record) -> None:
        ends[record.request_id] = world.now_s
        collector(record)

    steps = faults.effective_rates(loaded.link.rate_bps, link_steps(loaded), experiment.method)
    world = World(loaded, deployment, made, trace.requests, ended, steps=steps, metered=bucket_of(loaded))
    troubles = Troubles(world, loaded, experiment, journal)
    troubles.plan()
    world.run()
    journal.checks(troubles.checks(loaded.link.rate_bps if not steps else steps[-1][1]))
    table = collector.table(warmup_s=loaded.workload.warmup_s, duration_s=loaded.workload.duration_s)
    table["ended_s"] = table["request_id"].map(ends)
    return table


class Troubles:
    """The faults of an experiment in one World."""

    def __init__(self, world: World, scenario: Scenario, experiment: Experiment, journal: Journal) -> None:
        self._world, self._scenario, self._experiment, self._journal = world, scenario, experiment, journal
        self._frozen: dict[str, _Frozen] = {}
        self._roles = {name: role for name, _, role in instances(scenario.deployments[0])}
        self._hinders: dict[str, list[Any]] = {}

    def plan(self) -> None:
        """Enter every fault, and its healing, into the world's heap."""
        for fault in self._experiment.method:
            begin, heal = self._actions(fault)
            what = faults.describe(fault)
            if heal is not None:
                self._at(fault.healed_s, f"{what}: healed", heal)
            self._at(fault.at_s, what, begin)
        for at_s, delay_s in faults.effective_delays(self._scenario.link.delay_s, self._experiment.method):
            self._world.at(at_s, partial(self._set_delay, delay_s))

    def _at(self, at_s: float, what: str, happens: Callable[[], Any]) -> None:
        def now() -> None:
            detail = happens()
            self._journal.did(what, asked_s=at_s, true_s=self._world.now_s, detail=detail or "")

        self._world.at(at_s, now)

    def _actions(self, fault: Any) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
        match fault:
            case faults.SlowWorker() | faults.LandingFull():
                return lambda: self._hinder(fault, True), lambda: self._hinder(fault, False)
            case faults.KilledWorker(node=node):
                return lambda: self._kill([node]), lambda: self._start([node])
            case faults.FrozenWorker(node=node):
                return lambda: self._freeze(node), lambda: self._thaw(node)
            case faults.LostSite(how=how):
                site = [name for name in self._roles if name.startswith("prfaas-")]
                if how == "killed":
                    return lambda: self._kill(site), lambda: self._start(site)
                return lambda: self._each(self._freeze, site), lambda: self._each(self._thaw, site)
            case faults.ClientsLeave():
                return lambda: self._leave(fault), None
            case _:  # of the link, whose steps the world has already; or of the load, whose requests it has
                return lambda: None, lambda: None

    @staticmethod
    def _each(do: Callable[[str], None], nodes: list[str]) -> None:
        for name in nodes:
            do(name)

    # workers
    def _hinder(self, fault: Any, begins: bool) -> None:
        held = self._hinders.setdefault(fault.node, [])
        if begins:
            held.append(fault)
        else:
            held.remove(fault)
        order = hinder(held, self._scenario)
        self._world._due.append((fault.node, order))

    def _kill(self, nodes: list[str]) -> None:
        world = self._world
        for name in nodes:
            port = world._ports[name]
            port.quiet = True
            port.handle, port.next_s = lambda now_s, message: [], lambda: None
            self._take_kv(name)
            self._take_events(name)
        for name in nodes:
            self._from(name, (CONTROL, NodeLost(name, KILLED)))
            for other, port in world._ports.items():
                if not port.quiet or other in self._frozen:
                    self._from(name, (other, PeerLost(name)))

    def _start(self, nodes: list[str]) -> None:
        world = self._world
        for name in nodes:
            port = world._ports[name]
            role = self._roles[name]
            port.begin(role, world._machine(name, port.index, port.site, role))
            port.quiet = False
            self._from(name, (CONTROL, NodeUp(name, role)))

    def _freeze(self, name: str) -> None:
        port = self._world._ports[name]
        frozen = self._frozen[name] = _Frozen()
        port.quiet = True

        def hold(now_s: float, message: Any) -> list[Out]:
            if message is not WAKE:
                frozen.held.append(message)
            return []

        port.handle, port.next_s = hold, lambda: None
        frozen.transfers = self._take_kv(name)
        frozen.events = self._take_events(name)

    def _thaw(self, name: str) -> None:
        """As a process that goes on: what was due first, with its scheduled times; then what came."""
        world, frozen = self._world, self._frozen.pop(name)
        port, now_s = world._ports[name], world.now_s
        machine = port.machine
        port.begin(port.role, machine)
        port.quiet = False
        while (due_s := machine.next_s()) is not None and due_s <= now_s:
            self._say(name, machine.handle(due_s, WAKE))
        for at_s, kind, what in frozen.events:
            world._push(max(at_s, now_s), kind, what)
        for message in frozen.held:
            if type(message) is Convert:
                world._convert(port, message)
            else:
                self._say(name, port.handle(now_s, message))
        for transfer in frozen.transfers:
            self._send_on(transfer)
        due_s = port.next_s()
        if due_s is not None:
            port.armed_s = due_s
            world._push(due_s, WAKE_UP, port)

    def _say(self, name: str, out: list[Out]) -> None:
        world = self._world
        port = world._ports[name]
        for destination, message in out:
            if destination == WIRE:
                world._tell_wire(port, message)
            else:
                self._from(name, (destination, message))

    def _from(self, name: str, out: tuple[str, Any]) -> None:
        world = self._world
        if world._apart and world._crosses(world._ports[name], out[0]):
            world._across(out)
        else:
            world._due.append(out)

    # KV
    def _take_kv(self, name: str) -> list[Rest]:
        world = self._world
        rest = []
        for pipe in (world._to_pd, world._to_prfaas):
            rest += pipe.link.withdraw(world.now_s, name)
            world._land(pipe)
        return rest

    def _send_on(self, transfer: Rest) -> None:
        """A transfer goes on where it stood; not if its other end has given it up meanwhile or stands still itself."""
        world = self._world
        sender, receiver, token = transfer[:3]
        for other in (sender, receiver):
            if other in self._frozen:
                self._frozen[other].transfers.append(transfer)
                return
        if not self._wanted(sender, receiver, token):
            return
        pipe = world._to_pd if world._ports[receiver].site == "pd" else world._to_prfaas
        pipe.link.transmit(world.now_s, *transfer)
        world._land(pipe)

    def _wanted(self, sender: str, receiver: str, token: int) -> bool:
        machines = self._world.machines
        taker, giver = machines[receiver], machines[sender]
        if isinstance(taker, DecodeInstance) and isinstance(giver, PrefillInstance):
            return token in taker._coming and any(job.token == token for job in giver._unsent.values())
        return not self._world._ports[sender].quiet  # a cached prefix: a token nobody waits for is passed over

    def _take_events(self, name: str) -> list[tuple[float, int, Any]]:
        """What was to happen to the worker: its own KV inside the site that was to land, and its joining."""
        world = self._world
        port = world._ports[name]
        sent = set()
        if isinstance(port.machine, PrefillInstance):
            sent = {job.token for job in port.machine._unsent.values() if job.token is not None}
        heap = world._heap
        taken: list[Any] = []
        kept: list[Any] = []
        for entry in heap:
            _, kind, _, what = entry
            its_kv = kind == LANDING and type(what) is int and what in sent
            (taken if its_kv or (kind == JOIN and what is port) else kept).append(entry)
        heap[:] = kept
        heapify(heap)
        return [(at_s, kind, what) for at_s, kind, _, what in sorted(taken, key=lambda entry: entry[:3])]

    # the link, the clients
    def _set_delay(self, delay_s: float) -> None:
        world = self._world
        world._clear_s = max(world._clear_s, world.now_s + world._delay_s)
        world._delay_s = delay_s
        for pipe in (world._to_pd, world._to_prfaas):
            pipe.link.delay_s = delay_s
        world._apart = world._held is not None or delay_s > 0 or world._clear_s > world.now_s

    def _leave(self, fault: faults.ClientsLeave) -> str:
        world = self._world
        live = list(world.control.live)
        gone = leaving(live, fault.fraction, random.Random(f"{self._scenario.seed} {fault.at_s}"))
        for request_id in gone:
            world._tell_control(ClientGone(request_id))
        return f"{len(gone)} of {len(live)}"

    # afterwards
    def checks(self, rate_bps: float) -> list[Check]:
        """What is left of the faults, when every request has ended. rate_bps: what the link is to have."""
        world, control = self._world, self._world.control
        out = []
        for direction, pipe in (("to_pd", world._to_pd), ("to_prfaas", world._to_prfaas)):
            found_bps = pipe.link.capacity_bps
            out.append(Check(f"link {direction}: rate, bits/s", abs(found_bps - rate_bps) < 1, found_bps))
            delay_s = pipe.link.delay_s
            out.append(Check(f"link {direction}: delay, s", delay_s == self._scenario.link.delay_s, delay_s))
            out.append(Check(f"link {direction}: nothing under way", pipe.link.idle, ""))
        alive = {name for name, node in control.view.nodes.items() if node.alive and not node.draining}
        quiet = [name for name, port in world._ports.items() if port.quiet or name not in alive]
        out.append(Check("every worker runs and is known to control", not quiet, ", ".join(quiet)))
        out.append(Check("control: requests under way", not control.live and not control.waiting, len(control.live)))
        for name, machine in world.machines.items():
            out += machine_checks(name, machine, world.now_s)
        counted = [n.name for n in control.view.nodes.values()
                   if n.queued_requests or n.queued_tokens or n.assigned_requests or n.decoding_requests]  # fmt: skip
        out.append(Check("control: nothing counted at a worker", not counted, ", ".join(counted)))
        return out


def machine_checks(name: str, machine: PrefillInstance | DecodeInstance, now_s: float) -> list[Check]:
    """What a machine still holds of requests that have all ended."""
    if isinstance(machine, PrefillInstance):
        held = {"queued": machine.queued_requests, "outbox": machine.outbox_used}
        if machine.pool is not None:
            held["blocks held"] = machine.pool.referenced_blocks
    else:
        slots = machine.running_requests(float("inf"))
        held = {"landed": machine.queued_requests, "landing": machine.landing_used, "slots": slots,
                "waiting grants": machine.waiting_grants}  # fmt: skip
    left = {what: count for what, count in held.items() if count}
    text = ", ".join(f"{what} {count}" for what, count in left.items())
    return [Check(f"{name}: reservations, slots and queue are empty", not left, text)]


def refuse_future(policy: str) -> None:
    """Raises ScenarioError for a policy that would have to be told the faults beforehand."""
    if wants_future(load_policy(policy)):
        raise ScenarioError(f"--policy {policy}: it is told the link's future, and a fault has none; leave it out")
