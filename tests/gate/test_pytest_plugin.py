"""The plug-in in pytest runs of its own: what each verdict makes of a test, and that nobody pays for it unasked."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.gate.test_gate import POLICIES

pytest_plugins = ["pytester"]

SUITE = """
name: small
description: a test's
seeds: {least: 2, most: MOST, a_round: 2}
scenarios:
  - name: steady
    description: x
    scenario: paper
    set: [workload.load_fraction=0.6, workload.duration_s=60, workload.warmup_s=10]
    objectives:
      - {metric: ttft_s.p90, better: lower, minimum: MINIMUM}
"""
SELDOM = """
class Seldom(Slow):
    def route(self, request, view):
        return (super() if request.request_id.endswith("7") else super(Slow, self)).route(request, view)
"""
TEST = """
def test_policy(prfaas_gate):
    result = prfaas_gate({call})
    assert result.exit_code in (0, 4)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs pytest on a test that calls the fixture so."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # whether the testbed was installed with it or not
    monkeypatch.setenv("PRFAAS_CACHE", str(pytester.path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makepyfile(mine=POLICIES + SELDOM)

    def go(call: str, *options: str, ini: str = "", minimum: str = "5%", most: int = 8) -> pytest.RunResult:
        pytester.makefile(".yaml", small=SUITE.replace("MINIMUM", minimum).replace("MOST", str(most)))
        pytester.makepyfile(TEST.format(call=call))
        pytester.makeini(f"[pytest]\nprfaas_suite = small.yaml\n{ini}\n")
        return pytester.runpytest_subprocess("-p", "testbed.pytest_plugin", "-rs", *options)

    return go


def test_the_same_policy_passes(run):
    run("'prfaas'").assert_outcomes(passed=1)


def test_a_regression_fails_with_its_reasons_and_the_page(run, pytester):
    done = run("'mine:Slow'", "--prfaas-out=reports")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*mine:Slow against prfaas is worse*", "*steady: ttft_s.p90: +*", "*report.html"])
    assert "Traceback" not in done.stdout.str()
    (folder,) = (pytester.path / "reports").iterdir()
    assert {"report.html", "report.md", "junit.xml", "summary.json"} <= {one.name for one in folder.iterdir()}


def test_what_is_not_decided_is_skipped_failed_or_passed_as_asked(run):
    asked = {"": {"skipped": 1}, "fail": {"failed": 1}, "pass": {"passed": 1}}
    for ini, outcome in asked.items():
        line = f"prfaas_inconclusive = {ini}" if ini else ""
        done = run("'mine:Seldom'", ini=line, most=2)  # two seeds decide nothing that small
        done.assert_outcomes(**outcome)


def test_the_command_line_names_another_baseline(run):
    done = run("'static', baseline='nonsense'", "--prfaas-baseline=static")
    done.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("call", "said"),
    [("'naif'", "*prfaas gate: --candidate naif: did you mean naive*"), ("'prfaas', suite='quik'", "*suite 'quik'*")],
)
def test_what_cannot_be_gated_fails_in_words(run, call, said):
    done = run(call)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines([said])
    assert "Traceback" not in done.stdout.str()


def test_it_is_declared_and_imports_nothing_by_itself():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"prfaas": "testbed.pytest_plugin"}
    code = "import sys, pytest, testbed; w = {*sys.modules}; import testbed.pytest_plugin; print({*sys.modules} - w)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'testbed.pytest_plugin'}\n"
