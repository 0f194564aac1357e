"""A prefill instance with a pool: what it reuses, what it fetches from another, what it lends, and what is freed."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.kvcache import CacheShape, NodePool
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    Abort,
    Announce,
    AnyMessage,
    AttemptFailed,
    Bring,
    Brought,
    CacheChanged,
    Cancel,
    Convert,
    Damaged,
    Expect,
    Fetch,
    FetchDone,
    FetchGrant,
    FetchMiss,
    FetchOffer,
    Grant,
    Landed,
    PeerLost,
    Prefill,
    Prefilled,
    Received,
    Refuse,
    StopTransmit,
    Transmit,
    Unexpect,
)
from tests.emulator.drive import Linear, assert_prefill_idle, decode_node, only

SHAPE = CacheShape(block_tokens=10, block_bytes=100, snapshot_bytes=150)
IDS = tuple(range(1, 9))
PREFIX_BYTES = 8 * 100 + 150
TOKENS = 85


def node(name: str = "p", *, blocks: int = 100, outbox_bytes: int = 10**9, holding: int = 0) -> PrefillInstance:
    """A node with room for so many blocks, of which a prompt's first ones, `holding`, are held and usable."""
    pool = NodePool(blocks * SHAPE.block_bytes, SHAPE)
    pool.install(IDS[:holding], holding)
    return PrefillInstance(name, Linear(), pieces=4, outbox_bytes=outbox_bytes, pool=pool, token_base=70)


def order(
    request_id: str = "a", *, tokens: int = TOKENS, cached: int = 0, holder: str = "", ids: tuple[int, ...] = IDS
) -> Prefill:
    return Prefill(request_id, 1, tokens, cached, 4, "d", ids, holder)


def pool_of(node: PrefillInstance) -> NodePool:
    assert node.pool is not None
    return node.pool


def assert_nothing_held(node: PrefillInstance) -> None:
    assert_prefill_idle(node)
    assert pool_of(node).referenced_blocks == 0
    pool_of(node).check()


def prefill(node: PrefillInstance, now_s: float, message: Prefill) -> list[Any]:
    """Prefill one prompt and have its KV received; all that was emitted."""
    out = node.handle(now_s, message)
    due_s = node.next_s()
    assert due_s is not None
    out += node.handle(due_s, WAKE)
    return out + node.handle(due_s, Received(message.request_id, message.attempt))


class TestReuse:
    def test_the_first_prompt_computes_all_and_is_kept(self) -> None:
        machine = node()
        out = prefill(machine, 0.0, order())
        assert out == [
            ("d", Announce("a", 1, "p", 850, TOKENS, 4)),
            (CONTROL, Prefilled("a", 1, 0.0, 0.85, 850, 0)),
            (CONTROL, CacheChanged("p", (8,), ())),
        ]
        assert pool_of(machine).match(IDS) == 8
        assert_nothing_held(machine)

    @pytest.mark.parametrize("believed", [0, 40, 80])
    def test_what_the_pool_holds_is_reused_whatever_control_believed(self, believed: int) -> None:
        machine = node(holding=6)
        out = prefill(machine, 1.0, order(cached=believed))
        assert only(out, Announce)[0].kv_bytes == 250
        assert only(out, Prefilled) == [Prefilled("a", 1, 1.0, 1.25, 250, 60)]
        assert_nothing_held(machine)

    def test_what_control_wrongly_believed_is_computed(self) -> None:
        (done,) = only(prefill(node(), 0.0, order(cached=80)), Prefilled)
        assert (done.cached_tokens, done.kv_bytes, done.end_s) == (0, 850, 0.85)

    def test_a_prompt_is_never_reused_to_its_last_token(self) -> None:
        (done,) = only(prefill(node(holding=8), 0.0, order(tokens=80)), Prefilled)
        assert done.cached_tokens < 80

    def test_the_hit_is_that_of_the_start_and_not_of_the_arrival(self) -> None:
        machine = node()
        machine.handle(0.0, order("a"))
        machine.handle(0.1, order("b"))
        machine.handle(0.85, WAKE)
        assert machine.next_s() == pytest.approx(0.85 + 0.05)

    def test_a_prompt_without_blocks_is_neither_reused_nor_kept(self) -> None:
        machine = node(holding=8)
        out = prefill(machine, 0.0, order(cached=80, ids=()))
        assert only(out, Prefilled) == [Prefilled("a", 1, 0.0, 0.85, 850, 0)]
        assert only(out, CacheChanged) == []

    def test_what_is_evicted_for_it_is_told(self) -> None:
        """10 blocks for the first prompt and its snapshot; the second's KV to send needs 9 of 12."""
        machine = node(blocks=12, holding=8)
        out = machine.handle(0.0, order(ids=(101, 102)))
        assert only(out, CacheChanged) == [CacheChanged("p", (), (8,))]

    def test_the_hit_is_not_evicted_while_it_is_used(self) -> None:
        machine = node(blocks=12, holding=8)
        machine.handle(0.0, order())
        assert pool_of(machine).match(IDS) == 8
        assert pool_of(machine).referenced_blocks == 8 + 2 + 1

    @pytest.mark.parametrize("end", [Cancel("a", 1), Refuse("a", 1, ""), PeerLost("d")])
    def test_a_running_prefill_that_ends_early_holds_nothing_and_leaves_nothing(self, end: AnyMessage) -> None:
        machine = node(holding=4)
        machine.handle(0.0, order())
        machine.handle(0.1, end)
        assert pool_of(machine).match(IDS) == 4
        assert_nothing_held(machine)


