"""The two serving instances: each alone, and joined by a wire that keeps the order of a connection and no other."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    Abort,
    Admitted,
    Announce,
    AnyMessage,
    AttemptFailed,
    Cancel,
    Damaged,
    Expect,
    Finished,
    Grant,
    Hello,
    Landed,
    Out,
    PeerLost,
    Prefill,
    Prefilled,
    Received,
    Refuse,
    StopTransmit,
    Tokens,
    Transmit,
    Unexpect,
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


class TestPrefill:
    """One prefill at a time, first come first served; its KV is offered from the start and held until received."""

    def test_a_prefill_takes_the_time_of_its_uncached_tokens(self) -> None:
        node = prefill_node()
        node.handle(1.0, order(tokens=300, cached=100))
        assert node.next_s() == 3.0

    def test_its_kv_is_that_of_its_uncached_tokens_and_is_announced_when_it_starts(self) -> None:
        out = prefill_node().handle(1.0, order(tokens=300, cached=100))
        assert out == [("d", Announce("a", 1, "p", 2000, 300, 4))]

    def test_first_come_first_served(self) -> None:
        node = prefill_node()
        for name in "abc":
            node.handle(0.0, order(name))
        ends = [(m.request_id, m.start_s, m.end_s) for _, (_, m) in run_until(node) if type(m) is Prefilled]
        assert ends == [("a", 0.0, 1.0), ("b", 1.0, 2.0), ("c", 2.0, 3.0)]

    def test_the_end_is_told_to_control_and_the_next_announced(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        assert node.handle(1.0, WAKE) == [
            (CONTROL, Prefilled("a", 1, 0.0, 1.0, 1000)),
            ("d", Announce("b", 1, "p", 1000, 100, 4)),
        ]

    def test_woken_late_the_next_starts_at_the_scheduled_end(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        node.handle(1.3, WAKE)
        assert node.next_s() == 2.0

    def test_an_idle_instance_starts_at_the_arrival(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        node.handle(1.0, WAKE)
        node.handle(5.0, order("b"))
        assert node.next_s() == 6.0

    @pytest.mark.parametrize("now_s", [0.0, 0.999])
    def test_a_wake_before_the_end_does_nothing(self, now_s: float) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        assert node.handle(now_s, WAKE) == []
        assert node.next_s() == 1.0

    def test_a_wake_when_idle_does_nothing(self) -> None:
        assert prefill_node().handle(1.0, WAKE) == []

    def test_the_queue_counts_what_waits_and_not_what_runs(self) -> None:
        node = prefill_node()
        for name, tokens in (("a", 100), ("b", 200), ("c", 300)):
            node.handle(0.0, order(name, tokens, cached=50))
        assert (node.queued_requests, node.queued_tokens, node.running_requests(math.inf)) == (2, 150 + 250, 1)

    def test_it_tells_which_messages_are_for_it(self) -> None:
        node = prefill_node()
        assert node.accepts(Grant("a", 1, 0))
        assert not node.accepts(Landed(0))
        assert not node.accepts(Hello("p", ""))

    # the outbox
    def test_a_full_outbox_stalls_the_next_prefill(self) -> None:
        node = prefill_node(outbox_bytes=1500)
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        assert only(node.handle(1.0, WAKE), Announce) == []
        assert node.next_s() is None
        assert (node.queued_requests, node.outbox_used) == (1, 1000)

    def test_received_kv_makes_room_and_the_stalled_prefill_starts_then(self) -> None:
        node = prefill_node(outbox_bytes=1500)
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        node.handle(1.0, WAKE)
        assert [m.request_id for m in only(node.handle(4.0, Received("a", 1)), Announce)] == ["b"]
        assert node.next_s() == 5.0

    def test_a_stalled_head_is_not_overtaken_by_one_that_would_fit(self) -> None:
        node = prefill_node(outbox_bytes=1500)
        for name, tokens in (("a", 100), ("big", 100), ("small", 10)):
            node.handle(0.0, order(name, tokens))
        node.handle(1.0, WAKE)
        assert (node.queued_requests, node.running_requests(math.inf)) == (2, 0)

    def test_one_that_is_larger_than_the_outbox_runs_alone(self) -> None:
        node = prefill_node(outbox_bytes=500)
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        node.handle(1.0, WAKE)
        assert node.running_requests(math.inf) == 0
        node.handle(2.0, Received("a", 1))
        assert node.next_s() == 3.0

    def test_kv_received_at_the_very_end_does_not_wait_for_the_wake(self) -> None:
        """At one time the link's landing may come before the instance's own wake."""
        node = prefill_node()
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        node.handle(1.0, Received("a", 1))
        assert only(node.handle(1.0, WAKE), Prefilled) == [Prefilled("a", 1, 0.0, 1.0, 1000)]
        assert node.next_s() == 2.0
        assert node.outbox_used == 1000

    # grants
    @pytest.mark.parametrize("ended", [False, True])
    def test_a_grant_starts_the_transfer_by_the_prefills_schedule(self, ended: bool) -> None:
        node = prefill_node(pieces=8)
        node.handle(2.0, order("a"))
        if ended:
            node.handle(3.0, WAKE)
        out = node.handle(3.5 if ended else 2.1, Grant("a", 1, 77))
        assert out == [(WIRE, Transmit("a", 1, "d", 77, 1000, 8, 2.0, 3.0))]

    def test_a_second_grant_does_not_send_twice(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        node.handle(0.1, Grant("a", 1, 77))
        assert node.handle(0.2, Grant("a", 1, 78)) == []

    @pytest.mark.parametrize(
        "message",
        [Grant("x", 1, 0), Grant("a", 2, 0), Received("a", 2), Refuse("a", 2, ""), Cancel("a", 2), PeerLost("x")],
    )
    def test_what_concerns_another_attempt_or_node_is_ignored(self, message: AnyMessage) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        assert node.handle(0.5, message) == []
        assert (node.next_s(), node.outbox_used) == (1.0, 1000)

    # the end of an attempt, at each stage
    def at_stage(self, stage: str, granted: bool = False) -> PrefillInstance:
        """A node whose "a" is queued (behind "first"), running or ended unsent at 1.5 s."""
        node = prefill_node()
        if stage == "queued":
            node.handle(0.5, order("first", 200))
            node.handle(0.5, order("a"))
        else:
            node.handle(0.5 if stage == "ended" else 1.0, order("a"))
        if granted:
            node.handle(1.2, Grant("a", 1, 7))
        if stage == "ended":
            node.handle(1.5, WAKE)
        return node

    def finish(self, node: PrefillInstance) -> list[str]:
        """Let all that is left end and be received; who that was."""
        left = [out.request_id for _, (_, out) in run_until(node) if type(out) is Prefilled]
        for name in {*left, "first"}:
            node.handle(9.0, Received(name, 1))
        return left

    @pytest.mark.parametrize(
        ("stage", "granted", "expected"),
        [
            ("queued", False, []),
            ("running", False, [("d", Abort("a", 1))]),
            ("running", True, [("d", Abort("a", 1)), (WIRE, StopTransmit("a", 1, "d", 7))]),
            ("ended", False, [("d", Abort("a", 1))]),
            ("ended", True, [("d", Abort("a", 1)), (WIRE, StopTransmit("a", 1, "d", 7))]),
        ],
    )
    def test_cancelled(self, stage: str, granted: bool, expected: list[Out]) -> None:
        node = self.at_stage(stage, granted)
        assert node.handle(1.5, Cancel("a", 1)) == expected
        assert "a" not in self.finish(node)
        assert_prefill_idle(node)

    @pytest.mark.parametrize("granted", [False, True])
    @pytest.mark.parametrize("stage", ["running", "ended"])
    def test_refused(self, stage: str, granted: bool) -> None:
        node = self.at_stage(stage, granted)
        stop = [(WIRE, StopTransmit("a", 1, "d", 7))] if granted else []
        assert node.handle(1.5, Refuse("a", 1, "too large")) == [*stop, (CONTROL, AttemptFailed("a", 1, "too large"))]
        assert_prefill_idle(node)

    @pytest.mark.parametrize("granted", [False, True])
    @pytest.mark.parametrize("stage", ["running", "ended"])
    def test_its_decode_node_lost(self, stage: str, granted: bool) -> None:
        node = self.at_stage(stage, granted)
        out = node.handle(1.5, PeerLost("d"))
        assert only(out, StopTransmit) == ([StopTransmit("a", 1, "d", 7)] if granted else [])
        assert [(m.request_id, m.attempt) for m in only(out, AttemptFailed)] == [("a", 1)]
        assert "decode node d" in only(out, AttemptFailed)[0].reason
        assert_prefill_idle(node)

    def test_what_is_only_queued_survives_a_lost_connection(self) -> None:
        """It may be up again when its turn comes; control cancels what it moves elsewhere."""
        node = self.at_stage("queued")
        out = node.handle(1.5, PeerLost("d"))
        assert [m.request_id for m in only(out, AttemptFailed)] == ["first"]
        assert [m.request_id for m in only(out, Announce)] == ["a"]

    def test_a_lost_decode_node_leaves_transfers_to_others_alone(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a", node="d"))
        node.handle(0.0, order("b", node="e"))
        node.handle(1.0, WAKE)
        assert [m.request_id for m in only(node.handle(1.5, PeerLost("d")), AttemptFailed)] == ["a"]
        assert (node.next_s(), node.outbox_used) == (2.0, 1000)

    @pytest.mark.parametrize("end", [Cancel("a", 1), Refuse("a", 1, ""), PeerLost("d")])
    def test_a_running_prefill_that_ends_early_frees_the_instance_at_once(self, end: AnyMessage) -> None:
        node = prefill_node()
        node.handle(0.0, order("a", node="d"))
        node.handle(0.0, order("b", node="e"))
        node.handle(0.25, end)
        assert node.next_s() == 1.25

    @pytest.mark.parametrize("end", [Cancel("a", 1), Refuse("a", 1, ""), PeerLost("d")])
    def test_an_unsent_one_that_ends_makes_room_in_the_outbox(self, end: AnyMessage) -> None:
        node = prefill_node(outbox_bytes=1000)
        node.handle(0.0, order("a", node="d"))
        node.handle(0.0, order("b", node="e"))
        node.handle(1.0, WAKE)
        node.handle(1.5, end)
        assert node.next_s() == 2.5

    @pytest.mark.parametrize("late", [Grant("a", 1, 7), Received("a", 1), Refuse("a", 1, ""), Cancel("a", 1)])
    def test_nothing_follows_from_what_comes_after_the_end(self, late: AnyMessage) -> None:
        node = self.at_stage("ended")
        node.handle(1.5, Cancel("a", 1))
        assert node.handle(1.6, late) == []
        assert_prefill_idle(node)

    def test_the_successor_of_a_cancelled_attempt_is_its_own(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a", attempt=1))
        node.handle(0.1, Cancel("a", 1))
        node.handle(0.2, order("a", attempt=2))
        assert node.handle(0.3, Grant("a", 1, 7)) == []
        assert [m.attempt for m in only(node.handle(0.4, Grant("a", 2, 8)), Transmit)] == [2]


class TestDecodeReservations:
    """Reserve, then send: room for all of a transfer's bytes, first in first out, until admission."""

    def granted(self, out: list[Out]) -> list[str]:
        return [m.request_id for m in only(out, Grant)]

    def test_a_transfer_that_fits_is_expected_before_its_sender_is_told(self) -> None:
        out = decode_node(token_base=40).handle(0.0, offer("a", 100))
        assert out == [(WIRE, Expect(40, 100, "p")), ("p", Grant("a", 1, 40))]

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


