"""Starts the delay line, sets it, watches it and starts it again: the agent's side of `delay.py`.

The line is started when a direction first asks for delay, jitter, loss or a stall, and stays from then on, so that no
packet ever overtakes another by a way round it. The rules that lead into it stay when it dies: what it held is lost and
nothing passes until the next one serves, an outage that is counted. An agent finds the line of the one before it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netem.divert import divert
from netem.link import Impairment, LinkError
from netem.log import Log

READY_S = 10.0
_PAUSE_S = 0.02
_RETRY_S = 0.5
_ANSWER_S = 5.0

_log = Log("keeper")


@dataclass(slots=True)
class Faults:
    """`deaths` of the delay line, and for how long nothing passed (wall seconds) until the next one served."""

    deaths: int = 0
    outage_s: float = 0.0


class Keeper:
    """The delay line of one WAN. `interfaces`: direction -> interface whose egress it delays. `socket`: the line's;
    its configuration lies beside, and what it says goes to `log`.

    `faults` counts; `down` says that none serves right now. Entered and used in the WAN's network namespace.
    """

    def __init__(self, interfaces: Mapping[str, str], socket: Path, seed: int, log: Path) -> None:
        self.faults = Faults()
        self.down = False
        self._queues = {direction: number for number, direction in enumerate(interfaces, start=1)}
        self._interfaces, self._socket, self._seed, self._log_path = interfaces, socket, seed, log
        self._wanted: dict[str, Impairment] = {}
        self._mechanism = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def on(self) -> bool:
        return self._watch is not None

    async def apply(self, wanted: Mapping[str, Impairment]) -> set[str]:
        """Have every direction as wanted; the directions that changed. Raises LinkError when that cannot be had."""
        async with self._turn:
            changed = {way for way, asked in wanted.items() if self._wanted.get(way, Impairment()) != asked}
            if (
                not self.on
                and not any(asked.does_something for asked in wanted.values())
                and not self._left_by_another()
            ):
                return set()
            before, self._wanted = self._wanted, dict(wanted)
            try:
                if not self.on:
                    await self._start()
                elif changed:
                    await self._ask({"set": {way: asdict(wanted[way]) for way in changed}})
            except LinkError:
                self._wanted = before
                raise
            return changed

    async def prepare(self) -> None:
        """Have the line there, so that what is asked of it later holds at once. Raises LinkError where it cannot be."""
        async with self._turn:
            if not self.on:
                self._wanted = {way: self._wanted.get(way, Impairment()) for way in self._interfaces}
                await self._start()

    async def describe(self) -> dict[str, dict[str, Any]]:
        """By direction the line's figures (`netem.delay.Line.describe`), and the process's beside them; {} while off.

        While it is down, only {"down": True, "deaths", "outage_s"}.
        """
        if not self.on:
            return {}
        process: dict[str, Any] = {"mechanism": self._mechanism, "down": self.down, **asdict(self.faults)}
        try:
            answer = await self._ask({})
        except LinkError:
            return {way: process | {"down": True} for way in self._interfaces}
        lines = answer.pop("lines")
        return {way: {**lines[way], **process, **answer} for way in self._interfaces}

    async def close(self) -> None:
        """Stop watching; the line itself stays, as everything that shapes the link does."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    def _left_by_another(self) -> bool:
        return self._socket.exists()

    async def _start(self) -> None:
        try:
            await self._ask({"set": {way: asdict(asked) for way, asked in self._wanted.items()}})
        except LinkError:
            await self._spawn()
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        self._mechanism = await asyncio.to_thread(
            divert, {self._interfaces[way]: number for way, number in self._queues.items()}
        )
        self._watch = asyncio.create_task(self._watching(reader, writer))

    async def _spawn(self) -> None:
        """Start a line and wait until it serves. Raises LinkError with what it said."""
        lines = {way: asdict(self._wanted[way]) for way in self._interfaces}
        config = {"socket": str(self._socket), "seed": self._seed, "queues": self._queues, "lines": lines}
        path, log_path = self._socket.with_suffix(".json"), self._log_path
        path.write_text(json.dumps(config))
        self._socket.unlink(missing_ok=True)
        # Not asyncio's: that kills its children when the loop ends, and the line outlives the agent.
        with open(log_path, "w") as log:
            argv = [sys.executable, "-m", "netem.delay", "--config", str(path)]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log)
        end_s = time.monotonic() + READY_S
        while True:
            with suppress(LinkError):
                await self._ask({})
                return
            if self._process.poll() is not None or time.monotonic() > end_s:
                said = log_path.read_text().strip() or f"no answer within {READY_S:g} s"
                raise LinkError(f"the delay line did not start: {said.removeprefix('error: ')}")
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                writer.write(json.dumps(request).encode() + b"\n")
                answer: dict[str, Any] = json.loads(await reader.readline())
                writer.close()
        except (OSError, ValueError) as gone:
            raise LinkError(f"the delay line does not answer ({gone!r}); it is started again by itself") from gone
        if "error" in answer:
            raise LinkError(str(answer["error"]))
        return answer

    async def _watching(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            with suppress(OSError):
                await reader.read()  # ends when the line does
            writer.close()
            died_s = time.monotonic()
            self.faults.deaths += 1
            self.down = True
            _log.error("delay line died: the link is down until the next one serves, and the run is invalid")
            while self.down:
                try:
                    async with self._turn:
                        await self._spawn()
                    reader, writer = await asyncio.open_unix_connection(str(self._socket))
                    self.down = False
                except (LinkError, OSError) as refused:
                    _log.error("delay line not started yet", reason=refused)
                    await asyncio.sleep(_RETRY_S)
            self.faults.outage_s += time.monotonic() - died_s
            _log.error("delay line serves again", after_s=time.monotonic() - died_s)
