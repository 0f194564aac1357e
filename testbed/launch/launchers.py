"""Starting, finding and stopping a testbed, whichever launcher runs it. `up` starts one detached process, the
supervisor, and waits for it; what is the launcher's own is in `namespaces.py` and `compose.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Protocol, cast

from testbed.launch import processes
from testbed.launch.client import UnixClient
from testbed.launch.handover import open_port, send_listener
from testbed.launch.spec import LaunchSpec, Up
from testbed.launch.state import ProcessId, Record, StateDir, TestbedError, tail, write_json

BUILD_S = 30.0  # beyond the processes' own deadline: interpreter, namespaces, links
_started: set[int] = set()  # children of this very process, to be reaped by it


class Launcher(Protocol):
    """What a launcher adds, as a module. `STOP_S`: in which its supervisor has stopped all, and left. `PATIENCE`: how
    many times what a specification says its processes may take until they are ready."""

    STOP_S: float
    PATIENCE: float

    def prepare(self, state: StateDir, spec: LaunchSpec) -> None:
        """Whatever can take long or fail, before anything is started. Raises TestbedError."""

    def argv(self) -> list[str]:
        """The supervisor's command, to which `--config FILE` is appended. Raises TestbedError."""

    def refusal(self) -> str | None:
        """Why this launcher cannot work here, with the remedy; None if it can. Really tries."""

    def clear(self, state: StateDir) -> list[str]:
        """Remove what outlives a supervisor that was killed, in words. Idempotent. Raises TestbedError."""

    def host_pids(self, state: StateDir) -> Mapping[int, int]:
        """The pids that `/status` tells -> pids on this host, where it does not tell those itself."""


NAMESPACES, COMPOSE = LAUNCHERS = ("namespaces", "compose")


def named(name: str) -> Launcher:
    """Imported only here, as an engine's takes a while. Raises TestbedError for a launcher that there is not."""
    if name not in LAUNCHERS:
        raise TestbedError(f"launcher {name!r}: there are {', '.join(LAUNCHERS)}")
    launcher: Any = importlib.import_module(f"testbed.launch.{name}")
    return cast(Launcher, launcher)


def chosen(state: StateDir, name: str | None) -> str:
    """The launcher of that name; without one that of the testbed that is up, or namespaces."""
    record = state.read() if name is None else None
    return name or (record.launcher if record is not None and record.outer.alive() else NAMESPACES)


def up(spec: LaunchSpec, name: str | None = None) -> Up:
    """Start the testbed, or find the one that is up already from the same specification. `name`: of the launcher; that
    of the testbed that is up, or namespaces, unless given.

    Raises `TestbedError` where another one is up, the port is taken, the launcher cannot work here, or a process does
    not become ready (then with the last lines of its log); what was started is removed again, as it is when this call
    is interrupted.
    """
    launcher = named(name or NAMESPACES)
    state = StateDir(create=True)
    with state.locked():
        record = state.read()
        if record is not None and record.outer.alive():
            return _found(state, record, spec, name or record.launcher)
        _clear(state)
        return _start(state, spec, launcher, name or NAMESPACES)


def down() -> list[str]:
    """Stop the testbed and remove what is left of one, however it died, once all its processes are gone. Logs and
    loads stay. Returns what was removed, in words (empty: there was nothing). Raises `TestbedError` where it cannot.
    """
    state = StateDir()
    removed = _stop(state)  # before the lock: this ends an `up` that still waits, too
    if state.root.is_dir():
        with state.locked():
            removed += _stop(state)
            removed += [f"removed {path}" for path in state.clean()]
    return removed


def status() -> dict[str, Any]:
    """What is up. `up` and `stale` (started, died, not taken down) are bool; with a record also its fields, `url`, and
    under `supervisor` the answer of its `/status`, each process with its `host_pid`, or None and a `problem`.
    """
    state = StateDir()
    answer: dict[str, Any] = {"up": False, "stale": False, "state_dir": str(state.root)}
    record = state.read()
    if record is None:
        return answer
    alive = record.outer.alive()
    answer |= {**asdict(record), "up": alive, "stale": not alive, "url": _url(record), "supervisor": None}
    if alive:
        try:
            answer["supervisor"] = told = UnixClient(state.supervisor_sock).get("/status")
        except TestbedError as error:
            answer["problem"] = str(error)
        else:
            pids = named(record.launcher).host_pids(state)
            for process in told["processes"]:
                if process["state"] == "running":
                    process["host_pid"] = process["host_pid"] or pids.get(process["pid"])
    return answer


def _start(state: StateDir, spec: LaunchSpec, launcher: Launcher, name: str) -> Up:
    argv = launcher.argv()
    spec = replace(spec, ready_timeout_s=spec.ready_timeout_s * launcher.PATIENCE)
    with open_port(spec.port) as listener:
        state.fresh()
        run_id = secrets.token_hex(4)
        ours, theirs = socket.socketpair()
        outer = None
        try:
            with ours, theirs:
                send_listener(ours, listener)
                launcher.prepare(state, spec)
                config = {
                    "run_id": run_id,
                    "state_dir": str(state.root),
                    "handover_fd": theirs.fileno(),
                    "spec": spec.to_json(),
                }
                write_json(state.config_file("supervisor"), config)
                argv += ["--config", str(state.config_file("supervisor"))]
                pid = _spawn(argv, state, run_id, theirs.fileno())
            outer = ProcessId.of(pid)
            if outer is None:
                raise _why_not(state, launcher)
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            record = Record(name, run_id, outer, spec.port, spec.scenario, spec.fingerprint, started_at)
            state.write(record)
            listener.close()  # from here on the testbed's alone
            _wait_ready(state, record, spec.ready_timeout_s)
        except BaseException:
            if outer is not None:
                _end_outer(outer)
            _clear(state)
            state.clean()
            raise
    return _up(state, record, already=False, dead=())


