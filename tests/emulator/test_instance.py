"""The prefill instance alone."""

from __future__ import annotations

import math

import pytest

from emulator.instance import PrefillInstance
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    Abort,
    Announce,
    AnyMessage,
    AttemptFailed,
    Cancel,
    Grant,
    Hello,
    Hinder,
    Landed,
    Out,
    PeerLost,
    Prefilled,
    Received,
    Refuse,
    StopTransmit,
    Transmit,
)
from tests.emulator.drive import (
    assert_prefill_idle,
    only,
    order,
    prefill_node,
    run_until,
)


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

    def test_a_prefill_that_begins_under_a_fault_takes_longer_and_no_other(self) -> None:
        node = prefill_node()
        node.handle(0.0, order("a"))
        node.handle(0.0, order("b"))
        node.handle(0.0, Hinder(3.0))
        first_s = node.next_s()
        assert first_s is not None
        node.handle(first_s, WAKE)
        node.handle(first_s, Hinder())
        assert node.next_s() == pytest.approx(4 * first_s)

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
