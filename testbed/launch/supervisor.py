"""Owns every process of a testbed: starts them in stages, answers on `supervisor.sock`, and ends them. How they run is
its hosting's: processes in namespaces (`pid1.py`) or containers (`compose_supervisor.py`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from emulator.log import OURS
from testbed.launch.answers import body_of, errors
from testbed.launch.hosting import Change, Ending, Hosting, Started, signal_name
from testbed.launch.spec import LaunchSpec, ProcessSpec, signal_number
from testbed.launch.state import StateDir, TestbedError, tail

STOP_S = 3.0
POLL_S = 0.02
RUN_TIMEOUT_S = 600.0

log = logging.getLogger(f"{OURS}.supervisor")


@dataclass(slots=True)
class Child:
    """A process of the specification. `ending` is None while it runs."""

    spec: ProcessSpec
    since: str
    started: Started | None = None
    ready: bool = False
    ending: Ending | None = None

    def to_json(self, frozen: Collection[str]) -> dict[str, Any]:
        started, ending = self.started or Started(0), self.ending
        return {
            "name": self.spec.name,
            "site": self.spec.site,
            "role": self.spec.role,
            "pid": started.pid,
            "host_pid": started.host_pid if ending is None else None,
            "state": "running" if ending is None else "dead",
            "frozen": self.spec.name in frozen,
            "ready": self.ready,
            "exit_code": None if ending is None else ending.exit_code,
            "signal": None if ending is None or ending.signal is None else signal_name(ending.signal),
            "since": self.since,
        }


@dataclass(slots=True)
class Supervisor:
    """The children and the control socket. `topology` is what `/status` tells of the sites."""

    state: StateDir
    run_id: str
    spec: LaunchSpec
    hosting: Hosting
    topology: Mapping[str, Any]
    phase: str = "starting"
    children: dict[str, Child] = field(default_factory=dict)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        runner = web.AppRunner(self._application(), access_log=None)
        await runner.setup()
        await web.UnixSite(runner, str(self.state.supervisor_sock)).start()
        starting = asyncio.create_task(self._start_all())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise TestbedError("it was stopped while it started")
            starting.result()
            self.phase = "ready"
            log.info("ready: %d processes", len(self.children))
            await stopping
            return 0
        except TestbedError as error:
            log.error("%s", error)
            self.state.failure_file.write_text(str(error))
            return 1
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, return_exceptions=True)  # whatever it was starting is a child by then
            await self._end_all()
            await runner.cleanup()

    # -- processes

    async def _start_all(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.spec.ready_timeout_s
        for stage in sorted({process.stage for process in self.spec.processes}):
            await asyncio.gather(*(self._start(one) for one in self.spec.processes if one.stage == stage))
            await self._until_ready(deadline, self.children)

    async def _start(self, process: ProcessSpec, *, again: bool = False) -> Child:
        child = Child(process, _now())
        self.children[process.name] = child
        child.started = await self.hosting.start(process, again, lambda change: self._changed(child, change))
        log.info("%s: pid %d in %s", process.name, child.started.pid, process.site or "no site")
        return child

    async def _until_ready(self, deadline: float, children: Mapping[str, Child]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for child in children.values():
                if child.ending is not None:
                    raise TestbedError(f"{child.spec.name} {child.ending} while starting; {self._log_tail(child)}")
                child.ready = child.ready or self._says_ready(child)
            waiting = [child for child in children.values() if not child.ready]
            if not waiting:
                return
            if loop.time() >= deadline:
                names = ", ".join(child.spec.name for child in waiting)
                raise TestbedError(
                    f"{names}: not ready within {self.spec.ready_timeout_s:g} s; {self._log_tail(waiting[0])}"
                )
            await asyncio.sleep(POLL_S)

    def _says_ready(self, child: Child) -> bool:
        if child.started is None:
            return False
        try:
            return self.state.ready_file(child.spec.name).read_text().strip() == str(child.started.pid)
        except OSError:
            return False

    def _log_tail(self, child: Child) -> str:
        path = self.state.log(child.spec.name)
        lines = tail(path)
        return f"the last lines of {path}:\n{lines}" if lines else f"its log is empty: {path}"

    def _changed(self, child: Child, change: Change) -> None:
        child.since = _now()
        if isinstance(change, Ending):
            child.ending = change
            if self.phase != "stopping":
                log.warning("%s %s", child.spec.name, change)
        else:
            child.ending, child.started = None, change

    async def _end_all(self) -> None:
        self.phase = "stopping"
        for number in (signal.SIGTERM, signal.SIGCONT):
            await self._signal_all(number)
        deadline = asyncio.get_running_loop().time() + STOP_S
        while self._running() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        for child in self._running():
            log.warning("%s did not leave within %g s of SIGTERM; killed", child.spec.name, STOP_S)
        await self._signal_all(signal.SIGKILL)
        await self.hosting.close()

    async def _signal_all(self, number: int) -> None:
        running = self._running()
        signals = (self.hosting.signal(child.spec.name, number) for child in running)
        for child, failed in zip(running, await asyncio.gather(*signals, return_exceptions=True), strict=True):
            if failed is not None and child.ending is None:
                log.warning("%s: %s not sent: %s", child.spec.name, signal_name(number), failed)

    def _running(self) -> list[Child]:
        return [child for child in self.children.values() if child.started is not None and child.ending is None]

    # -- the control socket

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[errors])
        application.add_routes(
            [
                web.get("/status", self._get_status),
                web.post("/stop", self._post_stop),
                web.post("/run", self._post_run),
                web.post("/signal", self._post_signal),
                web.post("/restart", self._post_restart),
            ]
        )
        return application

    async def _get_status(self, request: web.Request) -> web.Response:
        frozen = await self.hosting.frozen([child.spec.name for child in self._running()])
        processes = [child.to_json(frozen) for child in self.children.values()]
        return web.json_response(
            {"run_id": self.run_id, "phase": self.phase, "processes": processes, "topology": dict(self.topology)}
        )

    async def _post_stop(self, request: web.Request) -> web.Response:
        self._stop.set()
        return web.json_response({"stopping": True})

    def _named(self, name: object) -> Child:
        child = self.children.get(str(name))
        if child is None:
            raise TestbedError(f"no process {name!r}; there are: {', '.join(self.children) or 'none'}")
        return child

    async def _post_restart(self, request: web.Request) -> web.Response:
        """Start a dead process again, as it was started first; answers once it is ready."""
        body = await body_of(request, {"name"})
        dead = self._named(body["name"])
        name = dead.spec.name
        if self.phase != "ready":
            raise TestbedError(
                f"{name}: the testbed is {self.phase}; only that of a testbed that is up can be restarted"
            )
        if dead.ending is None:
            raise TestbedError(f"{name} runs; end it first, with a POST of its name and a signal to /signal")
        if dead.spec.listens:
            raise TestbedError(
                f"{name} cannot be restarted: the host's listening socket was closed with it, so that clients are "
                "refused; take the testbed down and start it again: prfaas down, prfaas up"
            )
        self.state.ready_file(name).unlink(missing_ok=True)
        child = await self._start(dead.spec, again=True)
        await self._until_ready(asyncio.get_running_loop().time() + self.spec.ready_timeout_s, {name: child})
        return web.json_response(child.to_json(frozen=()))

    async def _post_signal(self, request: web.Request) -> web.Response:
        body = await body_of(request, {"name", "signal"})
        child = self._named(body["name"])
        number = signal_number(body["signal"])
        if child.ending is not None:
            raise TestbedError(f"{child.spec.name} {child.ending} at {child.since}; it cannot be signalled")
        if child.started is None:
            raise TestbedError(f"{child.spec.name} is just being started; it cannot be signalled yet")
        await self.hosting.signal(child.spec.name, number)
        return web.json_response({"name": child.spec.name, "pid": child.started.pid, "signal": signal_name(number)})

    async def _post_run(self, request: web.Request) -> web.Response:
        body = await body_of(request, {"site", "argv", "timeout_s"})
        argv, timeout_s = body["argv"], body["timeout_s"]
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            raise TestbedError(f"argv {argv!r}: a list of texts, the program first")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= RUN_TIMEOUT_S:
            raise TestbedError(f"timeout_s {timeout_s!r}: a number of seconds above 0, at most {RUN_TIMEOUT_S:g}")
        return web.json_response(await self.hosting.run(body["site"], argv, float(timeout_s)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
