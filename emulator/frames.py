"""The data plane without sockets: its wire format, a transfer's pieces and landed ranges, the kernel's TCP_INFO.

A connection starts with a hello from its dialler and then carries frames, each a slice of one transfer:

    hello   magic 4s | node's name 64s (UTF-8, NUL-padded) | SHA-256 of the data plane's token 32s
    frame   magic 4s | token u64 | offset u64 | length u32 | crc32 u32 | payload
    ack     token u64 | offset u64                              (from the listener, one a frame, in the frames' order)

All big-endian; the last byte of a magic is the version. The CRC covers the header's other fields as well as the
payload, so that a frame that strayed to another place or transfer fails it. The token keeps strangers and other runs
out (`emulator.door`); nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from emulator.messages import Transmit

HELLO: Final = struct.Struct(">4s64s32s")
ACK: Final = struct.Struct(">QQ")
MAX_FRAME_BYTES: Final = 1 << 20  # longest payload; a longer one means that the stream is out of step

_HELLO_MAGIC: Final = b"PKH\x01"
_FRAME_MAGIC: Final = b"PKF\x01"
_FIELDS: Final = struct.Struct(">4sQQI")
_CRC: Final = struct.Struct(">I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size


class FrameError(ValueError):
    """The byte stream is not this protocol, or out of step: its connection is of no further use."""


class VersionError(FrameError):
    """A hello of another version of this protocol."""


class Hello(NamedTuple):
    """Who dialled, and the digest of the token it knows."""

    node: str
    digest: bytes


class FrameHeader(NamedTuple):
    """`length` bytes at `offset` of the transfer `token` (wire bytes), and their CRC."""

    token: int
    offset: int
    length: int
    crc: int


def secret_digest(secret: str) -> bytes:
    """The 32 bytes of a hello that prove the secret."""
    return hashlib.sha256(secret.encode()).digest()


def encode_hello(node: str, secret: str) -> bytes:
    """A connection's first bytes. Raises ValueError for a name of more than 64 bytes."""
    name = node.encode()
    if not 0 < len(name) <= 64:
        raise ValueError(f"node: {node!r} is {len(name)} bytes long as UTF-8; use 1 to 64")
    return HELLO.pack(_HELLO_MAGIC, name, secret_digest(secret))


def decode_hello(data: bytes | bytearray | memoryview) -> Hello:
    """The inverse of `encode_hello`. Raises FrameError."""
    magic, name, digest = HELLO.unpack(data)
    if magic != _HELLO_MAGIC:
        kind = VersionError if magic[:3] == _HELLO_MAGIC[:3] else FrameError
        raise kind(f"hello: starts with {magic!r}, expected {_HELLO_MAGIC!r}")
    try:
        return Hello(name.rstrip(b"\0").decode(), digest)
    except UnicodeDecodeError as wrong:
        raise FrameError(f"hello: the node's name is not UTF-8: {wrong}") from None


def encode_header(token: int, offset: int, payload: bytes | memoryview) -> bytes:
    """The header of the frame with `payload` (1 to MAX_FRAME_BYTES bytes) at `offset` of the transfer `token`."""
    fields = _FIELDS.pack(_FRAME_MAGIC, token, offset, len(payload))
    return fields + _CRC.pack(zlib.crc32(payload, zlib.crc32(fields)))


class FrameReader:
    """Splits a dialler's byte stream into a hello and frames, received in place: no byte is copied or held twice.

    `get_buffer()` says where the next bytes go and `filled(n)` that n were put there, however the stream is cut.
    on_hello(hello): called once. begin(header) -> memory for the payload (`length` bytes), or None to discard it;
    called before any byte of it is received. end(header, intact): the payload is complete; `intact` says whether its
    CRC is right. Discarded payloads go through `scratch_bytes` of reused memory and are checked too.
    """

    def __init__(
        self,
        on_hello: Callable[[Hello], None],
        begin: Callable[[FrameHeader], memoryview | None],
        end: Callable[[FrameHeader, bool], None],
        scratch_bytes: int = 1 << 17,
    ) -> None:
        self._on_hello, self._begin, self._end = on_hello, begin, end
        self._head = memoryview(bytearray(HELLO.size))
        self._head_need = HELLO.size
        self._scratch = memoryview(bytearray(scratch_bytes))
        self._greeted = False
        self._frame: FrameHeader | None = None  # being received
        self._memory: memoryview | None = None  # where its payload goes
        self._got = 0  # bytes of the present hello, header or payload
        self._crc = 0
        self._into = self._head

    def get_buffer(self) -> memoryview:
        """Where the stream's next bytes go: never longer than what belongs there, so never empty."""
        frame = self._frame
        if frame is None:
            self._into = self._head[self._got : self._head_need]
        elif self._memory is not None:
            self._into = self._memory[self._got : frame.length]
        else:
            self._into = self._scratch[: frame.length - self._got]
        return self._into

    def filled(self, count: int) -> None:
        """The first `count` bytes of the last `get_buffer()` are there. Raises FrameError."""
        self._got += count
        frame = self._frame
        if frame is None:
            if self._got == self._head_need:
                self._head_complete()
            return
        self._crc = zlib.crc32(self._into[:count], self._crc)
        if self._got == frame.length:
            self._frame = self._memory = None
            self._got = 0
            self._end(frame, self._crc == frame.crc)

    def discard(self) -> None:
        """From here on the present frame's payload is discarded: its memory is not touched again."""
        self._memory = None

    def _head_complete(self) -> None:
        self._got = 0
        if not self._greeted:
            hello = decode_hello(self._head)
            self._greeted = True
            self._head_need = HEADER_BYTES
            self._on_hello(hello)
            return
        magic, token, offset, length = _FIELDS.unpack_from(self._head)
        if magic != _FRAME_MAGIC or not 0 < length <= MAX_FRAME_BYTES:
            raise FrameError(f"frame: header {bytes(self._head[:HEADER_BYTES])!r} is not one")
        self._crc = zlib.crc32(self._head[: _FIELDS.size])
        self._frame = FrameHeader(token, offset, length, _CRC.unpack_from(self._head, _FIELDS.size)[0])
        self._memory = self._begin(self._frame)


