"""Processes in containers: how the compose launcher runs them, with containers that compose has made and not started.

A kill is the engine's kill, a stop its pause (the freezer: the whole container at once), a start again its start. What
others do to a container with the engine's own commands is noticed from its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from emulator.log import OURS
from netem.topology import ADDRESSES, TopologySettings, described
from testbed.launch import engine as engines
from testbed.launch.compose_file import INSIDE, LISTEN_FD, POLICIES, WAN, files_of, given, service_of
from testbed.launch.handover import send_listener
from testbed.launch.hosting import Change, Ending, Started
from testbed.launch.spec import LaunchSpec, ProcessSpec
from testbed.launch.state import StateDir, TestbedError, write_json

log = logging.getLogger(f"{OURS}.supervisor")

FIRST = 1  # what a container's process sees itself as


@dataclass(slots=True)
class Containers:
    """`testbed.launch.hosting.Hosting` by an engine. `made`: service -> container; `listener` is the host's socket."""

    state: StateDir
    engine: Any
    made: Mapping[str, Any]
    listener: socket.socket | None
    _services: dict[str, str] = field(default_factory=dict)
    _changed: dict[str, Callable[[Change], None]] = field(default_factory=dict)
    _events: Any = None
    _handing: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Notice from now on, in the running event loop, when a container ends, and when it is started."""
        loop = asyncio.get_running_loop()
        self._events = self.engine.events(
            decode=True,
            filters={
                "type": "container",
                "event": ["die", "start"],
                "container": [one.id for one in self.made.values()],
            },
        )
        services = {one.id: service for service, one in self.made.items()}

        def follow() -> None:
            with contextlib.suppress(Exception):  # closed, or the engine has gone: then nothing is known any more
                for event in self._events:
                    service = services[event["id"]]
                    if event["status"] == "die":
                        self._keep_last_words(service)
                        change: Change = _ending(int(event["Actor"]["Attributes"]["exitCode"]))
                    else:
                        change = self._seen(self.engine.containers.get(event["id"]))
                    loop.call_soon_threadsafe(self._note, service, change)

        threading.Thread(target=follow, name="engine-events", daemon=True).start()

    async def plug_in(self, settings: TopologySettings) -> dict[str, Any]:
        """Start the sites and plug each in; what `/status` tells of them. Raises TestbedError.

        It is done in passing by a container that joins the site for it, so that a site's own never have a privilege.
        """
        words = json.dumps({name: getattr(settings, name) for name in settings.__slots__})
        kept: dict[str, Any] = {}
        for site in ADDRESSES:
            container = self._container(f"site-{site}")
            await _call(container.start, what=f"site {site} does not start")
            argv = ["python", "-m", "netem.plugged", site, words]
            kept = json.loads(await asyncio.to_thread(engines.run_once, self.engine, container, argv, "NET_ADMIN"))
        topology = described(settings, kept["congestion_control"], kept["tcp_rto_max_s"])
        return {**topology, "image": self._container(WAN).attrs["Image"]}

    async def start(self, process: ProcessSpec, again: bool, changed: Callable[[Change], None]) -> Started:
        service = service_of(process)
        container = self._container(service)
        self._services[process.name], self._changed[service] = service, changed
        if process.listens:
            if self.listener is None:
                raise TestbedError(f"{process.name} asks for the listening socket, but the launcher passed none")
            self._handing = asyncio.create_task(self._hand_over(self.listener))
            self.listener = None
        await _call(container.start, what=f"{process.name} does not start")
        await _call(container.reload, what=f"{process.name} is not to be seen")
        return self._seen(container)

    async def signal(self, name: str, number: int) -> None:
        container = self._container(self._services[name])
        await _call(container.reload, what=f"{name} is not to be seen")
        paused = container.status == "paused"
        if number == signal.SIGSTOP:
            if not paused:
                await _call(container.pause, what=f"{name} cannot be paused")
            return
        if paused and number == signal.SIGCONT:
            await _call(container.unpause, what=f"{name} cannot go on")
        if number != signal.SIGCONT:
            await _call(container.kill, number, what=f"{name} cannot be sent signal {number}")

    async def frozen(self, names: Collection[str]) -> set[str]:
        paused = await asyncio.to_thread(engines.paused, self.engine)
        return {name for name in names if self._services[name] in paused}

    async def run(self, site: str | None, argv: list[str], timeout_s: float) -> dict[str, Any]:
        service = WAN if site == WAN else f"site-{site}"
        argv = ["python" if word == sys.executable else word for word in argv]
        argv = ["timeout", "--signal", "KILL", f"{timeout_s:g}", *argv]
        done = await _call(
            self._container(service).exec_run, argv, demux=True, what=f"a helper cannot be run in site {site}"
        )
        texts = [(text or b"").decode(errors="replace") for text in done.output]
        timed_out = done.exit_code == 128 + signal.SIGKILL
        return {"rc": done.exit_code, "stdout": texts[0], "stderr": texts[1], "timed_out": timed_out}

    async def close(self) -> None:
        """Remove the containers, their networks and the images that were built for them."""
        if self._handing is not None:
            self._handing.cancel()
        if self._events is not None:
            self._events.close()
        for told in await asyncio.to_thread(engines.remove, self.engine, built_images(self.state)):
            log.info("%s", told)

    def _keep_last_words(self, service: str) -> None:
        """Into a process's log, where that is empty, what its container said before it had one (`contained.py`)."""
        with contextlib.suppress(OSError):  # the container may be gone: its end counts all the same
            for name in [name for name, its in list(self._services.items()) if its == service]:
                path = self.state.log(name)
                if not path.exists() or not path.stat().st_size:
                    path.write_bytes(self.made[service].logs(tail=20))

    @staticmethod
    def _seen(container: Any) -> Started:
        return Started(FIRST, int(container.attrs["State"]["Pid"]) or None)

    def _note(self, service: str, change: Change) -> None:
        if changed := self._changed.get(service):
            changed(change)
        elif service.startswith("site-") and isinstance(change, Ending):
            log.error("%s ended: whatever ran in that site has no network any more; prfaas down, prfaas up", service)

    async def _hand_over(self, listener: socket.socket) -> None:
        """Give the listening socket to the gateway's container, which asks for it, and let go of it."""
        path = self.state.listener_sock
        path.unlink(missing_ok=True)
        with listener, socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
            path.chmod(0o770)
            door.listen(1)
            door.setblocking(False)
            asking, _ = await asyncio.get_running_loop().sock_accept(door)
            with asking:
                asking.setblocking(True)
                send_listener(asking, listener)
        path.unlink(missing_ok=True)

    def _container(self, service: str) -> Any:
        if service not in self.made:
            raise TestbedError(f"{service}: no such container; there are {', '.join(sorted(self.made))}")
        return self.made[service]


