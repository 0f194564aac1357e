"""Control connections: whole messages out of any stream of bytes, no strangers, and a dialler that dials again."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.channel import MAX_FRAME_BYTES, Channel, Dialler
from emulator.door import Door
from emulator.messages import Abort, AnyMessage, Cancel, Grant, Hello, Landed, Refuse, encode

HOST = "127.0.0.1"
SECRET = "secret"
HELLO = Hello("p0", SECRET)
PATIENCE_S = 30.0  # bounds a hang; nothing here is judged by its speed


def frame(message: AnyMessage) -> bytes:
    body = encode(message)
    return struct.pack(">I", len(body)) + body


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True


class Never:
    """A timer that does not go off."""

    def cancel(self) -> None:
        pass


def still_door(secret: str = SECRET) -> Door:
    """A door without an event loop: nobody's time runs out."""
    return Door(secret, later=lambda delay_s, call, *args: Never())


class End:
    """One end of a connection, without a socket: what it heard, and why it closed."""

    def __init__(self, *, hello: Hello | None = None, secret: str = SECRET) -> None:
        self.heard: list[AnyMessage] = []
        self.closed: list[str] = []
        self.pipe = Pipe()
        self.channel = Channel(
            lambda channel, message: self.heard.append(message),
            lambda channel, reason: self.closed.append(reason),
            door=still_door(secret) if hello is None else None,
            hello=hello,
        )
        self.channel.connection_made(self.pipe)

    def lose(self, error: Exception | None = None) -> None:
        self.channel.connection_lost(error)


class TestFraming:
    """A frame is four bytes of length and a message."""

    @given(data=st.data())
    def test_messages_come_out_whole_and_in_order_however_the_stream_is_cut(self, data: st.DataObject) -> None:
        messages = [Refuse("r" * data.draw(st.integers(0, 300)), i, "") for i in range(data.draw(st.integers(0, 5)))]
        stream = b"".join(map(frame, [HELLO, *messages]))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
        end = End()
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            end.channel.data_received(stream[start:stop])
        assert end.heard == [HELLO, *messages]

    def test_bytes_one_by_one(self) -> None:
        end = End()
        for byte in frame(HELLO) + frame(Landed(1)):
            end.channel.data_received(bytes([byte]))
        assert end.heard == [HELLO, Landed(1)]

    def test_what_one_end_sends_the_other_hears(self) -> None:
        dialler, listener = End(hello=HELLO), End()
        assert dialler.channel.send(Grant("a", 1, 2))
        listener.channel.data_received(dialler.pipe.written)
        assert listener.heard == [HELLO, Grant("a", 1, 2)]

    @pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
    def test_an_oversized_frame_closes_the_connection_before_it_is_read(self, length: int) -> None:
        end = End()
        end.channel.data_received(frame(HELLO) + struct.pack(">I", length))
        assert end.pipe.closing
        end.lose()
        assert end.closed == [f"a frame of {length} bytes"]

    @pytest.mark.parametrize("body", [b"", b"\xff\xff", b"\x81\xa4type\xa8Nonsense"])
    def test_a_malformed_message_closes_the_connection(self, body: bytes) -> None:
        end = End()
        end.channel.data_received(frame(HELLO) + struct.pack(">I", len(body)) + body + frame(Landed(1)))
        assert end.pipe.closing
        assert end.heard == [HELLO]
        end.lose()
        assert "malformed" in end.closed[0]

    def test_nothing_is_delivered_after_the_handler_closed_the_connection(self) -> None:
        heard: list[AnyMessage] = []

        def on_message(channel: Channel, message: AnyMessage) -> None:
            heard.append(message)
            channel.close("enough")

        channel = Channel(on_message, lambda channel, reason: None, door=still_door(SECRET))
        channel.connection_made(Pipe())
        channel.data_received(frame(HELLO) + frame(Landed(1)))
        assert heard == [HELLO]


class TestHello:
    """The dialler says who it is and what it knows, before anything else is heard of it."""

    def test_the_dialler_speaks_first(self) -> None:
        assert End(hello=HELLO).pipe.written == frame(HELLO)

    def test_the_listener_learns_the_name_of_its_peer(self) -> None:
        end = End()
        assert end.channel.peer == ""
        end.channel.data_received(frame(HELLO))
        assert end.channel.peer == "p0"

    @pytest.mark.parametrize(
        "first", [Hello("p0", "wrong"), Hello("p0", ""), Hello("p0", "sécret"), Landed(1), Cancel("a", 1)]
    )
    def test_whoever_does_not_know_the_secret_is_refused(self, first: AnyMessage) -> None:
        end = End()
        end.channel.data_received(frame(first) + frame(HELLO))
        assert end.pipe.closing
        assert end.heard == []
        assert end.channel.peer == ""
        end.lose()
        assert end.closed == [f"no valid hello: {'wrong_token' if isinstance(first, Hello) else 'malformed'}"]

    def test_a_secret_of_any_characters_is_known(self) -> None:
        end = End(secret="sécret")
        end.channel.data_received(frame(Hello("p0", "sécret")))
        assert end.channel.peer == "p0"

    def test_the_dialler_needs_no_hello_of_the_listener(self) -> None:
        end = End(hello=HELLO)
        end.channel.data_received(frame(Landed(1)))
        assert end.heard == [Landed(1)]


