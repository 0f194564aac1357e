"""What stands between the gateway and its clients: none, slow, silent, greedy or deaf, keeps others from being served.

`Guard` makes the connections: each is counted, has a time for each stage, and is closed when others need the room; only
one that says something costs more than its descriptor. `read_body` bounds what is asked, by each and by all together.
Everything refused or dropped is counted by its reason.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from testbed.openai_api import ApiError

MAX_BODY_BYTES: Final = 16 << 20  # of any request; `read_body` may be told less
SMALL_BODY_BYTES: Final = 64 << 10  # bodies up to here do not count among the large ones
LARGE_BODIES_BYTES: Final = 128 << 20  # of all bodies that are being received
BODY_S: Final = 20.0  # wall seconds
LINGER_S: Final = 1.0  # wall seconds that a client has to read why its body is refused
SWEEP_S: Final = 0.25
BACKLOG: Final = 4096
OTHER_FILES: Final = 512  # descriptors that are not clients': logs, workers, the agent
SOCKET_BUFFER_BYTES: Final = 256 << 10  # what the kernel may hold for one client, each way

REASONS: Final = (
    "malformed", "silent", "crowded", "too_many", "head_timeout", "head_too_large", "body_timeout", "body_too_large",
    "bodies_too_large", "encoding", "not_read", "foreign_origin",
)  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one connection may do. Times in wall seconds.

    silent_s: without a byte. head_s: from a request's first byte to the end of its head. kept_s: between two requests.
    deaf_s: without taking what was sent, once the buffers are full.
    """

    connections: int = 4096
    silent_s: float = 60.0
    head_s: float = 10.0
    kept_s: float = 3600.0
    deaf_s: float = 20.0
    head_bytes: int = 64 << 10


class Stage(enum.Enum):
    """Where a connection is. All but ASKING may be closed when others need the room, the first of these first."""

    SILENT = "silent"
    HEAD = "head"
    KEPT = "kept"
    ASKING = "asking"


REFUSED: Final[Counter[str]] = Counter()
"""By reason. One process, one count: `read_body` and the guard add to it."""


_http_log: Final = logging.getLogger("gateway.http")
_http_log.addFilter(lambda record: not _of_client(record))


def _of_client(record: logging.LogRecord) -> bool:
    """Whether it is of a request that is no HTTP: that is counted, and not logged."""
    malformed = record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError)
    REFUSED["malformed"] += malformed
    return malformed


