"""The delay line's process, in the WAN's namespace: `python -m netem.delay --config FILE`.

Packets wait in the kernel's queues (NFQUEUE, one a direction) and leave in order at their due times; only metadata
comes up here. What a packet suffers is decided in `holding.py`; this is the loop, with one timer, and its Unix socket:
a line of JSON in, {"set": {direction: an `Impairment`'s fields}} or {}, and a line out, the figures of
`Line.describe` by direction and of the process. If it dies its packets are lost and none passes until a next one
binds the queues: an outage, never a shorter round trip.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from netem.holding import Holding
from netem.link import Impairment, LinkError
from netem.nfqueue import Queue

_PRIORITY = 10
_IDLE_S = 1.0
_PR_SET_TIMERSLACK = 29
_MCL_CURRENT_AND_FUTURE = 3


class Line:
    """One direction: a queue and what holds its packets."""

    def __init__(self, direction: str, number: int, seed: int) -> None:
        self.holding = Holding(f"{seed}/{direction}")
        self.queue = Queue(number, self.holding.arrive)
        self._stall_overflowed = 0
        self._overflowed_before: int | None = None  # the present stall, while there is one

    def set(self, asked: Impairment) -> None:
        """From here on; what waits is neither lost nor overtaken. With loss, super-packets are cut first."""
        self.queue.set(asked.limit_packets, whole_super_packets=not asked.loss)
        if asked.stalled and self._overflowed_before is None:
            self._overflowed_before = self.queue.dropped()
        elif not asked.stalled and self._overflowed_before is not None:
            self._stall_overflowed += self.queue.dropped() - self._overflowed_before
            self._overflowed_before = None
        self.holding.set(asked, time.monotonic_ns())

    def release(self) -> None:
        newest = self.holding.release(time.monotonic_ns())
        if newest is not None:
            self.queue.accept(newest)

    def describe(self) -> dict[str, Any]:
        """Packets held now, passed, lost on purpose, overflowed (queue full); how late they left, in seconds.

        `stall_overflowed`: those that a stall had no room for, which is what a long stall does, and no fault.
        """
        holding, late, dropped = self.holding, self.holding.lateness, self.queue.dropped()
        in_stalls = self._stall_overflowed
        if self._overflowed_before is not None:
            in_stalls += dropped - self._overflowed_before
        return {
            "asked": asdict(holding.impairment),
            "held": holding.held,
            "passed": holding.passed,
            "lost": holding.lost,
            "overflowed": dropped - in_stalls,
            "stall_overflowed": in_stalls,
            "verdict_errors": self.queue.verdict_errors,
            "late_p50_s": late.quantile_s(0.5),
            "late_p99_s": late.quantile_s(0.99),
            "late_max_s": late.max_ns * 1e-9,
        }


class Control:
    """The Unix socket: short requests, answered between two looks at the packets."""

    def __init__(self, path: str, lines: Mapping[str, Line], about: Mapping[str, Any]) -> None:
        Path(path).unlink(missing_ok=True)
        self._lines, self._about = lines, about
        self._pending: dict[socket.socket, bytes] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)

    def sockets(self) -> list[socket.socket]:
        return [self._listener, *self._pending]

    def serve(self, sock: socket.socket) -> None:
        """Deal with a socket that is readable."""
        if sock is self._listener:
            connection, _ = sock.accept()
            self._pending[connection] = b""
            return
        try:
            received = sock.recv(1 << 16)
            *lines, self._pending[sock] = (self._pending[sock] + received).split(b"\n")
            for line in lines:
                sock.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:
            received = b""
        if not received:
            del self._pending[sock]
            sock.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            for direction, asked in json.loads(line).get("set", {}).items():
                self._lines[direction].set(Impairment(**asked))
        except (ValueError, KeyError, TypeError, AttributeError, LinkError) as wrong:
            return {"error": f"delay line: {wrong!r}"}
        return {**self._about, "lines": {direction: one.describe() for direction, one in self._lines.items()}}


def prioritise() -> dict[str, Any]:
    """Real-time priority and locked memory, as far as this account may: {"realtime", "locked": bool, "refused": [why]}.

    Without them timers fire late when the machine is busy; how late is measured all the same.
    """
    refused = []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError as why:
        refused.append(f"SCHED_FIFO: {why.strerror}")
    locked = libc.mlockall(_MCL_CURRENT_AND_FUTURE) == 0
    if not locked:
        refused.append(f"mlockall: {os.strerror(ctypes.get_errno())}")
    return {"realtime": os.sched_getscheduler(0) == os.SCHED_FIFO, "locked": locked, "refused": refused}


def run(config: Mapping[str, Any]) -> None:
    """Bind the queues, set them, and hold packets until SIGTERM. Raises LinkError when a queue cannot be had."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    lines = {way: Line(way, number, config["seed"]) for way, number in config["queues"].items()}
    for direction, line in lines.items():
        line.set(Impairment(**config["lines"][direction]))
    control = Control(config["socket"], lines, {"pid": os.getpid(), **prioritise()})
    queues: list[Queue | socket.socket] = [line.queue for line in lines.values()]
    gc.freeze()
    gc.disable()
    while not stop:
        due_ns = [line.holding.due_ns for line in lines.values() if line.holding.due_ns is not None]
        wait_s = max(0.0, (min(due_ns) - time.monotonic_ns()) * 1e-9) if due_ns else _IDLE_S
        readable, _, _ = select.select([*queues, *control.sockets()], [], [], wait_s)
        for ready in readable:
            if isinstance(ready, Queue):
                ready.take()
            else:
                control.serve(ready)
        for line in lines.values():
            line.release()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m netem.delay", description="Hold the link's packets.")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="JSON: socket, seed, queues {direction: number}, lines {direction: ...}",
    )
    try:
        run(json.loads(parser.parse_args().config.read_text()))
    except (LinkError, OSError, ValueError, KeyError, TypeError) as refused:
        print(f"error: delay line: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