class TestClosing:
    """Whoever sends to a connection that is gone is told so."""

    def test_before_it_is_made_nothing_can_be_sent(self) -> None:
        channel = Channel(lambda c, m: None, lambda c, r: None, hello=HELLO)
        assert not channel.is_open
        assert not channel.send(Landed(1))

    def test_closing_nothing_can_be_sent(self) -> None:
        end = End(hello=HELLO)
        end.channel.close()
        assert not end.channel.is_open
        assert not end.channel.send(Landed(1))

    @pytest.mark.parametrize(
        ("error", "reason"),
        [(None, "closed by the other side"), (ConnectionResetError("reset by peer"), "reset by peer")],
    )
    def test_the_loss_and_its_reason_are_told_once(self, error: Exception | None, reason: str) -> None:
        end = End(hello=HELLO)
        end.lose(error)
        assert end.closed == [reason]
        assert not end.channel.send(Landed(1))


class Node:
    """A listening node on loopback, and everything it heard."""

    def __init__(self, secret: str = SECRET) -> None:
        self.door = Door(secret)
        self.heard: list[AnyMessage] = []
        self.channels: list[Channel] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self) -> Channel:
        channel = Channel(lambda c, m: self.heard.append(m), lambda c, r: self.channels.remove(c), door=self.door)
        self.channels.append(channel)
        return channel

    def hang_up(self) -> None:
        for channel in list(self.channels):
            channel.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.hang_up()
        await until(lambda: not self.channels)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


class Dialling:
    """A dialler and what it told."""

    def __init__(self, port: int, hello: Hello = HELLO) -> None:
        self.ups = 0
        self.downs: list[tuple[str, str]] = []
        self.heard: list[AnyMessage] = []
        self.dialler = Dialler(
            "d0",
            HOST,
            port,
            hello,
            lambda channel, message: self.heard.append(message),
            self._up,
            lambda peer, reason: self.downs.append((peer, reason)),
            retry_s=0.005,
        )

    def _up(self, channel: Channel) -> None:
        self.ups += 1


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node()
    await made.listen()
    yield made
    await made.stop()


class TestDialler:
    """Keeps one connection up until it is closed."""

    async def test_messages_go_both_ways(self, node: Node) -> None:
        dialling = Dialling(node.port)
        await until(lambda: dialling.ups)
        assert dialling.dialler.send(Abort("a", 1))
        await until(lambda: node.heard == [HELLO, Abort("a", 1)])
        node.channels[0].send(Grant("a", 1, 2))
        await until(lambda: dialling.heard == [Grant("a", 1, 2)])
        await dialling.dialler.close()

    async def test_a_node_that_listens_later_is_reached_then(self) -> None:
        late = Node()
        await late.listen()
        await late.stop()  # the port is known, nobody listens
        dialling = Dialling(late.port)
        assert not dialling.dialler.send(Landed(1))
        await asyncio.sleep(0.02)
        assert dialling.ups == 0
        await late.listen()
        await until(lambda: dialling.ups == 1)
        assert dialling.downs == []
        await dialling.dialler.close()
        await late.stop()

    async def test_a_lost_connection_is_told_and_dialled_again(self, node: Node) -> None:
        dialling = Dialling(node.port)
        await until(lambda: dialling.ups == 1 and node.heard)
        node.hang_up()
        await until(lambda: dialling.ups == 2)
        assert [peer for peer, _ in dialling.downs] == ["d0"]
        assert dialling.dialler.send(Landed(1))
        await until(lambda: node.heard == [HELLO, HELLO, Landed(1)])
        await dialling.dialler.close()

    async def test_between_two_connections_nothing_can_be_sent(self, node: Node) -> None:
        dialling = Dialling(node.port)
        await until(lambda: dialling.ups == 1 and node.heard)
        await node.stop()
        await until(lambda: dialling.downs)
        assert dialling.dialler.channel is None
        assert not dialling.dialler.send(Landed(1))
        await dialling.dialler.close()

    async def test_ups_and_downs_alternate_also_when_the_node_hangs_up_at_once(self) -> None:
        """A connection that is lost before the dialler comes to know of it was never up."""
        hostile = Node(secret="another")
        await hostile.listen()
        story: list[str] = []
        dialler = Dialler(
            "d0",
            HOST,
            hostile.port,
            HELLO,
            lambda channel, message: None,
            lambda channel: story.append("up" if channel.is_open else "up, and lost"),
            lambda peer, reason: story.append("down"),
            retry_s=0.001,
        )
        await until(lambda: story.count("down") >= 10)
        await dialler.close()
        await hostile.stop()
        assert set(story[::2]) == {"up"}
        assert set(story[1::2]) == {"down"}

    async def test_a_connection_lost_while_it_was_made_is_not_up(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_connection
        made: list[Channel] = []

        async def slow(factory: Callable[[], Channel], *address: object) -> object:
            """The first connection is lost before its maker is told of it."""
            pair = await create(factory, *address)  # type: ignore[arg-type]
            made.append(pair[1])
            if len(made) == 1:
                pair[0].abort()
                await until(lambda: not pair[1].is_open)
            return pair

        monkeypatch.setattr(loop, "create_connection", slow)
        dialling = Dialling(node.port)
        await until(lambda: dialling.ups)
        assert dialling.dialler.channel is made[1]
        assert dialling.downs == []
        await dialling.dialler.close()

    async def test_closed_it_tells_nothing_more_and_does_not_dial(self, node: Node) -> None:
        dialling = Dialling(node.port)
        await until(lambda: dialling.ups == 1 and node.heard)
        await dialling.dialler.close()
        await until(lambda: not node.channels)
        await asyncio.sleep(0.02)
        assert (dialling.ups, dialling.downs) == (1, [])
        assert not dialling.dialler.send(Landed(1))
        assert not node.channels

    async def test_it_can_be_closed_before_it_ever_connected(self, node: Node) -> None:
        dialling = Dialling(node.port)
        await dialling.dialler.close()
        await asyncio.sleep(0.02)
        assert dialling.ups == 0
