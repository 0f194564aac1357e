"""Control: a request's life, however it ends, and what a policy sees of it all."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emulator.messages import (
    Admitted,
    AttemptFailed,
    CacheChanged,
    Cancel,
    Convert,
    Finished,
    PathSample,
    Prefill,
    Prefilled,
    Telemetry,
)
from testbed.control import (
    CLIENT,
    Arrive,
    Change,
    ClientGone,
    Command,
    Completed,
    Control,
    Disturbed,
    Event,
    Failed,
    NodeLost,
    NodeSpec,
    NodeUp,
    PolicySet,
    Record,
    Rules,
    Tick,
)
from testbed.scheduler.api import Decision, NodeView, Note, Recall, Reject, RequestView, SetRole, Setup, SystemView
from testbed.scheduler.baselines import Homogeneous

FLEET = [
    NodeSpec("f0", "prfaas", "prefill", 0),
    NodeSpec("p0", "pd", "prefill", 2),
    NodeSpec("p1", "pd", "prefill", 2),
    NodeSpec("d0", "pd", "decode", 2),
    NodeSpec("d1", "pd", "decode", 2),
]
COST = {"prfaas": lambda tokens: tokens / 200, "pd": lambda tokens: tokens / 100}
COUNTERS = ("queued_requests", "queued_tokens", "queued_s", "assigned_requests", "decoding_requests")


class To:
    """A policy that answers what it was given, and remembers what it was asked. An exception is raised.

    wants: what the next tick asks for.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[RequestView] = []
        self.wants: Any = []

    def start(self, setup: Setup) -> None:
        pass

    def route(self, request: RequestView, view: SystemView) -> Any:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tick(self, view: SystemView) -> Any:
        wants, self.wants = self.wants, []
        if isinstance(wants, Exception):
            raise wants
        return wants


F0_D0 = Decision("f0", "d0", "longer than t", 19_600.0)
P0_D0 = Decision("p0", "d0", "not longer than t", 19_600.0)
P1_D1 = Decision("p1", "d1", "second")


class Run:
    """A Control with all nodes up, driven by hand; `said` is everything it commanded."""

    def __init__(self, *answers: Any, up: bool = True, **rules: Any) -> None:
        self.policy = To(*answers or [P0_D0])
        self.control = Control(FLEET, COST, 100e9, self.policy, Homogeneous(), rules=Rules(**rules))  # type: ignore[arg-type]
        self.said: list[Command] = []
        if up:
            for spec in FLEET:
                self.at(-1.0, NodeUp(spec.name, spec.role))

    def at(self, now_s: float, event: Event) -> list[Command]:
        out = self.control.handle(now_s, event)
        self.said += out
        return out

    def arrive(self, now_s: float = 0.0, name: str = "a", tokens: int = 100, output: int = 8) -> list[Command]:
        return self.at(now_s, Arrive(name, tokens, output))

    def tell(self, now_s: float, *nodes: str) -> None:
        """These nodes (all, when none is named) give an account of themselves."""
        for name in nodes or self.nodes:
            self.at(now_s, telemetry(name, now_s))

    def look(self, now_s: float, *wants: Any) -> list[Command]:
        """The policy looks around, and asks for this."""
        self.policy.wants = wants
        return self.at(now_s, Tick())

    def changes(self, *kinds: str) -> list[Change]:
        return [change for change in self.control.changes if change.kind in kinds]

    def to_stage(self, stage: str, name: str = "a", attempt: int = 1) -> Run:
        """Bring a request, routed already, to a stage of its attempt."""
        reached = ("queued", "prefilled", "admitted", "finished").index(stage)
        events = [
            Prefilled(name, attempt, 1.0, 2.0, 1000),
            Admitted(name, attempt, 2.5, 3.0),
            Finished(name, attempt, 6.5, 7.0, 8),
        ]
        for event in events[:reached]:
            self.at(7.0, event)
        return self

    @property
    def nodes(self) -> dict[str, NodeView]:
        return self.control.view.nodes

    def counters(self, name: str) -> dict[str, float]:
        """A node's counters that are not zero."""
        return {key: value for key in COUNTERS if (value := getattr(self.nodes[name], key))}

    def assert_idle(self) -> None:
        assert not self.control.live
        assert {name: self.counters(name) for name in self.nodes} == {name: {} for name in self.nodes}

    def ended(self) -> list[Completed | Failed]:
        return [command for destination, command in self.said if destination == CLIENT]  # type: ignore[misc]

    def the_failure(self) -> Failed:
        (end,) = self.ended()
        assert isinstance(end, Failed)
        return end


def cancels(out: list[Command]) -> list[tuple[str, int]]:
    return [(node, command.attempt) for node, command in out if isinstance(command, Cancel)]


def orders(out: list[Command]) -> list[tuple[str, int, str]]:
    return [(node, c.attempt, c.decode_node) for node, c in out if isinstance(c, Prefill)]


class TestLife:
    """Arrive, route, prefill, admit, finish."""

    def test_an_arrival_becomes_an_order_to_the_chosen_prefill_node(self) -> None:
        assert Run(F0_D0).arrive(tokens=30_000, output=8) == [("f0", Prefill("a", 1, 30_000, 0, 8, "d0"))]

    def test_a_whole_life(self) -> None:
        run = Run(F0_D0)
        run.at(0.5, Arrive("a", 30_000, 8))
        run.at(2.0, Prefilled("a", 1, 1.0, 2.0, 5000))
        run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        ((destination, done),) = run.at(6.5, Finished("a", 1, 6.5, 7.0, 8))
        assert destination == CLIENT
        assert isinstance(done, Completed)
        of_the_cache = {"block_ids", "cache_node", "cache_site", "fetched_bytes", "l_pd", "l_prfaas", "regime"}
        of_the_cache.add("prefill_tokens")
        told = {name: getattr(done.record, name) for name in Record.__struct_fields__ if name not in of_the_cache}
        assert told | {"view": None} == {
            "request_id": "a",
            "status": "ok",
            "error": "",
            "error_message": "",
            "policy_error": "",
            "attempts": 1,
            "input_tokens": 30_000,
            "cached_tokens": 0,
            "output_tokens": 8,
            "output_tokens_asked": 8,
            "kv_bytes": 5000,
            "prefill_node": "f0",
            "prefill_site": "prfaas",
            "decode_node": "d0",
            "reason": "longer than t",
            "threshold_tokens": 19_600.0,
            "arrive_s": 0.5,
            "route_s": 0.5,
            "prefill_start_s": 1.0,
            "prefill_end_s": 2.0,
            "landed_s": 2.5,
            "admitted_s": 3.0,
            "finished_s": 6.5,
            "prefill_cost_s": 150.0,
            "prefill_queue_s": 0.0,
            "finish_reason": "length",
            "placed": False,
            "prefilled": True,
            "view": None,
        }

    def test_counters_follow_the_request(self) -> None:
        run = Run(F0_D0)
        run.arrive(tokens=300)
        assert run.counters("f0") == {"queued_requests": 1, "queued_tokens": 300, "queued_s": 1.5}
        assert run.counters("d0") == {"assigned_requests": 1}
        run.at(2.0, Prefilled("a", 1, 1.0, 2.0, 1000))
        assert run.counters("f0") == {}
        run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        assert run.counters("d0") == {"assigned_requests": 1, "decoding_requests": 1}
        run.at(6.5, Finished("a", 1, 6.5, 7.0, 8))
        run.assert_idle()

    def test_queued_seconds_are_by_the_nodes_own_profile(self) -> None:
        run = Run(F0_D0, P0_D0)
        run.arrive(name="a", tokens=200)
        run.arrive(name="b", tokens=200)
        assert (run.nodes["f0"].queued_s, run.nodes["p0"].queued_s) == (1.0, 2.0)

    def test_queued_seconds_do_not_drift(self) -> None:
        run = Run()
        for i in range(3):
            run.arrive(name=str(i), tokens=10 + i)
        for i in range(3):
            run.at(1.0, Prefilled(str(i), 1, 0.0, 1.0, 1))
        assert run.nodes["p0"].queued_s == 0.0

    def test_the_answer_may_be_admitted_before_word_of_its_prefill_came(self) -> None:
        """The two come from different sites."""
        run = Run()
        run.arrive()
        run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        run.at(3.1, Prefilled("a", 1, 1.0, 2.0, 1000))
        run.at(6.5, Finished("a", 1, 6.5, 7.0, 8))
        (end,) = run.ended()
        assert (end.record.status, end.record.prefill_end_s) == ("ok", 2.0)
        run.assert_idle()

    def test_an_answer_that_ends_before_word_of_its_prefill_came_waits_for_it(self) -> None:
        """Or its row would not say when it was prefilled, nor how much KV it made."""
        run = Run()
        run.arrive()
        run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        assert run.at(6.5, Finished("a", 1, 6.5, 7.0, 8)) == []
        assert run.at(6.5, Finished("a", 1, 6.5, 7.0, 8)) == []
        ((_, end),) = run.at(6.6, Prefilled("a", 1, 1.0, 2.0, 1000))
        assert isinstance(end, Completed)
        assert (end.record.status, end.record.prefill_end_s, end.record.kv_bytes) == ("ok", 2.0, 1000)
        run.assert_idle()

    @pytest.mark.parametrize("node", ["p0", "d0"])
    @pytest.mark.parametrize("lost_s", [6.0, 7.0])
    def test_nobody_waits_for_the_word_of_a_node_that_is_lost(self, node: str, lost_s: float) -> None:
        run = Run()
        run.arrive()
        run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        for at_s, event in sorted(
            [(lost_s, NodeLost(node, "")), (6.5, Finished("a", 1, 6.5, 7.0, 8))], key=lambda one: one[0]
        ):
            run.at(at_s, event)
        (end,) = run.ended()
        expected = "failed" if (node, lost_s) == ("d0", 6.0) else "ok"  # in the midst of its answer
        assert end.record.status == expected
        run.assert_idle()

    def test_only_the_present_attempt_of_a_live_request_is_current(self) -> None:
        run = Run()
        assert not run.control.is_current("a", 1)
        run.arrive()
        assert run.control.is_current("a", 1)
        assert not run.control.is_current("a", 2)
        run.to_stage("finished")
        assert not run.control.is_current("a", 1)

    def test_an_id_can_be_used_again_when_its_request_has_ended(self) -> None:
        run = Run()
        for _ in range(2):
            run.arrive()
            run.to_stage("finished")
        assert [type(end) for end in run.ended()] == [Completed, Completed]

    @pytest.mark.parametrize("stage", ["queued", "prefilled", "admitted"])
    def test_a_message_told_twice_counts_once(self, stage: str) -> None:
        run = Run()
        run.arrive()
        run.to_stage(stage)
        run.to_stage(stage)
        run.to_stage("finished")
        assert len(run.ended()) == 1
        run.assert_idle()

    @pytest.mark.parametrize(
        "event",
        [
            Prefilled("x", 1, 0, 1, 1),
            Admitted("x", 1, 1, 1),
            Finished("x", 1, 1, 1, 1),
            AttemptFailed("x", 1, ""),
            ClientGone("x"),
            Finished("a", 2, 1, 1, 1),
        ],
    )
    def test_what_concerns_no_request_is_ignored(self, event: Event) -> None:
        run = Run()
        run.arrive()
        assert run.at(1.0, event) == []
        assert list(run.control.live) == ["a"]


