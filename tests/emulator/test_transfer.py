"""The KV transport over loopback: what arrives, in which order, and what must never be stored."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from emulator.door import Door
from emulator.frames import (
    ACK,
    FrameError,
    FrameHeader,
    FrameReader,
    Hello,
    Outgoing,
    TcpInfo,
    encode_header,
    encode_hello,
    parse_tcp_info,
    secret_digest,
)
from emulator.messages import Expect, StopTransmit, Transmit
from emulator.transfer import wire_bytes
from emulator.transfer.receiver import KvReceiver
from emulator.transfer.sender import KvSender, PseudoRandomPayload

HOST = "127.0.0.1"
SECRET = "secret"
PATIENCE_S = 30.0  # bounds a hang; nothing here is judged by its speed


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Every test runs under both: the workers use uvloop, people debug with asyncio."""
    policy: asyncio.AbstractEventLoopPolicy = (
        uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()
    )
    return policy


class FakeClock:
    """Model time that moves when the test says so; timers look again every 2 ms. Records what was waited for."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.t_s = now_s
        self.waited_for: set[float] = set()

    def now_s(self) -> float:
        return self.t_s

    def monotonic_s(self, model_s: float) -> float:
        self.waited_for.add(model_s)
        return asyncio.get_running_loop().time() + 0.002


class Node:
    """A receiver and what it told."""

    def __init__(self, **options: object) -> None:
        self.landed: list[int] = []
        self.damaged: list[tuple[int, str]] = []
        self.receiver = KvReceiver(
            "d0",
            Door(SECRET),
            self.landed.append,
            lambda token, reason: self.damaged.append((token, reason)),
            **options,  # type: ignore[arg-type]
        )
        self.port = 0


class Pattern:
    """A payload that records who was asked for what, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._source = PseudoRandomPayload(seed=1)

    def __call__(self, request_id: str, attempt: int, offset: int, length: int) -> memoryview:
        self.asked.append((request_id, offset, length))
        return self._source(request_id, attempt, offset, length)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def a_while() -> None:
    """Time enough for something that must not happen to have happened, usually."""
    await asyncio.sleep(0.03)


Nodes = Callable[..., Awaitable["Node"]]
Senders = Callable[..., KvSender]
Dial = Callable[..., Awaitable["Dialler"]]
Middles = Callable[..., Awaitable[tuple["Middle", int]]]


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    made: list[Node] = []

    async def listening(port: int = 0, **options: object) -> Node:
        node = Node(**options)
        made.append(node)
        node.port = await node.receiver.listen(HOST, port)
        return node

    yield listening
    for node in made:
        await node.receiver.close()


@pytest.fixture
async def senders() -> AsyncIterator[Senders]:
    made: list[KvSender] = []

    def sender(name: str = "p0", secret: str = SECRET, **options: object) -> KvSender:
        options.setdefault("clock", FakeClock())
        made.append(KvSender(name, secret, **options))  # type: ignore[arg-type]
        return made[-1]

    yield sender
    for each in made:
        await each.close()


def order(token: int, size: int, *, pieces: int = 1, start_s: float = 0.0, end_s: float = 0.0) -> Transmit:
    """A transfer named after its token; by default all of it exists."""
    return Transmit(f"r{token}", 0, "d0", token, size, pieces, start_s, end_s)


