"""A scenario's varying link: what it may say, what virtual time and the wire do with it, what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from netem.fluid import TCP_EFFICIENCY
from netem.link import LinkError
from testbed.assemble import build_workload, policy_setup, workload_lengths
from testbed.closed_form import closed_form
from testbed.fleet import check_link
from testbed.link_schedule import link_changes, link_steps
from testbed.policies import load_policy, start_policy
from testbed.report.provenance import provenance
from testbed.scenario import Scenario, ScenarioError, load, parse
from testbed.simulate import simulate
from testbed.world import World

SQUARE = "{kind: square, high_bps: 8gbps, low_bps: 1gbps, period_s: 100}"
BUCKET = "{kind: token_bucket, peak_bps: 8gbps, base_bps: 400mbit, budget_bytes: 20e9}"
SHORT = ("workload.duration_s=300", "workload.warmup_s=0")


def toy(schedule: str, *sets: str) -> Scenario:
    return load("toy", [*SHORT, f"link.schedule={schedule}", *sets])


class TestAScenario:
    def test_may_have_a_link_that_varies(self) -> None:
        assert link_steps(toy(SQUARE)) == [(50, 1e9), (100, 8e9), (150, 1e9), (200, 8e9), (250, 1e9)]

    def test_steps_at_0_when_the_schedule_begins_elsewhere(self) -> None:
        assert link_steps(toy("{kind: constant, rate_bps: 2gbps}")) == [(0, 2e9)]
        assert link_steps(toy("{kind: constant, rate_bps: 8gbps}")) == []

    def test_draws_the_schedule_from_its_seed_unless_that_has_its_own(self) -> None:
        markov = "{kind: markov, good_bps: 8gbps, bad_bps: 1gbps, good_s: 20, bad_s: 5}"
        own = markov.replace("}", ", seed: 5}")
        assert link_steps(toy(markov, "seed=5")) == link_steps(toy(own, "seed=6")) == link_steps(toy(own, "seed=7"))
        assert link_steps(toy(markov, "seed=6")) != link_steps(toy(markov, "seed=7"))

    def test_waits_for_the_end_of_an_outage_that_outlasts_the_load(self) -> None:
        outage = "{kind: constant, rate_bps: 8gbps, outages: [{at_s: 290, duration_s: 1000}]}"
        assert link_steps(toy(outage)) == [(290, 0), (1290, 8e9)]

    def test_has_no_steps_closer_than_the_wire_can_take_them(self) -> None:
        """The toy is five times as fast as the wall: 50 ms there are 0.25 s."""
        steps = link_steps(toy("{kind: square, high_bps: 8gbps, low_bps: 1gbps, period_s: 0.1}"))
        assert min(b[0] - a[0] for a, b in pairwise(steps)) >= 0.25 - 1e-9

    def test_is_resolved_with_the_schedules_defaults_and_reads_back(self) -> None:
        scenario = toy("{kind: square, high_bps: 8gbps, low_bps: 1gbps, period_s: 100}")
        assert scenario.link.schedule == {
            "kind": "square", "high_bps": 8e9, "low_bps": 1e9, "period_s": 100, "duty": 0.5
        }  # fmt: skip
        assert parse(scenario.data(), "again") == scenario

    def test_is_another_testbed_only_when_the_nominal_link_is_another(self) -> None:
        plain, varying = load("toy", SHORT), toy(SQUARE)
        assert plain.fingerprint() != varying.fingerprint()
        assert plain.fingerprint(testbed_only=True) == varying.fingerprint(testbed_only=True)

    @pytest.mark.parametrize(
        ("schedule", "said"),
        [
            ("8gbps", "link.schedule = '8gbps': must be a mapping of keys"),
            ("{}", "link.schedule: kind: None is no model; use constant, steps"),
            ("{kind: sqare}", "link.schedule: kind: 'sqare' is no model; did you mean square?"),
            (
                "{kind: constant, rate: 1}",
                "link.schedule: rate: 1 is no parameter of constant; did you mean rate_bps?",
            ),
            ("{kind: constant, rate_bps: 1GB/s}", "link.schedule: rate_bps: '1GB/s' may mean bytes"),
            (
                "{kind: csv, file: a, repeats: 9}",
                "link.schedule: repeats: 9 is no parameter of csv; did you mean repeat_s?",
            ),
            (
                "{kind: token_bucket, peak_bps: 10gbps}",
                "link.schedule: base_bps: None is missing; token_bucket needs it",
            ),
        ],
    )
    def test_with_a_schedule_that_is_none_is_refused(self, schedule: str, said: str) -> None:
        with pytest.raises(ScenarioError, match=re.escape(f"toy.yaml with --set: {said}")):
            toy(schedule)

    def test_with_phases_that_change_the_link_too_is_refused(self) -> None:
        data = load("toy").data()
        data["link"]["schedule"] = {"kind": "constant", "rate_bps": 1e9}
        data["workload"].pop("duration_s")
        data["phases"] = [{"name": "a", "duration_s": 300, "link_rate_bps": 1e9}]
        with pytest.raises(ScenarioError, match=r"phases.a.link_rate_bps = 1e\+09: link.schedule says already"):
            parse(data, "both")

    def test_reads_a_recorded_link_when_it_is_needed(self, tmp_path: Path) -> None:
        file = tmp_path / "link.csv"
        scenario = toy(f"{{kind: csv, file: '{file}'}}")
        with pytest.raises(LinkError, match=r"link.csv: cannot be read \(No such file"):
            link_steps(scenario)
        file.write_text("t_s,rate_bps\n0,8gbps\n30,2gbps\n")
        assert link_steps(scenario) == [(30, 2e9)]

    def test_has_its_recordings_content_in_the_provenance(self, tmp_path: Path) -> None:
        file = tmp_path / "link.csv"
        seen = []
        for text in ("0,8gbps", "0,8gbps", "0,2gbps"):
            file.write_text(f"t_s,rate_bps\n{text}\n")
            result = simulate(toy(f"{{kind: csv, file: '{file}'}}", "workload.duration_s=30"))
            seen.append(provenance(result.scenario, result.trace, None)["link_schedule_sha256"])
        assert seen[0] == seen[1] != seen[2]
        plain = simulate(load("toy", [*SHORT, "workload.duration_s=30"]))
        assert provenance(plain.scenario, plain.trace, None)["link_schedule_sha256"] is None

    def test_may_be_down_for_a_whole_phase(self) -> None:
        data = toy("{kind: constant, rate_bps: 8gbps, outages: [{at_s: 50, duration_s: 200}]}").data()
        data["workload"].pop("duration_s")
        data["phases"] = [{"name": name, "duration_s": 100} for name in ("before", "dead", "after")]
        result = simulate(parse(data, "cut"))
        assert [one["link_bps"] for one in result.summary["closed_form"]["optima"]] == [
            pytest.approx(4e9), 0, pytest.approx(4e9)
        ]  # fmt: skip
        assert result.summary["verdict"]["status"] == "valid"


class TestVirtualTime:
    def test_follows_the_schedule(self) -> None:
        result = simulate(toy(SQUARE, "workload.load_fraction=0.5"))
        rows = result.timeline[(result.timeline.event == "link") & (result.timeline.direction == "to_pd")]
        assert list(zip(rows.t_s, rows.before, rows.after, strict=True))[:2] == [(50, 8e9, 1e9), (100, 1e9, 8e9)]
        assert set(rows.trigger) == {"schedule"}

    def test_tells_the_kind_of_an_outage(self) -> None:
        outage = "{kind: constant, rate_bps: 8gbps, outages: [{at_s: 30, duration_s: 5, kind: down}]}"
        timeline = simulate(toy(outage, "workload.load_fraction=0.5", "workload.duration_s=60")).timeline
        rows = timeline[(timeline.event == "link") & (timeline.direction == "to_pd")]
        assert list(zip(rows.t_s, rows.after, rows.trigger, strict=True)) == [
            (30, 0, "schedule: down"), (35, 8e9, "schedule")
        ]  # fmt: skip

    def test_is_slower_on_a_link_that_is_narrow_half_of_the_time(self) -> None:
        wide, varying = (
            simulate(toy(one, "workload.load_fraction=0.8"), policy="naive").summary["ttft_split_s"]["overall"]
            for one in ("{kind: constant, rate_bps: 8gbps}", SQUARE.replace("1gbps", "200mbit"))
        )
        assert varying["transfer"]["mean"] > 2 * wide["transfer"]["mean"]

    def test_gives_a_pair_no_more_than_its_connections_caps(self) -> None:
        scenario = load("toy", [*SHORT, "link.per_flow_bps=100mbit", "transport.connections=4"])
        deployment = scenario.deployments[0]
        trace, _ = build_workload(scenario, deployment)
        policy = load_policy("naive")
        start_policy(policy, "naive", policy_setup(scenario, deployment, workload_lengths(scenario, trace), {}))
        world = World(scenario, deployment, policy, trace.requests, lambda record: None)
        sent: dict[tuple[str, str], float] = {}
        before_s, most = 0.0, 0.0
        while world.step():
            if world.now_s - before_s < 1:
                continue
            for sender, receiver, bytes_sent, _ in world.link.paths(world.now_s):
                moved = bytes_sent - sent.get((sender, receiver), 0.0)
                most = max(most, moved * 8 / (world.now_s - before_s))
                sent[sender, receiver] = bytes_sent
            before_s = world.now_s
        assert most == pytest.approx(400e6 * TCP_EFFICIENCY)

    def test_throttles_a_link_whose_budget_is_used_up_and_only_that_direction(self) -> None:
        result = simulate(toy(BUCKET, "workload.load_fraction=0.8", "workload.duration_s=600"), policy="naive")
        rows = result.timeline[result.timeline.event == "link"]
        assert set(rows.trigger) == {"token bucket"}
        assert set(rows.direction) == {"to_pd"}  # without a cache no KV goes the other way
        first = rows.iloc[0]
        assert (first.before, first.after) == (8e9, 4e8)
        sent = result.requests[result.requests.landed_s <= first.t_s].kv_bytes.sum() * 8 / TCP_EFFICIENCY
        used = 20e9 * 8 + 4e8 * first.t_s  # the budget and what came back of it until then
        assert 0.9 * used <= sent <= used

    def test_that_is_overloaded_delivers_a_buckets_budget_and_refill_and_no_more(self) -> None:
        result = simulate(toy(BUCKET, "workload.load_fraction=1.2", "workload.duration_s=600"), policy="naive")
        ended_s = result.requests.finished_s.max()
        most = 20e9 * 8 + 4e8 * (ended_s + 1)
        assert 0.99 * most <= result.summary["link"]["wan_tx_bytes"] * 8 <= most

    def test_does_not_feel_a_bucket_that_never_runs_dry(self) -> None:
        wide = BUCKET.replace("20e9", "1e15")
        metered, plain = (simulate(toy(one)).requests for one in (wide, "{kind: constant, rate_bps: 8gbps}"))
        pd.testing.assert_frame_equal(metered, plain)

    def test_judges_a_policy_by_the_links_mean(self) -> None:
        scenario = toy(SQUARE).only(None)
        trace, rate_rps = build_workload(scenario, scenario.deployments[0])
        (optimum,) = closed_form(scenario, scenario.deployments[0], trace, rate_rps)["optima"]
        assert optimum["link_bps"] == pytest.approx(4.5e9)


class TestTheWire:
    def test_takes_the_same_steps(self) -> None:
        scenario = toy(SQUARE)
        check_link(scenario)
        assert [(step.at_s, step.rate_bps) for step in link_changes(scenario)] == link_steps(scenario)

    @pytest.mark.parametrize("kind", ["stall", "blackhole", "down"])
    def test_takes_outages_with_their_kind(self, kind: str) -> None:
        outages = f"outages: [{{at_s: 30, duration_s: 5, kind: {kind}}}]"
        scenario = toy(f"{{kind: constant, rate_bps: 8gbps, {outages}}}")
        check_link(scenario)
        steps = [(step.at_s, step.rate_bps, step.outage) for step in link_changes(scenario)]
        assert steps == [(30, 0, kind), (35, 8e9, None)]

    def test_tells_one_kind_of_outage_from_another_that_it_follows(self, tmp_path: Path) -> None:
        """A recording's window without packets is a stall, and may go on after an outage."""
        recording = tmp_path / "pauses.txt"
        recording.write_text(
            "\n".join(str(ms) for second in (0, 4) for ms in range(second * 1000 + 1, second * 1000 + 1001))
        )
        blackhole = "outages: [{at_s: 2, duration_s: 1, kind: blackhole}]"
        schedule = f"{{kind: mahimahi, file: {recording}, window_s: 1, scale: 100, {blackhole}}}"
        scenario = toy(schedule, "workload.duration_s=4.5")
        steps = [(step.at_s, step.rate_bps, step.outage) for step in link_changes(scenario)]
        assert steps == [
            (0, 1.2e9, None), (1, 0, "stall"), (2, 0, "blackhole"), (3, 0, "stall"), (4, 1.2e9, None)
        ]  # fmt: skip

    def test_takes_a_token_bucket(self) -> None:
        check_link(toy(BUCKET))

    @pytest.mark.parametrize(
        ("schedule", "said"),
        [
            ("{kind: steps, steps: [[0, 8gbps], [9, 10mbit]]}", "from 9 s on (schedule) = 1e+07 x scale.byte_scale"),
            (BUCKET.replace("400mbit", "10mbit"), "link.schedule.base_bps = 1e+07 x scale.byte_scale"),
        ],
    )
    def test_refuses_what_it_cannot_carry(self, schedule: str, said: str) -> None:
        with pytest.raises(ScenarioError, match=re.escape(said)):
            check_link(toy(schedule))

    def test_takes_caps_a_flow_that_it_can_shape(self) -> None:
        check_link(load("toy", ["link.per_flow_bps=5gbps"]))
        with pytest.raises(ScenarioError, match=r"link.per_flow_bps = 1e\+06 x scale.byte_scale"):
            check_link(load("toy", ["link.per_flow_bps=1mbit", "scale.time_scale=1", "scale.byte_scale=0.1"]))

    def test_refuses_caps_beside_cross_traffic(self) -> None:
        crossing = "link.cross_traffic=[{direction: to_pd, kind: elastic, flows: 2}]"
        with pytest.raises(ScenarioError, match="leave one of them out, or take prfaas simulate"):
            check_link(load("toy", ["link.per_flow_bps=5gbps", crossing]))