class TestRetry:
    """A failed attempt is followed by another where that is safe: while no token of the answer was sent."""

    @pytest.mark.parametrize("stage", ["queued", "prefilled"])
    def test_before_the_first_token_it_is_tried_again_elsewhere(self, stage: str) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive()
        run.to_stage(stage)
        out = run.at(8.0, AttemptFailed("a", 1, "refused"))
        assert cancels(out) == [("p0", 1), ("d0", 1)]
        assert orders(out) == [("p1", 2, "d1")]
        assert (run.counters("p0"), run.counters("d0")) == ({}, {})
        assert run.counters("d1") == {"assigned_requests": 1}

    def test_the_old_attempt_is_cancelled_before_the_new_one_is_ordered(self) -> None:
        run = Run(P0_D0)
        run.arrive()
        out = run.at(1.0, AttemptFailed("a", 1, "refused"))
        assert [(node, type(c)) for node, c in out] == [("p0", Cancel), ("d0", Cancel), ("p0", Prefill)]

    def test_the_policy_is_told_which_attempt_it_decides(self) -> None:
        run = Run(P0_D0)
        run.at(0.5, Arrive("a", 100, 8, (1, 2), 512, "s"))
        run.at(1.0, AttemptFailed("a", 1, "refused"))
        assert run.policy.asked == [
            RequestView("a", 0.5, 100, (1, 2), 512, "s", attempt=1),
            RequestView("a", 0.5, 100, (1, 2), 512, "s", attempt=2),
        ]

    def test_attempts_are_bounded(self) -> None:
        run = Run(P0_D0, max_attempts=2)
        run.arrive()
        run.at(1.0, AttemptFailed("a", 1, "refused"))
        out = run.at(2.0, AttemptFailed("a", 2, "refused"))
        assert cancels(out) == [("p0", 2), ("d0", 2)]
        failure = run.the_failure()
        assert (failure.http_status, failure.record.error, failure.record.attempts) == (503, "attempt_failed", 2)
        assert failure.record.error_message == "refused; given up after 2 attempts"
        run.assert_idle()

    def test_once_admitted_a_failure_of_the_senders_is_of_no_account(self) -> None:
        """Its connection broke before it heard that its KV had landed; the answer goes on."""
        run = Run()
        run.arrive()
        run.to_stage("admitted")
        assert run.at(8.0, AttemptFailed("a", 1, "decode node d0 is out of reach")) == []
        run.to_stage("finished")
        assert [type(end) for end in run.ended()] == [Completed]
        run.assert_idle()

    def test_two_failures_of_one_attempt_are_one(self) -> None:
        """Damage is told by the decode node, and by the prefill node that it refuses."""
        run = Run(P0_D0, P1_D1)
        run.arrive()
        run.at(1.0, AttemptFailed("a", 1, "checksum"))
        assert run.at(1.1, AttemptFailed("a", 1, "checksum")) == []
        assert run.control.live["a"].attempts == 2

    @pytest.mark.parametrize("stale", ["prefilled", "admitted", "finished"])
    def test_messages_of_an_abandoned_attempt_do_not_touch_its_successor(self, stale: str) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive()
        run.at(0.5, AttemptFailed("a", 1, "refused"))
        run.to_stage(stale, attempt=1)
        record = run.control.live["a"]
        assert math.isnan(record.prefill_start_s)
        assert math.isnan(record.admitted_s)
        assert run.counters("p1")["queued_requests"] == 1
        run.to_stage("finished", attempt=2)
        assert [type(end) for end in run.ended()] == [Completed]
        run.assert_idle()

    def test_a_record_holds_the_stamps_of_its_last_attempt_only(self) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive()
        run.to_stage("prefilled")
        run.at(9.0, AttemptFailed("a", 1, "refused"))
        record = run.control.live["a"]
        assert (record.route_s, record.prefill_node, record.kv_bytes) == (9.0, "p1", 0)
        assert math.isnan(record.prefill_start_s)
        assert math.isnan(record.prefill_end_s)

    def test_a_retry_may_be_rejected(self) -> None:
        run = Run(P0_D0, Reject("full"))
        run.arrive()
        run.at(1.0, AttemptFailed("a", 1, "refused"))
        assert run.the_failure().http_status == 429
        run.assert_idle()


