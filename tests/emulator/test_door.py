"""The door of a node: in come those that know the token, in time; all others are shown out and counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from emulator import door as doors
from emulator.channel import MAX_HELLO_BYTES, Channel
from emulator.door import MOST_STRANGERS, REASONS, Door
from emulator.frames import encode_hello, secret_digest
from emulator.messages import CONTROL_VERSION, AnyMessage, Hello, Landed, encode
from emulator.transfer.receiver import KvReceiver

TOKEN = "a token"
DIGEST = secret_digest(TOKEN)


class Visitor:
    """A connection: why it was shown out, if it was."""

    def __init__(self) -> None:
        self.shown_out: list[str] = []

    def show_out(self, reason: str) -> None:
        self.shown_out.append(reason)


class Later:
    """`call_later`, by hand."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, delay_s: float, call: Callable[..., None], *args: object) -> Later.Handle:
        def go() -> None:
            call(*args)

        self.calls.append(go)
        return Later.Handle(self.calls, go)

    class Handle:
        def __init__(self, calls: list[Callable[[], None]], go: Callable[[], None]) -> None:
            self._calls, self._go = calls, go

        def cancel(self) -> None:
            if self._go in self._calls:
                self._calls.remove(self._go)


@pytest.fixture
def later() -> Later:
    return Later()


class TestDoor:
    """One door, no sockets."""

    def test_who_knows_the_token_is_in_and_its_time_no_longer_runs(self, later: Later) -> None:
        door, visitor = Door(TOKEN, {"p0"}, later), Visitor()
        door.knock(visitor)
        assert (door.strangers, len(later.calls)) == (1, 1)
        assert door.admit(visitor, "p0", DIGEST)
        assert (door.strangers, later.calls, visitor.shown_out, dict(door.refused)) == (0, [], [], {})

    @pytest.mark.parametrize(
        ("node", "digest", "reason"),
        [
            ("p0", secret_digest("another"), "wrong_token"),
            ("p0", b"", "wrong_token"),
            ("nobody", DIGEST, "unknown_node"),
            ("nobody", secret_digest("another"), "wrong_token"),
        ],
    )
    def test_who_does_not_is_shown_out_and_counted(self, later: Later, node: str, digest: bytes, reason: str) -> None:
        door, visitor = Door(TOKEN, {"p0"}, later), Visitor()
        door.knock(visitor)
        assert not door.admit(visitor, node, digest)
        assert (visitor.shown_out, door.refused[reason], door.strangers, later.calls) == ([reason], 1, 0, [])
        assert reason in REASONS

    def test_who_says_nothing_is_shown_out_when_its_time_is_over(self, later: Later) -> None:
        door, visitor = Door(TOKEN, later=later), Visitor()
        door.knock(visitor)
        later.calls[0]()
        assert (visitor.shown_out, dict(door.refused), door.strangers) == (["no_hello"], {"no_hello": 1}, 0)

    def test_a_crowd_of_strangers_keeps_nobody_out(self, later: Later) -> None:
        door, crowd = Door(TOKEN, {"p0"}, later), [Visitor() for _ in range(MOST_STRANGERS)]
        for visitor in crowd:
            door.knock(visitor)
        peer = Visitor()
        door.knock(peer)
        assert crowd[0].shown_out == ["crowded"]
        assert door.strangers == len(later.calls) == MOST_STRANGERS
        assert door.admit(peer, "p0", DIGEST)
        assert not any(visitor.shown_out for visitor in crowd[1:])

    def test_a_reason_is_told_in_the_log_a_few_times(self, later: Later, caplog: pytest.LogCaptureFixture) -> None:
        door = Door(TOKEN, {"p0"}, later)
        for _ in range(20):
            door.refuse(Visitor(), "malformed")
        assert [vars(record)["fields"] for record in caplog.records] == 5 * [{"reason": "malformed"}]
        assert door.refused["malformed"] == 20

    def test_who_has_gone_by_itself_is_not_counted(self, later: Later) -> None:
        door, visitor = Door(TOKEN, later=later), Visitor()
        door.knock(visitor)
        door.forget(visitor)
        assert (door.strangers, later.calls, dict(door.refused)) == (0, [], {})


def control(message: AnyMessage) -> bytes:
    body = encode(message)
    return len(body).to_bytes(4, "big") + body


@asynccontextmanager
async def listening(kind: str, door: Door) -> AsyncIterator[tuple[int, list[AnyMessage]]]:
    """A control or a data port with this door: its number, and what was heard at the control port."""
    heard: list[AnyMessage] = []
    if kind == "data":
        receiver = KvReceiver("d0", door, lambda token: None, lambda token, reason: None)
        yield await receiver.listen("127.0.0.1", 0), heard
        await receiver.close()
        return
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Channel(lambda channel, message: heard.append(message), lambda channel, reason: None, door=door),
        "127.0.0.1",
        0,
    )
    yield server.sockets[0].getsockname()[1], heard
    server.close()


@pytest.mark.parametrize(
    ("kind", "first", "reason"),
    [
        ("control", b"", "no_hello"),
        ("control", control(Hello("p0", TOKEN))[:-1], "no_hello"),
        ("control", control(Hello("p0", "guess")), "wrong_token"),
        ("control", control(Hello("p0", TOKEN, CONTROL_VERSION + 1)), "wrong_version"),
        ("control", control(Landed(1)), "malformed"),
        ("control", b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        ("control", (MAX_HELLO_BYTES + 1).to_bytes(4, "big"), "malformed"),
        ("data", b"", "no_hello"),
        ("data", encode_hello("p0", TOKEN)[:-1], "no_hello"),
        ("data", encode_hello("p0", "guess"), "wrong_token"),
        ("data", encode_hello("p1", TOKEN), "unknown_node"),
        ("data", b"x" * 200, "malformed"),
    ],
)
async def test_a_strangers_connection_is_closed_and_counted(
    monkeypatch: pytest.MonkeyPatch, kind: str, first: bytes, reason: str
) -> None:
    monkeypatch.setattr(doors, "HELLO_S", 0.2)
    door = Door(TOKEN, {"p0"})
    async with listening(kind, door) as (port, heard), asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        with contextlib.suppress(ConnectionError):  # reset, with what was sent unread
            assert await reader.read() == b""
        assert dict(door.refused) == {reason: 1}
        assert heard == []
        writer.close()


async def test_hundreds_that_say_nothing_do_not_keep_a_peer_out() -> None:
    door = Door(TOKEN, {"p0"})
    async with listening("control", door) as (port, heard), asyncio.timeout(30):
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST_STRANGERS)]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(control(Hello("p0", TOKEN)) + control(Landed(7)))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        assert heard[1] == Landed(7)
        assert door.strangers <= MOST_STRANGERS
        assert door.refused["crowded"] >= 2 * MOST_STRANGERS - 1
        for _, one in [*crowd, (None, writer)]:
            one.close()
