"""Workers that compute, as processes on loopback, and somebody on the line between them who changes what is sent.

The proxy stands where a decode worker's data port should be and speaks the transport's protocol: what it changes has
valid frames and checksums, so that nothing but the state's own seals can tell.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import torch

from emulator.backends.hybrid.config import preset
from emulator.backends.hybrid.model import HybridModel
from emulator.backends.hybrid.parcel import parcel_bytes
from emulator.backends.hybrid.spec import ModelSpec
from emulator.backends.hybrid.state import OVERHEAD_BYTES, TOKEN_BYTES
from emulator.computing import Sampling
from emulator.frames import HEADER_BYTES, HELLO, encode_header
from emulator.kvcache import hash_blocks
from emulator.messages import AttemptFailed, Cancel, Convert, Finished, Prefill, Prefilled, Ready, Tokens
from emulator.worker import Config
from tests.wire.loopback import free_port
from tests.wire.test_workers import Fleet

BLOCK_TOKENS, TOKENS, ANSWER = 128, 700, 6
CONFIG = preset("tiny")
PROMPT = bytes((7 * i + i // 256) % 256 for i in range(TOKENS))
IDS = hash_blocks(PROMPT, BLOCK_TOKENS)[: (TOKENS - 1) // BLOCK_TOKENS]
HIT_TOKENS = len(IDS) * BLOCK_TOKENS
Change = Callable[[int, bytes, bytes], bytes]
"""(offset, payload, the whole of the first transfer that passed) -> what goes on in the payload's place."""


class Proxy:
    """Passes on what the sender says to the receiver, frame by frame, and changes as many of them as it is told to."""

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.change: Change | None = None
        self.left = 0  # frames to change
        self._to = port
        self._passed: dict[int, dict[int, bytes]] = {}  # by transfer: offset -> payload
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def changing(self, change: Change, frames: int = 1) -> None:
        self.change, self.left = change, frames

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._tasks.add(asyncio.create_task(self._pump(there, writer)))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            back.write(await reader.readexactly(HELLO.size))
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                token, offset = int.from_bytes(header[4:12], "big"), int.from_bytes(header[12:20], "big")
                payload = await reader.readexactly(int.from_bytes(header[20:24], "big"))
                told = self._changed(token, offset, payload)
                back.write(encode_header(token, offset, told) + told)
        back.close()
        writer.close()

    def _changed(self, token: int, offset: int, payload: bytes) -> bytes:
        self._passed.setdefault(token, {})[offset] = payload
        if self.change is None or not self.left:
            return payload
        self.left -= 1
        first = next(iter(self._passed.values()))
        return self.change(offset, payload, b"".join(first[at] for at in sorted(first)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 14):
                writer.write(data)


class Computing(Fleet):
    """Of the same model, but for whom `seeds` names another; the first one's KV to `d` goes by the proxy."""

    patience_s = 120.0  # three times torch, on a machine that has other work

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds: dict[str, int] = {}
        self.proxy = Proxy(self.ports["d"][1])

    def config(self, name: str) -> Config:
        plain = super().config(name)
        peers = dict(plain.peers)
        if name == "a":
            peers["d"] = msgspec.structs.replace(peers["d"], data_port=self.proxy.port)
        return msgspec.structs.replace(
            plain,
            model=ModelSpec("tiny", {}, self.seeds.get(name, 1)),
            peers=peers,
            time_scale=1.0,
            byte_scale=1.0,
            decode_slots=4,
            stream_interval=1,
            cache_bytes=1 << 26,
            block_tokens=BLOCK_TOKENS,
            connections=1,
        )


@contextlib.asynccontextmanager
async def running(folder: Path, **seeds: int) -> AsyncIterator[Computing]:
    fleet = Computing(folder)
    fleet.seeds = seeds
    await fleet.proxy.open()
    try:
        await fleet.begin()
        yield fleet
    finally:
        await fleet.end()
        await fleet.proxy.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Computing]:
    async with running(tmp_path) as fleet:
        yield fleet


def alone(prompt: bytes = PROMPT, tokens: int = ANSWER) -> list[int]:
    """What the model says by itself, greedily."""
    torch.set_num_threads(1)
    model = HybridModel.seeded(CONFIG, 1)
    state = model.empty()
    logits, _ = model.prefill(list(prompt), state)
    said = [int(logits.argmax())]
    while len(said) < tokens:
        said.append(int(model.decode([said[-1]], [state])[0].argmax()))
    return said