class TestTransferCache:
    """KV to be sent has room in the pool from the start of its prefill to the end of its transfer."""

    def test_holds_room_until_it_is_received(self) -> None:
        machine = node()
        machine.handle(0.0, order())
        machine.handle(0.85, WAKE)
        assert pool_of(machine).transfer_blocks == 9
        machine.handle(2.0, Received("a", 1))
        assert_nothing_held(machine)

    @pytest.mark.parametrize("end", [Cancel("a", 1), Refuse("a", 1, ""), PeerLost("d")])
    def test_frees_it_however_it_ends(self, end: AnyMessage) -> None:
        machine = node()
        machine.handle(0.0, order())
        machine.handle(0.85, WAKE)
        machine.handle(0.9, Grant("a", 1, 5))
        machine.handle(1.0, end)
        assert_nothing_held(machine)

    def test_without_room_the_next_prefill_waits_for_it(self) -> None:
        machine = node(blocks=15)
        machine.handle(0.0, order("a", ids=()))
        machine.handle(0.0, order("b", ids=()))
        assert only(machine.handle(0.85, WAKE), Announce) == []
        assert machine.queued_requests == 1
        assert [m.request_id for m in only(machine.handle(3.0, Received("a", 1)), Announce)] == ["b"]
        assert machine.next_s() == 3.85

    def test_one_that_is_alone_starts_without_room(self) -> None:
        machine = node(blocks=5)
        prefill(machine, 0.0, order())
        assert_nothing_held(machine)


