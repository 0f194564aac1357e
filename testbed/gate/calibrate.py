"""How far a gate can be trusted, measured: how often it cries wolf, and how often it sees a wolf of known size.

A pool of runs an arm is recorded once (and kept). Every trial is a whole comparison, round by round as the gate makes
it, on runs drawn from the pool: the baseline against itself under disjoint seeds in all scenarios, and against a policy
that is truly worse, seed by seed, in the suite's scenario `steady`. Trials share the pool, so they are not independent;
what they estimate is unbiased all the same.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict

from testbed.gate.arms import Arm, resolve
from testbed.gate.cache import Cache
from testbed.gate.jobs import Measured
from testbed.gate.judge import Pair, differences, judge_invariants, read, together, why_stop
from testbed.gate.pool import Pool
from testbed.gate.result import Interval, Verdict
from testbed.gate.run import Course, Gate
from testbed.gate.statistics import bootstrap_interval
from testbed.gate.suite import Suite, load
from testbed.scenario_data import ScenarioError

POOL: Final = 400
TRIALS: Final = 100
STEADY: Final = "steady"
METRIC: Final = "ttft_s.p90"
MOST_FALSE: Final = 0.05
WORSE: Final[dict[str, tuple[str, float]]] = {
    "5 %": ("testbed.gate.handicap:Heavier", 0.95),
    "2 %": ("testbed.gate.handicap:Lighter", 0.80),
}
"""Regressions of P90 TTFT in `steady`: the policy, and the share of trials in which it has to be flagged."""

THOROUGH: Final = ("full",)
"""Shipped suites that are tried on the same pool where they can be."""

OnRun = Callable[[str, int, int], None]


class Power(BaseModel):
    """How often a suite flags a regression. effect: its true size, a share, over the whole pool; interval: of it, 95 %.
    asked: whether the suite promises `wanted`: its minimum in `steady` lies well below the regression."""

    model_config = ConfigDict(frozen=True)

    suite: str
    policy: str
    effect: float
    interval: Interval
    flagged: int
    trials: int
    wanted: float
    asked: bool


class Calibration(BaseModel):
    """false_worse, false_better: trials of the baseline against itself that claim a difference. a_a: verdicts, by name.
    by_objective: how often each claimed one. broken: runs of the pool that break what their scenario promises."""

    model_config = ConfigDict(frozen=True)

    suite: str
    baseline: str
    pool: int
    trials: int
    a_a: dict[str, int]
    false_worse: int
    false_better: int
    by_objective: dict[str, int]
    broken: dict[str, int]
    power: list[Power]
    wall_s: float
    holds: bool


def calibrate(
    suite: Suite,
    baseline: str,
    *,
    cache: Path | None,
    out: Path | None = None,
    jobs: int | None = None,
    pool: int = POOL,
    trials: int = TRIALS,
    on_run: OnRun = lambda names, done, of: None,
) -> Calibration:
    """Record the pool and try. Raises ScenarioError, for a suite without `steady` too."""
    started_s = time.monotonic()
    suite = suite.model_copy(update={"scenarios": [one for one in suite.scenarios if one.clock == "virtual"]})
    steady = next((one for one in suite.scenarios if one.name == STEADY), None)
    if steady is None or METRIC not in [objective.metric for objective in steady.objectives]:
        raise ScenarioError(
            f"suite {suite.name}: no scenario {STEADY!r} with the objective {METRIC}, which is what is measured; add it"
        )
    with tempfile.TemporaryDirectory(prefix="prfaas-gate-") as scratch:
        first = resolve(baseline, "--baseline", Path(scratch))
        arms = {name: resolve(policy, "--calibrate", Path(scratch)) for name, (policy, _) in WORSE.items()}
        environments = [arm.environment for arm in (first, *arms.values())]
        with Pool(environments, jobs or len(os.sched_getaffinity(0))) as workers:
            kept = Cache(cache)
            runs = _record(suite, first, kept, workers, pool, on_run)
            only = suite.model_copy(update={"scenarios": [steady]})
            worse = {name: _record(only, arm, kept, workers, pool, on_run)[STEADY] for name, arm in arms.items()}
    rng = np.random.default_rng(20260401)
    courses = {one.name: Course.of(suite, one) for one in suite.scenarios}
    verdicts: Counter[str] = Counter()
    claims: Counter[str] = Counter()
    for _ in range(trials):
        said = []
        for name, course in courses.items():
            drawn = rng.permutation(pool)[: 2 * course.most]
            pairs = [Pair(i, runs[name][a], runs[name][b]) for i, (a, b) in enumerate(drawn.reshape(-1, 2).tolist())]
            verdict, by_metric = try_course(suite, course, pairs)
            said.append(verdict)
            claims.update(f"{name} {metric}" for metric, found in by_metric.items() if found in ("worse", "better"))
        verdicts[together(said)] += 1
    power = [
        _power(of, course, runs[STEADY], worse[name], WORSE[name][0], WORSE[name][1], trials, rng)
        for of, course in _with_that_steady(suite, courses[STEADY])
        for name in WORSE
    ]
    broken = Counter(
        f"{name}: {found['name']}"
        for name, ran in runs.items()
        for run in ran
        for found in run["findings"]
        if found["status"] == "broken" and found["promised"]
    )
    false_worse = verdicts["worse"]
    result = Calibration(
        suite=suite.name,
        baseline=baseline,
        pool=pool,
        trials=trials,
        a_a=verdicts,
        false_worse=false_worse,
        false_better=verdicts["better"],
        by_objective=claims,
        broken=broken,
        power=power,
        wall_s=time.monotonic() - started_s,
        holds=false_worse <= MOST_FALSE * trials
        and all(one.flagged >= one.wanted * one.trials for one in power if one.asked),
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "calibration.json").write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return result


def _with_that_steady(suite: Suite, steady: Course) -> list[tuple[Suite, Course]]:
    """The suite, and the shipped one that has the very same scenario `steady`: it can be tried on the same pool."""
    out = [(suite, steady)]
    for other in (load(name) for name in THOROUGH if name != suite.name):
        for one in other.scenarios:
            if one.name == STEADY and (course := Course.of(other, one)).sha256 == steady.sha256:
                out.append((other, course))
    return out


def _record(suite: Suite, arm: Arm, cache: Cache, workers: Pool, pool: int, on_run: OnRun) -> dict[str, list[Measured]]:
    """`pool` runs of an arm in each scenario of a suite, seeds from the suite's first on."""
    gate = Gate(suite, arm, arm, cache, on_run=on_run)
    runs = gate.pool_of("baseline", pool, workers)
    return {course.compared.name: ran for course, ran in zip(gate.courses, runs, strict=True)}


