"""What `prfaas gate` prints for people: the verdict first, then every objective, then what else there is to know."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from testbed.gate.calibrate import Calibration
from testbed.gate.judge import amount
from testbed.gate.report.words import value
from testbed.gate.result import GateResult

STYLES: Final = {
    "better": "bold green",
    "same": "green",
    "worse": "bold red",
    "inconclusive": "bold yellow",
    "invalid": "bold yellow",
}
LINE_S: Final = 10.0
WIDTH: Final = 160
"""Columns of a log or a file, which nobody has to fit on a screen."""


class GateProgress:
    """A bar over the runs that are begun, on standard error; plain lines every few seconds where that is no
    terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} runs"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._said_s = time.monotonic()

    def __enter__(self) -> GateProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def update(self, names: str, done: int, of: int) -> None:
        """names: of the scenarios that are open."""
        self._bar.update(self._task, completed=done, total=of, description=names)
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._said_s >= LINE_S:
            self._said_s = now_s
            self._console.print(f"{done}/{of} runs; open: {names}", soft_wrap=True)


def show_gate(result: GateResult) -> None:
    """The whole result on standard output."""
    out = Console(highlight=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = WIDTH
    arms = f"{result.candidate.given} against {result.baseline.given}"
    if result.a_a:
        arms = f"{result.baseline.given} against itself under other seeds"
    out.print(f"gate {result.suite.name}: {arms}")
    if result.scenarios:
        out.print(_table(result))
    for one in result.scenarios:
        for found in one.invariants:
            if found.candidate_broken:
                out.print(f"{one.name}: {found.reason}", style="red" if found.worse else None)
    for note in result.notes:
        out.print(f"note: {note}")
    totals = result.totals
    if totals.runs:
        memory = "" if totals.memory_bytes is None else f", {totals.memory_bytes / 1e6:.0f} MB"
        out.print(f"{totals.runs} runs, {totals.cached} of them kept from before; {totals.wall_s:.1f} s{memory}")
    out.print(f"verdict: [{STYLES[result.verdict]}]{result.verdict}[/]")
    for reason in result.reasons:
        out.print(f"  {reason}")


def _table(result: GateResult) -> Table:
    table = Table()
    for title in ("scenario", "objective"):
        table.add_column(title)
    confidence = result.scenarios[0].objectives[0].confidence
    for title in ("baseline", "candidate", "change", f"interval ({confidence:.1%})", "counts from", "seeds", "verdict"):
        table.add_column(title, justify="right")
    for one in result.scenarios:
        for i, objective in enumerate(one.objectives):
            table.add_row(
                one.name if i == 0 else "",
                objective.metric,
                value(objective.baseline_mean, objective.unit),
                value(objective.candidate_mean, objective.unit),
                "-" if objective.effect is None else amount(objective, objective.effect),
                f"{amount(objective, objective.interval.low)} to {amount(objective, objective.interval.high)}",
                amount(objective, objective.minimum, sign=False),
                str(len(one.seeds)),
                f"[{STYLES[objective.verdict]}]{objective.verdict}[/]",
            )
    return table


def show_calibration(found: Calibration) -> None:
    """What a calibration measured."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"gate {found.suite} with {found.baseline}: {found.pool} runs an arm, {found.trials} trials of each kind")
    verdicts = ", ".join(f"{name} {count}" for name, count in sorted(found.a_a.items()))
    out.print(f"against itself, disjoint seeds: {found.false_worse} false alarms ({verdicts})")
    for name, count in found.by_objective.items():
        out.print(f"  a difference was claimed in {name}: {count} times")
    for name, count in found.broken.items():
        out.print(f"  a promise was broken by the baseline: {name}: {count} of {found.pool} runs")
    for one in found.power:
        low, high = one.interval.low or 0.0, one.interval.high or 0.0
        wanted = f"at least {one.wanted:.0%} wanted" if one.asked else "below what counts in this suite"
        true = f"truly {one.effect:+.2%} ({low:+.2%} to {high:+.2%}) in P90 TTFT"
        out.print(f"{one.suite}: {one.policy}, {true}: flagged in {one.flagged} of {one.trials} ({wanted})")
    out.print(f"{found.wall_s:.0f} s; {'it holds' if found.holds else 'it does not hold'}")
