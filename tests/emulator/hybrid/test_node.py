"""What a node's helper does beside the computing: never silent about what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from emulator.backend import Host
from emulator.backends.hybrid import node as nodes
from emulator.backends.hybrid.config import TINY
from emulator.backends.hybrid.model import HybridModel
from emulator.backends.hybrid.node import Landings, Node
from emulator.messages import Expect

MODEL = HybridModel.seeded(TINY, 1)


class Told:
    """A compute thread that computes nothing; what it is told is done at once."""

    def tell(self, call: Callable[[], None]) -> None:
        call()


def test_a_state_that_cannot_be_verified_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise MemoryError("no more memory")

    monkeypatch.setattr(nodes, "unpack", no_room)
    heard, stopped = list[Any](), list[str]()
    host, nothing = Host(heard.append, lambda: None, stopped.append), cast(Any, None)
    with ThreadPoolExecutor(1) as helper:
        node = Node(MODEL, MODEL.fingerprint, cast(Any, Told()), helper, nothing, host, Counter())
        landings = Landings(node, answer=True)
        landings.memory(Expect(7, 100, "p", 10), 100)
        landings.landed(7)
    assert stopped == ["MemoryError: no more memory"]
    assert heard == []
    assert landings.take(7) is None
