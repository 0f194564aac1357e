"""A link that varies, drawn: its rate over time, its mean, when it is down, and what competes on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.figures.draw import BEST, DECODE, PALETTE, panels, save


def plot_schedule(result: dict[str, Any], path: str | Path) -> None:
    """The steps of `testbed.link_schedule.describe`, in Gbps; grey: an outage; dashed: the mean, outages included.

    With cross-traffic, its datagrams beside the rate, and its elastic flows below.
    """
    cross = result["cross"]
    figure, ((axes,), *below) = panels(2 if cross else 1, 1, 9, 5.4 if cross else 3.4)
    times = [at_s for at_s, _ in result["steps"]] + [result["end_s"]]
    rates = [rate_bps / 1e9 for _, rate_bps in result["steps"]]
    axes.stairs(rates, times, color=PALETTE[0], linewidth=1.2, baseline=None)
    for start_s, end_s, rate in zip(times, times[1:], rates, strict=False):
        if rate == 0:
            axes.axvspan(start_s, end_s, color=DECODE, alpha=0.3, linewidth=0)
    axes.axhline(result["mean_bps"] / 1e9, color=BEST, linestyle="--", linewidth=1)
    for (direction, told), color in zip(cross.items(), PALETTE[1:], strict=False):
        starts, flows, constant_bps = zip(*((0.0, 0, 0.0), *told["steps"]), strict=True)
        edges, gbps = [*starts, result["end_s"]], [one / 1e9 for one in constant_bps]
        line: dict[str, Any] = {"color": color, "linewidth": 1.2, "baseline": None}
        if any(gbps):
            axes.stairs(gbps, edges, label=f"datagrams {direction}", linestyle=":", **line)
            axes.legend(fontsize=8)
        below[0][0].stairs(flows, edges, label=direction, **line)
        below[0][0].legend(fontsize=8)
        below[0][0].set_ylabel("competing flows")
    for (one,) in ((axes,), *below):
        one.set_xlim(0, result["end_s"])
        one.set_ylim(bottom=0)
        one.set_xlabel("s")
    axes.set_ylabel("link, Gbps")
    axes.set_title(f"{result['name']}: {result['course']}, mean {result['mean_bps'] / 1e9:.4g} Gbps", fontsize=10)
    save(figure, path)