def try_course(suite: Suite, course: Course, pairs: Sequence[Pair]) -> tuple[Verdict, dict[str, Verdict]]:
    """A scenario's verdict, and each objective's, as the gate comes to them: it looks after its rounds, and stops."""
    objectives, n = course.compared.objectives, course.least
    while not why_stop(objectives, pairs[:n], alpha=suite.share, most=course.most):
        n = min(n + suite.seeds.a_round, course.most)
    seen = pairs[:n]
    found: dict[str, Verdict] = {}
    for one in objectives:
        verdict = read(one, differences(one, seen), alpha=suite.share, planned=course.most, last=True).verdict
        assert verdict is not None
        found[one.metric] = verdict
    broken: list[Verdict] = ["worse" for one in judge_invariants(seen) if one.worse]
    return together([*found.values(), *broken]), found


def _power(
    suite: Suite,
    course: Course,
    baseline: Sequence[Measured],
    worse: Sequence[Measured],
    policy: str,
    wanted: float,
    trials: int,
    rng: np.random.Generator,
) -> Power:
    whole = [Pair(i, was, now) for i, (was, now) in enumerate(zip(baseline, worse, strict=True))]
    objective = next(one for one in course.compared.objectives if one.metric == METRIC)
    true = np.array(differences(objective, whole), dtype=np.float64)
    flagged = 0
    for _ in range(trials):
        drawn = rng.permutation(len(whole))[: course.most]
        _, found = try_course(suite, course, [whole[i] for i in drawn.tolist()])
        flagged += found[METRIC] == "worse"
    low, high = bootstrap_interval(true)
    effect = math.expm1(float(true.mean()))
    return Power(
        suite=suite.name,
        policy=policy,
        effect=effect,
        interval=Interval(low=math.expm1(low), high=math.expm1(high)),
        flagged=flagged,
        trials=trials,
        wanted=wanted,
        asked=objective.relative and objective.least < 0.75 * effect,
    )
