"""What a policy asks control to bring to the other site, and to take back from it."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.messages import Bring, Brought, CacheChanged, Cancel, Convert, Prefill, Prefilled
from testbed.control import Arrive, Change, NodeLost, NodeUp, Tick
from testbed.scheduler.api import COPIES, Away, Decision, Recall, Replicate, SetRole
from tests.testbed.test_control import F0_D0, P1_D1, Run, cancels, orders, telemetry

IDS = (11, 12, 13)
HOT = Replicate(IDS, "f0", "p0", "it is hot")


def holding(*nodes: str, **rules: Any) -> Run:
    """A run with caches, in which these nodes hold the prefix."""
    run = Run(**{"block_tokens": 512, "telemetry_s": 1e9, **rules})
    for node in nodes:
        run.at(0.0, CacheChanged(node, (13,), ()))
    return run


class TestCopies:
    def test_the_receiver_is_told_to_fetch_it(self) -> None:
        run = holding("f0")
        assert run.look(1.0, HOT) == [("p0", Bring("copy-1", 0, IDS, "f0"))]
        assert run.control.view.copying == 1
        assert run.changes("replicate") == [Change(1.0, "replicate", "p0", "f0", 3 * 512, "it is hot")]

    def test_its_end_is_on_record(self) -> None:
        run = holding("f0")
        run.look(1.0, HOT)
        run.at(3.5, Brought("copy-1", 0, 7000))
        assert run.control.view.copying == 0
        assert run.changes("replicated") == [Change(3.5, "replicated", "p0", 0, 7000, "from f0, after 2.5 s")]
        assert run.at(4.0, Brought("copy-1", 0, 7000)) == []
        assert len(run.changes("replicated")) == 1

    def test_one_that_came_to_nothing_too(self) -> None:
        run = holding("f0")
        run.look(1.0, HOT)
        run.at(2.0, Brought("copy-1", 0, 0))
        (change,) = run.changes("replicated")
        assert (change.after, change.trigger) == (0, "from f0, after 1 s: it was gone, or found no room")

    @pytest.mark.parametrize(
        ("asked", "why"),
        [
            (HOT._replace(from_node="p1"), "p1 and p0 are at the same site"),
            (HOT._replace(from_node="d0"), "d0 does not serve as a prefill node"),
            (HOT._replace(to_node="x9"), "x9 does not serve as a prefill node"),
            (HOT._replace(block_ids=()), "block_ids: a tuple of a prefix's blocks"),
            (HOT._replace(block_ids=(11, 12)), "f0 does not hold that prefix of 2 blocks"),
            (HOT._replace(to_node="p1"), "p1 holds that prefix of 3 blocks already"),
        ],
    )
    def test_what_cannot_be_copied_is_refused_by_name(self, asked: Replicate, why: str) -> None:
        run = holding("f0", "p1")
        assert run.look(1.0, asked) == []
        (change,) = run.changes("policy_error")
        assert why in change.trigger
        assert run.control.view.copying == 0

    def test_the_same_one_is_not_sent_twice_at_a_time(self) -> None:
        run = holding("f0")
        assert len(run.look(1.0, HOT, HOT)) == 1
        assert "is on its way to p0 already" in run.changes("policy_error")[0].trigger

    def test_no_more_than_may_be_on_their_way(self) -> None:
        run = holding()
        run.at(0.0, CacheChanged("f0", tuple(range(100)), ()))
        asked = [Replicate((i,), "f0", "p0", "") for i in range(COPIES + 1)]
        assert len(run.look(1.0, *asked)) == COPIES == run.control.view.copying

    def test_without_caches_there_are_none(self) -> None:
        run = Run()
        assert run.look(1.0, HOT) == []
        assert run.control.policy_errors == {"action: ValueError": 1}

    @pytest.mark.parametrize("lost", ["f0", "p0"])
    def test_it_ends_with_either_of_its_nodes(self, lost: str) -> None:
        run = holding("f0")
        run.look(1.0, HOT)
        assert run.at(2.0, NodeLost(lost, "gone")) == ([("p0", Cancel("copy-1", 0))] if lost == "f0" else [])
        assert run.control.view.copying == 0
        assert run.changes("replicated")[0].trigger == f"from f0, after 1 s: {lost} was lost"

    def test_it_ends_when_either_falls_silent(self) -> None:
        run = holding("f0", telemetry_s=1.0)
        run.look(1.0, HOT)
        run.tell(9.0, "p0", "p1", "d0", "d1")
        assert ("p0", Cancel("copy-1", 0)) in run.look(9.0)
        assert run.control.view.copying == 0

    def test_it_ends_when_either_changes_its_role(self) -> None:
        run = holding("f0")
        run.look(1.0, HOT, SetRole("p0", "decode", "too many"))
        assert run.look(2.0) == [("p0", Cancel("copy-1", 0)), ("p0", Convert("decode", 60.0))]

    def test_what_was_known_of_it_is_known_no_more_when_the_receiver_begins_anew(self) -> None:
        run = holding("f0")
        run.look(1.0, HOT)
        run.at(2.0, NodeUp("p0", "prefill"))
        assert run.control.view.copying == 0


class TestHolders:
    def test_the_policy_sees_who_holds_a_prefix(self) -> None:
        run = holding("f0", "p1")
        assert list(run.control.view.holders(13)) == ["f0", "p1"]
        assert list(run.control.view.holders(12)) == []
        run.at(1.0, NodeLost("f0", "gone"))
        assert list(run.control.view.holders(13)) == ["p1"]

    def test_a_request_of_which_something_is_cached_is_seen_with_its_blocks(self) -> None:
        run = holding("f0")
        run.at(1.0, Arrive("a", 2000, 8, (11, 12, 13, 14), 512))
        run.at(1.0, Arrive("b", 2000, 8, (21, 22, 23, 24), 512))
        assert [asked.block_ids for asked in run.policy.asked] == [(11, 12, 13), ()]

    def test_a_node_that_somebody_may_still_fetch_from_keeps_its_role(self) -> None:
        run = holding("p1")
        run.policy.answers = [Decision("p0", "d0", "fetch", None, 3 * 512, "p1")]
        run.at(1.0, Arrive("a", 2000, 8, (11, 12, 13, 14), 512))
        assert run.look(2.0, SetRole("p1", "decode", "too many")) == []
        assert run.look(3.0) == []
        run.at(4.0, Prefilled("a", 1, 2.0, 4.0, 1000))
        assert run.look(5.0) == [("p1", Convert("decode", 60.0))]


class TestRecall:
    """A request at the remote site that has no first token may be tried once more, because the policy says so."""

    def away(self, stage: str = "prefilled", **rules: Any) -> Run:
        run = Run(F0_D0, P1_D1, telemetry_s=1e9, **rules)
        run.arrive(tokens=1000)
        run.to_stage(stage)
        return run

    @pytest.mark.parametrize(("stage", "kv_bytes"), [("queued", 0), ("prefilled", 1000)])
    def test_the_policy_sees_what_is_away(self, stage: str, kv_bytes: int) -> None:
        run = self.away(stage)
        run.at(20.0, telemetry("d0", 20.0))
        assert run.control.view.away() == [Away("a", 1000, 1000, 0, "f0", kv_bytes, 20.0)]

    @pytest.mark.parametrize("stage", ["admitted", "finished"])
    def test_not_what_has_a_first_token(self, stage: str) -> None:
        assert self.away(stage).control.view.away() == []

    def test_not_what_is_here(self) -> None:
        run = Run(P1_D1)
        run.arrive()
        assert run.control.view.away() == []

    def test_not_what_has_no_try_left(self) -> None:
        assert self.away(max_attempts=1).control.view.away() == []

    @pytest.mark.parametrize("stage", ["queued", "prefilled"])
    def test_it_is_cancelled_there_and_tried_again(self, stage: str) -> None:
        run = self.away(stage)
        out = run.look(20.0, Recall("a", "the link is nearly dead"))
        assert cancels(out) == [("f0", 1), ("d0", 1)]
        assert orders(out) == [("p1", 2, "d1")]
        assert run.counters("f0") == {}
        assert run.changes("recall") == [Change(20.0, "recall", "f0", "a", "", "the link is nearly dead")]

    def test_what_it_had_cost_is_not_counted_as_its_own(self) -> None:
        run = self.away()
        run.look(20.0, Recall("a", ""))
        assert run.control.live["a"].kv_bytes == 0

    @pytest.mark.parametrize("name", ["a", "b", None])
    def test_what_cannot_be_recalled_is_refused_and_goes_on(self, name: Any) -> None:
        run = self.away("admitted")
        assert run.look(20.0, Recall(name, "")) == []
        assert run.control.policy_errors == {"action: ValueError": 1}
        assert "a" in run.control.live

    def test_twice_in_a_look_is_once(self) -> None:
        run = self.away()
        out = run.look(20.0, Recall("a", ""), Recall("a", ""))
        assert [type(command) for _, command in out] == [Cancel, Cancel, Prefill]

    def test_a_look_that_finds_nothing_away_is_empty(self) -> None:
        run = Run()
        run.at(1.0, Tick())
        assert run.control.view.away() == []
