"""The result of `prfaas sweep` as a figure: TTFT against load, the closed form beside the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.figures.draw import BEST, DECODE, LOCAL, PRFAAS, check, gbps, panels, save
from testbed.report.intervals import interval

HEADROOM = 3.0


def plot_sweep(result: dict[str, Any], path: str | Path) -> None:
    """A panel a deployment of `testbed.sweep.sweep`'s result: mean and P90 TTFT (s) against the offered rate (req/s).

    Dotted: the unloaded TTFT and Lambda_max of the closed form. Dashed: the promised P90. Of several seeds, means with
    their 95 % intervals, at the rates that every seed was run at. Raises ValueError for a suffix other than .png, .svg
    or .pdf.
    """
    path = check(path)
    deployments = result["deployments"]
    figure, (row,) = panels(1, len(deployments), 4.2 * len(deployments), 4.0)
    for axes, one in zip(row, deployments, strict=True):
        _panel(axes, one, result["slo"]["ttft_p90_s"], len(result["seeds"]))
    row[0].set_ylabel("TTFT, s")
    row[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(
        f"{result['scenario']}, {result['arrivals']} arrivals, link {gbps(result['link_bps'])}: TTFT against load, "
        f"({result['point_requests']:,} requests a point, {len(result['seeds'])} seed(s))",
        fontsize=10,
    )
    save(figure, path)


def _panel(axes: Any, one: dict[str, Any], slo_s: float, seeds: int) -> None:
    for key, color, label in (("mean", LOCAL, "mean"), ("p90", PRFAAS, "P90")):
        unloaded_s = one["ttft_unloaded_s"][key]
        axes.axhline(unloaded_s, color=color, linestyle=":", linewidth=1.2)
        rates, means, half = _curve(one["points"], f"ttft_{key}_s", seeds)
        axes.errorbar(rates, means, half, color=color, marker="o", markersize=3, capsize=2, label=label)
    limit = one["lambda_max_rps"]
    axes.axhline(slo_s, color=DECODE, linestyle="--", linewidth=1, label=f"SLO: P90 {slo_s:g} s")
    axes.axvline(limit["expectation"], color=BEST, linestyle=":", linewidth=1.2, label=r"closed form: $\Lambda_{max}$")
    axes.axvline(limit["closed"], color=DECODE, linestyle=":", linewidth=1, label="the same, paper's form")
    if limit["simulated"]:
        axes.axvline(limit["simulated"], color=LOCAL, linewidth=1, label="simulated, at the SLO")
    axes.set_ylim(0, HEADROOM * max(slo_s, one["ttft_unloaded_s"]["p90"]))
    axes.set_xlim(0, 1.08 * limit["closed"])
    axes.set_xlabel("offered, req/s")
    axes.set_title(f"{one['name']} ({one['policy']})", fontsize=10)


def _curve(points: list[dict[str, Any]], name: str, seeds: int) -> tuple[list[float], ...]:
    """Rates that every seed was run to the end at, the mean figure, and half the width of its interval."""
    by_rate: dict[float, list[float]] = {}
    for point in points:
        if not point["stopped_early"]:
            by_rate.setdefault(point["rate_rps"], []).append(point[name])
    rates = sorted(rate for rate, values in by_rate.items() if len(values) == seeds)
    drawn = [interval(by_rate[rate]) for rate in rates]
    means = [one["mean"] or 0.0 for one in drawn]
    half = [0.0 if one["low"] is None else mean - one["low"] for one, mean in zip(drawn, means, strict=True)]
    return rates, means, half
