"""The replay as its users see it: Locust started as a child against a small server that stamps what it sends.

Times are checked as relations between the server's stamps and the client's, both CLOCK_MONOTONIC, so that a busy
machine cannot fail them. Each behaviour of the server is a Script, which a trace row asks for by its number
of input tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import traces
from traces.client_rows import COLUMNS, ClientRow, busiest, judge, percentile, read_rows, write_rows
from traces.request import TraceError
from traces.sse import Completion, exchange

REPLAY = Path(traces.__file__).with_name("replay.py")
ASKED = 8
PATIENT = ("--late-bound-ms", "20000")


def sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(content: str) -> bytes:
    return sse({"choices": [{"index": 0, "text": content}]})


def delta(**content: Any) -> bytes:
    return sse({"choices": [{"index": 0, "delta": content}]})


def usage(tokens: int) -> bytes:
    return sse({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})


DONE = b"data: [DONE]\n\n"
ERROR = sse({"error": {"message": "the decode worker died", "type": "server_error", "code": "worker_lost"}})
TAIL = [(0.0, usage(ASKED), ""), (0.0, DONE, "")]
NOISE = delta(role="assistant", content="") + text("") + b": keep-alive\n\n" + usage(0) + sse({"choices": []})


@dataclass(frozen=True)
class Script:
    """parts: (pause before it in seconds, bytes, mark to stamp just before they leave). end: clean, cut or hang."""

    parts: list[tuple[float, bytes, str]]
    framing: str = "chunked"
    status: int = 200
    end: str = "clean"
    before_headers_s: float = 0.0


ANSWER = [(0.3, text("a"), "first"), (1.0, text("b"), "last"), *TAIL]
QUICK = [(0.0, text("a"), "first"), *TAIL]
SCRIPTS = {
    "chunked": Script(ANSWER),
    "close": Script(ANSWER, framing="close"),
    "length": Script(ANSWER, framing="length"),
    "noise": Script(
        [(0.0, NOISE, "noise"), (0.5, text("a"), "first"), (0.0, NOISE, ""), (0.0, text("b"), "last"), *TAIL]
    ),
    "content": Script([(0.0, NOISE, ""), (0.2, delta(content="a"), "first"), *TAIL]),
    "reasoning": Script([(0.0, NOISE, ""), (0.2, delta(reasoning_content="hm"), "first"), *TAIL]),
    "tool_call": Script([(0.0, NOISE, ""), (0.2, delta(tool_calls=[{"index": 0}]), "first"), *TAIL]),
    "error_object": Script([(0.0, text("a"), "first"), (0.0, ERROR, "")]),
    "error_event": Script([(0.0, text("a"), "first"), (0.0, b"event: error\ndata: lost\n\n", "")]),
    "no_done": Script(QUICK[:-1]),
    "no_done_close": Script(QUICK[:-1], framing="close"),
    "short": Script([(0.0, text("a"), "first"), (0.0, usage(ASKED - 1), ""), (0.0, DONE, "")]),
    "no_usage": Script([(0.0, text("a"), "first"), (0.0, DONE, "")]),
    "refused": Script([(0.0, b'{"error": {"message": "full"}}', "")], framing="length", status=503),
    "cut_chunked": Script(QUICK[:1], end="cut"),
    "cut_length": Script(ANSWER[:1], framing="length", end="cut"),
    "hang": Script(QUICK[:1], end="hang"),
    "slow": Script(QUICK, before_headers_s=2.0),
    "quick": Script(QUICK),
    "endless_after_done": Script(QUICK, end="hang"),
}
NAMES = list(SCRIPTS)


@dataclass
class Seen:
    """One request as the server saw it. marks: CLOCK_MONOTONIC ns, taken just before the marked bytes were written."""

    request_id: str
    body: dict[str, Any]
    marks: dict[str, int] = field(default_factory=dict)
    answered: bool = False


class FakeServer:
    """An OpenAI-compatible server on 127.0.0.1, in a thread of its own; it also begins and ends prfaas loads."""

    def __init__(self, time_scale: float = 1.0) -> None:
        self.time_scale = time_scale
        self.seen: list[Seen] = []
        self.loads: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(ready)))
        self._thread.start()
        assert ready.wait(10)

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        await asyncio.sleep(0.05)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            arrived_ns = time.monotonic_ns()
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            path = head[0].split()[1]
            if path == "/v1/completions":
                seen = Seen(headers["x-request-id"], body, {"arrived": arrived_ns})
                self.seen.append(seen)
                await self._answer(seen, SCRIPTS[NAMES[body["prfaas"]["input_tokens"] - 1]], writer)
            else:
                data = json.dumps(self._load(path, body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _load(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/prfaas/loads":
            self.loads.append(body)
            t0_ns = time.monotonic_ns() + int(body["lead_s"] * 1e9)
            return {"id": "load-1", "t0_ns": t0_ns, "time_scale": self.time_scale, "rows": "", "events": ""}
        self.ended.append(path.split("/")[-2])
        return {}

    async def _answer(self, seen: Seen, script: Script, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(script.before_headers_s)
        declared = {
            "chunked": "Transfer-Encoding: chunked",
            "close": "Connection: close",
            "length": f"Content-Length: {sum(len(data) for _, data, _ in script.parts) + (script.end == 'cut')}",
        }[script.framing]
        seen.marks["headers"] = time.monotonic_ns()
        writer.write(
            f"HTTP/1.1 {script.status} Status\r\nContent-Type: text/event-stream\r\n{declared}\r\n\r\n".encode()
        )
        await writer.drain()
        for pause_s, data, mark in script.parts:
            await asyncio.sleep(pause_s)
            if mark:
                seen.marks[mark] = time.monotonic_ns()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if script.framing == "chunked" else data)
            await writer.drain()
        seen.answered = True
        if script.end == "hang":
            await asyncio.sleep(60)
        if script.framing == "chunked" and script.end == "clean":
            writer.write(b"0\r\n\r\n")
            await writer.drain()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    running = FakeServer()
    yield running
    running.close()


def write_trace(folder: Path, rows: list[tuple[float, str]]) -> Path:
    """A normalised trace whose rows (arrival_s, script) ask for ASKED tokens each."""
    path = folder / "trace.jsonl"
    lines = [
        {"arrival_s": arrival_s, "input_tokens": NAMES.index(name) + 1, "output_tokens": ASKED}
        for arrival_s, name in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(host: str, *options: object) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    master = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    locust = [sys.executable, "-m", "locust", "-f", str(REPLAY), "--headless", "--only-summary", "--host", host]
    return [*locust, *master, *map(str, options)]


def replay(host: str, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(host, *options), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )


@dataclass
class Run:
    exit_code: int
    stdout: str
    rows: dict[str, ClientRow]
    seen: dict[str, Seen]
    progress: dict[str, Any]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One replay in which every script is asked for once; rows and seen are by script."""
    folder = tmp_path_factory.mktemp("mixed")
    server = FakeServer()
    trace = write_trace(folder, [(0.02 * k, name) for k, name in enumerate(NAMES)])
    out, progress = folder / "rows.csv", folder / "progress.json"
    done = replay(
        server.host, "--trace", trace, "--rows", out, "--progress", progress, "--timeout-s", 4, "--json", *PATIENT
    )
    server.close()
    assert done.returncode in (0, 1), done.stderr
    return Run(
        done.returncode,
        done.stdout,
        {NAMES[row.input_tokens - 1]: row for row in read_rows(out)},
        {NAMES[seen.body["prfaas"]["input_tokens"] - 1]: seen for seen in server.seen},
        json.loads(progress.read_text()),
    )