class TestNodeLost:
    """What a dead node held is tried again, or ends with a clear error; nothing waits for word from the dead."""

    @pytest.mark.parametrize("stage", ["queued", "prefilled"])
    @pytest.mark.parametrize("node", ["p0", "d0"])
    def test_before_the_first_token_its_requests_are_tried_again(self, node: str, stage: str) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive()
        run.to_stage(stage)
        out = run.at(8.0, NodeLost(node, "gone"))
        assert cancels(out) == [("d0" if node == "p0" else "p0", 1)]
        assert orders(out) == [("p1", 2, "d1")]
        assert (run.counters("p0"), run.counters("d0")) == ({}, {})

    def test_an_answer_under_way_fails_with_its_decode_node(self) -> None:
        run = Run()
        run.arrive()
        run.to_stage("admitted")
        out = run.at(8.0, NodeLost("d0", "killed"))
        assert cancels(out) == [("p0", 1)]
        failure = run.the_failure()
        assert (failure.http_status, failure.record.error) == (502, "node_lost")
        assert "d0 was lost (killed)" in failure.record.error_message
        assert "part of the answer" in failure.record.error_message
        run.assert_idle()

    @pytest.mark.parametrize("word_of_prefill", [True, False])
    def test_an_answer_under_way_survives_its_prefill_node(self, word_of_prefill: bool) -> None:
        run = Run()
        run.arrive()
        if word_of_prefill:
            run.to_stage("admitted")
        else:
            run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        assert run.at(8.0, NodeLost("p0", "killed")) == []
        assert run.counters("p0") == {}
        run.to_stage("finished")
        assert [type(end) for end in run.ended()] == [Completed]
        run.assert_idle()

    def test_the_dead_node_is_not_spoken_to(self) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive()
        assert "d0" not in {node for node, _ in run.at(1.0, NodeLost("d0", "gone"))}

    def test_requests_elsewhere_are_left_alone(self) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive(name="a")
        run.arrive(name="b")
        run.at(1.0, NodeLost("d0", "gone"))
        assert run.control.live["b"].attempts == 1

    def test_a_loss_told_twice_counts_once(self) -> None:
        run = Run(P0_D0)
        run.at(0.0, NodeLost("p1", "gone"))
        run.arrive()
        assert run.at(1.0, NodeLost("p1", "gone")) == []
        assert run.control.live["a"].attempts == 1

    def test_when_no_node_is_left_the_request_is_unavailable(self) -> None:
        run = Run(P0_D0)
        run.arrive()
        run.at(0.5, NodeLost("d1", "gone"))
        run.at(1.0, NodeLost("d0", "gone"))
        failure = run.the_failure()
        assert (failure.http_status, failure.record.error) == (503, "unavailable")
        assert "decode" in failure.record.error_message
        run.assert_idle()

    def test_a_node_that_is_up_again_takes_requests(self) -> None:
        run = Run(P0_D0)
        run.at(0.0, NodeLost("p0", "gone"))
        run.at(1.0, NodeUp("p0", "prefill"))
        assert orders(run.arrive(2.0)) == [("p0", 1, "d0")]

    def test_a_node_that_begins_anew_unnoticed_has_lost_what_it_held(self) -> None:
        run = Run(P0_D0, P1_D1)
        run.arrive()
        out = run.at(1.0, NodeUp("p0", "prefill"))
        assert orders(out) == [("p1", 2, "d1")]
        assert run.nodes["p0"].alive

    def test_a_node_can_come_back_in_another_role(self) -> None:
        run = Run(Decision("p0", "p1", "turned"))
        run.at(0.0, NodeLost("p1", "turning"))
        run.at(1.0, NodeUp("p1", "decode"))
        assert orders(run.arrive(2.0)) == [("p0", 1, "p1")]
        assert run.control.live["a"].policy_error == ""


class TestClientGone:
    """A client that leaves frees everything of its request at both nodes."""

    @pytest.mark.parametrize("stage", ["queued", "prefilled", "admitted"])
    def test_at_each_stage(self, stage: str) -> None:
        run = Run()
        run.arrive()
        run.to_stage(stage)
        out = run.at(8.0, ClientGone("a"))
        assert cancels(out) == [("p0", 1), ("d0", 1)]
        record = run.the_failure().record
        assert (record.status, record.error) == ("aborted", "client_gone")
        run.assert_idle()

    def test_after_the_end_there_is_nothing_to_do(self) -> None:
        run = Run()
        run.arrive()
        run.to_stage("finished")
        assert run.at(8.0, ClientGone("a")) == []

    def test_what_was_under_way_then_is_ignored(self) -> None:
        run = Run()
        run.arrive()
        run.at(0.5, ClientGone("a"))
        run.to_stage("finished")
        assert run.at(8.0, AttemptFailed("a", 1, "")) == []
        assert len(run.ended()) == 1
        run.assert_idle()


class TestPolicyContained:
    """A policy is somebody else's code: whatever it does, the request is served, and the record says what happened."""

    @pytest.mark.parametrize(
        ("answer", "kind", "problem"),
        [
            (ZeroDivisionError("division by zero"), "ZeroDivisionError", "ZeroDivisionError: division by zero"),
            (RuntimeError(""), "RuntimeError", "RuntimeError: "),
            (None, "not a decision", "not a decision: NoneType"),
            ("f0", "not a decision", "not a decision: str"),
            (("p0", "d0"), "not a decision", "not a decision: tuple"),
            (Decision("x9", "d0", ""), "unknown node", "unknown node: x9"),
            (Decision("p0", "", ""), "unknown node", "unknown node: "),
            (Decision("p1", "d0", ""), "dead node", "dead node: p1"),
            (Decision("d1", "d0", ""), "wrong role", "wrong role: d1 is a decode node"),
            (Decision("p0", "p0", ""), "wrong role", "wrong role: p0 is a prefill node"),
            (Decision(["p0"], "d0", ""), "TypeError", "TypeError: unhashable type: 'list'"),  # type: ignore[arg-type]
            (Decision("p0", "d0", "", "t"), "bad threshold_tokens", "bad threshold_tokens: 't'"),  # type: ignore[arg-type]
            (Decision("p0", "d0", "", None, None), "bad cached_tokens", "bad cached_tokens: None"),  # type: ignore[arg-type]
            (Decision("p0", "d0", "", None, 0.0), "bad cached_tokens", "bad cached_tokens: 0.0"),  # type: ignore[arg-type]
            (Decision("p0", "d0", "", None, 64), "no such prefix", "no such prefix: 64 tokens at p0"),
            (Reject("full", math.nan), "bad retry_after_s", "bad retry_after_s: nan"),
            (Reject("full", -1.0), "bad retry_after_s", "bad retry_after_s: -1.0"),
            (Reject("full", math.inf), "bad retry_after_s", "bad retry_after_s: inf"),
        ],
    )
    def test_the_fallback_decides_and_it_is_counted_and_visible(self, answer: object, kind: str, problem: str) -> None:
        run = Run(answer)
        run.at(0.0, NodeLost("p1", "gone"))
        assert orders(run.arrive()) == [("p0", 1, "d0")]
        record = run.control.live["a"]
        assert record.policy_error == problem
        assert record.reason == "fallback: all local"
        assert run.control.policy_errors == {kind: 1}
        run.to_stage("finished")
        run.assert_idle()

    @pytest.mark.parametrize("state", ["draining", "silent"])
    def test_a_node_that_takes_nothing_new_gets_nothing(self, state: str) -> None:
        run = Run(P1_D1)
        if state == "draining":
            run.look(1.0, SetRole("p1", "decode", ""))
        else:
            run.tell(10.0, "f0", "p0", "d0", "d1")
            run.look(10.0)
        assert orders(run.arrive(10.5))[0][0] == "p0"
        assert run.control.policy_errors == {f"{state} node": 1}

    def test_errors_are_counted_by_kind(self) -> None:
        run = Run(ValueError("1"), Decision("x", "d0", ""), ValueError("2"))
        for name in "abc":
            run.arrive(name=name)
        assert run.control.policy_errors == {"ValueError": 2, "unknown node": 1}

    def test_a_good_decision_leaves_no_trace_of_errors(self) -> None:
        run = Run()
        run.arrive()
        assert run.control.live["a"].policy_error == ""
        assert run.control.policy_errors == {}

    def test_when_even_the_fallback_finds_no_node_the_request_is_unavailable(self) -> None:
        run = Run(ValueError("no"), up=False)
        run.arrive()
        assert (run.the_failure().http_status, run.the_failure().record.policy_error) == (503, "ValueError: no")

    def test_a_threshold_may_be_of_any_kind_of_number(self) -> None:
        np = pytest.importorskip("numpy")
        run = Run(Decision("p0", "d0", "", np.float32(0.5)))
        run.arrive()
        assert type(run.control.live["a"].threshold_tokens) is float
        assert run.control.live["a"].threshold_tokens == 0.5

    def test_a_decision_without_a_threshold_records_none(self) -> None:
        run = Run(P1_D1)
        run.arrive()
        assert math.isnan(run.control.live["a"].threshold_tokens)

    def test_how_a_policy_is_called_is_the_edges_choice(self) -> None:
        def ask(policy: Any, request: RequestView, view: SystemView) -> Decision:
            raise TimeoutError("no decision within 0.05 s")

        control = Control(FLEET, COST, 1e9, To(P0_D0), Homogeneous(), ask=ask)  # type: ignore[arg-type]
        for spec in FLEET:
            control.handle(0.0, NodeUp(spec.name, spec.role))
        control.handle(0.0, Arrive("a", 1, 1))
        assert control.policy_errors == {"TimeoutError": 1}