class TcpInfo(NamedTuple):
    """Part of the kernel's struct tcp_info (include/uapi/linux/tcp.h). What an older kernel does not give is 0."""

    rtt_s: float
    cwnd_packets: int
    retransmits: int
    notsent_bytes: int
    delivery_rate_bps: float


TCP_INFO_BYTES: Final = 256  # ask for more than any kernel gives; it answers with what it has


def parse_tcp_info(data: bytes) -> TcpInfo:
    """`data`: what getsockopt(IPPROTO_TCP, TCP_INFO) returned, native byte order."""

    def field(layout: str, offset: int) -> int:
        if offset + struct.calcsize(layout) > len(data):
            return 0
        value: int = struct.unpack_from(layout, data, offset)[0]
        return value

    return TcpInfo(
        rtt_s=field("=I", 68) * 1e-6,
        cwnd_packets=field("=I", 80),
        retransmits=field("=I", 100),
        notsent_bytes=field("=I", 144),
        delivery_rate_bps=field("=Q", 160) * 8.0,
    )


class Source(Protocol):
    """The KV of one transfer that is really computed: whole bytes from 0 on, as they come to be."""

    def ready_bytes(self) -> int:
        """How many exist. Whoever makes more of them calls `KvSender.wake`."""
        ...

    def read(self, offset: int, length: int) -> memoryview:
        """`length` of them from `offset`; memory that stays as it is."""
        ...


class Outgoing:
    """A granted transfer at its sender. Offsets and sizes in wire bytes, times in model seconds.

    source: of one that is really computed; else its pieces exist at their scheduled times.
    """

    __slots__ = ("acked", "cut", "order", "size", "source", "stopped")

    def __init__(self, order: Transmit, size: int, source: Source | None = None) -> None:
        if order.pieces < 1 or order.end_s < order.start_s:
            raise ValueError(f"{order}: needs at least one piece and end_s >= start_s")
        self.order = order
        self.size = size
        self.source = source
        self.cut = 0  # bytes handed to connections
        self.acked = 0
        self.stopped = False

    def due_s(self, piece: int) -> float:
        """When piece `piece` (from 0) exists."""
        order = self.order
        return order.start_s + (piece + 1) / order.pieces * (order.end_s - order.start_s)

    def produced(self, now_s: float) -> int:
        """Bytes that exist."""
        if self.source is not None:
            return self.source.ready_bytes()
        pieces = self._pieces(now_s)
        return self.size * pieces // self.order.pieces

    def next_due_s(self, now_s: float) -> float | None:
        """When the next piece will exist; None when all do, or when nobody knows."""
        if self.source is not None:
            return None
        pieces = self._pieces(now_s)
        return None if pieces == self.order.pieces else self.due_s(pieces)

    def _pieces(self, now_s: float) -> int:
        order = self.order
        if now_s >= order.end_s:
            return order.pieces
        if now_s < order.start_s:
            return 0
        guess = int((now_s - order.start_s) / (order.end_s - order.start_s) * order.pieces)
        while guess > 0 and self.due_s(guess - 1) > now_s:
            guess -= 1
        while guess < order.pieces and self.due_s(guess) <= now_s:
            guess += 1
        return guess


class Writer(Protocol):
    """A connection that receives a frame of a transfer."""

    def discard(self) -> None:
        """Store no more of the frame being received."""
        ...


class Incoming:
    """An expected transfer at its receiver; wire bytes."""

    __slots__ = ("done", "landed", "memory", "offsets", "sender", "size", "token", "writers")

    def __init__(self, token: int, sender: str, size: int, memory: memoryview | None) -> None:
        self.token = token
        self.sender = sender
        self.size = size
        self.memory = memory
        self.landed = 0
        self.done: dict[int, int] = {}  # offset -> length of the verified frames
        self.offsets: list[int] = []  # their offsets, ascending
        self.writers: dict[Writer, FrameHeader] = {}  # frames being received

    def overlaps(self, frame: FrameHeader) -> bool:
        """Whether a verified frame, or one being received, covers part of `frame` without being the same range."""
        end = frame.offset + frame.length
        at = bisect_left(self.offsets, end)
        if at:  # verified frames are disjoint: only the last one that starts before `end` can reach in
            start = self.offsets[at - 1]
            if start + self.done[start] > frame.offset and (start, self.done[start]) != (frame.offset, frame.length):
                return True
        return any(
            other.offset < end
            and frame.offset < other.offset + other.length
            and (other.offset, other.length) != (frame.offset, frame.length)
            for other in self.writers.values()
        )

    def add(self, frame: FrameHeader) -> None:
        """The frame is verified and in place."""
        self.done[frame.offset] = frame.length
        insort(self.offsets, frame.offset)
        self.landed += frame.length
