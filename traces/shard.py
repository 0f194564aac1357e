"""One process's share of a replay: its rows sent at absolute deadlines, and what came of them written down at once.

A shard k writes its rows to ``ROWS.k`` as requests end, its counters to ``ROWS.k.json`` every second and at its end.
Files, not messages: neither Ctrl-C nor a lost message loses rows, a killed process loses those of its last second.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
import gevent.pool
import orjson
from locust.env import Environment

from traces.client_rows import COLUMNS, LEFT, ClientRow, busiest
from traces.request import Request
from traces.sse import Address, exchange, request_bytes
from traces.text import prompt_text

TICK_S = 1.0
CPU_WINDOW_S = 5.0
KILL_S = 5.0

logger = logging.getLogger(__name__)


class RequestFailed(Exception):
    """What Locust's statistics show for a failed request: its kind."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a shard must know beside the trace itself; it crosses to the workers as a dict.

    host: the server. t0_ns: CLOCK_MONOTONIC ns of model time 0. time_scale: model seconds a wall second.
    timeout_s: wall seconds from t_sched on. total: rows of the trace. rows: absolute path of the final CSV.
    leaves: when some clients leave, (model second, the fraction of those in flight); who, is drawn from leave_seed.
    text_seed: prompts are texts drawn from it (``traces.text``); None sends lengths alone.
    """

    host: Address
    t0_ns: int
    time_scale: float
    timeout_s: float
    model: str
    id_prefix: str
    total: int
    rows: str
    leaves: tuple[tuple[float, float], ...] = ()
    leave_seed: int = 0
    text_seed: int | None = None

    def part(self, shard: int) -> Path:
        """Where shard writes its rows."""
        return Path(f"{self.rows}.{shard}")

    def state(self, shard: int) -> Path:
        """Where shard writes its counters; ``finished`` in it means that the part is complete."""
        return Path(f"{self.rows}.{shard}.json")

    def deadline_ns(self, request: Request) -> int:
        """When request is due, CLOCK_MONOTONIC ns."""
        return self.t0_ns + round(request.arrival_s / self.time_scale * 1e9)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace path by value, atomically: a reader sees the old or the new, never a part."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_bytes(orjson.dumps(value))
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """What write_json wrote last; empty when nothing yet."""
    try:
        return dict(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}


class Shard:
    """Sends the rows with index = shard modulo of, and writes what came of them. It runs from its making on."""

    def __init__(self, environment: Environment, plan: Plan, requests: list[Request], shard: int, of: int) -> None:
        self.fire: Any = environment.events.request.fire
        self.plan = plan
        self.shard = shard
        self.of = of
        mine = [(plan.deadline_ns(requests[index]), index) for index in range(shard, len(requests), of)]
        self.schedule = sorted(mine)
        self.requests = requests
        self.fault = "" if len(requests) == plan.total else f"worker {shard} has {len(requests)} of {plan.total} rows"
        self.in_flight: dict[int, ClientRow] = {}
        self.exchanges: dict[int, gevent.Greenlet] = {}
        self.left: set[int] = set()
        self.sent = self.done = self.failed = 0
        self.finished = False
        self.cpu: list[tuple[int, float]] = []
        self.part = plan.part(shard).open("w", encoding="utf-8")
        self.part.write(",".join(COLUMNS) + "\n")
        self.part.flush()
        self.group = gevent.pool.Group()
        self.ticker = gevent.spawn(self._tick)
        self.scheduler = gevent.spawn(self._run)
        self.leavers = [gevent.spawn(self._leave, *leave) for leave in plan.leaves]

    def stop(self) -> None:
        """End now: what is in flight becomes a row with error ``interrupted``. Does nothing after the end."""
        if self.finished:
            return
        self.scheduler.kill()
        self._finish()

    def _run(self) -> None:
        for due_ns, index in self.schedule:
            request = self.requests[index]
            request_id = f"{self.plan.id_prefix}{index:07d}"
            row = ClientRow(
                request_id, index, due_ns, input_tokens=request.input_tokens, output_tokens_asked=request.output_tokens
            )
            seed = self.plan.text_seed
            prompt = None if seed is None else prompt_text(request, index, seed)
            message = request_bytes(self.plan.host, self.plan.model, request, request_id, prompt)
            while (wait_ns := due_ns - time.monotonic_ns()) > 0:
                gevent.sleep(wait_ns / 1e9)
            self.in_flight[index] = row
            self.sent += 1
            self.exchanges[index] = self.group.spawn(self._one, row, message)
        self.group.join()
        self._finish()

    def _one(self, row: ClientRow, message: bytes) -> None:
        left_s = self.plan.timeout_s - (time.monotonic_ns() - row.t_sched_ns) / 1e9
        try:
            exchange(row, message, self.plan.host, max(left_s, 1e-3))
        except gevent.GreenletExit:
            row.error = LEFT if row.index in self.left else "interrupted"
        except Exception:
            logger.exception("request %s", row.request_id)
            row.error = "client_error"
        self._record(row)

    def _record(self, row: ClientRow) -> None:
        row.t_done_ns = row.t_done_ns or time.monotonic_ns()
        self.part.write(row.csv_line())
        del self.in_flight[row.index]
        self.exchanges.pop(row.index, None)
        self.done += 1
        self.failed += bool(row.error)
        figures = {"e2e": row.e2e_s} if row.error else {"ttft": row.ttft_s, "tpot": row.tpot_s, "e2e": row.e2e_s}
        for name, wall_s in figures.items():
            if wall_s is not None:
                self.fire(
                    request_type="SSE",
                    name=name,
                    response_time=wall_s * self.plan.time_scale * 1e3,
                    response_length=0,
                    exception=RequestFailed(row.error) if row.error else None,
                    context={},
                )

    def _leave(self, at_s: float, fraction: float) -> None:
        """Some of the clients close their connections, at a model second."""
        due_ns = self.plan.t0_ns + round(at_s / self.plan.time_scale * 1e9)
        while (wait_ns := due_ns - time.monotonic_ns()) > 0:
            gevent.sleep(wait_ns / 1e9)
        there = sorted(self.exchanges)
        chance = random.Random(f"{self.plan.leave_seed} {at_s} {self.shard}")
        for index in chance.sample(there, math.ceil(fraction * len(there))):
            self.left.add(index)
            self.exchanges[index].kill(block=False)

    def _tick(self) -> None:
        while True:
            self._write_state()
            gevent.sleep(TICK_S)

    def _write_state(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self.plan.t0_ns:
            self.cpu.append((now_ns, time.process_time()))
        self.part.flush()
        write_json(
            self.plan.state(self.shard),
            {
                "at_ns": now_ns,
                "sent": self.sent,
                "done": self.done,
                "failed": self.failed,
                "cpu_busy": busiest(self.cpu, CPU_WINDOW_S),
                "fault": self.fault,
                "finished": self.finished,
            },
        )

    def _finish(self) -> None:
        gevent.killall(self.leavers)
        self.group.kill(timeout=KILL_S)
        for row in list(self.in_flight.values()):
            row.error = LEFT if row.index in self.left else "interrupted"
            self._record(row)
        self.ticker.kill()
        self.finished = True
        self._write_state()
        self.part.close()
