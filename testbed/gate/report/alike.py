"""Runs that are to be compared: read from their folders, refused where more than the policy differs, put into arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from testbed.runs import RunError, read_scenario, read_summary

MOST_ARMS: Final = 4
"""More policies than that are no picture any more."""
CLOCK: Final = {"wire": "on the wire", "virtual": "in virtual time"}


@dataclass(frozen=True, slots=True)
class Run:
    """One results folder. setting: its scenario as data, without policy and seed. trace_sha256: of the requests that
    were offered; None where provenance.json has none."""

    folder: Path
    summary: dict[str, Any]
    setting: dict[str, Any]
    trace_sha256: str | None
    machine: Any


def read_run(folder: Path) -> Run:
    """Raises RunError, or ScenarioError, for a folder without its files."""
    scenario = read_scenario(folder).model_dump(mode="json", exclude={"log_level", "seed", "description", "bounds"})
    for deployment in scenario["deployments"]:
        del deployment["policy"]
    try:
        facts = orjson.loads((folder / "provenance.json").read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise RunError(f"{folder / 'provenance.json'}: cannot be read ({error}); take a whole results folder") from None
    trace = facts.get("trace", {})
    machine = {**facts.get("machine", {}), "versions": facts.get("versions")}
    return Run(folder, read_summary(folder), scenario, trace.get("rows_sha256", trace.get("sha256")), machine)


def unlike(runs: Sequence[Run]) -> list[str]:
    """What besides policy and seed the runs differ in from the first, a sentence each; none for runs that can be
    compared. Of machines only on the wire: virtual time is the same on all."""
    first, *others = runs
    offered: dict[int, tuple[Path, str | None]] = {}
    said = []
    for run in runs:
        seed = int(run.summary["seed"])
        folder, trace = offered.setdefault(seed, (run.folder, run.trace_sha256))
        if trace != run.trace_sha256:
            said.append(f"{run.folder} and {folder}: other requests were offered, under the same seed {seed}")
    for run in others:
        if run.summary["clock"] != first.summary["clock"]:
            there = f"{CLOCK[run.summary['clock']]}, {first.folder} {CLOCK[first.summary['clock']]}"
            said.append(f"{run.folder}: was {there}")
        elif run.summary["clock"] == "wire" and run.machine != first.machine:
            said.append(f"{run.folder}: was run on another machine, or other versions, than {first.folder}")
        apart = differing(first.setting, run.setting)
        if apart:
            named = ", ".join(f"{path} {was!r:.40} and {now!r:.40}" for path, was, now in apart[:3])
            more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
            said.append(f"{first.folder} and {run.folder}: the scenarios differ: {named}{more}")
    return said


def differing(was: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Where two pieces of plain data differ: (dotted path, the one, the other)."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*was, *(key for key in now if key not in was)]
        return [one for key in keys for one in differing(was.get(key), now.get(key), f"{path}.{key}".lstrip("."))]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        return [one for i, (a, b) in pairs for one in differing(a, b, f"{path}.{i}")]
    return [] if was == now else [(path, was, now)]


def arms_of(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """arm -> seed -> run. An arm is a policy; runs that share policy and seed are arms of their own, by their folders.
    Raises RunError for too many, or for a folder that is named twice."""
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise RunError("a run is named twice; name each once")
    keys = [(run.summary["policy"], run.summary["seed"]) for run in runs]
    twice = len(set(keys)) < len(keys)
    arms: dict[str, dict[int, Run]] = {}
    for run in runs:
        name = str(run.summary["policy"])
        arms.setdefault(f"{name} ({run.folder})" if twice else name, {})[int(run.summary["seed"])] = run
    if len(arms) > MOST_ARMS:
        raise RunError(f"{len(arms)} policies or runs side by side: at most {MOST_ARMS}; several seeds of one are one")
    return arms