def _spawn(argv: list[str], state: StateDir, run_id: str, handover_fd: int) -> int:
    """Start detached: own session, stdio to the log, only the handover inherited. Returns the pid."""
    log = os.open(state.log("supervisor"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.set_inheritable(handover_fd, True)
    path = processes.search_path()
    marks = {"PRFAAS_TESTBED": run_id, "PRFAAS_STATE": str(state.root), "PATH": path, "PYTHONUNBUFFERED": "1"}
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, null, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    actions += [(os.POSIX_SPAWN_CLOSE, one) for one in _inherited() if one != handover_fd]
    try:
        pid = os.posix_spawn(argv[0], argv, {**os.environ, **marks}, file_actions=actions, setsid=True)
    finally:
        os.close(log)
        os.close(null)
    _started.add(pid)
    return pid


def _inherited() -> list[int]:
    """What this process would hand on beside stdio, such as a lock that it was started under, and that is not ours."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    inherited = []
    for one in descriptors:
        with contextlib.suppress(OSError):  # the listing's own
            if one > 2 and os.get_inheritable(one):
                inherited.append(one)
    return inherited


def _found(state: StateDir, record: Record, spec: LaunchSpec, name: str) -> Up:
    asked = (spec.fingerprint, spec.port, name)
    if (record.fingerprint, record.port, record.launcher) != asked:
        raise TestbedError(
            f"a testbed is up already, from another specification ({record.scenario or 'unnamed'}, {record.launcher}, "
            f"port {record.port}, since {record.started_at}); take it down first: prfaas down"
        )
    told = _wait_ready(state, record, spec.ready_timeout_s)
    dead = tuple(process["name"] for process in told["processes"] if process["state"] == "dead")
    return _up(state, record, already=True, dead=dead)


def _wait_ready(state: StateDir, record: Record, ready_timeout_s: float) -> dict[str, Any]:
    """The supervisor's status once it is ready. Raises `TestbedError` with the reason once it cannot become so."""
    deadline = time.monotonic() + ready_timeout_s + BUILD_S
    while True:
        if not record.outer.alive():
            _reap()
            raise _why_not(state, named(record.launcher))
        with contextlib.suppress(TestbedError):
            told: dict[str, Any] = UnixClient(state.supervisor_sock).get("/status")
            if told["phase"] == "ready":
                return told
        if time.monotonic() >= deadline:
            log = state.log("supervisor")
            raise TestbedError(f"the supervisor does not become ready; the last lines of {log}:\n{tail(log)}")
        time.sleep(0.03)


def _why_not(state: StateDir, launcher: Launcher) -> TestbedError:
    with contextlib.suppress(OSError):
        return TestbedError(f"the testbed did not start: {state.failure_file.read_text()}")
    log = state.log("supervisor")
    lines = tail(log)
    if (refused := launcher.refusal()) is not None:
        return TestbedError(refused)
    if not lines:
        return TestbedError("the testbed was stopped while it started; start it again with `prfaas up`")
    return TestbedError(f"the testbed did not start; the last lines of {log}:\n{lines}")


def _stop(state: StateDir) -> list[str]:
    record, told = state.read(), []
    if record is not None and record.outer.alive():
        with contextlib.suppress(TestbedError):
            supervisor = UnixClient(state.supervisor_sock, timeout_s=2.0)
            running = sum(process["state"] == "running" for process in supervisor.get("/status")["processes"])
            told.append(
                f"stopped the testbed {record.scenario or record.run_id} ({record.launcher}, {running} processes)"
            )
            supervisor.post("/stop")
            deadline = time.monotonic() + named(record.launcher).STOP_S
            while record.outer.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        _end_outer(record.outer)
        told = told or [f"killed the testbed {record.scenario or record.run_id} ({record.launcher})"]
    return told + _clear(state)


def _clear(state: StateDir) -> list[str]:
    """End and remove what is left of any launcher's testbed whose supervisor is gone."""
    told = [f"killed {process}" for process in processes.end(state.root)]
    if state.compose_file.exists():  # only an engine holds what outlives its supervisor
        told += named(COMPOSE).clear(state)
    _reap()
    return told


def _end_outer(outer: ProcessId) -> None:
    """Kill the outer process if it still runs. In namespaces its pid 1 dies with it, and all others with that."""
    outer.signal(signal.SIGKILL)
    deadline = time.monotonic() + processes.GONE_S
    while outer.alive() and time.monotonic() < deadline:
        time.sleep(0.01)


def _reap() -> None:
    """Collect what this very process started and what has ended, so that it does not stay a zombie of it."""
    for pid in tuple(_started):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            ended = pid
        if ended:
            _started.discard(pid)


def _up(state: StateDir, record: Record, *, already: bool, dead: tuple[str, ...]) -> Up:
    return Up(
        launcher=record.launcher,
        run_id=record.run_id,
        scenario=record.scenario,
        port=record.port,
        url=_url(record),
        state_dir=str(state.root),
        started_at=record.started_at,
        already=already,
        dead=dead,
    )


def _url(record: Record) -> str:
    return f"http://127.0.0.1:{record.port}"
