"""The thread in which a model computes: in order, one thing at a time, and never silent about what went wrong."""

from __future__ import annotations

import asyncio
import os
import threading

from emulator.backends.hybrid.thread import ComputeThread

PATIENCE_S = 20.0


async def test_work_is_done_in_order_on_its_core_and_told_on_the_loop() -> None:
    core = min(os.sched_getaffinity(0))
    thread = ComputeThread(core, lambda why: None)
    done: list[tuple[int, set[int]]] = []
    over = asyncio.Event()
    for i in range(3):
        thread.submit(lambda i=i: done.append((i, os.sched_getaffinity(0))))  # type: ignore[misc]
    thread.submit(lambda: thread.tell(over.set))
    await asyncio.wait_for(over.wait(), PATIENCE_S)
    assert done == [(i, {core}) for i in range(3)]
    assert thread.close(PATIENCE_S)


async def test_what_raises_is_told_and_the_rest_is_done() -> None:
    heard: list[str] = []
    thread = ComputeThread(None, heard.append)
    over = asyncio.Event()

    def wrong() -> None:
        raise RuntimeError("no more memory")

    thread.submit(wrong)
    thread.submit(lambda: thread.tell(over.set))
    await asyncio.wait_for(over.wait(), PATIENCE_S)
    assert heard == ["RuntimeError: no more memory"]
    assert thread.close(PATIENCE_S)


async def test_a_core_that_is_not_there_is_told() -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    ComputeThread(100_000, heard.put_nowait)
    assert "core 100000" in await asyncio.wait_for(heard.get(), PATIENCE_S)


async def test_what_was_not_begun_when_it_is_closed_is_not_done() -> None:
    thread = ComputeThread(None, lambda why: None)
    begun, go, late = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go.wait(PATIENCE_S)

    thread.submit(first)
    thread.submit(late.set)
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    assert not thread.close(0.01)
    go.set()
    assert thread.close(PATIENCE_S)
    assert not late.is_set()