def order(request_id: str, prompt: bytes = PROMPT, *, cached: int = 0, holder: str = "") -> Prefill:
    ids = hash_blocks(prompt, BLOCK_TOKENS)[: (len(prompt) - 1) // BLOCK_TOKENS]
    return Prefill(request_id, 1, len(prompt), cached, ANSWER, "d", ids, holder, prompt, Sampling())


async def answer(
    fleet: Computing, name: str, request_id: str, *, prompt: bytes = PROMPT, cached: int = 0, holder: str = ""
) -> tuple[Prefilled, list[int]]:
    """A prompt, prefilled at a node and decoded at `d`: what the prefill reused and sent, and the tokens."""
    fleet.tell(name, order(request_id, prompt, cached=cached, holder=holder))
    prefilled = await fleet.hears(name, Prefilled, lambda m: m.request_id == request_id)
    await fleet.hears("d", Finished, lambda m: m.request_id == request_id)
    return prefilled, tokens_of(fleet, request_id)


def tokens_of(fleet: Computing, request_id: str) -> list[int]:
    told = [m for m in fleet.heard["d"] if isinstance(m, Tokens) and m.request_id == request_id]
    return [token for one in told for token in one.ids]


async def test_tokens_are_those_of_the_model_alone_from_computed_held_and_fetched_state(
    nodes: Computing,
) -> None:
    expected = alone()
    computed, tokens = await answer(nodes, "a", "computed")
    assert (computed.cached_tokens, tokens) == (0, expected)
    held, tokens = await answer(nodes, "a", "held", cached=HIT_TOKENS)
    assert (held.cached_tokens, tokens) == (HIT_TOKENS, expected)
    fetched, tokens = await answer(nodes, "b", "fetched", cached=HIT_TOKENS, holder="a")
    assert (fetched.cached_tokens, tokens) == (HIT_TOKENS, expected)

    size = CONFIG.state_bytes(TOKENS) + CONFIG.layers * OVERHEAD_BYTES + TOKEN_BYTES
    assert size == parcel_bytes(CONFIG, TOKENS, answer=True)
    told = await nodes.telemetry("d")
    assert told.wire_landed_bytes == {"a": 2 * size, "b": size}  # S_kv(l), and each message's header and seal
    assert (await nodes.telemetry("b")).wire_landed_bytes == {"a": fetched.fetched_bytes}
    assert fetched.fetched_bytes == CONFIG.state_bytes(HIT_TOKENS) + CONFIG.layers * OVERHEAD_BYTES


def corrupted(offset: int, payload: bytes, earlier: bytes) -> bytes:
    half = len(payload) // 2
    return payload[:half] + bytes([payload[half] ^ 1]) + payload[half + 1 :]


def reordered(offset: int, payload: bytes, earlier: bytes) -> bytes:
    half = len(payload) // 2
    return payload[half:] + payload[:half]


def cut_off(offset: int, payload: bytes, earlier: bytes) -> bytes:
    half = len(payload) // 2
    return payload[:half] + bytes(len(payload) - half)


def replayed(offset: int, payload: bytes, earlier: bytes) -> bytes:
    return earlier[offset : offset + len(payload)]


@pytest.mark.parametrize(
    ("change", "frames"),
    [(corrupted, 1), (reordered, 1), (cut_off, 1), (replayed, 1), (replayed, 1000)],
    ids=["corrupted", "reordered", "cut_off", "replayed_in_part", "replayed_whole"],
)
async def test_a_state_that_was_changed_on_its_way_is_refused_and_counted_and_never_decoded(
    nodes: Computing, change: Change, frames: int
) -> None:
    """Replayed whole: another request's state, of the same length, with every seal intact."""
    await answer(nodes, "a", "another", prompt=PROMPT[::-1])
    nodes.proxy.changing(change, frames)
    nodes.tell("a", order("changed"))
    failed = await nodes.hears("d", AttemptFailed, lambda m: m.request_id == "changed")
    assert "refused" in failed.reason
    assert tokens_of(nodes, "changed") == []
    told = await nodes.telemetry("d")
    assert (told.refused_states, told.refused_frames, told.landing_bytes, told.running_requests) == (1, 0, 0, 0)

    nodes.proxy.changing(change, 0)
    assert (await answer(nodes, "a", "after"))[1] == alone()


async def test_aborts_and_changes_of_role_leave_nothing_and_change_nobody_s_tokens(
    nodes: Computing,
) -> None:
    nodes.tell("a", order("left", PROMPT * 8))
    nodes.tell("a", order("stays"))
    await asyncio.sleep(0.05)
    for name in ("a", "d"):
        nodes.tell(name, Cancel("left", 1))
    await nodes.hears("d", Finished, lambda m: m.request_id == "stays")
    assert tokens_of(nodes, "stays") == alone()
    assert tokens_of(nodes, "left") == []
    for name in ("a", "d"):
        told = await nodes.telemetry(name)
        assert (told.outbox_bytes, told.landing_bytes, told.open_transfers, told.running_requests) == (0, 0, 0, 0)

    for name, role in (("b", "decode"), ("b", "prefill")):
        nodes.tell(name, Convert(role, 0.0))
        assert await nodes.hears(name, Ready) == Ready(name, 1, role)
    _, tokens = await answer(nodes, "b", "converted")
    assert tokens == alone()


async def test_a_model_of_other_weights_is_not_understood(tmp_path: Path) -> None:
    async with running(tmp_path, b=2) as nodes:
        nodes.tell("b", order("foreign"))
        failed = await nodes.hears("d", AttemptFailed, lambda m: m.request_id == "foreign")
        assert "of another model" in failed.reason
        assert (await answer(nodes, "a", "own"))[1] == alone()
