"""A whole gate, from what was typed to its result: `gate(...)`, which the command, the pytest plug-in and tests
call."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed.gate.arms import Arm, resolve
from testbed.gate.artefacts import keep_artefacts
from testbed.gate.cache import Cache
from testbed.gate.fingerprints import code_sha256, host, sha256_of
from testbed.gate.judge import METHOD, amount, together
from testbed.gate.pool import Pool
from testbed.gate.result import (
    EXIT_CODES,
    Fingerprints,
    GateResult,
    ScenarioResult,
    SuiteResult,
    Totals,
    Verdict,
)
from testbed.gate.run import Gate
from testbed.gate.suite import Suite
from testbed.scenario import Scenario, ScenarioError

if TYPE_CHECKING:
    from testbed.load import Testbed

OnRun = Callable[[str, int, int], None]
BringUp = Callable[[Scenario], AbstractContextManager["Testbed"]]
MOST_REASONS: Final = 20


def gate(
    suite: Suite,
    baseline: str,
    candidate: str,
    *,
    cache: Path | None,
    out: Path | None = None,
    jobs: int | None = None,
    a_a: bool = False,
    seed: int | None = None,
    bring_up: BringUp | None = None,
    on_run: OnRun = lambda names, done, of: None,
) -> GateResult:
    """Compare two policies under a suite. Raises ScenarioError, TraceError and ModelError for what cannot be run.

    cache: the folder in which runs are kept, None for none. out: where each scenario's middle seed is written as a
    results folder an arm, the result, and its reports; None for nowhere. jobs: processes, one a core unless given.
    a_a: the candidate is the baseline, under disjoint seeds. bring_up: makes testbeds, for a suite with scenarios on
    the wire. on_run: told of every run: the scenarios that are open, how many runs have ended, and of how many that are
    begun.
    """
    started_s = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-gate-")))
        first = resolve(baseline, "--baseline", scratch)
        second = first if a_a else resolve(candidate, "--candidate", scratch)
        kept = Cache(cache)
        if not a_a and first.identity == second.identity:
            return _kept(_same_code(suite, first, second, time.monotonic() - started_s), out)
        wired = None
        if any(one.clock == "wire" for one in suite.scenarios):
            if bring_up is None or out is None:
                raise ScenarioError(f"suite {suite.name}: has scenarios on the wire; run it as `prfaas gate`")
            _refuse_revisions(first, second)
            wired = bring_up, out
        comparison = Gate(suite, first, second, kept, a_a=a_a, seed=seed, on_run=on_run)
        environments = [first.environment, second.environment]
        pool = stack.enter_context(Pool(environments, jobs or len(os.sched_getaffinity(0))))
        comparison.run(pool)
        if wired is not None:
            from testbed.gate.wire import run_wire

            run_wire(comparison, *wired)
        scenarios = [comparison.result(course) for course in comparison.courses]
        if out is not None:
            scenarios = keep_artefacts(comparison, scenarios, pool, out)
        notes = _notes(first, second)
        if cache is not None and not kept.writable:
            notes.append(f"{cache}: cannot be written to, so no run was kept; set PRFAAS_CACHE to a folder that can")
        new = [run for one in scenarios for run in one.runs]
        totals = Totals(
            wall_s=time.monotonic() - started_s,
            runs=len(new),
            cached=sum(run.cached for run in new),
            requests=sum(
                done.measured["requests"]
                for course in comparison.courses
                for runs in course.runs.values()
                for done in runs
                if not done.cached
            ),
            memory_bytes=pool.most_bytes,
        )
        result = _whole(suite, first, second, scenarios, notes, totals, a_a=a_a)
    return _kept(result, out)


def _refuse_revisions(*arms: Arm) -> None:
    """Raises ScenarioError for a policy of another revision: on the wire the processes of a testbed are of one."""
    for arm in arms:
        if arm.told.kind == "git":
            raise ScenarioError(
                f"{arm.told.given}: a testbed's processes are of one revision; on the wire compare policies by name or "
                "as package.module:Class, or take the suite quick or full"
            )


def _kept(result: GateResult, out: Path | None) -> GateResult:
    """The result, and its reports, in `out`."""
    if out is not None:
        from testbed.gate.report.write import write_gate

        write_gate(result.keep(out), out)
    return result


def _whole(
    suite: Suite,
    baseline: Arm,
    candidate: Arm,
    scenarios: list[ScenarioResult],
    notes: list[str],
    totals: Totals,
    *,
    a_a: bool = False,
    same: bool = False,
) -> GateResult:
    verdict: Verdict = together([one.verdict for one in scenarios])
    said = ["the arms are the same policy in the same code: nothing was run"] if same else _reasons(scenarios, verdict)
    return GateResult(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=said,
        notes=notes,
        a_a=a_a,
        same_policy=same,
        suite=SuiteResult(
            name=suite.name,
            description=suite.description,
            sha256=suite.sha256(),
            alpha=suite.alpha,
            objectives=suite.objectives,
            least_seeds=suite.seeds.least,
            most_seeds=suite.seeds.most,
            method=METHOD,
        ),
        baseline=baseline.told,
        candidate=candidate.told,
        fingerprints=Fingerprints(host=host(), host_sha256=sha256_of(host()), code_sha256=code_sha256()),
        scenarios=scenarios,
        totals=totals,
        taken_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _same_code(suite: Suite, baseline: Arm, candidate: Arm, wall_s: float) -> GateResult:
    totals = Totals(wall_s=wall_s, runs=0, cached=0, requests=0, memory_bytes=None)
    return _whole(suite, baseline, candidate, [], _notes(baseline, candidate), totals, same=True)


def _reasons(scenarios: Sequence[ScenarioResult], verdict: Verdict) -> list[str]:
    """Why the verdict is what it is: broken promises, then objectives of that verdict, the largest change first."""
    said = [f"{one.name}: {found.reason}" for one in scenarios for found in one.invariants if found.worse]
    if verdict == "invalid":
        said += [
            f"{one.name}: seed {run.seed} of the {run.arm}: {reason}"
            for one in scenarios
            for run in one.runs
            if run.status == "invalid"
            for reason in run.reasons[:1]
        ]
    told = [(one, objective) for one in scenarios for objective in one.objectives if objective.verdict == verdict]
    told.sort(key=lambda pair: -abs(pair[1].change or 0.0))
    said += [f"{one.name}: {objective.reason}" for one, objective in told]
    if verdict == "same":
        said = [f"no regression of what counts in any of {len(told)} objectives"]
        for one, objective in told[:1]:
            said[0] += f"; the largest change: {one.name}: {objective.metric} {amount(objective, objective.effect)}"
    return said[:MOST_REASONS]


def _notes(baseline: Arm, candidate: Arm) -> list[str]:
    notes = []
    for name, arm in (("baseline", baseline), ("candidate", candidate)):
        if arm.told.dirty:
            notes.append(f"{name} {arm.told.given}: with changes that are not committed")
        if arm.told.knows_future:
            notes.append(f"{name} {arm.told.given}: knows what no scheduler can; it is a bound, no rival")
    return notes
