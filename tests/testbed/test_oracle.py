"""The oracle: what it alone is told, what it makes of it, and that it is an upper bound which says what it is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from emulator.profile import load_profile
from testbed.assemble import build_workload
from testbed.figures.compare import _label
from testbed.lengths import hardware
from testbed.policies import CAVEAT, SHIPPED, load_policy, wants_future
from testbed.report.write import markdown
from testbed.scenario import Scenario, ScenarioError, load
from testbed.scheduler import model
from testbed.scheduler.api import Decision, Future, NodeView, RequestView, Setup, SystemView
from testbed.scheduler.oracle import Oracle
from testbed.scheduler.rules import solve_threshold
from testbed.series import arms
from testbed.simulate import simulate
from testbed.told import KnownFuture, Told

LENGTHS = model.LengthDistribution.log_normal(mu=9.90, sigma=1.00, low=128, high=131_072)
SHORTER = model.LengthDistribution.log_normal(mu=9.01, sigma=1.00, low=128, high=131_072)
FLEET = {"f0": ("prfaas", "prefill"), "p0": ("pd", "prefill"), "d0": ("pd", "decode")}
SHORT_DROP = ["phases.0.duration_s=60", "phases.1.duration_s=60", "phases.2.duration_s=60", "workload.warmup_s=0"]


def setup(link_bps: Callable[[float], float], lengths: Callable[[float], Any] = lambda at_s: LENGTHS) -> Setup:
    """The case study's hardware, one node of each kind."""
    hardwares: Any = {"prfaas": hardware(load_profile("h200-1t")), "pd": hardware(load_profile("h20-1t"))}
    return Setup(100e9, 1, 1, 1, hardwares, 0.025, 20, LENGTHS, future=Future(link_bps, lengths))


def oracle(link_bps: Callable[[float], float], **more: Any) -> Oracle:
    made = Oracle()
    made.start(setup(link_bps, **more))
    return made


def view(now_s: float = 0.0) -> SystemView:
    nodes = {name: NodeView(name, site, role, 20) for name, (site, role) in FLEET.items()}  # type: ignore[arg-type]
    for node in nodes.values():
        node.alive = True
    made = SystemView(nodes, 100e9)
    made.now_s = now_s
    return made


def routed(policy: Oracle, tokens: int, seen: SystemView, **known: Any) -> Decision:
    decision = policy.route(RequestView("a", seen.now_s, tokens, **known), seen)
    assert isinstance(decision, Decision)
    return decision


class TestWhatItIsTold:
    def test_is_asked_for_by_no_scheduler(self) -> None:
        assert [name for name in SHIPPED if wants_future(load_policy(name))] == ["oracle"]

    def test_without_it_it_does_not_start(self) -> None:
        with pytest.raises(ValueError, match="told the future"):
            Oracle().start(Setup(100e9, 1, 1, 1, setup(lambda at_s: 1e9).hardware, 0.025, 20, LENGTHS))

    def test_is_what_the_link_really_carries_in_each_phase(self) -> None:
        scenario = load("link-drop")
        trace, _ = build_workload(scenario, scenario.deployments[0])
        known = KnownFuture.of(scenario, scenario.deployments[0], trace).told()
        carried = [known.link_bps(at_s) for at_s in (0, 299.9, 300, 599.9, 600, 1e6)]
        assert carried == pytest.approx([95.6e9, 95.6e9, 4.78e9, 4.78e9, 95.6e9, 95.6e9], rel=1e-3)

    def test_is_the_distribution_of_each_moment(self) -> None:
        scenario = load("mix-shift")
        trace, _ = build_workload(scenario, scenario.deployments[0])
        known = KnownFuture.of(scenario, scenario.deployments[0], trace).told()
        means = [known.lengths(at_s).mean for at_s in (0.0, *range(0, 3600, 60))]
        assert means[0] == pytest.approx(27_000, rel=0.02)
        assert means[-1] == pytest.approx(13_000, rel=0.03)
        assert means == sorted(means, reverse=True)

    def test_comes_through_json_as_it_was(self) -> None:
        scenario = load("link-drop")
        known = KnownFuture([(0.0, 9e9), (5.5, 1e9 / 3)], [(0.0, LENGTHS), (7.0, SHORTER)])
        told = Told("oracle", {}, {"values": [5]}, json.loads(json.dumps(known.to_json())))
        future = told.setup(scenario, scenario.deployments[0], Oracle()).future
        assert future is not None
        assert [future.link_bps(at_s) for at_s in (0, 5.4, 5.5)] == [9e9, 9e9, 1e9 / 3]
        assert [future.lengths(at_s).mean for at_s in (6.9, 7)] == pytest.approx([LENGTHS.mean, SHORTER.mean])

    def test_is_told_to_nobody_else(self) -> None:
        scenario = load("link-drop")
        known = KnownFuture.still(scenario, LENGTHS)
        told = Told("prfaas", {}, {"values": [5, 50_000]}, known.to_json())
        assert told.setup(scenario, scenario.deployments[0], load_policy("prfaas")).future is None

    @pytest.mark.parametrize(
        ("data", "part"),
        [
            ({"link_bps": [[0, 1e9]]}, "an object with link_bps and lengths"),
            ({"link_bps": [], "lengths": [[0, {"values": [5]}]]}, "future.link_bps: must be a list"),
            ({"link_bps": [[1, 1e9], [0, 1e9]], "lengths": [[0, {"values": [5]}]]}, "in the order of time"),
            ({"link_bps": [[0, -1]], "lengths": [[0, {"values": [5]}]]}, "0 or more"),
            ({"link_bps": [[0, 1e9]], "lengths": [[0]]}, "future.lengths: must be a list"),
        ],
    )
    def test_of_another_form_is_refused(self, data: Any, part: str) -> None:
        with pytest.raises(model.ModelError, match=part):
            KnownFuture.from_json(data)