class TestReject:
    """A policy may decline."""

    def test_the_client_is_told_to_come_again(self) -> None:
        run = Run(Reject("full", 2.5))
        run.arrive()
        failure = run.the_failure()
        assert (failure.http_status, failure.retry_after_s) == (429, 2.5)
        assert (failure.record.status, failure.record.error, failure.record.reason) == ("failed", "rejected", "full")
        run.assert_idle()

    @pytest.mark.parametrize("dead", [["d0", "d1"], ["f0", "p0", "p1"]])
    def test_when_nothing_lives_it_is_the_systems_failure(self, dead: list[str]) -> None:
        run = Run(Reject("nothing lives"))
        for node in dead:
            run.at(0.0, NodeLost(node, "gone"))
        run.arrive()
        assert (run.the_failure().http_status, run.the_failure().record.error) == (503, "unavailable")


class TestView:
    """What a policy sees: observations, never an output length."""

    def test_a_request_is_seen_without_its_output_length(self) -> None:
        run = Run()
        run.at(0.5, Arrive("a", 100, 424_242, (1, 2), 512, "s"))
        (view,) = run.policy.asked
        fields = set(RequestView._fields)
        of_the_prompt = {"request_id", "arrival_s", "input_tokens", "block_hashes", "block_size", "session", "attempt"}
        assert fields == of_the_prompt | {"l_pd", "l_prfaas", "hits", "block_ids"}
        assert 424_242 not in view

    def test_neither_nodes_nor_system_tell_output_lengths(self) -> None:
        assert not [name for name in (*NodeView.__slots__, *SystemView.__slots__) if "output" in name]

    def test_a_policy_cannot_change_the_request(self) -> None:
        run = Run()
        run.arrive()
        with pytest.raises(AttributeError):
            run.policy.asked[0].input_tokens = 1  # type: ignore[misc]

    def test_the_link_is_known_by_its_nominal_rate_only(self) -> None:
        assert Run().control.view.link_nominal_bps == 100e9
        assert not [name for name in SystemView.__slots__ if name.startswith("link") and "nominal" not in name]

    def test_the_view_has_the_time_of_the_event(self) -> None:
        run = Run()
        run.arrive(4.25)
        assert run.control.view.now_s == 4.25


def telemetry(node: str, t_s: float, landed: dict[str, int] | None = None, **known: Any) -> Telemetry:
    nothing = dict.fromkeys(
        (
            "queued_requests",
            "queued_tokens",
            "running_requests",
            "outbox_bytes",
            "landing_bytes",
            "waiting_grants",
            "kv_sent_bytes",
            "refused_frames",
        ),
        0,
    )
    given = {"wire_landed_bytes": {}, "late_p99_s": 0.0, "late_max_s": 0.0, **nothing, **known}
    return Telemetry(node=node, t_s=t_s, kv_landed_bytes=landed or {}, **given)


class TestTelemetry:
    """What the nodes say of themselves; egress is counted where it lands."""

    def test_a_node_is_known_by_its_latest_account(self) -> None:
        run = Run()
        paths = (PathSample("d0", 0.02, 3, 10, 1e9, 500), PathSample("d1", 0.03, 4, 10, 1e9, 700))
        run.at(2.0, telemetry("f0", 1.9, outbox_bytes=11, landing_bytes=22, paths=paths))
        node = run.nodes["f0"]
        assert (node.told_s, node.outbox_bytes, node.landing_bytes) == (1.9, 11, 22)
        assert (node.unsent_bytes, node.retransmits, node.rtt_s) == (1200, 7, 0.03)

    def test_before_the_first_account_coming_up_is_the_latest_word(self) -> None:
        assert Run().nodes["f0"].told_s == -1.0

    def test_egress_is_what_landed_from_the_prfaas_site(self) -> None:
        run = Run()
        run.at(2.0, telemetry("d0", 2.0, {"f0": 1000, "p0": 7777}))
        run.at(4.0, telemetry("d0", 4.0, {"f0": 3000, "p0": 9999}))
        assert run.control.view.egress_bytes == 3000
        assert run.control.view.egress_bps == 2000 * 8 / 2.0

    def test_the_rates_of_the_decode_nodes_add_up(self) -> None:
        run = Run()
        for node in ("d0", "d1"):
            run.at(1.0, telemetry(node, 1.0, {"f0": 0}))
            run.at(3.0, telemetry(node, 3.0, {"f0": 1000}))
        assert run.control.view.egress_bps == 2 * 1000 * 8 / 2.0

    def test_what_a_local_prefill_node_fetches_from_the_prfaas_site_is_egress_too(self) -> None:
        run = Run()
        run.at(1.0, telemetry("p0", 1.0, {"f0": 1000, "p1": 500}))
        run.at(1.0, telemetry("d0", 1.0, {"f0": 30}))
        assert run.control.view.egress_bytes == 1030

    def test_what_lands_at_the_prfaas_site_is_not(self) -> None:
        run = Run()
        run.at(1.0, telemetry("f0", 1.0, {"f0": 1000, "p0": 500}))
        assert run.control.view.egress_bytes == 0

    def test_two_accounts_of_one_time_do_not_divide_by_zero(self) -> None:
        run = Run()
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1000}))
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1500}))
        assert run.control.view.egress_bytes == 1500

    def test_a_lost_node_lands_nothing_any_more(self) -> None:
        run = Run()
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1000}))
        run.at(2.0, NodeLost("d0", "gone"))
        assert run.control.view.egress_bps == 0.0
        assert run.control.view.egress_bytes == 1000

    def test_what_a_lost_node_had_said_before_is_no_news(self) -> None:
        run = Run()
        run.at(2.0, NodeLost("d0", "gone"))
        run.at(2.1, telemetry("d0", 1.9, {"f0": 1000}))
        assert (run.control.view.egress_bytes, run.nodes["d0"].told_s) == (0, -1.0)

    def test_a_node_that_is_up_again_counts_from_zero(self) -> None:
        run = Run()
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1000}, landing_bytes=5))
        run.at(2.0, NodeLost("d0", "gone"))
        run.at(3.0, NodeUp("d0", "decode"))
        assert (run.nodes["d0"].told_s, run.nodes["d0"].landing_bytes) == (3.0, 0)
        run.at(4.0, telemetry("d0", 4.0, {"f0": 300}))
        assert run.control.view.egress_bytes == 1300
        assert run.control.view.egress_bps == 300 * 8 / 1.0

    def test_an_account_that_was_overtaken_is_no_news(self) -> None:
        run = Run()
        run.at(3.0, telemetry("d0", 3.0, {"f0": 3000}))
        run.at(3.1, telemetry("d0", 2.0, {"f0": 1000}))
        assert (run.control.view.egress_bytes, run.nodes["d0"].told_s) == (3000, 3.0)

    def test_an_account_told_twice_counts_once(self) -> None:
        run = Run()
        for _ in range(2):
            run.at(3.0, telemetry("d0", 3.0, {"f0": 3000}))
        assert run.control.view.egress_bytes == 3000

    def test_what_was_said_before_it_came_up_is_of_its_former_life(self) -> None:
        run = Run()
        run.at(3.0, NodeLost("d0", "gone"))
        run.at(5.0, NodeUp("d0", "decode"))
        run.at(5.1, telemetry("d0", 2.9, {"f0": 7000}))
        assert run.control.view.egress_bytes == 0

    def test_counters_that_began_anew_unnoticed_never_take_anything_back(self) -> None:
        run = Run()
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1000}))
        run.at(2.0, telemetry("d0", 2.0, {"f0": 300}))
        assert run.control.view.egress_bytes == 1300
        assert run.control.view.egress_bps == 300 * 8 / 1.0

    def test_an_account_of_a_node_nobody_serves_with_yet_is_no_news(self) -> None:
        run = Run(up=False)
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1000}))
        assert run.control.view.egress_bytes == 0


