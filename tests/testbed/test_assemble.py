"""From a scenario to what is offered and to what the policies are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed import plan
from testbed.assemble import (
    build_plan,
    build_workload,
    capacity_rps,
    lengths_from_json,
    lengths_of_workload,
    lengths_to_json,
    max_input_tokens,
    plan_deployment,
    policy_setup,
    workload_lengths,
)
from testbed.lengths import lengths_of
from testbed.scenario import Scenario, ScenarioError, load
from testbed.scheduler.model import LengthDistribution, ModelError
from traces.info import dispersion
from traces.load import Trace
from traces.load import load as load_trace
from traces.request import TraceError
from traces.tools import arrivals_s

TOY_TRACE = [(0, 1024, 50), (3000, 32768, 100), (6000, 40000, 10), (9000, 1024, 50), (12000, 32768, 100)]
"""(ms, input tokens, output tokens); the third is longer than the toy profile knows."""

CHATS = "workload.sessions={turns_mean: 6, think_s: 20, system_tokens: 1000, max_input_tokens: 8192, block_size: 64}"
SHORT = "workload.lengths={kind: mix, values: [64, 192], weights: [1, 1]}"
"""Conversations that the toy's profiles can prefill."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake(TOY_TRACE))
    return str(path)


def mooncake(rows: list[tuple[int, int, int]]) -> str:
    out = []
    for i, (ms, tokens, output) in enumerate(rows):
        hashes = [0, *(1000 * (i + 1) + k for k in range(-(-tokens // 512) - 1))]
        out.append(json.dumps({"timestamp": ms, "input_length": tokens, "output_length": output, "hash_ids": hashes}))
    return "\n".join(out) + "\n"


def replay(path: str, *sets: str) -> Scenario:
    return load("toy", [f"workload={{trace: {path}, arrivals: {{kind: as-is}}, duration_s: 100}}", *sets])


def offered(scenario: Scenario, deployment: str | None = None) -> tuple[Trace, float]:
    return build_workload(scenario, scenario.deployment(deployment))


class TestARate:
    def test_is_the_one_that_is_given(self) -> None:
        made, rate = offered(load("toy", ["workload.rate_rps=1.25"]))
        assert rate == 1.25
        assert len(made.requests) / 300 == pytest.approx(1.25, rel=0.2)

    @pytest.mark.parametrize("name", ["prfaas-pd", "homogeneous", "naive"])
    @pytest.mark.parametrize("scenario", ["toy", "paper"])
    def test_of_a_fraction_is_of_that_deployments_lambda_max_with_expectations(self, scenario: str, name: str) -> None:
        chosen = load(scenario, ["workload.load_fraction=0.5", "workload.duration_s=400"])
        point, _ = plan.solve(
            plan_deployment(chosen, chosen.deployment(name), fixed_split=True),
            lengths_of_workload(chosen.workload, 10**9),
            chosen.workload.output_tokens,
            chosen.link.rate_bps,
            "expectation",
        )
        assert offered(chosen, name)[1] == pytest.approx(0.5 * point.lambda_max)

    def test_of_the_toy_can_be_followed_by_hand(self) -> None:
        # naive: both lengths on 2 instances, E[T_prefill] = (0.5 + 2) / 2 = 1.25 s, so 1.6 requests a second; decode:
        # 3 nodes x 10 slots / (100 x 25 ms) = 12; the link: E[S_kv] = 450 MB, so 8 Gbps carry 2.2 of them.
        toy = load("toy")
        assert capacity_rps(toy, toy.deployment("naive")) == pytest.approx(1.6)
        # homogeneous: on 4 instances of half the speed, 4 / 1.875 s; 1 node decodes 10 / 2.5 s = 4
        assert capacity_rps(toy, toy.deployment("homogeneous")) == pytest.approx(4 / 1.875)


class TestASyntheticWorkload:
    def test_is_the_same_for_the_same_seed(self) -> None:
        first, second = (offered(load("toy"))[0] for _ in range(2))
        assert first.requests == second.requests
        assert first.rows_sha256 == second.rows_sha256
        assert offered(load("toy", ["seed=2"]))[0].requests != first.requests

    def test_has_the_lengths_and_the_duration_that_were_asked_for(self) -> None:
        made, _ = offered(load("toy"))
        assert {request.input_tokens for request in made.requests} == {1024, 32768}
        assert {request.output_tokens for request in made.requests} == {100}
        assert all(0 <= request.arrival_s < 300 for request in made.requests)

    def test_of_log_normal_lengths_stays_within_them(self) -> None:
        made, _ = offered(load("smoke"))
        assert all(128 <= request.input_tokens <= 131072 for request in made.requests)

    @pytest.mark.parametrize(
        "arrivals",
        [
            "{kind: mmpp, states: [{multiplier: 0, sojourn_s: 30}, {multiplier: 1, sojourn_s: 10}]}",
            "{kind: diurnal, period_s: 100, amplitude: 1}",
        ],
    )
    def test_has_arrivals_whose_rate_changes_and_its_mean_is_what_was_asked_for(self, arrivals: str) -> None:
        sets = ["workload.rate_rps=2", "workload.duration_s=20000", f"workload.arrivals={arrivals}"]
        made, rate = offered(load("toy", sets))
        assert rate == 2
        assert len(made.requests) / 20000 == pytest.approx(2, rel=0.1)
        steady, _ = offered(load("toy", sets[:2]))
        assert dispersion(arrivals_s(made), 10) > 5 * dispersion(arrivals_s(steady), 10)  # type: ignore[operator]

    def test_of_conversations_has_their_shape(self) -> None:
        made, _ = offered(load("toy", [CHATS, SHORT]))
        assert len({request.session for request in made.requests}) < len(made.requests) / 2
        assert max(request.input_tokens for request in made.requests) <= 8192
        assert {request.block_size for request in made.requests} == {64}
        assert {request.block_hashes[0] for request in made.requests} == {0}
        assert offered(load("toy", [CHATS, SHORT, "seed=2"]))[0].requests != made.requests

    def test_of_conversations_is_planned_with_the_lengths_of_their_prompts(self) -> None:
        chats = load("toy", [CHATS, SHORT, "workload.load_fraction=0.5", "workload.duration_s=3000"])
        made, rate = offered(chats)
        told = lengths_of_workload(chats.workload, 32768)
        assert told.mean == pytest.approx(lengths_of(made.requests).mean, rel=0.05)
        assert told.mean > 1000
        assert rate == pytest.approx(0.5 * capacity_rps(chats, chats.deployment()))
        assert workload_lengths(chats, made).mean == lengths_of(made.requests).mean


class TestATrace:
    def test_without_a_rate_is_taken_at_its_own_pace(self, trace: str) -> None:
        made, rate = offered(replay(trace))
        assert [request.arrival_s for request in made.requests] == [0, 3, 9, 12]
        assert rate == pytest.approx(3 / 12)

    def test_is_cut_at_the_duration(self, trace: str) -> None:
        made, _ = offered(replay(trace, "workload.duration_s=5"))
        assert [request.arrival_s for request in made.requests] == [0, 3]

    def test_loses_rows_longer_than_the_profiles_and_says_so(self, trace: str) -> None:
        made, _ = offered(replay(trace))
        assert max(request.input_tokens for request in made.requests) == 32768
        assert made.dropped["longer than the profiles' 32768 tokens"] == 1
        assert made.rows_read == len(made.requests) + sum(made.dropped.values())

    def test_of_such_rows_only_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "long.jsonl"
        path.write_text(mooncake([(0, 40000, 1), (3000, 50000, 1)]))
        with pytest.raises(ScenarioError, match=r"long\.jsonl: every row is longer than the 32768 tokens"):
            offered(replay(str(path)))

    def test_is_stretched_to_a_rate(self, trace: str) -> None:
        made, rate = offered(replay(trace, "workload.rate_rps=0.03"))
        assert rate == 0.03
        assert len(made.requests) == 3  # 0.03 x 100 s
        assert 0 <= made.requests[0].arrival_s < made.requests[-1].arrival_s < 100

    def test_at_a_fraction_is_offered_at_that_of_the_rows_that_are_taken(self, tmp_path: Path) -> None:
        # Short rows first: one local instance prefills two a second. Of the whole trace, two thirds are long, and two
        # remote instances prefill one of them a second: Lambda_max 1.5. The load takes short rows only.
        path = tmp_path / "drift.jsonl"
        path.write_text(mooncake([(3000 * i, 1024 if i < 200 else 32768, 100) for i in range(600)]))
        scenario = replay(str(path), "workload.load_fraction=0.5", "workload.duration_s=150")
        made, rate = offered(scenario)
        assert rate == pytest.approx(0.5 * 2)
        assert len(made.requests) == 150
        whole = load_trace(path).requests
        assert capacity_rps(scenario, scenario.deployment(), lengths_of(whole), 100) == pytest.approx(1.5)

    def test_can_be_spread(self, tmp_path: Path) -> None:
        path = tmp_path / "stamps.jsonl"
        path.write_text(mooncake([(0, 1024, 1), (0, 1024, 1), (3000, 1024, 1)]))
        made, _ = offered(replay(str(path), "workload.arrivals={kind: spread}"))
        assert [request.arrival_s for request in made.requests] == [0, 1.5, 3]

    def test_that_is_too_short_for_the_load_is_refused(self, trace: str) -> None:
        with pytest.raises(TraceError, match="need 200 requests, the trace has 4"):
            offered(replay(trace, "workload.rate_rps=2"))

    def test_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ScenarioError, match=r"workload\.trace = '/nowhere\.jsonl': no such file"):
            offered(replay("/nowhere.jsonl"))

    def test_is_planned_without_the_rows_that_would_be_dropped(self, trace: str) -> None:
        assert build_plan(replay(trace))["lengths"]["high_tokens"] == 32768


class TestWhatAPolicyIsTold:
    def test_the_nominal_link_the_fleet_and_the_costs(self) -> None:
        toy = load("toy")
        lengths = lengths_of_workload(toy.workload, 32768)
        setup = policy_setup(toy, toy.deployment(), lengths, {"threshold_tokens": 5.0})
        assert (setup.link_nominal_bps, setup.n_prfaas, setup.n_p, setup.n_d) == (8e9, 2, 1, 2)
        assert (setup.decode_step_s, setup.decode_slots) == (0.025, 10)
        assert float(setup.hardware["prfaas"].t_prefill(np.array([1024.0]))[0]) == 0.5
        assert setup.parameters == {"threshold_tokens": 5.0}

    def test_a_site_without_instances_has_no_costs(self) -> None:
        toy = load("toy")
        setup = policy_setup(toy, toy.deployment("homogeneous"), lengths_of_workload(toy.workload, 32768), {})
        assert set(setup.hardware) == {"pd"}

    def test_the_longest_prompt_is_what_every_site_knows(self) -> None:
        mixed = load("toy", ["deployments.naive.profiles.pd=h20-1t"])
        assert max_input_tokens(mixed, mixed.deployment("naive")) == 32768


class TestLengthsOnTheWire:
    @pytest.mark.parametrize("name", ["toy", "paper"])
    def test_are_the_same_at_the_other_end(self, name: str) -> None:
        scenario = load(name)
        sent = lengths_of_workload(scenario.workload, 131072)
        got = lengths_from_json(json.loads(json.dumps(lengths_to_json(sent))))
        assert got.mean == pytest.approx(sent.mean)
        assert (got.low, got.high) == (sent.low, sent.high)
        assert (got.edges is None) == (sent.edges is None)

    def test_have_equal_weights_unless_given(self) -> None:
        assert lengths_from_json({"values": [1, 3]}).mean == LengthDistribution.of_sample([1, 3]).mean == 2

    @pytest.mark.parametrize(
        "data",
        [
            None, [], 5, {}, {"values": 5}, {"values": []}, {"values": ["long"]}, {"values": [None]},
            {"values": [[1], 2]},
            {"values": [1], "weights": [1, 2]}, {"values": [1], "weights": 5}, {"values": [1], "weights": [0]},
            {"values": [1], "weights": ["x"]}, {"values": [1, 2], "edges": [1, 2]}, {"values": [1, 2], "edges": "x"},
            {"values": [1, 1], "edges": [1, 2, 3]}, {"values": [1], "median": 1},
        ],
    )  # fmt: skip
    def test_that_are_no_distribution_are_refused(self, data: Any) -> None:
        with pytest.raises(ModelError):
            lengths_from_json(data)
