"""The paper's open question: where does its steady-state model hold, and where does it break?

`cells` are the three deployments of `paper` at shares of their own capacity, under Poisson and bursty arrivals, on
links that are wide and narrow; each is run many times, a model-hour from empty. `settled` says how far that hour is
from a steady state, and `sensitivity` what the conclusions owe to the H20 profile, which is inferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from netem.fluid import TCP_EFFICIENCY
from testbed import plan
from testbed.assemble import lengths_of_workload, max_input_tokens, mean_output, plan_deployment
from testbed.points import GROWING, Figures, Point, Runner, code_version
from testbed.report.intervals import Interval, interval
from testbed.scenario import Deployment, Scenario, load, override
from testbed.sweep import Capacity, capacity

LOADS: Final = (0.60, 0.80, 0.90, 0.95)
LINKS_BPS: Final = (100e9, 25e9, 16e9, 12e9)
ARRIVALS: Final = {"poisson": "{kind: poisson}", "gamma CV 3": "{kind: gamma, cv: 3}"}
REPLICATIONS: Final = 20
HOUR_S: Final = 3600.0

SETTLED_FROM: Final = 0.90
"""Cells of this load and above, on the widest link, are also run for SETTLED_HOURS after one from empty."""

SETTLED_HOURS: Final = 9

SCALED: Final = "h20-1t"
SCALES: Final = (0.8, 0.9, 1.0, 1.1, 1.2)
SENSITIVITY_LOAD: Final = 0.80

MEASURED: Final = (
    "ttft_mean_s", "ttft_p90_s", "throughput_rps", "egress_bps", "egress_queue_mean_s", "slo_met_fraction", "growth",
)  # fmt: skip

Stability = Literal["stable", "unstable", "undecided"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A deployment under one load. link_bps: None where nothing crosses the link, so that one cell stands for all."""

    scenario: Scenario
    deployment: str
    arrivals: str
    load: float
    link_bps: float | None
    known: Capacity

    @property
    def rate_rps(self) -> float:
        """A share of Lambda_max with expectations, at 0.956 of the link."""
        return self.load * self.known.expectation.lambda_max

    def points(self, seeds: Sequence[int], duration_s: float, warmup_s: float = 0.0) -> list[Point]:
        """A point a seed: `duration_s` model seconds from empty, measured from `warmup_s` on."""
        window = {"rate_rps": self.rate_rps, "load_fraction": None, "duration_s": duration_s, "warmup_s": warmup_s}
        workload = self.scenario.workload.model_copy(update=window)
        return [Point(self.scenario.model_copy(update={"workload": workload, "seed": seed})) for seed in seeds]


def stability(growth: Interval) -> Stability:
    """What the replications say of the backlog's growth (`testbed.points.backlog_growth`), on average over them.

    unstable: it grew by more than 1 % of the arrivals all through the window, with 95 % confidence; no figure of the
    cell is then that of a steady state, and all of them grow with the window. stable: with that confidence it did not,
    which does not say that the queues have settled (`settled` does). undecided: neither is sure.
    """
    low, high = growth["low"], growth["high"]
    if low is None or high is None:
        return "undecided"
    return "unstable" if low > GROWING else "stable" if high <= GROWING else "undecided"


def _steady(scenario: Scenario, one: Deployment) -> Scenario:
    """The scenario with that deployment, as the steady-state model has it: a threshold, once solved, stays."""
    return scenario.only(one.name, "static" if one.policy.name == "prfaas" else None)


def cells() -> list[Cell]:
    """Every cell of the study, in the order of the table."""
    found = []
    for link_bps in LINKS_BPS:
        paper = load("paper", [f"link.rate_bps={link_bps:.0f}"])
        for one in paper.deployments:
            crosses = one.fleet.n_prfaas > 0
            if not crosses and link_bps != LINKS_BPS[0]:
                continue
            known = capacity(paper, one)
            for arrivals, text in ARRIVALS.items():
                scenario = _steady(override(paper, [f"workload.arrivals={text}"]), one)
                found += [
                    Cell(scenario, one.name, arrivals, share, link_bps if crosses else None, known) for share in LOADS
                ]
    return found


