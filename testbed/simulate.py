"""Virtual time: the same policy, control and instances as on the wire, carried by one heap.

The driver decides nothing. It keeps the order of time and carries messages between the pure machines: `control.py`,
the instances, and the link (`netem.fluid`). What happens at one time happens in this order: the link steps, KV lands,
machines wake, requests arrive; messages without a delay are delivered, first in first out, before time moves. Nothing
is left to chance, so a seed gives the same bytes out on every machine.

    from testbed.simulate import simulate
    result = simulate("paper", sets=["workload.load_fraction=0.9"])
    result.requests          # a pandas table, the columns of requests.csv
    result.summary["ttft_s"]

To step through it in a debugger: `world = World(...)`, then `world.step()` until it returns False.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import pandas as pd

from emulator.batching import decode_instance
from emulator.instance import Machine, PrefillInstance
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    Announce,
    AnyMessage,
    Landed,
    StopTransmit,
    Transmit,
)
from netem.fluid import TCP_EFFICIENCY, FluidLink
from netem.link import burst_bytes
from testbed.assemble import (
    build_workload,
    cost_functions,
    instances,
    link_steps,
    policy_setup,
    profiles,
    workload_lengths,
)
from testbed.closed_form import closed_form
from testbed.control import CLIENT, Arrive, Control, NodeSpec, NodeUp, Record
from testbed.policies import load_policy, start_policy
from testbed.report.collect import Collector
from testbed.report.little import GATE_OF, Passages, littles_law
from testbed.report.provenance import provenance
from testbed.report.summary import PERFECT_METER, LinkFigures, summarise
from testbed.report.write import markdown
from testbed.scenario import Deployment, Scenario, ScenarioError, override
from testbed.scenario import load as load_scenario
from testbed.scheduler.api import PD, Policy, Site
from testbed.scheduler.baselines import Homogeneous
from traces.load import Trace
from traces.request import Request

# What comes first at one time. Arrivals come last of all; being sorted, they need no place in the heap.
LINK_STEP: Final = 0
LANDING: Final = 1
WAKE_UP: Final = 2
_NEVER: Final = float("inf")

INTRA_BPS: Final = 800e9
"""KV inside a site, bits/s a pair: the paper's RDMA fabric, taken as 8 x 100 Gbps. On the wire it is loopback."""


class _Port:
    """A machine as the driver reaches it. armed_s: the wake-up that it waits for."""

    __slots__ = ("armed_s", "handle", "name", "next_s", "site")

    def __init__(self, name: str, site: Site, machine: Machine) -> None:
        self.name, self.site = name, site
        self.handle, self.next_s = machine.handle, machine.next_s
        self.armed_s: float | None = None


