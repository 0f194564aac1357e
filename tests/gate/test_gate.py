"""Whole gates, on a small scenario: each verdict there is, and what becomes of policies that cannot be run."""

import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from testbed.gate import arms, pool
from testbed.gate.result import GateResult, read
from testbed.gate.suite import Suite, load
from testbed.gate.whole import gate
from testbed.scenario import ScenarioError

SUITE = """
name: small
description: a test's
seeds: {least: 8, most: 12, a_round: 4}
scenarios:
  - name: steady
    description: x
    scenario: paper
    set: [workload.load_fraction=0.6, workload.duration_s=130, workload.warmup_s=10]
    objectives:
      - {metric: ttft_s.p90, better: lower, minimum: 5%}
      - {metric: goodput_rps, better: higher, minimum: 5%}
"""
POLICIES = """
import os, time
from testbed.scheduler.api import Decision, Reject
from testbed.scheduler.prfaas import Prfaas
class Slow(Prfaas):
    def route(self, request, view):
        print("to nobody's result")
        decision = super().route(request, view)
        site = view.nodes[decision.prefill_node].site
        return decision._replace(prefill_node=max(view.prefill(site), key=lambda node: node.queued_s).name)
class Refuses(Prfaas):
    def route(self, request, view):
        return Reject("not today") if request.request_id.endswith("7") else super().route(request, view)
class Dies(Prfaas):
    def route(self, request, view):
        os._exit(7)
class Hangs(Prfaas):
    def route(self, request, view):
        time.sleep(3600)
class CannotStart(Prfaas):
    def start(self, setup):
        raise ValueError("no")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "small.yaml").write_text(SUITE)
    return load(str(tmp_path / "small.yaml"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch) -> Path:
    """A folder with policies of one's own, where one stands."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "gatepolicies.py").write_text(POLICIES)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("gatepolicies", None)


def broken(result: GateResult) -> set[str]:
    return {found.name for one in result.scenarios for found in one.invariants if found.worse}


def test_a_slower_policy_is_worse_and_what_it_prints_is_in_nobodys_way(suite, own, tmp_path, capfd):
    result = gate(suite, "prfaas", "gatepolicies:Slow", cache=tmp_path / "cache", out=tmp_path / "out", jobs=2)
    assert (result.verdict, result.exit_code) == ("worse", 1)
    ttft = result.scenarios[0].objectives[0]
    assert ttft.verdict == "worse"
    assert ttft.effect > 0.05
    assert capfd.readouterr().out == ""
    assert read(tmp_path / "out") == result
    kept = result.scenarios[0].artefact
    for folder, policy in ((kept.baseline, "prfaas"), (kept.candidate, "gatepolicies:Slow")):
        summary = orjson.loads((tmp_path / "out" / folder / "summary.json").read_bytes())
        assert (summary["policy"], summary["seed"]) == (policy, kept.seed)


def test_the_number_of_processes_and_the_cache_change_nothing(suite, own, tmp_path):
    first = gate(suite, "prfaas", "static", cache=tmp_path / "cache", jobs=2)
    again = gate(suite, "prfaas", "static", cache=tmp_path / "cache", jobs=1)
    assert first.totals.cached == 0
    assert again.totals.cached == again.totals.runs == first.totals.runs
    alone = gate(suite, "prfaas", "static", cache=None, jobs=1)
    for other in (again, alone):
        assert other.verdict == first.verdict
        assert [one.objectives for one in other.scenarios] == [one.objectives for one in first.scenarios]
        assert [run.digest for run in other.scenarios[0].runs] == [run.digest for run in first.scenarios[0].runs]


def test_the_same_code_is_the_same_at_once(suite):
    result = gate(suite, "prfaas", "prfaas", cache=None)
    assert (result.verdict, result.same_policy, result.totals.runs) == ("same", True, 0)
    assert result.reasons == ["the arms are the same policy in the same code: nothing was run"]


def test_a_policy_against_itself_has_other_seeds(suite):
    result = gate(suite, "prfaas", "prfaas", cache=None, a_a=True)
    (one,) = result.scenarios
    assert not set(one.seeds) & set(one.candidate_seeds)
    assert result.a_a
    assert result.verdict in ("same", "inconclusive")
    assert any(difference != 0 for difference in one.objectives[0].differences)


def test_a_policy_that_refuses_requests_breaks_a_promise_of_every_scenario(suite, own):
    result = gate(suite, "prfaas", "gatepolicies:Refuses", cache=None)
    assert result.verdict == "worse"
    assert "requests complete" in broken(result)
    assert "refused" in result.reasons[0] or "failed" in result.reasons[0]


@pytest.mark.parametrize("name", ["Dies", "Hangs"])
def test_a_policy_under_which_a_run_does_not_end_is_worse(suite, own, name, monkeypatch):
    monkeypatch.setattr(pool, "RUN_LIMIT_S", 10.0 if name == "Dies" else 2.0)
    few = suite.model_copy(update={"seeds": suite.seeds.model_copy(update={"least": 2, "most": 2})})
    result = gate(few, "static", f"gatepolicies:{name}", cache=None, jobs=2)
    assert result.verdict == "worse"
    assert broken(result) == {"run ends"}


def test_a_policy_that_cannot_start_is_refused(suite, own):
    with pytest.raises(ScenarioError, match=r"gatepolicies:CannotStart.*cannot start: ValueError: no"):
        gate(suite, "prfaas", "gatepolicies:CannotStart", cache=None)


def test_a_metric_that_no_run_has_is_refused(suite):
    objective = suite.scenarios[0].objectives[0].model_copy(update={"metric": "ttft_s.p42"})
    scenario = suite.scenarios[0].model_copy(update={"objectives": [objective]})
    with pytest.raises(ScenarioError, match=r"objective ttft_s\.p42: ttft_s has no 'p42'"):
        gate(suite.model_copy(update={"scenarios": [scenario]}), "prfaas", "static", cache=None)


def test_the_process_that_judges_needs_nothing_that_simulates():
    code = "import sys, testbed.gate.whole; print({'pandas', 'testbed.simulate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=arms.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_baseline_whose_runs_do_not_end_is_no_measure(suite, own):
    few = suite.model_copy(update={"seeds": suite.seeds.model_copy(update={"least": 2, "most": 2})})
    result = gate(few, "gatepolicies:Dies", "static", cache=None, jobs=2)
    assert (result.verdict, result.exit_code) == ("invalid", 3)


def test_the_scheduler_of_a_revision_is_the_one_that_runs(suite, tmp_path, monkeypatch):
    """A revision whose prfaas refuses every request, against today's, in one gate."""
    folder = tmp_path / "repository"
    shutil.copytree(arms.ROOT / "testbed" / "scheduler", folder / "testbed" / "scheduler")
    policy = folder / "testbed" / "scheduler" / "prfaas.py"
    policy.write_text(policy.read_text() + "\n\nPrfaas.route = lambda self, request, view: Reject('as it was')\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    today = gate(suite, "prfaas", "static", cache=None).scenarios[0]
    monkeypatch.setattr(arms, "ROOT", folder)
    result = gate(suite, "git:HEAD", "static", cache=None)
    (one,) = result.scenarios
    assert [run.digest for run in one.runs if run.arm == "candidate"][:8] == [
        run.digest for run in today.runs if run.arm == "candidate"
    ][:8]
    complete = next(found for found in one.invariants if found.name == "requests complete")
    assert complete.baseline_broken == one.seeds
    assert complete.candidate_broken == []
    assert result.baseline.revision is not None