class TestSilent:
    """A node that has given no account for 3.5 periods is not counted on, and nothing is left waiting for it."""

    def test_after_three_and_a_half_periods_and_not_before(self) -> None:
        run = Run(telemetry_s=2.0)
        run.tell(10.0)
        run.tell(16.0, "p0", "p1", "d0", "d1")
        run.look(17.0)
        assert not run.nodes["f0"].silent
        run.look(18.0)
        assert [node.name for node in run.nodes.values() if node.silent] == ["f0"]

    def test_it_takes_no_requests_but_lives(self) -> None:
        run = Run()
        run.tell(10.0, "p0", "p1", "d0", "d1")
        run.look(10.0)
        assert run.nodes["f0"].alive
        assert run.control.view.prefill("prfaas") == ()

    def test_its_requests_are_tried_elsewhere_once(self) -> None:
        run = Run(F0_D0, P1_D1)
        run.arrive(9.0)
        run.tell(10.0, "p0", "p1", "d0", "d1")
        out = run.look(10.0)
        assert cancels(out) == [("f0", 1), ("d0", 1)]
        assert orders(out) == [("p1", 2, "d1")]
        run.tell(12.0, "p0", "p1", "d0", "d1")
        assert run.look(12.0) == []

    def test_nodes_that_fall_silent_together_are_one_failure(self) -> None:
        """Their requests do not wander from one to the next until they are given up."""

        class LeastLoaded(To):
            def route(self, request: RequestView, view: SystemView) -> Any:
                nodes = [*view.prefill("prfaas"), *view.prefill("pd")]
                return Decision(nodes[0].name, view.decode()[0].name, "the first that serves")

        fleet = [NodeSpec(f"f{i}", "prfaas", "prefill", 0) for i in range(4)] + FLEET[1:]
        control = Control(fleet, COST, 100e9, LeastLoaded(), Homogeneous(), Rules())  # type: ignore[arg-type]
        for spec in fleet:
            control.handle(0.0, NodeUp(spec.name, spec.role))
        control.handle(1.0, Arrive("a", 100, 8))
        for spec in FLEET[1:]:
            control.handle(10.0, telemetry(spec.name, 10.0))
        control.handle(10.0, Tick())
        assert (control.live["a"].attempts, control.live["a"].prefill_node) == (2, "p0")

    @pytest.mark.parametrize("node", ["p0", "d0"])
    def test_an_answer_under_way_goes_on(self, node: str) -> None:
        run = Run()
        run.arrive()
        run.to_stage("admitted")
        run.tell(10.0, *(name for name in run.nodes if name != node))
        assert run.look(10.0) == []
        run.to_stage("finished")
        assert [type(end) for end in run.ended()] == [Completed]
        run.assert_idle()

    def test_late_word_of_the_old_attempt_is_ignored(self) -> None:
        run = Run(F0_D0, P1_D1)
        run.arrive(9.0)
        run.tell(10.0, "p0", "p1", "d0", "d1")
        run.look(10.0)
        run.to_stage("finished", attempt=1)
        assert run.ended() == []
        run.to_stage("finished", attempt=2)
        assert [type(end) for end in run.ended()] == [Completed]
        run.assert_idle()

    def test_word_of_the_prefill_of_an_answer_under_way_may_come_after_the_silence(self) -> None:
        run = Run()
        run.arrive()
        run.at(3.0, Admitted("a", 1, 2.5, 3.0))
        run.tell(10.0, "f0", "p1", "d0", "d1")
        run.look(10.0)
        run.at(11.0, Prefilled("a", 1, 1.0, 2.0, 1000))
        run.at(12.0, Finished("a", 1, 11.0, 12.0, 8))
        (end,) = run.ended()
        assert end.record.prefill_end_s == 2.0

    def test_a_fresh_account_ends_it(self) -> None:
        run = Run()
        run.tell(10.0, "p0", "p1", "d0", "d1")
        run.look(10.0)
        run.tell(11.0, "f0")
        assert [node.name for node in run.control.view.prefill("prfaas")] == ["f0"]

    def test_an_old_account_that_comes_late_does_not(self) -> None:
        """Of a queue that an outage held back, the first to come says nothing of now."""
        run = Run()
        run.tell(60.0, "p0", "p1", "d0", "d1")
        run.look(60.0)
        run.at(61.0, telemetry("f0", 5.0))
        assert run.nodes["f0"].silent

    def test_it_and_its_end_are_on_record(self) -> None:
        run = Run()
        run.tell(10.0, "p0", "p1", "d0", "d1")
        run.look(10.0)
        run.tell(11.0, "f0")
        silent, heard = run.changes("node")[-2:]
        assert (silent.t_s, silent.node, silent.before, silent.after) == (10.0, "f0", "up", "silent")
        assert silent.trigger == "nothing was heard of it for 11 s"
        assert (heard.t_s, heard.node, heard.before, heard.after) == (11.0, "f0", "silent", "up")

    def test_one_that_is_lost_and_comes_up_again_serves(self) -> None:
        run = Run()
        run.tell(10.0, "p0", "p1", "d0", "d1")
        run.look(10.0)
        run.at(11.0, NodeLost("f0", "gone"))
        run.at(12.0, NodeUp("f0", "prefill"))
        assert [node.name for node in run.control.view.prefill("prfaas")] == ["f0"]

    def test_a_silent_receiver_lands_nothing_that_is_known_of(self) -> None:
        run = Run()
        run.at(1.0, telemetry("d0", 1.0, {"f0": 1000}))
        run.tell(10.0, "f0", "p0", "p1", "d1")
        run.look(10.0)
        run.tell(11.0, "d1")
        assert run.control.view.egress_bps == 0.0


class TestAccounts:
    """What control makes of the accounts: the link's estimate is of one set of nodes at a time."""

    def backlogged(self, *, from_s: int = 1, until_s: int, run: Run | None = None) -> Run:
        """A second at a time 1 GB lands at each of d0 and d1 (16 Gbps in all) while much more waits at f0."""
        run = Run() if run is None else run
        waits = (PathSample("", 0.0, 0, 0, 0.0, 50 * 10**9),)
        for second in range(from_s, until_s + 1):
            for node in ("d0", "d1"):
                run.at(second, telemetry(node, second, {"f0": second * 10**9}))
            run.at(second, telemetry("f0", second, paths=waits))
            run.tell(second, "p0", "p1")
            run.look(second)
        return run

    def test_a_backlog_shows_what_the_link_carries(self) -> None:
        assert self.backlogged(until_s=6).control.observed.link.bps == pytest.approx(16e9)

    def test_a_receiver_that_is_lost_does_not_halve_the_estimate(self) -> None:
        run = self.backlogged(until_s=6)
        run.at(6.9, NodeLost("d1", "gone"))
        run.at(7.0, telemetry("d0", 7.0, {"f0": 7 * 10**9}))
        run.at(7.0, telemetry("f0", 7.0, paths=(PathSample("", 0.0, 0, 0, 0.0, 50 * 10**9),)))
        run.look(7.0)
        assert run.control.observed.link.bps == pytest.approx(16e9)

    def test_a_receiver_that_joins_does_not_either(self) -> None:
        run = self.backlogged(until_s=6)
        run.at(6.5, NodeLost("d1", "gone"))
        run.at(6.9, NodeUp("d1", "decode"))
        for node, landed in (("d0", 7 * 10**9), ("d1", 10**8)):
            run.at(7.0, telemetry(node, 7.0, {"f0": landed}))
        run.at(7.0, telemetry("f0", 7.0, paths=(PathSample("", 0.0, 0, 0, 0.0, 50 * 10**9),)))
        run.look(7.0)
        assert run.control.observed.link.bps == pytest.approx(16e9)

    def test_what_a_receiver_gained_in_silence_did_not_land_in_a_second(self) -> None:
        run = self.backlogged(until_s=6)
        for second in range(7, 31):
            run.at(second, telemetry("d0", second, {"f0": 6 * 10**9}))
            run.tell(second, "f0", "p0", "p1")
            run.look(second)
        assert run.nodes["d1"].silent
        run.at(31.0, telemetry("d1", 31.0, {"f0": 30 * 10**9}))
        run.at(31.0, telemetry("d0", 31.0, {"f0": 6 * 10**9}))
        run.look(31.0)
        assert run.control.observed.link.bps == pytest.approx(16e9)
        assert run.control.view.egress_bytes == 36 * 10**9

    def test_a_sender_nobody_hears_of_is_not_backlogged_for_ever(self) -> None:
        """Its last word was that much waits. Nothing lands since, and that is an outage: the link's rate was never
        seen to be 0, and a site that comes back is tried."""
        run = self.backlogged(until_s=6)
        for second in range(7, 60):
            for node in ("d0", "d1"):
                run.at(second, telemetry(node, second, {"f0": 6 * 10**9}))
            run.tell(second, "p0", "p1")
            run.look(second)
        assert not run.control.observed.link.backlogged
        assert run.control.observed.link.bps >= 16e9 * 0.99

    def test_with_caches_the_estimate_waits_for_the_local_prefill_nodes_too(self) -> None:
        run = Run(block_tokens=512)
        for second in (1.0, 2.0, 3.0):
            run.tell(second, "f0", "d0", "d1", *(["p0", "p1"] if second != 2.0 else []))
            run.look(second)
        assert len(run.control.observed.link.egress._points) == 1

    def test_a_receiver_that_drains_still_lands_what_was_on_its_way(self) -> None:
        run = self.backlogged(until_s=6)
        run.look(6.5, SetRole("d1", "prefill", "why not"))
        self.backlogged(from_s=7, until_s=9, run=run)
        assert run.control.observed.link.bps == pytest.approx(16e9)


