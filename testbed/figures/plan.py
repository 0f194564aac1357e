"""The paper's Figure 5 and Table 6, drawn from the result of `prfaas plan`, and the tables behind both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.figures.draw import BEST, DECODE, LOCAL, PRFAAS, check, gbps, panels, save
from testbed.plan import SOURCE

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
    path = check(path)
    plan = _pick(result, deployment)
    figure, ((left, right),) = panels(1, 2, 11, 4.4)
    _split_panel(left, plan)
    _threshold_panel(right, plan)
    figure.suptitle(
        f"{result['scenario']}: {plan['name']}, {plan['n_prfaas']} PrfaaS instances, link {gbps(result['link_bps'])}; "
        f"steady-state model, {result['form']} form (after {SOURCE}, Figure 5)",
        fontsize=10,
    )
    save(figure, path)


def figure_5_rows(result: dict[str, Any], deployment: str | None = None) -> list[dict[str, Any]]:
    """The two panels as one table: `panel` is split or threshold; rates in req/s, None for a ceiling there is not."""
    plan = _pick(result, deployment)
    at = {"threshold_tokens": plan["threshold_tokens"], "n_p": plan["n_p"], "n_d": plan["n_d"]}
    names = ("prefill_rps", "prfaas_rps", "pd_p_rps", "decode_rps", "lambda_max_rps")
    rows = [
        {"panel": "split", **at, "n_p": row["n_p"], "n_d": row["n_d"], **{name: row.get(name) for name in names}}
        for row in plan["sweep_split"]
    ]
    sweep = {**plan["sweep_threshold"], "decode_rps": plan["sweep_threshold"]["pd_d_rps"]}
    for i, tokens in enumerate(sweep["threshold_tokens"]):
        rates = {name: sweep[name][i] if name in sweep else None for name in names}
        rows.append({"panel": "threshold", **at, "threshold_tokens": tokens, **rates})
    return rows


def table_6_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The paper's cells beside ours: its form (mean lengths) with the relative error, and expectations.

    `result` is `plan_deployments`' of the paper's scenario, in the paper's form.
    """
    expectation = {one["name"]: _flat(one) for one in result["expectation"]["deployments"]}
    return [
        {
            "deployment": name,
            "metric": metric,
            "paper": cell["paper"],
            "ours": cell["ours"],
            "relative_error": cell["relative_error"],
            "expectation": expectation[name][metric],
        }
        for name, cells in result["paper"]["deployments"].items()
        for metric, cell in cells.items()
    ]


def plot_table_6(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Three panels of `table_6_rows`: Lambda_max and the ceilings (req/s), unloaded TTFT (s), ratio to homogeneous."""
    figure, (axes,) = panels(1, 3, 12, 4.2)
    theta = ("theta_prfaas_rps", "theta_pd_p_rps", "theta_pd_d_rps")
    _bars(axes[0], rows, ("lambda_max_rps", *theta), "req/s")
    _bars(axes[1], rows, ("ttft_mean_s", "ttft_p90_s"), "unloaded TTFT, s")
    _bars(axes[2], rows, ("ratio",), r"$\Lambda_{max}$, ratio to homogeneous")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"Table 6 of {SOURCE}: the paper's cells, ours in its form, and with expectations "
        "(the H20's prefill times, T_decode and BS_max are inferred from this table)",
        fontsize=10,
    )
    save(figure, path)


def _bars(axes: Any, rows: list[dict[str, Any]], metrics: tuple[str, ...], title: str) -> None:
    """A group of three bars a cell. The H20's profile is inferred from some of these cells, which is labelled."""
    chosen = [row for row in rows if row["metric"] in metrics]
    for offset, (key, color, label) in enumerate(
        (
            ("paper", DECODE, "paper"),
            ("ours", LOCAL, "ours, mean length (the paper's form)"),
            ("expectation", PRFAAS, "ours, expectations"),
        )
    ):
        places = [i + (offset - 1) * 0.27 for i in range(len(chosen))]
        axes.bar(places, [row[key] or 0.0 for row in chosen], 0.25, color=color, label=label)
    names = [f"{row['deployment']}\n{row['metric'].rsplit('_', 1)[0].replace('_', ' ')}" for row in chosen]
    axes.set_xticks(range(len(chosen)), names, rotation=60, fontsize=7)
    axes.set_title(title, fontsize=10)


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    return plan | {f"ttft_{key}_s": value for key, value in plan["ttft_unloaded_s"].items()}


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