class TestTheRequester:
    def at_stage(self, stage: str, **options: Any) -> PrefillInstance:
        """A node whose "a" waits for what it asked "h" for, or that has been granted."""
        machine = node(**options)
        machine.handle(0.0, order(cached=80, holder="h"))
        if stage == "granted":
            machine.handle(0.1, FetchOffer("a", 1, "h", PREFIX_BYTES, 8))
        return machine

    def test_asks_the_holder_at_once_and_does_not_start(self) -> None:
        machine = node()
        assert machine.handle(0.0, order(cached=60, holder="h")) == [("h", Fetch("a", 1, "p", IDS[:6], 6))]
        assert machine.next_s() is None

    @pytest.mark.parametrize(
        ("holder", "cached", "holding"), [("", 60, 0), ("p", 60, 0), ("h", 60, 6), ("h", 60, 8), ("h", 0, 0)]
    )
    def test_asks_nobody_where_there_is_nothing_to_gain(self, holder: str, cached: int, holding: int) -> None:
        out = node(holding=holding).handle(0.0, order(cached=cached, holder=holder))
        assert [type(m) for _, m in out] == [Announce]

    def test_expects_the_bytes_before_it_grants_them(self) -> None:
        machine = self.at_stage("asked")
        assert machine.handle(0.1, FetchOffer("a", 1, "h", PREFIX_BYTES, 8)) == [
            (WIRE, Expect(70, PREFIX_BYTES, "h", 80)),
            ("h", FetchGrant("a", 1, 70)),
        ]
        assert pool_of(machine).transfer_blocks == 10

    def test_what_is_evicted_for_the_bytes_is_told(self) -> None:
        machine = self.at_stage("asked", blocks=12)
        pool_of(machine).install((101, 102), 2)
        out = machine.handle(0.1, FetchOffer("a", 1, "h", PREFIX_BYTES, 8))
        assert only(out, CacheChanged) == [CacheChanged("p", (), (102,))]

    def test_lands_and_starts_with_what_has_landed(self) -> None:
        machine = self.at_stage("granted")
        assert machine.handle(0.5, Landed(70)) == [
            (CONTROL, CacheChanged("p", (8,), ())),
            ("h", FetchDone("a", 1)),
            ("d", Announce("a", 1, "p", 50, TOKENS, 4)),
        ]
        assert only(machine.handle(0.55, WAKE), Prefilled) == [Prefilled("a", 1, 0.5, 0.55, 50, 80, PREFIX_BYTES)]
        machine.handle(1.0, Received("a", 1))
        assert_nothing_held(machine)

    def test_what_came_is_told_of_one_attempt_and_not_of_the_next(self) -> None:
        machine = self.at_stage("granted")
        machine.handle(0.5, Landed(70))
        machine.handle(0.52, Cancel("a", 1))
        (done,) = only(prefill(machine, 1.0, Prefill("a", 1, TOKENS, 80, 4, "d", IDS)), Prefilled)
        assert (done.cached_tokens, done.fetched_bytes) == (80, 0)

    def test_what_is_behind_it_and_ready_goes_first(self) -> None:
        machine = self.at_stage("granted")
        out = machine.handle(0.2, order("b", ids=()))
        assert [m.request_id for m in only(out, Announce)] == ["b"]
        machine.handle(0.3, order("c", ids=()))
        machine.handle(0.5, Landed(70))
        (start,) = only(machine.handle(1.05, WAKE), Announce)
        assert start.request_id == "a"  # ready again, and first in the queue

    @pytest.mark.parametrize(
        ("end", "tells"),
        [
            (FetchMiss("a", 1), []),
            (PeerLost("h"), []),
            (Damaged(70, "checksum"), [("h", FetchDone("a", 1))]),
        ],
    )
    def test_computes_what_does_not_come(self, end: AnyMessage, tells: list[Any]) -> None:
        machine = self.at_stage("granted")
        assert machine.handle(0.5, end) == [
            (WIRE, Unexpect(70)),
            *tells,
            ("d", Announce("a", 1, "p", 850, TOKENS, 4)),
        ]
        machine.handle(1.35, WAKE)
        machine.handle(2.0, Received("a", 1))
        assert_nothing_held(machine)

    @pytest.mark.parametrize("end", [FetchMiss("a", 1), PeerLost("h")])
    def test_computes_what_was_never_offered(self, end: AnyMessage) -> None:
        assert self.at_stage("asked").handle(0.5, end) == [("d", Announce("a", 1, "p", 850, TOKENS, 4))]

    def test_gives_up_what_finds_no_room(self) -> None:
        machine = self.at_stage("asked", blocks=9)
        assert machine.handle(0.5, FetchOffer("a", 1, "h", PREFIX_BYTES, 8)) == [
            ("h", FetchDone("a", 1)),
            ("d", Announce("a", 1, "p", 850, TOKENS, 4)),
        ]

    def test_gives_up_an_offer_of_no_more_than_it_holds(self) -> None:
        machine = self.at_stage("asked", holding=5)
        out = machine.handle(0.5, FetchOffer("a", 1, "h", 650, 5))
        assert out == [("h", FetchDone("a", 1)), ("d", Announce("a", 1, "p", 350, TOKENS, 4))]

    def test_takes_less_than_it_asked_for_if_it_is_more_than_it_holds(self) -> None:
        machine = self.at_stage("asked", holding=5)
        machine.handle(0.5, FetchOffer("a", 1, "h", 750, 6))
        assert only(machine.handle(0.6, Landed(70)), Announce)[0].kv_bytes == 250

    @pytest.mark.parametrize(("stage", "withdrawn"), [("asked", []), ("granted", [(WIRE, Unexpect(70))])])
    def test_frees_all_when_the_attempt_is_over(self, stage: str, withdrawn: list[Any]) -> None:
        machine = self.at_stage(stage)
        assert machine.handle(0.5, Cancel("a", 1)) == [*withdrawn, ("h", FetchDone("a", 1))]
        assert_nothing_held(machine)

    @pytest.mark.parametrize(
        ("late", "answer"),
        [
            (FetchOffer("a", 1, "h", PREFIX_BYTES, 8), [("h", FetchDone("a", 1))]),
            (FetchMiss("a", 1), []),
            (Landed(70), []),
            (Damaged(70, ""), []),
            (PeerLost("h"), []),
        ],
    )
    def test_an_attempt_that_is_over_takes_nothing_more(self, late: AnyMessage, answer: list[Any]) -> None:
        machine = self.at_stage("granted")
        machine.handle(0.5, Cancel("a", 1))
        assert machine.handle(0.6, late) == answer
        assert_nothing_held(machine)

    def test_no_two_fetches_have_one_token(self) -> None:
        machine = self.at_stage("granted")
        machine.handle(0.2, order("b", cached=80, holder="h"))
        assert only(machine.handle(0.3, FetchOffer("b", 1, "h", PREFIX_BYTES, 8)), FetchGrant)[0].token == 71


