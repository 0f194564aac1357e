"""Pid 1 of a testbed: owns its namespaces and every process in them. Whatever ends this process ends them all, by the
kernel's hand. It builds the topology, starts the processes in order, answers on `supervisor.sock` and reaps.

Started by a launcher only: `unshare ... python -m testbed.launch.supervisor --config FILE`.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from testbed.launch.answers import body_of, errors
from testbed.launch.spec import LaunchSpec, ProcessSpec, signal_number
from testbed.launch.state import StateDir, TestbedError, tail, write_json

STOP_S = 3.0
POLL_S = 0.02
RUN_TIMEOUT_S = 600.0
RUN_OUTPUT_BYTES = 1 << 20

log = logging.getLogger("supervisor")


class Sites(Protocol):
    """What the supervisor needs of `netem.topology.Topology`."""

    def command(self, site: str, argv: list[str]) -> list[str]: ...
    def pass_fds(self, site: str) -> tuple[int, ...]: ...


@dataclass(slots=True)
class Child:
    """A process of the specification. `wait_status` is as of waitpid, None while it runs."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    since: str
    ready: bool = False
    wait_status: int | None = None

    def ending(self) -> str:
        """How it ended, in words."""
        status = self.wait_status or 0
        if os.WIFSIGNALED(status):
            return f"was ended by {_signal_name(os.WTERMSIG(status))}"
        return f"ended with exit code {os.waitstatus_to_exitcode(status)}"

    def to_json(self) -> dict[str, Any]:
        status = self.wait_status
        signaled = status is not None and os.WIFSIGNALED(status)
        return {
            "name": self.spec.name,
            "site": self.spec.site,
            "role": self.spec.role,
            "pid": self.popen.pid,
            "state": "running" if status is None else "dead",
            "ready": self.ready,
            "exit_code": None if status is None or signaled else os.waitstatus_to_exitcode(status),
            "signal": _signal_name(os.WTERMSIG(status)) if status is not None and signaled else None,
            "since": self.since,
        }


