"""From a scenario to what the rooms take: the model's inputs, a policy's setup, a workload's requests.

The conversions live here so that the model, the policies and the traces know nothing of scenarios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from emulator.profile import Profile
from testbed import phases, plan
from testbed.control import Rules
from testbed.lengths import hardware, lengths_of, mean_output_tokens
from testbed.phases import Segment, is_whole
from testbed.scenario import Deployment, Scenario, ScenarioError
from testbed.scenario_workload import LogNormal, Workload
from testbed.scheduler.api import Future, Role, Setup, Site
from testbed.scheduler.model import LengthDistribution, ModelError
from traces.load import Trace, load
from traces.sessions import Sessions
from traces.synthetic import DiscreteLengths, LogNormalLengths, NoArrivalError, Synthetic
from traces.tools import concat, rate_rps, slice_time, take_load, with_arrivals

KINDS: dict[str, plan.Kind] = {
    "prfaas": "prfaas",
    "static": "static",
    "naive": "naive",
    "homogeneous": "homogeneous",
    "oracle": "prfaas",  # the optimum is the optimum, whoever knows it
}

SESSIONS_SAMPLE = 20_000
"""Turns whose prompts stand for the distribution of a workload of conversations."""


def instances(deployment: Deployment) -> list[tuple[str, Site, Role]]:
    """Every instance of a deployment, (name, site, role): remote prefill, local prefill, local decode."""
    fleet = deployment.fleet
    nodes: list[tuple[str, Site, Role]] = [(f"prfaas-{i}", "prfaas", "prefill") for i in range(fleet.n_prfaas)]
    nodes += [(f"pd-p-{i}", "pd", "prefill") for i in range(fleet.n_p)]
    nodes += [(f"pd-d-{i}", "pd", "decode") for i in range(fleet.n_d)]
    return nodes


def profiles(scenario: Scenario, deployment: Deployment) -> dict[Site, Profile]:
    """The profile of every site that has instances or a name for one."""
    sites: tuple[Site, ...] = ("prfaas", "pd")
    return {site: profile for site in sites if (profile := scenario.profile(deployment, site)) is not None}


def cost_functions(scenario: Scenario, deployment: Deployment) -> dict[Site, Callable[[float], float]]:
    """T_prefill(l) of each site, seconds."""
    return {site: profile.t_prefill_curve.at for site, profile in profiles(scenario, deployment).items()}


def max_input_tokens(scenario: Scenario, deployment: Deployment) -> int:
    """The longest prompt that every site's profile answers for."""
    return min(profile.last_tokens for profile in profiles(scenario, deployment).values())


def policy_setup(
    scenario: Scenario,
    deployment: Deployment,
    lengths: LengthDistribution,
    parameters: dict[str, float],
    future: Future | None = None,
) -> Setup:
    """What the deployment's policy is told when a load begins. future: for an oracle, None for everybody else."""
    by_site = profiles(scenario, deployment)
    return Setup(
        link_nominal_bps=scenario.link.rate_bps,
        n_prfaas=deployment.fleet.n_prfaas,
        n_p=deployment.fleet.n_p,
        n_d=deployment.fleet.n_d,
        hardware={site: hardware(profile) for site, profile in by_site.items()},
        decode_step_s=by_site["pd"].decode_step_s,
        decode_slots=by_site["pd"].decode_slots,
        lengths=lengths,
        parameters=parameters,
        pieces=scenario.pieces(deployment, "prfaas") if deployment.fleet.n_prfaas else 1,
        tick_s=scenario.scheduler.tick_s,
        reload_s=scenario.reload_s,
        future=future,
        block_tokens=control_rules(scenario, deployment).block_tokens,
    )


def control_rules(scenario: Scenario, deployment: Deployment) -> Rules:
    """What control keeps to in a scenario."""
    return Rules(
        max_attempts=scenario.max_attempts,
        tick_s=scenario.scheduler.tick_s,
        telemetry_s=scenario.telemetry_s,
        reload_s=scenario.reload_s,
        deadline_s=scenario.limits.deadline_s,
        waiting_requests=scenario.limits.waiting_requests,
        block_tokens=scenario.cache.block_tokens if scenario.cache_bytes else 0,
        pieces=scenario.pieces(deployment, "prfaas") if deployment.fleet.n_prfaas else 1,
    )


