"""What the tests of the machines share: costs that are easy to add up, nodes, orders, and how to let time pass."""

from __future__ import annotations

import math
from typing import Any

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.messages import (
    WAKE,
    Announce,
    Out,
    Prefill,
)

STEP_S = 0.5


class Linear:
    """A prefill of l tokens takes l / 100 seconds and leaves 10 l bytes of KV."""

    def t_prefill(self, tokens: int) -> float:
        return tokens / 100

    def s_kv(self, tokens: int) -> float:
        return 10.0 * tokens


def prefill_node(*, outbox_bytes: int = 10**9, pieces: int = 4) -> PrefillInstance:
    return PrefillInstance("p", Linear(), pieces=pieces, outbox_bytes=outbox_bytes)


def decode_node(**options: Any) -> DecodeInstance:
    return DecodeInstance("d", **{"slots": 2, "step_s": STEP_S, "landing_bytes": 1000, **options})


def order(request_id: str = "a", tokens: int = 100, *, cached: int = 0, attempt: int = 1, node: str = "d") -> Prefill:
    return Prefill(request_id, attempt, tokens, cached, 4, node)


def offer(
    request_id: str = "a", kv_bytes: int = 100, *, output: int = 4, attempt: int = 1, node: str = "p"
) -> Announce:
    return Announce(request_id, attempt, node, kv_bytes, 10, output)


def only(out: list[Out], kind: type) -> list[Any]:
    """The messages of one kind, in order."""
    return [message for _, message in out if type(message) is kind]


def run_until(machine: PrefillInstance | DecodeInstance, until_s: float = math.inf) -> list[tuple[float, Out]]:
    """Wake the machine whenever it asks, at the time it asked for."""
    seen = []
    while (due_s := machine.next_s()) is not None and due_s <= until_s:
        seen += [(due_s, out) for out in machine.handle(due_s, WAKE)]
    return seen


def assert_prefill_idle(node: PrefillInstance) -> None:
    assert (node.outbox_used, node.queued_tokens, node.queued_requests, node.running_requests(math.inf)) == (0, 0, 0, 0)
    assert node.next_s() is None
    assert not node._unsent


def assert_decode_idle(node: DecodeInstance) -> None:
    assert node.running_requests(math.inf) == 0
    assert (node.landing_used, node.waiting_grants, node.queued_requests) == (0, 0, 0)
    assert node.next_s() is None
    assert [node._waiting, node._coming, node._landed, node._decoding] == [{}, {}, {}, {}]