def raise_files(connections: int) -> int:
    """Raise this process's limit of open files for so many clients; for how many it suffices."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - OTHER_FILES))


class Guard(Collector):
    """Serves an application on a listening socket, connection by connection; also their metrics.

    The application has to have `middleware` as its first, and `same_origin` after the one that answers ApiError.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.refused = REFUSED
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._loop = asyncio.get_running_loop()
        self._since: dict[Stage, dict[Connection, float]] = {stage: {} for stage in Stage}  # in order of time
        self._deaf: dict[Connection, float] = {}
        self._of: dict[asyncio.BaseTransport, Connection] = {}
        self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    async def serve(self, app: web.Application, sock: socket.socket) -> None:
        """Answer on a listening socket until closed."""
        self._runner = web.AppRunner(
            app,
            logger=_http_log,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # what is accepted has them too
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        inner = self._runner.server
        assert inner is not None
        self._server = await self._loop.create_server(lambda: Connection(self, inner), sock=sock, backlog=BACKLOG)

    async def close(self) -> None:
        """Take no more connections, let answers end for a moment, and drop the rest."""
        self._timer.cancel()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for connection in list(self._of.values()):
            connection.abort()

    @property
    def connections(self) -> int:
        return len(self._of)

    def to_json(self) -> dict[str, object]:
        """For `/prfaas/status`."""
        return {"connections": self.connections, "most": self.bounds.connections, "refused": dict(self.refused)}

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        stages = GaugeMetricFamily(
            "prfaas_http_connections", "Clients' connections, by what they do.", labels=["stage"]
        )
        for stage, members in self._since.items():
            stages.add_metric([stage.value], len(members))
        yield stages
        what = "Clients' requests and connections refused or dropped, by reason."
        refused = CounterMetricFamily("prfaas_http_refused", what, labels=["reason"])
        for reason in REASONS:
            refused.add_metric([reason], self.refused[reason])
        yield refused

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Knows which connections are being answered. What is left of a body that was not read is not taken in."""
        connection = self._of.get(request.transport) if request.transport is not None else None
        if connection is None:  # gone already
            return await handler(request)
        self.enter(connection, Stage.ASKING)
        try:
            response = await handler(request)
            if not request.content.is_eof():
                connection.ignore()
                response.force_close()
            return response
        finally:
            if connection.transport is not None:
                connection.headed = False
                self.enter(connection, Stage.KEPT)

    def drop(self, request: web.Request) -> None:
        """End the connection of a client that does not take its answer."""
        connection = self._of.get(request.transport) if request.transport is not None else None
        if connection is not None:
            self.refused["not_read"] += 1
            connection.abort()

    # called by connections
    def made(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """Whether there is room for it, made by closing another's if need be."""
        if len(self._of) >= self.bounds.connections:
            idle = next((one for stage in (Stage.SILENT, Stage.HEAD, Stage.KEPT) for one in self._since[stage]), None)
            if idle is None:
                self.refused["too_many"] += 1
                return False
            self.refused["crowded"] += 1
            idle.abort()
            self.gone(idle)
        self._of[transport] = connection
        self.enter(connection, Stage.SILENT)
        return True

    def enter(self, connection: Connection, stage: Stage) -> None:
        """From now on it is at that stage."""
        self._since[connection.stage].pop(connection, None)
        connection.stage = stage
        self._since[stage][connection] = self._loop.time()

    def deaf(self, connection: Connection, deaf: bool) -> None:
        """It takes what is sent to it no more, or again."""
        if deaf:
            self._deaf[connection] = self._loop.time()
        else:
            self._deaf.pop(connection, None)

    def gone(self, connection: Connection) -> None:
        if connection.transport is not None:
            self._of.pop(connection.transport, None)
        self._since[connection.stage].pop(connection, None)
        self._deaf.pop(connection, None)

    def _sweep(self) -> None:
        """Close whatever has had its time."""
        self._timer = self._loop.call_later(SWEEP_S, self._sweep)
        bounds = self.bounds
        for connection in self._late(self._deaf, bounds.deaf_s):
            self.refused["not_read"] += 1
            connection.abort()
        for connection in self._late(self._since[Stage.SILENT], bounds.silent_s):
            self.refused["silent"] += 1
            connection.abort()
        for connection in self._late(self._since[Stage.HEAD], bounds.head_s):
            self.refused["head_timeout"] += 1
            connection.answer(408, f"the request's head was not there within {bounds.head_s:g} s; send it at once")
        for connection in self._late(self._since[Stage.KEPT], bounds.kept_s):
            connection.abort()

    def _late(self, since: dict[Connection, float], most_s: float) -> list[Connection]:
        late = []
        for connection, start_s in since.items():
            if self._loop.time() - start_s < most_s:
                break
            late.append(connection)
        return late


class Connection(asyncio.Protocol):
    """One client's connection: HTTP is spoken by the inner protocol, which is made with the first byte."""

    __slots__ = ("_guard", "_head_bytes", "_ignored", "_inner", "_make", "_tail", "headed", "stage", "transport")

    def __init__(self, guard: Guard, make: Callable[[], asyncio.BaseProtocol]) -> None:
        self.stage = Stage.SILENT
        self.headed = False  # the head of the present request is there
        self.transport: asyncio.Transport | None = None
        self._guard = guard
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self._head_bytes = 0
        self._tail = b""  # the last bytes of what came: a head may end in them
        self._ignored: int | None = None  # bytes ignored, once nothing more is to be heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if not self._guard.made(self, self.transport):
            most = self._guard.bounds.connections
            self.answer(503, f"the gateway serves {most} connections already; try again later")

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            return
        if self._ignored is None and self.stage is not Stage.ASKING and not self.headed:
            self._heard(data)
        if self._ignored is not None:
            self._ignored += len(data)
            if self._ignored > MAX_BODY_BYTES and not self.transport.is_closing():
                self.transport.pause_reading()
            return
        if self._inner is None:
            self._inner = cast(asyncio.Protocol, self._make())
            self._inner.connection_made(self.transport)
        self._inner.data_received(data)

    def _heard(self, data: bytes) -> None:
        """Bytes of a request's head, and maybe of what follows it."""
        if self.stage is not Stage.HEAD:
            self._head_bytes = 0
            self._guard.enter(self, Stage.HEAD)
        if b"\r\n\r\n" in self._tail + data:
            self._tail, self.headed = b"", True  # the middleware is entered next
            return
        self._tail = (self._tail + data)[-3:]
        self._head_bytes += len(data)
        if self._head_bytes > self._guard.bounds.head_bytes:
            self._guard.refused["head_too_large"] += 1
            self.answer(431, f"the request's head is larger than {self._guard.bounds.head_bytes} bytes; shorten it")

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.gone(self)
        self.transport = None
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._guard.deaf(self, True)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._guard.deaf(self, False)
        if self._inner is not None:
            self._inner.resume_writing()

    def ignore(self) -> None:
        """Nothing more of it is heard: some is taken in, so that a client comes to read its answer, and no more."""
        if self._ignored is None:
            self._ignored = 0

    def abort(self) -> None:
        """Close it, with whatever it has not taken."""
        if self.transport is not None:
            self.transport.abort()

    def answer(self, status: int, message: str) -> None:
        """An error, and the end of the connection."""
        transport = self.transport
        self.ignore()
        self._guard.gone(self)
        if transport is None or transport.is_closing():
            return
        body = ApiError(status, message, code=_CODES[status]).body()
        head = (
            f"HTTP/1.1 {status} {_NAMES[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        transport.close()


_NAMES: Final = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}
_CODES: Final = {408: "timeout", 431: "head_too_large", 503: "busy"}


async def read_body(request: web.Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The request's body, in time and within bounds. Raises ApiError: 413 too large, 408 too slow, 415 compressed, 503
    when the large bodies of all are too much together."""
    if "Content-Encoding" in request.headers:
        raise _refusal("encoding", 415, "Content-Encoding: not supported; send the body as it is")
    if (request.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(BODY_S):
            return await _received(request, most_bytes)
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body is malformed: {error}") from None
    except TimeoutError:
        raise _refusal("body_timeout", 408, f"the body was not there within {BODY_S:g} s; send it at once") from None


async def _received(request: web.Request, most_bytes: int) -> bytes:
    body = bytearray()
    counted = 0
    try:
        async for part in request.content.iter_any():
            body += part
            if len(body) > most_bytes:
                raise _too_large(most_bytes)
            if len(body) > SMALL_BODY_BYTES:
                _LARGE.bytes += len(body) - counted
                counted = len(body)
                if _LARGE.bytes > LARGE_BODIES_BYTES:
                    told = f"large bodies of {LARGE_BODIES_BYTES} bytes are being received already; try again later"
                    raise _refusal("bodies_too_large", 503, told)
    finally:
        _LARGE.bytes -= counted
    return bytes(body)


class _Large:
    """Bytes of large bodies that are being received, in this process."""

    bytes: int = 0


_LARGE: Final = _Large()


def _too_large(most_bytes: int) -> ApiError:
    told = f"the body is larger than {most_bytes} bytes; use the prfaas extension for long prompts"
    return _refusal("body_too_large", 413, told)


def _refusal(reason: str, status: int, message: str) -> ApiError:
    REFUSED[reason] += 1
    return ApiError(status, message, code=reason, retry_after_s=1.0 if status == 503 else None)


@web.middleware
async def same_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser says which site's page makes a request: only the gateway's own may."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise _refusal("foreign_origin", 403, f"Origin: {origin[:80]!r} is another site than {request.host[:80]!r}")
    return await handler(request)