class TestLookingAround:
    """Control ticks on its own time, and a policy's ticks are contained like its decisions."""

    def test_the_policy_is_asked_every_tick(self) -> None:
        run = Run(tick_s=5.0)
        assert run.control.next_s() == 5.0
        run.look(5.0, Note("threshold", 1.0, 2.0, "why"))
        assert run.control.next_s() == 10.0
        assert run.changes("threshold") == [Change(5.0, "threshold", "", 1.0, 2.0, "why")]

    def test_a_look_before_its_time_asks_nobody(self) -> None:
        run = Run(tick_s=5.0)
        run.look(4.9, Note("threshold", 1.0, 2.0, "why"))
        assert run.changes("threshold") == []
        assert run.control.next_s() == 5.0

    @pytest.mark.parametrize(
        ("wants", "kind"),
        [
            (ZeroDivisionError("no"), "tick: ZeroDivisionError"),
            (None, "tick: TypeError"),
            ([None], "action: TypeError"),
            (["threshold"], "action: TypeError"),
            ([SetRole("x9", "decode", "")], "action: ValueError"),
            ([SetRole("p0", "router", "")], "action: ValueError"),  # type: ignore[arg-type]
        ],
    )
    def test_a_policy_whose_tick_fails_is_counted_and_changes_nothing(self, wants: Any, kind: str) -> None:
        run = Run()
        run.policy.wants = wants
        assert run.at(1.0, Tick()) == []
        assert run.control.policy_errors == {kind: 1}
        assert not run.control.busy
        assert orders(run.arrive(1.5)) == [("p0", 1, "d0")]

    def test_an_action_that_cannot_be_done_is_left_out_alone(self) -> None:
        run = Run(telemetry_s=1e9)
        first, last = Note("threshold", 1.0, 2.0, "why"), SetRole("d1", "prefill", "too many")
        run.look(1.0, first, SetRole("x9", "decode", ""), None, last)
        assert [change.kind for change in run.control.changes] == ["threshold", "policy_error", "policy_error", "role"]
        assert run.control.policy_errors == {"action: ValueError": 1, "action: TypeError": 1}

    def test_what_was_left_out_is_on_record_once_and_counted_every_time(self) -> None:
        run = Run(telemetry_s=1e9)
        for second in (1.0, 2.0, 3.0):
            run.look(second, SetRole("x9", "decode", ""))
        why = "ValueError: x9 cannot become a decode node"
        assert run.changes("policy_error") == [Change(1.0, "policy_error", "", "SetRole", "left out", why)]
        assert run.control.policy_errors == {"action: ValueError": 3}

    def test_a_tick_that_fails_on_its_way_asks_for_nothing(self) -> None:
        def half(view: Any) -> Any:
            yield Note("threshold", 1.0, 2.0, "why")
            raise RuntimeError("no")

        run = Run()
        run.policy.tick = half  # type: ignore[method-assign]
        run.look(1.0)
        assert run.control.policy_errors == {"tick: RuntimeError": 1}
        assert run.control.changes == []

    def test_a_policy_without_a_tick_changes_nothing(self) -> None:
        control = Control(FLEET, COST, 1e9, Homogeneous(), Homogeneous())  # type: ignore[arg-type]
        assert control.handle(1.0, Tick()) == []
        assert control.policy_errors == {}

    def test_another_policy_is_on_record(self) -> None:
        run = Run()
        run.at(4.0, PolicySet("static"))
        (change,) = run.changes("policy")
        assert (change.t_s, change.after, change.trigger) == (4.0, "static", "asked for")

    def test_a_fault_by_hand_is_on_record_and_changes_nothing_else(self) -> None:
        run = Run()
        assert run.at(4.0, Disturbed("outage (stall)")) == []
        assert run.at(9.0, Disturbed("outage (stall)", healed=True)) == []
        told = [(change.t_s, change.before, change.after, change.trigger) for change in run.changes("fault")]
        assert told == [(4.0, "none", "outage (stall)", "by hand"), (9.0, "outage (stall)", "none", "by hand")]

    def test_another_policy_finds_what_was_observed(self) -> None:
        run = Run()
        run.arrive(tokens=500)
        run.control.policy = To(P1_D1)
        run.at(4.0, PolicySet("mine"))
        assert run.control.view.observed.lengths.held == 1
        assert orders(run.arrive(5.0, "b")) == [("p1", 1, "d1")]


