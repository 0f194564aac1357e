"""`prfaas plan`: the model solved for a scenario's deployments, as one JSON-ready dict.

Every deployment's best split and threshold, all the splits that were tried, what crosses the link, and the unloaded
TTFT; the same with expectations; for the paper's own scenario each cell of its tables beside ours. Null stands for what
does not exist ("-" in the paper's tables): the threshold of a deployment that offloads nothing, the throughput of a
stage that no request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from emulator.profile import KvThroughputProfile, Profile
from testbed.lengths import hardware
from testbed.scheduler import model
from testbed.scheduler.model import Form, LengthDistribution, OperatingPoint, System

Kind: TypeAlias = Literal["prfaas", "static", "homogeneous", "naive"]

PHI_LENGTHS_TOKENS = (1024, 8192, 32768, 131072)
SWEEP_TOKENS = np.linspace(0, 60_000, 241)
"""The thresholds of Figure 5's right panel, one every 250 tokens."""

SOURCE = "arXiv:2604.15039v2"
TABLE_5_PHI_GBPS = {1024: 3.61, 8192: 3.59, 32768: 3.19, 131072: 2.62}
TABLE_6: dict[Kind, dict[str, float]] = {
    "prfaas": {
        "threshold_tokens": 19_400,
        "n_prfaas": 4,
        "n_p": 3,
        "n_d": 5,
        "offload_fraction": 0.496,
        "ttft_mean_s": 2.22,
        "ttft_p90_s": 3.51,
        "theta_prfaas_rps": 1.61,
        "theta_pd_p_rps": 1.64,
        "theta_pd_d_rps": 3.91,
        "lambda_max_rps": 3.24,
        "ratio": 1.54,
        "egress_bps": 13e9,
    },
    "homogeneous": {
        "n_p": 9,
        "n_d": 3,
        "ttft_mean_s": 4.44,
        "ttft_p90_s": 9.73,
        "theta_pd_p_rps": 2.11,
        "theta_pd_d_rps": 2.35,
        "lambda_max_rps": 2.11,
        "ratio": 1.00,
    },
    "naive": {
        "n_prfaas": 4,
        "n_d": 8,
        "ttft_mean_s": 1.74,
        "ttft_p90_s": 3.51,
        "theta_prfaas_rps": 2.45,
        "theta_pd_d_rps": 6.25,
        "lambda_max_rps": 2.45,
        "ratio": 1.16,
    },
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One fleet under one policy. `local_profile` times local prefill and decode, `prefill_profile` remote prefill.

    kind: `prfaas` solves the threshold unless one is given; `static` needs one; `naive` offloads all, `homogeneous`
    none. n_p fixes the split of the `n_local` instances; without it every split is tried, but naive, which prefills
    nothing locally, has N_p = 0. Raises ValueError for a static deployment without a threshold, an n_p outside
    0 .. n_local, or remote instances without a profile.
    """

    name: str
    kind: Kind
    prefill_profile: Profile | None
    local_profile: Profile
    n_prfaas: int
    n_local: int
    n_p: int | None = None
    threshold_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "static" and self.threshold_tokens is None:
            raise ValueError(f"deployment {self.name}: a static policy needs a threshold; give threshold_tokens")
        if self.n_p is not None and not 0 <= self.n_p <= self.n_local:
            raise ValueError(
                f"deployment {self.name}: n_p = {self.n_p}: must be 0 .. {self.n_local}, its local instances"
            )
        if self.n_prfaas and self.prefill_profile is None:
            raise ValueError(f"deployment {self.name}: {self.n_prfaas} remote instances without a profile; name one")

    @property
    def fixed_threshold(self) -> float | None:
        """The threshold that is not solved for, tokens; None when it is."""
        return {"naive": model.ALL_REMOTE, "homogeneous": model.ALL_LOCAL}.get(self.kind, self.threshold_tokens)

    def system(self, output_tokens: float, link_bps: float) -> System:
        """The deployment as the model takes it."""
        return System(
            local=hardware(self.local_profile),
            remote=hardware(self.prefill_profile) if self.prefill_profile else None,
            link_bps=link_bps,
            decode_step_s=self.local_profile.decode_step_s,
            decode_slots=self.local_profile.decode_slots,
            output_tokens=output_tokens,
        )


def solve(
    deployment: Deployment, lengths: LengthDistribution, output_tokens: float, link_bps: float, form: Form = "mean"
) -> tuple[OperatingPoint, list[OperatingPoint]]:
    """A deployment's operating point, and every split that was tried for it (equations 3-8)."""
    system = deployment.system(output_tokens, link_bps)
    grid = model.grid_search(system, deployment.n_prfaas, deployment.n_local, lengths, form, deployment.fixed_threshold)
    n_p = 0 if deployment.kind == "naive" and deployment.n_p is None else deployment.n_p
    grid = grid if n_p is None else [grid[n_p]]
    return model.optimum(grid), grid


def plan_deployments(
    deployments: Sequence[Deployment],
    *,
    scenario: str,
    lengths: LengthDistribution,
    output_tokens: float,
    link_bps: float,
    form: Form = "mean",
    kv_profiles: Sequence[Profile | KvThroughputProfile] = (),
    against_paper: bool = False,
) -> dict[str, Any]:
    """The JSON of `prfaas plan --json`: rates in req/s, link_bps and egress in bits/s, lengths in tokens.

    `ratio` is to the first homogeneous deployment. `phi_kv_bps` covers the deployments' profiles and `kv_profiles`.
    `expectation` holds the deployments again in that form. `against_paper` adds the paper's cells and our relative
    errors, for deployments of the kinds of its Table 6. Raises ProfileError for lengths beyond a profile's last point.
    """
    forms: dict[Form, list[dict[str, Any]]] = {
        each: _plans(deployments, lengths, output_tokens, link_bps, each) for each in (form, "expectation")
    }
    profiles = {p.name: p for d in deployments for p in (d.prefill_profile, d.local_profile) if p is not None}
    phi_profiles = {**profiles, **{p.name: p for p in kv_profiles}}
    result: dict[str, Any] = {
        "scenario": scenario,
        "form": form,
        "lengths": {
            "mean_tokens": lengths.mean,
            "low_tokens": lengths.low,
            "high_tokens": lengths.high,
            "extended_fraction": {name: _extended(p, lengths) for name, p in profiles.items()},
        },
        "output_tokens": output_tokens,
        "link_bps": link_bps,
        "deployments": forms[form],
        "phi_kv_bps": {
            str(tokens): {n: p.phi_kv_bps(tokens) for n, p in phi_profiles.items() if tokens <= p.last_tokens}
            for tokens in PHI_LENGTHS_TOKENS
        },
        "expectation": {"deployments": forms["expectation"]},
        "provenance": {
            name: {figure: {"status": p.status, "source": p.source} for figure, p in profile.provenance.items()}
            for name, profile in phi_profiles.items()
        },
    }
    if against_paper:
        result["paper"] = _against_paper(deployments, result)
    return result


def _plans(
    deployments: Sequence[Deployment], lengths: LengthDistribution, output_tokens: float, link_bps: float, form: Form
) -> list[dict[str, Any]]:
    solved = [(d, *solve(d, lengths, output_tokens, link_bps, form)) for d in deployments]
    base = next((point.lambda_max for d, point, _ in solved if d.kind == "homogeneous"), None)
    plans = []
    for deployment, point, grid in solved:
        system = deployment.system(output_tokens, link_bps)
        mean_s, p90_s = model.unloaded_ttft_s(system, lengths, point.threshold_tokens)
        plan: dict[str, Any] = {
            "name": deployment.name,
            "kind": deployment.kind,
            "profiles": {
                "remote": deployment.prefill_profile.name if deployment.prefill_profile else None,
                "local": deployment.local_profile.name,
            },
            "threshold_tokens": finite(point.threshold_tokens),
            "n_prfaas": point.fleet.n_prfaas,
            "n_p": point.fleet.n_p,
            "n_d": point.fleet.n_d,
            "offload_fraction": point.p,
            "l_long_tokens": point.l_long if point.p > 0 else None,
            "l_short_tokens": point.l_short if point.p < 1 else None,
            "theta_prfaas_rps": finite(point.theta_prfaas),
            "theta_pd_p_rps": finite(point.theta_pd_p),
            "theta_pd_d_rps": point.theta_pd_d,
            "lambda_max_rps": point.lambda_max,
            "bottleneck": point.bottleneck,
            "ratio": point.lambda_max / base if base else None,
            "ttft_unloaded_s": {"mean": mean_s, "p90": p90_s},
            "egress_bps": point.egress_bps,
            "grid": [_grid_row(row) for row in grid],
        }
        if 0 < point.p < 1:
            plan["sweep_split"] = _sweep_split(system, point, deployment.n_local, lengths)
            plan["sweep_threshold"] = _sweep_threshold(system, point, lengths)
        plans.append(plan)
    return plans


def _grid_row(point: OperatingPoint) -> dict[str, Any]:
    return {
        "n_p": point.fleet.n_p,
        "n_d": point.fleet.n_d,
        "threshold_tokens": finite(point.threshold_tokens),
        "lambda_max_rps": point.lambda_max,
        "bottleneck": point.bottleneck,
    }


def _sweep_split(system: System, at: OperatingPoint, n_local: int, lengths: LengthDistribution) -> list[dict[str, Any]]:
    """Figure 5, left: every split at this threshold. `prefill_rps` and `decode_rps` are the ceilings that meet (8)."""
    points = model.grid_search(system, at.fleet.n_prfaas, n_local, lengths, at.form, at.threshold_tokens)
    return [
        _grid_row(q)
        | {
            "prefill_rps": min(q.theta_prfaas / q.p, q.theta_pd_p / (1 - q.p)),
            "decode_rps": q.theta_pd_d,
        }
        for q in points
    ]


def _sweep_threshold(system: System, at: OperatingPoint, lengths: LengthDistribution) -> dict[str, list[float | None]]:
    """Figure 5, right: this split at every threshold of 0 .. 60K. The two ceilings that cross at the optimum (7)."""
    terms = model.ceilings(system, at.fleet, model.conditional(system, lengths, SWEEP_TOKENS, at.form))
    columns = {
        "prfaas_rps": terms.remote,
        "pd_p_rps": terms.local,
        "pd_d_rps": terms.decode,
        "lambda_max_rps": terms.lambda_max,
    }
    return {"threshold_tokens": SWEEP_TOKENS.tolist()} | {k: [finite(x) for x in v] for k, v in columns.items()}


def _against_paper(deployments: Sequence[Deployment], result: dict[str, Any]) -> dict[str, Any]:
    table_6 = {}
    for deployment, plan in zip(deployments, result["deployments"], strict=True):
        flat = plan | {f"ttft_{k}_s": v for k, v in plan["ttft_unloaded_s"].items()}
        table_6[deployment.name] = {
            cell: _compare(paper, flat[cell]) for cell, paper in TABLE_6.get(deployment.kind, {}).items()
        }
    ours = result["phi_kv_bps"]
    table_5 = {
        str(tokens): _compare(paper * 1e9, ours[str(tokens)]["h200-1t"])
        for tokens, paper in TABLE_5_PHI_GBPS.items()
        if "h200-1t" in ours[str(tokens)]
    }
    return {"source": f"{SOURCE}, Tables 5 and 6", "deployments": table_6, "phi_kv_bps": table_5}


def _compare(paper: float, ours: float | None) -> dict[str, float | None]:
    return {"paper": paper, "ours": ours, "relative_error": None if ours is None else ours / paper - 1}


def _extended(profile: Profile, lengths: LengthDistribution) -> float:
    return float(lengths.weights[lengths.atoms < profile.first_tokens].sum())


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
