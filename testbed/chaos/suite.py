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
from testbed.fleet import check_link

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


def run_wire(
    experiments: Sequence[Experiment],
    policies: Sequence[str],
    *,
    seed: int | None,
    folder: Path,
    port: int,
    launcher: str | None,
    say: Say,
) -> list[Journal]:
    """Every experiment under every policy on the wire, a testbed for all that fit the same one.

    Interrupted, what was done until then, its rollback included. Raises as `run_virtual`, and TestbedError.
    """
    from testbed.chaos import wire
    from testbed.cli.shared import wire as testbed_of
    from testbed.report.link_files import LinkReport
    from testbed.runs import SUMMARY_FILE

    made = check(experiments, policies, "wire", seed)
    for _, scenario in made:
        check_link(scenario)
    journals: list[Journal] = []
    groups: dict[str, list[tuple[Experiment, Any]]] = {}
    for experiment, scenario in made:
        groups.setdefault(scenario.fingerprint(testbed_only=True), []).append((experiment, scenario))
    for group in groups.values():
        with testbed_of(group[0][1], port, keep=False, launcher=launcher) as testbed:
            for experiment, scenario in group:
                for policy in policies:
                    say(f"{experiment.name}: {policy} ...")
                    journal = Journal(experiment, "wire", policy, scenario.seed)
                    journals.append(journal)
                    place = folder / experiment.name / policy.replace(":", ".")
                    place.mkdir(parents=True)
                    try:
                        requests = wire.run(testbed, experiment, scenario, policy, journal, place)
                        if requests is None:
                            journal.cut_short("interrupted")
                        else:
                            journal.judged(judge(experiment, scenario, requests))
                    except KeyboardInterrupt:
                        journal.cut_short("interrupted")
                    finally:
                        journal.write(place)
                    if (place / SUMMARY_FILE).is_file():
                        LinkReport.of_folder(place).write(place)  # with the journal's faults in it
                    say(f"{experiment.name}: {policy}: {journal.verdict['status']}")
                    if journal.interrupted:
                        return journals
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
