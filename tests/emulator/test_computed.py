"""The machines beside a model that computes: what they ask of it, what its answers bring about, what they let go."""

from __future__ import annotations

from emulator.computed import ComputedDecode, ComputedPrefill
from emulator.computing import (
    BACKEND,
    Compute,
    Computed,
    ComputeMessage,
    Forget,
    Install,
    Join,
    Joined,
    Keep,
    Lend,
    Release,
    Sampling,
    Step,
    Stepped,
)
from emulator.kvcache import CacheShape, NodePool
from emulator.messages import (
    CONTROL,
    WIRE,
    Abort,
    Admitted,
    Announce,
    AttemptFailed,
    Cancel,
    Expect,
    Fetch,
    FetchDone,
    FetchGrant,
    FetchOffer,
    Finished,
    Grant,
    Hinder,
    Landed,
    Out,
    Prefill,
    Prefilled,
    Received,
    Tokens,
    Transmit,
)
from tests.emulator.drive import Linear, only

PROMPT = bytes(range(100))
SHAPE = CacheShape(block_tokens=10, block_bytes=100, snapshot_bytes=150)
IDS = tuple(range(1, 10))
WARM = Sampling(0.7, 0.9, 5, ("end",))


def asked(out: list[Out]) -> list[ComputeMessage]:
    return [message for to, message in out if to == BACKEND and isinstance(message, ComputeMessage)]


def order(request_id: str = "a", *, ids: tuple[int, ...] = ()) -> Prefill:
    return Prefill(request_id, 1, 100, 0, 4, "d", ids, prompt=PROMPT, sampling=WARM)


def prefill_node(*, blocks: int = 0, outbox_bytes: int = 10**6) -> ComputedPrefill:
    pool = NodePool(blocks * SHAPE.block_bytes, SHAPE) if blocks else None
    return ComputedPrefill("p", Linear(), pieces=4, outbox_bytes=outbox_bytes, pool=pool, token_base=70)


class TestPrefill:
    def test_computes_what_it_is_ordered_and_ends_when_that_is_done(self) -> None:
        node = prefill_node()
        out = node.handle(1.0, order())
        assert asked(out) == [Compute("a", 1, PROMPT, (), 0, WARM, 1.0)]
        assert only(out, Announce) == [Announce("a", 1, "p", 1000, 100, 4, WARM)]
        assert node.next_s() is None
        assert node.running_requests(2.0) == 1
        out = node.handle(5.0, Computed("a", 1, 1.5, 4.5))
        assert only(out, Prefilled) == [Prefilled("a", 1, 1.5, 4.5, 1000)]
        assert node.running_requests(5.0) == 0

    def test_the_next_one_begins_when_the_one_before_is_done(self) -> None:
        node = prefill_node()
        node.handle(0.0, order())
        assert asked(node.handle(0.1, order("b"))) == []
        assert [one.request_id for one in asked(node.handle(1.0, Computed("a", 1, 0.0, 1.0)))] == ["b"]  # type: ignore[attr-defined]

    def test_may_be_sent_while_it_is_computed(self) -> None:
        node = prefill_node()
        node.handle(0.0, order())
        (sent,) = only(node.handle(0.1, Grant("a", 1, 9)), Transmit)
        assert (sent.token, sent.kv_bytes) == (9, 1000)

    def test_lets_go_of_what_was_received(self) -> None:
        node = prefill_node()
        node.handle(0.0, order())
        node.handle(1.0, Computed("a", 1, 0.0, 1.0))
        assert asked(node.handle(2.0, Received("a", 1))) == [Forget("a", 1)]
        assert node.outbox_used == 0

    def test_what_is_cancelled_is_not_computed_to_its_end_and_its_end_changes_nothing(self) -> None:
        node = prefill_node()
        node.handle(0.0, order())
        node.handle(0.0, order("b"))
        out = node.handle(0.5, Cancel("a", 1))
        assert asked(out) == [Forget("a", 1), Compute("b", 1, PROMPT, (), 0, WARM, 1.0)]
        assert node.handle(0.6, Computed("a", 1, 0.0, 0.6)) == []
        assert node.running_requests(0.6) == 1

    def test_a_prefill_that_cannot_be_computed_fails_its_attempt(self) -> None:
        node = prefill_node()
        node.handle(0.0, order())
        out = node.handle(1.0, Computed("a", 1, 0.0, 1.0, "out of memory"))
        assert ("d", Abort("a", 1)) in out
        assert (CONTROL, AttemptFailed("a", 1, "out of memory")) in out
        assert node.outbox_used == 0

    def test_an_order_without_its_prompt_fails(self) -> None:
        out = prefill_node().handle(0.0, Prefill("a", 1, 100, 0, 4, "d", prompt=b"short"))
        assert [type(message) for _, message in out] == [AttemptFailed]

    def test_a_slow_node_says_so_to_whoever_computes(self) -> None:
        node = prefill_node()
        node.handle(0.0, Hinder(slowdown=3.0))
        (compute,) = asked(node.handle(0.0, order()))
        assert isinstance(compute, Compute)
        assert compute.slowdown == 3.0


