"""The open question's figures, drawn from the rows of `testbed.openquestion.study`.

A hollow marker is a cell that is not sure to be stable: its queues grew all through the hour, or may have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.figures.draw import DECODE, LOCAL, PALETTE, PRFAAS, logarithmic, panels, save

Rows = list[dict[str, Any]]


def plot_ttft(rows: Rows, path: str | Path) -> None:
    """A panel an arrival process (down) and deployment (across): TTFT in s, on a logarithmic axis, against the load.

    Solid: mean; dashed: P90; dotted: what the steady-state model says of both. A colour a link.
    """
    arrivals, names = _values(rows, "arrivals"), _values(rows, "deployment")
    figure, grid = panels(len(arrivals), len(names), 4.2 * len(names), 3.4 * len(arrivals), share_y="row")
    for axes_row, process in zip(grid, arrivals, strict=True):
        for axes, name in zip(axes_row, names, strict=True):
            of = [row for row in rows if row["arrivals"] == process and row["deployment"] == name]
            for color, link in zip(PALETTE, _values(of, "link_gbps"), strict=False):
                some = [row for row in of if row["link_gbps"] == link]
                label = "no link used" if link is None else f"{link:g} Gbps"
                _line(axes, some, "load", "ttft_mean_s", color, "-", label)
                _line(axes, some, "load", "ttft_p90_s", color, "--")
            for key in ("mean", "p90"):
                axes.axhline(of[0][f"model_ttft_{key}_s"], color=DECODE, linestyle=":", linewidth=1.2)
            logarithmic(axes)
            axes.set_xticks(_values(of, "load"), [f"{load:.0%}" for load in _values(of, "load")])
            axes.set_title(f"{name}, {process}", fontsize=10)
            axes.legend(frameon=False, fontsize=7)
    _label(grid, "share of its own capacity", "TTFT, s")
    figure.suptitle(_title(rows, "TTFT: mean (solid), P90 (dashed), the model's (dotted)"), fontsize=10)
    save(figure, path)


def plot_link(rows: Rows, path: str | Path) -> None:
    """What the link adds: mean wait for KV after the prefill's end, s, against the link's rate; the model says 0."""
    rows = [row for row in rows if row["link_gbps"] is not None]
    arrivals, names = _values(rows, "arrivals"), _values(rows, "deployment")
    figure, grid = panels(len(arrivals), len(names), 4.6 * len(names), 3.2 * len(arrivals), share_y="row")
    for axes_row, process in zip(grid, arrivals, strict=True):
        for axes, name in zip(axes_row, names, strict=True):
            of = [row for row in rows if row["arrivals"] == process and row["deployment"] == name]
            for color, load in zip(PALETTE, _values(of, "load"), strict=False):
                some = [row for row in of if row["load"] == load]
                _line(axes, some, "link_gbps", "egress_queue_mean_s", color, "-", f"{load:.0%} of capacity")
            axes.set_xscale("log")
            logarithmic(axes)
            links = _values(of, "link_gbps")
            axes.set_xticks(links, [f"{link:g}" for link in links])
            axes.set_xticks([], minor=True)
            axes.set_title(f"{name}, {process}", fontsize=10)
            axes.legend(frameon=False, fontsize=7)
    _label(grid, "link, Gbps", "exposed transfer, s")
    figure.suptitle(_title(rows, "From a prefill's end to its last KV byte landed, mean"), fontsize=10)
    save(figure, path)


def plot_sensitivity(rows: Rows, path: str | Path) -> None:
    """What H20 prefills that take longer or shorter than inferred make of the ratios to the homogeneous deployment."""
    figure, (row,) = panels(1, 3, 13, 3.8)
    figures = {
        "lambda_max_ratio": r"$\Lambda_{max}$",
        "ttft_mean_ratio": "mean TTFT",
        "ttft_p90_ratio": "P90 TTFT",
    }
    for axes, (key, title) in zip(row, figures.items(), strict=True):
        for color, name in ((PRFAAS, "prfaas-pd"), (LOCAL, "naive")):
            of = [one for one in rows if one["deployment"] == name]
            _line(axes, of, "t_prefill_scale", key, color, "-", f"{name} / homogeneous")
        axes.axhline(1.0, color=DECODE, linestyle=":", linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("H20 prefill time, of what is inferred")
        axes.set_ylim(bottom=0)
    row[0].legend(frameon=False, fontsize=8)
    load = rows[0]["load"]
    figure.suptitle(
        f"Ratios to homogeneous, each at its best split; TTFT at {load:.0%} of each one's own capacity, Poisson, "
        f"{rows[0]['replications']} replications",
        fontsize=10,
    )
    save(figure, path)


def _line(axes: Any, rows: Rows, x: str, y: str, color: str, style: str, label: str | None = None) -> None:
    rows = [row for row in rows if row[y] is not None]
    xs, ys = [row[x] for row in rows], [row[y] for row in rows]
    half = [0.0 if row.get(f"{y}_low") is None else row[y] - row[f"{y}_low"] for row in rows]
    axes.errorbar(xs, ys, half, color=color, linestyle=style, linewidth=1.3, capsize=2, label=label)
    for stable, fill in ((True, color), (False, "white")):
        of = [i for i, row in enumerate(rows) if (row.get("stability", "stable") == "stable") == stable]
        xs_of, ys_of = [xs[i] for i in of], [ys[i] for i in of]
        axes.plot(xs_of, ys_of, "o", color=color, markersize=4, markerfacecolor=fill)


def _label(grid: Any, x: str, y: str) -> None:
    for axes in grid[-1]:
        axes.set_xlabel(x)
    for axes_row in grid:
        axes_row[0].set_ylabel(y)


def _title(rows: Rows, what: str) -> str:
    return f"{what}; {rows[0]['replications']} replications from empty, 95 % intervals; hollow: queues may grow"


def _values(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
