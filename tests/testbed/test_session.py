"""The limits within which a live testbed calls a policy, and lets answers wait for their clients."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator.clock import Clock
from emulator.messages import Tokens
from testbed import session as sessions
from testbed.openai_api import Ask
from testbed.scheduler.api import Note, SystemView
from testbed.scheduler.baselines import Homogeneous
from testbed.session import BoundedCall, PolicyQuitError, PolicyTooSlowError, Session
from testbed.told import Told


@pytest.fixture
def bounded() -> Iterator[BoundedCall]:
    """With a limit that only a policy which hangs exceeds, however busy the machine."""
    before = signal.getsignal(signal.SIGALRM)
    yield BoundedCall(2.0)
    signal.signal(signal.SIGALRM, before)


class Looks(Homogeneous):
    """It asks for one thing, then does what it is given, and asks for another."""

    def __init__(self, between: Any) -> None:
        self._between = between

    def tick(self, view: SystemView) -> Iterator[Note]:
        yield Note("threshold", 1.0, 2.0, "first")
        self._between()
        yield Note("threshold", 2.0, 3.0, "second")


def test_what_a_policy_asks_for_on_the_way_is_all_there(bounded: BoundedCall) -> None:
    actions = bounded.tick(Looks(lambda: None), SystemView({}, 1e9))
    assert [action.trigger for action in actions] == ["first", "second"]


def test_one_that_hangs_on_the_way_is_cut_off(bounded: BoundedCall) -> None:
    bounded.limit_s = 0.02
    with pytest.raises(PolicyTooSlowError, match="not done looking around"):
        bounded.tick(Looks(lambda: time.sleep(5)), SystemView({}, 1e9))


def test_one_that_would_end_the_process_on_the_way_only_fails(bounded: BoundedCall) -> None:
    def quit_() -> None:
        raise SystemExit(3)

    with pytest.raises(PolicyQuitError, match="SystemExit: 3"):
        bounded.tick(Looks(quit_), SystemView({}, 1e9))


class StillControl:
    """A control in which nothing happens."""

    changes: tuple[()] = ()

    def next_s(self) -> float:
        return 1e6

    def handle(self, now_s: float, event: object) -> list[Any]:
        return []

    def is_current(self, request_id: str, attempt: int) -> bool:
        return True


async def test_no_more_than_so_many_tokens_wait_for_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_UNREAD", 3)
    control: Any = StillControl()
    told = Told("homogeneous", {}, {})
    session = Session("one", Clock(time.monotonic_ns(), 1.0), control, told, lambda node, message: True, tmp_path)
    stream = session.arrive("r", Ask("prfaas", False, 1, 100, True, False))
    unread = []
    stream.on_unread = lambda: unread.append(stream.queue.qsize())
    for k in range(5):
        session.node_message("pd-d-0", Tokens("r", 1, k, 1, "x"))
    assert unread == [3, 3]
    assert stream.queue.qsize() == 3
    session.close()
