"""When hot prefixes are brought to the other site, which ones, and how much of the link that may take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from testbed.scheduler.api import COPIES, NodeView, Replicate, RequestView, SystemView
from testbed.scheduler.estimators import Observed
from testbed.scheduler.rebalance import LEAST_HITS, Rebalance
from testbed.simulate import Result, simulate
from tests.bench.rebalance import offered

NOMINAL_BPS = 100e9
PERIOD_S = 30.0
BLOCK = 512
KV_BYTES = 50_000.0  # a token
SYSTEM = (1, 2, 3, 4)


class Run:
    """Two prefill nodes a site, a link that carries what is said, and holders as they are said."""

    def __init__(self, share: float = 0.1, gbps: float = 10.0) -> None:
        names = [("f0", "prfaas"), ("f1", "prfaas"), ("p0", "pd"), ("p1", "pd")]
        self.nodes = {name: NodeView(name, site, "prefill") for name, site in names}  # type: ignore[arg-type]
        self.nodes["d0"] = NodeView("d0", "pd", "decode", 20)
        for node in self.nodes.values():
            node.alive = True
        self.view = SystemView(self.nodes, NOMINAL_BPS, Observed(NOMINAL_BPS))
        self.held: dict[int, tuple[str, ...]] = {}
        self.view.holders = lambda block_id: self.held.get(block_id, ())
        self.rebalance = Rebalance(
            share, PERIOD_S, BLOCK, {"prfaas": lambda n: n * KV_BYTES, "pd": lambda n: n * KV_BYTES}
        )
        self.landed = 0.0
        self.seconds(PERIOD_S, gbps)

    def seconds(self, count: float, gbps: float = 10.0, waiting_gb: float = 0.0) -> Run:
        for _ in range(round(count)):
            self.view.now_s += 1
            self.landed += gbps * 1e9 / 8
            self.view.observed.link.account(self.view.now_s, self.landed, waiting_gb * 1e9)
        return self

    def asked(self, ids: tuple[int, ...] = SYSTEM, *, times: int = LEAST_HITS, at: Sequence[str] = ("f0",)) -> Run:
        """So many requests have found these blocks at those nodes."""
        self.held[ids[-1]] = tuple(at)
        for _ in range(times):
            hits = {name: len(ids) * BLOCK for name in at}
            self.rebalance.note(RequestView("a", 0.0, 9999, hits=hits, block_ids=(*ids, 99)), self.view.now_s)
        return self

    def copies(self, *, abundant: bool = True) -> list[Replicate]:
        return self.rebalance.propose(self.view, abundant=abundant)


class TestWhich:
    def test_a_hot_prefix_goes_to_the_site_that_lacks_it(self) -> None:
        [copy] = Run().asked(at=["f0"]).copies()
        assert copy[:3] == (SYSTEM, "f0", "p0")
        assert copy.trigger == "3 hits in 300 s, only at prfaas; egress at 10%"

    def test_and_from_here_to_there(self) -> None:
        [copy] = Run().asked(at=["p1"]).copies()
        assert copy[:3] == (SYSTEM, "p1", "f0")

    def test_the_least_loaded_holder_lends_and_the_least_loaded_node_takes(self) -> None:
        run = Run().asked(at=["f0", "f1"])
        run.nodes["f0"].queued_s = run.nodes["p0"].queued_s = 5.0
        [copy] = run.copies()
        assert (copy.from_node, copy.to_node) == ("f1", "p1")

    def test_what_both_sites_hold_stays_where_it_is(self) -> None:
        assert Run().asked(at=["f0", "p1"]).copies() == []

    def test_what_nobody_holds_any_more_cannot_be_copied(self) -> None:
        assert Run().asked(at=[]).copies() == []

    def test_a_prefix_that_few_asked_for_is_not_hot(self) -> None:
        assert Run().asked(times=LEAST_HITS - 1).copies() == []

    def test_another_attempt_of_a_request_is_not_another_hit(self) -> None:
        run = Run().asked(times=LEAST_HITS - 1)
        again = RequestView("a", 0.0, 9999, attempt=2, hits={"f0": 4 * BLOCK}, block_ids=(*SYSTEM, 99))
        run.rebalance.note(again, run.view.now_s)
        assert run.copies() == []


class TestWhen:
    def test_not_while_bandwidth_is_scarce(self) -> None:
        assert Run().asked().copies(abundant=False) == []

    def test_not_while_much_is_in_use(self) -> None:
        assert Run(gbps=55).asked().copies() == []

    def test_not_while_the_link_is_backlogged(self) -> None:
        assert Run().asked().seconds(5, 10, waiting_gb=100).copies() == []

    @pytest.mark.parametrize("state", ["silent", "dead"])
    def test_not_while_a_node_is_out_of_reach(self, state: str) -> None:
        run = Run().asked()
        run.nodes["d0"].silent, run.nodes["d0"].alive = state == "silent", state != "dead"
        assert run.copies() == []

    def test_once_a_period(self) -> None:
        run = Run().asked()
        assert len(run.copies()) == 1
        assert run.asked().seconds(PERIOD_S - 1).copies() == []
        assert len(run.seconds(1).copies()) == 1


class TestHowMuch:
    def many(self, run: Run, count: int) -> Run:
        """Prefixes of 4 blocks: 0.1 GB each."""
        for i in range(count):
            run.asked(tuple(range(100 * i, 100 * i + 4)))
        return run

    def test_no_more_than_the_share_of_what_the_link_carries_in_a_period(self) -> None:
        one = 4 * BLOCK * KV_BYTES * 8 / NOMINAL_BPS / PERIOD_S  # of the link, for a period
        assert len(self.many(Run(share=3.5 * one), 6).copies()) == 3

    def test_a_prefix_that_is_too_large_leaves_its_place_to_smaller_ones(self) -> None:
        one = 4 * BLOCK * KV_BYTES * 8 / NOMINAL_BPS / PERIOD_S
        run = self.many(Run(share=1.5 * one), 1).asked(tuple(range(5000, 5064)))
        assert [len(copy.block_ids) for copy in run.copies()] == [4]

    def test_no_more_than_may_be_on_their_way_at_a_time(self) -> None:
        assert len(self.many(Run(share=0.4), COPIES + 5).copies()) == COPIES

    def test_nothing_while_earlier_ones_are_on_their_way(self) -> None:
        run = self.many(Run(share=0.4), 1)
        run.view.copying = 1
        assert run.copies() == []


@pytest.fixture(scope="module")
def copied() -> Result:
    return TestInVirtualTime.run(TestInVirtualTime.SHARE)


class TestInVirtualTime:
    """Agents that share system prompts, on the fleet of `conversation`."""

    SHARE = 0.02
    DURATION_S = 400.0

    @classmethod
    def run(cls, share: float, *sets: str) -> Result:
        given = (
            f"deployments.prfaas-pd.policy.parameters={{replicate_share: {share}}}",
            f"workload={{rate_rps: 3, duration_s: {cls.DURATION_S}}}",
            "scheduler.tick_s=1",
            "telemetry_s=1",
            *sets,
        )
        return simulate("conversation", sets=given, workload=(offered(1, cls.DURATION_S), 3.0))

    def events(self, run: Result, kind: str) -> list[dict[str, object]]:
        return run.timeline[run.timeline["event"] == kind].to_dict("records")  # type: ignore[return-value]

    def test_what_began_has_ended_and_most_of_it_came(self, copied: Result) -> None:
        begun, ended = self.events(copied, "replicate"), self.events(copied, "replicated")
        assert len(begun) == len(ended) > 3
        assert sum(one["after"] > 0 for one in ended) > len(ended) / 2  # type: ignore[operator]

    def test_no_period_takes_more_than_its_share(self, copied: Result) -> None:
        landed: dict[int, float] = {}
        for one in self.events(copied, "replicated"):
            period = int(float(one["t_s"]) // PERIOD_S)  # type: ignore[arg-type]
            landed[period] = landed.get(period, 0.0) + float(one["after"])  # type: ignore[arg-type]
        budget = self.SHARE * NOMINAL_BPS * PERIOD_S / 8
        assert max(landed.values()) <= budget
        assert copied.summary["scheduler"]["replicated_bytes"] == sum(landed.values()) > 0

    def test_it_costs_nobody_an_answer_and_the_policy_no_error(self, copied: Result) -> None:
        assert copied.summary["requests"]["failed"] == 0
        assert copied.summary["policy_errors"] == {}

    def test_what_was_copied_is_not_fetched_again(self, copied: Result) -> None:
        without = self.run(0.0)
        assert self.events(without, "replicate") == []
        assert copied.requests["fetched_bytes"].sum() < without.requests["fetched_bytes"].sum()

    def test_none_while_the_link_is_cut(self) -> None:
        cut = "link.schedule={kind: constant, rate_bps: 100gbps, outages: [{at_s: 150, duration_s: 100}]}"
        run = self.run(self.SHARE, cut)
        times = [float(one["t_s"]) for one in self.events(run, "replicate")]  # type: ignore[arg-type]
        assert [at_s for at_s in times if at_s > 260]
        assert not [at_s for at_s in times if 155 < at_s < 250]
        assert len(self.events(run, "replicated")) == len(times)
