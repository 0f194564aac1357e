"""Workers as processes on loopback, under a control that is this test: cached prefixes between them, and new roles."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from emulator.channel import Channel, Dialler
from emulator.kvcache import CacheShape
from emulator.messages import (
    CONTROL,
    Admitted,
    Announce,
    AnyMessage,
    AttemptFailed,
    Bring,
    Brought,
    CacheChanged,
    Convert,
    Epoch,
    Finished,
    Grant,
    Hello,
    Prefill,
    Prefilled,
    Ready,
    Telemetry,
)
from emulator.profile import load_profile
from emulator.transfer import wire_bytes
from emulator.worker import Config, Peer
from tests.wire.loopback import PATIENCE_S, REPOSITORY, free_port

PROFILE = load_profile("h20-1t")
BLOCK_TOKENS, BLOCKS = 512, 20
HIT_TOKENS = BLOCKS * BLOCK_TOKENS
TOKENS = HIT_TOKENS + 1500
IDS = tuple(range(1, BLOCKS + 1))
SHAPE = CacheShape.of(PROFILE.s_kv, BLOCK_TOKENS, first_tokens=PROFILE.first_tokens, last_tokens=PROFILE.last_tokens)
PREFIX_BYTES = BLOCKS * SHAPE.block_bytes + SHAPE.snapshot_bytes
TIME_SCALE, BYTE_SCALE = 50.0, 1e-4
TIMER_S = 0.002  # uvloop counts its timers in whole milliseconds
ROLES = {"a": "prefill", "b": "prefill", "d": "decode"}

M = TypeVar("M", bound=AnyMessage)


class Fleet:
    """Two prefill workers and a decode worker; what each told control."""

    patience_s = PATIENCE_S

    def __init__(self, folder: Path) -> None:
        self.secret = "secret"
        self.heard: dict[str, list[AnyMessage]] = {name: [] for name in ROLES}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.links: dict[str, Dialler] = {}
        self._folder = folder
        self._news = asyncio.Event()
        self.ports = {name: (free_port(), free_port()) for name in ROLES}

    def config(self, name: str) -> Config:
        names = list(ROLES)
        return Config(
            name=name,
            site="pd",
            role=ROLES[name],  # type: ignore[arg-type]
            host="127.0.0.1",
            control_port=self.ports[name][0],
            data_port=self.ports[name][1],
            metrics_port=free_port(),
            secret=self.secret,
            ready_file=str(self._folder / f"{name}.ready"),
            profile="h20-1t",
            decode_step_s=0.01,
            decode_step=None,
            decode_slots=4,
            pieces=4,
            outbox_bytes=1 << 36,
            landing_bytes=1 << 36,
            cache_bytes=1 << 36,
            block_tokens=BLOCK_TOKENS,
            connections=2,
            stream_interval=32,
            time_scale=TIME_SCALE,
            byte_scale=BYTE_SCALE,
            telemetry_s=1.0,
            log_level="info",
            peers={
                other: Peer("127.0.0.1", *self.ports[other], ROLES[other])  # type: ignore[arg-type]
                for other in names
                if other != name
            },
            dials=tuple(names[names.index(name) + 1 :]),
        )

    def start(self, name: str) -> None:
        config = self.config(name)
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(msgspec.to_builtins(config)))
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "emulator.worker", "--config", str(path)],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
            )

    async def begin(self) -> None:
        """Everybody up, connected, and at epoch 1."""
        for name in ROLES:
            self.start(name)
        for name in ROLES:
            up = asyncio.Event()
            self.links[name] = Dialler(
                name,
                "127.0.0.1",
                self.ports[name][0],
                Hello(CONTROL, self.secret),
                lambda channel, message: self._hear(channel.peer, message),
                lambda channel, up=up: up.set(),  # type: ignore[misc]
                lambda node, reason: None,
            )
            await asyncio.wait_for(up.wait(), self.patience_s)
            await self._until(lambda name=name: (self._folder / f"{name}.ready").exists())  # type: ignore[misc]
        t0_ns = time.monotonic_ns()
        for name, role in ROLES.items():
            self.tell(name, Epoch(1, t0_ns))
            assert await self.hears(name, Ready) == Ready(name, 1, role)

    async def end(self) -> None:
        for link in self.links.values():
            await link.close()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def tell(self, name: str, message: AnyMessage) -> None:
        assert self.links[name].send(message)

    async def hears(self, name: str, kind: type[M], holds: Callable[[M], object] = lambda message: True) -> M:
        """The first message of the kind from a node, of which that holds; it is forgotten then."""
        found: list[M] = []

        def look() -> bool:
            found.extend(m for m in self.heard[name] if isinstance(m, kind) and holds(m))
            return bool(found)

        await self._until(look, f"no {kind.__name__} from {name}")
        self.heard[name].remove(found[0])
        return found[0]

    async def prefill(
        self, name: str, request_id: str, *, cached: int = 0, holder: str = "", to: str = "d"
    ) -> Prefilled:
        """One prompt of TOKENS, prefilled at a node and decoded at another to its end."""
        self.tell(name, Prefill(request_id, 1, TOKENS, cached, 4, to, IDS, holder))
        prefilled = await self.hears(name, Prefilled, lambda m: m.request_id == request_id)
        finished = await self.hears(to, Finished, lambda m: m.request_id == request_id)
        assert finished.tokens == 4
        return prefilled

    async def telemetry(self, name: str) -> Telemetry:
        """A new account of itself."""
        self.heard[name] = [m for m in self.heard[name] if type(m) is not Telemetry]
        return await self.hears(name, Telemetry)

    def _hear(self, name: str, message: AnyMessage) -> None:
        self.heard[name].append(message)
        self._news.set()

    async def _until(self, holds: Callable[[], object], otherwise: str = "") -> None:
        deadline = time.monotonic() + self.patience_s
        while not holds():
            assert time.monotonic() < deadline, f"{otherwise}: {self.heard} {self._logs()}"
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), 0.05)
            except TimeoutError:
                continue

    def _logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.log")))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        await fleet.begin()
        yield fleet
    finally:
        await fleet.end()


async def test_a_prefix_is_brought_to_a_node_that_no_request_of_it_has_come_to_yet(fleet: Fleet) -> None:
    await fleet.prefill("a", "first")
    fleet.tell("b", Bring("copy-1", 0, IDS, "a"))
    brought = await fleet.hears("b", Brought)
    assert (brought.request_id, brought.attempt) == ("copy-1", 0)
    assert brought.kv_bytes == PREFIX_BYTES
    assert await fleet.hears("b", CacheChanged) == CacheChanged("b", (IDS[-1],), ())
    second = await fleet.prefill("b", "second", cached=HIT_TOKENS)
    assert (second.cached_tokens, second.fetched_bytes) == (HIT_TOKENS, 0)

    fleet.tell("b", Bring("copy-2", 0, IDS, "a"))
    assert await fleet.hears("b", Brought) == Brought("copy-2", 0, 0)  # it is there already


async def test_a_cached_prefix_is_fetched_from_the_node_that_holds_it_and_only_the_rest_is_computed(
    fleet: Fleet,
) -> None:
    first = await fleet.prefill("a", "first")
    assert (first.cached_tokens, first.kv_bytes) == (0, round(PROFILE.s_kv(TOKENS)))
    assert await fleet.hears("a", CacheChanged) == CacheChanged("a", (IDS[-1],), ())

    fetched = await fleet.prefill("b", "fetched", cached=HIT_TOKENS, holder="a")
    assert fetched.cached_tokens == HIT_TOKENS
    assert fetched.fetched_bytes == PREFIX_BYTES
    assert fetched.kv_bytes == round(PROFILE.s_kv(TOKENS - HIT_TOKENS))
    assert fetched.end_s - fetched.start_s == pytest.approx(PROFILE.t_prefill(TOKENS - HIT_TOKENS))
    assert await fleet.hears("b", CacheChanged) == CacheChanged("b", (IDS[-1],), ())
    wire = wire_bytes(PREFIX_BYTES, BYTE_SCALE)
    told = await fleet.telemetry("b")
    assert (told.wire_landed_bytes, told.kv_landed_bytes) == ({"a": wire}, {"a": round(wire / BYTE_SCALE)})

    again = await fleet.prefill("b", "again", cached=HIT_TOKENS, holder="a")
    assert again.cached_tokens == HIT_TOKENS
    assert (await fleet.telemetry("b")).wire_landed_bytes == {"a": wire}  # it is there already
    assert (await fleet.telemetry("a")).wire_landed_bytes == {}


async def test_a_prefix_whose_holder_is_dead_or_has_nothing_is_computed(fleet: Fleet) -> None:
    assert (await fleet.prefill("b", "missed", cached=HIT_TOKENS, holder="a")).cached_tokens == 0
    fleet.processes["b"].kill()
    fleet.processes["b"].wait()
    assert (await fleet.prefill("a", "lost", cached=HIT_TOKENS, holder="b")).cached_tokens == 0


async def test_a_worker_changes_its_role_and_back_and_serves_after_each(fleet: Fleet) -> None:
    await fleet.prefill("a", "before")
    sums = [await fleet.telemetry("a")]
    asked_s = time.monotonic()
    fleet.tell("a", Convert("decode", 10.0))
    assert await fleet.hears("a", Ready) == Ready("a", 1, "decode")
    assert time.monotonic() - asked_s >= 10.0 / TIME_SCALE - TIMER_S

    assert (await fleet.prefill("b", "missed", cached=HIT_TOKENS, holder="a", to="a")).cached_tokens == 0
    sums.append(await fleet.telemetry("a"))
    assert sums[-1].kv_landed_bytes["b"] == pytest.approx(PROFILE.s_kv(TOKENS), abs=2 / BYTE_SCALE)

    fleet.tell("a", Convert("prefill", 1.0))
    assert await fleet.hears("a", Ready) == Ready("a", 1, "prefill")
    assert (await fleet.prefill("a", "empty")).cached_tokens == 0
    assert (await fleet.prefill("a", "full")).cached_tokens == HIT_TOKENS
    sums.append(await fleet.telemetry("a"))

    assert [one.kv_sent_bytes for one in sums] == sorted(one.kv_sent_bytes for one in sums)
    assert sums[-1].kv_sent_bytes > sums[0].kv_sent_bytes > 0
    assert sums[-1].kv_landed_bytes == sums[-2].kv_landed_bytes
    assert [one.late_max_s for one in sums] == sorted(one.late_max_s for one in sums)


async def test_two_workers_exchange_their_roles(fleet: Fleet) -> None:
    """KV goes the way that nobody connected at the start; the next epoch begins as the fleet is configured."""
    for name, role in (("a", "decode"), ("d", "prefill")):
        fleet.tell(name, Convert(role, 0.0))
        assert await fleet.hears(name, Ready) == Ready(name, 1, role)
    assert (await fleet.prefill("d", "first", to="a")).cached_tokens == 0
    assert (await fleet.prefill("d", "second", to="a")).cached_tokens == HIT_TOKENS
    assert (await fleet.prefill("b", "third", cached=HIT_TOKENS, holder="d", to="a")).cached_tokens == HIT_TOKENS

    reload_s = 20.0
    fleet.tell("a", Convert("prefill", reload_s))  # an epoch ends what is under way
    for name, role in ROLES.items():
        fleet.tell(name, Epoch(2, time.monotonic_ns()))
        assert await fleet.hears(name, Ready) == Ready(name, 2, role)
    assert (await fleet.prefill("a", "fourth")).cached_tokens == 0
    await asyncio.sleep(1.5 * reload_s / TIME_SCALE)
    assert not any(type(m) is Ready for m in fleet.heard["a"])


async def test_a_node_that_dials_again_has_lost_what_was_under_way(fleet: Fleet) -> None:
    """The end that is dialled may be told later than the dialler that their connection was lost."""
    granted = asyncio.Event()

    def on_message(channel: Channel, message: AnyMessage) -> None:
        if type(message) is Grant:
            granted.set()

    async def dial() -> Channel:
        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: Channel(on_message, lambda channel, reason: None, hello=Hello("b", "secret")),
            "127.0.0.1",
            fleet.ports["d"][0],
        )
        return channel

    fleet.processes["b"].kill()
    fleet.processes["b"].wait()
    first = await dial()
    first.send(Announce("r", 1, "b", 1000, TOKENS, 4))
    await asyncio.wait_for(granted.wait(), PATIENCE_S)
    second = await dial()
    failed: Any = await fleet.hears("d", AttemptFailed)
    assert (failed.request_id, failed.attempt) == ("r", 1)
    assert "b was lost" in failed.reason
    assert not any(type(m) is Admitted for m in fleet.heard["d"])
    for channel in (first, second):
        channel.close()
