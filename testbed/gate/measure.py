"""One run for a gate, in whatever process: its summary, what was found of its invariants, and what identifies it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.gate.fingerprints import like
from testbed.gate.jobs import Job, Measured
from testbed.gate.suite import LAMBDA_MAX
from testbed.points import OVERLOADED, backlog_growth
from testbed.report.summary import POLICY_FAILURES
from testbed.scenario import Scenario, ScenarioError
from testbed.scheduler.model import ModelError
from testbed.simulate import Result, simulate, write
from traces.request import TraceError

REFUSALS: Final = (ScenarioError, TraceError, ModelError)
"""What cannot be run, in words for people."""

STAMPS: Final = ("arrive_s", "prefill_start_s", "prefill_end_s", "landed_s", "admitted_s", "finished_s")


def measure(job: Job) -> Measured:
    """Run a job in virtual time. Raises one of REFUSALS."""
    started_s = time.perf_counter()
    if job.folder is not None:
        result = simulate(at_rate(job.scenario, job.rates_rps[-1]) if job.rates_rps else job.scenario)
        write(result, Path(job.folder))
        measured = measured_of(result)
    else:
        measured = _at_rates(job) if job.rates_rps else measured_of(simulate(job.scenario))
    same = like(job.scenario, job.rates_rps, measured.pop("trace_sha256"))
    return {**measured, "like": same, "wall_s": time.perf_counter() - started_s}


def measured_of(result: Result) -> Measured:
    """What a gate keeps of a run in virtual time."""
    summary = dict(result.summary)
    findings = summary.pop("invariants", [])
    for bulky in ("closed_form", "littles_law", "meter"):
        summary.pop(bulky, None)
    return {
        "status": summary["verdict"]["status"],
        "reasons": summary["verdict"]["reasons"],
        "summary": summary,
        "findings": [*own_findings(summary), *(_finding(one) for one in findings)],
        "trace_sha256": result.trace.rows_sha256,
        "digest": digest(result.requests),
        "requests": len(result.requests),
    }


def own_findings(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What a gate itself holds against a run: requests that failed, and a policy that failed."""
    requests, errors = summary["requests"], sum(summary["policy_errors"].values())
    kinds = ", ".join(f"{kind} {count}" for kind, count in requests["by_error"].items())
    most = POLICY_FAILURES * requests["scheduled"]
    return [
        {
            "name": "requests complete",
            "status": "broken" if requests["failed"] else "held",
            "value": float(requests["failed"]),
            "bound": 0.0,
            "sentence": f"{requests['failed']} of {requests['scheduled']} requests failed ({kinds or 'none'})",
            "promised": True,
        },
        {
            "name": "policy decides",
            "status": "broken" if errors > most else "held",
            "value": float(errors),
            "bound": most,
            "sentence": f"the policy failed {errors} times: {summary.get('policy_error') or 'a fallback decided'}",
            "promised": True,
        },
    ]


def _finding(one: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: one[key] for key in ("name", "status", "value", "bound", "sentence")},
        "promised": one["means"] != "note",
    }


def digest(requests: pd.DataFrame) -> str:
    """The same for runs in which every request went the same way at the same times."""
    whole = hashlib.sha256()
    for column in STAMPS:
        whole.update(np.ascontiguousarray(requests[column].to_numpy(dtype=np.float64)).tobytes())
    for column in ("prefill_node", "decode_node", "reason"):
        codes, names = pd.factorize(requests[column].astype(str))
        whole.update(codes.astype(np.int32).tobytes() + "\n".join(map(str, names)).encode())
    return whole.hexdigest()


def at_rate(scenario: Scenario, rate_rps: float) -> Scenario:
    """The scenario at another rate."""
    load = {"rate_rps": rate_rps, "load_fraction": None}
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update=load)})


def _at_rates(job: Job) -> Measured:
    """Every rate in turn; the first run's identity, findings of all, and the rate at which the SLO is reached."""
    runs, ttft_s, over = [], [], []
    for rate_rps in job.rates_rps:
        result = simulate(at_rate(job.scenario, rate_rps))
        runs.append(measured_of(result))
        ttft_s.append(result.summary["ttft_s"]["p90"])
        over.append(_grows(result) or runs[-1]["status"] != "valid")
        del result
    limit_s = job.scenario.slo.ttft_p90_s
    worst = max(runs, key=lambda run: ("valid", "failed", "invalid").index(run["status"]))
    together = [
        max(
            (run["findings"][i] for run in runs), key=lambda one: ("not_checked", "held", "broken").index(one["status"])
        )
        for i in range(len(runs[0]["findings"]))
    ]
    return {
        **runs[0],
        "status": worst["status"],
        "reasons": worst["reasons"],
        "summary": {LAMBDA_MAX: lambda_max_rps(job.rates_rps, ttft_s, over, limit_s)},
        "findings": together,
        "digest": hashlib.sha256("".join(run["digest"] for run in runs).encode()).hexdigest(),
        "requests": sum(run["requests"] for run in runs),
        "load": {"rates_rps": list(job.rates_rps), "ttft_p90_s": ttft_s},
    }


def _grows(result: Result) -> bool:
    workload, requests = result.scenario.workload, result.requests
    arrive_s, first_s = (requests[name].to_numpy(dtype=np.float64) for name in ("sched_s", "first_token_s"))
    return backlog_growth(arrive_s, first_s, workload.warmup_s, workload.duration_s) > OVERLOADED


def lambda_max_rps(
    rates_rps: Sequence[float], ttft_p90_s: Sequence[float | None], over: Sequence[bool], slo_s: float
) -> float:
    """The rate at which P90 TTFT reaches the SLO, requests/s.

    Between the last of the rates (rising) up to which every run keeps the SLO and the next one, ln TTFT is taken to be
    linear in the rate. over: whether a run's queues grow or requests failed: it then keeps no SLO, and the last good
    rate is the answer. The first rate when none is good, the last when all are: nothing is known beyond.
    """
    for i, (ttft_s, beyond) in enumerate(zip(ttft_p90_s, over, strict=True)):
        if not beyond and ttft_s is not None and ttft_s <= slo_s:
            continue
        before_s = ttft_p90_s[i - 1] if i else None
        if before_s is None or ttft_s is None or ttft_s <= slo_s:
            return rates_rps[max(0, i - 1)]
        share = math.log(slo_s / before_s) / math.log(ttft_s / before_s)
        return rates_rps[i - 1] + share * (rates_rps[i] - rates_rps[i - 1])
    return rates_rps[-1]
