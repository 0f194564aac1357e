"""Clients that mean harm, or do it: each is bounded, refused in words where it can hear them, counted, and others are
served meanwhile. Small sizes, in one process; real ones: tests/wire/test_hostile.py, `python -m tests.bench.hostile`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from testbed import guard as guards
from testbed.guard import REFUSED, Bounds, Guard, read_body, same_origin
from testbed.json_http import errors_as_answers, json_object, json_response

PATIENCE_S = 30.0  # bounds a hang; nothing here is judged by its speed
QUICK = Bounds(connections=8, silent_s=0.3, head_s=0.3, kept_s=60.0, deaf_s=0.3, head_bytes=2000)
MOST_BYTES = 100_000


class Front:
    """A guarded server on loopback. cancelled: handlers that ended with their client."""

    def __init__(self, bounds: Bounds) -> None:
        self.guard = Guard(bounds)
        self.cancelled = 0
        self.port = 0

    async def start(self) -> None:
        app = web.Application(middlewares=[self.guard.middleware, errors_as_answers, same_origin])
        app.add_routes(
            [
                web.post("/echo", self._echo),
                web.post("/json", self._json),
                web.get("/hello", self._hello),
                web.get("/flood", self._flood),
                web.get("/wait", self._wait),
            ]
        )
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        await self.guard.serve(app, sock)

    async def _echo(self, request: web.Request) -> web.Response:
        return web.Response(text=str(len(await read_body(request, MOST_BYTES))))

    async def _json(self, request: web.Request) -> web.Response:
        return json_response(await json_object(request, {"known"}))

    async def _hello(self, request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1 << 16))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _wait(self, request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.query["s"]))
        return web.Response(text="waited")

    async def client(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def hello(self) -> bool:
        """Whether a well-behaved client is served."""
        async with asyncio.timeout(PATIENCE_S):
            client = await self.client()
            status, body = await client.ask("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
            client.close()
            return (status, body) == (200, b"hello")


class Client:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: str | bytes) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length")
            )
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def ask(self, data: str | bytes) -> tuple[int, bytes]:
        self.send(data)
        return await self.answer()

    async def error(self) -> tuple[int, str]:
        """Status and message of an error, after which the other side ends the connection."""
        status, body = await self.answer()
        return status, json.loads(body)["error"]["message"]

    async def ends(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
            return True

    def close(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    REFUSED.clear()
    made = Front(getattr(request, "param", QUICK))
    await made.start()
    yield made
    await made.guard.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


class TestBodies:
    """By length, by chunks, by time, and by all together."""

    def post(self, body: bytes = b"", length: int | None = None, extra: str = "") -> bytes:
        length = len(body) if length is None else length
        head = f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{extra}\r\n"
        return head.encode() + body

    async def test_one_within_the_bound_is_read(self, front: Front) -> None:
        client = await front.client()
        assert await client.ask(self.post(bytes(MOST_BYTES))) == (200, b"%d" % MOST_BYTES)
        assert await client.ask(self.post(b"again")) == (200, b"5")  # the connection is kept

    async def test_one_that_says_it_is_too_long_is_refused_before_it_comes(self, front: Front) -> None:
        client = await front.client()
        client.send(self.post(length=2_000_000_000))
        assert await client.error() == (
            413,
            f"the body is larger than {MOST_BYTES} bytes; use the prfaas extension for long prompts",
        )
        assert await client.ends()
        assert REFUSED == {"body_too_large": 1}

    async def test_the_rest_of_a_long_one_is_not_taken_in(self, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guards, "MAX_BODY_BYTES", 1 << 20)
        client = await front.client()
        client.send(self.post(length=2_000_000_000))
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while sent < 64 << 20:
                    client.send(bytes(1 << 20))
                    await client.writer.drain()
                    sent += 1 << 20
        assert sent < 32 << 20
        assert await front.hello()

    async def test_one_of_endless_chunks_is_cut_off(self, front: Front) -> None:
        client = await front.client()
        client.send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(MOST_BYTES // 10_000 + 1):
            client.send(b"2710\r\n" + bytes(10_000) + b"\r\n")
        status, message = await client.error()
        assert (status, message.startswith("the body is larger")) == (413, True)
        assert await client.ends()

    @pytest.mark.parametrize("chunk", [b"zz\r\nabc\r\n", b"-5\r\nabc\r\n"])
    async def test_chunks_that_are_none_are_refused(
        self, front: Front, monkeypatch: pytest.MonkeyPatch, chunk: bytes
    ) -> None:
        """aiohttp tells its reader nothing of them: the body's time runs out."""
        monkeypatch.setattr(guards, "BODY_S", 0.3)
        client = await front.client()
        client.send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        client.send(chunk)
        status, _ = await client.answer()
        assert status in (400, 408)
        assert await client.ends()
        assert await front.hello()

    async def test_a_byte_a_second_is_too_slow(self, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guards, "BODY_S", 0.3)
        client = await front.client()
        client.send(self.post(b"a", length=1000))
        await asyncio.sleep(0.2)
        client.send("a")
        status, message = await client.error()
        assert (status, message) == (408, "the body was not there within 0.3 s; send it at once")
        assert await client.ends()
        assert REFUSED == {"body_timeout": 1}

    async def test_large_ones_together_are_bounded_and_small_ones_go_by(
        self, front: Front, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guards, "LARGE_BODIES_BYTES", 150_000)
        first, second = await front.client(), await front.client()
        first.send(self.post(bytes(MOST_BYTES - 1), length=MOST_BYTES))
        await asyncio.sleep(0.1)
        second.send(self.post(bytes(MOST_BYTES - 1), length=MOST_BYTES))
        status, message = await second.error()
        assert (status, "try again later" in message) == (503, True)
        assert await (await front.client()).ask(self.post(b"small")) == (200, b"5")
        assert await first.ask("x") == (200, b"%d" % MOST_BYTES)
        assert await (await front.client()).ask(self.post(bytes(MOST_BYTES))) == (200, b"%d" % MOST_BYTES)

    async def test_a_compressed_one_is_not_blown_up(self, front: Front) -> None:
        client = await front.client()
        status, body = await client.ask(self.post(b"\x1f\x8b" + bytes(50), extra="Content-Encoding: gzip\r\n"))
        assert (status, b"Content-Encoding" in body) == (415, True)

    @pytest.mark.parametrize(
        "body",
        [
            b'{"known": NaN}', b'{"known": 1e999}', b"[" * 100_000, b'{"known":' * 5000, b'"\xff\xfe"', b"\x00", b"{",
            b"null", b"[]", b"7", '{"known\ud800"'.encode("utf-8", "surrogatepass"),
        ],
    )  # fmt: skip
    async def test_what_is_no_json_object_is_said_to_be_none(self, front: Front, body: bytes) -> None:
        client = await front.client()
        request = b"POST /json HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        status, told = await client.ask(request + body)
        assert status == 400
        assert "JSON" in json.loads(told)["error"]["message"]
        assert await front.hello()


