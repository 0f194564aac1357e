"""The embedded launcher: every process in network namespaces of this host, as root or as an ordinary user, without
touching the host's network. `up` starts one outer `unshare`; its child is the supervisor, pid 1 of the testbed.
"""

import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from testbed.launch import processes
from testbed.launch.client import UnixClient
from testbed.launch.spec import LaunchSpec, Up
from testbed.launch.state import ProcessId, Record, StateDir, TestbedError, tail, write_json

LAUNCHER = "namespaces"
BUILD_S = 30.0  # beyond the processes' own deadline: interpreter, namespaces, links
STOP_S = 6.0  # the supervisor gives its processes 3
BACKLOG = 4096
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
_started: set[int] = set()  # children of this very process, to be reaped by it


def up(spec: LaunchSpec) -> Up:
    """Start the testbed, or find the one that is up already from the same specification.

    Raises `TestbedError` where another specification is up, the port is taken, namespaces are not allowed, or a
    process does not become ready (then with the last lines of its log); what was started is removed again, as it is
    when this call is interrupted.
    """
    state = StateDir(create=True)
    with state.locked():
        record = state.read()
        if record is not None and record.outer.alive():
            return _found(state, record, spec)
        processes.end(state.root)
        return _start(state, spec)


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
            pids = processes.host_pids(state.root)
            for process in told["processes"]:
                process["host_pid"] = pids.get(process["pid"]) if process["state"] == "running" else None
    return answer


def unshare_argv() -> list[str]:
    """The command prefix that gives a program its own namespaces, as pid 1. It needs a user namespace unless this
    process may administer the host. Raises `TestbedError` where `unshare` is not installed.
    """
    path = shutil.which("unshare", path=search_path())
    if path is None:
        raise TestbedError("the program unshare is not there; install util-linux")
    user = [] if _may_administer() else ["--user", "--map-root-user"]
    return [path, *user, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def refusal() -> str | None:
    """Why namespaces cannot be made here, with the remedy; None if they can. Really tries, in about 20 ms."""
    try:
        argv = unshare_argv()
    except TestbedError as error:
        return str(error)
    try:
        tried = subprocess.run([*argv, "true"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "namespaces cannot be made: `unshare` did not answer within 20 s"
    if tried.returncode == 0:
        return None
    why = tried.stderr.strip().splitlines()[-1:] or [f"unshare ended with {tried.returncode}"]
    return f"namespaces cannot be made here ({why[0]}); {_remedy()}"


def _start(state: StateDir, spec: LaunchSpec) -> Up:
    argv = unshare_argv()
    with open_port(spec.port) as listener:
        state.fresh()
        run_id = secrets.token_hex(4)
        ours, theirs = socket.socketpair()
        outer = None
        try:
            with ours, theirs:
                socket.send_fds(ours, [b"listener"], [listener.fileno()])
                config = {"run_id": run_id, "state_dir": str(state.root), "handover_fd": theirs.fileno()}
                write_json(state.config_file("supervisor"), {**config, "spec": spec.to_json()})
                argv += [sys.executable, "-m", "testbed.launch.supervisor"]
                argv += ["--config", str(state.config_file("supervisor"))]
                pid = _spawn(argv, state, run_id, theirs.fileno())
            outer = ProcessId.of(pid)
            if outer is None:
                raise _why_not(state)
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            record = Record(LAUNCHER, run_id, outer, spec.port, spec.scenario, spec.fingerprint, started_at)
            state.write(record)
            listener.close()  # from here on the testbed's alone
            _wait_ready(state, record, spec.ready_timeout_s)
        except BaseException:
            if outer is not None:
                _end_outer(outer)
            processes.end(state.root)
            _reap()
            state.clean()
            raise
    return _up(state, record, already=False, dead=())


def _spawn(argv: list[str], state: StateDir, run_id: str, handover_fd: int) -> int:
    """Start detached: own session, stdio to the log, only the handover inherited. Returns the pid."""
    log = os.open(state.log("supervisor"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.set_inheritable(handover_fd, True)
    marks = {"PRFAAS_TESTBED": run_id, "PRFAAS_STATE": str(state.root), "PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    try:
        pid = os.posix_spawn(argv[0], argv, {**os.environ, **marks}, file_actions=actions, setsid=True)
    finally:
        os.close(log)
        os.close(null)
    _started.add(pid)
    return pid


def _found(state: StateDir, record: Record, spec: LaunchSpec) -> Up:
    if record.fingerprint != spec.fingerprint or record.port != spec.port:
        raise TestbedError(
            f"a testbed is up already, from another specification ({record.scenario or 'unnamed'}, port {record.port}, "
            f"since {record.started_at}); take it down first: prfaas down"
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
            raise _why_not(state)
        with contextlib.suppress(TestbedError):
            told: dict[str, Any] = UnixClient(state.supervisor_sock).get("/status")
            if told["phase"] == "ready":
                return told
        if time.monotonic() >= deadline:
            log = state.log("supervisor")
            raise TestbedError(f"the supervisor does not become ready; the last lines of {log}:\n{tail(log)}")
        time.sleep(0.03)


def _why_not(state: StateDir) -> TestbedError:
    with contextlib.suppress(OSError):
        return TestbedError(f"the testbed did not start: {state.failure_file.read_text()}")
    log = state.log("supervisor")
    lines = tail(log)
    if (refused := refusal()) is not None:
        return TestbedError(refused)
    if not lines:
        return TestbedError("the testbed was stopped while it started; start it again with `prfaas up`")
    return TestbedError(f"the testbed did not start; the last lines of {log}:\n{lines}")


def _stop(state: StateDir) -> list[str]:
    record, told = state.read(), []
    if record is not None and record.outer.alive():
        count = len(processes.find(state.root))
        with contextlib.suppress(TestbedError):
            UnixClient(state.supervisor_sock, timeout_s=2.0).post("/stop")
            deadline = time.monotonic() + STOP_S
            while record.outer.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        _end_outer(record.outer)
        told.append(f"stopped the testbed {record.scenario or record.run_id} ({record.launcher}, {count} processes)")
    told += [f"killed {process}" for process in processes.end(state.root)]
    _reap()
    return told


def _end_outer(outer: ProcessId) -> None:
    """Kill the outer process if it still runs: its pid 1 dies with it, and all others with that."""
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


def open_port(port: int) -> socket.socket:
    """The listening socket of 127.0.0.1:`port` on this host. Raises `TestbedError` where it cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = processes.port_holder(port) or "another program"
            raise TestbedError(f"port {port} of 127.0.0.1 is in use by {holder}; choose another with --port") from None
        raise TestbedError(
            f"port {port} of 127.0.0.1 cannot be opened ({error.strerror}); choose another with --port"
        ) from None


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


def search_path() -> str:
    """PATH with the administrator's directories, which ordinary users often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _may_administer() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
            return all(capabilities >> bit & 1 for bit in (CAP_NET_ADMIN, CAP_SYS_ADMIN))
    return False


def _remedy() -> str:
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor keeps ordinary users from them (Ubuntu 24.04 and later): run as root, or "
            "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "run as root, or `sudo sysctl kernel.unprivileged_userns_clone=1`"
    if _sysctl("user/max_user_namespaces") == "0":
        return "run as root, or `sudo sysctl user.max_user_namespaces=10000`"
    return (
        "inside a container: start it with --privileged, or with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined; "
        "elsewhere run as root"
    )


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None