class TestConversion:
    """A local node changes its role: it takes nothing new, drains, reloads, joins. One at a time, never the last."""

    def converting(self, node: str = "d1", role: Any = "prefill", *answers: Any) -> Run:
        run = Run(*answers, reload_s=60.0, telemetry_s=1e9)
        run.look(1.0, SetRole(node, role, "too many"))
        return run

    def test_an_idle_node_is_told_at_the_next_look(self) -> None:
        run = self.converting()
        assert run.look(2.0) == [("d1", Convert("prefill", 60.0))]
        assert run.look(3.0) == []

    def test_from_the_decision_on_it_takes_nothing_new(self) -> None:
        run = self.converting()
        assert [node.name for node in run.control.view.decode()] == ["d0"]

    @pytest.mark.parametrize("node", ["p1", "d1"])
    @pytest.mark.parametrize("stage", ["queued", "prefilled"])
    def test_it_waits_for_a_request_without_a_first_token(self, node: str, stage: str) -> None:
        run = Run(P1_D1, telemetry_s=1e9)
        run.arrive()
        run.to_stage(stage)
        run.look(8.0, SetRole(node, "decode" if node == "p1" else "prefill", ""))
        assert run.look(9.0) == []
        assert run.control.busy

    def test_a_decode_node_waits_for_its_answers_and_a_prefill_node_does_not(self) -> None:
        for node, role, told in (("p1", "decode", True), ("d1", "prefill", False)):
            run = Run(P1_D1, telemetry_s=1e9)
            run.arrive()
            run.to_stage("admitted")
            run.look(8.0, SetRole(node, role, ""))  # type: ignore[arg-type]
            assert bool(run.look(9.0)) is told

    def test_nothing_is_lost_in_a_drain(self) -> None:
        run = Run(P1_D1, P0_D0, telemetry_s=1e9)
        run.arrive()
        run.look(1.0, SetRole("d1", "prefill", ""))
        run.look(2.0)
        run.to_stage("finished")
        assert run.look(8.0) == [("d1", Convert("prefill", 60.0))]
        assert [type(end) for end in run.ended()] == [Completed]
        assert run.ended()[0].record.attempts == 1

    def test_when_it_has_reloaded_it_serves_its_new_role(self) -> None:
        run = self.converting("d1", "prefill", Decision("d1", "d0", "joined"))
        run.look(2.0)
        assert not run.nodes["d1"].alive
        run.at(62.0, NodeUp("d1", "prefill"))
        assert not run.control.busy
        assert orders(run.arrive(63.0)) == [("d1", 1, "d0")]

    def test_it_and_its_end_are_on_record(self) -> None:
        run = self.converting()
        run.look(2.0)
        run.at(62.0, NodeUp("d1", "prefill"))
        assert run.changes("role", "joined", "node") == [
            Change(1.0, "role", "d1", "decode", "prefill", "too many"),
            Change(62.0, "joined", "d1", "decode", "prefill", "it has reloaded"),
        ]

    def test_two_at_a_time_are_refused(self) -> None:
        run = self.converting()
        run.look(2.0, SetRole("p1", "decode", ""))
        assert run.control.policy_errors == {"action: ValueError": 1}
        assert not run.nodes["p1"].draining

    def test_when_one_has_joined_another_may_follow(self) -> None:
        run = self.converting()
        run.look(2.0)
        run.at(62.0, NodeUp("d1", "prefill"))
        run.look(63.0, SetRole("p1", "decode", ""))
        assert run.nodes["p1"].draining

    @pytest.mark.parametrize("other", ["dead", "silent"])
    @pytest.mark.parametrize(("node", "last", "role"), [("d0", "d1", "prefill"), ("p0", "p1", "decode")])
    def test_never_the_last_that_serves_its_role(self, node: str, last: str, role: Any, other: str) -> None:
        run = Run()
        if other == "dead":
            run.at(1.0, NodeLost(node, "gone"))
        run.tell(10.0, *(name for name in run.nodes if name != node))
        run.look(10.0)
        run.look(11.0, SetRole(last, role, ""))
        assert run.control.policy_errors == {"action: ValueError": 1}
        assert not run.nodes[last].draining

    @pytest.mark.parametrize("state", ["dead", "silent"])
    def test_never_one_that_is_out_of_reach(self, state: str) -> None:
        run = Run()
        if state == "dead":
            run.at(1.0, NodeLost("d1", "gone"))
        run.tell(10.0, "f0", "p0", "p1", "d0")
        run.look(10.0)
        run.look(11.0, SetRole("d1", "prefill", ""))
        assert run.control.policy_errors == {"action: ValueError": 1}
        assert not run.control.busy

    def test_never_one_without_slots_for_answers(self) -> None:
        fleet = [NodeSpec(spec.name, spec.site, spec.role, 0 if spec.name == "p1" else spec.slots) for spec in FLEET]
        control = Control(fleet, COST, 1e9, (policy := To(P0_D0)), Homogeneous())  # type: ignore[arg-type]
        for spec in fleet:
            control.handle(0.0, NodeUp(spec.name, spec.role))
        policy.wants = [SetRole("p1", "decode", "")]
        control.handle(1.0, Tick())
        assert control.policy_errors == {"action: ValueError": 1}

    def test_never_one_of_the_remote_site(self) -> None:
        run = Run()
        run.look(1.0, SetRole("f0", "decode", ""))
        assert run.control.policy_errors == {"action: ValueError": 1}

    def test_one_that_dies_while_it_drains_frees_the_way_for_another(self) -> None:
        run = self.converting()
        run.at(1.5, NodeLost("d1", "gone"))
        assert run.look(2.0, SetRole("p1", "decode", "")) == []
        assert run.nodes["p1"].draining
        run.at(3.0, NodeUp("d1", "decode"))
        assert [node.name for node in run.control.view.decode()] == ["d0", "d1"]

    def test_one_that_dies_while_it_reloads_frees_the_way_and_is_on_record(self) -> None:
        run = self.converting()
        run.look(2.0)
        run.at(30.0, NodeLost("d1", "killed"))
        assert not run.control.busy
        assert run.changes("node") == [Change(30.0, "node", "d1", "reloading", "lost", "killed")]

    def test_one_that_begins_anew_while_it_drains_is_in_its_old_role_again(self) -> None:
        run = self.converting()
        run.at(1.5, NodeUp("d1", "decode"))
        assert run.look(2.0) == []
        assert [node.name for node in run.control.view.decode()] == ["d0", "d1"]

    def test_one_that_falls_silent_while_it_drains_still_does(self) -> None:
        run = Run(P1_D1, P0_D0)
        run.arrive()
        run.look(1.0, SetRole("d1", "prefill", ""))
        run.tell(10.0, "f0", "p0", "p1", "d0")
        out = run.look(10.0)
        assert cancels(out) == [("p1", 1), ("d1", 1)]
        assert ("d1", Convert("prefill", 60.0)) in out

    def test_what_it_told_of_its_former_role_is_not_counted_again(self) -> None:
        """A converted process keeps its epoch, and its counters."""
        run = Run(telemetry_s=1e9)
        run.at(1.0, telemetry("d1", 1.0, {"f0": 5000}))
        run.look(1.0, SetRole("d1", "prefill", ""))
        run.look(2.0)
        run.at(62.0, NodeUp("d1", "prefill"))
        run.at(63.0, telemetry("d1", 63.0, {"f0": 5000}))
        run.look(64.0, SetRole("d1", "decode", ""))
        run.look(65.0)
        run.at(125.0, NodeUp("d1", "decode"))
        run.at(126.0, telemetry("d1", 126.0, {"f0": 5100}))
        assert run.control.view.egress_bytes == 5100

    def test_what_it_cached_is_forgotten(self) -> None:
        run = Run(P0_D0, block_tokens=512, telemetry_s=1e9)
        run.at(0.5, CacheChanged("p1", (11, 12), ()))
        run.look(1.0, SetRole("p1", "decode", ""))
        run.look(2.0)
        run.at(3.0, CacheChanged("p1", (13,), ()))
        run.at(4.0, Arrive("a", 1600, 8, (11, 12, 13), 512))
        assert run.policy.asked[-1].hits == {}


class TestLimits:
    """What may wait, and how long."""

    def test_more_than_may_wait_are_turned_away(self) -> None:
        run = Run(waiting_requests=2)
        for name in "abc":
            run.arrive(name=name)
        failure = run.the_failure()
        assert (failure.record.request_id, failure.http_status, failure.record.error) == ("c", 429, "overloaded")
        assert failure.retry_after_s is not None
        assert run.control.waiting == 2

    def test_a_request_that_has_its_first_token_does_not_wait(self) -> None:
        run = Run(waiting_requests=1)
        run.arrive()
        run.to_stage("admitted")
        assert orders(run.arrive(8.0, "b")) == [("p0", 1, "d0")]

    def test_one_that_is_tried_again_waits_once(self) -> None:
        run = Run(waiting_requests=2)
        run.arrive()
        run.at(1.0, AttemptFailed("a", 1, "refused"))
        assert run.control.waiting == 1

    @pytest.mark.parametrize("stage", ["queued", "prefilled"])
    def test_without_a_first_token_in_time_a_request_ends(self, stage: str) -> None:
        run = Run(deadline_s=30.0, tick_s=100.0)
        run.arrive(5.0)
        run.to_stage(stage)
        assert run.control.next_s() == 35.0
        out = run.at(35.0, Tick())
        assert cancels(out) == [("p0", 1), ("d0", 1)]
        failure = run.the_failure()
        assert (failure.http_status, failure.record.error) == (504, "deadline")
        assert failure.record.error_message == "no first token within 30 s"
        run.assert_idle()
        assert run.control.waiting == 0

    def test_a_deadline_is_from_the_arrival_and_not_from_the_last_try(self) -> None:
        run = Run(deadline_s=30.0, tick_s=100.0)
        run.arrive(5.0)
        run.at(30.0, AttemptFailed("a", 1, "refused"))
        run.at(35.0, Tick())
        assert run.the_failure().record.error == "deadline"

    def test_an_answer_under_way_has_no_deadline(self) -> None:
        run = Run(deadline_s=30.0, tick_s=100.0)
        run.arrive(5.0)
        run.to_stage("admitted")
        assert run.at(35.0, Tick()) == []

    def test_a_deadline_is_of_its_own_request_and_not_of_a_later_one_of_that_name(self) -> None:
        run = Run(deadline_s=30.0, tick_s=100.0)
        run.arrive(5.0)
        run.to_stage("finished")
        run.arrive(20.0)
        assert run.at(35.0, Tick()) == []
        assert "a" in run.control.live

    def test_a_look_that_is_only_for_a_deadline_does_not_ask_the_policy(self) -> None:
        run = Run(deadline_s=30.0, tick_s=100.0)
        run.arrive(5.0)
        run.look(35.0, Note("threshold", 1.0, 2.0, ""))
        assert run.changes("threshold") == []
        assert run.control.next_s() == 100.0