class World:
    """Everything of one run in virtual time.

    on_end(record): each request as it ends. steps: (model second, bits/s) at which the link's rate changes.
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
    ) -> None:
        by_site = profiles(scenario, deployment)
        decode = by_site[PD]
        self.now_s = 0.0
        self.events = 0
        self.passages = Passages()
        self._on_end = on_end
        self._requests = requests
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = 0
        self._due: deque[tuple[str, Any]] = deque()  # who, and a machine's message or control's event
        self._machines: dict[str, Machine] = {}
        fleet = []
        for name, site, role in instances(deployment):
            fleet.append(NodeSpec(name, site, role, decode.decode_slots if role == "decode" else 0))
            if role == "prefill":
                self._machines[name] = PrefillInstance(
                    name,
                    by_site[site],
                    pieces=scenario.pieces(deployment, site),
                    outbox_bytes=scenario.transport.outbox_bytes,
                )
            else:
                self._machines[name] = decode_instance(
                    name,
                    slots=decode.decode_slots,
                    step_s=decode.decode_step_s,
                    timing=decode.decode_step,
                    landing_bytes=scenario.transport.landing_bytes,
                    token_base=(len(fleet) - 1) << 40,
                )
        self._ports = {spec.name: _Port(spec.name, spec.site, self._machines[spec.name]) for spec in fleet}
        self.control = Control(
            fleet,
            cost_functions(scenario, deployment),
            scenario.link.rate_bps,
            policy,
            Homogeneous(),
            max_attempts=scenario.max_attempts,
        )
        # The bucket of the shaper that a run of this scenario on the wire has, in model bytes of payload.
        wall_bps = scenario.scale.wall_bps(scenario.link.rate_bps)
        bucket = burst_bytes(wall_bps) / scenario.scale.byte_scale * TCP_EFFICIENCY
        self.link = FluidLink(scenario.link.rate_bps, burst_bytes=bucket)
        self._link_armed: float | None = None
        self._receiver = [spec.name for spec in fleet]
        self._next_request = 0
        for spec in fleet:
            self._tell_control(NodeUp(spec.name, spec.role))
        for at_s, rate_bps in steps:
            self._push(at_s, LINK_STEP, rate_bps)
        self._await_arrival()

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
                    if what is not None:
                        self.now_s = now_s
                        self._landed(what)
                    elif now_s == self._link_armed:
                        self.now_s = now_s
                        self._link_armed = None
                        self._land()
                    else:
                        continue
                else:
                    self.now_s = now_s
                    self.link.set_capacity(now_s, what)
                    self._land()
            elif self._arrival_s == _NEVER:
                break
            else:
                now_s = self.now_s = self._arrival_s
                self._arrive()
            while due:
                destination, message = next_message()
                if destination == CONTROL:
                    gate = gate_of(type(message))
                    if gate is not None:  # as Passages.passes; a call would show in the innermost loop
                        counts[gate] += 1
                        sums_s[gate] += now_s
                    for whom, command in tell_control(now_s, message):
                        if whom == CLIENT:
                            on_end(command.record)  # type: ignore[union-attr]
                        else:
                            later((whom, command))
                    continue
                if type(message) is Announce:
                    counts[1] += 1
                    sums_s[1] += now_s
                port = ports[destination]
                for out in port.handle(now_s, message):
                    if out[0] == WIRE:
                        self._tell_wire(port, out[1])
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
            else:
                self._due.append((destination, command))

    # KV
    def _tell_wire(self, sender: _Port, message: AnyMessage) -> None:
        if type(message) is Transmit:
            if sender.site == PD:
                self._push(self._intra_landing_s(message), LANDING, message.token)
            else:
                self.link.transmit(
                    self.now_s,
                    sender.name,
                    message.decode_node,
                    message.token,
                    message.kv_bytes,
                    message.pieces,
                    message.start_s,
                    message.end_s,
                )
                self._land()
        elif type(message) is StopTransmit and sender.site != PD:
            self.link.stop(self.now_s, message.token)
            self._land()

    def _intra_landing_s(self, order: Transmit) -> float:
        """When a transfer inside the site lands: the first piece waits for the grant, the last for the computation."""
        piece_s = order.kv_bytes * 8 / INTRA_BPS / order.pieces
        first_s = order.start_s + (order.end_s - order.start_s) / order.pieces
        return max(max(self.now_s, first_s) + piece_s * order.pieces, max(self.now_s, order.end_s) + piece_s)

    def _land(self) -> None:
        """Deliver what the link has landed by now, and wait for what it does next."""
        for _, token in self.link.advance(self.now_s):
            self._landed(token)
        due_s = self.link.next_s()
        if due_s is not None and due_s != self._link_armed:
            self._link_armed = due_s
            self._push(due_s, LANDING, None)

    def _landed(self, token: int) -> None:
        self.passages.passes(self.now_s, GATE_OF[Landed])
        self._due.append((self._receiver[token >> 40], Landed(token)))


@dataclass(frozen=True, slots=True)
class Result:
    """A run in virtual time.

    requests: the request table (REQUEST_COLUMNS). summary: as summary.json. trace: what was offered.
    """

    requests: pd.DataFrame
    summary: dict[str, Any]
    trace: Trace
    scenario: Scenario
    wall_s: float
    events: int


def simulate(
    scenario: Scenario | str,
    *,
    deployment: str | None = None,
    policy: str | None = None,
    sets: Sequence[str] = (),
    seed: int | None = None,
    workload: tuple[Trace, float] | None = None,
) -> Result:
    """Run a scenario in virtual time. workload: (trace, rate) to offer instead of the scenario's own.

    Deterministic: the same scenario and seed give the same tables, whatever the process or PYTHONHASHSEED. Raises
    ScenarioError and TraceError.
    """
    loaded = load_scenario(scenario, sets) if isinstance(scenario, str) else override(scenario, list(sets))
    loaded = loaded.only(deployment, policy)
    if seed is not None:
        loaded = loaded.model_copy(update={"seed": seed})
    chosen = loaded.deployments[0]
    trace, rate_rps = build_workload(loaded, chosen) if workload is None else workload
    lengths = workload_lengths(loaded, trace)
    expected = closed_form(loaded, chosen, trace, rate_rps)
    made = load_policy(chosen.policy.name)
    start_policy(made, chosen.policy.name, policy_setup(loaded, chosen, lengths, chosen.policy.told))
    collector = Collector()
    world = World(loaded, chosen, made, trace.requests, collector, steps=link_steps(loaded))
    started = time.perf_counter()
    world.run()
    wall_s = time.perf_counter() - started
    window: dict[str, Any] = {"warmup_s": loaded.workload.warmup_s, "duration_s": loaded.workload.duration_s}
    requests = collector.table(**window)
    delivered = round(world.link.delivered_bytes(world.now_s))
    figures = LinkFigures(
        asked={"nominal_bps": loaded.link.rate_bps},
        measured=None,
        wan_tx_bytes=round(delivered / TCP_EFFICIENCY),
        kv_bytes=delivered,
        direct_packets=0,
        retransmits=0,
    )
    totals = {
        "policy_errors": world.control.policy_errors,
        "threshold_tokens": getattr(made, "threshold_tokens", None),
        "time_scale": None,
    }
    law, events = littles_law(world.passages, requests, world.now_s), world.events
    del world, collector  # the table has it all now, and of a million requests twice is much
    summary = summarise(
        requests,
        scheduled=len(trace.requests),
        **window,
        slo_ttft_s=loaded.slo.ttft_p90_s,
        slo_tpot_s=loaded.slo.tpot_s,
        meter=PERFECT_METER,
        link=figures,
        totals=totals,
        expected=expected,
    )
    summary = {
        "scenario": loaded.name,
        "deployment": chosen.name,
        "policy": chosen.policy.name,
        "clock": "virtual",
        "seed": loaded.seed,
        **summary,
        "littles_law": law,
    }
    _judge(summary)
    return Result(requests, summary, trace, loaded, wall_s, events)


def _judge(summary: dict[str, Any]) -> None:
    """A run whose own accounts disagree is no measurement."""
    problems = summary["littles_law"]["problems"]
    if problems:
        reasons = [*problems, *summary["verdict"]["reasons"]]
        summary["verdict"] = {"status": "invalid", "reasons": reasons}


def write(result: Result, out: Path, requests: Literal["none", "csv", "parquet"] | str = "csv") -> None:
    """The results folder of a run in virtual time: as of a run on the wire, without what only the wire has."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "scenario.yaml").write_text(result.scenario.to_yaml())
    facts = provenance(result.scenario, result.trace, None)
    (out / "provenance.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    (out / "summary.json").write_bytes(orjson.dumps(result.summary, option=orjson.OPT_INDENT_2))
    (out / "report.md").write_text(markdown(result.summary))
    if requests == "csv":
        result.requests.to_csv(out / "requests.csv", index=False, float_format="%.9f")
    elif requests == "parquet":
        try:
            result.requests.to_parquet(out / "requests.parquet", index=False)
        except ImportError:
            raise ScenarioError(
                "--requests parquet: pyarrow is not installed; pip install 'prfaas-testbed[parquet]', or use csv"
            ) from None
