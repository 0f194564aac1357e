"""The one thread in which a worker's model computes, beside the event loop that moves its messages and bytes.

Work is done in the order it was handed over. The thread keeps to its core and is less urgent than the loop: computing
gives way to whoever has a byte to move.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable

from emulator.log import Log

log = Log("compute")

NICER = 5  # than the event loop
SWITCH_S = 0.0005  # wall seconds that a thread may hold the interpreter while the other one waits


class ComputeThread:
    """core: of this machine, None for any. failed(why): called on the event loop when some work raised."""

    def __init__(self, core: int | None, failed: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._failed = failed
        self._closing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(core,), name="compute", daemon=True)
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """To be done after all that was submitted before."""
        self._work.put(work)

    def tell(self, call: Callable[[], None]) -> None:
        """From inside the thread: call it on the event loop, unless that has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def close(self, patience_s: float) -> bool:
        """Do what is under way, and no more; whether that was done in time."""
        self._closing = True
        self._work.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self, core: int | None) -> None:
        try:
            if core is not None:
                os.sched_setaffinity(0, {core})
        except OSError as error:
            why = f"core {core}, which this worker was given to compute on, is not there: {error.strerror}"
            self.tell(lambda: self._failed(why))
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICER)
        while (work := self._work.get()) is not None and not self._closing:
            try:
                work()
            except Exception as error:
                log.error("computing_failed", cause=error)
                why = f"{type(error).__name__}: {error}"
                self.tell(lambda why=why: self._failed(why))  # type: ignore[misc]