class Joined(RuleBasedStateMachine):
    """Two prefill nodes and two decode nodes under a control that retries, joined by a wire in arbitrary order.

    Every directed pair keeps its own order (a TCP connection does); which pair delivers next, how long anything takes,
    what is cancelled and which connection breaks is Hypothesis' choice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.machines: dict[str, PrefillInstance | DecodeInstance] = {
            "p0": PrefillInstance("p0", Linear(), pieces=2, outbox_bytes=1500),
            "p1": PrefillInstance("p1", Linear(), pieces=2, outbox_bytes=1500),
            "d0": DecodeInstance("d0", slots=2, step_s=STEP_S, landing_bytes=1200, stream_interval=2),
            "d1": DecodeInstance("d1", slots=1, step_s=STEP_S, landing_bytes=700, stream_interval=2, token_base=1000),
        }
        self.wires: dict[tuple[str, str], deque[AnyMessage]] = {}
        self.sending: dict[tuple[str, int], Transmit] = {}
        self.expected: dict[str, dict[int, Expect]] = {"d0": {}, "d1": {}}
        self.tokens: set[int] = set()
        self.attempt: dict[str, int] = {}  # of requests that have not ended
        self.ended: dict[str, str] = {}
        self.output: dict[str, int] = {}
        self.heard: dict[tuple[str, int], list[AnyMessage]] = {}

    # what carries messages
    def tell(self, name: str, message: AnyMessage) -> None:
        """Deliver to a machine now, after all it had asked to be woken for."""
        machine = self.machines[name]
        while (due_s := machine.next_s()) is not None and due_s <= self.now_s:
            self.emit(name, machine.handle(due_s, WAKE))
        if message is not WAKE:
            self.emit(name, machine.handle(self.now_s, message))

    def emit(self, name: str, out: list[Out]) -> None:
        for destination, message in out:
            if destination == CONTROL:
                self.wires.setdefault((name, CONTROL), deque()).append(message)
            elif destination != WIRE:
                self.wires.setdefault((name, destination), deque()).append(message)
            elif type(message) is Transmit:
                assert (message.request_id, message.attempt) not in self.sending
                self.sending[message.request_id, message.attempt] = message
            elif type(message) is StopTransmit:
                self.sending.pop((message.request_id, message.attempt), None)
            elif type(message) is Expect:
                assert message.token not in self.tokens
                self.tokens.add(message.token)
                self.expected[name][message.token] = message
            else:
                assert type(message) is Unexpect
                del self.expected[name][message.token]

    def deliver(self, pair: tuple[str, str]) -> None:
        receiver = pair[1]
        message = self.wires[pair].popleft()
        if receiver == CONTROL:
            self.control(message)
        else:
            assert self.machines[receiver].accepts(message)
            self.tell(receiver, message)

    def control(self, message: Any) -> None:
        name, attempt = message.request_id, message.attempt
        self.heard.setdefault((name, attempt), []).append(message)
        if self.attempt.get(name) != attempt:
            return
        if type(message) is Finished:
            self.end(name, "finished")
        elif type(message) is AttemptFailed:
            admitted = any(type(m) is Admitted for m in self.heard[name, attempt])
            if not admitted:
                self.cancel(name)
                if attempt < 3:
                    self.route(name, attempt + 1)
                else:
                    self.end(name, "failed")

    def end(self, name: str, how: str) -> None:
        assert name not in self.ended
        self.ended[name] = how
        del self.attempt[name]

    def cancel(self, name: str) -> None:
        for node in self.machines:
            self.wires.setdefault((CONTROL, node), deque()).append(Cancel(name, self.attempt[name]))

    def route(self, name: str, attempt: int) -> None:
        prefill, decode, tokens = self.routes[name]
        if attempt > 1:
            decode = "d0"
        self.attempt[name] = attempt
        message = Prefill(name, attempt, tokens, 0, self.output[name], decode)
        self.wires.setdefault((CONTROL, prefill), deque()).append(message)

    # what happens
    @initialize()
    def begin(self) -> None:
        self.routes: dict[str, tuple[str, str, int]] = {}

    @rule(
        prefill=st.sampled_from(["p0", "p1"]),
        decode=st.sampled_from(["d0", "d1"]),
        tokens=st.sampled_from([10, 40, 60, 100, 110]),
        output=st.integers(1, 6),
    )
    def arrive(self, prefill: str, decode: str, tokens: int, output: int) -> None:
        name = f"r{len(self.output)}"
        self.output[name] = output
        self.routes[name] = (prefill, decode, tokens)
        self.route(name, 1)

    @rule(data=st.data(), count=st.integers(1, 6))
    def carry(self, data: st.DataObject, count: int) -> None:
        """Deliver the next message of some pair."""
        for _ in range(count):
            pairs = sorted(pair for pair, queue in self.wires.items() if queue)
            if not pairs:
                return
            self.deliver(data.draw(st.sampled_from(pairs)))

    @rule(ticks=st.integers(1, 8))
    def pass_time(self, ticks: int) -> None:
        self.now_s += ticks * 0.15
        for name in self.machines:
            self.tell(name, WAKE)

    def ready(self) -> list[tuple[str, int]]:
        return sorted(key for key, sent in self.sending.items() if sent.end_s <= self.now_s)

    def arrives(self, key: tuple[str, int], damaged: bool) -> None:
        sent = self.sending.pop(key)
        expected = self.expected[sent.decode_node].pop(sent.token, None)
        if expected is None:
            return  # a late writer: discarded
        assert expected.kv_bytes == sent.kv_bytes
        if damaged:
            self.expected[sent.decode_node][sent.token] = expected  # until the machine says Unexpect
            self.tell(sent.decode_node, Damaged(sent.token, "checksum"))
        else:
            self.tell(sent.decode_node, Landed(sent.token))

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), damaged=st.sampled_from([False, False, False, True]))
    def kv_arrives(self, data: st.DataObject, damaged: bool) -> None:
        self.arrives(data.draw(st.sampled_from(self.ready())), damaged)

    @precondition(lambda self: self.attempt)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.attempt)))
        self.cancel(name)
        self.end(name, "cancelled")

    @rule(prefill=st.sampled_from(["p0", "p1"]), decode=st.sampled_from(["d0", "d1"]))
    def connection_breaks(self, prefill: str, decode: str) -> None:
        """What was under way between the two is lost, and both are told."""
        self.wires.pop((prefill, decode), None)
        self.wires.pop((decode, prefill), None)
        for key, sent in list(self.sending.items()):
            if (self.routes[sent.request_id][0], sent.decode_node) == (prefill, decode):
                del self.sending[key]
        self.tell(prefill, PeerLost(decode))
        self.tell(decode, PeerLost(prefill))

    # what always holds
    @invariant()
    def room_is_never_exceeded(self) -> None:
        for machine in self.machines.values():
            if isinstance(machine, DecodeInstance):
                assert 0 <= machine.landing_used <= machine.landing_bytes
                assert 0 <= machine.running_requests(self.now_s) <= machine.slots
                assert set(machine._coming) == set(self.expected[machine.name])
            else:
                assert machine.outbox_used == sum(job.kv_bytes for job in machine._unsent.values())
                assert machine.outbox_used <= machine.outbox_bytes or len(machine._unsent) == 1
                assert machine.queued_tokens == sum(job.tokens for job in machine._queue)

    def teardown(self) -> None:
        """Let everything run out: then every request has ended once, nothing is held, and every stamp is in order."""
        for _ in range(10_000):
            for pair in [pair for pair, queue in self.wires.items() if queue]:
                while self.wires[pair]:
                    self.deliver(pair)
            for key in self.ready():
                self.arrives(key, damaged=False)
            if not (any(self.wires.values()) or self.sending or any(m.next_s() for m in self.machines.values())):
                break
            self.now_s += 0.25
            for name in self.machines:
                self.tell(name, WAKE)
        assert not self.attempt
        assert set(self.ended) == set(self.output)
        for machine in self.machines.values():
            (assert_prefill_idle if isinstance(machine, PrefillInstance) else assert_decode_idle)(machine)
        for key, heard in self.heard.items():
            self.check_attempt(key, heard)

    def check_attempt(self, key: tuple[str, int], heard: list[AnyMessage]) -> None:
        """What control heard of one attempt, whether it still cared or not."""
        name, attempt = key
        first: dict[type, Any] = {}
        for message in heard:
            if type(message) is not AttemptFailed and type(message) is not Tokens:
                assert type(message) not in first, "told twice"
            first.setdefault(type(message), message)
        prefilled, admitted, finished = first.get(Prefilled), first.get(Admitted), first.get(Finished)
        told = [k for m in heard if type(m) is Tokens for k in range(m.first, m.first + m.count)]
        assert told == list(range(len(told)))
        if prefilled and admitted:
            assert prefilled.start_s < prefilled.end_s <= admitted.landed_s
        if admitted:
            assert admitted.landed_s <= admitted.admitted_s
        if finished:
            output = self.output[name]
            assert len(told) == output == finished.tokens
            assert finished.finished_s == admitted.admitted_s + (output - 1) * STEP_S
            assert finished.freed_s == admitted.admitted_s + output * STEP_S
        if self.ended[name] == "finished" and attempt == max(a for n, a in self.heard if n == name):
            assert finished


TestJoined = Joined.TestCase
TestJoined.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
