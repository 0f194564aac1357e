"""`prfaas sweep`: Lambda_max at the SLO of each deployment, found by bisection in virtual time, beside the closed form.

Every deployment and seed is run at the same shares of its closed-form capacity, which gives TTFT against load and
brackets two limits: the rate up to which no queue grows and the SLO is met, and that up to which no queue grows. Each
bracket is halved until it is narrow. What is run never depends on the number of processes, so neither does the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from netem.fluid import TCP_EFFICIENCY
from testbed import plan
from testbed.assemble import build_workload, lengths_of_workload, max_input_tokens, mean_output, plan_deployment
from testbed.points import GROWING, Figures, Point, Runner, code_version, refuse_repeats
from testbed.policies import load_policy, wants_future
from testbed.report.intervals import Interval, interval
from testbed.scenario import Deployment, Scenario, ScenarioError
from testbed.scheduler import model
from testbed.scheduler.model import OperatingPoint

FRACTIONS: Final = (0.05, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1)
"""Of the capacity with expectations: where every deployment is run, whatever comes of it."""

TOLERANCE: Final = 0.01
POINT_REQUESTS: Final = 20_000
WARMUP: Final = 0.1
"""Requests before the window, a share of those in it."""

PROBE: Final = 0.25
STEP_UP: Final = 1.15
HIGHEST: Final = 4.0
"""Beyond this share of the capacity no limit is looked for: the closed form is then not that of this policy."""

By = Callable[[Figures], bool]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the closed form says of a deployment as it is.

    closed: the paper's form at the nominal link. expectation: with expectations, at what TCP gets of the link (0.956).
    routed: the same at the threshold that the policy takes, which is that of `closed`. ttft_mean_s, ttft_p90_s:
    unloaded, at that threshold.
    """

    closed: OperatingPoint
    expectation: OperatingPoint
    routed: OperatingPoint
    ttft_mean_s: float
    ttft_p90_s: float


def capacity(scenario: Scenario, deployment: Deployment) -> Capacity:
    """Equations (3)-(7) for a deployment's own split, in both forms. Raises ModelError."""
    at = plan_deployment(scenario, deployment, fixed_split=True)
    lengths = lengths_of_workload(scenario.workload, max_input_tokens(scenario, deployment))
    output_tokens, link_bps = mean_output(scenario.workload), scenario.link.rate_bps
    closed, _ = plan.solve(at, lengths, output_tokens, link_bps, "mean")
    expectation, _ = plan.solve(at, lengths, output_tokens, link_bps * TCP_EFFICIENCY, "expectation")
    system = at.system(output_tokens, link_bps * TCP_EFFICIENCY)
    routed = model.evaluate(system, closed.fleet, lengths, closed.threshold_tokens, "expectation")
    return Capacity(closed, expectation, routed, *model.unloaded_ttft_s(system, lengths, closed.threshold_tokens))


def stable(figures: Figures) -> bool:
    """No queue grows."""
    return not figures["growing"]


def at_slo(figures: Figures) -> bool:
    """No queue grows, and the SLO is met."""
    return bool(figures["slo_met"]) and not figures["growing"]


def bracket(points: Mapping[float, Figures], good: By) -> tuple[float, float | None]:
    """(low, high) of the rates tried: every one up to low is good (0 when the lowest is not), high, the next, is not.

    high is None when all are good. A rate that is good above one that is not counts for nothing.
    """
    low = 0.0
    for rate in sorted(points):
        if not good(points[rate]):
            return low, rate
        low = rate
    return low, None


def next_rate(points: Mapping[float, Figures], good: By, highest_rps: float, tolerance: float) -> float | None:
    """The rate to try next, requests/s; None when the limit is known to `tolerance`, or there is none to be found."""
    low, high = bracket(points, good)
    if high is None:
        return round(low * STEP_UP, 6) if low < highest_rps else None
    if low == 0.0 or high - low <= tolerance * high:
        return None
    return round((low + high) / 2, 6)


@dataclass(slots=True)
class _Search:
    """One deployment under one seed, and what is known of it by rate."""

    scenario: Scenario
    base_rps: float
    requests: int  # a point, with its warm-up
    points: dict[float, Figures]

    def point(self, rate_rps: float) -> Point:
        duration_s = self.requests / rate_rps
        load = {
            "rate_rps": rate_rps,
            "load_fraction": None,
            "duration_s": duration_s,
            "warmup_s": duration_s * WARMUP / (1 + WARMUP),
        }
        workload = self.scenario.workload.model_copy(update=load)
        overload = rate_rps > self.base_rps
        return Point(self.scenario.model_copy(update={"workload": workload}), PROBE if overload else None)

    def wanted(self, tolerance: float) -> list[float]:
        """The rates to try next: first the common shares of the capacity, then what narrows each of both limits."""
        if not self.points:
            return [round(self.base_rps * fraction, 6) for fraction in FRACTIONS]
        highest_rps = self.base_rps * HIGHEST
        rates = {next_rate(self.points, good, highest_rps, tolerance) for good in (stable, at_slo)}
        return sorted(rate for rate in rates if rate is not None)


