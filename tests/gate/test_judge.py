"""From paired runs to verdicts: worse, better, same and not known; what is missing, broken or unlike."""

import math

import numpy as np
import pytest

from testbed.gate.judge import (
    Pair,
    amount,
    differences,
    judge_invariants,
    read,
    refuse_unlike,
    tell,
    together,
    value_of,
)
from testbed.gate.statistics import MOST_FOLD
from testbed.gate.suite import Objective
from testbed.scenario_data import ScenarioError

TTFT = Objective(metric="ttft_s.p90", better="lower", minimum="2%")
GOODPUT = Objective(metric="goodput_rps", better="higher", minimum=0.1)


def run(ttft_s: float | None = 1.0, goodput: float | None = 2.0, broken: tuple[str, ...] = (), promised: bool = True):
    findings = [
        {
            "name": name,
            "status": "broken" if name in broken else "held",
            "value": 9.0 if name in broken else 1.0,
            "bound": 5.0,
            "sentence": f"about {name}",
            "promised": promised,
        }
        for name in ("drained", "calm")
    ]
    return {"summary": {"ttft_s": {"p90": ttft_s}, "goodput_rps": goodput}, "findings": findings, "status": "valid"}


def pairs(ratios, base: float = 4.0) -> list[Pair]:
    return [Pair(seed, run(base), run(base * ratio)) for seed, ratio in enumerate(ratios)]


def spread(mean: float, deviation: float, n: int = 16) -> list[float]:
    """Differences of exactly that mean and deviation."""
    x = np.linspace(-1, 1, n)
    return (mean + deviation * x / x.std()).tolist()


def test_a_path_leads_to_a_figure_and_a_phase_goes_by_its_name():
    summary = {"phases": [{"name": "drop", "ttft_s": {"p90": 3.5}}], "ttft_s": {"p90": None}}
    assert value_of(summary, "phases.drop.ttft_s.p90") == 3.5
    assert value_of(summary, "ttft_s.p90") is None
    assert value_of(None, "ttft_s.p90") is None


@pytest.mark.parametrize(
    ("metric", "said"),
    [("ttft_s.p80", "ttft_s has no 'p80'.*it has p90"), ("ttft_s", "is .*no number")],
)
def test_a_path_that_leads_to_no_figure_is_refused(metric, said):
    with pytest.raises(ScenarioError, match=said):
        value_of({"ttft_s": {"p90": 1.0}}, metric)


def test_relative_differences_are_of_logarithms_and_absolute_ones_plain():
    assert differences(TTFT, pairs([1.1])) == [pytest.approx(math.log(1.1))]
    assert differences(GOODPUT, [Pair(0, run(goodput=2.0), run(goodput=1.7))]) == [pytest.approx(-0.3)]


def test_a_value_that_only_one_arm_has_is_as_bad_as_can_be_for_the_other():
    lost, found = Pair(0, run(1.0), run(None)), Pair(1, run(None), run(1.0))
    assert differences(TTFT, [lost, found]) == [MOST_FOLD, -MOST_FOLD]
    assert differences(TTFT, [Pair(0, run(None), run(None))]) == [None]


@pytest.mark.parametrize(
    ("mean", "deviation", "last", "verdict"),
    [
        (0.05, 0.01, False, "worse"),
        (-0.05, 0.01, False, "better"),
        (0.001, 0.005, False, "same"),
        (0.015, 0.002, False, "same"),  # shown, but less than what counts
        (0.05, 0.2, False, None),
        (0.05, 0.2, True, "inconclusive"),
        (-0.05, 0.07, False, None),  # a regression is excluded, an improvement is not shown
        (-0.05, 0.07, True, "same"),
    ],
)
def test_an_objective_is_worse_by_interval_and_minimum_both(mean, deviation, last, verdict):
    assert read(TTFT, spread(mean, deviation), alpha=0.05, planned=16, last=last).verdict == verdict


def test_higher_is_better_turns_it_around():
    assert read(GOODPUT, spread(-0.5, 0.1), alpha=0.05, planned=16, last=False).verdict == "worse"
    assert read(GOODPUT, spread(0.5, 0.1), alpha=0.05, planned=16, last=False).verdict == "better"


def test_a_missing_difference_decides_nothing():
    assert read(TTFT, [0.1] * 9 + [None], alpha=0.05, planned=10, last=False).verdict is None
    assert read(TTFT, [0.1] * 9 + [None], alpha=0.05, planned=10, last=True).verdict == "inconclusive"


def test_what_is_told_is_the_share_by_which_the_candidate_is_larger():
    told = tell(TTFT, pairs([1.10, 1.11, 1.09, 1.10] * 4), alpha=0.01, planned=16)
    assert told.verdict == "worse"
    assert told.effect == pytest.approx((1.10 * 1.11 * 1.09 * 1.10) ** 0.25 - 1)
    assert told.interval.low is not None
    assert told.interval.low < told.bootstrap.low < told.effect < told.bootstrap.high < told.interval.high
    assert told.change == pytest.approx(-told.effect / 0.02)
    assert (told.baseline_mean, told.confidence) == (4.0, 0.99)
    assert "worse, beyond the 2 % that count" in told.reason


@pytest.mark.parametrize(
    ("minimum", "metric", "effect", "said"),
    [
        ("2%", "ttft_s.p90", 0.052, "+5.2 %"),
        ("2%", "ttft_s.p90", 1.5, "+150 %"),
        (0.1, "goodput_rps", -0.3, "-0.3 req/s"),
        (0.01, "offload_fraction", -0.013, "-1.3 points"),
        ("2%", "ttft_s.p90", None, "open"),
    ],
)
def test_an_effect_is_told_in_the_unit_of_what_it_is_of(minimum, metric, effect, said):
    assert amount(Objective(metric=metric, better="lower", minimum=minimum), effect) == said


def test_equal_runs_are_the_same():
    assert tell(TTFT, pairs([1.0] * 8), alpha=0.01, planned=16).verdict == "same"


def test_a_promise_that_only_the_candidate_breaks_is_held_against_it():
    found = judge_invariants([Pair(3, run(), run()), Pair(4, run(), run(broken=("drained",)))])
    drained, calm = found
    assert (drained.worse, drained.candidate_broken, drained.worst, drained.bound) == (True, [4], 9.0, 5.0)
    assert "seed 4: about drained" in drained.reason
    assert (calm.worse, calm.candidate_broken, calm.checked) == (False, [], 2)


@pytest.mark.parametrize(
    ("was", "now"),
    [(run(broken=("calm",)), run(broken=("calm",))), (run(), run(broken=("calm",), promised=False))],
)
def test_what_the_baseline_breaks_too_or_nobody_promised_is_shown_only(was, now):
    calm = judge_invariants([Pair(0, was, now)])[1]
    assert (calm.worse, calm.candidate_broken) == (False, [0])


def test_one_worse_is_worse_whatever_else():
    assert together(["better", "worse", "invalid"]) == "worse"
    assert together(["better", "invalid"]) == "invalid"
    assert together(["better", "inconclusive"]) == "inconclusive"
    assert together(["same", "better"]) == "better"
    assert together(["same"]) == together([]) == "same"


def test_unlike_runs_are_refused_with_what_differs():
    like = {"scenario_sha256": "a", "trace_sha256": "b", "host_sha256": "c", "code_sha256": "d"}
    refuse_unlike(like, dict(like), "steady")
    for name in like:
        with pytest.raises(ScenarioError, match=f"steady: the runs are not alike: {name}"):
            refuse_unlike(like, {**like, name: "other"}, "steady")
