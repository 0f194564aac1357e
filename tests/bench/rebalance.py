"""Whether copying hot prefixes to the other site ahead of demand pays (`replicate_share` of the policy `prfaas`).

    python -m tests.bench.rebalance --json
    python -m tests.bench.rebalance --seeds 10 --trace mooncake-conversation.jsonl

The fleet of `conversation`, and agents whose requests begin with one of many system prompts, some far more often asked
for than others: on an idle link, with pools too small for all of them, with the link cut for two minutes in the middle,
and with a link that becomes scarce. Each case with every seed, without copies and with; medians of the paired
differences. With --trace also the Mooncake trace, once. It judges nothing: the figures are for docs/scheduler.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from testbed.simulate import Result, simulate
from traces.load import Trace
from traces.request import Request

SHARE = 0.2
"""Of the link, for copies, in the runs with them."""

BLOCK = 512
RATE_RPS = 3.0
DURATION_S = 1200.0
CASES: dict[str, tuple[str, ...]] = {
    "idle link": (),
    "pools too small": ("cache_bytes=100000000000",),
    "link cut from 600 to 720 s": (
        "link.schedule={kind: constant, rate_bps: 100gbps, outages: [{at_s: 600, duration_s: 120}]}",
    ),
    "3 Gbps from 600 s on": ("link.schedule={kind: steps, steps: [[0, 100gbps], [600, 3gbps]]}",),
    "a far link, 0.1 s": ("link.delay_s=0.1",),
}
FIGURES = ("ttft_mean_s", "ttft_p99_s", "hit", "hit_pd", "hit_prfaas", "fetched_gb", "copied_gb", "crossed_gb")


def agents(seed: int, prompts: int = 300, exponent: float = 0.8, duration_s: float = DURATION_S) -> list[Request]:
    """Requests of `prompts` agents, the k-th asked for in proportion to k^-exponent: a system prompt of 4 to 40
    thousand tokens, then the user's, log-normal with a mean of some 3,000."""
    rng = np.random.default_rng(seed)
    system = rng.integers(8, 80, prompts) * BLOCK
    popularity = np.arange(1, prompts + 1) ** -exponent
    count = rng.poisson(RATE_RPS * duration_s)
    times = np.sort(rng.uniform(0, duration_s, count))
    users = np.clip(np.exp(rng.normal(7.5, 1.0, count)), 64, 60_000).astype(int)
    which = rng.choice(prompts, count, p=popularity / popularity.sum())
    made, fresh = [], 10**9
    for at_s, agent, user in zip(times.tolist(), which.tolist(), users.tolist(), strict=True):
        tokens = int(system[agent]) + user
        shared = [agent * 1000 + i for i in range(int(system[agent]) // BLOCK)]
        own = -(-tokens // BLOCK) - len(shared)
        made.append(Request(at_s, tokens, 512, (*shared, *range(fresh, fresh + own)), BLOCK))
        fresh += own
    return made


def offered(seed: int, duration_s: float = DURATION_S) -> Trace:
    """The requests of `agents` as a workload."""
    requests = agents(seed, duration_s=duration_s)
    return Trace(requests, len(requests), {}, [], "agents", f"agents {seed}", "synthetic")


def _run(case: str, seed: int, share: float, trace: str | None = None) -> dict[str, float]:
    parameters = f"deployments.prfaas-pd.policy.parameters={{replicate_share: {share}}}"
    common = [parameters, "telemetry_s=1", "scheduler.tick_s=1"]
    if trace is not None:
        return figures(simulate("conversation", sets=[parameters, f"workload.trace={trace}"], seed=seed))
    shape = [f"workload.duration_s={DURATION_S:g}", "workload.warmup_s=0", "workload.arrivals={kind: poisson}"]
    given = [*common, *CASES[case], *shape, "workload.trace=null", f"workload.rate_rps={RATE_RPS}"]
    return figures(simulate("conversation", sets=given, seed=seed, workload=(offered(seed), RATE_RPS)))


def figures(result: Result) -> dict[str, float]:
    """What is compared of a run. hit: cached over all tokens of the prompts."""
    rows, summary = result.requests, result.summary
    cached = rows.groupby("prefill_site", observed=True)[["cached_tokens", "input_tokens"]].sum()
    by_site = cached["cached_tokens"] / cached["input_tokens"]
    across = (rows["cache_site"] != "") & (rows["cache_site"].astype(str) != rows["prefill_site"].astype(str))
    return {
        "ttft_mean_s": summary["ttft_s"]["mean"],
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "hit": float(rows["cached_tokens"].sum() / rows["input_tokens"].sum()),
        **{f"hit_{site}": float(by_site.get(site, 0.0)) for site in ("pd", "prfaas")},
        "fetched_gb": float(rows.loc[across, "fetched_bytes"].sum()) / 1e9,
        "copied_gb": summary["scheduler"]["replicated_bytes"] / 1e9,
        "crossed_gb": summary["link"]["kv_bytes"] / 1e9,
    }


def compare(case: str, seeds: int, trace: str | None = None) -> dict[str, dict[str, float]]:
    """Medians without copies, with, and of the paired differences."""
    jobs = [(case, seed, share, trace) for seed in range(1, seeds + 1) for share in (0.0, SHARE)]
    runs: list[dict[str, float]] = list(Parallel(n_jobs=-1)(delayed(_run)(*job) for job in jobs))
    without, with_copies = runs[::2], runs[1::2]
    return {
        name: {
            "without": statistics.median(run[name] for run in without),
            "with": statistics.median(run[name] for run in with_copies),
            "difference": statistics.median(b[name] - a[name] for a, b in zip(without, with_copies, strict=True)),
        }
        for name in FIGURES
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.rebalance", description="Whether copies pay.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--trace", help="the Mooncake conversation trace")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found: dict[str, Any] = {case: compare(case, asked.seeds) for case in CASES if not asked.only or case in asked.only}
    if asked.trace:
        found["conversation"] = compare("", 1, asked.trace)
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for case, rows in found.items():
        print(case)
        for name, row in rows.items():
            print(f"  {name}: {row['without']:.5g} without, {row['with']:.5g} with, {row['difference']:+.3g}")


if __name__ == "__main__":
    main()
