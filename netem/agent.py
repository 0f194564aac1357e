"""The shaper's process, beside the link in the WAN's namespace: `python -m netem.agent --config FILE`.

Shapes every direction at start, says so by its ready file, and then serves HTTP on a Unix socket (which crosses network
namespaces), see `netem.agent_http`. Every applied step is logged with the time at which the kernel had it, and counters
are sampled. What it shaped stays shaped when it leaves, and a link in an outage stays in it: a link without its agent
must not become a better one. The next agent brings it to its own base state.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from aiohttp import web
from pyroute2.netlink.exceptions import NetlinkError

from netem.agent_http import application
from netem.backend import Asked, Delays, choose, tried, tried_here
from netem.keeper import Keeper
from netem.layers import Layer, LayerSpec, effective
from netem.link import DIRECTIONS, Impairment, LinkError, LinkState, update
from netem.log import Log, configure
from netem.outage import Outages
from netem.plan import CONTROL_CLASS, KV_CLASS, REST_CLASS, Layout, Netem, RateClass, ShareClass
from netem.plugged import open_way
from netem.segments import are_single
from netem.tc import Applied, Counters, Shaper

COUNTER_COLUMNS = (
    "t_ns",
    "direction",
    "kv_bytes",
    "control_bytes",
    "drops",
    "backlog_bytes",
    "rate_bps",
    "direct_packets",
    "outage",
    "line_held",
    "line_lost",
    "line_late_s",
    "line_down",
)
"""The last four are the delay line's, empty while there is none: `netem.delay.Line.describe`'s held, lost, late_p99_s,
and 1 while it is dead."""
MIN_STEP_S = 0.02  # htb times what is queued at the old rate until its next event; steps closer than this blur
RETRY_S = 0.5

_TOLD = (RateClass, ShareClass, Netem)
_TOLD_HANDLES = (KV_CLASS, REST_CLASS, CONTROL_CLASS, "10:0", "11:0", "20:0")
"""What GET /link tells of what the kernel keeps; the other flows' classes are as the rest's is."""

_log = Log("agent")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent's JSON file. Wall units.

    `socket`: path of the Unix socket. `interfaces`: direction -> interface name. `state`: as for PUT /link, with
    `rate_bps` for every direction. `applied_log`: JSON lines, one a step that was applied. `counters_csv`:
    COUNTER_COLUMNS, both directions every `sample_s`. `ready_file`: made, holding the pid, once the link is shaped.
    `seed`: of losses and jitter. The delay line's socket and configuration lie beside `socket`, its log in `log_dir`
    (None: there too). `delay_by`: what delays and loses, "auto" for what this kernel does best (`netem.backend`).
    `flows`: how many of the transport's connections are numbered, and capped where `state` has `per_flow_bps`. `opens`:
    the WAN forwards nothing yet, and is let to once it is shaped (`netem.plugged`).
    `log_level`: as `netem.log.LEVELS`.
    """

    socket: str
    interfaces: Mapping[str, str]
    state: Mapping[str, Any]
    applied_log: str
    counters_csv: str
    ready_file: str
    sample_s: float = 0.25
    seed: int = 1
    log_dir: str | None = None
    delay_by: Asked = "auto"
    flows: int = 0
    opens: bool = False
    log_level: str = "info"

    @property
    def layout_flows(self) -> int | None:
        """`netem.plan.Layout.flows`."""
        capped = any(state.per_flow_bps is not None for state in self.states().values())
        return self.flows if capped else None

    @classmethod
    def load(cls, path: Path) -> AgentConfig:
        """Raises LinkError naming the file and the field."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as wrong:
            raise LinkError(f"{path}: no readable JSON ({wrong}); give the agent's configuration file") from wrong
        names = {member.name for member in dataclasses.fields(cls)}
        needed = {member.name for member in dataclasses.fields(cls) if member.default is dataclasses.MISSING}
        if not isinstance(raw, dict) or not needed <= raw.keys() <= names:
            raise LinkError(f"{path}: needs the fields {sorted(needed)} and takes no others than {sorted(names)}")
        config = cls(**raw)
        if not config.interfaces or not config.interfaces.keys() <= set(DIRECTIONS):
            raise LinkError(f"{path}: interfaces: {config.interfaces!r} needs one or both of {', '.join(DIRECTIONS)}")
        if not isinstance(config.state, dict):
            raise LinkError(f'{path}: state: {config.state!r} is not an object; give e.g. {{"rate_bps": 1e8}}')
        if isinstance(config.sample_s, bool) or not isinstance(config.sample_s, int | float) or config.sample_s < 0.01:
            raise LinkError(f"{path}: sample_s: {config.sample_s!r} is no interval; give at least 0.01 (seconds)")
        return config

    def states(self) -> dict[str, LinkState]:
        """The initial state of each direction. Raises LinkError."""
        mtu = self.state.get("mtu", 1500)
        placeholders = {direction: LinkState(rate_bps=1e9, mtu=mtu) for direction in self.interfaces}
        states = update(placeholders, self.state)
        for direction in self.interfaces:
            if "rate_bps" not in self.state and "rate_bps" not in self.state.get(direction, {}):
                raise LinkError(f"state: {direction} has no rate_bps; name the link's rate in bits/s")
        return states


@dataclass(slots=True)
class Agent:
    """The link of one testbed: a Shaper a direction, the delay line and the outages; what was asked, when it took hold.

    `base` is what PUT /link says, `layers` what lies over it, in the order in which they were made; `states` is what
    came out of both and the kernel has. `leaving`: layers end, and the link stays as it is.
    """

    config: AgentConfig
    shapers: Mapping[str, Shaper]
    keeper: Keeper
    outages: Outages
    delays: Delays
    applied_log: TextIO
    counters_csv: TextIO
    base: dict[str, LinkState] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    states: dict[str, LinkState] = field(default_factory=dict)
    applied: dict[str, Applied] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _known: bool = False
    _stalled: set[str] = field(default_factory=set)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Shape the link as configured. Raises LinkError."""
        self.base = self.config.states()
        await self.apply(self.base)

    async def apply(self, states: Mapping[str, LinkState], layer: str | None = None) -> None:
        """Bring every direction to `states`, log the steps; an unchanged one is left alone. Raises LinkError.

        `layer`: on whose behalf, for the log.
        """
        line_has_all = self.delays.check(states)
        self._known = False
        cut = any(state.outage and not self._is_cut(direction) for direction, state in states.items())
        # An outage at its time, and not when the rates are set; and no packet passes between two delays.
        first = cut or line_has_all != self.delays.line_has_all
        delayed = await self._cut(states, line_has_all) if first else set()
        cut_ns = time.monotonic_ns()
        shaped = {
            direction: await self.shapers[direction].apply(state, netem_delays=not line_has_all)
            for direction, state in states.items()
        }
        if not first:
            delayed = await self._cut(states, line_has_all)
            cut_ns = time.monotonic_ns()
        self.delays.line_has_all = line_has_all
        for direction, state in states.items():
            applied = shaped[direction]
            self.states[direction] = state
            if direction in delayed:
                t_applied_ns = max(cut_ns, applied.t_applied_ns if applied.commands else 0)
                applied = dataclasses.replace(applied, t_applied_ns=t_applied_ns, commands=applied.commands + 1)
            if not applied.commands:
                continue
            self.applied[direction] = applied
            row = {"layer": layer, "direction": direction, **dataclasses.asdict(applied)}
            row["state"] = dataclasses.asdict(state)
            self.applied_log.write(json.dumps(row) + "\n")
            self.applied_log.flush()
            _log.debug("link stepped", layer=layer, direction=direction, rate_bps=state.rate_bps, outage=state.outage)
        self._known = True

    def _is_cut(self, direction: str) -> bool:
        before = self.states.get(direction)
        return before is not None and before.outage is not None

    async def _cut(self, states: Mapping[str, LinkState], line_has_all: bool) -> set[str]:
        """The delay line and outages as in `states`; the directions that changed. Raises LinkError."""
        impairments = {way: self._impairment(way, state, line_has_all) for way, state in states.items()}
        changed = await self.keeper.apply(impairments)
        self._stalled = {direction for direction, asked in impairments.items() if asked.stalled}
        return changed | await self.outages.apply({direction: state.outage for direction, state in states.items()})

    def _impairment(self, direction: str, state: LinkState, line_has_all: bool) -> Impairment:
        """What waits in a stall goes on waiting while a blackhole takes its place, as nothing may arrive."""
        asked = self.delays.of_line(state, line_has_all)
        holds = state.outage == "blackhole" and direction in self._stalled
        return dataclasses.replace(asked, stalled=True) if holds else asked

    async def put(self, body: object) -> None:
        """Lay a partial state over the base state and apply it, no sooner than MIN_STEP_S after the step before."""
        async with self.lock:
            base = update(self.base, body)
            states = effective(base, [layer.says for layer in self.layers])
            await self._change(states, None)
            self.base = base
            for way, state in base.items():
                _log.info("link set", direction=way, **dataclasses.asdict(state))

    async def open(self, body: object) -> Layer:
        """A layer that says nothing yet. Raises LinkError for one that cannot be had over what the link does now."""
        spec = LayerSpec.read(body)
        if any(layer.spec.name == spec.name for layer in self.layers):
            remedy = "close its connection, or give this one another name"
            raise LinkError(f"name: a layer {spec.name!r} is there already; {remedy}", "name", spec.name, remedy)
        says = [layer.says for layer in self.layers]
        for i, step in enumerate(spec.steps):
            try:
                self.delays.check(effective(self.base, [*says, step.state]))
            except LinkError as wrong:
                where = f"steps[{i}].state."
                raise LinkError(f"{where}{wrong}", where + str(wrong.field), wrong.value, wrong.remedy) from None
        layer = Layer(spec)
        self.layers.append(layer)
        try:
            if spec.stalls:
                await asyncio.shield(self.keeper.prepare())  # not to be left half started: the next one finds it
        except BaseException:
            self.layers.remove(layer)
            raise
        _log.info("layer begins", layer=spec.name, steps=len(spec.steps))
        return layer

    async def say(self, layer: Layer, state: Mapping[str, Any]) -> dict[str, tuple[LinkState, LinkState, int]]:
        """The layer says `state` from now on: by direction, what the link did before, does now, and since when
        (CLOCK_MONOTONIC ns). Raises LinkError."""
        async with self.lock:
            before = dict(self.states)
            says = [state if other is layer else other.says for other in self.layers]
            states = effective(self.base, says)
            await self._change(states, layer.spec.name)
            layer.says = state
            now_ns = time.monotonic_ns()
            stepped_ns = {way: self.applied[way].t_applied_ns for way in states if states[way] != before[way]}
            return {way: (before[way], now, stepped_ns.get(way, now_ns)) for way, now in states.items()}

    def close(self, layer: Layer) -> None:
        """The layer says nothing any more, and is gone once the link is what remains; on leaving it stays as it is."""
        if not self.leaving.is_set():
            task = asyncio.create_task(self._restore(layer))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _restore(self, layer: Layer) -> None:
        while not self.leaving.is_set():
            try:
                async with self.lock:
                    layer.says = {}
                    await self._change(effective(self.base, [one.says for one in self.layers]), layer.spec.name)
                    self.layers.remove(layer)
                    _log.info("layer ends", layer=layer.spec.name)
                    return
            except (LinkError, NetlinkError, OSError) as refused:
                _log.error("layer not taken back yet", layer=layer.spec.name, reason=refused)
            await asyncio.sleep(RETRY_S)

    async def _change(self, states: Mapping[str, LinkState], layer: str | None) -> None:
        """Bring the link to `states`, a no-op where it has them; MIN_STEP_S after the last step at the soonest."""
        if states == self.states and self._known:
            return
        before = dict(self.states)
        last_ns = max((applied.t_applied_ns for applied in self.applied.values()), default=0)
        await asyncio.sleep(max(0.0, MIN_STEP_S - (time.monotonic_ns() - last_ns) / 1e9))
        try:
            await self.apply(states, layer)
        except LinkError:
            try:  # half of it may have been done
                await self.apply(before, layer)
            except LinkError as again:
                _log.error("link neither what it was nor what was asked", reason=again)
            raise

    async def counters(self) -> dict[str, Counters]:
        return {direction: await shaper.counters() for direction, shaper in self.shapers.items()}

    async def all_counters(self) -> dict[str, dict[str, Any]]:
        """What GET /counters answers."""
        lines = await self.keeper.describe()
        counted = await self.counters()
        return {way: {**dataclasses.asdict(now), "delay_line": lines.get(way)} for way, now in counted.items()}

    async def describe(self) -> dict[str, Any]:
        """What GET /link answers: per direction asked (LinkState), kept (read back now), applied, counters."""
        answer: dict[str, Any] = {}
        counted = await self.all_counters()
        outages = await self.outages.read_back()
        for direction, shaper in self.shapers.items():
            kept = {one.handle: one for one in await shaper.read_back() if isinstance(one, _TOLD)}
            asked, applied = self.states.get(direction), self.applied.get(direction)
            line = counted[direction]["delay_line"] or {}
            stalled = "stall" if line.get("asked", {}).get("stalled") else None
            answer[direction] = {
                "interface": self.config.interfaces[direction],
                "asked": dataclasses.asdict(asked) if asked else None,
                "base": dataclasses.asdict(self.base[direction]) if asked else None,
                "layers": [layer.spec.name for layer in self.layers],
                "kept": {handle: dataclasses.asdict(kept[handle]) for handle in _TOLD_HANDLES if handle in kept},
                "delay_by": self.delays.describe(),
                "outage_kept": outages[direction] or stalled,
                "applied": dataclasses.asdict(applied) if applied else None,
                "counters": counted[direction],
            }
        return answer

    async def sample(self) -> None:
        """Write a row a direction every `sample_s`, on a fixed grid, until cancelled. Raises LinkError."""
        writer = csv.writer(self.counters_csv, lineterminator="\n")
        if not self.counters_csv.tell():
            writer.writerow(COUNTER_COLUMNS)
        due_s = time.monotonic()
        while True:
            lines = await self.keeper.describe()
            for direction, now in (await self.counters()).items():
                state = self.states.get(direction)
                traffic = (now.kv.sent_bytes, now.control.sent_bytes, now.kv.drops, now.kv.backlog_bytes)
                rate_bps = "" if state is None else 0.0 if state.outage else state.rate_bps
                outage = state.outage if state else None
                told = (now.direct_packets, outage, *_of_line(lines.get(direction)))
                writer.writerow((now.t_ns, direction, *traffic, rate_bps, *told))
                if now.direct_packets:
                    _log.error("packets left unshaped: no valid run", direction=direction, packets=now.direct_packets)
            self.counters_csv.flush()
            due_s = max(due_s + self.config.sample_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())


