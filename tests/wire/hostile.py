"""Clients that mean harm, one function each, for `tests/wire/test_hostile.py` and `tests/bench/hostile.py`.

`attack(name, port, seconds)` goes on for that long, whatever becomes of its connections, and tells what the gateway
answered: HTTP status -> how often. `python -m tests.wire.hostile NAME PORT SECONDS` is the same as a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

Answers = Counter[int]
Attack = Callable[[int, float, Answers], Coroutine[None, None, None]]

IDLE = 10_000
SLOW = 400
LARGE_BYTES = 2_000_000_000
UNREAD = 5
HOST = "127.0.0.1"
COMPLETIONS = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MALFORMED = (
    b'{"prompt": NaN}',
    b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": "a", "max_tokens": 99999999999999999999999}',
    b"[" * 100_000,
    b'{"prompt": ' * 10_000,
    b'"\xff\xfe"',
    b'{"prompt": "\xed\xa0\x80"}',
    b"",
    b"\x00" * 1000,
    b'{"prfaas": {"input_tokens": 100000, "block_size": 1, "block_hashes": [' + b"1, " * 99_999 + b"1]}}",
    b'{"prompt": [' + b"1," * 300_000 + b"1]}",
    b'{"prompt": "a", "session": {}, "prfaas": {"input_tokens": -1}}',
)
ODD_HEADS = (
    "GET /metrics/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /metrics/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /metrics/agent%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "GET / HTTP/1.0\r\n\r\n",
    "GET /health HTTP/1.1\r\nHost: x\r\n" + "".join(f"X-{i}: {'y' * 1000}\r\n" for i in range(200)) + "\r\n",
    "GET /health HTTP/1.1\r\nHost: x\r\nX: " + "y" * 100_000 + "\r\n\r\n",
    "GET /health HTTP/1.1\r\nHost: x\r\nOrigin: http://evil.example\r\n\r\n",
)


class _Gone(Exception):
    """The gateway has ended the connection."""


async def _open(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(HOST, port)
    except OSError:
        await asyncio.sleep(0.05)
        raise _Gone from None


async def _status(reader: asyncio.StreamReader, answers: Answers) -> None:
    """Note the next answer's status."""
    try:
        line = await reader.readline()
    except (ConnectionError, ValueError):
        line = b""
    if not line:
        raise _Gone
    with contextlib.suppress(IndexError, ValueError):
        answers[int(line.split()[1])] += 1


def _answering(reader: asyncio.StreamReader, answers: Answers) -> asyncio.Future[None]:
    """The next answer, to come; that none does is no news when nobody waits for it any more."""
    coming = asyncio.ensure_future(_status(reader, answers))
    coming.add_done_callback(lambda done: done.cancelled() or done.exception())
    return coming


async def _again(once: Callable[[], Awaitable[None]]) -> None:
    """Once, and again as soon as the connection is gone."""
    while True:
        with contextlib.suppress(_Gone, ConnectionError):
            await once()


async def _many(count: int, once: Callable[[], Awaitable[None]], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(_again(once))


async def _hold(port: int, answers: Answers, first: bytes, then: bytes, every_s: float) -> None:
    """Send `first`, and then a byte of `then` again and again, until an answer comes."""
    reader, writer = await _open(port)
    try:
        writer.write(first)
        answered = _answering(reader, answers)
        while not answered.done():
            await asyncio.wait([answered], timeout=every_s)
            if then and not answered.done():
                writer.write(then)
        await answered
    finally:
        writer.transport.abort()


async def idle(port: int, seconds: float, answers: Answers) -> None:
    """Ten thousand connections that say nothing."""
    await _many(IDLE, lambda: _hold(port, answers, b"", b"", 1.0), seconds)


async def slow_head(port: int, seconds: float, answers: Answers) -> None:
    """Slow loris: a head, a byte a second."""
    first = b"GET /health HTTP/1.1\r\nHost: x\r\nX: "
    await _many(SLOW, lambda: _hold(port, answers, first, b"y", 1.0), seconds)


async def slow_body(port: int, seconds: float, answers: Answers) -> None:
    """The same with a body."""
    first = f"{COMPLETIONS}Content-Length: 100000\r\n\r\n".encode() + b"{"
    await _many(SLOW, lambda: _hold(port, answers, first, b" ", 1.0), seconds)


async def _large(port: int, answers: Answers, head: str, before: bytes, after: bytes) -> None:
    reader, writer = await _open(port)
    answered = _answering(reader, answers)
    try:
        writer.write(head.encode())
        block, sent = before + bytes(1 << 16) + after, 0
        while sent < LARGE_BYTES and not answered.done():
            writer.write(block)
            await writer.drain()
            sent += 1 << 16
        await answered
        await reader.read()
    finally:
        answered.cancel()
        writer.transport.abort()


async def large_body(port: int, seconds: float, answers: Answers) -> None:
    """2 GB, and says so."""
    head = f"{COMPLETIONS}Content-Length: {LARGE_BYTES}\r\n\r\n"
    await _many(4, lambda: _large(port, answers, head, b"", b""), seconds)


async def large_chunks(port: int, seconds: float, answers: Answers) -> None:
    """2 GB, in chunks."""
    head = f"{COMPLETIONS}Transfer-Encoding: chunked\r\n\r\n"
    await _many(4, lambda: _large(port, answers, head, b"10000\r\n", b"\r\n"), seconds)


async def unread(port: int, seconds: float, answers: Answers) -> None:
    """Long streams that nobody reads; as many as leave decode slots for others."""
    body = json.dumps({"prfaas": {"input_tokens": 1}, "max_tokens": 1 << 20, "stream": True}).encode()

    async def once() -> None:
        _, writer = await _open(port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"{COMPLETIONS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            while not writer.transport.is_closing():
                await asyncio.sleep(0.1)
        finally:
            writer.transport.abort()

    await _many(UNREAD, once, seconds)


async def pipelined(port: int, seconds: float, answers: Answers) -> None:
    """Requests without end, sent ahead, whose answers nobody waits for."""

    async def once() -> None:
        reader, writer = await _open(port)
        reading = asyncio.ensure_future(reader.read(-1))
        try:
            while not reading.done():
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
                await writer.drain()
        finally:
            reading.cancel()
            writer.transport.abort()

    await _many(2, once, seconds)


async def malformed(port: int, seconds: float, answers: Answers) -> None:
    """Bodies and heads that are none, one after another."""
    bodies = (f"{COMPLETIONS}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in MALFORMED)
    requests = [*bodies, *(head.encode() for head in ODD_HEADS)]
    turn = iter(range(1 << 62))

    async def once() -> None:
        reader, writer = await _open(port)
        try:
            writer.write(requests[next(turn) % len(requests)])
            await _status(reader, answers)
        finally:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    await _many(2, once, seconds)


ATTACKS: dict[str, Attack] = {
    one.__name__: one for one in (idle, slow_head, slow_body, large_body, large_chunks, unread, pipelined, malformed)
}


def attack(name: str, port: int, seconds: float) -> Answers:
    """Attack for that long. Returns what was answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    answers: Answers = Counter()
    asyncio.run(ATTACKS[name](port, seconds, answers))
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wire.hostile", description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("port", type=int)
    parser.add_argument("seconds", type=float)
    options = parser.parse_args()
    started = time.monotonic()
    answers = attack(options.name, options.port, options.seconds)
    print(json.dumps({"answers": answers, "seconds": time.monotonic() - started}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
