"""What all figures share: their colours, how they are saved, and the tables saved beside them.

A figure saved twice has the same bytes: no date, no random identifiers.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")
PRFAAS, LOCAL, DECODE, BEST = "#c2410c", "#1d4ed8", "#6b7280", "#111827"
PALETTE = ("#1d4ed8", "#0f766e", "#c2410c", "#7c3aed")


def check(path: str | Path) -> Path:
    """The path of a figure. Raises ValueError for a suffix other than .png, .svg or .pdf."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a figure ends in {', '.join(SUFFIXES)}; rename it")
    return path


def panels(rows: int, columns: int, width: float, height: float, share_y: Any = "none") -> tuple[Any, Any]:
    """A figure of width x height inches and its axes, shape (rows, columns). share_y: none, row, col or all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=share_y)


def logarithmic(axes: Any) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: str | Path) -> None:
    """Write a figure; its suffix says as what."""
    from matplotlib import rc_context

    path = check(path)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "prfaas", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata=undated)


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row, the first row's keys as columns; None is empty, numbers keep six digits."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def gbps(bits_per_second: float) -> str:
    """A rate for people."""
    return f"{bits_per_second / 1e9:g} Gbps"