def _of_line(line: Mapping[str, Any] | None) -> list[object]:
    """A sample's columns of the delay line; a dead one only says that it is down."""
    if line is None:
        return [None] * 4
    return [*(line.get(key) for key in ("held", "lost", "late_p99_s")), int(line["down"])]


async def run(config: AgentConfig) -> None:
    """Shape, serve and sample until SIGTERM or SIGINT. Raises LinkError when the link cannot be had (any more)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    begin_afresh(Path(config.counters_csv))
    with open(config.applied_log, "a") as applied_log, open(config.counters_csv, "a") as counters_csv:
        await _serve(config, stop, applied_log, counters_csv)


def begin_afresh(counters_csv: Path) -> None:
    """Remove samples that an older version left there, of other columns: one file is of one kind."""
    with suppress(FileNotFoundError), counters_csv.open(errors="replace") as there:
        if there.readline().rstrip("\n").split(",") != list(COUNTER_COLUMNS):
            counters_csv.unlink()


async def _serve(config: AgentConfig, stop: asyncio.Event, applied_log: TextIO, counters_csv: TextIO) -> None:
    backend = choose(await asyncio.to_thread(tried_here if config.opens else tried), config.delay_by)
    layout = Layout(netem=backend.delay == "netem", flows=config.layout_flows)
    # Behind an engine's bridges the sites' own ends are not to be seen; `plug_site` has looked at them.
    single = config.opens or not layout.netem or await asyncio.to_thread(are_single, config.interfaces.values())
    delays = Delays(backend, single)
    async with AsyncExitStack() as stack:
        shapers = {
            direction: await stack.enter_async_context(Shaper(interface, layout))
            for direction, interface in config.interfaces.items()
        }
        beside = Path(config.socket).with_name("delay-line.sock")
        log = Path(config.log_dir, "delay-line.log") if config.log_dir else beside.with_suffix(".log")
        keeper = Keeper(config.interfaces, beside, config.seed, log)
        stack.push_async_callback(keeper.close)
        agent = Agent(config, shapers, keeper, Outages(config.interfaces), delays, applied_log, counters_csv)
        await agent.start()
        if config.opens:
            await asyncio.to_thread(open_way, config.interfaces.values())
        runner = web.AppRunner(application(agent), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        stack.push_async_callback(runner.cleanup)
        stack.callback(agent.leaving.set)
        await runner.setup()
        Path(config.socket).unlink(missing_ok=True)
        stack.callback(Path(config.socket).unlink, missing_ok=True)
        await web.UnixSite(runner, config.socket).start()
        sampler = asyncio.create_task(agent.sample())
        stopped = asyncio.create_task(stop.wait())
        Path(config.ready_file).write_text(f"{os.getpid()}\n")
        await asyncio.wait({sampler, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sampler, stopped):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m netem.agent", description="Shape the link and serve its state.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see AgentConfig")
    try:
        config = AgentConfig.load(parser.parse_args().config)
        configure("agent", config.log_level)
        asyncio.run(run(config))
    except (LinkError, NetlinkError, OSError) as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