def plan_deployment(scenario: Scenario, deployment: Deployment, *, fixed_split: bool) -> plan.Deployment:
    """The deployment as the closed form takes it. fixed_split: its own N_p and N_d, else the best of them.

    A policy of somebody's own is planned as `prfaas`: the closed form knows no other way to route.
    """
    by_site = profiles(scenario, deployment)
    fleet = deployment.fleet
    kind = KINDS.get(deployment.policy.name, "prfaas")
    threshold = deployment.policy.threshold_tokens if kind in ("static", "prfaas") else None
    if kind == "static" and threshold is None:
        kind = "prfaas"  # a static policy without a threshold takes the optimum and keeps it
    return plan.Deployment(
        name=deployment.name,
        kind=kind,
        prefill_profile=by_site.get("prfaas") if fleet.n_prfaas else None,
        local_profile=by_site["pd"],
        n_prfaas=fleet.n_prfaas,
        n_local=fleet.n_p + fleet.n_d,
        n_p=fleet.n_p if fixed_split else None,
        threshold_tokens=threshold,
    )


def lengths_of_workload(workload: Workload, longest_tokens: int) -> LengthDistribution:
    """The distribution of a workload's input lengths: analytic, of a sample of its conversations' turns, or
    of those rows of its trace up to longest_tokens."""
    if workload.trace is not None:
        return lengths_of(_servable(load(workload.trace), longest_tokens).requests)
    if workload.sessions is not None:
        made = _synthetic(workload, rate_rps=1.0, seed=0)
        assert made.sessions is not None
        low_high = (workload.output_tokens, workload.output_tokens)
        return LengthDistribution.of_sample(
            made.sessions.sample_input_tokens(made.lengths, low_high, SESSIONS_SAMPLE).tolist()
        )
    lengths = workload.lengths
    if isinstance(lengths, LogNormal):
        return LengthDistribution.log_normal(lengths.mu, lengths.sigma, lengths.min_tokens, lengths.max_tokens)
    return LengthDistribution.of_sample(lengths.values, lengths.weights)


def mean_output(workload: Workload) -> float:
    """Mean L_out of a workload, tokens."""
    if workload.trace is not None:
        return mean_output_tokens(load(workload.trace).requests)
    return float(workload.output_tokens)


def lengths_to_json(lengths: LengthDistribution) -> dict[str, Any]:
    """A distribution as the gateway's `lengths` carries it."""
    out: dict[str, Any] = {"values": lengths.atoms.tolist(), "weights": lengths.weights.tolist()}
    if lengths.edges is not None:
        out["edges"] = lengths.edges.tolist()
    return out


def lengths_from_json(data: Any) -> LengthDistribution:
    """The inverse. Raises ModelError for data that is no distribution."""
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("values"), list)
        or not set(data) <= {"values", "weights", "edges"}
    ):
        raise ModelError("lengths: must be an object with values, weights and, for a density, edges")
    try:
        distribution = LengthDistribution.of_sample(data["values"], data.get("weights"))
        edges = np.asarray(data["edges"], dtype=np.float64) if "edges" in data else None
    except ModelError:
        raise
    except (TypeError, ValueError):
        raise ModelError("lengths: values, weights and edges must be lists of numbers") from None
    if edges is not None:
        if edges.shape != (len(data["values"]) + 1,) or distribution.atoms.size != len(data["values"]):
            raise ModelError(f"lengths: {edges.size} edges for {len(data['values'])} values; give one more than values")
        return LengthDistribution(distribution.atoms, distribution.weights, edges)
    return distribution


def capacity_rps(
    scenario: Scenario,
    deployment: Deployment,
    lengths: LengthDistribution | None = None,
    output_tokens: float | None = None,
) -> float:
    """Lambda_max (equation 6) of the deployment as it is, in expectations, at the nominal link; requests/model s.

    Raises ScenarioError for a policy under which the deployment serves nothing.
    """
    workload = scenario.workload
    point, _ = plan.solve(
        plan_deployment(scenario, deployment, fixed_split=True),
        lengths if lengths is not None else lengths_of_workload(workload, max_input_tokens(scenario, deployment)),
        output_tokens if output_tokens is not None else mean_output(workload),
        scenario.link.rate_bps,
        "expectation",
    )
    if not point.lambda_max:
        fleet = deployment.fleet
        raise ScenarioError(
            f"policy {deployment.policy.name!r}: deployment {deployment.name} (n_prfaas {fleet.n_prfaas}, n_p "
            f"{fleet.n_p}, n_d {fleet.n_d}) serves nothing under it (Lambda_max is 0): it has no instance where that "
            "policy prefills; choose another --policy or --deployment"
        )
    return point.lambda_max