class TestItsRule:
    def test_on_an_idle_system_is_the_sooner_site_by_the_threshold(self) -> None:
        policy = oracle(lambda at_s: 95.6e9)
        sites = [routed(policy, tokens, view()).prefill_node for tokens in (128, 131_072)]
        assert sites == ["p0", "f0"]

    def test_its_threshold_is_that_of_7_for_what_is_there(self) -> None:
        made = setup(lambda at_s: 5e9, lambda at_s: SHORTER)
        assert oracle(lambda at_s: 5e9, lengths=lambda at_s: SHORTER).threshold_tokens == solve_threshold(
            made, None, SHORTER, 5e9
        )

    def test_a_queue_counts_for_the_other_site(self) -> None:
        policy, busy = oracle(lambda at_s: 95.6e9), view()
        busy.nodes["f0"].queued_s = 1000.0
        assert routed(policy, 131_072, busy).prefill_node == "p0"

    def test_what_it_has_sent_already_is_in_the_links_way(self) -> None:
        policy = oracle(lambda at_s: 0.5e9)
        nodes = [routed(policy, 131_072, view()).prefill_node for _ in range(20)]
        assert (nodes[0], nodes[-1]) == ("f0", "p0")

    def test_it_sends_nothing_into_a_link_that_is_about_to_fall(self) -> None:
        falls = oracle(lambda at_s: 95.6e9 if at_s < 100 else 0.05e9)
        assert routed(falls, 60_000, view(50.0)).prefill_node == "f0"
        assert routed(falls, 60_000, view(99.0)).prefill_node == "p0"

    def test_it_takes_the_threshold_of_when_the_kv_lands(self) -> None:
        policy = oracle(lambda at_s: 95.6e9 if at_s < 100 else 1e9)
        before, after = (routed(policy, 60_000, view(at_s)).threshold_tokens for at_s in (50.0, 99.0))
        made = setup(lambda at_s: 0.0)
        fleet = model.Fleet(1, 1, 1)
        assert (before, after) == tuple(solve_threshold(made, fleet, LENGTHS, bps) for bps in (95.6e9, 1e9))
        assert before < after

    def test_a_prefix_is_used_where_it_lies(self) -> None:
        policy, seen = oracle(lambda at_s: 95.6e9), view()
        decision = routed(policy, 100_000, seen, hits={"p0": 99_840})
        assert (decision.prefill_node, decision.cached_tokens) == ("p0", 99_840)

    def test_a_change_of_the_threshold_is_noted_with_the_rate(self) -> None:
        policy = oracle(lambda at_s: 95.6e9 if at_s < 100 else 1e9)
        assert policy.tick(view(99.0)) == ()
        (note,) = policy.tick(view(100.0))
        assert (note.kind, note.trigger) == ("threshold", "the link carries 1 Gbps")  # type: ignore[union-attr]
        assert policy.tick(view(101.0)) == ()


class TestAsAnUpperBound:
    def test_on_link_drop_its_ttft_is_no_longer_than_the_schedulers(self) -> None:
        seeds = range(1, 6)
        means = {
            policy: statistics.median(
                simulate("link-drop", policy=policy, seed=seed).summary["ttft_s"]["mean"] for seed in seeds
            )
            for policy in ("oracle", "prfaas")
        }
        assert means["oracle"] <= means["prfaas"]

    def test_it_is_compared_like_any_policy(self) -> None:
        made = arms(load("link-drop"), ["prfaas", "oracle"])
        assert [arm.deployments[0].policy.name for arm in made] == ["prfaas", "oracle"]

    def test_it_takes_no_parameters(self) -> None:
        with pytest.raises(ScenarioError, match="policy oracle takes none"):
            load("link-drop", ["deployments.0.policy={name: oracle, parameters: {dwell_s: 5}}"])


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return simulate("link-drop", policy="oracle", sets=SHORT_DROP).summary


class TestItsResultsSayWhatItIs:
    def test_in_the_summary_and_the_report(self, summary: dict[str, Any]) -> None:
        assert summary["knows_future"]
        assert f"`oracle`: {CAVEAT}" in markdown(summary)

    def test_in_a_figure(self, summary: dict[str, Any]) -> None:
        beside = {"figures": {"oracle": {"failed": {"mean": 0}}}, "policies": {"oracle": summary}}
        assert _label("oracle", beside) == f"oracle ({CAVEAT})"

    def test_and_a_schedulers_do_not(self) -> None:
        other = simulate("link-drop", policy="static", sets=SHORT_DROP).summary
        assert not other["knows_future"]
        assert CAVEAT not in markdown(other)


def test_a_scenario_may_name_it() -> None:
    assert isinstance(load("link-drop").only(None, "oracle"), Scenario)
