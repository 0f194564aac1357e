"""The paper's Figure 5, drawn from the result of `prfaas plan`: throughput over the split, and over the threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.plan import SOURCE

SUFFIXES = (".png", ".svg", ".pdf")
PRFAAS, LOCAL, DECODE, BEST = "#c2410c", "#1d4ed8", "#6b7280", "#111827"
UNDER: dict[str, Any] = {"color": BEST, "linewidth": 6, "alpha": 0.25, "solid_capstyle": "butt", "zorder": 1}
"""Lambda_max is a broad band below the ceilings that it follows, so that both stay visible."""
NOTE: dict[str, Any] = {
    "textcoords": "offset points",
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
}


def plot_plan(result: dict[str, Any], path: str | Path, deployment: str | None = None) -> None:
    """Draws two panels of a deployment of `plan_deployments`' result (default: the first that offloads some requests).

    Left, the deployment's threshold and every split N_p / N_d: the ceilings of prefill and decode, and Lambda_max (6),
    which peaks where they balance (8). Right, its split and thresholds of 0 .. 60K tokens: the ceilings
    Theta_prfaas / p and Theta_pd-p / (1 - p), and Lambda_max, which peaks where they cross (7). Rates in req/s.
    Raises ValueError for a suffix other than .png, .svg or .pdf, or when no (or not this) deployment has both routes.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a figure ends in {', '.join(SUFFIXES)}; rename it")
    plan = _pick(result, deployment)

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _split_panel(left, plan)
    _threshold_panel(right, plan)
    figure.suptitle(
        f"{result['scenario']}: {plan['name']}, {plan['n_prfaas']} PrfaaS instances, link {_gbps(result['link_bps'])}; "
        f"steady-state model, {result['form']} form (after {SOURCE}, Figure 5)",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _pick(result: dict[str, Any], name: str | None) -> dict[str, Any]:
    plans: list[dict[str, Any]] = [plan for plan in result["deployments"] if "sweep_threshold" in plan]
    named = [plan for plan in plans if name in (None, plan["name"])]
    if not named:
        have = ", ".join(plan["name"] for plan in plans) or "none"
        raise ValueError(
            f"{result['scenario']}: deployment {name or '(any)'} does not route both ways at its optimum, so it has no "
            f"figure; deployments that do: {have}"
        )
    return named[0]


def _split_panel(axes: Any, plan: dict[str, Any]) -> None:
    rows = plan["sweep_split"]
    splits = range(len(rows))
    rate = [row["lambda_max_rps"] for row in rows]
    axes.plot(splits, [row["prefill_rps"] for row in rows], "--", color=LOCAL, label="prefill ceiling, both clusters")
    axes.plot(splits, [row["decode_rps"] for row in rows], ":", color=DECODE, label=r"decode, $\Theta_{pd-d}$")
    axes.plot(splits, rate, label=r"$\Lambda_{max}$", **UNDER)
    axes.plot(splits, rate, "o", color=BEST)
    best = plan["n_p"]
    axes.annotate(
        f"({rows[best]['n_p']}, {rows[best]['n_d']}): {rate[best]:.2f} req/s",
        (best, rate[best]),
        xytext=(0, 12),
        ha="center",
        **NOTE,
    )
    axes.set_xticks(list(splits), [f"{row['n_p']}/{row['n_d']}" for row in rows])
    axes.set_ylim(0, max(rate) * 1.6)
    axes.set_xlabel(r"$N_p / N_d$")
    axes.set_ylabel("req/s")
    axes.set_title(f"threshold fixed at {plan['threshold_tokens']:,.0f} tokens", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _threshold_panel(axes: Any, plan: dict[str, Any]) -> None:
    sweep = plan["sweep_threshold"]
    thousands = [tokens / 1000 for tokens in sweep["threshold_tokens"]]

    def drawn(column: str) -> list[float]:
        return [float("nan") if rate is None else rate for rate in sweep[column]]

    axes.plot(thousands, drawn("prfaas_rps"), "--", color=PRFAAS, label=r"PrfaaS, $\Theta_{prfaas}/p$")
    axes.plot(thousands, drawn("pd_p_rps"), "--", color=LOCAL, label=r"local prefill, $\Theta_{pd-p}/(1-p)$")
    axes.plot(thousands, drawn("pd_d_rps"), ":", color=DECODE, label=r"decode, $\Theta_{pd-d}$")
    axes.plot(thousands, drawn("lambda_max_rps"), label=r"$\Lambda_{max}$", **UNDER)
    at, rate = plan["threshold_tokens"] / 1000, plan["lambda_max_rps"]
    axes.plot([at], [rate], "o", color=BEST)
    axes.annotate(f"t = {at:.1f}K: {rate:.2f} req/s", (at, rate), xytext=(14, -4), **NOTE)
    axes.set_xlim(0, max(thousands))
    axes.set_ylim(0, max(sweep["lambda_max_rps"]) * 1.6)
    axes.set_xlabel("threshold t, thousand tokens")
    axes.set_ylabel("req/s")
    axes.set_title(f"split fixed at {plan['n_p']}/{plan['n_d']}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _gbps(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e9:g} Gbps"
