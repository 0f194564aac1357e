"""A prefill node's computing, in the order in which its two threads may meet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch

from emulator.backend import Host
from emulator.backends.hybrid.config import TINY
from emulator.backends.hybrid.held import cache_shape
from emulator.backends.hybrid.model import HybridModel
from emulator.backends.hybrid.node import Node
from emulator.backends.hybrid.parcel import parcel_bytes, unpack
from emulator.backends.hybrid.prefill import PrefillSide
from emulator.backends.hybrid.state import Expected
from emulator.clock import Clock
from emulator.computing import Compute, Computed, Keep, Lend, Sampling
from emulator.kvcache import NodePool
from emulator.messages import Transmit

MODEL = HybridModel.seeded(TINY, 1)
PROMPT = bytes(range(150))


class Threads:
    """A compute thread whose work, and what it tells the loop, are done when the test says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.told: list[Callable[[], None]] = []
        self.submit, self.tell = self.work.append, self.told.append

    def compute(self) -> None:
        while self.work:
            self.work.pop(0)()

    def loop(self) -> None:
        while self.told:
            self.told.pop(0)()


def side(
    threads: Threads, heard: list[Any], pool: NodePool | None = None, helper: ThreadPoolExecutor | None = None
) -> PrefillSide:
    host = Host(heard.append, lambda: None, lambda why: None)
    clock = Clock(time.monotonic_ns(), 1.0)
    node = Node(MODEL, MODEL.fingerprint, cast(Any, threads), cast(Any, helper), clock, host, Counter())
    return PrefillSide(node, pool)


ORDER = Compute("r", 1, PROMPT, (), 0, Sampling(), 1.0)


async def test_the_last_byte_does_not_leave_before_the_machine_knows_of_the_end() -> None:
    """A receiver that has all would answer, and its answer end a prefill that for its machine is still under way: it
    would wait for its end for ever."""
    threads, heard = Threads(), list[Any]()
    prefill = side(threads, heard)
    prefill.tell(ORDER)
    threads.compute()  # all is computed, and the loop has not yet heard of it
    parcel = prefill.source(Transmit("r", 1, "d", 7, 1, 1, 0.0, 1.0))  # as the receiver grants it
    whole = parcel_bytes(TINY, len(PROMPT), answer=True)
    assert 0 < parcel.ready_bytes() < whole
    assert heard == []
    threads.loop()
    assert parcel.ready_bytes() == whole
    assert [type(one) for one in heard] == [Computed]


async def test_a_prefix_that_is_lent_leaves_whole_as_the_state_after_its_blocks() -> None:
    shape, ids = cache_shape(TINY, 64), (1, 2)
    pool = NodePool(100 * shape.block_bytes, shape)
    threads = Threads()
    with ThreadPoolExecutor(1) as helper:
        prefill = side(threads, [], pool, helper)
        prefill.tell(Compute("r", 1, PROMPT, ids, 0, Sampling(), 1.0))
        threads.compute()
        changes = pool.commit(pool.begin(ids), ids)
        assert changes is not None
        prefill.tell(Keep("r", 1, ids, changes.added))
        prefill.tell(Lend("s", 1, ids))
        parcel = prefill.source(Transmit("s", 1, "q", 8, 1, 1, 0.0, 1.0))
    threads.loop()
    arrived, first = unpack(
        TINY, parcel.read(0, parcel.ready_bytes()), Expected(MODEL.fingerprint, 8, 128), answer=False
    )
    alone = MODEL.empty()
    MODEL.prefill(list(PROMPT[:128]), alone)
    assert first is None
    assert torch.equal(MODEL.decode([7], [arrived]), MODEL.decode([7], [alone]))
