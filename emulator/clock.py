"""Model time on the wall: the one place where a process's time is scaled.

A `Clock` maps CLOCK_MONOTONIC to model seconds since t = 0. A `Driver` runs one pure machine by it with a single
timer: due wake-ups are delivered with their *scheduled* times before anything that arrives later, and how late the
timer really fired is recorded, because an emulation that falls behind must say so.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Final

import numpy as np

from emulator.instance import Machine
from emulator.messages import WAKE, AnyMessage, Out

_KEEP: Final = 200_000  # lateness samples kept for percentiles
# uvloop's timers have whole milliseconds, rounded to the nearest: asked for half a one later, none fires early.
TIMER_ROUND_S: Final = 0.0005


class Clock:
    """Model seconds since `t0_ns` (CLOCK_MONOTONIC), `scale` of them in a wall second."""

    __slots__ = ("scale", "t0_ns")

    def __init__(self, t0_ns: int, scale: float) -> None:
        self.t0_ns = t0_ns
        self.scale = scale

    def now_s(self) -> float:
        """The present, in model seconds."""
        return (time.monotonic_ns() - self.t0_ns) * 1e-9 * self.scale

    def monotonic_s(self, model_s: float) -> float:
        """The CLOCK_MONOTONIC second (the event loop's own time) at which the model time is `model_s`."""
        return self.t0_ns * 1e-9 + model_s / self.scale


class Lateness:
    """How late timers fired, in wall seconds."""

    def __init__(self) -> None:
        self._samples = array("d")
        self.max_s = 0.0

    def add(self, late_s: float) -> None:
        if late_s > self.max_s:
            self.max_s = late_s
        if len(self._samples) >= _KEEP:
            del self._samples[: _KEEP // 2]
        self._samples.append(late_s)

    def p99_s(self) -> float:
        """The 99th percentile of the samples kept (the latest 100,000 at least); 0 without any."""
        if not self._samples:
            return 0.0
        return float(np.percentile(np.frombuffer(self._samples.tobytes()), 99))


class Driver:
    """Runs one machine on the wall clock: `deliver(out)` gets everything it emits, in order."""

    def __init__(
        self, machine: Machine, clock: Clock, deliver: Callable[[list[Out]], None], lateness: Lateness
    ) -> None:
        self.machine = machine
        self.clock = clock
        self.lateness = lateness
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s: float | None = None

    def handle(self, message: AnyMessage) -> None:
        """Give the machine a message that has arrived now."""
        now_s = self.clock.now_s()
        self._catch_up(now_s)
        out = self.machine.handle(now_s, message)
        self._arm()
        self._deliver(out)

    def close(self) -> None:
        """Stop the timer; the machine is not called again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._armed_s = None

    def _catch_up(self, now_s: float) -> None:
        while (due_s := self.machine.next_s()) is not None and due_s <= now_s:
            self.lateness.add((self.clock.now_s() - due_s) / self.clock.scale)
            self._deliver(self.machine.handle(due_s, WAKE))

    def _fire(self) -> None:
        self._timer = self._armed_s = None
        self._catch_up(self.clock.now_s())
        self._arm()

    def _arm(self) -> None:
        due_s = self.machine.next_s()
        if due_s == self._armed_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_s = due_s
        if due_s is not None:
            self._timer = self._loop.call_at(self.clock.monotonic_s(due_s) + TIMER_ROUND_S, self._fire)
