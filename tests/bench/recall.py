"""What taking requests back over a nearly dead link is worth (`recall_s` of the policy `prfaas`).

    python -m tests.bench.recall --json
    python -m tests.bench.recall --seeds 10

`link-drop` with a link that falls much lower than to 5 Gbps, at several rates: what the local site could do alone, a
little more, and twice that. Without and with, every seed; medians. It judges nothing: the figures are for
docs/scheduler.md.
"""

from __future__ import annotations

import argparse
import json
import statistics

from joblib import Parallel, delayed

from testbed.simulate import simulate

RATES_RPS = (0.3, 0.8, 1.44)
LINKS = ("20mbps", "100mbps", "500mbps")
FIGURES = ("drop_ttft_mean_s", "drop_ttft_p99_s", "longest_ttft_s", "recalled", "failed")


def run(rate_rps: float, link: str, seed: int, recall_s: float) -> dict[str, float]:
    """The figures of one run."""
    sets = [
        f"phases.drop.link_rate_bps={link}",
        f"workload.rate_rps={rate_rps}",
        f"deployments.prfaas-pd.policy.parameters={{recall_s: {recall_s}}}",
    ]
    result = simulate("link-drop", sets=sets, seed=seed)
    drop = next(phase for phase in result.summary["phases"] if phase["name"] == "drop")
    return {
        "drop_ttft_mean_s": drop["ttft_s"]["mean"],
        "drop_ttft_p99_s": drop["ttft_s"]["p99"],
        "longest_ttft_s": float(result.requests["ttft_s"].max()),
        "recalled": result.summary["scheduler"]["recalled"],
        "failed": result.summary["requests"]["failed"],
    }


def compare(rate_rps: float, link: str, seeds: int) -> dict[str, dict[str, float]]:
    """Medians without recall and with."""
    jobs = [(rate_rps, link, seed, recall_s) for recall_s in (0.0, 30.0) for seed in range(1, seeds + 1)]
    runs: list[dict[str, float]] = list(Parallel(n_jobs=-1)(delayed(run)(*job) for job in jobs))
    parts = {"without": runs[:seeds], "with": runs[seeds:]}
    return {
        name: {part: statistics.median(one[name] for one in some) for part, some in parts.items()} for name in FIGURES
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recall", description="What recalling is worth.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = {f"{rate:g} req/s, {link}": compare(rate, link, asked.seeds) for rate in RATES_RPS for link in LINKS}
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for case, rows in found.items():
        print(
            case + ": " + ", ".join(f"{name} {row['without']:.4g} -> {row['with']:.4g}" for name, row in rows.items())
        )


if __name__ == "__main__":
    main()