class TestHeads:
    """Slow ones, large ones, odd ones."""

    async def test_a_byte_a_second_is_too_slow_and_told_so(self, front: Front) -> None:
        client = await front.client()
        client.send("GET /hello HTTP/1.1\r\n")
        await asyncio.sleep(0.2)
        client.send("H")
        assert await front.hello()
        assert await client.error() == (408, "the request's head was not there within 0.3 s; send it at once")
        assert await client.ends()
        assert REFUSED == {"head_timeout": 1}

    async def test_also_of_the_second_request(self, front: Front) -> None:
        client = await front.client()
        assert await client.ask("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n") == (200, b"hello")
        client.send("GET")
        status, _ = await client.error()
        assert status == 408
        assert await client.ends()

    async def test_a_flood_of_headers_is_refused(self, front: Front) -> None:
        client = await front.client()
        client.send("GET /hello HTTP/1.1\r\n")
        await asyncio.sleep(0.05)
        client.send("".join(f"X-{i}: {'x' * 100}\r\n" for i in range(25)))
        status, message = await client.error()
        assert (status, message) == (431, "the request's head is larger than 2000 bytes; shorten it")
        assert await client.ends()

    @pytest.mark.parametrize(
        "data",
        ["\x00\x01\x02\r\n\r\n", "GET\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/1.1\r\nX\r\n\r\n"],
    )
    async def test_what_is_not_http_is_refused_and_not_logged(
        self, front: Front, caplog: pytest.LogCaptureFixture, data: str
    ) -> None:
        client = await front.client()
        status, _ = await client.ask(data)
        assert status == 400
        assert await client.ends()
        assert not caplog.records
        assert await front.hello()

    async def test_http_1_0_is_answered_and_its_connection_ends(self, front: Front) -> None:
        client = await front.client()
        assert await client.ask("GET /hello HTTP/1.0\r\n\r\n") == (200, b"hello")
        assert await client.ends()

    async def test_requests_sent_ahead_are_answered_in_order(self, front: Front) -> None:
        client = await front.client()
        client.send("GET /wait?s=0.1 HTTP/1.1\r\nHost: x\r\n\r\n" + 200 * "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[1] == b"waited"
        for _ in range(200):
            assert await client.answer() == (200, b"hello")

    @pytest.mark.parametrize(
        ("line", "status"),
        [
            ("GET /nowhere", 404),
            ("GET /../../etc/passwd", 404),
            ("GET /hello/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
            ("DELETE /hello", 405),
            ("POST /hello", 405),
            ("OPTIONS /hello", 405),
        ],
    )
    async def test_paths_and_methods_that_are_not_there(self, front: Front, line: str, status: int) -> None:
        client = await front.client()
        found, body = await client.ask(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert found == status
        assert line.split()[1].split("%")[0][:8] in json.loads(body)["error"]["message"]

    async def test_an_expectation_that_is_none_is_refused(self, front: Front) -> None:
        client = await front.client()
        head = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: the unexpected\r\n\r\na"
        status, _ = await client.ask(head)
        assert status == 417
        assert await front.hello()

    @pytest.mark.parametrize(
        ("origin", "status"),
        [
            ("http://gateway:8000", 200),
            ("https://evil.example", 403),
            ("null", 403),
            ("http://gateway:8001", 403),
            ("http://[", 403),
        ],
    )
    async def test_a_page_of_another_site_may_not_ask(self, front: Front, origin: str, status: int) -> None:
        client = await front.client()
        head = f"GET /hello HTTP/1.1\r\nHost: gateway:8000\r\nOrigin: {origin}\r\n\r\n"
        assert (await client.ask(head))[0] == status


class TestConnections:
    """There is always room for one more."""

    async def test_silent_ones_are_closed_after_a_while(self, front: Front) -> None:
        client = await front.client()
        assert await client.ends()
        assert REFUSED == {"silent": 1}

    @pytest.mark.parametrize("front", [Bounds(connections=8)], indirect=True)
    async def test_idle_ones_make_room(self, front: Front) -> None:
        kept = await front.client()
        assert await kept.ask("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n") == (200, b"hello")
        idle = [await front.client() for _ in range(50)]
        assert await front.hello()
        await until(lambda: REFUSED["crowded"] >= 43)
        assert front.guard.connections <= 8
        assert await idle[0].ends()
        assert await kept.ask("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n") == (200, b"hello")  # it has asked before

    @pytest.mark.parametrize("front", [Bounds(connections=8)], indirect=True)
    async def test_half_heads_make_room(self, front: Front) -> None:
        slow = [await front.client() for _ in range(8)]
        for client in slow:
            client.send("GET /hello HTTP/1.1\r\n")
        await until(lambda: front.guard.to_json()["connections"] == 8)
        assert await front.hello()
        assert await slow[0].ends()

    @pytest.mark.parametrize("front", [Bounds(connections=2)], indirect=True)
    async def test_those_that_are_being_answered_do_not(self, front: Front) -> None:
        busy = [await front.client() for _ in range(2)]
        for client in busy:
            client.send("GET /wait?s=0.5 HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        status, message = await (await front.client()).error()
        assert (status, message) == (503, "the gateway serves 2 connections already; try again later")
        assert REFUSED == {"too_many": 1}
        for client in busy:
            assert await client.answer() == (200, b"waited")

    async def test_one_that_does_not_read_is_dropped_with_its_request(self, front: Front) -> None:
        client = await front.client()
        client.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: front.cancelled)
        assert REFUSED == {"not_read": 1}
        assert await front.hello()

    async def test_one_that_reads_slowly_is_not(self, front: Front) -> None:
        client = await front.client()
        client.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(40):
            assert await client.reader.read(1 << 20)
            await asyncio.sleep(0.03)
        assert front.cancelled == 0
        client.close()
        await until(lambda: front.cancelled)

    async def test_nothing_is_kept_of_those_that_are_gone(self, front: Front) -> None:
        for _ in range(30):
            client = await front.client()
            client.send("GET /hello HTTP/1.1\r\nHost: x\r\n")
            client.close()
        await until(lambda: front.guard.connections == 0)
        (stages, *_) = list(front.guard.collect())
        assert {sample.labels["stage"]: sample.value for sample in stages.samples} == dict.fromkeys(
            ("silent", "head", "kept", "asking"), 0
        )