class TestOneRequest:
    @pytest.mark.parametrize("framing", ["chunked", "close", "length"])
    def test_a_token_is_stamped_when_it_comes_whatever_the_framing(self, mixed: Run, framing: str) -> None:
        row, sent = mixed.rows[framing], mixed.seen[framing].marks
        assert row.error == ""
        assert sent["headers"] <= (row.t_headers_ns or 0) < sent["first"]
        assert sent["first"] <= (row.t_first_token_ns or 0) < sent["last"]
        assert sent["last"] <= (row.t_last_token_ns or 0) <= (row.t_done_ns or 0)

    @pytest.mark.parametrize("name", ["noise", "content", "reasoning", "tool_call"])
    def test_no_first_token_before_content(self, mixed: Run, name: str) -> None:
        row = mixed.rows[name]
        assert row.error == ""
        assert (row.t_first_token_ns or 0) >= mixed.seen[name].marks["first"]

    def test_stamps_are_in_order_and_the_server_sees_the_request_after_t_send(self, mixed: Run) -> None:
        for name in ("chunked", "close", "length", "noise"):
            row = mixed.rows[name]
            stamps = [row.t_sched_ns, row.t_send_ns, mixed.seen[name].marks["arrived"], row.t_headers_ns]
            stamps += [row.t_first_token_ns, row.t_last_token_ns, row.t_done_ns]
            assert stamps == sorted(stamp or 0 for stamp in stamps)

    def test_tokens_come_from_usage_and_chunks_are_counted_apart(self, mixed: Run) -> None:
        assert (mixed.rows["noise"].output_tokens, mixed.rows["noise"].chunks) == (ASKED, 2)

    def test_the_request_asks_for_exactly_the_traces_lengths(self, mixed: Run) -> None:
        assert mixed.seen["quick"].body == {
            "model": "prfaas",
            "prfaas": {"input_tokens": NAMES.index("quick") + 1, "block_hashes": [], "block_size": 0, "session": ""},
            "max_tokens": ASKED,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("error_object", "stream_error"),
            ("error_event", "stream_error"),
            ("no_done", "no_done"),
            ("no_done_close", "no_done"),
            ("short", "short_stream"),
            ("no_usage", "no_usage"),
            ("refused", "http_503"),
            ("cut_chunked", "disconnected"),
            ("cut_length", "disconnected"),
            ("hang", "timeout"),
        ],
    )
    def test_each_failure_has_its_kind(self, mixed: Run, name: str, kind: str) -> None:
        assert mixed.rows[name].error == kind

    def test_a_stream_is_over_at_done_even_if_the_connection_stays(self, mixed: Run) -> None:
        assert mixed.rows["endless_after_done"].error == ""

    def test_no_listener_is_a_connect_failure(self) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            row = ClientRow("r0", 0, time.monotonic_ns())
            exchange(row, b"", unused.getsockname(), timeout_s=5)
        assert row.error == "connect"


