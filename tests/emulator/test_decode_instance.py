"""The decode instance alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.decode_instance import DecodeInstance
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    Abort,
    Admitted,
    AnyMessage,
    AttemptFailed,
    Cancel,
    Damaged,
    Expect,
    Finished,
    Grant,
    Hinder,
    Landed,
    Out,
    PeerLost,
    Received,
    Refuse,
    Tokens,
    Unexpect,
)
from tests.emulator.drive import (
    STEP_S,
    assert_decode_idle,
    decode_node,
    offer,
    only,
    run_until,
)


class TestDecodeReservations:
    """Reserve, then send: room for all of a transfer's bytes, first in first out, until admission."""

    def granted(self, out: list[Out]) -> list[str]:
        return [m.request_id for m in only(out, Grant)]

    def test_a_transfer_that_fits_is_expected_before_its_sender_is_told(self) -> None:
        out = decode_node(token_base=40).handle(0.0, offer("a", 100))
        assert out == [(WIRE, Expect(40, 100, "p", 10)), ("p", Grant("a", 1, 40))]

    def test_one_that_does_not_fit_waits(self) -> None:
        node = decode_node(landing_bytes=150)
        node.handle(0.0, offer("a", 100))
        assert node.handle(0.0, offer("b", 100)) == []
        assert (node.waiting_grants, node.landing_used) == (1, 100)

    def test_the_head_is_not_overtaken_by_one_that_would_fit(self) -> None:
        node = decode_node(landing_bytes=150)
        node.handle(0.0, offer("a", 100))
        node.handle(0.0, offer("big", 100))
        assert node.handle(0.0, offer("small", 10)) == []

    def test_a_transfer_larger_than_all_the_room_is_refused(self) -> None:
        ((sender, refusal),) = decode_node(landing_bytes=99).handle(0.0, offer("a", 100))
        assert (sender, type(refusal)) == ("p", Refuse)
        assert "100 bytes" in refusal.reason
        assert "99 bytes" in refusal.reason

    def test_a_transfer_of_exactly_all_the_room_is_granted(self) -> None:
        assert self.granted(decode_node(landing_bytes=100).handle(0.0, offer("a", 100))) == ["a"]

    def test_admission_frees_the_room_for_those_that_wait(self) -> None:
        node = decode_node(landing_bytes=150)
        for name in "abc":
            node.handle(0.0, offer(name, 100))
        assert self.granted(node.handle(1.0, Landed(0))) == ["b"]
        assert node.landing_used == 100

    def test_kv_that_waits_for_a_slot_keeps_its_room(self) -> None:
        node = decode_node(slots=1, landing_bytes=150)
        for name in "abc":
            node.handle(0.0, offer(name, 100))
        node.handle(1.0, Landed(0))
        assert self.granted(node.handle(2.0, Landed(1))) == []
        assert (node.queued_requests, node.landing_used, node.waiting_grants) == (1, 100, 1)

    def test_tokens_never_repeat(self) -> None:
        node = decode_node(token_base=1 << 32)
        tokens = []
        for attempt in range(1, 6):
            tokens += [m.token for m in only(node.handle(0.0, offer("a", attempt=attempt)), Grant)]
            node.handle(0.0, Cancel("a", attempt))
        assert tokens == [(1 << 32) + i for i in range(5)]

    @pytest.mark.parametrize("message", [Landed(9), Damaged(9, ""), Abort("x", 1), Cancel("x", 1), PeerLost("x")])
    def test_what_concerns_no_transfer_is_ignored(self, message: AnyMessage) -> None:
        node = decode_node()
        node.handle(0.0, offer("a"))
        assert node.handle(0.5, message) == []
        assert node.landing_used == 100

    def test_it_tells_which_messages_are_for_it(self) -> None:
        assert decode_node().accepts(Landed(0))
        assert not decode_node().accepts(Grant("a", 1, 0))


def land(node: DecodeInstance, now_s: float, name: str, output: int = 4) -> list[Out]:
    """Announce and land one transfer at once; what follows from the landing."""
    (grant,) = only(node.handle(now_s, offer(name, output=output)), Grant)
    return node.handle(now_s, Landed(grant.token))


