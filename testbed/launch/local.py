"""Processes of this host in the topology's sites: how the namespaces launcher runs them. Started by a pid 1 only, which
inherits and reaps every orphan.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from testbed.launch.hosting import Change, Ending, Started
from testbed.launch.spec import ProcessSpec
from testbed.launch.state import StateDir, TestbedError, proc_stat, write_json

RUN_OUTPUT_BYTES = 1 << 20


class Sites(Protocol):
    """What is needed of `netem.topology.Topology`."""

    def command(self, site: str, argv: list[str]) -> list[str]: ...
    def pass_fds(self, site: str) -> tuple[int, ...]: ...


@dataclass(slots=True)
class LocalProcesses:
    """`testbed.launch.hosting.Hosting` by fork and exec. `sites` is None where the specification asks for no topology;
    `listener` is the host's socket, for the process that listens."""

    state: StateDir
    sites: Sites | None
    listener: socket.socket | None
    _pids: dict[str, int] = field(default_factory=dict)
    _exits: dict[int, Callable[[int], None]] = field(default_factory=dict)

    def watch(self) -> None:
        """Reap from now on, in the running event loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    async def start(self, process: ProcessSpec, again: bool, changed: Callable[[Change], None]) -> Started:
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

        def over(status: int) -> None:
            popen.returncode = os.waitstatus_to_exitcode(status)
            if process.listens and self.listener is not None:
                self.listener.close()  # so that clients are refused, rather than wait for nobody
                self.listener = None
            changed(Ending.of(popen.returncode))

        self._pids[process.name] = popen.pid
        self._exits[popen.pid] = over
        return Started(popen.pid)

    async def signal(self, name: str, number: int) -> None:
        os.kill(self._pids[name], number)

    async def frozen(self, names: Collection[str]) -> set[str]:
        return {name for name in names if (stat := proc_stat(self._pids[name])) and stat[0] in "Tt"}

    async def run(self, site: str | None, argv: list[str], timeout_s: float) -> dict[str, Any]:
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

    async def close(self) -> None:
        """Nothing: the namespaces and whatever else runs in them end with this pid 1."""

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