def sweep(
    scenario: Scenario,
    runner: Runner,
    *,
    repeats: int = 1,
    point_requests: int = POINT_REQUESTS,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Lambda_max of every deployment of the scenario, for `repeats` seeds from the scenario's own; JSON-ready.

    A point's window is as long as `point_requests` arrivals take, after a warm-up of a tenth of that (of a trace: as
    many as it has). Rates are req/s. Of several seeds `simulated` and `saturated_rps` are means, `intervals` their 95 %
    intervals. Raises ScenarioError, TraceError, ModelError.
    """
    refuse_repeats(scenario, repeats)
    if scenario.phases:
        raise ScenarioError(
            f"scenario {scenario.name}: has phases, and a sweep looks for one rate that lasts; sweep one without, such "
            "as paper"
        )
    seeds = [scenario.seed + i for i in range(repeats)]
    known = {one.name: capacity(scenario, one) for one in scenario.deployments}
    searches = {
        (one.name, seed): _Search(
            scenario.only(one.name).model_copy(update={"seed": seed}),
            known[one.name].expectation.lambda_max,
            _requests(scenario, one, point_requests),
            {},
        )
        for one in scenario.deployments
        for seed in seeds
    }
    while asked := [(search, rate) for search in searches.values() for rate in search.wanted(tolerance)]:
        for (search, rate), figures in zip(asked, runner.run([s.point(rate) for s, rate in asked]), strict=True):
            search.points[rate] = figures
    return {
        "scenario": scenario.name,
        "arrivals": _arrivals(scenario),
        "link_bps": scenario.link.rate_bps,
        "slo": {"ttft_p90_s": scenario.slo.ttft_p90_s, "tpot_s": scenario.slo.tpot_s},
        "growing_above": GROWING,
        "tolerance": tolerance,
        "point_requests": point_requests,
        "seeds": seeds,
        "code_version": code_version(),
        "deployments": [
            _of(one, known[one.name], scenario.slo.ttft_p90_s, [searches[one.name, seed] for seed in seeds])
            for one in scenario.deployments
        ],
    }


def _arrivals(scenario: Scenario) -> str:
    arrivals = scenario.workload.arrivals
    return f"{arrivals.kind} CV {arrivals.cv:g}" if arrivals.kind == "gamma" else arrivals.kind


def save(result: dict[str, Any], folder: Path) -> None:
    """Write `sweep.json` beside the points."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))


def _requests(scenario: Scenario, deployment: Deployment, point_requests: int) -> int:
    wanted = round(point_requests * (1 + WARMUP))
    if scenario.workload.trace is None:
        return wanted
    whole = {"rate_rps": None, "load_fraction": None, "duration_s": 1e9, "warmup_s": 0.0}
    workload = scenario.workload.model_copy(update=whole)
    trace, _ = build_workload(scenario.model_copy(update={"workload": workload}), deployment)
    return min(wanted, len(trace.requests))


def _of(deployment: Deployment, known: Capacity, slo_ttft_s: float, searches: Sequence[_Search]) -> dict[str, Any]:
    at_slo_rps = interval([bracket(search.points, at_slo)[0] for search in searches])
    saturated = interval([bracket(search.points, stable)[0] for search in searches])
    points = [
        {**search.points[rate], "load_fraction": rate / search.base_rps}
        for search in searches
        for rate in sorted(search.points)
    ]
    return {
        "name": deployment.name,
        "policy": deployment.policy.name,
        "knows_future": wants_future(load_policy(deployment.policy.name)),
        "bottleneck": known.expectation.bottleneck,
        "lambda_max_rps": {
            "closed": known.closed.lambda_max,
            "expectation": known.expectation.lambda_max,
            "simulated": at_slo_rps["mean"],
        },
        "saturated_rps": saturated["mean"],
        "intervals": {"simulated": at_slo_rps, "saturated": saturated} if len(searches) > 1 else None,
        "ttft_unloaded_s": {"mean": known.ttft_mean_s, "p90": known.ttft_p90_s},
        "note": _note(at_slo_rps, slo_ttft_s, searches),
        "points": points,
    }


def _note(at_slo_rps: Interval, slo_ttft_s: float, searches: Sequence[_Search]) -> str | None:
    lowest = searches[0].points[min(searches[0].points)]
    if at_slo_rps["mean"]:
        return None
    return (
        f"misses the SLO even at {FRACTIONS[0]:.0%} of its capacity: P90 TTFT {lowest['ttft_p90_s']:.2f} s, "
        f"{slo_ttft_s:g} s promised"
    )