class TestDecode:
    """Token k leaves at admission + (k - 1) T_decode; a slot is held L_out x T_decode."""

    def test_landed_kv_is_acknowledged_and_admitted_to_a_free_slot_at_once(self) -> None:
        out = land(decode_node(), 2.0, "a")
        assert out == [("p", Received("a", 1)), (CONTROL, Admitted("a", 1, 2.0, 2.0))]

    def test_without_a_free_slot_it_waits_for_the_first_that_is_freed(self) -> None:
        node = decode_node(slots=1)
        land(node, 0.0, "a", output=4)
        assert only(land(node, 1.0, "b"), Admitted) == []
        admitted = [(t, m) for t, (_, m) in run_until(node, 2.0) if type(m) is Admitted]
        assert admitted == [(2.0, Admitted("b", 1, 1.0, 2.0))]

    def test_slots_are_given_in_the_order_of_landing(self) -> None:
        node = decode_node(slots=1)
        for name in "abcd":
            node.handle(0.0, offer(name))
        for token in (2, 0, 3, 1):
            node.handle(0.1, Landed(token))
        assert [m.request_id for _, (_, m) in run_until(node) if type(m) is Admitted] == ["a", "d", "b"]

    @pytest.mark.parametrize("interval", [1, 3, None])
    def test_the_last_token_leaves_one_step_before_the_slot_is_free(self, interval: int | None) -> None:
        node = decode_node(stream_interval=interval)
        land(node, 1.0, "a", output=5)
        ((at_s, finished),) = [(t, m) for t, (_, m) in run_until(node) if type(m) is Finished]
        assert at_s == 1.0 + 4 * STEP_S
        assert finished == Finished("a", 1, 1.0 + 4 * STEP_S, 1.0 + 5 * STEP_S, 5)
        assert_decode_idle(node)

    @pytest.mark.parametrize("interval", [1, None])
    def test_an_answer_of_one_token_finishes_at_admission_and_holds_a_slot_one_step(self, interval: int | None) -> None:
        node = decode_node(stream_interval=interval)
        assert only(land(node, 1.0, "a", output=1), Finished) == [Finished("a", 1, 1.0, 1.0 + STEP_S, 1)]
        assert node.running_requests(1.0) == 1
        assert only(land(node, 1.0, "b", output=1), Admitted) == [Admitted("b", 1, 1.0, 1.0)]
        assert only(land(node, 1.0, "c", output=1), Admitted) == []
        assert node.next_s() == 1.0 + STEP_S
        assert [m.admitted_s for _, (_, m) in run_until(node) if type(m) is Admitted] == [1.0 + STEP_S]
        assert_decode_idle(node)

    def test_every_token_leaves_at_its_own_time(self) -> None:
        node = decode_node(stream_interval=1)
        first = only(land(node, 1.0, "a", output=5), Tokens)
        rest = [(t, m.first) for t, (_, m) in run_until(node) if type(m) is Tokens]
        assert [(1.0, m.first) for m in first] + rest == [(1.0 + k * STEP_S, k) for k in range(5)]

    def test_batched_the_first_token_leaves_alone_and_a_batch_when_its_last_token_exists(self) -> None:
        node = decode_node(stream_interval=3)
        assert only(land(node, 0.0, "a", output=9), Tokens) == [Tokens("a", 1, 0, 1)]
        batches = [(t, m.first, m.count) for t, (_, m) in run_until(node) if type(m) is Tokens]
        assert batches == [(3 * STEP_S, 1, 3), (6 * STEP_S, 4, 3), (8 * STEP_S, 7, 2)]

    @given(interval=st.integers(1, 7), output=st.integers(1, 40))
    def test_all_tokens_leave_exactly_once_in_order_and_before_the_end(self, interval: int, output: int) -> None:
        node = decode_node(stream_interval=interval)
        out = [m for _, m in land(node, 0.0, "a", output)] + [m for _, (_, m) in run_until(node)]
        tokens = [k for m in out if type(m) is Tokens for k in range(m.first, m.first + m.count)]
        assert tokens == list(range(output))
        assert type(out[-1]) is Finished

    def test_without_an_interval_no_token_is_told_and_an_answer_is_one_event(self) -> None:
        node = decode_node(stream_interval=None)
        assert only(land(node, 0.0, "a", output=1000), Tokens) == []
        wakes = 0
        while (due_s := node.next_s()) is not None:
            assert only(node.handle(due_s, WAKE), Tokens) == []
            wakes += 1
        assert wakes == 1
        assert node.running_requests(1000 * STEP_S) == 0

    @pytest.mark.parametrize("interval", [1, None])
    def test_under_full_load_the_throughput_is_equation_5(self, interval: int | None) -> None:
        """Theta_pd-d = N_d BS_max / (T_decode L_out), here 1 x 3 / (0.5 x 8)."""
        node = decode_node(slots=3, landing_bytes=10**9, stream_interval=interval)
        for i in range(60):
            land(node, 0.0, str(i), output=8)
        freed = [m.freed_s for _, (_, m) in run_until(node) if type(m) is Finished]
        assert len(freed) / max(freed) == 3 / (STEP_S * 8)

    def test_woken_late_everything_keeps_its_scheduled_time(self) -> None:
        prompt, late = decode_node(slots=1, stream_interval=2), decode_node(slots=1, stream_interval=2)
        for node in (prompt, late):
            for name in "abc":
                land(node, 0.0, name)
        expected = [out for _, out in run_until(prompt)]
        assert late.handle(100.0, WAKE) == expected
        assert [m.admitted_s for m in only(expected, Admitted)] == [2.0, 4.0]

    def test_a_wake_before_anything_is_due_does_nothing(self) -> None:
        node = decode_node()
        land(node, 0.0, "a")
        assert node.handle(STEP_S / 2, WAKE) == []

    def test_running_requests_are_the_slots_taken(self) -> None:
        node = decode_node(slots=2)
        for name in "abc":
            land(node, 0.0, name)
        assert (node.running_requests(0.0), node.queued_requests) == (2, 1)


