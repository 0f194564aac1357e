"""Metrics by their names, and figures with their units."""

import pytest

from testbed.gate.report.figures import signed
from testbed.gate.report.words import INVARIANTS, metric_meaning, metric_name, value


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("ttft_s.p90", "P90 TTFT"),
        ("phases.drop.ttft_s.p90", "P90 TTFT, phase drop"),
        ("phases.after.goodput_rps", "goodput, phase after"),
        ("lambda_max_rps", "λ_max"),
        ("ttft_split_s.overall.queue.mean", "mean TTFT part queue"),
        ("slo.met_fraction", "SLO met fraction"),
    ],
)
def test_a_metric_has_a_name_for_people(metric, name):
    assert metric_name(metric) == name
    assert metric_meaning(metric)


def test_a_metric_that_nobody_described_keeps_its_own():
    assert (metric_name("novel_s.p50"), metric_meaning("novel_s.p50")) == ("P50 novel_s", "")


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (4.0576, "s", "4.058 s"),
        (None, "s", "-"),
        (5.28e9, "bit/s", "5.28 Gbps"),
        (0.489, "share", "48.9 %"),
        (3.0, "", "3"),
    ],
)
def test_a_figure_has_its_unit(number, unit, text):
    assert value(number, unit) == text


def test_a_difference_has_its_sign():
    assert signed(-0.1139, "req/s") == "-0.1139 req/s"
    assert signed(0.091, "share") == "+9.1 points"


def test_every_invariant_has_a_meaning():
    from testbed.gate.measure import own_findings
    from testbed.simulate import simulate

    summary = simulate("link-drop", sets=["phases=[]", "workload.duration_s=5", "workload.warmup_s=0"]).summary
    names = {one["name"] for one in [*own_findings(summary), *summary["invariants"]]}
    assert names == set(INVARIANTS)
