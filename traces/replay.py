"""Locust file: an exact, open-loop replay of a trace against an OpenAI-compatible server.

    locust -f traces/replay.py --headless --only-summary --host http://127.0.0.1:8000 --trace FILE --rows OUT.csv

Locust's ``--help`` leaves out a locustfile's own options: they are in ``_options`` below, each also an environment
variable (``PRFAAS_TRACE``). Instead of ``--headless``, ``--autostart --web-host 127.0.0.1`` shows Locust's page.

One scheduler greenlet a process spawns a greenlet a request at absolute deadlines ``t0 + arrival_s / time_scale``; it
never sleeps on deltas and never waits for an answer. With ``--processes N``, process k takes the trace's rows with
index = k modulo N, so N processes send the trace once. Locust's user count means nothing here: its users only hold the
run open. Locust gives the process model, the web page and the statistics (``ttft``, ``tpot``, ``e2e``, in *model*
milliseconds, failures by kind under e2e); the record is the rows, because Locust's percentiles keep two digits.

The *coordinator* (the master, or the only process) begins and ends the load and judges it; a *shard* sends. Read
``traces.shard`` for the schedule and ``traces.sse`` for one request. Importing this module imports Locust, which
patches the process for gevent: other code reads rows through ``traces.client_rows`` and starts this file as a child.

Exit codes: 0 all answered, 1 requests failed, 2 usage, 3 invalid measurement, 4 interrupted (Ctrl-C, SIGTERM, Stop).
"""

from __future__ import annotations

import argparse
import http.client
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.event
import orjson
from locust import User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from traces.client_rows import INVALID, USAGE, ClientRow, judge, read_rows, write_rows
from traces.load import load
from traces.request import Request, TraceError
from traces.shard import TICK_S, Plan, Shard, read_json, write_json
from traces.sse import Address

LEAD_S = 1.5
"""Wall seconds between beginning a load and its t = 0."""
WORKERS_LEAD_S = 4.0
"""The same with worker processes: Locust's messages were measured to take up to 1 s on the way to an idle worker."""
LOST_S = 15.0
"""A shard silent for this long is taken for dead."""
STOP_S = 10.0
"""Wall seconds granted to the shards, and to the server, to end an interrupted load."""
CPU_BOUND = 0.9

logger = logging.getLogger(__name__)


class ReplayError(ValueError):
    """A replay that cannot begin. The message names the option, the value and the remedy."""


