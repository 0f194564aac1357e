"""Whose processes are these? Everything a launcher starts carries `PRFAAS_TESTBED` (the run) and `PRFAAS_STATE` (the
state directory) in its environment, so the processes of a testbed are found even after their parents died.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from testbed.launch.state import ProcessId, StateDir, TestbedError

MODULES = (
    "testbed.launch.pid1",
    "testbed.launch.compose_supervisor",
    "netem.agent",
    "emulator.worker",
    "testbed.gateway",
)
HOST_INTERFACES = ("w-prfaas", "w-pd")  # netem.topology makes them, and never on the host
GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """A process of a testbed. `run_id` and `state_dir` are empty where it only looks like one by its command line."""

    id: ProcessId
    command: str
    run_id: str
    state_dir: str

    def __str__(self) -> str:
        where = f", run {self.run_id} of {self.state_dir}" if self.run_id else ""
        return f"process {self.id.pid} ({self.command}{where})"


def find(state_dir: Path | None = None) -> list[Found]:
    """This user's testbed processes on this host, by pid; with `state_dir` only those started from it."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to read
            if Path(f"/proc/{pid}").stat().st_uid != os.geteuid() or pid == os.getpid():
                continue
            words = _words(pid, "cmdline")
            environment = dict(word.partition("=")[::2] for word in _words(pid, "environ"))
            run_id = environment.get("PRFAAS_TESTBED", "")
            root = environment.get("PRFAAS_STATE", "") if run_id else ""
            if state_dir is not None and root != str(state_dir):
                continue
            if (run_id or _module(words)) and (identity := ProcessId.of(pid)):
                found.append(Found(identity, _command(words), run_id, root))
    return found


def end(state_dir: Path) -> list[Found]:
    """Kill what is left of the testbed of this state directory and wait until it is gone; returns what was killed.

    Raises `TestbedError` naming what is still there after 10 s.
    """
    killed: dict[ProcessId, Found] = {}
    deadline = time.monotonic() + GONE_S
    while rest := find(state_dir) or [process for process in killed.values() if process.id.alive()]:
        for process in rest:
            killed[process.id] = process
            process.id.signal(signal.SIGKILL)
        if time.monotonic() >= deadline:
            raise TestbedError(f"still there {GONE_S:.0f} s after SIGKILL: {', '.join(map(str, rest))}; see dmesg")
        time.sleep(0.02)
    return list(killed.values())


def host_pids(state_dir: Path) -> dict[int, int]:
    """Pids as seen inside the testbed -> pids on this host."""
    pids = {}
    for process in find(state_dir):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.id.pid}/status").read_text().splitlines()
            inner = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
            if len(inner) > 1:
                pids[int(inner[-1])] = process.id.pid
    return pids


def leftovers(state: StateDir | None = None) -> list[str]:
    """All that is there of a testbed of this user, in words, a running one included; empty means nothing."""
    state = state or StateDir()
    left = [str(process) for process in find()]
    left += [f"interface {name} on the host" for _, name in socket.if_nameindex() if name in HOST_INTERFACES]
    left += [f"socket {path}" for path in (state.supervisor_sock, state.agent_sock) if path.exists()]
    if record := state.read():
        health = "is up" if record.outer.alive() else "is dead"
        left.append(f"{state.record_file}: the testbed {record.scenario or record.run_id} {health}")
    elif state.record_file.exists():
        left.append(f"{state.record_file}: not readable as what a launcher wrote")
    if (holder := state.lock_holder()) is not None:
        left.append(f"lock {state.lock_file}, held by pid {holder or 'unknown'}")
    return left


def search_path() -> str:
    """PATH with the administrator's directories, which ordinary users often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def port_holder(port: int) -> str | None:
    """Who listens on this TCP port of the host, in words; None where /proc does not tell."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in _pids() if inodes else ():
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in inodes:
                        return f"process {pid} ({_command(_words(pid, 'cmdline'))})"
    return None


def _listening(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _words(pid: int, file: str) -> list[str]:
    return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")[:-1]


def _module(words: list[str]) -> bool:
    return any(flag == "-m" and name in MODULES for flag, name in pairwise(words))


def _command(words: list[str]) -> str:
    text = " ".join(words)
    return text if len(text) <= 80 else text[:77] + "..."