class TestOrdered:
    """Control has a prefix brought that no prefill waits for."""

    ORDER = Bring("copy-1", 0, IDS, "h")

    def at_stage(self, stage: str, **options: Any) -> PrefillInstance:
        machine = node(**options)
        machine.handle(0.0, self.ORDER)
        if stage == "granted":
            machine.handle(0.1, FetchOffer("copy-1", 0, "h", PREFIX_BYTES, 8))
        return machine

    def test_it_is_asked_for_like_any_other(self) -> None:
        assert node().handle(0.0, self.ORDER) == [("h", Fetch("copy-1", 0, "p", IDS, 8))]

    def test_it_is_kept_and_its_end_is_told(self) -> None:
        machine = self.at_stage("granted")
        assert machine.handle(0.5, Landed(70)) == [
            (CONTROL, CacheChanged("p", (8,), ())),
            ("h", FetchDone("copy-1", 0)),
            (CONTROL, Brought("copy-1", 0, PREFIX_BYTES)),
        ]
        assert pool_of(machine).match(IDS) == 8
        assert_nothing_held(machine)

    def test_what_is_here_already_is_not_brought(self) -> None:
        assert node(holding=8).handle(0.0, self.ORDER) == [(CONTROL, Brought("copy-1", 0, 0))]

    def test_prefills_go_on_meanwhile(self) -> None:
        machine = self.at_stage("granted")
        (done,) = only(prefill(machine, 0.2, order("b", ids=())), Prefilled)
        assert (done.start_s, done.fetched_bytes) == (0.2, 0)

    @pytest.mark.parametrize("stage", ["asked", "granted"])
    @pytest.mark.parametrize("end", [FetchMiss("copy-1", 0), PeerLost("h"), Cancel("copy-1", 0)])
    def test_that_it_never_comes_is_told_too_and_nothing_is_held(self, stage: str, end: AnyMessage) -> None:
        machine = self.at_stage(stage)
        assert only(machine.handle(0.5, end), Brought) == [Brought("copy-1", 0, 0)]
        assert_nothing_held(machine)

    def test_one_that_finds_no_room_is_given_up(self) -> None:
        out = self.at_stage("asked", blocks=9).handle(0.1, FetchOffer("copy-1", 0, "h", PREFIX_BYTES, 8))
        assert out == [(CONTROL, Brought("copy-1", 0, 0)), ("h", FetchDone("copy-1", 0))]