def study(
    runner: Runner, *, replications: int = REPLICATIONS, duration_s: float = HOUR_S, seed: int = 1
) -> dict[str, Any]:
    """Run all of it; JSON-ready. Seeds are seed .. seed + replications - 1, the same in every cell.

    `cells`, `settled` and `sensitivity` are lists of flat rows (times in s, rates in req/s and bits/s); a measured
    figure is three columns: its mean over replications and its 95 % interval, `_low` and `_high`. The runs of `settled`
    are a quarter as many, and SETTLED_HOURS + 1 times as long.
    """
    seeds = [seed + i for i in range(replications)]
    few = seeds[: max(2, replications // 4)]
    grid, variants = cells(), _variants()
    late = [cell for cell in grid if cell.load >= SETTLED_FROM and cell.link_bps in (None, LINKS_BPS[0])]
    every = [*grid, *(cell for variant in variants for cell in variant.cells)]
    points = [point for cell in every for point in cell.points(seeds, duration_s)]
    points += [point for cell in late for point in cell.points(few, (SETTLED_HOURS + 1) * duration_s, duration_s)]
    figures = iter(runner.run(points))
    runs = [[next(figures) for _ in seeds] for _ in every]
    long_runs = [[next(figures) for _ in few] for _ in late]
    rows = [_row(cell, of) for cell, of in zip(grid, runs, strict=False)]
    return {
        "replications": replications,
        "duration_s": duration_s,
        "seeds": seeds,
        "growing_above": GROWING,
        "code_version": code_version(),
        "cells": rows,
        "settled": [_settled_row(rows[grid.index(cell)], of) for cell, of in zip(late, long_runs, strict=True)],
        "sensitivity": _sensitivity_rows(variants, runs[len(grid) :]),
    }


def _row(cell: Cell, runs: Sequence[Figures]) -> dict[str, Any]:
    known = cell.known
    measured = {name: interval([run[name] for run in runs]) for name in MEASURED}
    return {
        "deployment": cell.deployment,
        "link_gbps": None if cell.link_bps is None else cell.link_bps / 1e9,
        "arrivals": cell.arrivals,
        "load": cell.load,
        "rate_rps": cell.rate_rps,
        "capacity_rps": known.expectation.lambda_max,
        "bottleneck": known.routed.bottleneck,
        "busiest_stage_load": cell.rate_rps / known.routed.lambda_max,
        "replications": len(runs),
        "stability": stability(measured["growth"]),
        "model_ttft_mean_s": known.ttft_mean_s,
        "model_ttft_p90_s": known.ttft_p90_s,
        "model_egress_bps": known.routed.egress_bps / known.routed.lambda_max * cell.rate_rps,
        **_columns(measured),
    }


def _settled_row(hour: Mapping[str, Any], runs: Sequence[Figures]) -> dict[str, Any]:
    """The hour from empty beside the hours after it."""
    keys = ("ttft_mean_s", "ttft_p90_s", "growth")
    later = {f"later_{key}": interval([run[key] for run in runs]) for key in keys}
    return {
        **{key: hour[key] for key in ("deployment", "arrivals", "load", "rate_rps")},
        **{f"hour_{key}": hour[key] for key in keys},
        "replications": len(runs),
        "stability": stability(later["later_growth"]),
        **_columns(later),
    }


def _columns(measured: Mapping[str, Interval]) -> dict[str, float | None]:
    return {
        column: value
        for name, found in measured.items()
        for column, value in ((name, found["mean"]), (f"{name}_low", found["low"]), (f"{name}_high", found["high"]))
    }


# the H20 profile
@dataclass(frozen=True, slots=True)
class _Variant:
    """The deployments with H20 prefills `scale` times as long, each at its best split. kept: Lambda_max at the split of
    `paper`, req/s, by deployment."""

    scale: float
    cells: list[Cell]
    kept: dict[str, float]


def _variants() -> list[_Variant]:
    return [_variant(scale) for scale in SCALES]


def _variant(scale: float) -> _Variant:
    """Naive prefills nothing on an H20: its cell is the same in every variant."""
    paper = load("paper")
    scaled = f"{SCALED}@{100 * scale:g}%"
    chosen, kept = [], {}
    for one in paper.deployments:
        of_local = one.fleet.n_p > 0 and scale != 1.0
        scenario = _steady(override(paper, [f"deployments.{one.name}.profiles.pd={scaled}"] if of_local else []), one)
        kept[one.name] = capacity(scenario, scenario.deployments[0]).expectation.lambda_max
        if one.fleet.n_p:
            n_p, n_d = _best_split(scenario)
            fleet = f"deployments.{one.name}.fleet"
            scenario = override(scenario, [f"{fleet}.n_p={n_p}", f"{fleet}.n_d={n_d}"])
        known = capacity(scenario, scenario.deployments[0])
        chosen.append(Cell(scenario, one.name, "poisson", SENSITIVITY_LOAD, paper.link.rate_bps, known))
    return _Variant(scale, chosen, kept)


def _best_split(scenario: Scenario) -> tuple[int, int]:
    """(N_p, N_d) of the highest Lambda_max with expectations, equation (8)."""
    deployment = scenario.deployments[0]
    lengths = lengths_of_workload(scenario.workload, max_input_tokens(scenario, deployment))
    link_bps = scenario.link.rate_bps * TCP_EFFICIENCY
    at = plan_deployment(scenario, deployment, fixed_split=False)
    best, _ = plan.solve(at, lengths, mean_output(scenario.workload), link_bps, "expectation")
    return best.fleet.n_p, best.fleet.n_d


def _sensitivity_rows(variants: Sequence[_Variant], runs: Sequence[Sequence[Figures]]) -> list[dict[str, Any]]:
    """Ratios are to the homogeneous deployment of the same variant; those of TTFT are paired by seed."""
    rows = []
    of_cell = iter(runs)
    for variant in variants:
        by_name = {cell.deployment: (cell, next(of_cell)) for cell in variant.cells}
        base, base_runs = by_name["homogeneous"]
        for name, (cell, found) in by_name.items():
            measured = {key: interval([run[key] for run in found]) for key in ("ttft_mean_s", "ttft_p90_s", "growth")}
            for key in ("ttft_mean_s", "ttft_p90_s"):
                pairs = zip(found, base_runs, strict=True)
                ratios = [mine[key] / theirs[key] for mine, theirs in pairs]
                measured[f"{key.removesuffix('_s')}_ratio"] = interval(ratios)
            fleet = cell.scenario.deployments[0].fleet
            rows.append(
                {
                    "t_prefill_scale": variant.scale,
                    "deployment": name,
                    "n_p": fleet.n_p,
                    "n_d": fleet.n_d,
                    "lambda_max_closed_rps": cell.known.closed.lambda_max,
                    "lambda_max_rps": cell.known.expectation.lambda_max,
                    "lambda_max_ratio": cell.known.expectation.lambda_max / base.known.expectation.lambda_max,
                    "kept_split_ratio": variant.kept[name] / variant.kept["homogeneous"],
                    "load": cell.load,
                    "replications": len(found),
                    **_columns(measured),
                }
            )
    return rows
