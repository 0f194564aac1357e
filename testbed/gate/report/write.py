"""Writes reports: of a gate `report.html`, `report.md` and `junit.xml` beside its `summary.json`; of several runs the
first two and a `summary.json` of their figures; of one run the page alone, as it has the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from testbed.compare import save
from testbed.gate.report import of_gate, of_runs
from testbed.gate.report.alike import arms_of, read_run, unlike
from testbed.gate.report.junit import junit
from testbed.gate.report.markdown import markdown
from testbed.gate.report.page import page
from testbed.gate.result import SUMMARY_FILE, GateResult, read
from testbed.runs import RunError, find_run, read_summary

PAGE: Final = "report.html"
MARKDOWN: Final = "report.md"
JUNIT: Final = "junit.xml"


def write_gate(result: GateResult, folder: Path) -> None:
    """All of a gate's reports, into its folder."""
    made = of_gate.view(result, folder)
    (folder / PAGE).write_text(page(made), encoding="utf-8")
    (folder / MARKDOWN).write_text(markdown(made), encoding="utf-8")
    (folder / JUNIT).write_bytes(junit(result))


def report(
    names: Sequence[str], out: Path | None, new: Callable[[], Path], *, unlike: bool
) -> tuple[Path, dict[str, Any]]:
    """The report of runs by their folders or names in results/, or of a gate: where it is, and its figures.

    out: where it goes, None for the folder itself of one run, or of a gate. new: makes the folder of another place.
    unlike: whether runs may differ in more than their policy. Raises RunError and ScenarioError.
    """
    folders = [find_run(name) for name in names]
    gates = [folder for folder in folders if "suite" in read_summary(folder)]
    if gates and len(folders) > 1:
        raise RunError(f"{gates[0]}: is a gate's, not a run's; give it alone, or runs in it such as SCENARIO/candidate")
    if gates:
        if out is not None:
            raise RunError(f"{gates[0]}: a gate's report lies beside its runs; leave --out out")
        result = read(gates[0])
        write_gate(result, gates[0])
        return gates[0], result.model_dump()
    return _of_runs(folders, out, new, may_differ=unlike)


def _of_runs(
    folders: Sequence[Path], out: Path | None, new: Callable[[], Path], *, may_differ: bool
) -> tuple[Path, dict[str, Any]]:
    runs = [read_run(folder) for folder in folders]
    apart = unlike(runs)
    if apart and not may_differ:
        raise RunError("the runs are not alike: " + "; ".join(apart) + ". --unlike compares them all the same")
    arms = arms_of(runs)
    made = of_runs.view(arms, [f"not alike: {one}" for one in apart])
    data = of_runs.comparison(arms)
    folder = folders[0] if len(folders) == 1 and out is None else new()
    (folder / PAGE).write_text(page(made), encoding="utf-8")
    if folder != folders[0]:
        (folder / MARKDOWN).write_text(markdown(made), encoding="utf-8")
        save(folder / SUMMARY_FILE, data)
    return folder, data
