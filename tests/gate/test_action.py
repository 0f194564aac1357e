"""`action.yml`: its steps run as GitHub runs them, in a repository with a policy that a pull request made worse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gate.test_gate import POLICIES, SUITE
from tests.gate.test_pytest_plugin import SELDOM

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
GOOD = POLICIES.replace("class Slow(Prfaas):", "class Mine(Prfaas):\n    pass\nclass Slow(Prfaas):")
BAD = f"{POLICIES}\nclass Mine(Slow):\n    pass\n"


@dataclass
class Job:
    """What a runner keeps of a job: its inputs, what its steps put out, and its files."""

    repository: Path
    temp: Path
    inputs: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    said: str = ""

    @property
    def summary(self) -> str:
        path = self.temp / "summary"
        return path.read_text() if path.exists() else ""

    def run(self) -> int:
        """Every step with a script but the installation; the exit code of the first that fails."""
        for step in ACTION["runs"]["steps"]:
            if "run" not in step or step["name"] == "install":
                continue
            done = subprocess.run(
                [*SHELL, "-c", step["run"]],
                cwd=self.repository,
                env={**os.environ, **self._environment(step)},
                capture_output=True,
                text=True,
                timeout=300,
            )
            self.said += done.stdout + done.stderr
            path = self.temp / "output"
            if path.exists():
                self.outputs = dict(line.split("=", 1) for line in path.read_text().splitlines())
            if done.returncode:
                return done.returncode
        return 0

    def _environment(self, step: dict[str, Any]) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_OUTPUT": str(self.temp / "output"),
            "GITHUB_STEP_SUMMARY": str(self.temp / "summary"),
            "GITHUB_BASE_REF": "",
            **self.variables,
            **{name: re.sub(r"\$\{\{ *(.+?) *\}\}", self._value, str(text)) for name, text in step["env"].items()},
        }

    def _value(self, match: re.Match[str]) -> str:
        kind, _, name = match[1].rpartition(".")
        if kind == "inputs":
            return str(self.inputs.get(name, ACTION["inputs"][name].get("default", "")))
        return {"runner": str(self.temp), "steps.gate.outputs": self.outputs.get(name, "")}[kind]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`main` with a good policy, and a branch that made it worse, checked out."""
    made = tmp_path / "theirs"
    made.mkdir()

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *words], cwd=made, check=True, capture_output=True)

    git("init", "--quiet")
    (made / "mine.py").write_text(GOOD)
    (made / "small.yaml").write_text(SUITE)
    git("add", ".")
    git("commit", "--quiet", "-m", "good")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    git("switch", "--quiet", "-c", "branch")
    (made / "mine.py").write_text(BAD)
    git("commit", "--quiet", "-am", "bad")
    return made


@pytest.fixture
def job(repository: Path, tmp_path: Path) -> Job:
    (tmp_path / "temp").mkdir()
    return Job(repository, tmp_path / "temp", {"candidate": "mine:Mine", "suite": "small.yaml"})


def test_a_pull_request_is_gated_against_its_merge_base(job):
    job.variables = {"GITHUB_BASE_REF": "main"}
    assert job.run() == 1, job.said
    assert (job.outputs["verdict"], job.outputs["code"]) == ("worse", "1")
    assert job.summary.startswith("## 🔴 Worse: mine:Mine is worse than git:")
    assert {"report.html", "report.md", "junit.xml"} <= {one.name for one in Path(job.outputs["folder"]).iterdir()}


def test_a_push_is_gated_against_the_commit_before(job):
    assert job.run() == 1, job.said
    assert job.outputs["verdict"] == "worse"


def test_a_baseline_that_is_given_is_taken(job):
    job.inputs["baseline"] = "mine:Mine"
    assert job.run() == 0, job.said
    assert job.outputs["verdict"] == "same"


@pytest.mark.parametrize(("fail", "code"), [("false", 0), ("true", 4)])
def test_what_is_not_decided_fails_only_where_that_is_asked_for(job, fail, code):
    suite = SUITE.replace("least: 8, most: 12, a_round: 4", "least: 2, most: 2, a_round: 2")
    (job.repository / "small.yaml").write_text(re.sub(r".*goodput_rps.*\n", "", suite))
    (job.repository / "mine.py").write_text(POLICIES + SELDOM)
    job.inputs |= {"baseline": "prfaas", "candidate": "mine:Seldom", "fail-on-inconclusive": fail}
    assert job.run() == code, job.said
    assert job.outputs["verdict"] == "inconclusive"


@pytest.mark.parametrize("candidate", ["prfaas", "git:HEAD", "git:HEAD:mine:Mine"])
def test_what_has_no_earlier_self_in_this_repository_needs_a_baseline(job, candidate):
    job.inputs["candidate"] = candidate
    assert job.run() == 2
    assert f"::error::candidate {candidate} is no package.module:Class" in job.said


def test_without_an_earlier_commit_it_says_what_to_do(job):
    subprocess.run(["git", "switch", "--quiet", "--orphan", "new"], cwd=job.repository, check=True)
    (job.repository / "mine.py").write_text(GOOD)
    assert job.run() == 2
    assert "fetch-depth: 0" in job.said


def test_a_usage_error_has_no_verdict_and_its_own_code(job):
    job.inputs |= {"baseline": "prfaas", "candidate": "naif"}
    assert job.run() == 2
    assert "did you mean naive" in job.said
    assert (job.outputs["verdict"], job.outputs["code"]) == ("", "2")


def test_what_is_given_is_never_part_of_a_script(job, tmp_path):
    assert not any("${{" in step.get("run", "") for step in ACTION["runs"]["steps"])
    job.inputs["baseline"] = f"prfaas; touch {tmp_path / 'owned'}; $(touch {tmp_path / 'owned'})"
    assert job.run() == 2
    assert not (tmp_path / "owned").exists()
