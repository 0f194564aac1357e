"""The suite wire without its link: arms take turns, an invalid run is tried again, a revision is refused."""

import contextlib
from types import SimpleNamespace

import orjson
import pytest

import testbed.load
from testbed.gate import wire
from testbed.gate.run import Gate
from testbed.gate.suite import load
from testbed.gate.whole import gate
from testbed.scenario import ScenarioError

SUITE = load("wire")


@pytest.fixture
def link(monkeypatch):
    """A testbed that answers with what it is told to: by policy, the P90 TTFT and the statuses of its runs."""
    told = SimpleNamespace(ttft_s={"static": 3.0, "naive": 3.0}, status={}, calls=[])

    def run_load(up, scenario, folder, *, policy=None):
        name = policy or up.scenario.deployments[0].policy.name
        told.calls.append((name, scenario.seed))
        statuses = told.status.get(name, ["valid"])
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        folder.mkdir(parents=True)
        (folder / "provenance.json").write_bytes(orjson.dumps({"trace": {"rows_sha256": str(scenario.seed)}}))
        (folder / "status").write_text(status)
        summary = {
            "verdict": {"status": status, "reasons": [] if status == "valid" else ["late"]},
            "requests": {"scheduled": 100, "failed": 0, "by_error": {}},
            "policy_errors": {},
            "ttft_s": {"p90": told.ttft_s[name] * (1 + scenario.seed % 3 / 100)},
        }
        return SimpleNamespace(summary=summary, folder=folder)

    monkeypatch.setattr(testbed.load, "run_load", run_load)
    monkeypatch.setattr(wire, "simulate", lambda s: SimpleNamespace(summary={"ttft_s": {"p90": 3.1}}))
    return told


@contextlib.contextmanager
def bring_up(scenario):
    yield SimpleNamespace(scenario=scenario)


def run(tmp_path, candidate="naive"):
    return gate(SUITE, "static", candidate, cache=None, out=tmp_path / "out", bring_up=bring_up, jobs=1)


def test_arms_take_turns_at_going_first(link, tmp_path):
    result = run(tmp_path)
    assert result.verdict == "same"
    assert [name for name, _ in link.calls[:4]] == ["static", "naive", "naive", "static"]
    (one,) = result.scenarios
    assert (tmp_path / "out" / one.artefact.candidate / "provenance.json").is_file()


def test_a_far_slower_policy_is_worse(link, tmp_path):
    link.ttft_s["naive"] = 6.0
    result = run(tmp_path)
    assert result.verdict == "worse"
    agrees = next(found for found in result.scenarios[0].invariants if found.name == "virtual time agrees")
    assert (agrees.worse, agrees.promised) == (False, False)
    assert len(agrees.candidate_broken) == len(result.scenarios[0].seeds)


def test_a_run_whose_meter_failed_is_tried_once_more(link, tmp_path):
    link.status["static"] = ["invalid", "valid"]
    result = run(tmp_path)
    assert result.verdict == "same"
    assert link.calls[0] == link.calls[1]
    folder = tmp_path / "out" / "smoke"
    seed = result.scenarios[0].seeds[0]
    assert (folder / f"baseline-{seed}" / "status").read_text() == "valid"
    assert (folder / f"baseline-{seed}-invalid-1" / "status").read_text() == "invalid"


def test_a_meter_that_fails_again_makes_it_invalid(link, tmp_path):
    link.status["static"] = ["invalid"]
    result = run(tmp_path)
    assert (result.verdict, result.exit_code) == ("invalid", 3)
    assert "late" in result.reasons[0]


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(Gate, "run", lambda *_: pytest.fail("it ran what is refused afterwards"))


def test_a_policy_of_another_revision_is_refused(nothing_runs, tmp_path):
    with pytest.raises(ScenarioError, match="a testbed's processes are of one revision"):
        run(tmp_path, "git:HEAD:naive")


def test_a_suite_with_the_wire_needs_a_testbed(nothing_runs, tmp_path):
    with pytest.raises(ScenarioError, match="run it as `prfaas gate`"):
        gate(SUITE, "static", "naive", cache=None, out=tmp_path)
