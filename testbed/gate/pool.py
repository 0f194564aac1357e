"""Worker processes by environment, each with its imports done once, and jobs shared out among them.

Two cores carry two workers; more would only take memory. A worker that ends by itself or hangs is replaced, and its job
is told as one that did not end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import psutil

from testbed.gate.environment import Environment

RUN_LIMIT_S: Final = 300.0
"""Wall seconds after which a run has hung."""

WEIGH_EVERY_S: Final = 0.5
MODULE: Final = "testbed.gate.worker"


class WorkerError(RuntimeError):
    """A job cannot be run at all. The message says why, for people."""


@dataclass(frozen=True, slots=True)
class Died:
    """What came of a job whose process ended under it, or was ended."""

    why: str


class _Worker:
    """A process and the job that it has."""

    def __init__(self, environment: Environment) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **environment.variables},
            )
        self.environment = environment
        self.connection = Connection(ours.detach())
        self.connection.send(environment)
        self.ready = False
        self.job: int | None = None
        self.since_s = time.monotonic()

    def give(self, index: int, job: Any) -> None:
        self.job, self.since_s = index, time.monotonic()
        self.connection.send(job)

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait()


class Pool:
    """A context. jobs: processes in all, at least one an environment."""

    def __init__(self, environments: Sequence[Environment], jobs: int) -> None:
        kinds = list(dict.fromkeys(environments))
        self._counts = {kind: max(1, jobs // len(kinds)) for kind in kinds}
        self._workers: list[_Worker] = []
        self._weighed_s = 0.0
        self.most_bytes: int | None = None

    def __enter__(self) -> Pool:
        self._workers = [_Worker(kind) for kind, count in self._counts.items() for _ in range(count)]
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, jobs: Sequence[tuple[Environment, Any]]) -> Iterator[tuple[int, Any]]:
        """(index, what came of it) of every job as it ends; the order in which they begin is theirs. Raises WorkerError
        for a job that cannot be run, and when a process cannot even begin."""
        left = {kind: [i for i, (of, _) in enumerate(jobs) if of == kind][::-1] for kind in self._counts}
        open_jobs = len(jobs)
        while open_jobs:
            for worker in self._workers:
                if worker.ready and worker.job is None and left[worker.environment]:
                    index = left[worker.environment].pop()
                    worker.give(index, jobs[index][1])
            for index, outcome in self._heard():
                open_jobs -= 1
                yield index, outcome
            self._weigh()

    def _heard(self) -> list[tuple[int, Any]]:
        """What came of the jobs that have ended by now; waits for a while."""
        out = []
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout=1.0):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                kind, what = worker.connection.recv()
            except (EOFError, OSError):
                out += self._replace(worker, f"its process ended by itself ({worker.process.wait():d})")
                continue
            if kind == "refused":
                raise WorkerError(what)
            worker.ready = True
            if kind == "done" and worker.job is not None:
                out.append((worker.job, what))
                worker.job = None
        for worker in list(self._workers):
            if worker.job is not None and time.monotonic() - worker.since_s > RUN_LIMIT_S:
                out += self._replace(worker, f"it had not ended after {RUN_LIMIT_S:g} s")
        return out

    def _replace(self, worker: _Worker, why: str) -> list[tuple[int, Any]]:
        worker.end()
        if not worker.ready:
            raise WorkerError(f"a worker process ended before it began: {why}; what it said is above")
        self._workers[self._workers.index(worker)] = _Worker(worker.environment)
        return [] if worker.job is None else [(worker.job, Died(why))]

    def _weigh(self) -> None:
        """Keep the most memory that this process and its workers held together, each page counted once."""
        now_s = time.monotonic()
        if now_s - self._weighed_s < WEIGH_EVERY_S:
            return
        self._weighed_s = now_s
        try:
            processes = [psutil.Process(), *(psutil.Process(worker.process.pid) for worker in self._workers)]
            held = sum(process.memory_full_info().pss for process in processes)
        except (psutil.Error, AttributeError):
            return
        self.most_bytes = max(self.most_bytes or 0, held)
