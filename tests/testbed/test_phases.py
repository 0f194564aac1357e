"""Phases: what each offers, when the link steps, what a policy is told, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from testbed.assemble import (
    at_fixed_rates,
    build_workload,
    capacity_rps,
    lengths_of_workload,
    phase_lengths,
    segments,
    workload_lengths,
)
from testbed.closed_form import closed_form
from testbed.link_schedule import link_steps
from testbed.phases import seed
from testbed.points import Runner
from testbed.report.write import markdown
from testbed.scenario import Scenario, ScenarioError, load, override, parse
from testbed.scenario_workload import LogNormal, Workload
from testbed.series import arms
from testbed.simulate import Result, simulate, write
from testbed.sweep import sweep
from traces.load import Trace
from traces.tools import arrivals_s

Given = dict[str, Any]
SHORT: Given = {"kind": "mix", "values": [1024], "weights": [1]}
LONG: Given = {"kind": "mix", "values": [32768], "weights": [1]}
PROMPTS: Given = {"kind": "lognormal", "mu": 9.0, "sigma": 0.5, "max_tokens": 32768}

BEFORE: Given = {"name": "a", "duration_s": 100, "rate_rps": 4, "lengths": {**PROMPTS, "mu": 8.0}}
RAMP: Given = {"name": "b", "rate_rps": 2, "lengths": {**PROMPTS, "sigma": 0.25}, "ramp": True}
"""From mu 8, sigma 0.5 at 4 req/s to mu 9, sigma 0.25 at 2."""


def with_phases(*phases: Given, scenario: str = "toy", **changes: Any) -> Scenario:
    """The scenario with these phases and, of its workload, only what is not changed or timed."""
    data = load(scenario).data()
    for timed in ("duration_s", "warmup_s"):
        del data["workload"][timed]
    workload = {"load_fraction": None, "rate_rps": 2, **changes.pop("workload", {})}
    data["workload"] |= workload
    return parse({**data, **changes, "phases": list(phases)}, "test")


def refusal(*phases: Given, **changes: Any) -> str:
    with pytest.raises(ScenarioError) as refused:
        with_phases(*phases, **changes)
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix("test: ")


def offered(scenario: Scenario) -> tuple[Trace, float]:
    return build_workload(scenario, scenario.deployments[0])


def within(trace: Trace, start_s: float, end_s: float) -> list[int]:
    """The input lengths of the requests of a span."""
    return [request.input_tokens for request in trace.requests if start_s <= request.arrival_s < end_s]


class TestTime:
    def test_of_the_phases_is_the_scenarios(self) -> None:
        scenario = with_phases({"name": "a", "duration_s": 100}, {"name": "b", "duration_s": 50})
        assert scenario.workload.duration_s == 150

    def test_may_be_said_as_well_if_it_is_the_same(self) -> None:
        phase = {"name": "a", "duration_s": 100}
        assert with_phases(phase, workload={"duration_s": 100}).workload.duration_s == 100
        assert refusal(phase, workload={"duration_s": 99}) == (
            "workload.duration_s = 99: the phases last 100 s in all; leave it out, or change their duration_s"
        )

    def test_of_a_warm_up_is_within_it(self) -> None:
        phase = {"name": "a", "duration_s": 1000}
        assert with_phases(phase, workload={"warmup_s": 900}).workload.warmup_s == 900
        assert "warmup_s 1000 must be below duration_s 1000" in refusal(phase, workload={"warmup_s": 1000})

    def test_follows_when_a_phase_of_a_resolved_scenario_is_set(self) -> None:
        scenario = with_phases({"name": "a", "duration_s": 100}, {"name": "b", "duration_s": 50})
        assert override(scenario, ["phases.b.duration_s=60"]).workload.duration_s == 160

    def test_is_the_same_when_the_resolved_scenario_is_read_again(self, tmp_path: Path) -> None:
        scenario = with_phases({"name": "a", "duration_s": 100, "link_rate_bps": 1e9})
        (tmp_path / "again.yaml").write_text(scenario.to_yaml())
        assert load(str(tmp_path / "again.yaml")) == scenario

    def test_is_of_the_load_and_not_of_the_testbed(self) -> None:
        one, two = (with_phases({"name": "a", "duration_s": span}) for span in (100, 200))
        assert one.fingerprint() != two.fingerprint()
        assert one.fingerprint(testbed_only=True) == two.fingerprint(testbed_only=True)


class TestARefusal:
    @pytest.mark.parametrize(
        ("phase", "line"),
        [
            ({"duration_s": 0}, "phases.b.duration_s = 0: must be above 0"),
            ({"duration_s": "1m"}, "phases.b.duration_s = '1m': must be a number of seconds"),
            ({"rate": 3}, "phases.b.rate: unknown key; did you mean rate_rps? known here: arrivals, duration_s, "),
            ({"link_rate_bps": "1GiB"}, "phases.b.link_rate_bps = '1GiB': may mean bytes"),
            ({"rate_rps": 1, "load_fraction": 1}, "phases.b: rate_rps = 1 and load_fraction = 1 are both set; remove"),
            ({"lengths": {"kind": "zipf"}}, "phases.b.lengths.kind = 'zipf': must be lognormal or mix"),
            ({"name": "a"}, "phases: names must differ, and a, a do not; rename one"),
            ({"arrivals": {"kind": "spread"}}, "phases.b.arrivals.kind spread needs a trace; use poisson or another"),
            ({"ramp": True, "lengths": PROMPTS}, "phases.b.ramp: only lognormal lengths can move to others"),
            (
                {"ramp": True, "arrivals": {"kind": "diurnal", "period_s": 9, "amplitude": 1}},
                "phases.b.ramp: diurnal arrivals have a course of their own, which a ramp would cut into pieces",
            ),
            (
                {"lengths": {"kind": "mix", "values": [65536], "weights": [1]}},
                "phases.b.lengths: up to 65536 tokens, but deployments.prfaas-pd.profiles.prfaas = toy ends at 32768",
            ),
        ],
    )
    def test_names_the_phase_the_value_and_the_remedy(self, phase: Given, line: str) -> None:
        assert refusal({"name": "a", "duration_s": 10}, {"name": "b", "duration_s": 10, **phase}).startswith(line)

    def test_of_a_ramp_from_nowhere(self) -> None:
        line = refusal({"name": "a", "duration_s": 10, "ramp": True})
        assert line == "phases.a.ramp: the first phase has none before it to come from; leave it out"

    @pytest.mark.parametrize("key", ["rate_rps", "load_fraction", "lengths", "output_tokens", "arrivals", "ramp"])
    def test_of_cutting_a_trace(self, key: str) -> None:
        value: Any = {"lengths": SHORT, "arrivals": {"kind": "poisson"}, "ramp": True}.get(key, 1)
        trace = {"trace": "x.jsonl", "arrivals": {"kind": "as-is"}}
        line = refusal({"name": "a", "duration_s": 10, key: value}, workload=trace)
        assert line == f"phases.a.{key}: a trace is offered whole, phases can only change the link; leave it out"

    def test_of_cutting_conversations(self) -> None:
        chats = {"sessions": {"turns_mean": 2, "think_s": 9, "max_input_tokens": 32768}, "lengths": SHORT}
        line = refusal({"name": "a", "duration_s": 10, "rate_rps": 1}, workload=chats)
        assert line.startswith("phases.a.rate_rps: conversations are offered whole")


class TestAPhaseOffers:
    def test_its_own_and_else_the_scenarios(self) -> None:
        scenario = with_phases(
            {"name": "a", "duration_s": 1000},
            {"name": "b", "duration_s": 1000, "rate_rps": 6, "lengths": SHORT, "output_tokens": 7},
            {"name": "c", "duration_s": 1000},
        )
        trace, rate_rps = offered(scenario)
        for start_s, wanted in ((0, 2000), (1000, 6000), (2000, 2000)):
            assert len(within(trace, start_s, start_s + 1000)) == pytest.approx(wanted, rel=0.1)
        assert set(within(trace, 1000, 2000)) == {1024}
        assert set(within(trace, 0, 1000)) == set(within(trace, 2000, 3000)) == {1024, 32768}
        outputs = {request.output_tokens for request in trace.requests if 1000 <= request.arrival_s < 2000}
        assert outputs == {7}
        assert rate_rps == pytest.approx((2 + 6 + 2) / 3)

    def test_arrivals_of_its_own_from_its_start_on(self) -> None:
        scenario = with_phases(
            {"name": "a", "duration_s": 10, "rate_rps": 1, "arrivals": {"kind": "uniform"}},
            {"name": "b", "duration_s": 4, "rate_rps": 0.5, "arrivals": {"kind": "uniform"}},
        )
        trace, _ = offered(scenario)
        assert arrivals_s(trace).tolist() == [*range(10), 10, 12]

    def test_another_stream_than_the_phase_before_though_it_says_the_same(self) -> None:
        trace, _ = offered(with_phases({"name": "a", "duration_s": 200}, {"name": "b", "duration_s": 200}))
        assert within(trace, 0, 200)[:50] != within(trace, 200, 400)[:50]

    def test_the_same_stream_for_the_same_seed(self) -> None:
        given = [{"name": "a", "duration_s": 200}, {"name": "b", "duration_s": 200}]
        first, again, other = (offered(with_phases(*given, seed=number))[0] for number in (1, 1, 2))
        assert first.rows_sha256 == again.rows_sha256
        assert first.rows_sha256 != other.rows_sha256

    def test_a_fraction_of_lambda_max_for_its_own_lengths_at_the_nominal_link(self) -> None:
        scenario = with_phases(
            {"name": "a", "duration_s": 10},
            {"name": "b", "duration_s": 10, "lengths": LONG},
            {"name": "c", "duration_s": 10, "link_rate_bps": 1e9},
            {"name": "d", "duration_s": 10, "load_fraction": 1.5},
            workload={"rate_rps": None, "load_fraction": 0.5},
        )
        deployment = scenario.deployments[0]
        base = scenario.workload
        full = capacity_rps(scenario, deployment)
        longer = base.model_copy(update={"lengths": scenario.phases[1].lengths})
        of_long = capacity_rps(scenario, deployment, lengths_of_workload(longer, 32768))
        assert of_long != pytest.approx(full)
        rates = [one.rate_rps for one in segments(scenario, deployment)]
        assert rates == pytest.approx([0.5 * full, 0.5 * of_long, 0.5 * full, 1.5 * full])

    def test_nothing_when_it_is_so_short_that_nobody_comes(self) -> None:
        scenario = with_phases({"name": "a", "duration_s": 0.001}, {"name": "b", "duration_s": 100})
        trace, _ = offered(scenario)
        assert trace.requests[0].arrival_s > 0.001

    def test_are_said_once_each(self) -> None:
        trace, _ = offered(with_phases({"name": "a", "duration_s": 100}, {"name": "b", "duration_s": 50}))
        assert trace.notes == ["phase a: 0 to 100 s, 2 requests/s", "phase b: 100 to 150 s, 2 requests/s"]


class TestARamp:
    def parts(self, duration_s: float) -> list[tuple[float, float, Workload]]:
        scenario = with_phases(BEFORE, {**RAMP, "duration_s": duration_s})
        ours = [one for one in segments(scenario, scenario.deployments[0]) if one.phase == 1]
        return [(one.start_s, one.rate_rps, one.workload) for one in ours]

    def test_has_a_segment_a_minute(self) -> None:
        parts = self.parts(1200)
        assert [start_s for start_s, _, _ in parts] == [100 + 60 * i for i in range(20)]
        assert {workload.duration_s for _, _, workload in parts} == {60}

    def test_has_ten_segments_when_it_is_shorter_than_ten_minutes(self) -> None:
        assert [start_s for start_s, _, _ in self.parts(50)] == pytest.approx([100 + 5 * i for i in range(10)])

    def test_moves_mu_sigma_and_the_rate_by_equal_steps_around_the_middle(self) -> None:
        parts = self.parts(600)
        lengths = [workload.lengths for _, _, workload in parts]
        assert all(isinstance(one, LogNormal) for one in lengths)
        columns = {
            "mu": ([one.mu for one in lengths], 8.0, 9.0),  # type: ignore[union-attr]
            "sigma": ([one.sigma for one in lengths], 0.5, 0.25),  # type: ignore[union-attr]
            "rate": ([rate for _, rate, _ in parts], 4.0, 2.0),
        }
        for values, start, end in columns.values():
            assert np.diff(values) == pytest.approx([(end - start) / 10] * 9)
            assert np.mean(values) == pytest.approx((start + end) / 2)

    def test_is_offered(self) -> None:
        trace, _ = offered(with_phases(BEFORE, {**RAMP, "duration_s": 600}))
        early, late = within(trace, 100, 220), within(trace, 580, 700)
        assert len(early) > 1.3 * len(late)
        assert np.median(late) > 1.5 * np.median(early)

    def test_leaves_the_phase_after_it_as_it_is(self) -> None:
        after = {"name": "c", "duration_s": 60}
        scenario = with_phases(BEFORE, {**RAMP, "duration_s": 60}, after)
        last = segments(scenario, scenario.deployments[0])[-1]
        assert (last.rate_rps, last.workload.lengths) == (2, scenario.workload.lengths)


class TestASegmentsSeed:
    def test_is_its_own(self) -> None:
        seeds = [seed(number, index) for number in range(20) for index in range(20)]
        assert max(Counter(seeds).values()) == 1
        assert seed(3, 4) == seed(3, 4)


class TestTheLink:
    def test_steps_where_a_phase_says_so_and_back_where_one_does_not(self) -> None:
        scenario = with_phases(
            {"name": "a", "duration_s": 100},
            {"name": "b", "duration_s": 50, "link_rate_bps": "1gbps"},
            {"name": "c", "duration_s": 50, "link_rate_bps": "1gbps"},
            {"name": "d", "duration_s": 50},
        )
        assert link_steps(scenario) == [(100, 1e9), (200, 8e9)]

    def test_steps_at_0_when_the_first_phase_says_so(self) -> None:
        assert link_steps(with_phases({"name": "a", "duration_s": 100, "link_rate_bps": "1gbps"})) == [(0, 1e9)]

    def test_stands_without_phases(self) -> None:
        assert link_steps(load("toy")) == []

    def test_may_step_under_a_trace(self, tmp_path: Path) -> None:
        rows = [{"timestamp": 3000 * i, "input_length": 1024, "output_length": 9, "hash_ids": [0, i]} for i in range(9)]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        scenario = with_phases(
            {"name": "a", "duration_s": 12},
            {"name": "b", "duration_s": 12, "link_rate_bps": "1gbps"},
            workload={"trace": str(path), "arrivals": {"kind": "as-is"}, "rate_rps": None},
        )
        trace, _ = offered(scenario)
        assert arrivals_s(trace).tolist() == [3 * i for i in range(8)]
        assert link_steps(scenario) == [(12, 1e9)]


class TestWhatIsKnown:
    PHASES = ({"name": "a", "duration_s": 100, "lengths": SHORT}, {"name": "b", "duration_s": 100})

    def test_to_a_policy_is_the_first_phase(self) -> None:
        scenario = with_phases(*self.PHASES)
        trace, _ = offered(scenario)
        told = workload_lengths(scenario, trace)
        assert (told.low, told.high) == (1024, 1024)

    def test_to_an_oracle_is_every_phase(self) -> None:
        scenario = with_phases(*self.PHASES)
        trace, _ = offered(scenario)
        known = phase_lengths(scenario, scenario.deployments[0], trace)
        assert [(start_s, one.high) for start_s, one in known] == [(0, 1024), (100, 32768)]

    def test_without_phases_is_one_distribution(self) -> None:
        trace, _ = offered(load("toy"))
        ((start_s, lengths),) = phase_lengths(load("toy"), load("toy").deployment(), trace)
        assert (start_s, lengths.low, lengths.high) == (0, 1024, 32768)


class TestTheOptimum:
    """The figures that the paper's fleet is judged by: at 0.956 of the link, on the split (3, 5)."""

    def optima(self, *phases: Given) -> list[dict[str, Any]]:
        scenario = with_phases(*phases, scenario="paper")
        scenario = scenario.only(None)
        trace, rate_rps = offered(scenario)
        found: list[dict[str, Any]] = closed_form(scenario, scenario.deployments[0], trace, rate_rps)["optima"]
        return found

    def test_of_a_drop_is_higher_and_so_is_its_ceiling_lower(self) -> None:
        steady, drop, back = self.optima(
            {"name": "steady", "duration_s": 60},
            {"name": "drop", "duration_s": 60, "link_rate_bps": "5gbps"},
            {"name": "back", "duration_s": 60},
        )
        assert steady["threshold_tokens"] == back["threshold_tokens"] == pytest.approx(19641)
        assert drop["threshold_tokens"] == pytest.approx(32_500, rel=0.005)
        assert drop["lambda_max_rps"] == pytest.approx(1.73, abs=0.005)
        assert drop["link_bps"] == 5e9
        assert (drop["name"], drop["start_s"], drop["end_s"]) == ("drop", 60, 120)

    def test_of_shorter_prompts_has_another_split(self) -> None:
        (_, shorter) = self.optima(
            {"name": "long", "duration_s": 60},
            {"name": "short", "duration_s": 60, "lengths": {"kind": "lognormal", "mu": 9.01}},
        )
        assert (shorter["best"]["n_p"], shorter["best"]["n_d"]) == (1, 7)
        assert shorter["best"]["lambda_max_rps"] == pytest.approx(4.73, abs=0.005)
        assert shorter["lambda_max_rps"] < shorter["best"]["lambda_max_rps"]

    def test_of_a_ramp_is_that_of_its_end(self) -> None:
        _, ramp, after = self.optima(
            {"name": "long", "duration_s": 60},
            {"name": "shift", "duration_s": 600, "lengths": {"kind": "lognormal", "mu": 9.01}, "ramp": True},
            {"name": "short", "duration_s": 60, "lengths": {"kind": "lognormal", "mu": 9.01}},
        )
        assert ramp["threshold_tokens"] == pytest.approx(after["threshold_tokens"], rel=0.06)
        assert ramp["threshold_tokens"] > after["threshold_tokens"]

    def test_is_one_of_the_whole_run_without_phases(self) -> None:
        paper = load("paper", ["workload.duration_s=400"]).only(None)
        trace, rate_rps = offered(paper)
        (one,) = closed_form(paper, paper.deployments[0], trace, rate_rps)["optima"]
        assert (one["name"], one["start_s"], one["end_s"]) == (None, 0, 400)
        assert one["threshold_tokens"] == pytest.approx(19641)

    def test_is_the_fleets_whatever_the_policy_does(self) -> None:
        naive = load("paper", ["workload.duration_s=400"]).only("prfaas-pd", "naive")
        trace, rate_rps = offered(naive)
        (one,) = closed_form(naive, naive.deployments[0], trace, rate_rps)["optima"]
        assert one["threshold_tokens"] == pytest.approx(19641)

    @pytest.mark.parametrize(("deployment", "threshold"), [("homogeneous", None), ("naive", 0.0)])
    def test_of_a_fleet_with_one_place_to_prefill_is_no_choice(self, deployment: str, threshold: float | None) -> None:
        paper = load("paper", ["workload.duration_s=400"]).only(deployment)
        trace, rate_rps = offered(paper)
        (one,) = closed_form(paper, paper.deployments[0], trace, rate_rps)["optima"]
        assert one["threshold_tokens"] == threshold


