"""The gate measured by itself: on pools whose truth is known, and once from end to end."""

import numpy as np
import orjson
import pytest

from testbed.gate import calibrate as calibration
from testbed.gate.calibrate import calibrate, try_course
from testbed.gate.judge import Pair
from testbed.gate.run import Course
from testbed.gate.suite import load
from testbed.scenario import ScenarioError

QUICK = load("quick")
STEADY = next(one for one in QUICK.scenarios if one.name == "steady")


def ran(ttft_s: float):
    return {"summary": {"ttft_s": {"p90": ttft_s}, "goodput_rps": 2.0}, "findings": [], "status": "valid"}


def trial(rng, effect: float, scatter: float) -> str:
    course = Course.of(QUICK, STEADY)
    base = np.exp(rng.normal(1.5, 0.06, course.most))
    pairs = [Pair(i, ran(was), ran(was * np.exp(rng.normal(effect, scatter)))) for i, was in enumerate(base)]
    verdict, _ = try_course(QUICK, course, pairs)
    return verdict


def test_what_is_the_same_is_rarely_called_worse_and_what_is_worse_nearly_always():
    rng = np.random.default_rng(11)
    assert [trial(rng, 0.0, 0.08) for _ in range(60)].count("worse") <= 3
    assert [trial(rng, 0.05, 0.02) for _ in range(60)].count("worse") >= 57


def test_nothing_is_seen_where_the_noise_is_larger():
    rng = np.random.default_rng(11)
    assert {trial(rng, 0.02, 0.3) for _ in range(20)} == {"inconclusive"}


def test_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "THOROUGH", ())
    short = STEADY.model_copy(
        update={"set": [*STEADY.set[:1], "workload.duration_s=120", "workload.warmup_s=20"], "most_seeds": 8}
    )
    suite = QUICK.model_copy(update={"scenarios": [short]})
    found = calibrate(suite, "prfaas", cache=None, out=tmp_path, pool=16, trials=5)
    assert (found.pool, found.trials, sum(found.a_a.values())) == (16, 5, 5)
    assert [one.suite for one in found.power] == ["quick", "quick"]
    assert found.power[0].effect > found.power[1].effect > 0
    assert found.broken == {}
    assert orjson.loads((tmp_path / "calibration.json").read_bytes())["trials"] == 5


def test_a_suite_without_the_scenario_to_measure_is_refused():
    suite = QUICK.model_copy(update={"scenarios": [one for one in QUICK.scenarios if one.name != "steady"]})
    with pytest.raises(ScenarioError, match="no scenario 'steady' with the objective"):
        calibrate(suite, "prfaas", cache=None)
