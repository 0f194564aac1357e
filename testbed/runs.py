"""Finds and reads the results folder of one run, and says clearly what is not there."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Final

import orjson

from testbed.scenario import Scenario, load
from testbed.scenario_data import did_you_mean

RESULTS: Final = Path("results")
SUMMARY_FILE: Final = "summary.json"

Row = dict[str, str]


class RunError(ValueError):
    """A results folder, or something in it, that is not there or cannot be read. The message has the remedy."""


def find_run(name: str) -> Path:
    """The results folder of a run, by its path or by its name in results/. Raises RunError."""
    for folder in (Path(name), RESULTS / name):
        if (folder / SUMMARY_FILE).is_file():
            return folder
        if folder.is_dir():
            inside = sorted(str(one.parent.relative_to(folder)) for one in folder.glob(f"**/{SUMMARY_FILE}"))
            if inside:
                raise RunError(f"{folder}: holds several runs; name one of them: {', '.join(inside)}")
            raise RunError(f"{folder}: no {SUMMARY_FILE} in it, so it is no run's results, or of one that did not end")
    known = sorted(one.parent.name for one in RESULTS.glob(f"*/{SUMMARY_FILE}"))
    newest = f"the newest there: {', '.join(known[-3:])}" if known else "there are none"
    raise RunError(f"{name}: no such run, nor is there one in {RESULTS}/; {did_you_mean(name, known)}{newest}")


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's summary. Raises RunError."""
    try:
        summary: dict[str, Any] = orjson.loads((folder / SUMMARY_FILE).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise RunError(f"{folder / SUMMARY_FILE}: cannot be read ({error})") from None
    return summary


def read_scenario(folder: Path) -> Scenario:
    """The scenario that was run, of one deployment. Raises ScenarioError."""
    return load(str(folder / "scenario.yaml"))


def read_rows(path: Path) -> list[Row]:
    """A CSV's rows as the texts they are. Raises RunError where there is none."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
