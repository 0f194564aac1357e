"""Control connections: length-prefixed msgpack messages over TCP, in order, both ways.

The dialler says who it is with `Hello` (node name and the data plane's secret); everything after it is one message a
frame. Used between gateway and workers, and between prefill and decode workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from emulator import outages
from emulator.messages import AnyMessage, Hello, decode, encode

MAX_FRAME_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct(">I")


class Channel(asyncio.Protocol):
    """One control connection. `peer` is the other end's node name, once known.

    on_message(channel, message) and on_closed(channel, reason) are called on the event loop's thread.

    A malformed or oversized frame closes the connection.
    """

    def __init__(
        self,
        on_message: Callable[[Channel, AnyMessage], None],
        on_closed: Callable[[Channel, str], None],
        *,
        secret: str,
        hello: Hello | None = None,
        peer: str = "",
    ) -> None:
        self.peer = peer
        self._on_message = on_message
        self._on_closed = on_closed
        self._secret = secret
        self._hello = hello
        self._known = hello is not None
        self._buffer = bytearray()
        self._reason = "closed by the other side"
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_stalled(self) -> bool:
        """Whether the link does not carry what was sent last: what can be told later is better told then."""
        sock: Any = self._transport.get_extra_info("socket") if self._transport is not None else None
        return sock is not None and outages.stalled(sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        sock: Any = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            outages.prepare(sock)
        if self._hello is not None:
            self.send(self._hello)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                self.close(f"a frame of {length} bytes")
                return
            if len(buffer) - start - 4 < length:
                break
            body = bytes(memoryview(buffer)[start + 4 : start + 4 + length])
            start += 4 + length
            try:
                message = decode(body)
            except msgspec.MsgspecError as error:
                self.close(f"a malformed message: {error}")
                return
            if self._known:
                self._on_message(self, message)
            elif isinstance(message, Hello) and hmac.compare_digest(message.secret.encode(), self._secret.encode()):
                self._known = True
                self.peer = message.node
                self._on_message(self, message)
            else:
                self.close("no valid hello")
                return
            if not self.is_open:
                return
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed(self, str(exc) if exc else self._reason)

    def send(self, message: AnyMessage) -> bool:
        """Queue a message; False when the connection is gone."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        body = encode(message)
        transport.write(_LENGTH.pack(len(body)) + body)
        return True

    def close(self, reason: str = "closed here") -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.close()


class Dialler:
    """Keeps one control connection to a node up: dials, dials again after a loss, until closed."""

    def __init__(
        self,
        peer: str,
        host: str,
        port: int,
        hello: Hello,
        on_message: Callable[[Channel, AnyMessage], None],
        on_up: Callable[[Channel], None],
        on_down: Callable[[str, str], None],
        *,
        retry_s: float = 0.2,
    ) -> None:
        self.peer = peer
        self.channel: Channel | None = None
        self._address = (host, port)
        self._hello = hello
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._retry_s = retry_s
        self._lost = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"dial {peer}")

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            channel = Channel(
                self._on_message, self._closed, secret=self._hello.secret, hello=self._hello, peer=self.peer
            )
            self._lost.clear()
            with contextlib.suppress(OSError):  # TimeoutError is one
                async with asyncio.timeout(outages.connect_s()):
                    await loop.create_connection(lambda channel=channel: channel, *self._address)  # type: ignore[misc]
            if channel.is_open:  # it may have been lost before this task came to know of it
                self.channel = channel
                self._on_up(channel)
                await self._lost.wait()
            await asyncio.sleep(self._retry_s)

    def _closed(self, channel: Channel, reason: str) -> None:
        self._lost.set()
        if channel is self.channel:
            self.channel = None
            self._on_down(self.peer, reason)

    def send(self, message: AnyMessage) -> bool:
        """Send over the present connection; False when there is none."""
        return self.channel is not None and self.channel.send(message)

    async def close(self) -> None:
        """Stop dialling and close the connection; no callback is made any more."""
        self._on_down = lambda peer, reason: None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self.channel is not None:
            self.channel.close()
