"""The sending end of the KV transport; the package says how the two ends work together."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from emulator import flows, outages
from emulator.clock import TIMER_ROUND_S
from emulator.frames import (
    ACK,
    MAX_FRAME_BYTES,
    TCP_INFO_BYTES,
    Outgoing,
    Source,
    TcpInfo,
    encode_header,
    encode_hello,
    parse_tcp_info,
)
from emulator.log import Log
from emulator.messages import PathSample, StopTransmit, Transmit
from emulator.transfer import wire_bytes

log = Log("transfer")

FRAME_BYTES: Final = 1 << 16
NOTSENT_BYTES: Final = 1 << 17  # TCP_NOTSENT_LOWAT: what the kernel may hold of a connection beyond what is on its way
_BACKOFF_S: Final = (0.02, 0.25)  # first and longest pause between attempts to connect, wall seconds
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger: drop what the socket holds
_TCP_NOTSENT_LOWAT: Final = 25  # linux/tcp.h; the socket module does not name it before Python 3.12

Payload = Callable[[str, int, int, int], memoryview]
"""(request_id, attempt, offset, length) -> `length` bytes from `offset` of that attempt's KV, in wire bytes.

The memory must stay as it is until the transfer is acknowledged or stopped; the same range may be asked for again."""


class ModelClock(Protocol):
    """What the transport needs of `emulator.clock.Clock`."""

    def now_s(self) -> float:
        """The present, in model seconds."""
        ...

    def monotonic_s(self, model_s: float) -> float:
        """The event loop's time at which the model time is `model_s`."""
        ...


