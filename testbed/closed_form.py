"""What the closed form says of a load that is run: the figures a report shows beside the measured ones, and the
thresholds that a policy is judged by, phase by phase.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from netem.fluid import TCP_EFFICIENCY
from testbed import phases, plan
from testbed.assemble import (
    lengths_of_workload,
    max_input_tokens,
    mean_output,
    plan_deployment,
    segments,
    workload_lengths,
)
from testbed.lengths import lengths_of, mean_output_tokens
from testbed.link_schedule import link_means
from testbed.phases import is_whole
from testbed.scenario import Deployment, Scenario
from testbed.scheduler.model import unloaded_ttft_s
from traces.load import Trace


def closed_form(scenario: Scenario, deployment: Deployment, trace: Trace, rate_rps: float) -> dict[str, Any]:
    """What equations (3)-(7), in the paper's form, say of a deployment under a load of `rate_rps`.

    The split is the deployment's own, the link the nominal one; with phases, the lengths are those of all their
    requests. `optima`: see there.
    """
    cut = bool(scenario.phases) and not is_whole(scenario.workload)
    of_rows = cut or scenario.workload.trace is not None
    output_tokens = mean_output_tokens(trace.requests) if of_rows else mean_output(scenario.workload)
    at = plan_deployment(scenario, deployment, fixed_split=True)
    lengths = lengths_of(trace.requests) if cut else workload_lengths(scenario, trace)
    point, _ = plan.solve(at, lengths, output_tokens, scenario.link.rate_bps)
    system = at.system(output_tokens, scenario.link.rate_bps)
    ttft_mean_s, ttft_p90_s = unloaded_ttft_s(system, lengths, point.threshold_tokens)
    return {
        "form": "mean",
        "lambda_max_rps": point.lambda_max,
        "threshold_tokens": plan.finite(point.threshold_tokens),
        "offload_fraction": point.p,
        "bottleneck": point.bottleneck,
        "egress_bps": point.egress_bps / point.lambda_max * rate_rps if point.lambda_max else 0.0,
        "ttft_unloaded_s": {"mean": ttft_mean_s, "p90": ttft_p90_s},
        "offered_rps": rate_rps,
        "load_fraction": rate_rps / point.lambda_max if point.lambda_max else None,
        "optima": optima(scenario, deployment, trace, rate_rps),
    }


def optima(scenario: Scenario, deployment: Deployment, trace: Trace, rate_rps: float) -> list[dict[str, Any]]:
    """The best threshold of each phase, or, without phases, of the whole run (then `name` is None).

    In the paper's form, whatever the policy, at what TCP gets of the phase's link (0.956) and for the phase's lengths;
    of a ramp, for those at its end. threshold_tokens, lambda_max_rps, bottleneck: at the deployment's own split;
    `best`: the best split and its figures. offered_rps is the phase's mean rate.
    """
    workload, given = scenario.workload, scenario.phases
    names: list[str | None] = [phase.name for phase in given] or [None]
    spans = phases.spans(given) or [(0.0, workload.duration_s)]
    link_bps = link_means(scenario, spans)
    rates = [rate_rps] * len(spans)
    if given and not is_whole(workload):
        own = [[one for one in segments(scenario, deployment) if one.phase == i] for i in range(len(given))]
        rates = [sum(one.rate_rps for one in parts) / len(parts) for parts in own]
        longest = max_input_tokens(scenario, deployment)
        lengths = [lengths_of_workload(parts[-1].workload, longest) for parts in own]
        outputs = [mean_output(parts[-1].workload) for parts in own]
    else:
        lengths = [workload_lengths(scenario, trace)] * len(spans)
        outputs = [mean_output_tokens(trace.requests)] * len(spans)
    out = []
    for i, (start_s, end_s) in enumerate(spans):
        here, best = (
            plan.solve(_any_policy(scenario, deployment, fixed), lengths[i], outputs[i], link_bps[i] * TCP_EFFICIENCY)[
                0
            ]
            for fixed in (True, False)
        )
        out.append(
            {
                "name": names[i],
                "start_s": start_s,
                "end_s": end_s,
                "link_bps": link_bps[i],
                "offered_rps": rates[i],
                "threshold_tokens": plan.finite(here.threshold_tokens),
                "lambda_max_rps": here.lambda_max,
                "bottleneck": here.bottleneck,
                "best": {
                    "n_p": best.fleet.n_p,
                    "n_d": best.fleet.n_d,
                    "threshold_tokens": plan.finite(best.threshold_tokens),
                    "lambda_max_rps": best.lambda_max,
                },
            }
        )
    return out


def _any_policy(scenario: Scenario, deployment: Deployment, fixed_split: bool) -> plan.Deployment:
    """The deployment as the closed form takes it, its threshold solved for, whatever its policy does."""
    at = plan_deployment(scenario, deployment, fixed_split=fixed_split)
    nothing_local = fixed_split and not deployment.fleet.n_p
    kind: plan.Kind = "homogeneous" if not at.n_prfaas else "naive" if nothing_local else "prfaas"
    return replace(at, kind=kind, threshold_tokens=None)
