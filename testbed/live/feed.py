"""`GET /prfaas/live`: server-sent events, `hello` first and then `now` every second.

Nothing is looked at while nobody watches. All watchers get the same bytes of one look; one that does not take them is
cut off, and comes back for what it missed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

import orjson
from aiohttp import web

from emulator.log import Log
from testbed.live.access import check_reader
from testbed.live.watch import PERIOD_S, Watch
from testbed.openai_api import ApiError
from testbed.scenario import Deployment

log = Log("gateway")

MOST_WATCHERS: Final = 16
MOST_WAITING: Final = 8
"""Looks that may wait for a watcher to take them."""
_BYE: Final = b"event: bye\ndata: {}\n\n"

Queue = asyncio.Queue[bytes]


class Feed:
    """watch: makes the Watch when the first watcher comes."""

    def __init__(self, watch: Callable[[], Watch], deployment: Deployment) -> None:
        self._make, self._deployment = watch, deployment
        self._watch: Watch | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._queues: dict[Queue, web.Request] = {}

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Serve one watcher, until it leaves."""
        check_reader(request)
        since_s = _since(request)
        if len(self._queues) >= MOST_WATCHERS:
            raise ApiError(503, f"{MOST_WATCHERS} watch already; close another page", code="busy", retry_after_s=5.0)
        queue: Queue = asyncio.Queue(MOST_WAITING)
        watch = self._come(queue, request)
        try:
            hello = await watch.hello(self._deployment, since_s)
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream",
                    "Cache-Control": "no-store",
                    "X-Content-Type-Options": "nosniff",
                }
            )
            await response.prepare(request)
            await response.write(_event("hello", hello))
            while (message := await queue.get()) is not _BYE:
                await response.write(message)
            await response.write(_BYE)
            return response
        finally:
            self._leave(queue)

    async def close(self, app: web.Application) -> None:
        """The gateway leaves: say so to all who watch."""
        for queue in list(self._queues):
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(_BYE)

    def _come(self, queue: Queue, request: web.Request) -> Watch:
        if self._watch is None:
            self._watch = self._make()
            self._ticking = asyncio.create_task(self._tick())
        self._send(self._watch.look())  # so that what comes next begins where `hello` ends
        self._queues[queue] = request
        return self._watch

    def _leave(self, queue: Queue) -> None:
        self._queues.pop(queue, None)
        if not self._queues and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = self._watch = None

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + PERIOD_S, loop.time())
            await asyncio.sleep(due_s - loop.time())
            assert self._watch is not None
            try:
                self._send(self._watch.look())
            except Exception as error:
                log.error("live_look_failed", cause=error)

    def _send(self, told: dict[str, Any]) -> None:
        if not self._queues:
            return
        message = _event("now", told)
        for queue, request in list(self._queues.items()):
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                if request.transport is not None:
                    request.transport.abort()


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


def _since(request: web.Request) -> float | None:
    text = request.query.get("since")
    try:
        since_s = None if text is None else float(text)
    except ValueError:
        since_s = math.nan
    if since_s is not None and not math.isfinite(since_s):
        raise ApiError(400, f"since = {text!r}: must be Unix seconds, or left out", "since")
    return since_s