class TestTheRun:
    def test_failed_requests_make_exit_code_1(self, mixed: Run) -> None:
        assert mixed.exit_code == 1
        assert mixed.progress["outcome"]["verdict"] == "failed"

    def test_the_last_progress_counts_everything(self, mixed: Run) -> None:
        failed = sum(bool(row.error) for row in mixed.rows.values())
        counts = {key: mixed.progress[key] for key in ("sent", "done", "failed", "total", "finished")}
        assert counts == {
            "sent": len(NAMES),
            "done": len(NAMES),
            "failed": failed,
            "total": len(NAMES),
            "finished": True,
        }

    def test_locusts_own_statistics_show_ttft_tpot_and_e2e(self, mixed: Run) -> None:
        entries = {entry["name"]: entry for entry in json.loads(mixed.stdout[mixed.stdout.index("[") :])}
        good = sum(not row.error for row in mixed.rows.values())
        assert entries["ttft"]["num_requests"] == entries["tpot"]["num_requests"] == good
        assert (entries["e2e"]["num_requests"], entries["e2e"]["num_failures"]) == (len(NAMES), len(NAMES) - good)

    def test_sending_waits_for_no_answer_and_follows_the_loads_clock(self, tmp_path: Path) -> None:
        server = FakeServer(time_scale=2.0)
        arrivals = [0.1 * k for k in range(10)]
        trace, out = write_trace(tmp_path, [(arrival_s, "slow") for arrival_s in arrivals]), tmp_path / "rows.csv"
        progress = tmp_path / "progress.json"
        done = replay(server.host, "--trace", trace, "--rows", out, "--progress", progress, *PATIENT)
        server.close()
        assert done.returncode == 0, done.stderr
        assert max(seen.marks["arrived"] for seen in server.seen) < min(seen.marks["headers"] for seen in server.seen)
        t0_ns = json.loads(progress.read_text())["load"]["t0_ns"]
        assert [row.t_sched_ns - t0_ns for row in read_rows(out)] == [round(a / 2 * 1e9) for a in arrivals]
        slow = NAMES.index("slow") + 1
        assert server.loads[0]["lengths"] == {"values": [slow], "weights": [10]}
        assert server.loads[0]["rate_rps"] == pytest.approx(10 / 0.9)
        assert server.ended == ["load-1"]

    def test_n_workers_send_the_trace_once(self, server: FakeServer, tmp_path: Path) -> None:
        trace, out = write_trace(tmp_path, [(0.02 * k, "quick") for k in range(21)]), tmp_path / "rows.csv"
        done = replay(server.host, "--processes", 3, "--trace", trace, "--rows", out, *PATIENT)
        assert done.returncode == 0, done.stderr
        expected = [f"r{index:07d}" for index in range(21)]
        assert sorted(seen.request_id for seen in server.seen) == expected
        assert [row.request_id for row in read_rows(out)] == expected
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "trace.jsonl"]

    def test_requests_that_leave_late_make_the_measurement_invalid(self, server: FakeServer, tmp_path: Path) -> None:
        trace = write_trace(tmp_path, [(0.0, "quick")])
        done = replay(server.host, "--trace", trace, "--t0-ns", time.monotonic_ns() - 10**9)
        assert done.returncode == 3
        assert "lateness p99" in done.stderr
        assert server.loads == []

    @pytest.mark.parametrize(
        ("processes", "to"),
        [((), "parent"), (("--processes", "2"), "parent"), (("--processes", "2"), "group")],
        ids=["alone", "master_of_two", "terminal_with_two"],
    )
    def test_an_interrupt_keeps_the_rows(
        self, server: FakeServer, tmp_path: Path, processes: tuple[str, ...], to: str
    ) -> None:
        rows = [(0.0, "quick")] * 4 + [(0.1, "hang")] * 3 + [(1000.0, "quick")] * 2
        trace, out = write_trace(tmp_path, rows), tmp_path / "rows.csv"
        arguments = command(server.host, *processes, "--trace", trace, "--rows", out, *PATIENT)
        silent = subprocess.DEVNULL
        child = subprocess.Popen(arguments, stdin=silent, stdout=silent, stderr=silent, start_new_session=True)
        wait_until(lambda: len(server.seen) == 7 and all(seen.answered for seen in server.seen))
        time.sleep(0.5)  # the answers are on their way through the loopback
        (os.killpg if to == "group" else os.kill)(child.pid, signal.SIGINT)
        assert child.wait(timeout=40) == 4
        assert [row.error for row in read_rows(out)] == [""] * 4 + ["interrupted"] * 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "trace.jsonl"]

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"--trace": None}, "--trace"),
            ({"--trace": "nowhere.jsonl"}, "nowhere.jsonl"),
            ({"--rows": "no/such/folder/rows.csv"}, "no/such/folder"),
            ({"--host": "http://127.0.0.1:1"}, "is the testbed up?"),
        ],
    )
    def test_wrong_usage_is_one_sentence_and_exit_code_2(
        self, tmp_path: Path, wrong: dict[str, str | None], said: str
    ) -> None:
        options = {"--trace": str(write_trace(tmp_path, [(0.0, "quick")])), "--host": "http://127.0.0.1:1", **wrong}
        given = [item for flag, value in options.items() if value is not None for item in (flag, value)]
        done = replay("http://127.0.0.1:1", *given)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


