"""A pytest plug-in for those who gate a policy in their own tests: the fixture `prfaas_gate`.

    def test_my_policy_is_no_worse(prfaas_gate):
        prfaas_gate("mine:HalfAway", baseline="prfaas", suite="quick")

A regression fails the test with the gate's reasons; what could not be measured fails it too, in other words; what the
seeds could not decide is skipped, unless `prfaas_inconclusive` says otherwise. pytest loads this in every run of
whoever has the testbed installed, so nothing is imported before the fixture is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from testbed.gate.result import GateResult

INCONCLUSIVE: Final = ("skip", "fail", "pass")
NOT_A_NAME: Final = re.compile(r"[^\w.-]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("prfaas", "gates of scheduling policies")
    group.addoption("--prfaas-baseline", metavar="POLICY", help="the baseline of every gate, such as git:origin/main")
    group.addoption("--prfaas-suite", metavar="SUITE", help="the suite of every gate: a shipped one, or a YAML file")
    group.addoption("--prfaas-out", metavar="DIR", help="where reports go, a folder a gate (else with tmp_path)")
    parser.addini("prfaas_baseline", "the baseline where a test names none", default="prfaas")
    parser.addini("prfaas_suite", "the suite where a test names none", default="quick")
    parser.addini("prfaas_inconclusive", f"what becomes of a gate without an answer: {INCONCLUSIVE}", default="skip")


class GateOfTest:
    """What the fixture is: call it to gate a policy."""

    def __init__(self, config: pytest.Config, name: str, scratch: Path) -> None:
        self._config = config
        out = config.getoption("--prfaas-out")
        self._folder = (Path(out) if out else scratch) / NOT_A_NAME.sub("-", name).strip("-")
        self._calls = 0

    def __call__(
        self, candidate: str, *, baseline: str | None = None, suite: str | None = None, seed: int | None = None
    ) -> GateResult:
        """The result of a gate that did not fail: better, the same, or inconclusive where that passes.

        candidate, baseline: policies as `prfaas gate` takes them. suite: a shipped one's name, or a YAML file. An
        option of the command line has its way over what is given here. seed: the first one, instead of the suite's.
        """
        from testbed.gate.cache import default_folder
        from testbed.gate.suite import load
        from testbed.gate.whole import gate
        from testbed.scenario_data import ScenarioError
        from testbed.scheduler.model import ModelError
        from traces.request import TraceError

        self._calls += 1
        out = self._folder if self._calls == 1 else self._folder.with_name(f"{self._folder.name}-{self._calls}")
        if out.exists() and any(out.iterdir()):
            raise pytest.UsageError(f"--prfaas-out: {out} is there already; name another, nothing is overwritten")
        try:
            result = gate(
                load(self._asked("suite", suite)),
                self._asked("baseline", baseline),
                candidate,
                cache=default_folder(),
                out=out,
                seed=seed,
            )
        except (ScenarioError, ModelError, TraceError) as error:
            pytest.fail(f"prfaas gate: {error}", pytrace=False)
        return self._judged(result, out)

    def _asked(self, name: str, given: str | None) -> str:
        return str(self._config.getoption(f"--prfaas-{name}") or given or self._config.getini(f"prfaas_{name}"))

    def _judged(self, result: GateResult, out: Path) -> GateResult:
        arms = f"{result.candidate.given} against {result.baseline.given}"
        said = "\n  ".join([f"{arms} is {result.verdict}", *result.reasons, f"see {out}/report.html"])
        if result.verdict == "inconclusive":
            match self._inconclusive():
                case "skip":
                    pytest.skip(said)
                case "fail":
                    pytest.fail(said, pytrace=False)
        elif result.exit_code != 0:
            pytest.fail(said, pytrace=False)
        return result

    def _inconclusive(self) -> str:
        asked = str(self._config.getini("prfaas_inconclusive"))
        if asked not in INCONCLUSIVE:
            raise pytest.UsageError(f"prfaas_inconclusive: {asked!r} is none of {', '.join(INCONCLUSIVE)}")
        return asked


@pytest.fixture
def prfaas_gate(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateOfTest:
    """Gates a policy: `prfaas_gate(candidate, baseline=..., suite=...)`. Modules are found where pytest was started."""
    monkeypatch.syspath_prepend(str(Path.cwd()))
    return GateOfTest(request.config, request.node.nodeid, tmp_path)
