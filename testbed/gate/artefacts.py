"""For reports: the results folders of the seed in the middle of each scenario, of both arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed.gate.jobs import Job
from testbed.gate.pool import Pool, WorkerError
from testbed.gate.result import Artefact, ScenarioResult
from testbed.gate.run import ARMS, Gate
from testbed.scenario_data import ScenarioError


def middle(differences: Sequence[float | None]) -> int:
    """The place of the median (the lower one of two); of those without a value the first, where there is no other."""
    known = sorted((value, place) for place, value in enumerate(differences) if value is not None)
    return known[(len(known) - 1) // 2][1] if known else 0


def keep_artefacts(gate: Gate, scenarios: list[ScenarioResult], pool: Pool, out: Path) -> list[ScenarioResult]:
    """Run the middle seeds again, with their results written below `out`; the scenarios, told where. Raises
    ScenarioError."""
    jobs, told = [], []
    for course, result in zip(gate.courses, scenarios, strict=True):
        place = middle(result.objectives[0].differences)
        seeds = {"baseline": result.seeds[place], "candidate": result.candidate_seeds[place]}
        if result.clock == "wire":  # every run of it has a folder
            there = {arm: f"{result.name}/{arm}-{seeds[arm]}" for arm in ARMS}
            told.append(result.model_copy(update={"artefact": Artefact(seed=seeds["baseline"], **there)}))
            continue
        for arm in ARMS:
            scenario = course.scenario.only(None, gate.arms[arm].policy).model_copy(update={"seed": seeds[arm]})
            folder = str((out / result.name / arm).absolute())
            jobs.append((gate.arms[arm].environment, Job(scenario, course.rates_rps[-1:], folder)))
        kept = Artefact(
            seed=seeds["baseline"], baseline=f"{result.name}/baseline", candidate=f"{result.name}/candidate"
        )
        told.append(result.model_copy(update={"artefact": kept}))
    try:
        for _ in pool.run(jobs):
            pass
    except WorkerError as error:
        raise ScenarioError(str(error)) from None
    return told