class TestPrefixes:
    def test_what_is_held_is_reused_and_all_of_the_state_still_crosses(self) -> None:
        node = prefill_node(blocks=100)
        node.handle(0.0, order(ids=IDS))
        out = node.handle(1.0, Computed("a", 1, 0.0, 1.0))
        assert asked(out) == [Keep("a", 1, IDS, (IDS[-1],))]
        out = node.handle(2.0, order("b", ids=IDS))
        assert asked(out) == [Compute("b", 1, PROMPT, IDS, 9, WARM, 1.0)]
        assert only(out, Announce)[0].kv_bytes == 1000
        (done,) = only(node.handle(3.0, Computed("b", 1, 2.0, 3.0)), Prefilled)
        assert done.cached_tokens == 90

    def test_a_prefix_is_lent_and_let_go(self) -> None:
        node = prefill_node(blocks=100)
        node.handle(0.0, order(ids=IDS))
        node.handle(1.0, Computed("a", 1, 0.0, 1.0))
        out = node.handle(2.0, Fetch("b", 1, "q", IDS, 9))
        assert asked(out) == [Lend("b", 1, IDS)]
        assert only(out, FetchOffer)[0].kv_bytes == 9 * 100 + 150
        node.handle(2.1, FetchGrant("b", 1, 5))
        assert asked(node.handle(3.0, FetchDone("b", 1))) == [Forget("b", 1)]

    def test_a_prefix_that_has_landed_is_installed(self) -> None:
        node = prefill_node(blocks=100)
        node.handle(0.0, Prefill("a", 1, 100, 90, 4, "d", IDS, "h", PROMPT, WARM))
        out = node.handle(0.1, FetchOffer("a", 1, "h", 1050, 9))
        assert (WIRE, Expect(70, 1050, "h", 90)) in out
        out = node.handle(0.2, Landed(70))
        assert asked(out) == [Install(70, IDS), Compute("a", 1, PROMPT, IDS, 9, WARM, 1.0)]

    def test_whoever_keeps_what_the_pool_stands_for_is_told_what_it_evicts(self) -> None:
        pool = NodePool(12 * SHAPE.block_bytes, SHAPE)
        gone: list[tuple[tuple[int, ...], bool]] = []
        pool.on_evicted = lambda ids, snapshot: gone.append((ids, snapshot))
        pool.install(IDS[:8], 8)
        pool.install(tuple(range(101, 107)), 6)
        assert gone == [((8,), True), ((5, 6, 7, 8), False)]
        assert pool.present(IDS) == 4


