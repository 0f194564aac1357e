"""Chaos for people: a suite's runs as one table, an experiment's as its journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from testbed.chaos.experiment import Experiment
from testbed.chaos.faults import describe
from testbed.chaos.journal import Journal
from testbed.show import CLOCK, out

STYLE: Final = {"passed": "green", "broken": "red", "invalid": "yellow", "inconclusive": "yellow"}


def show_runs(journals: Sequence[Journal], policies: Sequence[str]) -> None:
    """A row an experiment, a column a policy: the verdict, and the first bounds that broke."""
    table = Table(title=f"chaos {CLOCK[journals[0].clock]}: {policies[0]} is under test", show_lines=True)
    table.add_column("experiment")
    for policy in policies:
        table.add_column(policy)
    by_name: dict[str, dict[str, Journal]] = {}
    for journal in journals:
        by_name.setdefault(journal.experiment.name, {})[journal.policy] = journal
    for name, of in by_name.items():
        table.add_row(name, *(_cell(of.get(policy)) for policy in policies))
    out.print(table)
    for journal in journals:
        for left in journal.left_behind:
            out.print(f"[red]{journal.experiment.name} under {journal.policy}: the rollback failed: {left}[/red]")


def _cell(journal: Journal | None) -> str:
    if journal is None:
        return "-"
    status = journal.verdict["status"]
    lines = [f"[{STYLE[status]}]{status}[/{STYLE[status]}]", *journal.verdict["reasons"][:3]]
    if status == "passed":
        values = journal.windows["during"]["values"]
        for key, form in (
            ("ttft_p90_s", "TTFT P90 {:.1f} s"),
            ("goodput", "goodput {:.0%}"),
            ("errors", "errors {:.1%}"),
        ):
            if values[key] is not None:
                lines.append(form.format(values[key]))
    if not journal.clean:
        lines.append("[red]rollback failed[/red]" if journal.left_behind else "[yellow]rollback not verified[/yellow]")
    return "\n".join(lines)


def show_list(experiments: Sequence[Experiment]) -> None:
    """The shipped experiments."""
    table = Table(title="experiments (model seconds)")
    for column in ("name", "faults", "clocks", "what"):
        table.add_column(column)
    for one in experiments:
        faults = "\n".join(f"{fault.at_s:g} s: {describe(fault)}" for fault in one.method)
        clocks = ", ".join(one.clocks) + (" (short)" if one.short else "")
        table.add_row(one.name, faults, clocks, one.description.strip())
    out.print(table)


def listed(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """The same for --json."""
    return {"experiments": [one.model_dump(mode="json") for one in experiments]}
