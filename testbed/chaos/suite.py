"""Runs of experiments: each under each policy, on either clock, and what came of them as one table.

The first policy is the one under test: its worst exit code is the suite's. The others are there to be compared with.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from testbed.chaos.experiment import Experiment
from testbed.chaos.journal import Journal
from testbed.chaos.judge import judge
from testbed.chaos.virtual import refuse_future, run

Say = Callable[[str], None]


def run_virtual(
    experiments: Sequence[Experiment], policies: Sequence[str], *, seed: int | None, folder: Path | None, say: Say
) -> list[Journal]:
    """Every experiment under every policy in virtual time. folder: gets EXPERIMENT/POLICY/ each, or None.

    Raises ScenarioError before anything runs for what cannot be run.
    """
    made = check(experiments, policies, "virtual", seed)
    journals = []
    for experiment, scenario in made:
        for policy in policies:
            say(f"{experiment.name}: {policy} ...")
            journal = Journal(experiment, "virtual", policy, scenario.seed)
            with contextlib.redirect_stdout(sys.stderr):  # whatever a policy prints
                table = run(experiment, scenario, policy, journal)
            journal.judged(judge(experiment, scenario, table))
            if folder is not None:
                place = folder / experiment.name / policy.replace(":", ".")
                journal.write(place)
                (place / "scenario.yaml").write_text(scenario.only(None, policy).to_yaml())
                table.to_csv(place / "requests.csv", index=False, float_format="%.9f")
            journals.append(journal)
    return journals


def check(
    experiments: Iterable[Experiment], policies: Iterable[str], clock: Any, seed: int | None
) -> list[tuple[Experiment, Any]]:
    """The experiments with their scenarios. Raises ScenarioError for what cannot be run on this clock."""
    for policy in policies:
        refuse_future(policy)
    out = []
    for experiment in experiments:
        experiment.check_clock(clock)
        scenario = experiment.resolved(seed)
        for policy in policies:
            scenario.only(None, policy)
        out.append((experiment, scenario))
    return out


def summary(journals: Sequence[Journal], policies: Sequence[str]) -> dict[str, Any]:
    """What a suite came to, as --json and chaos.json have it. exit_code: of the first policy's runs."""
    mine = [journal.exit_code for journal in journals if journal.policy == policies[0]]
    return {
        "policies": list(policies),
        "clock": journals[0].clock if journals else None,
        "runs": [journal.to_json() for journal in journals],
        "exit_code": max(mine, default=0),
    }
