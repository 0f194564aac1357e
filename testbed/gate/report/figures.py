"""The figures of runs side by side as a table: TTFT and its parts, throughput, what crossed the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from testbed.compare import figures
from testbed.gate.report.view import Cell, Table
from testbed.gate.report.words import value
from testbed.report.rows import PARTS

ROWS: Final[tuple[tuple[str, str, str], ...]] = (
    ("TTFT, mean", "ttft_mean_s", "s"),
    *((f"… part: {part}", f"ttft_{part}_mean_s", "s") for part in PARTS),
    ("TTFT, P50", "ttft_p50_s", "s"),
    ("TTFT, P90", "ttft_p90_s", "s"),
    ("TTFT, P99", "ttft_p99_s", "s"),
    ("offered", "offered_rps", "req/s"),
    ("throughput", "throughput_rps", "req/s"),
    ("goodput: met every SLO", "goodput_rps", "req/s"),
    ("offloaded to PrfaaS", "offload_fraction", "share"),
    ("egress", "egress_bps", "bit/s"),
    ("egress wait, P90", "egress_queue_p90_s", "s"),
    ("threshold changes", "threshold_changes", ""),
    ("role changes", "role_changes", ""),
    ("completed", "completed", "requests"),
    ("failed", "failed", "requests"),
)
"""What each row says, its name in `testbed.compare.figures`, its unit."""


def figures_table(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """One run a column, in their order; below each figure but the first run's, its difference to that."""
    known = [figures(summary) for summary in summaries]
    rows = [
        [Cell(title), *(_cell(one[key], None if one is known[0] else known[0][key], unit) for one in known)]
        for title, key, unit in ROWS
    ]
    return Table(
        "The runs drawn, in figures", [("", False), *((name, True) for name in names)], rows, folded=True, compact=True
    )


def _cell(number: float | None, base: float | None, unit: str) -> Cell:
    if number is None or base is None:
        return Cell(value(number, unit))
    return Cell(value(number, unit), signed(number - base, unit) if number != base else "the same")


def signed(difference: float, unit: str) -> str:
    """A difference with its sign; shares in percentage points."""
    if unit == "share":
        return f"{difference * 100:+.2g} points"
    text = value(abs(difference), unit)
    return f"{'+' if difference >= 0 else '-'}{text}"