class TestDecodeEnds:
    """An attempt that is over frees what it holds, at whatever stage, and lets others have it at once."""

    STAGES = ("waiting", "coming", "landed", "decoding")

    def at_stage(self, stage: str) -> DecodeInstance:
        """A node with one slot and room for one transfer, its "a" of sender "p" at the stage, behind "first" of "q"."""
        node = decode_node(slots=1, landing_bytes=100, stream_interval=1)
        if stage in ("waiting", "landed"):
            node.handle(0.0, offer("first", node="q"))
        if stage == "landed":
            node.handle(0.0, Landed(0))
        out = node.handle(0.0, offer("a"))
        if stage in ("landed", "decoding"):
            node.handle(0.1, Landed(only(out, Grant)[0].token))
        return node

    def finish(self, node: DecodeInstance) -> set[str]:
        """Land and decode all that is left; whose tokens or ends were told after this."""
        told: set[str] = set()
        while node._coming or node.next_s() is not None:
            out = [m for token in list(node._coming) for _, m in node.handle(5.0, Landed(token))]
            out += [m for _, (_, m) in run_until(node)]
            told |= {m.request_id for m in out if type(m) in (Tokens, Finished, Admitted)}
        return told

    @pytest.mark.parametrize("over", [Cancel("a", 1), Abort("a", 1)], ids=["cancel", "abort"])
    @pytest.mark.parametrize("stage", STAGES)
    def test_cancelled_or_aborted(self, stage: str, over: AnyMessage) -> None:
        node = self.at_stage(stage)
        out = node.handle(0.2, over)
        assert [type(m) for _, m in out] == ([Unexpect] if stage == "coming" else [])
        assert "a" not in self.finish(node)
        assert_decode_idle(node)

    @pytest.mark.parametrize("stage", STAGES)
    def test_the_sender_lost(self, stage: str) -> None:
        """What has landed is whole, and goes on without its sender."""
        node = self.at_stage(stage)
        out = node.handle(0.2, PeerLost("p"))
        failed = [(m.request_id, m.attempt) for m in only(out, AttemptFailed)]
        assert failed == ([("a", 1)] if stage in ("waiting", "coming") else [])
        assert len(only(out, Unexpect)) == (stage == "coming")
        assert ("a" in self.finish(node)) == (stage in ("landed", "decoding"))
        assert_decode_idle(node)

    def test_damaged_on_its_way(self) -> None:
        node = self.at_stage("coming")
        assert node.handle(0.2, Damaged(0, "checksum")) == [
            (WIRE, Unexpect(0)),
            ("p", Refuse("a", 1, "checksum")),
            (CONTROL, AttemptFailed("a", 1, "checksum")),
        ]
        assert_decode_idle(node)

    @pytest.mark.parametrize("stage", ["landed", "decoding"])
    def test_damage_told_after_the_landing_is_ignored(self, stage: str) -> None:
        node = self.at_stage(stage)
        assert node.handle(0.2, Damaged(0, "connection lost")) == []

    @pytest.mark.parametrize("end", [Cancel("a", 1), Abort("a", 1), PeerLost("p"), Damaged(0, "")])
    def test_the_freed_room_is_granted_at_once(self, end: AnyMessage) -> None:
        node = decode_node(landing_bytes=100)
        node.handle(0.0, offer("a"))
        node.handle(0.0, offer("b", node="q"))
        assert [m.request_id for m in only(node.handle(0.1, end), Grant)] == ["b"]

    def test_a_waiting_head_that_ends_lets_the_next_go_first(self) -> None:
        node = decode_node(landing_bytes=100)
        node.handle(0.0, offer("a", 50))
        node.handle(0.0, offer("b", 100))
        node.handle(0.0, offer("c", 50))
        assert [m.request_id for m in only(node.handle(0.1, Cancel("b", 1)), Grant)] == ["c"]

    def test_the_freed_slot_is_taken_at_once(self) -> None:
        node = decode_node(slots=1)
        land(node, 0.0, "a")
        land(node, 0.0, "b")
        assert only(node.handle(0.7, Cancel("a", 1)), Admitted) == [Admitted("b", 1, 0.0, 0.7)]
        assert node.next_s() == 0.7 + 3 * STEP_S

    def test_bytes_that_land_after_the_end_are_nobodys(self) -> None:
        node = self.at_stage("coming")
        node.handle(0.2, Cancel("a", 1))
        node.handle(0.3, offer("a", attempt=2))
        assert node.handle(0.4, Landed(0)) == []
        assert [m.attempt for m in only(node.handle(0.5, Landed(1)), Admitted)] == [2]

    def test_the_end_of_an_attempt_does_not_touch_its_successor(self) -> None:
        node = decode_node(stream_interval=1)
        land(node, 0.0, "a", output=3)
        node.handle(0.1, Cancel("a", 1))
        (grant,) = only(node.handle(0.2, offer("a", attempt=2, output=3)), Grant)
        node.handle(0.2, Landed(grant.token))
        node.handle(0.3, Abort("a", 1))
        told = [(t, m.attempt) for t, (_, m) in run_until(node) if type(m) is Tokens]
        assert told == [(0.2 + STEP_S, 2), (0.2 + 2 * STEP_S, 2)]


