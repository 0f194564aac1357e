"""Policies side by side as a figure: the distribution of their TTFTs, and what the mean TTFT is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from testbed.figures.draw import BEST, DECODE, LOCAL, PALETTE, PRFAAS, panels, save
from testbed.policies import CAVEAT
from testbed.report.rows import PARTS

STEPS: Final = 1000
"""Of a drawn distribution: a million requests need no more points."""

COLORS: Final = dict(zip(PARTS, ("#a3a3a3", LOCAL, PRFAAS, "#0f766e", "#7c3aed", DECODE), strict=True))
STYLES: Final = ("-", "--", ":", "-.")


def plot_comparison(
    comparison: Mapping[str, Any], ttft_s: Mapping[str, npt.NDArray[np.float64]], path: str | Path
) -> None:
    """Two panels of `testbed.compare.compare`'s result, a policy a curve and a bar.

    Left: the share of completed requests with a TTFT up to x seconds (logarithmic), all runs of a policy together.
    Right: mean TTFT, stacked from its parts; of several runs, with its 95 % interval. ttft_s: policy -> TTFTs, s.
    Raises ValueError for a suffix other than .png, .svg or .pdf.
    """
    figure, ((left, right),) = panels(1, 2, 11, 4.2)
    for i, (name, values) in enumerate(ttft_s.items()):
        if values.size:
            shares = np.linspace(0, 1, min(STEPS, values.size) + 1)
            style: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "linestyle": STYLES[i // len(PALETTE) % 4]}
            style["linewidth"] = max(1.2, 3.0 - 0.6 * i)  # equal curves are seen through each other
            left.plot(np.quantile(values, shares), shares, label=_label(name, comparison), **style)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_ylim(0, 1)
    left.set_xlabel("TTFT, s")
    left.set_ylabel("share of completed requests")
    left.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=8)
    _bars(right, comparison["figures"])
    runs = max(len(one["seeds"]) for one in comparison["runs"].values())
    figure.suptitle(
        f"{comparison['scenario']}: {comparison['deployment']}, clock: {comparison['clock']}, {runs} run(s) a policy",
        fontsize=10,
    )
    save(figure, path)


def _bars(axes: Any, figures: Mapping[str, Any]) -> None:
    names = list(figures)
    base = np.zeros(len(names))
    for part in PARTS:
        heights = np.array([figures[name][f"ttft_{part}_mean_s"]["mean"] or 0.0 for name in names])
        axes.bar(names, heights, 0.6, bottom=base, color=COLORS[part], label=part)
        base += heights
    for i, name in enumerate(names):
        total = figures[name]["ttft_mean_s"]
        if total["low"] is not None:
            axes.errorbar(i, total["mean"], total["mean"] - total["low"], color=BEST, capsize=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("mean TTFT, s")
    axes.legend(frameon=False, fontsize=8)


def _label(name: str, comparison: Mapping[str, Any]) -> str:
    """What failed has no TTFT and is not in the curve, which has to be said; so has who knows the future."""
    failed = comparison["figures"][name]["failed"]["mean"]
    said = [CAVEAT] if comparison["policies"][name].get("knows_future") else []
    said += [f"{failed:g} failed a run"] if failed else []
    return f"{name} ({', '.join(said)})" if said else name