class TestSideBySide:
    def test_policies_get_the_same_requests(self) -> None:
        scenario = with_phases(
            {"name": "a", "duration_s": 100},
            {"name": "b", "duration_s": 100, "load_fraction": 0.9, "lengths": SHORT},
            workload={"rate_rps": None, "load_fraction": 0.5},
        )
        made = [offered(arm)[0].rows_sha256 for arm in arms(scenario, ["static", "prfaas", "naive"])]
        assert len(set(made)) == 1
        assert made[0] == offered(scenario.only(None))[0].rows_sha256

    def test_rates_are_fixed_without_changing_anything_else(self) -> None:
        scenario = with_phases({"name": "a", "duration_s": 100}).only(None)
        assert [phase.rate_rps for phase in at_fixed_rates(scenario).phases] == [2]
        assert offered(at_fixed_rates(scenario))[0].requests == offered(scenario)[0].requests


def test_segments_lie_one_after_another() -> None:
    scenario = with_phases(BEFORE, {**RAMP, "duration_s": 333}, {"name": "c", "duration_s": 7})
    made = segments(scenario, scenario.deployments[0])
    assert made[0].start_s == 0
    for one, after in pairwise(made):
        assert one.start_s + one.workload.duration_s == pytest.approx(after.start_s)
    assert made[-1].start_s + made[-1].workload.duration_s == pytest.approx(440)