class TestHinder:
    """A fault of the worker's own: slow steps for whoever is admitted meanwhile, landing room that is taken."""

    def test_room_that_is_taken_is_granted_to_nobody_until_it_is_given_back(self) -> None:
        node = decode_node(landing_bytes=100)
        assert node.handle(0.0, Hinder(held_bytes=100)) == []
        assert only(node.handle(1.0, offer("a", 60)), Grant) == []
        assert node.landing_used == 100
        assert [m.request_id for m in only(node.handle(2.0, Hinder()), Grant)] == ["a"]
        assert node.landing_used == 60

    def test_another_hinder_takes_the_place_of_the_one_before(self) -> None:
        node = decode_node(landing_bytes=100)
        for held_bytes in (100, 40, 40):
            node.handle(0.0, Hinder(held_bytes=held_bytes))
        assert node.landing_used == 40

    def test_an_answer_keeps_the_pace_that_it_was_admitted_with(self) -> None:
        node = decode_node(slots=3)
        for request_id, then in (("before", Hinder(3.0)), ("slow", Hinder()), ("after", Hinder())):
            [grant] = only(node.handle(0.0, offer(request_id, 1, output=11)), Grant)
            node.handle(0.0, Landed(grant.token))
            node.handle(0.0, then)
        ends = only([out for _, out in run_until(node, 100.0)], Finished)
        paces = {end.request_id: end.finished_s / STEP_S for end in ends}
        assert paces == pytest.approx({"before": 10, "slow": 30, "after": 10})