class TestTheHolder:
    def lending(self, *, granted: bool) -> PrefillInstance:
        machine = node("h", holding=8)
        machine.handle(0.0, Fetch("a", 1, "p", IDS, 8))
        if granted:
            machine.handle(0.1, FetchGrant("a", 1, 7))
        return machine

    def test_offers_what_it_holds_and_pins_it(self) -> None:
        machine = node("h", holding=6)
        assert machine.handle(0.0, Fetch("a", 1, "p", IDS, 8)) == [("p", FetchOffer("a", 1, "h", 6 * 100 + 150, 6))]
        assert pool_of(machine).referenced_blocks == 6 + 2

    def test_offers_no_more_than_is_wanted(self) -> None:
        machine = node("h", holding=4)
        pool_of(machine).install(IDS, 8)
        (offer,) = only(machine.handle(0.0, Fetch("a", 1, "p", IDS[:5], 5)), FetchOffer)
        assert offer.blocks == 4

    def test_says_so_when_it_has_nothing(self) -> None:
        machine = node("h")
        assert machine.handle(0.0, Fetch("a", 1, "p", IDS, 8)) == [("p", FetchMiss("a", 1))]
        assert_nothing_held(machine)

    def test_sends_all_in_one_piece_that_exists_already(self) -> None:
        out = self.lending(granted=False).handle(2.0, FetchGrant("a", 1, 7))
        assert out == [(WIRE, Transmit("a", 1, "p", 7, PREFIX_BYTES, 1, 2.0, 2.0))]

    @pytest.mark.parametrize("granted", [False, True])
    @pytest.mark.parametrize("end", [FetchDone("a", 1), Cancel("a", 1), PeerLost("p")])
    def test_unpins_however_it_ends_and_stops_what_it_sends(self, end: AnyMessage, granted: bool) -> None:
        machine = self.lending(granted=granted)
        assert machine.handle(0.5, end) == ([(WIRE, StopTransmit("a", 1, "p", 7))] if granted else [])
        assert_nothing_held(machine)
        assert machine.handle(0.6, FetchGrant("a", 1, 7)) == []

    def test_another_requesters_loss_is_not_this_ones(self) -> None:
        machine = self.lending(granted=True)
        assert machine.handle(0.5, PeerLost("q")) == []
        assert pool_of(machine).referenced_blocks == 10

    def test_its_own_prefills_go_on(self) -> None:
        machine = self.lending(granted=True)
        assert only(prefill(machine, 0.2, order("b")), Prefilled)[0].cached_tokens == 80


class TestConversion:
    @pytest.mark.parametrize(("granted", "told"), [(False, [("p", FetchMiss("a", 1))]), (True, [])])
    def test_a_holder_takes_back_what_it_offered_and_lets_arrive_what_it_sends(
        self, granted: bool, told: list[Any]
    ) -> None:
        machine = node("h", holding=8)
        machine.handle(0.0, Fetch("a", 1, "p", IDS, 8))
        if granted:
            machine.handle(0.1, FetchGrant("a", 1, 7))
        assert machine.handle(0.5, Convert("decode", 60.0)) == told
        assert_nothing_held(machine)

    def test_a_decode_node_holds_nothing_for_whoever_asks(self) -> None:
        """Also the late messages of fetches from it change nothing."""
        machine = decode_node()
        assert machine.handle(0.0, Fetch("a", 1, "p", IDS, 8)) == [("p", FetchMiss("a", 1))]
        assert machine.handle(0.0, FetchGrant("a", 1, 7)) == []
        assert machine.handle(0.0, FetchDone("a", 1)) == []


def test_two_nodes_and_a_lossless_wire_move_a_prefix_once() -> None:
    """The whole exchange, message by message: what one emits the other is given."""
    machines: dict[str, PrefillInstance | DecodeInstance] = {"p": node("p"), "h": node("h", holding=8)}
    moved = []
    due = [("p", order(cached=80, holder="h"))]
    while due:
        name, message = due.pop(0)
        for destination, out in machines[name].handle(0.0, message):
            if isinstance(out, Transmit):
                moved.append(out.kv_bytes)
                due.append((out.decode_node, Landed(out.token)))  # type: ignore[arg-type]
            elif destination in machines:
                due.append((destination, out))  # type: ignore[arg-type]
            assert not isinstance(out, AttemptFailed | Abort)
    assert moved == [PREFIX_BYTES]
    assert machines["p"].next_s() == pytest.approx(0.05)