@dataclass(slots=True)
class Supervisor:
    """The children and the control socket. `sites` is None where the specification asks for no topology."""

    state: StateDir
    run_id: str
    spec: LaunchSpec
    sites: Sites | None
    topology: Mapping[str, Any]
    listener: socket.socket | None
    phase: str = "starting"
    children: dict[str, Child] = field(default_factory=dict)
    _exits: dict[int, Callable[[int], None]] = field(default_factory=dict)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
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
            await self._end_all()
            await runner.cleanup()

    # -- processes

    async def _start_all(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.spec.ready_timeout_s
        for stage in sorted({process.stage for process in self.spec.processes}):
            for process in self.spec.processes:
                if process.stage == stage:
                    self._start(process)
            await self._until_ready(deadline, self.children)

    def _start(self, process: ProcessSpec, *, again: bool = False) -> Child:
        state, argv, fds = self.state, list(process.argv), []
        if process.listens:
            if self.listener is None:
                raise TestbedError(f"{process.name} asks for the listening socket, but the launcher passed none")
            fds.append(self.listener.fileno())
        if process.config is not None:
            config = {**process.config, **({"listen_fd": fds[0]} if process.listens else {})}
            write_json(state.config_file(process.name), config)
            argv += ["--config", str(state.config_file(process.name))]
        with state.log(process.name).open("ab" if again else "wb") as output:
            popen = self._popen(process.site, argv, fds, process, output.fileno(), output.fileno())
        child = Child(process, popen, _now())
        self.children[process.name] = child
        self._exits[popen.pid] = lambda status: self._ended(child, status)
        log.info("%s: pid %d in %s", process.name, popen.pid, process.site or "no site")
        return child

    def _popen(
        self, site: str | None, argv: list[str], fds: list[int], process: ProcessSpec | None, out: int, err: int
    ) -> subprocess.Popen[bytes]:
        if site is not None:
            if self.sites is None:
                raise TestbedError(f"site {site!r}: this testbed was started without a topology")
            fds = [*fds, *self.sites.pass_fds(site)]
            argv = self.sites.command(site, argv)
        name = process.name if process else argv[0]
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(process.env if process else {})},
                pass_fds=fds,
                start_new_session=True,
                preexec_fn=_placement(process),
            )
        except OSError as error:
            raise TestbedError(f"{name}: cannot be started: {error.strerror}: {error.filename}") from None
        except subprocess.SubprocessError:
            cpus, nice = (process.cpus, process.nice) if process else ((), 0)
            raise TestbedError(
                f"{name}: cores {list(cpus)} or niceness {nice} refused; use cores this machine has "
                f"({sorted(os.sched_getaffinity(0))}), and a niceness of at least 0 where not root"
            ) from None

    async def _until_ready(self, deadline: float, children: Mapping[str, Child]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for child in children.values():
                if child.wait_status is not None:
                    raise TestbedError(f"{child.spec.name} {child.ending()} while starting; {self._log_tail(child)}")
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
        try:
            return self.state.ready_file(child.spec.name).read_text().strip() == str(child.popen.pid)
        except OSError:
            return False

    def _log_tail(self, child: Child) -> str:
        path = self.state.log(child.spec.name)
        lines = tail(path)
        return f"the last lines of {path}:\n{lines}" if lines else f"its log is empty: {path}"

    def _reap(self) -> None:
        """Collect every ended process, the orphans that pid 1 inherits too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if ended := self._exits.pop(pid, None):
                ended(status)

    def _ended(self, child: Child, status: int) -> None:
        child.wait_status, child.since = status, _now()
        child.popen.returncode = os.waitstatus_to_exitcode(status)
        if self.phase != "stopping":
            log.warning("%s %s", child.spec.name, child.ending())
        if child.spec.listens and self.listener is not None:
            self.listener.close()  # so that clients are refused, rather than wait for nobody
            self.listener = None

    async def _end_all(self) -> None:
        self.phase = "stopping"
        running = [child for child in self.children.values() if child.wait_status is None]
        for child in running:
            for number in (signal.SIGTERM, signal.SIGCONT):
                os.kill(child.popen.pid, number)
        deadline = asyncio.get_running_loop().time() + STOP_S
        while any(child.wait_status is None for child in running) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        for child in running:
            if child.wait_status is None:
                log.warning("%s did not leave within %g s of SIGTERM; killed", child.spec.name, STOP_S)
                os.kill(child.popen.pid, signal.SIGKILL)  # orphans of theirs end with this pid 1

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
        processes = [child.to_json() for child in self.children.values()]
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
        if dead.wait_status is None:
            raise TestbedError(f"{name} runs; end it first, with a POST of its name and a signal to /signal")
        if dead.spec.listens:
            raise TestbedError(
                f"{name} cannot be restarted: the host's listening socket was closed with it, so that clients are "
                "refused; take the testbed down and start it again: prfaas down, prfaas up"
            )
        self.state.ready_file(name).unlink(missing_ok=True)
        child = self._start(dead.spec, again=True)
        await self._until_ready(asyncio.get_running_loop().time() + self.spec.ready_timeout_s, {name: child})
        return web.json_response(child.to_json())

    async def _post_signal(self, request: web.Request) -> web.Response:
        body = await body_of(request, {"name", "signal"})
        child = self._named(body["name"])
        number = signal_number(body["signal"])
        if child.wait_status is not None:
            raise TestbedError(f"{child.spec.name} {child.ending()} at {child.since}; it cannot be signalled")
        os.kill(child.popen.pid, number)
        return web.json_response({"name": child.spec.name, "pid": child.popen.pid, "signal": _signal_name(number)})

    async def _post_run(self, request: web.Request) -> web.Response:
        body = await body_of(request, {"site", "argv", "timeout_s"})
        argv, timeout_s = body["argv"], body["timeout_s"]
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            raise TestbedError(f"argv {argv!r}: a list of texts, the program first")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= RUN_TIMEOUT_S:
            raise TestbedError(f"timeout_s {timeout_s!r}: a number of seconds above 0, at most {RUN_TIMEOUT_S:g}")
        return web.json_response(await self._run_helper(body["site"], argv, float(timeout_s)))

    async def _run_helper(self, site: str | None, argv: list[str], timeout_s: float) -> dict[str, Any]:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            popen = self._popen(site, argv, [], None, out.fileno(), err.fileno())
            self._exits[popen.pid] = ended.set_result
            timed_out = False
            try:
                await asyncio.wait_for(asyncio.shield(ended), timeout_s)
            except TimeoutError:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)  # itself where its time is up, and what it started
                popen.returncode = os.waitstatus_to_exitcode(await ended)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read(RUN_OUTPUT_BYTES).decode(errors="replace"))
        return {"rc": popen.returncode, "stdout": texts[0], "stderr": texts[1], "timed_out": timed_out}


def main(arguments: list[str] | None = None) -> int:
    """The entry of `python -m testbed.launch.supervisor`. 0 after a stop, 1 where the testbed could not be started."""
    parser = argparse.ArgumentParser(prog="testbed.launch.supervisor", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = json.loads(parser.parse_args(arguments).config.read_text())
    if os.getpid() != 1:
        print("error: the supervisor runs as pid 1 of its own namespaces; use `prfaas up`", file=sys.stderr)
        return 2
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    state, spec = StateDir(Path(config["state_dir"])), LaunchSpec.from_json(config["spec"])
    try:
        listener = _receive_listener(config["handover_fd"])
        sites, topology = _build_sites(spec)
    except Exception as error:  # a user's error carries its own text; anything else its kind as well
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        log.exception("the topology could not be built")
        state.failure_file.write_text(text)
        return 1
    return asyncio.run(Supervisor(state, config["run_id"], spec, sites, topology, listener).run())


def _build_sites(spec: LaunchSpec) -> tuple[Sites | None, Mapping[str, Any]]:
    if spec.topology is None:
        return None, {}
    from netem import topology

    built = topology.build(topology.TopologySettings(**spec.topology))
    described = {
        "sites": {site: topology.ADDRESSES.get(site) for site in topology.SITES},
        "settings": dict(spec.topology),
        "congestion_control": built.congestion_control,
        "tcp_rto_max_s": built.rto_max_s,
    }
    return built, described


def _receive_listener(descriptor: int | None) -> socket.socket | None:
    """The host's listening socket. It comes as a message, so that `unshare`, which stays, holds no copy of it."""
    if descriptor is None:
        return None
    with socket.socket(fileno=descriptor) as handover:
        _, descriptors, _, _ = socket.recv_fds(handover, 16, 1)
    if not descriptors:
        raise TestbedError("the launcher's listening socket did not arrive; start again with `prfaas up`")
    os.set_inheritable(descriptors[0], False)
    return socket.socket(fileno=descriptors[0])


def _placement(process: ProcessSpec | None) -> Callable[[], None] | None:
    if process is None or not (process.cpus or process.nice):
        return None
    cpus, nice = process.cpus, process.nice

    def place() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        if nice:
            os.nice(nice)

    return place


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main())