def workload_lengths(scenario: Scenario, trace: Trace) -> LengthDistribution:
    """The input lengths a policy is told: the scenario's analytic distribution (with phases, the first one's), or the
    very rows of its trace or conversations."""
    if is_whole(scenario.workload):
        return lengths_of(trace.requests)
    first = scenario.phases[0].workload(scenario.workload) if scenario.phases else scenario.workload
    return lengths_of_workload(first, max_input_tokens(scenario, scenario.deployments[0]))


def phase_lengths(scenario: Scenario, deployment: Deployment, trace: Trace) -> list[tuple[float, LengthDistribution]]:
    """The input lengths that are really offered from each of several model seconds on: what an oracle knows."""
    if not scenario.phases or is_whole(scenario.workload):
        return [(0.0, workload_lengths(scenario, trace))]
    longest = max_input_tokens(scenario, deployment)
    return [(one.start_s, lengths_of_workload(one.workload, longest)) for one in segments(scenario, deployment)]


def segments(scenario: Scenario, deployment: Deployment) -> list[Segment]:
    """The segments of a scenario's phases, each at its own rate."""
    return phases.segments(
        scenario.phases, scenario.workload, lambda workload: _asked_rps(scenario, deployment, workload)
    )


def at_fixed_rates(scenario: Scenario) -> Scenario:
    """A scenario with one deployment with every load_fraction as the rate it is under that deployment's own policy."""
    deployment = scenario.deployments[0]
    fixed: dict[str, Any] = {"load_fraction": None}
    if scenario.phases and not is_whole(scenario.workload):
        own = [phase.workload(scenario.workload) for phase in scenario.phases]
        rates = [_asked_rps(scenario, deployment, workload) for workload in own]
        timed = [
            phase.model_copy(update={**fixed, "rate_rps": rate})
            for phase, rate in zip(scenario.phases, rates, strict=True)
        ]
        return scenario.model_copy(update={"phases": timed})
    if scenario.workload.load_fraction is None:
        return scenario
    fixed["rate_rps"] = build_workload(scenario, deployment)[1]
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update=fixed)})


def build_plan(scenario: Scenario, form: str = "mean") -> dict[str, Any]:
    """`prfaas plan` of a scenario, every deployment at its best split."""
    return plan.plan_deployments(
        [plan_deployment(scenario, d, fixed_split=False) for d in scenario.deployments],
        scenario=scenario.name,
        lengths=lengths_of_workload(
            scenario.workload, min(max_input_tokens(scenario, d) for d in scenario.deployments)
        ),
        output_tokens=mean_output(scenario.workload),
        link_bps=scenario.link.rate_bps,
        form=form,  # type: ignore[arg-type]
        against_paper=scenario.name == "paper",
    )


def build_workload(scenario: Scenario, deployment: Deployment) -> tuple[Trace, float]:
    """The requests a scenario offers to a deployment, in model seconds from 0, and their mean rate (a model second).

    A trace is taken as it is (at its own pace, for duration_s) without a rate; else its first rows, stretched to the
    rate. Rows longer than the profiles know are dropped with a reason. Of phases the segments are joined, each from a
    seed of its own. Raises TraceError and ScenarioError.
    """
    workload = scenario.workload
    if scenario.phases and not is_whole(workload):
        return _phased(scenario, deployment)
    if workload.trace is None:
        rate = _asked_rps(scenario, deployment, workload)
        return _synthetic(workload, rate, scenario.seed).generate(), rate
    if not Path(workload.trace).is_file():
        raise ScenarioError(
            f"workload.trace = {workload.trace!r}: no such file; give a trace's path (--trace FILE; public ones: "
            "prfaas trace fetch)"
        )
    trace = _servable(load(workload.trace), max_input_tokens(scenario, deployment))
    trace = with_arrivals(trace, "spread" if workload.arrivals.kind == "spread" else "as_is")
    if workload.rate_rps is not None:
        rate = workload.rate_rps
    elif workload.load_fraction is not None:
        rate = _rate_of_fraction(scenario, deployment, trace)
    else:
        trace = slice_time(trace, 0, workload.duration_s)
        return trace, rate_rps(trace) or len(trace.requests) / workload.duration_s
    return take_load(trace, rate, workload.duration_s), rate


