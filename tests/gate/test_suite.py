"""Suites: the shipped ones can be run, and what is wrong with one is said with its place, its value and the remedy."""

from pathlib import Path

import pytest

from testbed.gate.suite import load, resolve, shipped
from testbed.scenario import ScenarioError

MINIMAL = """
name: mine
description: a test's
seeds: {least: 4, most: 8}
scenarios:
  - name: one
    description: x
    scenario: toy
    objectives: [{metric: ttft_s.p90, better: lower, minimum: 2%}]
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_the_shipped_suites_can_be_run(name):
    suite = load(name)
    for one in suite.scenarios:
        scenario = resolve(suite, one)
        assert len(scenario.deployments) == 1
        assert scenario.workload.load_fraction is None, "rates are fixed, whatever policy runs"
    assert suite.share * suite.objectives == pytest.approx(suite.alpha)


def test_a_minimum_is_a_share_or_a_number_in_the_metrics_unit(tmp_path):
    text = MINIMAL.replace("}]", "}, {metric: slo.met_fraction, better: higher, minimum: 0.01}]")
    share, number = load(written(tmp_path, text)).scenarios[0].objectives
    assert (share.relative, share.least, share.unit) == (True, 0.02, "s")
    assert (number.relative, number.least, number.unit) == (False, 0.01, "share")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("2%", "0%", "minimum = '0%': must be a share such as 2%"),
        ("2%", "-1", r"minimum = -1.*must be above 0"),
        ("ttft_s.p90", "tfft_s.p90", "metric = 'tfft_s.p90': did you mean ttft_s"),
        ("better: lower", "better: less", "better = 'less': must be 'lower' or 'higher'"),
        ("most: 8", "most: 2", "least = 4: more than most = 2"),
        ("least: 4", "fewest: 4", "seeds.fewest: unknown key"),
        ("ttft_s.p90", "lambda_max_rps", "load_fractions"),
        ("    scenario: toy\n", "", "one.scenario: missing"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, old, new, said):
    with pytest.raises(ScenarioError, match=said) as caught:
        load(written(tmp_path, MINIMAL.replace(old, new)))
    assert "suite.yaml" in str(caught.value)


def test_an_unknown_suite_is_refused_with_those_there_are():
    with pytest.raises(ScenarioError, match=r"suite 'quik'.*did you mean quick"):
        load("quik")


def test_a_phase_that_is_not_there_is_refused(tmp_path):
    suite = load(written(tmp_path, MINIMAL.replace("ttft_s.p90", "phases.drop.ttft_s.p90")))
    with pytest.raises(ScenarioError, match="has no phase 'drop'"):
        resolve(suite, suite.scenarios[0])