class TestCompletion:
    BODY = NOISE + text("a") + delta(content="b").replace(b"\n", b"\r\n") + usage(7) + DONE[:-2]

    @given(st.lists(st.integers(0, len(BODY))))
    def test_it_does_not_matter_where_the_bytes_are_cut(self, cuts: list[int]) -> None:
        completion = Completion()
        edges = [0, *sorted(cuts), len(self.BODY)]
        for start, end in pairwise(edges):
            completion.feed(end, self.BODY[start:end])
        completion.finish(len(self.BODY))
        assert (completion.chunks, completion.output_tokens, completion.done) == (2, 7, True)
        first_complete = len(NOISE) + len(text("a")) - 1
        assert completion.t_first_token_ns == min(edge for edge in edges if edge >= first_complete)

    @pytest.mark.parametrize("line", [b"data: {", b"data: 3", b'data: {"choices": [1]}', b'data: {"usage": 1}'])
    def test_what_is_no_chunk_is_a_stream_error(self, line: bytes) -> None:
        completion = Completion()
        completion.feed(0, line + b"\n\n" + usage(ASKED) + DONE)
        assert completion.failure(ASKED) == "stream_error"

    def test_the_null_usage_of_ordinary_chunks_is_no_count(self) -> None:
        completion = Completion()
        completion.feed(0, usage(3) + sse({"choices": [{"text": "a"}], "usage": None}))
        assert completion.output_tokens == 3