def write_configs(state: StateDir, spec: LaunchSpec) -> None:
    """The processes' configurations, as containers mount them: all of them, before any is made."""
    for process in spec.processes:
        if process.config is not None:
            config = process.config
            for file in files_of(config):
                config = _inside(config, file, given(file))
            config = _inside(config, str(state.root), INSIDE)
            if process.listens:
                config["listen_fd"] = LISTEN_FD
            if config.get("import_path"):
                config["import_path"] = [POLICIES]
            if process.site == WAN:
                config["opens"] = True
            write_json(state.config_file(process.name), config)
            state.config_file(process.name).chmod(0o640)  # it holds the data plane's secret


def _inside(value: Any, path: str, there: str) -> Any:
    """A configuration, or a part of one, with what lies at or below `path` where a container has it."""
    if isinstance(value, Mapping):
        return {key: _inside(one, path, there) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_inside(one, path, there) for one in value]
    if isinstance(value, str) and (value == path or value.startswith(f"{path}/")):
        return there + value[len(path) :]
    return value


def _ending(code: int) -> Ending:
    """From an engine's exit code, which is 128 and the number for a signal."""
    return Ending(signal=code - 128) if code > 128 else Ending(exit_code=code)


def built_images(state: StateDir) -> list[str]:
    """The tags that were built for this testbed, and that its engine did not have before."""
    try:
        return [str(tag) for tag in json.loads(state.config_file("images").read_text())]
    except (OSError, ValueError):
        return []


async def _call(function: Callable[..., Any], *arguments: Any, what: str, **keywords: Any) -> Any:
    def call() -> Any:
        with engines.said(what):
            return function(*arguments, **keywords)

    return await asyncio.to_thread(call)