class Coordinator:
    """Begins the load, hands out its shards, follows them, ends it, merges the rows and sets Locust's exit code."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.options = options = replay.options
        self.requests = trace_requests(options.trace)
        self.scratch = "" if options.rows else tempfile.mkdtemp(prefix="prfaas-replay-")
        self.rows = Path(options.rows or f"{self.scratch}/rows.csv").absolute()
        self.interrupted = gevent.event.Event()
        self.lost: set[int] = set()
        self.closed = False
        self.load: dict[str, Any] = {}
        self.counts: dict[str, Any] = {"sent": 0, "done": 0, "failed": 0, "total": len(self.requests)}
        self.greenlet = gevent.spawn(self._run)

    def interrupt(self) -> None:
        """End the replay early and wait until its rows are written. Does nothing once it is over."""
        if not self.closed:
            self.interrupted.set()
            self.greenlet.join(timeout=3 * STOP_S)

    def _run(self) -> None:
        environment, runner = self.replay.environment, self.replay.runner
        try:
            environment.process_exit_code = self._replay()
        except (ReplayError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            environment.process_exit_code = USAGE
        except Exception:
            logger.exception("the replay broke")
            environment.process_exit_code = INVALID
        finally:
            self.closed = True
            if self.scratch:
                shutil.rmtree(self.scratch, ignore_errors=True)
        if self.interrupted.is_set():
            return
        if self.options.headless:
            runner.quit()
        else:
            runner.stop()

    def _replay(self) -> int:
        host = server_address(self.replay.environment.host)
        t0_ns, time_scale = self.options.t0_ns, self.options.time_scale or 1.0
        if t0_ns is None:
            self.load = self._begin_load(host)
            asked, t0_ns, time_scale = self.options.time_scale, self.load["t0_ns"], self.load["time_scale"]
            if asked not in (None, time_scale):
                self._end_load(host)
                raise ReplayError(f"--time-scale {asked:g}: the testbed runs at {time_scale:g}; give the same, or none")
        plan = Plan(
            host,
            t0_ns,
            time_scale,
            self.options.timeout_s,
            self.options.model,
            self.options.id_prefix,
            len(self.requests),
            str(self.rows),
            tuple(self.options.leave),
            self.options.leave_seed,
            self.options.text_seed,
        )
        shards = self.replay.hand_out(plan, self.requests)
        faults = self._follow(plan, shards)
        if self.interrupted.is_set() or self.lost:
            self.replay.stop_shards()
            faults += self._follow(plan, shards, until_ns=time.monotonic_ns() + int(STOP_S * 1e9))
        rows = self._merge(plan, shards)
        if not self._end_load(host):
            faults.append("the server did not end the load: its own rows may be incomplete")
        outcome = judge(
            rows,
            plan.total,
            cpu_busy=self.counts["cpu_busy"],
            late_bound_s=self.options.late_bound_ms / 1e3,
            cpu_bound=CPU_BOUND,
            interrupted=self.interrupted.is_set(),
            meter_faults=faults,
        )
        self._progress(plan, finished=True, outcome=asdict(outcome))
        logger.info("replay %s: %d of %d completed", outcome.verdict, outcome.completed, plan.total)
        for reason in outcome.reasons:
            logger.warning("replay %s: %s", outcome.verdict, reason)
        return outcome.exit_code

    def _begin_load(self, host: Address) -> dict[str, Any]:
        lengths = sorted(Counter(request.input_tokens for request in self.requests).items())
        arrivals = [request.arrival_s for request in self.requests]
        span_s = max(arrivals) - min(arrivals)
        status, answer = post_json(
            host,
            "/prfaas/loads",
            {
                "lead_s": WORKERS_LEAD_S if isinstance(self.replay.runner, MasterRunner) else LEAD_S,
                "lengths": {"values": [tokens for tokens, _ in lengths], "weights": [count for _, count in lengths]},
                "rate_rps": len(arrivals) / span_s if span_s > 0 else None,
                "policy": None,
            },
            STOP_S,
        )
        if status != http.client.OK:
            message = (answer.get("error") or {}).get("message", "no message")
            raise ReplayError(
                f"--host {host[0]}:{host[1]} refused to begin a load: HTTP {status}, {message}; "
                "wait for the load before, or give --t0-ns for a server that is not prfaas"
            )
        if missing := {"id", "t0_ns", "time_scale"} - answer.keys():
            raise ReplayError(f"--host {host[0]}:{host[1]}: no prfaas gateway, its load lacks {sorted(missing)}")
        return answer

    def _end_load(self, host: Address) -> bool:
        """Whether the load that this replay began, if it did, was ended by the server too."""
        if not self.load:
            return True
        timeout_s = STOP_S if self.interrupted.is_set() else self.options.timeout_s
        try:
            status, _ = post_json(host, f"/prfaas/loads/{self.load['id']}/end", {}, timeout_s)
        except (OSError, ReplayError):
            return False
        return status == http.client.OK

    def _follow(self, plan: Plan, shards: int, until_ns: int | None = None) -> list[str]:
        """Wait until every shard has finished, one is lost, or until_ns (without it: an interrupt). Answers faults."""
        began_ns = time.monotonic_ns()
        next_progress_ns = 0
        while until_ns is None or time.monotonic_ns() < until_ns:
            states = [read_json(plan.state(shard)) for shard in range(shards)]
            for key in ("sent", "done", "failed"):
                self.counts[key] = sum(state.get(key, 0) for state in states)
            self.counts["cpu_busy"] = max(state.get("cpu_busy", 0.0) for state in states)
            running = {shard for shard in range(shards) if not states[shard].get("finished")} - self.lost
            if not running:
                return [state["fault"] for state in states if state.get("fault")]
            heard_ns = time.monotonic_ns() - int(LOST_S * 1e9)
            if silent := {shard for shard in running if states[shard].get("at_ns", began_ns) < heard_ns}:
                self.lost |= silent
                return [f"worker {shard} fell silent: its requests are missing or unrecorded" for shard in silent]
            if time.monotonic_ns() >= next_progress_ns:
                self._progress(plan)
                next_progress_ns = time.monotonic_ns() + int(TICK_S * 1e9)
            if until_ns is None and self.interrupted.wait(timeout=TICK_S / 5):
                return []
            if until_ns is not None:
                gevent.sleep(TICK_S / 20)
        return ["not every worker ended when it was told to"]

    def _merge(self, plan: Plan, shards: int) -> list[ClientRow]:
        rows: list[ClientRow] = []
        for shard in range(shards):
            if plan.part(shard).exists():
                rows += read_rows(plan.part(shard))
        write_rows(self.rows, rows)
        for shard in range(shards):
            plan.part(shard).unlink(missing_ok=True)
            plan.state(shard).unlink(missing_ok=True)
        return rows

    def _progress(self, plan: Plan, **more: Any) -> None:
        if not self.options.progress:
            return
        t_model_s = (time.monotonic_ns() - plan.t0_ns) / 1e9 * plan.time_scale
        load = {**self.load, "t0_ns": plan.t0_ns, "time_scale": plan.time_scale}
        value = {**self.counts, "t_model_s": t_model_s, "finished": False, "load": load, **more}
        if self.options.progress == "-":
            print(orjson.dumps(value).decode(), file=sys.stderr, flush=True)
        else:
            write_json(Path(self.options.progress), value)


def server_address(host: str | None) -> Address:
    """(numeric address, port) of an ``http://name[:port]`` URL. Raises ReplayError for anything else."""
    url = urlsplit(host or "")
    if url.scheme != "http" or not url.hostname or url.path.strip("/"):
        raise ReplayError(
            f"--host {host or 'is missing'}: must be http://NAME:PORT, for instance http://127.0.0.1:8000"
        )
    try:
        found = socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_STREAM)[0][4]
    except (OSError, ValueError) as error:
        raise ReplayError(f"--host {host}: {error}") from None
    return str(found[0]), int(found[1])


