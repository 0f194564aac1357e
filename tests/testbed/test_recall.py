"""What is taken back from a remote site over a link that is nearly dead, and what is left there."""

from __future__ import annotations

import pytest

from testbed.report.window import stats
from testbed.scheduler.api import Away, NodeView, Recall, SystemView
from testbed.scheduler.estimators import Observed
from testbed.scheduler.recall import BEHIND_S, recalls
from testbed.scheduler.rules import CostTable
from testbed.simulate import simulate
from tests.testbed.test_prfaas import HARDWARE

HERE, THERE = CostTable(HARDWARE["pd"], 131_072), CostTable(HARDWARE["prfaas"], 131_072)
TOKENS = 32 * 1024  # 5.0 s to compute here, 735 MB
BYTES = 735_000_000
LONGEST_S = 30.0


class Run:
    """Two local prefill nodes, requests that are away, and a link that carries what is said with much waiting."""

    def __init__(self, mbps: float, away: int = 1, *, prefilled: bool = True, waiting_bytes: int | None = None) -> None:
        self.nodes = {name: NodeView(name, "pd", "prefill") for name in ("p0", "p1")}
        for node in self.nodes.values():
            node.alive = True
        self.view = SystemView(self.nodes, 100e9, Observed(100e9))
        waits = away * BYTES if waiting_bytes is None else waiting_bytes
        for second in range(20):
            self.view.observed.link.account(second, second * mbps * 1e6 / 8, waits)
        kv_bytes = BYTES if prefilled else 0
        self.asked = 0
        self.requests = [Away(f"r{i}", TOKENS, TOKENS, 0, "f0", kv_bytes, 20.0 - i) for i in range(away)]
        self.view.away = self.away

    def away(self) -> list[Away]:
        self.asked += 1
        return self.requests

    def taken(self) -> list[Recall]:
        return recalls(self.view, HERE, THERE, LONGEST_S)

    def names(self) -> list[str]:
        return [one.request_id for one in self.taken()]


def test_what_would_cross_for_minutes_is_taken_back() -> None:
    [recall] = Run(mbps=50).taken()
    assert recall.request_id == "r0"
    assert recall.trigger == "118 s until it would be here at 0.05 Gbps, 5.01 s to compute it here"


def test_what_crosses_soon_enough_is_left_and_nobody_is_asked_for_it() -> None:
    run = Run(mbps=300)  # 20 s
    assert run.taken() == []
    assert run.asked == 0


def test_a_link_that_is_not_backlogged_says_nothing_of_what_it_carries() -> None:
    assert Run(mbps=0.01, waiting_bytes=0).taken() == []


def test_the_youngest_are_taken_until_the_rest_crosses_soon_enough() -> None:
    assert Run(mbps=500, away=4).names() == ["r3", "r2"]  # 47 s, 35 s, and 24 s for the two that are left


def test_what_is_still_to_be_computed_there_has_to_cross_as_well() -> None:
    run = Run(mbps=180, away=2, prefilled=False, waiting_bytes=BYTES)  # 33 s for what waits, twice as much to come
    assert run.names() == ["r1", "r0"]


def test_what_takes_as_long_here_is_left_there() -> None:
    run = Run(mbps=180)  # 33 s
    for node in run.nodes.values():
        node.queued_s = 9.0
    assert run.names() == ["r0"]
    run.requests = [run.requests[0]._replace(input_tokens=100_000)]  # 25 s here
    assert run.names() == []


def test_a_local_site_that_is_behind_itself_is_given_nothing_more() -> None:
    run = Run(mbps=50, away=20)
    assert len(run.names()) == 4  # two for each node: the third would find 10.02 s waiting
    for node in run.nodes.values():
        node.queued_s = BEHIND_S + 0.1
    assert run.names() == []


def test_without_a_local_prefill_node_there_is_nowhere_to_take_it() -> None:
    run = Run(mbps=50)
    for node in run.nodes.values():
        node.alive = False
    run.view.nodes_changed()
    assert run.taken() == []


@pytest.mark.parametrize("mbps", [20, 100])
def test_in_virtual_time_nobody_waits_for_a_link_that_is_nearly_dead(mbps: int) -> None:
    """100 Gbps fall to next to nothing for five minutes, and the local site could do the work alone."""
    sets = ["workload.rate_rps=0.3", f"phases.drop.link_rate_bps={mbps}mbps"]
    with_recall = simulate("link-drop", sets=sets)
    without = simulate("link-drop", sets=[*sets, "deployments.prfaas-pd.policy.parameters={recall_s: 0}"])
    assert with_recall.summary["requests"]["failed"] == without.summary["requests"]["failed"] == 0
    assert with_recall.summary["scheduler"]["recalled"] > 0 == without.summary["scheduler"]["recalled"]
    assert with_recall.requests["ttft_s"].max() < without.requests["ttft_s"].max() / 4
    again = with_recall.requests[with_recall.requests["attempts"] > 1]
    assert stats(again["prefill_site"].eq("pd").astype(float))["mean"] == 1.0