class PseudoRandomPayload:
    """Emulated KV: zero-copy slices of one seeded buffer, from a start that depends on the attempt."""

    def __init__(self, seed: int = 0, size_bytes: int = 1 << 21) -> None:
        data = random.Random(seed).randbytes(size_bytes)
        self._size = size_bytes
        self._data = memoryview(data + (data * (MAX_FRAME_BYTES // size_bytes + 1))[:MAX_FRAME_BYTES])

    def __call__(self, request_id: str, attempt: int, offset: int, length: int) -> memoryview:
        start = (zlib.crc32(request_id.encode(), attempt) + offset) % self._size
        return self._data[start : start + length]


class _Frame:
    """A slice of a transfer on its way."""

    __slots__ = ("length", "offset", "sending")

    def __init__(self, sending: Outgoing, offset: int, length: int) -> None:
        self.sending, self.offset, self.length = sending, offset, length


class _Outlet:
    """The sender's end of one connection: a plain socket, so that what the kernel has not taken is one frame at most.

    While there are frames it asks the loop for room in its socket, and takes the pair's next frame whenever there is.
    """

    def __init__(self, pair: _Pair, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.was_acked = False
        self._pair = pair
        self._sock = sock
        self._open = True
        self._asking = False
        self._out: list[bytes | memoryview] = [pair.sender.hello]  # begun, and not taken by the kernel yet
        self._unacked: deque[_Frame] = deque()
        self._acks = b""
        self._loop.add_reader(sock, self._read)

    def feed(self) -> None:
        """There may be frames to send: take one, unless the connection is at it already."""
        if not self._asking:
            self._write()

    def close(self) -> None:
        """Drop the connection and what its socket holds; its unacknowledged frames go back to the pair."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._sock.close()
        if not self.lost.done():
            self.lost.set_result(None)
        self._pair.lost(self, self._unacked)

    def tcp_info(self) -> TcpInfo:
        """Only while the connection is one of the pair's."""
        return parse_tcp_info(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))

    def buffered_bytes(self) -> int:
        """What is left of the frame that the kernel has taken in part."""
        return sum(map(len, self._out))

    def _write(self) -> None:
        """At most one frame a turn of the loop, so that neither acknowledgements nor timers starve."""
        if not self._open:
            return
        if not self._out:
            frame = self._pair.next_frame()
            if frame is None:
                self._ask(False)
                return
            self._out = self._pair.sender.encode(frame)
            self._unacked.append(frame)
        try:
            taken = self._sock.sendmsg(self._out)
        except BlockingIOError:
            taken = 0
        except OSError:
            self.close()
            return
        while self._out and taken >= len(self._out[0]):
            taken -= len(self._out.pop(0))
        if taken:
            self._out[0] = memoryview(self._out[0])[taken:]
        self._ask(True)

    def _ask(self, asking: bool) -> None:
        if asking != self._asking:
            self._asking = asking
            if asking:
                self._loop.add_writer(self._sock, self._write)
            else:
                self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 14)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        data = self._acks + data
        whole = len(data) - len(data) % ACK.size
        self._acks = data[whole:]
        for token, offset in ACK.iter_unpack(data[:whole]):
            frame = self._unacked[0] if self._unacked else None
            if frame is None or (frame.sending.order.token, frame.offset) != (token, offset):
                self.close()  # a header was garbled on its way: what is unacknowledged is sent again elsewhere
                return
            self._unacked.popleft()
            self.was_acked = True
            self._pair.acked(frame)


class _Pair:
    """All that goes from this node to one peer."""

    def __init__(
        self, sender: KvSender, peer: str, host: str, port: int, connections: int, first_flow: int | None
    ) -> None:
        self.sender = sender
        self.peer = peer
        self.address = (host, port)
        self.transfers: dict[tuple[str, int], Outgoing] = {}  # not yet acknowledged, in the order of their grants
        self.outlets: list[_Outlet] = []  # connected
        self._queue: dict[tuple[str, int], Outgoing] = {}  # those with bytes not handed to a connection yet
        self._again: deque[_Frame] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        numbers = [None if first_flow is None else first_flow + i for i in range(connections)]
        self.tasks = [
            self._loop.create_task(self._keep_connected(number), name=f"kv-{peer}-{i}")
            for i, number in enumerate(numbers)
        ]

    def transmit(self, order: Transmit) -> None:
        key = (order.request_id, order.attempt)
        if key in self.transfers:
            raise ValueError(f"{order}: this attempt is being sent already")
        size = wire_bytes(order.kv_bytes, self.sender.byte_scale)
        self.transfers[key] = self._queue[key] = Outgoing(order, size, self.sender.source(order))
        self.feed()

    def stop(self, key: tuple[str, int]) -> None:
        sending = self.transfers.pop(key, None)
        if sending is None:
            return
        sending.stopped = True
        self._queue.pop(key, None)
        self._again = deque(frame for frame in self._again if frame.sending is not sending)

    def stop_all(self) -> None:
        for key in list(self.transfers):
            self.stop(key)

    def close(self) -> None:
        self.stop_all()
        for task in self.tasks:
            task.cancel()
        for outlet in list(self.outlets):
            outlet.close()
        self._cancel_timer()

    def acked(self, frame: _Frame) -> None:
        sending = frame.sending
        sending.acked += frame.length
        if sending.acked == sending.size and not sending.stopped:
            request_id, attempt = sending.order.request_id, sending.order.attempt
            del self.transfers[request_id, attempt]
            log.info("sent", request_id=request_id, attempt=attempt, to=self.peer, wire_bytes=sending.size)

    def lost(self, outlet: _Outlet, unacked: Iterable[_Frame]) -> None:
        self.outlets.remove(outlet)
        self._again.extend(frame for frame in unacked if not frame.sending.stopped)
        self.feed()

    def feed(self) -> None:
        """Bytes to send may have appeared: wake the connections that have nothing to do."""
        for outlet in list(self.outlets):
            outlet.feed()

    def unsent_bytes(self) -> int:
        """Bytes that exist and that the kernel has not taken yet."""
        now_s = self.sender.clock.now_s()
        waiting = sum(sending.produced(now_s) - sending.cut for sending in self._queue.values())
        waiting += sum(outlet.buffered_bytes() for outlet in self.outlets)
        return waiting + sum(frame.length for frame in self._again)

    def next_frame(self) -> _Frame | None:
        """What is to be sent next; None, and a timer for the next piece, when nothing is."""
        if self._again:
            self.sender.resent_frames += 1
            return self._again.popleft()
        now_s = self.sender.clock.now_s()
        for key, sending in self._queue.items():
            length = min(sending.produced(now_s) - sending.cut, self.sender.frame_bytes)
            if length > 0:
                frame = _Frame(sending, sending.cut, length)
                sending.cut += length
                if sending.cut == sending.size:
                    del self._queue[key]
                return frame
        self._arm()
        return None

    def _arm(self) -> None:
        """One timer, at the scheduled time of the next piece of any transfer."""
        self._cancel_timer()
        now_s = self.sender.clock.now_s()
        due = [due_s for sending in self._queue.values() if (due_s := sending.next_due_s(now_s)) is not None]
        if due:
            self._timer = self._loop.call_at(self.sender.clock.monotonic_s(min(due)) + TIMER_ROUND_S, self.feed)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _keep_connected(self, number: int | None) -> None:
        first_s, longest_s = _BACKOFF_S
        backoff_s = first_s
        while True:
            sock = await self._dial(number)
            if sock is not None:
                outlet = _Outlet(self, sock)
                self.outlets.append(outlet)
                try:
                    outlet.feed()
                    await outlet.lost
                finally:
                    outlet.close()
                self.sender.lost_connections += 1
                log.warning("kv connection lost", node=self.peer)
                if outlet.was_acked:
                    backoff_s = first_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, longest_s)

    async def _dial(self, number: int | None) -> socket.socket | None:
        host, port = self.address
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
            if number is not None:
                flows.bind(sock, number)
            async with asyncio.timeout(outages.connect_s()):
                await self._loop.sock_connect(sock, (host, port))
            outages.prepare(sock)
        except BaseException as failure:
            sock.close()
            if isinstance(failure, OSError):  # TimeoutError is one
                return None
            raise
        return sock


class KvSender:
    """Sends this node's KV to its peers.

    node: this node's name, which receivers match against `Expect.prefill_node`. secret: the data plane's. connections:
    k of a pair. byte_scale: wire bytes a model byte. frame_bytes: longest payload of a frame, wire bytes. payload:
    where the bytes come from; sources(order), asked when a transfer begins, and held until it is acknowledged or
    stopped: who has its bytes instead, if anybody. first_flows: peer -> number of the first connection to it, the
    others follow (`emulator.flows`); those to other peers are not numbered. To be made and used inside a running event
    loop, on that loop's thread.

    Counters, cumulative since `reset`: sent_bytes (wire bytes of payload handed to connections, repeats included),
    sent_frames, resent_frames, lost_connections.
    """

    def __init__(
        self,
        node: str,
        secret: str,
        clock: ModelClock,
        *,
        connections: int = 4,
        byte_scale: float = 1.0,
        frame_bytes: int = FRAME_BYTES,
        payload: Payload | None = None,
        sources: Callable[[Transmit], Source | None] | None = None,
        first_flows: Mapping[str, int] | None = None,
    ) -> None:
        if connections < 1 or byte_scale <= 0 or not 0 < frame_bytes <= MAX_FRAME_BYTES:
            raise ValueError(
                f"connections={connections}, byte_scale={byte_scale}, frame_bytes={frame_bytes}: "
                f"needs at least one connection, a positive scale and frames of 1 to {MAX_FRAME_BYTES} bytes"
            )
        self.hello = encode_hello(node, secret)
        self.clock = clock
        self.byte_scale = byte_scale
        self.frame_bytes = frame_bytes
        self._sources = sources
        self._payload: Payload = payload if payload is not None else PseudoRandomPayload()
        self._connections = connections
        self._first_flows = dict(first_flows or {})
        self._pairs: dict[str, _Pair] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._zero()

    def connect(self, peer: str, host: str, port: int) -> None:
        """Open the connections to `peer` (its data port) ahead of the first transfer; no KV flows."""
        self._pair(peer, host, port)

    def transmit(self, message: Transmit, host: str, port: int) -> None:
        """Send a granted transfer to `message.decode_node`, whose data port is at `host`:`port`.

        Piece i leaves no earlier than its scheduled time; pieces that are due already leave at once. Raises ValueError
        for a malformed message, or when this attempt is already being sent there.
        """
        self._pair(message.decode_node, host, port).transmit(message)

    def source(self, order: Transmit) -> Source | None:
        """Who has the transfer's bytes; None for emulated ones."""
        return None if self._sources is None else self._sources(order)

    def wake(self) -> None:
        """A source has more bytes than before."""
        for pair in self._pairs.values():
            pair.feed()

    def stop(self, message: StopTransmit) -> None:
        """Forget the attempt: nothing more of it is handed to a connection.

        What the sockets hold already still goes out, so that frames stay whole. Unknown attempts are ignored.
        """
        pair = self._pairs.get(message.decode_node)
        if pair is not None:
            pair.stop((message.request_id, message.attempt))

    def forget_peer(self, node: str) -> None:
        """The control plane declared `node` lost: drop all transfers to it and close its connections."""
        pair = self._pairs.pop(node, None)
        if pair is not None:
            self._end(pair)

    def reset(self) -> None:
        """A new epoch: drop all transfers, keep the connections, count from zero."""
        for pair in self._pairs.values():
            pair.stop_all()
        self._zero()

    @property
    def sent_kv_bytes(self) -> int:
        """`sent_bytes` in model bytes."""
        return round(self.sent_bytes / self.byte_scale)

    @property
    def live_transfers(self) -> int:
        """Transfers that are not acknowledged completely."""
        return sum(len(pair.transfers) for pair in self._pairs.values())

    def paths(self) -> tuple[PathSample, ...]:
        """TCP_INFO of every peer with a live connection, in wall units.

        RTT is the mean over its connections; retransmits, congestion window and delivery rate are sums over the live
        ones. unsent_bytes: produced, but not put on the wire yet (queue, and the sockets' unsent part).
        """
        samples = []
        for pair in self._pairs.values():
            infos = [outlet.tcp_info() for outlet in pair.outlets]
            if not infos:
                continue
            samples.append(
                PathSample(
                    peer=pair.peer,
                    rtt_s=sum(info.rtt_s for info in infos) / len(infos),
                    retransmits=sum(info.retransmits for info in infos),
                    cwnd_packets=sum(info.cwnd_packets for info in infos),
                    delivery_rate_bps=sum(info.delivery_rate_bps for info in infos),
                    unsent_bytes=pair.unsent_bytes() + sum(info.notsent_bytes for info in infos),
                )
            )
        return tuple(samples)

    async def close(self) -> None:
        """Drop everything and wait until the last connection and task is gone."""
        for peer in list(self._pairs):
            self.forget_peer(peer)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def encode(self, frame: _Frame) -> list[bytes | memoryview]:
        order = frame.sending.order
        source = frame.sending.source
        if source is None:
            payload = self._payload(order.request_id, order.attempt, frame.offset, frame.length)
        else:
            payload = source.read(frame.offset, frame.length)
        self.sent_frames += 1
        self.sent_bytes += frame.length
        return [encode_header(order.token, frame.offset, payload), payload]

    def _pair(self, peer: str, host: str, port: int) -> _Pair:
        pair = self._pairs.get(peer)
        if pair is None:
            pair = self._pairs[peer] = _Pair(self, peer, host, port, self._connections, self._first_flows.get(peer))
        pair.address = (host, port)
        return pair

    def _end(self, pair: _Pair) -> None:
        pair.close()
        for task in pair.tasks:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _zero(self) -> None:
        self.sent_bytes = self.sent_frames = self.resent_frames = self.lost_connections = 0
