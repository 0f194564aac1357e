"""Faults that somebody makes by hand on the testbed that is up, each with its end: after its time, by a button, or when
the gateway leaves.

A fault of the link is a layer that the agent drops when its connection closes (`testbed.linksteps`); one of a worker an
order to it, or a signal that the supervisor sends. Every beginning and end is an event of the session, so that a load's
own results say that somebody disturbed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from emulator.log import Log
from emulator.messages import Hinder
from testbed.chaos import faults
from testbed.chaos.orders import hinder, wall_state, wall_steps
from testbed.launch.client import AsyncUnixClient
from testbed.launch.state import StateDir, TestbedError
from testbed.linksteps import LinkLayer
from testbed.live import asked, words
from testbed.openai_api import ApiError
from testbed.scenario import Scenario

log = Log("gateway")

MOST: Final = 16
"""Faults at a time."""
RESTART_S: Final = 40.0
"""Wall seconds in which a worker that was started again is ready."""
LEAD_NS: Final = 20_000_000
"""From asking for a layer to its first step."""

RETRY_S: Final = 5.0
"""Wall seconds until a fault that could not be healed is tried again."""
_ORDERS: Final = (faults.SlowWorker, faults.LandingFull)

Undo = Callable[[], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Trouble:
    """A fault by hand. due_ns: when it heals, CLOCK_MONOTONIC. state: begins | holds | heals | stuck (`why`: it could
    not be healed, and is tried again). forgotten: the worker began anew without it."""

    id: str
    fault: Any
    what: str
    node: str
    due_ns: int
    state: str = "begins"
    why: str = ""
    forgotten: bool = False
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Troubles:
    """roles: of the workers, by name. order(node, message): to a worker; False: it cannot be reached. tell(what, node,
    healed): an event of the present session."""

    def __init__(
        self,
        scenario: Scenario,
        state: StateDir,
        roles: dict[str, str],
        order: Callable[[str, Hinder], bool],
        tell: Callable[[str, str, bool], None],
    ) -> None:
        self._scenario, self._state, self._roles = scenario, state, roles
        self._order, self._tell = order, tell
        self._supervisor = AsyncUnixClient(state.supervisor_sock, RESTART_S)
        self._held: dict[str, Trouble] = {}
        self._count = 0

    def possible(self) -> dict[str, Any]:
        """What may be asked here: kinds of faults, limits (model units), workers."""
        scale = self._scenario.scale
        reached = self._state.supervisor_sock.exists()
        kinds = [kind for kind in asked.KINDS if reached or kind not in asked.NEED_SUPERVISOR]
        return {"link": self._state.agent_sock.exists(), "kinds": kinds, "limits": asked.limits(scale)}

    def told(self) -> list[dict[str, Any]]:
        """The faults there are, JSON-ready; heals_in_s: model seconds."""
        return [self.described(one) for one in self._held.values()]

    def described(self, one: Trouble) -> dict[str, Any]:
        """One of them, JSON-ready."""
        left_s = max(0.0, (one.due_ns - time.monotonic_ns()) * 1e-9) * self._scenario.scale.time_scale
        return {
            "id": one.id,
            "kind": one.fault.kind,
            "what": one.what,
            "node": one.node,
            "state": one.state,
            "why": one.why if one.state == "stuck" else "",
            "heals_in_s": left_s if one.state == "holds" else None,
        }

    async def begin(self, fault: Any) -> Trouble:
        """Bring a fault about. Raises ApiError where that cannot be, and then nothing is changed."""
        if len(self._held) >= MOST:
            raise ApiError(409, f"{MOST} faults are there already; heal one first", code="busy")
        self._refuse_taken(fault)
        self._count += 1
        name = f"page-{self._count}"
        wall_s = self._scenario.scale.wall_s(fault.duration_s)
        node = fault.nodes[0] if fault.nodes else ""
        due_ns = time.monotonic_ns() + round(wall_s * 1e9)
        one = self._held[name] = Trouble(name, fault, describe(fault), node, due_ns)
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one.task = asyncio.create_task(self._live(one, begun))
        await asyncio.shield(begun)  # whoever asked may leave: what was begun is held, and healed
        return one

    def heal(self, name: str) -> Trouble:
        """End one now. Raises ApiError for one that is not there."""
        one = self._held.get(name)
        if one is None:
            there = ", ".join(self._held) or "none"
            raise ApiError(404, f"no fault {name!r}; there are: {there}", code="not_found")
        one.enough.set()
        return one

    def heal_all(self) -> list[Trouble]:
        """End all of them now."""
        return [self.heal(name) for name in list(self._held)]

    def session_began(self) -> None:
        """A load began or ended: its own events have the faults that go on; a worker began anew, without its orders."""
        for one in self._held.values():
            if isinstance(one.fault, _ORDERS):
                one.forgotten = True
                one.enough.set()
            elif one.state != "begins":
                self._tell(f"{one.what} ({one.id}, since before)", one.node, False)

    async def close(self) -> None:
        """The gateway leaves: layers close with its connections, and a testbed that ends has no workers to heal."""
        tasks = [one.task for one in self._held.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, one: Trouble, begun: asyncio.Future[None]) -> None:
        """Bring it about, keep it until its time is up or somebody has had enough, and heal it, however often that
        takes."""
        try:
            undo = await self._bring_about(one)
        except Exception as error:
            del self._held[one.id]
            refused = isinstance(error, TestbedError)
            begun.set_exception(ApiError(409, f"{one.what}: {error}", code="refused") if refused else error)
            begun.exception()  # it is told, even where nobody listens any more
            return
        one.state = "holds"
        self._tell(f"{one.what} ({one.id}, {words.duration(one.fault.duration_s)})", one.node, False)
        log.info("fault_by_hand", fault=one.id, what=one.what, duration_s=one.fault.duration_s)
        begun.set_result(None)
        await _first(one.enough, (one.due_ns - time.monotonic_ns()) * 1e-9)
        while True:
            one.enough.clear()
            one.state = "heals"
            try:
                await undo()
            except TestbedError as error:
                log.error("fault_not_healed", fault=one.id, what=one.what, reason=str(error))
                one.state, one.why = "stuck", str(error)
                await _first(one.enough, RETRY_S)
            else:
                break
        del self._held[one.id]
        log.info("fault_healed", fault=one.id, what=one.what)
        if not one.forgotten:
            self._tell(f"{one.what} ({one.id})", one.node, True)

    def _refuse_taken(self, fault: Any) -> None:
        """No worker is taken away twice."""
        away = self._away(fault)
        for one in self._held.values():
            if both := away & self._away(one.fault):
                raise ApiError(
                    409, f"{min(both)} is {one.fault.kind} already ({one.id}); heal it first", "node", "taken"
                )

    def _away(self, fault: Any) -> set[str]:
        if isinstance(fault, faults.LostSite):
            return self._site()
        return set(fault.nodes) if isinstance(fault, faults.PROCESS) else set()

    def _site(self) -> set[str]:
        return {name for name in self._roles if name.startswith("prfaas-")}

    async def _bring_about(self, one: Trouble) -> Undo:
        match fault := one.fault:
            case asked.LinkStep() | faults.Outage() | faults.LossBurst() | faults.DelaySpike():
                return await self._lay(one.id, fault)
            case faults.SlowWorker() | faults.LandingFull():
                self._hinder(fault.node, None)
                return partial(self._unhinder, one.id, fault.node)
            case faults.FrozenWorker() | faults.LostSite(how="frozen"):
                nodes = sorted(self._away(fault))
                return await self._take(nodes, "STOP", partial(self._go_on, nodes))
            case faults.KilledWorker() | faults.LostSite():
                nodes = sorted(self._away(fault))
                return await self._take(nodes, "KILL", partial(self._restart, nodes))
        raise TypeError(f"{fault!r} cannot be made by hand")

    async def _lay(self, name: str, fault: Any) -> Undo:
        scale = self._scenario.scale
        if isinstance(fault, asked.LinkStep):
            said = wall_state(fault.says, scale)
            said = said if fault.direction is None else {fault.direction: said}
            steps = [(0.0, said), (scale.wall_s(fault.duration_s), {})]
        else:
            steps = wall_steps(fault, scale)
        layer = LinkLayer(self._state, name, time.monotonic_ns() + LEAD_NS, steps)
        await asyncio.to_thread(layer.__enter__)
        return partial(_lift, layer)

    def _hinder(self, node: str, without: str | None) -> None:
        held = [one.fault for one in self._held.values() if one.id != without and one.node == node]
        orders = [one for one in held if isinstance(one, _ORDERS)]
        if not self._order(node, hinder(orders, self._scenario)):
            raise TestbedError(f"no connection to {node}; see `prfaas status`")

    async def _unhinder(self, name: str, node: str) -> None:
        self._hinder(node, name)

    async def _take(self, nodes: list[str], signal: str, undo: Undo) -> Undo:
        """Take workers away by a signal, all of them or none. Raises TestbedError."""
        if dead := await self._that_are("dead", nodes):
            raise TestbedError(f"{dead[0]} is dead already")
        try:
            await self._signal(nodes, signal)
        except TestbedError:
            with contextlib.suppress(TestbedError):
                await undo()
            raise
        return undo

    async def _signal(self, nodes: list[str], name: str) -> None:
        for node in nodes:
            await self._supervisor.post("/signal", {"name": node, "signal": name})

    async def _go_on(self, nodes: list[str]) -> None:
        """One that was ended while it was frozen is not held any more."""
        await self._signal(await self._that_are("running", nodes), "CONT")

    async def _restart(self, nodes: list[str]) -> None:
        dead = await self._that_are("dead", nodes)
        await asyncio.gather(*(self._supervisor.post("/restart", {"name": node}) for node in dead))

    async def _that_are(self, state: str, nodes: list[str]) -> list[str]:
        processes = (await self._supervisor.get("/status"))["processes"]
        return [one["name"] for one in processes if one["name"] in nodes and one["state"] == state]


async def _first(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()


async def _lift(layer: LinkLayer) -> None:
    """Take a layer off. A step that could not be made, or an agent that was lost, is in the log of the gateway."""
    await asyncio.to_thread(layer.__exit__, None, None, None)
    for wrong in layer.faults:
        log.error("layer_wrong", layer=layer.name, reason=wrong)


def describe(fault: Any) -> str:
    """A fault in a few words."""
    if not isinstance(fault, asked.LinkStep):
        return faults.describe(fault)
    said: dict[str, Callable[[float], str]] = {
        "rate_bps": words.rate,
        "delay_s": lambda value: f"delay {words.duration(value)}",
        "jitter_s": lambda value: f"jitter {words.duration(value)}",
        "loss": lambda value: f"loss {value:.3g}",
    }
    way = "" if fault.direction is None else f" {fault.direction}"
    return f"link{way}: " + ", ".join(said[key](value) for key, value in fault.says.items())