def post_json(host: Address, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, dict[str, Any]]:
    """POST body, answer (status, JSON object). Raises OSError without a connection, ReplayError for no JSON object."""
    connection = http.client.HTTPConnection(*host, timeout=timeout_s)
    try:
        connection.request("POST", path, orjson.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, dict(orjson.loads(response.read()))
    except (http.client.HTTPException, ValueError, TypeError) as error:
        raise ReplayError(f"--host {host[0]}:{host[1]}{path}: not the answer of a prfaas gateway ({error})") from None
    except OSError as error:
        raise type(error)(f"--host {host[0]}:{host[1]}{path}: {error}; is the testbed up?") from None
    finally:
        connection.close()


class HoldOpen(User):
    """Keeps Locust's run open. It sends nothing: see the module's docstring."""

    @task
    def hold(self) -> None:
        gevent.sleep(3600)


class Replay:
    """This module's part in one Locust process, whatever its role: local, master or worker."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.coordinator: Coordinator | None = None
        self.shard: Shard | None = None
        self.options: Any = environment.parsed_options
        self.runner: Any = environment.runner
        hooks: Any = environment.events
        if isinstance(self.runner, WorkerRunner):
            environment.process_exit_code = 0  # the master judges
            self.runner.register_message("prfaas_shard", self._take_shard)
            self.runner.register_message("prfaas_stop", lambda environment, msg: self.stop_shards())
        # After the runner's own listeners, because quitting fires them in reverse: the rows come first.
        hooks.test_start.add_listener(self._start)
        hooks.test_stop.add_listener(self._stop)
        hooks.quitting.add_listener(self._stop)

    def hand_out(self, plan: Plan, requests: list[Request]) -> int:
        """Give every sending process its shard; answers how many there are."""
        runner = self.runner
        workers: list[str | None] = [None]
        if isinstance(runner, MasterRunner):
            workers = [node.id for node in runner.clients.ready + runner.clients.spawning + runner.clients.running]
        for shard in range(len(workers)):
            plan.state(shard).unlink(missing_ok=True)
            plan.part(shard).unlink(missing_ok=True)
        for shard, worker in enumerate(workers):
            if worker is None:
                self.shard = Shard(self.environment, plan, requests, shard, len(workers))
            else:
                runner.send_message("prfaas_shard", {"plan": asdict(plan), "shard": shard, "of": len(workers)}, worker)
        return len(workers)

    def stop_shards(self) -> None:
        """Stop this process's shard and, from the master, every worker's."""
        if self.shard:
            self.shard.stop()
        if isinstance(self.runner, MasterRunner):
            self.runner.send_message("prfaas_stop")

    def _take_shard(self, environment: Environment, msg: Any) -> None:
        plan = Plan(**{**msg.data["plan"], "host": tuple(msg.data["plan"]["host"])})  # its lists serve as well
        requests = trace_requests(self.options.trace)
        self.shard = Shard(environment, plan, requests, msg.data["shard"], msg.data["of"])

    def _start(self, **_: Any) -> None:
        if not isinstance(self.runner, WorkerRunner):
            self.coordinator = Coordinator(self)

    def _stop(self, **_: Any) -> None:
        if self.coordinator:
            self.coordinator.interrupt()
        elif isinstance(self.runner, WorkerRunner):
            self.stop_shards()


@cache
def trace_requests(path: str) -> list[Request]:
    """The trace's rows, read once: Locust parses options before it forks its workers, so they inherit them.

    Raises TraceError for a trace that cannot be used, an empty one included.
    """
    return load(path).requests


def _trace_option(text: str) -> str:
    path = str(Path(text).absolute())
    try:
        trace_requests(path)
    except (TraceError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _output(text: str) -> str:
    if text in ("", "-"):
        return text
    path = Path(text).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: cannot be written; give a file in an existing, writable folder")
    return str(path)


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number > 0")
    return value


def _leave(text: str) -> tuple[float, float]:
    at_s, _, fraction = text.partition(":")
    value = float(at_s), float(fraction)
    if not (math.isfinite(value[0]) and value[0] >= 0 and 0 < value[1] <= 1):
        raise argparse.ArgumentTypeError(f"{text}: must be AT_S:FRACTION, seconds >= 0 and a fraction above 0, up to 1")
    return value


def _id_prefix(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be at most 64 of A-Z a-z 0-9 . _ -")
    return text


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _options(parser: Any) -> None:
    group = parser.add_argument_group("Trace replay", "exact, open-loop; the user count does not matter")
    options: dict[str, dict[str, Any]] = {
        "--trace": {"type": _trace_option, "required": True, "help": "normalised trace (JSON lines) to replay"},
        "--rows": {"type": _output, "default": "", "help": "CSV to write, one row a scheduled request"},
        "--progress": {
            "type": _output,
            "default": "",
            "help": "JSON file rewritten every second; - for lines on stderr",
        },
        "--t0-ns": {
            "type": int,
            "default": None,
            "help": "CLOCK_MONOTONIC ns of model time 0; without it the replay begins and ends a load at --host itself",
        },
        "--time-scale": {
            "type": _positive,
            "default": None,
            "help": "model seconds a wall second (the load's, else 1)",
        },
        "--timeout-s": {"type": _positive, "default": 600.0, "help": "wall seconds granted from a request's due time"},
        "--late-bound-ms": {"type": _positive, "default": 20.0, "help": "bound on p99 of t_send - t_sched, wall ms"},
        "--model": {"default": "prfaas", "help": "the requests' model"},
        "--leave": {
            "type": _leave,
            "action": "append",
            "default": [],
            "metavar": "AT_S:FRACTION",
            "help": "this fraction of the clients in flight leaves at this model second; repeatable",
        },
        "--leave-seed": {"type": int, "default": 0, "help": "who leaves, is drawn from it"},
        "--text-seed": {
            "type": int,
            "default": None,
            "help": "send prompts, texts of the rows' lengths drawn from this seed, for a model that computes",
        },
        "--id-prefix": {"type": _id_prefix, "default": "r", "help": "request ids are PREFIX and the row's index"},
    }
    for flag, keywords in options.items():
        variable = "PRFAAS_" + flag.strip("-").replace("-", "_").upper()
        group.add_argument(flag, env_var=variable, **keywords)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _init(environment: Environment, **_: Any) -> None:
    Replay(environment)
    # Python would raise KeyboardInterrupt in whatever greenlet runs, perhaps a request's; so, the main one gets it.
    gevent.signal_handler(signal.SIGINT, _interrupt)


def _interrupt() -> None:
    gevent.get_hub().handle_system_error(KeyboardInterrupt, KeyboardInterrupt())
