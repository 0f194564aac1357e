"""The receiving end of the KV transport; the package says how the two ends work together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

from emulator import outages
from emulator.door import Door
from emulator.frames import ACK, FrameError, FrameHeader, FrameReader, Hello, Incoming, VersionError
from emulator.messages import Expect
from emulator.transfer import wire_bytes

Sink = Callable[[Expect, int], memoryview | None]
"""(expected, wire bytes) -> writable memory of that many bytes to land in, or None to verify and discard."""


class _Inlet(asyncio.BufferedProtocol):
    """The receiver's end of one connection."""

    def __init__(self, receiver: KvReceiver) -> None:
        self.node: str | None = None
        self.transport: asyncio.Transport | None = None
        self._receiver = receiver
        self._reader = FrameReader(self._hello, self._begin, self._end)
        self._landing: Incoming | None = None  # what the present frame belongs to

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        outages.prepare(transport.get_extra_info("socket"))
        self._receiver.inlets.add(self)
        self._receiver.door.knock(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        try:
            self._reader.filled(nbytes)
        except FrameError as error:
            if self.node is None:
                self._receiver.door.refuse(self, "wrong_version" if isinstance(error, VersionError) else "malformed")
            else:
                self._receiver.refuse("malformed")
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiver.door.forget(self)
        if self._landing is not None:
            self._landing.writers.pop(self, None)
            self._landing = None
        self._receiver.inlet_closed(self)

    def show_out(self, reason: str) -> None:
        """The door stays shut (`Stranger`)."""
        self.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def discard(self) -> None:
        """The frame being received lost its place; what is left of it goes nowhere."""
        self._landing = None
        self._reader.discard()

    def _hello(self, hello: Hello) -> None:
        if self._receiver.door.admit(self, hello.node, hello.digest):
            self.node = hello.node

    def _begin(self, frame: FrameHeader) -> memoryview | None:
        landing = self._landing = self._receiver.place(self, frame)
        if landing is None or landing.memory is None:
            return None
        return landing.memory[frame.offset : frame.offset + frame.length]

    def _end(self, frame: FrameHeader, intact: bool) -> None:
        landing, self._landing = self._landing, None
        assert self.transport is not None
        if landing is not None:
            del landing.writers[self]
        self.transport.write(ACK.pack(frame.token, frame.offset))
        if landing is not None:
            self._receiver.arrived(landing, frame, intact)


class KvReceiver:
    """Receives the KV that this node expects.

    on_landed(token): all bytes have arrived and were verified; once a token. on_damaged(token, reason): the transfer
    cannot complete. Both are called on the event loop's thread, with the token forgotten already. sink: where transfers
    land; None verifies and discards.

    Counters, cumulative since `reset`: landed_bytes (verified wire bytes by sender), landed_frames, duplicates (frames
    that came again after a reconnection), refused (frames by reason; connections are the door's). Reasons:
    unknown_token (never expected, withdrawn, or complete), wrong_sender, out_of_range, overlap, bad_crc, malformed (the
    connection is closed: its stream is out of step).
    """

    def __init__(
        self,
        node: str,
        door: Door,
        on_landed: Callable[[int], None],
        on_damaged: Callable[[int, str], None],
        *,
        byte_scale: float = 1.0,
        sink: Sink | None = None,
    ) -> None:
        if byte_scale <= 0:
            raise ValueError(f"byte_scale={byte_scale}: must be positive")
        self.node = node
        self.inlets: set[_Inlet] = set()
        self.door = door
        self._on_landed, self._on_damaged = on_landed, on_damaged
        self._byte_scale = byte_scale
        self._sink = sink
        self._landings: dict[int, Incoming] = {}
        self._server: asyncio.Server | None = None
        self._all_closed = asyncio.Event()
        self._zero()

    async def listen(self, host: str, port: int) -> int:
        """Listen at `host`:`port` (0: any free one) and return the port. Raises OSError when it is taken."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Inlet(self), host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def expect(self, message: Expect) -> None:
        """Accept the transfer's bytes from now on.

        Raises ValueError for a token that is already expected, or when the sink's memory does not fit.
        """
        if message.token in self._landings:
            raise ValueError(f"{message}: this token is expected already")
        size = wire_bytes(message.kv_bytes, self._byte_scale)
        memory = self._sink(message, size) if self._sink is not None else None
        if memory is not None and (memory.readonly or memory.format != "B" or memory.nbytes != size):
            raise ValueError(f"{message}: its memory must be {size} writable bytes, format B")
        self._landings[message.token] = Incoming(message.token, message.prefill_node, size, memory)

    def unexpect(self, token: int) -> None:
        """Accept no more bytes under `token` and let go of its memory; late ones are discarded.

        Unknown tokens are ignored.
        """
        landing = self._landings.pop(token, None)
        if landing is not None:
            for inlet in landing.writers:
                self.refuse("unknown_token")
                inlet.discard()
            landing.writers.clear()

    def forget_peer(self, node: str) -> None:
        """The control plane declared `node` lost: its live transfers are damaged, its connections closed."""
        for inlet in [inlet for inlet in self.inlets if inlet.node == node]:
            inlet.abort()
        for token in [landing.token for landing in self._landings.values() if landing.sender == node]:
            self._damage(token, f"the connection to {node} is lost")

    def expect_nothing(self) -> None:
        """Withdraw every token; connections and counters stay."""
        for token in list(self._landings):
            self.unexpect(token)

    def reset(self) -> None:
        """A new epoch: expect nothing, keep the connections, count from zero."""
        self.expect_nothing()
        self._zero()

    @property
    def landed_kv_bytes(self) -> dict[str, int]:
        """`landed_bytes` in model bytes."""
        return {node: round(count / self._byte_scale) for node, count in self.landed_bytes.items()}

    @property
    def refused_frames(self) -> int:
        """Frames refused, for whatever reason."""
        return self.refused.total()

    @property
    def expected(self) -> int:
        """Transfers that are expected and not complete."""
        return len(self._landings)

    async def close(self) -> None:
        """Stop listening, expect nothing, and wait until the last connection is gone."""
        if self._server is not None:
            self._server.close()
        self.expect_nothing()
        while self.inlets:
            self._all_closed.clear()
            for inlet in self.inlets:
                inlet.abort()
            await self._all_closed.wait()

    def refuse(self, reason: str) -> None:
        self.refused[reason] += 1

    def inlet_closed(self, inlet: _Inlet) -> None:
        self.inlets.discard(inlet)
        if not self.inlets:
            self._all_closed.set()

    def place(self, inlet: _Inlet, frame: FrameHeader) -> Incoming | None:
        """The transfer that `frame` may be stored in; None, counted, for a frame to discard."""
        landing = self._landings.get(frame.token)
        if landing is None:
            self.refuse("unknown_token")
            return None
        if landing.sender != inlet.node:
            self.refuse("wrong_sender")
            return None
        if frame.offset + frame.length > landing.size:
            self._refuse_and_damage(frame.token, "out_of_range")
            return None
        if landing.done.get(frame.offset) == frame.length:
            self.duplicates += 1
            return None
        if landing.overlaps(frame):
            self._refuse_and_damage(frame.token, "overlap")
            return None
        for other, range_ in list(landing.writers.items()):
            if range_.offset == frame.offset:  # sent again on a new connection: the old one is dead at the sender's end
                self.duplicates += 1
                del landing.writers[other]
                other.discard()
        landing.writers[inlet] = frame
        return landing

    def arrived(self, landing: Incoming, frame: FrameHeader, intact: bool) -> None:
        if not intact:
            self._refuse_and_damage(landing.token, "bad_crc")
            return
        landing.add(frame)
        self.landed_bytes[landing.sender] = self.landed_bytes.get(landing.sender, 0) + frame.length
        self.landed_frames += 1
        if landing.landed == landing.size:
            del self._landings[landing.token]
            self._on_landed(landing.token)

    def _refuse_and_damage(self, token: int, reason: str) -> None:
        self.refuse(reason)
        self._damage(token, reason)

    def _damage(self, token: int, reason: str) -> None:
        self.unexpect(token)
        self._on_damaged(token, reason)

    def _zero(self) -> None:
        self.landed_bytes: dict[str, int] = {}
        self.refused: Counter[str] = Counter()
        self.landed_frames = self.duplicates = 0