def sent(index: int, late_ms: float = 0.0, error: str = "") -> ClientRow:
    return ClientRow(f"r{index}", index, 10**9, 10**9 + round(late_ms * 1e6), t_done_ns=2 * 10**9, error=error)


class TestClientRows:
    def test_rows_come_back_as_they_were_written_and_in_the_traces_order(self, tmp_path: Path) -> None:
        full = ClientRow("r1", 1, 2, 3, 4, 5, 6, 7, 200, "short_stream", 8, 9, 10, 11)
        write_rows(tmp_path / "rows.csv", [full, sent(0)])
        assert read_rows(tmp_path / "rows.csv") == [sent(0), full]

    def test_the_columns_are_the_contracts(self) -> None:
        assert ",".join(COLUMNS) == (
            "request_id,index,t_sched_ns,t_send_ns,t_headers_ns,t_first_token_ns,t_last_token_ns,t_done_ns,http_status,"
            "error,input_tokens,output_tokens_asked,output_tokens,chunks"
        )

    def test_a_torn_last_line_is_passed_over(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        write_rows(path, [sent(0), sent(1)])
        path.write_text(path.read_text()[:-3])
        assert read_rows(path) == [sent(0)]

    def test_a_wrong_cell_is_refused_by_name(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text(",".join(COLUMNS) + "\n" + sent(0).csv_line().replace("r0,0", "r0,zero"))
        with pytest.raises(TraceError, match=r"line 2: index = 'zero'"):
            read_rows(path)

    def test_times_count_from_the_due_time_and_tpot_needs_two_tokens(self) -> None:
        row = ClientRow("r", 0, 10**9, 2 * 10**9, None, 3 * 10**9, 5 * 10**9, 6 * 10**9, output_tokens=5)
        assert (row.lateness_s, row.ttft_s, row.tpot_s, row.e2e_s) == (1.0, 2.0, 0.5, 5.0)
        row.output_tokens = 1
        assert row.tpot_s is None

    def test_percentiles_are_nearest_rank(self) -> None:
        assert percentile([float(value) for value in range(1, 201)], 0.99) == 198
        assert percentile([5.0], 0.99) == 5.0
        assert percentile([], 0.99) is None

    def test_busiest_takes_the_worst_window_or_the_whole_of_a_short_run(self) -> None:
        calm_then_busy = [(second * 10**9, 0.1 * second if second < 10 else 0.9 + second - 9.0) for second in range(16)]
        assert busiest(calm_then_busy, 5.0) == pytest.approx(1.0)
        assert busiest([(0, 0.0), (10**9, 0.4)], 5.0) == pytest.approx(0.4)
        assert busiest([(0, 0.0)], 5.0) == 0.0

    @pytest.mark.parametrize(
        ("rows", "more", "verdict", "exit_code"),
        [
            ([sent(0), sent(1)], {}, "valid", 0),
            ([sent(0), sent(1, error="timeout")], {}, "failed", 1),
            ([sent(0), sent(1, late_ms=21)], {}, "invalid", 3),
            ([sent(0, error="timeout"), sent(1, late_ms=21)], {}, "invalid", 3),
            ([sent(0), sent(1)], {"cpu_busy": 0.95}, "invalid", 3),
            ([sent(0), sent(1)], {"meter_faults": ["worker 1 fell silent"]}, "invalid", 3),
            ([sent(0)], {}, "invalid", 3),
            ([sent(0)], {"interrupted": True}, "interrupted", 4),
        ],
    )
    def test_the_meter_is_judged_before_the_system(
        self, rows: list[ClientRow], more: dict[str, Any], verdict: str, exit_code: int
    ) -> None:
        outcome = judge(rows, 2, **{"cpu_busy": 0.5, "late_bound_s": 0.02, "cpu_bound": 0.9, **more})
        assert (outcome.verdict, outcome.exit_code) == (verdict, exit_code)
        assert bool(outcome.reasons) == (verdict != "valid")