class Life(RuleBasedStateMachine):
    """Anything may be said at any time: every request ends exactly once, and is counted nowhere afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(up=False, deadline_s=20.0, waiting_requests=6, telemetry_s=2.0, reload_s=5.0)
        self.now_s = 0.0
        self.reloading: dict[str, Any] = {}  # nodes that were told to convert, and to what
        self.names: list[str] = []
        self.ended: dict[str, str] = {}
        self.ordered: dict[tuple[str, int], tuple[str, str]] = {}  # (request, attempt) -> its nodes
        self.cancelled: set[tuple[str, str, int]] = set()

    def tell(self, event: Event) -> None:
        self.now_s += 0.25
        before = {(record.request_id, record.attempts) for record in self.run.control.live.values()}
        draining = {node.name for node in self.run.nodes.values() if node.draining}
        alive = {node.name for node in self.run.nodes.values() if node.alive}
        egress_bytes = self.run.control.view.egress_bytes
        for destination, command in self.run.at(self.now_s, event):
            if isinstance(command, Prefill):
                key = (command.request_id, command.attempt)
                assert key not in self.ordered, "ordered twice"
                assert command.attempt <= 3
                for node, role in ((destination, "prefill"), (command.decode_node, "decode")):
                    assert self.run.nodes[node].alive
                    assert self.run.nodes[node].role == role
                    assert not self.run.nodes[node].silent
                    assert node not in draining
                self.ordered[key] = (destination, command.decode_node)
            elif isinstance(command, Cancel):
                assert destination in alive
                assert destination in self.ordered[command.request_id, command.attempt]
                self.cancelled.add((destination, command.request_id, command.attempt))
            elif isinstance(command, Convert):
                assert destination in draining
                assert not self.reloading, "two at a time"
                assert not [n for n in (destination,) if self.holds_something_of_a_request(n)]
                self.reloading[destination] = command.role
            else:
                assert destination == CLIENT
                assert command.record.request_id not in self.ended, "ended twice"
                self.ended[command.record.request_id] = command.record.status
        assert self.run.control.view.egress_bytes >= egress_bytes
        after = {(record.request_id, record.attempts) for record in self.run.control.live.values()}
        for name, attempt in before - after:
            if self.ended.get(name) != "ok":
                for node in self.ordered[name, attempt]:
                    emptied = not self.run.nodes[node].alive or event == NodeUp(node, self.run.nodes[node].role)
                    assert emptied or (node, name, attempt) in self.cancelled, "abandoned, and not cancelled"

    @initialize(up=st.booleans())
    def begin(self, up: bool) -> None:
        for spec in FLEET if up else ():
            self.tell(NodeUp(spec.name, spec.role))

    def holds_something_of_a_request(self, node: str) -> bool:
        live = self.run.control.live.values()
        return any(r.decode_node == node or (r.prefill_node == node and not r.admitted) for r in live)

    @precondition(lambda self: self.reloading)
    @rule()
    def it_has_reloaded(self) -> None:
        node, role = self.reloading.popitem()
        self.tell(NodeUp(node, role))
        assert self.run.nodes[node] in (*self.run.control.view.prefill("pd"), *self.run.control.view.decode())

    @rule(
        wants=st.one_of(
            st.just(ValueError("no")),
            st.just(None),
            st.sampled_from([[SetRole(spec.name, role, "")] for spec in FLEET for role in ("prefill", "decode")]),
            st.lists(st.integers(0, 9).map(lambda i: Recall(f"r{i}", "too slow")), max_size=3),
        ),
        after_s=st.sampled_from([0.0, 1.0, 5.0]),
    )
    def control_looks_around(self, wants: Any, after_s: float) -> None:
        self.now_s += after_s
        serving = Counter((n.site, n.role) for n in self.run.nodes.values() if n.alive and not n.silent)
        before = {node.name for node in self.run.nodes.values() if node.draining}
        self.run.policy.wants = wants
        self.tell(Tick())
        for node in self.run.nodes.values():
            if node.draining and node.name not in before:
                assert serving[node.site, node.role] >= 2, "the last of its role"

    @rule(node=st.sampled_from(["p0", "p1", "d0", "d1"]), looks=st.integers(1, 3))
    def a_node_is_to_change_its_role(self, node: str, looks: int) -> None:
        """When everybody has just been heard of; it may drain at once."""
        self.everybody_accounts()
        role: Any = "decode" if self.run.nodes[node].role == "prefill" else "prefill"
        for wants in [[SetRole(node, role, "")], [], []][:looks]:
            self.control_looks_around(wants, 1.0)

    @rule()
    def everybody_accounts(self) -> None:
        for spec in FLEET:
            self.tell(
                telemetry(spec.name, self.now_s, {"f0": self.run.control.fleet._landed.get(spec.name, (0.0, 0))[1]})
            )

    @rule(role=st.sampled_from(["prefill", "decode"]), node=st.sampled_from([spec.name for spec in FLEET]))
    def node_up(self, node: str, role: Any) -> None:
        spec = next(spec for spec in FLEET if spec.name == node)
        self.reloading.pop(node, None)
        self.tell(NodeUp(node, role if spec.slots else spec.role))

    @rule(node=st.sampled_from([spec.name for spec in FLEET]))
    def node_lost(self, node: str) -> None:
        self.reloading.pop(node, None)
        self.tell(NodeLost(node, "gone"))

    @rule(
        tokens=st.integers(1, 1000),
        answer=st.sampled_from([None, P0_D0, F0_D0, P1_D1, Reject("full"), ValueError("no"), Decision("d0", "d1", "")]),
    )
    def arrive(self, tokens: int, answer: Any) -> None:
        self.run.policy.answers = [answer]
        name = f"r{len(self.names)}"
        self.names.append(name)
        self.tell(Arrive(name, tokens, 8))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def client_gone(self, data: st.DataObject) -> None:
        self.tell(ClientGone(data.draw(st.sampled_from(self.names))))

    @precondition(lambda self: self.ordered)
    @rule(data=st.data(), kind=st.sampled_from(["prefilled", "admitted", "finished", "failed"]))
    def a_worker_speaks(self, data: st.DataObject, kind: str) -> None:
        """Of any attempt there ever was, in any order, as often as it likes."""
        name, attempt = data.draw(st.sampled_from(list(self.ordered)))
        self.speak(name, attempt, kind)

    @precondition(lambda self: self.run.control.live)
    @rule(data=st.data(), kind=st.sampled_from(["prefilled", "admitted", "finished", "failed"]))
    def a_worker_speaks_of_the_present(self, data: st.DataObject, kind: str) -> None:
        record = self.run.control.live[data.draw(st.sampled_from(list(self.run.control.live)))]
        self.speak(record.request_id, record.attempts, kind)

    def speak(self, name: str, attempt: int, kind: str) -> None:
        now_s = self.now_s
        self.tell(
            {
                "prefilled": Prefilled(name, attempt, now_s, now_s, 1),
                "admitted": Admitted(name, attempt, now_s, now_s),
                "finished": Finished(name, attempt, now_s, now_s, 8),
                "failed": AttemptFailed(name, attempt, "reason"),
            }[kind]
        )

    @rule(
        node=st.sampled_from([spec.name for spec in FLEET]),
        landed=st.integers(0, 10**6),
        ago_s=st.sampled_from([0.0, 0.0, 1.0, 9.0]),
    )
    def a_node_accounts(self, node: str, landed: int, ago_s: float) -> None:
        view, known = self.run.nodes[node], self.run.control.fleet._landed.get(node, (0.0, 0))[1]
        stamp_s = self.now_s + 0.25 - ago_s
        counted = view.alive and view.site == "pd" and stamp_s >= view.told_s
        before = self.run.control.view.egress_bytes
        self.tell(telemetry(node, stamp_s, {"f0": known + landed}))
        assert self.run.control.view.egress_bytes - before == (landed if counted else 0)

    @invariant()
    def what_waits_is_what_has_no_first_token(self) -> None:
        live = self.run.control.live.values()
        assert self.run.control.waiting == sum(not record.admitted for record in live) <= 6

    @invariant()
    def one_conversion_at_a_time(self) -> None:
        assert sum(node.draining for node in self.run.nodes.values()) <= 1

    @invariant()
    def every_request_is_live_or_has_ended(self) -> None:
        assert set(self.run.control.live) | set(self.ended) == set(self.names)
        assert not set(self.run.control.live) & set(self.ended)

    @invariant()
    def counters_are_those_of_the_live_requests(self) -> None:
        live = self.run.control.live.values()
        for node in self.run.nodes.values():
            queued = [r for r in live if r.prefill_node == node.name and not r.prefilled]
            assigned = [r for r in live if r.decode_node == node.name]
            assert node.queued_requests == len(queued)
            assert node.queued_tokens == sum(r.input_tokens for r in queued)
            assert node.queued_s == pytest.approx(sum(r.prefill_cost_s for r in queued))
            assert node.assigned_requests == len(assigned)
            assert node.decoding_requests == sum(r.admitted for r in assigned)

    @invariant()
    def nothing_waits_for_the_dead(self) -> None:
        for record in self.run.control.live.values():
            assert self.run.nodes[record.decode_node].alive
            assert self.run.nodes[record.prefill_node].alive or record.admitted
            if not record.admitted:
                assert not self.run.nodes[record.prefill_node].silent
                assert not self.run.nodes[record.decode_node].silent

    def teardown(self) -> None:
        for name in self.names:
            self.tell(ClientGone(name))
        assert set(self.ended) == set(self.names)
        self.run.assert_idle()


TestLifeOfMany = Life.TestCase
TestLifeOfMany.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