def decode_node(*, slots: int = 2, interval: int | None = 1, landing_bytes: int = 10_000) -> ComputedDecode:
    return ComputedDecode("d", slots=slots, landing_bytes=landing_bytes, stream_interval=interval, token_base=40)


def admit(node: ComputedDecode, request_id: str, token: int, *, output: int = 4, at_s: float = 1.0) -> list[Out]:
    node.handle(at_s, Announce(request_id, 1, "p", 1000, 100, output, WARM))
    return node.handle(at_s, Landed(token))


class TestDecode:
    def test_what_has_landed_joins_and_its_first_token_leaves_when_it_is_there(self) -> None:
        node = decode_node()
        out = admit(node, "a", 40)
        assert asked(out) == [Join("a", 1, 40, 4, WARM)]
        assert only(out, Admitted) == [Admitted("a", 1, 1.0, 1.0)]
        assert only(out, Tokens) == []
        out = node.handle(1.1, Joined(40, ""))
        assert only(out, Tokens) == [Tokens("a", 1, 0, 1)]
        assert asked(out) == [Step((40,), 1.0)]

    def test_one_step_at_a_time_of_all_who_had_joined_when_it_began(self) -> None:
        node = decode_node()
        admit(node, "a", 40)
        node.handle(1.1, Joined(40, ""))
        admit(node, "b", 41, at_s=1.2)
        assert asked(node.handle(1.3, Joined(41, ""))) == []
        out = node.handle(1.5, Stepped(((40, ""),)))
        assert asked(out) == [Step((40, 41), 1.0)]
        assert only(out, Tokens) == [Tokens("a", 1, 1, 1)]

    def test_an_answer_ends_when_the_backend_says_so_and_its_slot_is_free_at_once(self) -> None:
        node = decode_node(slots=1)
        admit(node, "a", 40)
        admit(node, "b", 41)
        assert node.queued_requests == 1
        node.handle(1.1, Joined(40, ""))
        out = node.handle(1.5, Stepped(((40, "stop"),)))
        assert only(out, Finished) == [Finished("a", 1, 1.5, 1.5, 2, "stop")]
        assert asked(out) == [Release(40), Join("b", 1, 41, 4, WARM)]

    def test_an_answer_of_one_token_ends_with_it(self) -> None:
        node = decode_node()
        admit(node, "a", 40, output=1)
        out = node.handle(1.1, Joined(40, "length"))
        assert only(out, Finished) == [Finished("a", 1, 1.1, 1.1, 1, "length")]
        assert asked(out) == [Release(40)]
        assert node.running_requests(1.1) == 0

    def test_tokens_stream_at_the_interval_and_the_rest_at_the_end(self) -> None:
        node = decode_node(interval=2)
        admit(node, "a", 40)
        told = only(node.handle(1.0, Joined(40, "")), Tokens)
        for at_s, ended in ((1.1, ""), (1.2, ""), (1.3, "length")):
            told += only(node.handle(at_s, Stepped(((40, ended),))), Tokens)
        assert [(one.first, one.count) for one in told] == [(0, 1), (1, 2), (3, 1)]

    def test_who_is_cancelled_is_let_go_at_any_stage_and_what_comes_of_them_later_is_nobodys(self) -> None:
        node = decode_node(slots=1)
        for request_id, token in (("a", 40), ("b", 41)):
            admit(node, request_id, token)
        node.handle(1.1, Joined(40, ""))
        assert asked(node.handle(1.2, Cancel("b", 1))) == [Release(41)]
        assert node.landing_used == 0
        assert asked(node.handle(1.3, Cancel("a", 1))) == [Release(40)]
        assert node.handle(1.4, Stepped(((40, ""),))) == []
        assert node.handle(1.4, Joined(41, "")) == []
        assert node.running_requests(1.4) == 0
        assert asked(admit(node, "c", 42)) == [Join("c", 1, 42, 4, WARM)]
        assert asked(node.handle(1.5, Joined(42, ""))) == [Step((42,), 1.0)]
