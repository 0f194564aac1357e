"""Control connections: length-prefixed msgpack messages over TCP, in order, both ways.

The dialler says who it is with `Hello` (node name, the data plane's token, version); everything after it is one message
a frame. Used between gateway and workers, and between prefill and decode workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from emulator import outages
from emulator.door import Door
from emulator.frames import secret_digest
from emulator.messages import CONTROL_VERSION, AnyMessage, Hello, decode, encode

MAX_FRAME_BYTES: Final = 1 << 20
MAX_HELLO_BYTES: Final = 1 << 10
_LENGTH: Final = struct.Struct(">I")


class Channel(asyncio.Protocol):
    """One control connection. `peer` is the other end's node name, once known.

    Its dialler gives the `hello` to say; its listener the `door` that the hello has to open.

    on_message(channel, message) and on_closed(channel, reason) are called on the event loop's thread.

    A malformed or oversized frame closes the connection.
    """

    def __init__(
        self,
        on_message: Callable[[Channel, AnyMessage], None],
        on_closed: Callable[[Channel, str], None],
        *,
        door: Door | None = None,
        hello: Hello | None = None,
        peer: str = "",
    ) -> None:
        if (door is None) == (hello is None):
            raise ValueError("a control connection has a door, or a hello to open one")
        self.peer = peer
        self._on_message = on_message
        self._on_closed = on_closed
        self._door = door  # None once it is open
        self._hello = hello
        self._buffer = bytearray()
        self._reason = "closed by the other side"
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_stalled(self) -> bool:
        """Whether the link does not carry what was sent last: what can be told later is better told then."""
        if self._transport is None or self._transport.is_closing():
            return False  # its descriptor may be another's by now
        sock: Any = self._transport.get_extra_info("socket")
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
        if self._door is not None:
            self._door.knock(self)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > (MAX_FRAME_BYTES if self._door is None else MAX_HELLO_BYTES):
                self._give_up(f"a frame of {length} bytes")
                return
            if len(buffer) - start - 4 < length:
                break
            body = bytes(memoryview(buffer)[start + 4 : start + 4 + length])
            start += 4 + length
            try:
                message = decode(body)
            except msgspec.MsgspecError as error:
                self._give_up(f"a malformed message: {error}")
                return
            if self._door is not None and not self._enters(message, self._door):
                return
            self._on_message(self, message)
            if not self.is_open:
                return
        del buffer[:start]

    def _enters(self, message: AnyMessage, door: Door) -> bool:
        """Whether a stranger's first message is a hello that opens the door."""
        if not isinstance(message, Hello):
            door.refuse(self, "malformed")
        elif message.version != CONTROL_VERSION:
            door.refuse(self, "wrong_version")
        elif door.admit(self, message.node, secret_digest(message.secret)):
            self._door = None
            self.peer = message.node
            return True
        return False

    def _give_up(self, reason: str) -> None:
        """What came is no message."""
        if self._door is not None:
            self._door.refuse(self, "malformed")
        else:
            self.close(reason)

    def show_out(self, reason: str) -> None:
        """The door stays shut (`Stranger`)."""
        self._reason = f"no valid hello: {reason}"
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._door is not None:
            self._door.forget(self)
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
            channel = Channel(self._on_message, self._closed, hello=self._hello, peer=self.peer)
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