class Dialler:
    """A sender's connection written by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, node: Node, name: str = "p0", secret: str = SECRET) -> Dialler:
        dialler = cls(*await asyncio.open_connection(HOST, node.port))
        dialler.writer.write(encode_hello(name, secret))
        return dialler

    async def send(self, token: int, offset: int, payload: bytes, *, garble: bool = False) -> None:
        """One frame, and wait until the receiver has dealt with it."""
        self.writer.write(encode_header(token, offset, payload))
        self.writer.write(bytes([payload[0] ^ 1]) + payload[1:] if garble else payload)
        await self.ack(token, offset)

    async def ack(self, token: int, offset: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            assert ACK.unpack(await self.reader.readexactly(ACK.size)) == (token, offset)

    async def closed(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    made: list[Dialler] = []

    async def to(node: Node, name: str = "p0", secret: str = SECRET) -> Dialler:
        made.append(await Dialler.to(node, name, secret))
        return made[-1]

    yield to
    for dialler in made:
        dialler.writer.close()


class Middle:
    """A TCP relay in front of a node. `meddle(connection, position, chunk)` answers what to pass on, or None to cut."""

    def __init__(self, node: Node, meddle: Callable[[int, int, bytes], bytes | None]) -> None:
        self.connections = 0
        self.stalled: dict[int, asyncio.Event] = {}  # connection number -> set to let it go on
        self._node, self._meddle = node, meddle
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._relay, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        back_reader, back_writer = await asyncio.open_connection(HOST, self._node.port)
        tasks = [
            asyncio.ensure_future(self._forward(number, reader, back_writer)),
            asyncio.ensure_future(self._backward(back_reader, writer)),
        ]
        self._tasks.update(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.difference_update(tasks)
        for end in (writer, back_writer):
            end.transport.abort()

    async def _forward(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        position = 0
        if number in self.stalled:
            await self.stalled[number].wait()
        while chunk := await reader.read(1 << 14):
            passed = self._meddle(number, position, chunk)
            if passed is None:
                return
            position += len(chunk)
            writer.write(passed)
            await writer.drain()

    async def _backward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 14):
            writer.write(chunk)
            await writer.drain()


@pytest.fixture
async def middles() -> AsyncIterator[Middles]:
    made: list[Middle] = []

    async def before(
        node: Node, meddle: Callable[[int, int, bytes], bytes | None] = lambda number, position, chunk: chunk
    ) -> tuple[Middle, int]:
        made.append(Middle(node, meddle))
        return made[-1], await made[-1].start()

    yield before
    for middle in made:
        await middle.close()


class TestTransfers:
    async def test_a_transfer_lands_once_byte_for_byte(self, nodes: Nodes, senders: Senders) -> None:
        memory = bytearray(1_000_003)
        node = await nodes(sink=lambda expected, size: memoryview(memory)[:size])
        source = PseudoRandomPayload(seed=3)
        sender = senders(payload=source)
        node.receiver.expect(Expect(7, 1_000_003, "p0"))
        sender.transmit(order(7, 1_000_003), HOST, node.port)
        await until(lambda: bool(node.landed))
        await until(lambda: sender.live_transfers == 0)
        assert node.landed == [7]
        assert memory == source("r7", 0, 0, 1_000_003)
        assert node.receiver.landed_bytes == {"p0": 1_000_003}
        assert sender.sent_bytes == 1_000_003
        assert node.receiver.refused_frames == 0
        assert node.receiver.expected == 0

    async def test_nothing_is_sent_before_transmit(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        pattern = Pattern()
        sender = senders(payload=pattern)
        node.receiver.expect(Expect(1, 1000, "p0"))
        sender.connect("d0", HOST, node.port)
        await until(lambda: len(sender.paths()) == 1)
        await a_while()
        assert pattern.asked == []
        assert sender.sent_bytes == 0

    async def test_the_first_granted_is_sent_first(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        pattern = Pattern()
        sender = senders(payload=pattern)
        for token in (3, 1, 2):
            node.receiver.expect(Expect(token, 300_000, "p0"))
            sender.transmit(order(token, 300_000), HOST, node.port)
        await until(lambda: len(node.landed) == 3)
        assert [name for name, offset, _ in pattern.asked if offset == 0] == ["r3", "r1", "r2"]
        assert [name for name, _, _ in pattern.asked] == sorted(
            (name for name, _, _ in pattern.asked), key=["r3", "r1", "r2"].index
        )
        offsets = [offset for name, offset, _ in pattern.asked if name == "r1"]
        assert offsets == sorted(offsets)

    async def test_a_later_transfer_goes_on_while_the_first_has_nothing_yet(
        self, nodes: Nodes, senders: Senders
    ) -> None:
        node = await nodes()
        clock = FakeClock()
        sender = senders(clock=clock)
        for token, end_s in ((1, 10.0), (2, 0.0)):
            node.receiver.expect(Expect(token, 100_000, "p0"))
            sender.transmit(order(token, 100_000, end_s=end_s), HOST, node.port)
        await until(lambda: node.landed == [2])
        clock.t_s = 10.0
        await until(lambda: node.landed == [2, 1])

    async def test_pieces_leave_at_their_times_and_never_before(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        clock = FakeClock()
        sender = senders(clock=clock)
        node.receiver.expect(Expect(1, 4000, "p0"))
        sender.transmit(order(1, 4000, pieces=4, start_s=1.0, end_s=5.0), HOST, node.port)
        for now_s, produced in ((1.99, 0), (2.0, 1000), (2.5, 1000), (4.5, 3000), (5.0, 4000)):
            clock.t_s = now_s
            await until(lambda: sum(node.receiver.landed_bytes.values()) >= produced)  # noqa: B023
            await a_while()
            assert sender.sent_bytes == produced
        assert node.landed == [1]
        assert clock.waited_for <= {2.0, 3.0, 4.0, 5.0}  # the absolute schedule, no sums of waits

    async def test_a_stalled_connection_does_not_hold_the_others(
        self, nodes: Nodes, senders: Senders, middles: Middles
    ) -> None:
        size = 32 << 20
        node = await nodes()
        middle, port = await middles(node)
        middle.stalled[0] = asyncio.Event()
        sender = senders(connections=2)
        node.receiver.expect(Expect(1, size, "p0"))
        sender.transmit(order(1, size), HOST, port)
        await until(lambda: node.receiver.landed_bytes.get("p0", 0) > size * 3 // 4)  # far more than a half each
        middle.stalled[0].set()
        await until(lambda: node.landed == [1])

    async def test_frames_are_striped_over_all_connections(
        self, nodes: Nodes, senders: Senders, middles: Middles
    ) -> None:
        node = await nodes()
        passed: dict[int, int] = {}

        def count(number: int, position: int, chunk: bytes) -> bytes:
            passed[number] = position + len(chunk)
            return chunk

        _, port = await middles(node, count)
        sender = senders(connections=4)
        sender.connect("d0", HOST, port)
        await until(lambda: len(passed) == 4)
        node.receiver.expect(Expect(1, 8 << 20, "p0"))
        sender.transmit(order(1, 8 << 20), HOST, port)
        await until(lambda: node.landed == [1])
        assert all(count > 1 << 16 for count in passed.values())

    async def test_bytes_are_scaled_the_same_at_both_ends(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes(byte_scale=1 / 256)
        sender = senders(byte_scale=1 / 256)
        for token, size in ((1, 10_000_000), (2, 1)):
            node.receiver.expect(Expect(token, size, "p0"))
            sender.transmit(order(token, size, pieces=7), HOST, node.port)
        await until(lambda: sorted(node.landed) == [1, 2])
        assert node.receiver.landed_bytes == {"p0": wire_bytes(10_000_000, 1 / 256) + 1}
        assert node.receiver.landed_kv_bytes["p0"] == pytest.approx(10_000_000, abs=512)
        assert sender.sent_kv_bytes == node.receiver.landed_kv_bytes["p0"]

    async def test_an_attempt_that_is_being_sent_is_not_sent_twice(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        sender = senders()
        sender.transmit(order(1, 1000, end_s=9.0), HOST, node.port)
        with pytest.raises(ValueError, match="already"):
            sender.transmit(order(1, 1000, end_s=9.0), HOST, node.port)


class TestWhatDoesNotBelong:
    async def test_a_wrong_checksum_damages_the_transfer_and_spares_the_connection(
        self, nodes: Nodes, dial: Dial
    ) -> None:
        node = await nodes()
        node.receiver.expect(Expect(1, 2000, "p0"))
        node.receiver.expect(Expect(2, 1000, "p0"))
        dialler = await dial(node)
        await dialler.send(1, 0, b"a" * 1000, garble=True)
        assert node.damaged == [(1, "bad_crc")]
        assert node.receiver.refused == {"bad_crc": 1}
        await dialler.send(2, 0, b"b" * 1000)
        assert node.landed == [2]

    async def test_a_damaged_transfer_takes_no_more_bytes(self, nodes: Nodes, dial: Dial) -> None:
        node = await nodes()
        node.receiver.expect(Expect(1, 2000, "p0"))
        dialler = await dial(node)
        await dialler.send(1, 0, b"a" * 1000, garble=True)
        await dialler.send(1, 0, b"a" * 2000)
        assert node.landed == []
        assert len(node.damaged) == 1
        assert node.receiver.refused == {"bad_crc": 1, "unknown_token": 1}

    async def test_an_unknown_token_is_discarded_by_length(self, nodes: Nodes, dial: Dial) -> None:
        node = await nodes()
        node.receiver.expect(Expect(2, 1000, "p0"))
        dialler = await dial(node)
        await dialler.send(1, 0, b"a" * 300_000)
        await dialler.send(2, 0, b"b" * 1000)
        assert node.landed == [2]
        assert node.receiver.refused == {"unknown_token": 1}
        assert node.damaged == []

    async def test_a_landed_token_is_finished(self, nodes: Nodes, dial: Dial) -> None:
        node = await nodes()
        node.receiver.expect(Expect(1, 1000, "p0"))
        dialler = await dial(node)
        for _ in range(2):
            await dialler.send(1, 0, b"a" * 1000)
        assert node.landed == [1]
        assert node.receiver.refused == {"unknown_token": 1}

    async def test_another_node_cannot_write_into_a_transfer(self, nodes: Nodes, dial: Dial) -> None:
        memory = bytearray(1000)
        node = await nodes(sink=lambda expected, size: memoryview(memory))
        node.receiver.expect(Expect(1, 1000, "p0"))
        await (await dial(node, "p1")).send(1, 0, b"a" * 1000)
        assert memory == bytes(1000)
        assert node.receiver.refused == {"wrong_sender": 1}
        assert node.damaged == []
        await (await dial(node, "p0")).send(1, 0, b"b" * 1000)
        assert node.landed == [1]

    @pytest.mark.parametrize(
        ("offset", "length", "reason"),
        [(1500, 600, "out_of_range"), (2**63, 10, "out_of_range"), (500, 1000, "overlap"), (0, 999, "overlap")],
    )
    async def test_a_frame_that_does_not_fit_damages(
        self, nodes: Nodes, dial: Dial, offset: int, length: int, reason: str
    ) -> None:
        memory = bytearray(2000)
        node = await nodes(sink=lambda expected, size: memoryview(memory))
        node.receiver.expect(Expect(1, 2000, "p0"))
        dialler = await dial(node)
        await dialler.send(1, 0, b"a" * 1000)
        await dialler.send(1, offset, b"x" * length)
        assert node.damaged == [(1, reason)]
        assert node.receiver.refused == {reason: 1}
        assert memory == b"a" * 1000 + bytes(1000)

    async def test_the_same_frame_again_is_dropped_silently(self, nodes: Nodes, dial: Dial) -> None:
        node = await nodes()
        node.receiver.expect(Expect(1, 2000, "p0"))
        dialler = await dial(node)
        for offset in (0, 0, 1000):
            await dialler.send(1, offset, b"a" * 1000)
        assert node.landed == [1]
        assert node.damaged == []
        assert node.receiver.duplicates == 1
        assert node.receiver.refused_frames == 0
        assert node.receiver.landed_bytes == {"p0": 2000}

    async def test_a_late_writer_never_touches_withdrawn_memory(self, nodes: Nodes, dial: Dial) -> None:
        memory = bytearray(2000)
        node = await nodes(sink=lambda expected, size: memoryview(memory)[:size])
        node.receiver.expect(Expect(1, 2000, "p0"))
        dialler = await dial(node)
        dialler.writer.write(encode_header(1, 0, b"a" * 2000) + b"a" * 700)
        await until(lambda: memory[:700] == b"a" * 700)
        node.receiver.unexpect(1)
        memory[:] = b"n" * 2000  # another request's now
        dialler.writer.write(b"a" * 1300)
        await dialler.ack(1, 0)
        assert memory == b"n" * 2000
        assert node.landed == []
        assert node.damaged == []
        node.receiver.expect(Expect(2, 1000, "p0"))
        await dialler.send(2, 0, b"b" * 1000)
        assert node.landed == [2]
        assert node.receiver.refused == {"unknown_token": 1}

    async def test_a_resent_frame_takes_the_place_of_its_first_try(self, nodes: Nodes, dial: Dial) -> None:
        memory = bytearray(2000)
        node = await nodes(sink=lambda expected, size: memoryview(memory)[:size])
        node.receiver.expect(Expect(1, 2000, "p0"))
        old, new = await dial(node), await dial(node)
        old.writer.write(encode_header(1, 0, b"a" * 1000) + b"a" * 600)
        await until(lambda: memory[:600] == b"a" * 600)
        await new.send(1, 0, b"a" * 1000)
        old.writer.write(b"z" * 400)
        await old.ack(1, 0)
        assert memory[:1000] == b"a" * 1000
        assert node.receiver.duplicates == 1
        assert node.damaged == []
        await new.send(1, 1000, b"a" * 1000)
        assert node.landed == [1]

    async def test_a_wrong_secret_is_shown_out_and_counted(self, nodes: Nodes, dial: Dial) -> None:
        node = await nodes()
        node.receiver.expect(Expect(1, 1000, "p0"))
        dialler = await dial(node, secret="guess")
        dialler.writer.write(encode_header(1, 0, b"a" * 1000) + b"a" * 1000)
        assert await dialler.closed()
        assert node.receiver.door.refused == {"wrong_token": 1}
        assert node.landed == []
        assert node.receiver.expected == 1

    @pytest.mark.parametrize(
        ("first", "reason"),
        [
            (b"GET / HTTP/1.1\r\n" + b"x" * 200, "malformed"),
            (b"PKH\x02" + encode_hello("p0", SECRET)[4:], "wrong_version"),
        ],
    )
    async def test_a_strangers_first_bytes_decide(self, nodes: Nodes, first: bytes, reason: str) -> None:
        node = await nodes()
        reader, writer = await asyncio.open_connection(HOST, node.port)
        writer.write(first)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert node.receiver.door.refused == {reason: 1}
        assert node.receiver.door.strangers == 0
        writer.close()

    async def test_a_stream_out_of_step_is_closed(self, nodes: Nodes, dial: Dial) -> None:
        node = await nodes()
        dialler = await dial(node)
        dialler.writer.write(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
        assert await dialler.closed()
        assert node.receiver.refused == {"malformed": 1}

    async def test_memory_that_does_not_fit_is_refused(self, nodes: Nodes) -> None:
        node = await nodes(sink=lambda expected, size: memoryview(bytearray(size - 1)))
        with pytest.raises(ValueError, match="1000 writable bytes"):
            node.receiver.expect(Expect(1, 1000, "p0"))


class TestBrokenConnections:
    async def test_a_killed_connection_is_replaced_and_its_frames_sent_again(
        self, nodes: Nodes, senders: Senders, middles: Middles
    ) -> None:
        memory = bytearray(2_000_000)
        node = await nodes(sink=lambda expected, size: memoryview(memory))
        middle, port = await middles(
            node, lambda number, position, chunk: None if number < 3 and position > 500_000 else chunk
        )
        source = PseudoRandomPayload()
        sender = senders(connections=1, payload=source)
        node.receiver.expect(Expect(1, 2_000_000, "p0"))
        sender.transmit(order(1, 2_000_000), HOST, port)
        await until(lambda: node.landed == [1])
        await until(lambda: sender.live_transfers == 0)
        assert memory == source("r1", 0, 0, 2_000_000)
        assert node.damaged == []
        assert node.receiver.landed_bytes == {"p0": 2_000_000}
        assert sender.lost_connections == 3
        assert sender.resent_frames > 0
        assert middle.connections == 4

    @pytest.mark.parametrize("seed", range(4))
    async def test_whatever_breaks_all_lands_once_and_right(
        self, nodes: Nodes, senders: Senders, middles: Middles, seed: int
    ) -> None:
        chance = random.Random(seed)
        memory: dict[int, bytearray] = {}

        def land(expected: Expect, size: int) -> memoryview:
            memory[expected.token] = bytearray(size)
            return memoryview(memory[expected.token])

        def cut(number: int, position: int, chunk: bytes) -> bytes | None:
            if number > 60 or chance.random() > 0.05:
                return chunk
            return None

        node = await nodes(sink=land)
        _, port = await middles(node, cut)
        source = PseudoRandomPayload(seed)
        sender = senders(connections=3, payload=source, frame_bytes=chance.choice([1000, 10_000, 65_536]))
        sizes = {token: chance.randrange(1, 400_000) for token in range(12)}
        for token, size in sizes.items():
            node.receiver.expect(Expect(token, size, "p0"))
            sender.transmit(order(token, size, pieces=5), HOST, port)
        await until(lambda: len(node.landed) == len(sizes) and sender.live_transfers == 0)
        assert sorted(node.landed) == list(sizes)
        assert all(memory[token] == source(f"r{token}", 0, 0, size) for token, size in sizes.items())
        assert node.damaged == []
        assert node.receiver.landed_bytes == {"p0": sum(sizes.values())}
        assert set(node.receiver.refused) <= {"unknown_token"}  # frames sent again of what had landed already

    async def test_a_header_garbled_on_its_way_is_sent_again(
        self, nodes: Nodes, senders: Senders, middles: Middles
    ) -> None:
        node = await nodes()

        def garble(number: int, position: int, chunk: bytes) -> bytes:
            at = 100 + 5 - position  # the hello is 100 bytes long; the fifth byte after it is the token's
            if number == 0 and 0 <= at < len(chunk):
                return chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :]
            return chunk

        _, port = await middles(node, garble)
        sender = senders(connections=1)
        node.receiver.expect(Expect(1, 500_000, "p0"))
        sender.transmit(order(1, 500_000), HOST, port)
        await until(lambda: node.landed == [1])
        assert node.damaged == []
        assert node.receiver.refused["unknown_token"] >= 1

    async def test_a_payload_garbled_on_its_way_is_damage(
        self, nodes: Nodes, senders: Senders, middles: Middles
    ) -> None:
        node = await nodes()

        def garble(number: int, position: int, chunk: bytes) -> bytes:
            at = 100 + 1000 - position
            return chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :] if 0 <= at < len(chunk) else chunk

        _, port = await middles(node, garble)
        sender = senders(connections=1)
        node.receiver.expect(Expect(1, 500_000, "p0"))
        sender.transmit(order(1, 500_000), HOST, port)
        await until(lambda: node.damaged == [(1, "bad_crc")])
        assert node.landed == []

    async def test_a_peer_that_comes_up_later_is_waited_for(self, nodes: Nodes, senders: Senders) -> None:
        with socket.create_server((HOST, 0)) as reserved:
            port = reserved.getsockname()[1]
        sender = senders()
        sender.transmit(order(1, 1000), HOST, port)
        await a_while()
        node = await nodes(port=port)
        node.receiver.expect(Expect(1, 1000, "p0"))  # in the same turn: no byte has been read yet
        await until(lambda: node.landed == [1])


class TestGivingUp:
    async def test_stop_forgets_the_rest_and_lets_the_next_one_through(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        clock = FakeClock(now_s=1.0)
        sender = senders(clock=clock)
        node.receiver.expect(Expect(1, 2000, "p0"))
        sender.transmit(order(1, 2000, pieces=2, end_s=2.0), HOST, node.port)
        await until(lambda: node.receiver.landed_bytes == {"p0": 1000})
        sender.stop(StopTransmit("r1", 0, "d0", 1))
        sender.stop(StopTransmit("r1", 0, "nobody", 1))
        assert sender.live_transfers == 0
        clock.t_s = 2.0
        node.receiver.expect(Expect(2, 500, "p0"))
        sender.transmit(order(2, 500), HOST, node.port)
        await until(lambda: node.landed == [2])
        assert sender.sent_bytes == 1500

    async def test_a_stopped_attempt_may_be_followed_by_another(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        sender = senders()
        sender.transmit(order(1, 1000, end_s=9.0), HOST, node.port)
        sender.stop(StopTransmit("r1", 0, "d0", 1))
        node.receiver.expect(Expect(5, 1000, "p0"))
        sender.transmit(Transmit("r1", 1, "d0", 5, 1000, 1, 0.0, 0.0), HOST, node.port)
        await until(lambda: node.landed == [5])

    async def test_a_lost_sender_damages_its_transfers_only(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        lost, other = senders("p0"), senders("p1")
        for token, name in ((1, "p0"), (2, "p0"), (3, "p1")):
            node.receiver.expect(Expect(token, 1000, name))
        lost.connect("d0", HOST, node.port)
        await until(lambda: bool(lost.paths()))
        node.receiver.forget_peer("p0")
        assert sorted(token for token, _ in node.damaged) == [1, 2]
        assert node.receiver.expected == 1
        other.transmit(order(3, 1000), HOST, node.port)
        await until(lambda: node.landed == [3])

    async def test_a_lost_receiver_frees_all_that_was_for_it(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        sender = senders()
        sender.transmit(order(1, 1000, end_s=9.0), HOST, node.port)
        await until(lambda: bool(sender.paths()))
        sender.forget_peer("d0")
        assert sender.live_transfers == 0
        assert sender.paths() == ()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        node.receiver.expect(Expect(2, 1000, "p0"))
        sender.transmit(order(2, 1000), HOST, node.port)
        await until(lambda: node.landed == [2])

    async def test_a_new_epoch_starts_from_nothing(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        sender = senders()
        node.receiver.expect(Expect(1, 1000, "p0"))
        sender.transmit(order(1, 1000), HOST, node.port)
        await until(lambda: node.landed == [1])
        sender.transmit(order(2, 1000, end_s=9.0), HOST, node.port)
        node.receiver.expect(Expect(2, 1000, "p0"))
        sender.reset()
        node.receiver.reset()
        assert sender.live_transfers == node.receiver.expected == sender.sent_bytes == node.receiver.landed_frames == 0
        assert node.receiver.landed_bytes == {}
        assert node.damaged == []
        node.receiver.expect(Expect(3, 1000, "p0"))
        sender.transmit(order(3, 1000), HOST, node.port)
        await until(lambda: node.landed == [1, 3])

    async def test_closing_leaves_no_task_and_no_connection(self, nodes: Nodes, senders: Senders) -> None:
        node = await nodes()
        sender = senders()
        node.receiver.expect(Expect(1, 64 << 20, "p0"))
        sender.transmit(order(1, 64 << 20), HOST, node.port)
        await until(lambda: bool(node.receiver.landed_bytes))
        await sender.close()
        await node.receiver.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not node.receiver.inlets


class TestPaths:
    async def test_what_a_slow_receiver_leaves_unsent_is_seen(self, senders: Senders) -> None:
        size = 64 << 20
        with socket.create_server((HOST, 0)) as deaf:  # the kernel completes connections, nobody reads
            sender = senders()
            sender.transmit(order(1, size), HOST, deaf.getsockname()[1])
            await until(lambda: sender.sent_frames > 4 and len(sender.paths()) == 1)
            (path,) = sender.paths()
            assert path.peer == "d0"
            assert path.rtt_s > 0
            assert path.cwnd_packets > 0
            assert size - sender.sent_bytes <= path.unsent_bytes <= size
            assert sender.sent_bytes < size  # the rest waits here, not in a buffer

    def test_tcp_info_is_read_at_the_kernels_offsets(self) -> None:
        data = bytearray(232)
        for offset, value in ((68, 1 << 20), (80, 42), (100, 7), (144, 9)):
            struct.pack_into("=I", data, offset, value)
        struct.pack_into("=Q", data, 160, 125)
        assert parse_tcp_info(bytes(data)) == TcpInfo((1 << 20) * 1e-6, 42, 7, 9, 1000.0)

    def test_what_an_old_kernel_does_not_tell_is_zero(self) -> None:
        data = struct.pack("=26I", *range(26))
        assert parse_tcp_info(data) == TcpInfo(17e-6, 20, 25, 0, 0.0)


frames = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=300), st.booleans()),
    max_size=6,
)


def chunks(stream: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    while stream:
        size = next(sizes, len(stream))
        yield stream[:size]
        stream = stream[size:]


def feed(reader: FrameReader, data: bytes) -> None:
    """As an event loop does: into the buffer that the reader gives, as far as it goes."""
    while data:
        buffer = reader.get_buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        reader.filled(count)
        data = data[count:]


class TestFrameReader:
    @given(frames=frames, sizes=st.lists(st.integers(1, 400)), stored=st.booleans())
    def test_however_the_stream_is_cut_the_frames_are_the_same(
        self, frames: list[tuple[int, int, bytes, bool]], sizes: list[int], stored: bool
    ) -> None:
        stream = encode_hello("p0", SECRET)
        for token, offset, payload, garbled in frames:
            stream += encode_header(token, offset, payload)
            stream += bytes([payload[0] ^ 1]) + payload[1:] if garbled else payload
        hellos: list[Hello] = []
        memories: list[bytearray] = []
        seen: list[tuple[int, int, int, bool]] = []

        def begin(header: FrameHeader) -> memoryview | None:
            memories.append(bytearray(header.length))
            return memoryview(memories[-1]) if stored else None

        reader = FrameReader(
            hellos.append, begin, lambda h, intact: seen.append((h.token, h.offset, h.length, intact)), scratch_bytes=64
        )
        for chunk in chunks(stream, iter(sizes)):
            feed(reader, chunk)
        assert hellos == [Hello("p0", secret_digest(SECRET))]
        assert seen == [(token, offset, len(payload), not garbled) for token, offset, payload, garbled in frames]
        if stored:
            assert [memory[1:] for memory in memories] == [payload[1:] for _, _, payload, _ in frames]

    @given(st.binary(min_size=28, max_size=28).filter(lambda data: not data.startswith(b"PKF\x01")))
    def test_what_is_no_header_is_an_error(self, garbage: bytes) -> None:
        reader = FrameReader(lambda hello: None, lambda header: None, lambda header, intact: None)
        feed(reader, encode_hello("p0", SECRET))
        with pytest.raises(FrameError):
            feed(reader, garbage)

    @given(st.sampled_from(["token", "offset"]), st.integers(1, 2**64 - 1))
    def test_a_frame_that_strayed_fails_its_checksum(self, field: str, distance: int) -> None:
        seen: list[bool] = []
        reader = FrameReader(lambda hello: None, lambda header: None, lambda header, intact: seen.append(intact))
        feed(reader, encode_hello("p0", SECRET))
        header = bytearray(encode_header(1, 1, b"payload"))
        at = {"token": 4, "offset": 12}[field]
        struct.pack_into(">Q", header, at, 1 ^ distance)
        feed(reader, bytes(header) + b"payload")
        assert seen == [False]

    @pytest.mark.parametrize("name", ["", "x" * 65])
    def test_a_name_that_does_not_fit_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="64"):
            encode_hello(name, SECRET)


class TestPieces:
    @given(
        size=st.integers(1, 10**12),
        pieces=st.integers(1, 500),
        start_s=st.floats(0, 1e6),
        length_s=st.floats(0, 1e4),
        at=st.floats(-0.5, 1.5),
    )
    def test_piece_i_exists_from_its_time_on(
        self, size: int, pieces: int, start_s: float, length_s: float, at: float
    ) -> None:
        end_s = start_s + length_s
        transfer = Outgoing(Transmit("r", 0, "d0", 1, size, pieces, start_s, end_s), size)
        now_s = start_s + at * length_s
        due = [start_s + (i + 1) / pieces * (end_s - start_s) for i in range(pieces)]
        there = pieces if now_s >= end_s else sum(due_s <= now_s for due_s in due)
        assert transfer.produced(now_s) == size * there // pieces
        assert transfer.next_due_s(now_s) == (due[there] if there < pieces else None)
        assert transfer.produced(end_s) == size

    @pytest.mark.parametrize(("pieces", "end_s"), [(0, 1.0), (1, -1.0)])
    def test_an_impossible_schedule_is_refused(self, pieces: int, end_s: float) -> None:
        with pytest.raises(ValueError, match="piece"):
            Outgoing(Transmit("r", 0, "d0", 1, 10, pieces, 0.0, end_s), 10)

    def test_no_transfer_is_scaled_to_nothing(self) -> None:
        assert [wire_bytes(size, 0.001) for size in (0, 1, 499, 1_499, 1_501)] == [1, 1, 1, 1, 2]

    def test_payloads_of_different_attempts_differ(self) -> None:
        source = PseudoRandomPayload()
        slices = [bytes(source(name, attempt, 0, 64)) for name in ("a", "b") for attempt in (0, 1)]
        assert len(set(slices)) == 4
        assert source("a", 0, 0, 1 << 20)[1000:2000] == source("a", 0, 1000, 1000)
