"""A link that varies, drawn: its rate over time, its mean, and when it is down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.figures.draw import BEST, DECODE, PALETTE, panels, save


def plot_schedule(result: dict[str, Any], path: str | Path) -> None:
    """The steps of `testbed.link_schedule.describe`, in Gbps; grey: an outage; dashed: the mean, outages included."""
    figure, ((axes,),) = panels(1, 1, 9, 3.4)
    times = [at_s for at_s, _ in result["steps"]] + [result["end_s"]]
    rates = [rate_bps / 1e9 for _, rate_bps in result["steps"]]
    axes.stairs(rates, times, color=PALETTE[0], linewidth=1.2, baseline=None)
    for start_s, end_s, rate in zip(times, times[1:], rates, strict=False):
        if rate == 0:
            axes.axvspan(start_s, end_s, color=DECODE, alpha=0.3, linewidth=0)
    axes.axhline(result["mean_bps"] / 1e9, color=BEST, linestyle="--", linewidth=1)
    axes.set_xlim(0, result["end_s"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s")
    axes.set_ylabel("link, Gbps")
    axes.set_title(f"{result['name']}: {result['course']}, mean {result['mean_bps'] / 1e9:.4g} Gbps", fontsize=10)
    save(figure, path)