@pytest.fixture(scope="module")
def falling() -> Result:
    """A run in virtual time whose link falls to a twentieth for a third of it."""
    return simulate(
        with_phases(
            {"name": "wide", "duration_s": 200},
            {"name": "narrow", "duration_s": 200, "link_rate_bps": "400mbps"},
            {"name": "back", "duration_s": 200},
            workload={"rate_rps": 0.5},
        )
    )


class TestInVirtualTime:
    def test_every_request_is_in_one_phase(self, falling: Result) -> None:
        phases = falling.summary["phases"]
        assert [phase["name"] for phase in phases] == ["wide", "narrow", "back"]
        assert sum(phase["requests"]["scheduled"] for phase in phases) == falling.summary["requests"]["scheduled"]

    def test_the_link_is_as_the_phases_have_it(self, falling: Result) -> None:
        wide, narrow, _ = falling.summary["phases"]
        assert narrow["egress_queue_s"]["mean"] > 20 * wide["egress_queue_s"]["mean"]
        assert narrow["egress_bps"] <= 400e6 < wide["egress_bps"]

    def test_the_links_steps_are_in_the_timeline(self, falling: Result, tmp_path: Path) -> None:
        write(falling, tmp_path, "none")
        rows = pd.read_csv(tmp_path / "timeline.csv")
        steps = rows[(rows["event"] == "link") & (rows["direction"] == "to_pd")]
        assert steps[["t_s", "trigger"]].to_numpy().tolist() == [[200, "phase narrow"], [400, "phase back"]]
        assert steps["after"].astype(float).tolist() == [4e8, 8e9]

    def test_the_report_has_a_row_for_each(self, falling: Result) -> None:
        text = markdown(falling.summary)
        assert "| narrow | 200 .. 400 | 0.4 |" in text
        assert "| phase |" not in markdown({**falling.summary, "phases": []})


def test_a_sweep_has_no_phases() -> None:
    with pytest.raises(ScenarioError, match="has phases, and a sweep looks for one rate that lasts"):
        sweep(with_phases({"name": "a", "duration_s": 10}), Runner(jobs=1))