def _asked_rps(scenario: Scenario, deployment: Deployment, workload: Workload) -> float:
    """The rate a synthetic workload asks for, requests/s: its own, or its fraction of Lambda_max for its lengths."""
    if workload.rate_rps is not None:
        return workload.rate_rps
    lengths = lengths_of_workload(workload, max_input_tokens(scenario, deployment))
    return (workload.load_fraction or 0) * capacity_rps(scenario, deployment, lengths, mean_output(workload))


def _phased(scenario: Scenario, deployment: Deployment) -> tuple[Trace, float]:
    """The segments of the phases as one trace, and its mean rate. A segment in which nothing comes is left out."""
    made = segments(scenario, deployment)
    parts: list[tuple[float, Trace]] = []
    for index, one in enumerate(made):
        try:
            part = _synthetic(one.workload, one.rate_rps, phases.seed(scenario.seed, index)).generate()
        except NoArrivalError:
            if not parts and one is made[-1]:
                raise
            continue
        parts.append((one.start_s, part))
    notes = []
    for i, (phase, (start_s, end_s)) in enumerate(zip(scenario.phases, phases.spans(scenario.phases), strict=True)):
        rates = [one.rate_rps for one in made if one.phase == i]
        pace = f"{rates[0]:.4g}" if len(rates) == 1 else f"{rates[0]:.4g} to {rates[-1]:.4g}"
        notes.append(f"phase {phase.name}: {start_s:g} to {end_s:g} s, {pace} requests/s")
    mean_rps = sum(one.rate_rps * one.workload.duration_s for one in made) / scenario.workload.duration_s
    return replace(concat(parts), notes=notes), mean_rps


def _rate_of_fraction(scenario: Scenario, deployment: Deployment, trace: Trace) -> float:
    """load_fraction x Lambda_max of the very rows that will be taken, which depend on the rate: it settles soon."""
    fraction, duration_s = scenario.workload.load_fraction or 0.0, scenario.workload.duration_s
    rows = trace.requests
    rate = 0.0
    for _ in range(8):
        taken = rows[: max(1, min(len(rows), round(rate * duration_s)))] if rate else rows
        new = fraction * capacity_rps(scenario, deployment, lengths_of(taken), mean_output_tokens(taken))
        if abs(new - rate) <= 1e-3 * new:
            break
        rate = new
    return new


def _servable(trace: Trace, longest: int) -> Trace:
    kept = [request for request in trace.requests if request.input_tokens <= longest]
    left_out = len(trace.requests) - len(kept)
    if not left_out:
        return trace
    if not kept:
        raise ScenarioError(f"{trace.source}: every row is longer than the {longest} tokens at which the profiles end")
    reason = f"longer than the profiles' {longest} tokens"
    return replace(trace, requests=kept, dropped={**trace.dropped, reason: trace.dropped.get(reason, 0) + left_out})


def _synthetic(workload: Workload, rate_rps: float, seed: int) -> Synthetic:
    given = workload.lengths
    lengths: LogNormalLengths | DiscreteLengths
    if isinstance(given, LogNormal):
        lengths = LogNormalLengths(given.mu, given.sigma, given.min_tokens, given.max_tokens)
    else:
        lengths = DiscreteLengths(tuple(given.values), tuple(given.weights))
    arrivals = workload.arrivals
    assert arrivals.kind != "as-is"
    assert arrivals.kind != "spread"
    return Synthetic(
        rate_rps=rate_rps,
        duration_s=workload.duration_s,
        lengths=lengths,
        output_tokens=workload.output_tokens,
        arrivals=arrivals.kind,
        cv=arrivals.cv,
        seed=seed,
        states=tuple((state.multiplier, state.sojourn_s) for state in arrivals.states),
        period_s=arrivals.period_s,
        amplitude=arrivals.amplitude,
        sessions=None if workload.sessions is None else Sessions(**workload.sessions.model_dump()),
    )
