"""What a gate keeps of a run: Lambda_max between two rates, its own two invariants, and what makes runs the same."""

import math

import pytest

from testbed.gate.jobs import Job
from testbed.gate.measure import digest, lambda_max_rps, measure, own_findings
from testbed.scenario import load
from testbed.simulate import simulate

RATES = (1.0, 2.0, 3.0, 4.0)
NEVER = (False,) * 4


def test_the_slo_is_reached_between_two_rates_where_the_logarithm_says():
    # ln TTFT is linear from 4 s at 2 req/s to 9 s at 3 req/s: 6 s is reached half-way
    assert lambda_max_rps(RATES, (3.0, 4.0, 9.0, 20.0), NEVER, 6.0) == pytest.approx(2.5)
    assert math.sqrt(4.0 * 9.0) == 6.0


@pytest.mark.parametrize(
    ("ttft_s", "over", "rate"),
    [
        ((3.0, 3.5, 4.0, 5.0), NEVER, 4.0),  # all are good
        ((7.0, 8.0, 9.0, 10.0), NEVER, 1.0),  # none is
        ((3.0, 4.0, 5.0, 6.0), (False, False, True, False), 2.0),  # queues grow
        ((3.0, 4.0, None, None), NEVER, 2.0),  # nothing completes
    ],
)
def test_beyond_the_rates_that_were_tried_nothing_is_known(ttft_s, over, rate):
    assert lambda_max_rps(RATES, ttft_s, over, 6.0) == rate


def test_several_rates_are_one_run():
    sets = ["workload.duration_s=120", "workload.warmup_s=10", "slo={ttft_p90_s: 600, tpot_s: 0.025}"]
    scenario = load("toy", sets).only(None)
    ran = measure(Job(scenario, (0.3, 0.8)))
    assert ran["load"]["rates_rps"] == [0.3, 0.8]
    assert ran["load"]["ttft_p90_s"][0] <= ran["load"]["ttft_p90_s"][1]
    assert ran["summary"] == {"lambda_max_rps": 0.8}
    assert ran["status"] == "valid"


def test_requests_that_fail_and_a_policy_that_does_are_findings():
    summary = {
        "requests": {"scheduled": 200, "failed": 3, "by_error": {"rejected": 3}},
        "policy_errors": {"route": 5},
        "policy_error": "KeyError: x",
    }
    complete, decides = own_findings(summary)
    assert (complete["status"], complete["value"], complete["promised"]) == ("broken", 3.0, True)
    assert "3 of 200 requests failed (rejected 3)" in complete["sentence"]
    assert (decides["status"], decides["value"], decides["bound"]) == ("broken", 5.0, 2.0)
    summary["requests"]["failed"], summary["policy_errors"] = 0, {"route": 1}
    assert [one["status"] for one in own_findings(summary)] == ["held", "held"]


def test_a_digest_is_of_every_way_and_stamp():
    runs = [simulate("toy", sets=["workload.duration_s=60"], seed=seed).requests for seed in (1, 1, 2)]
    assert digest(runs[0]) == digest(runs[1]) != digest(runs[2])
    moved = runs[1].copy()
    moved.loc[3, "landed_s"] += 1e-9
    assert digest(moved) != digest(runs[0])
