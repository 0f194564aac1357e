"""The figures of a window of time, from the request table: the same formulas for a whole load and for a phase of it.

Latencies are of the requests that were scheduled in the window and completed whenever, throughput is of those that
completed in it whenever they came, and egress of the bytes that landed in it: KV of offloaded requests, and prefixes
that local prefills fetched from the remote site, which have landed when the prefill starts. Prefixes copied ahead of
demand are no request's, and counted in `scheduler` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.report.rows import PARTS

TPOT_TOLERANCE: Final = 0.01
"""In the paper's scenario an emulated decode step *is* the SLO's: met within this tolerance of the stamps."""

Stats = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Targets:
    """What users were promised, model seconds: the P90 TTFT, and the time a token."""

    ttft_p90_s: float
    tpot_s: float


def stats(values: pd.Series) -> Stats:
    """mean, p50, p90, p95, p99 of the values there are; None without any."""
    given = values.dropna().to_numpy(dtype=np.float64)
    if not given.size:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    points = np.percentile(given, [50, 90, 95, 99]).tolist()
    return {"mean": float(given.mean()), **dict(zip(("p50", "p90", "p95", "p99"), points, strict=True))}


def completed(requests: pd.DataFrame) -> pd.Series:
    """Which requests ended well, for the system and for the client."""
    return (requests["status"] == "ok") & (requests["client_error"] == "")


def window_figures(requests: pd.DataFrame, start_s: float, end_s: float, slo: Targets) -> dict[str, Any]:
    """Latencies (s), rates (req/s), the SLO, offloading and egress of start_s .. end_s, model seconds.

    requests: the whole request table. Rates are None for a window without a length.
    """
    window_s = end_s - start_s
    ok, site = completed(requests), requests["prefill_site"]
    here = (requests["sched_s"] >= start_s) & (requests["sched_s"] < end_s)
    remote, measured = site == "prfaas", here & ok
    done_s, landed_s = requests["done_s"], requests["landed_s"]
    completed_inside = ok & (done_s >= start_s) & (done_s < end_s)
    too_slow = requests["tpot_s"] > slo.tpot_s * (1 + TPOT_TOLERANCE)
    good = int((measured & (requests["ttft_s"] <= slo.ttft_p90_s) & ~too_slow).sum())
    landed = remote & (landed_s >= start_s) & (landed_s < end_s)
    begun_s = requests["prefill_start_s"]
    fetched = (site == "pd") & (requests["cache_site"] == "prfaas") & (begun_s >= start_s) & (begun_s < end_s)
    routed = here & (site != "")

    def of(column: str, rows: pd.Series = measured) -> Stats:  # a column at a time: a million rows are large
        return stats(requests.loc[rows, column])

    def split(rows: pd.Series) -> dict[str, Stats]:
        return {part: of(f"ttft_{part}_s", rows) for part in PARTS}

    def rate(count: float) -> float | None:
        return float(count) / window_s if window_s > 0 else None

    ttft = of("ttft_s")
    return {
        "ttft_s": ttft,
        "tpot_s": of("tpot_s"),
        "e2e_s": of("e2e_s"),
        "ttft_split_s": {
            "overall": split(measured),
            "prfaas": split(measured & remote),
            "pd": split(measured & (site == "pd")),
        },
        "ttft_by_route_s": {name: of("ttft_s", measured & (site == name)) for name in ("prfaas", "pd")},
        "offered_rps": rate(here.sum()),
        "throughput_rps": rate(completed_inside.sum()),
        "goodput_rps": rate(good),
        "slo": {
            "ttft_p90_s": slo.ttft_p90_s,
            "tpot_s": slo.tpot_s,
            "met_fraction": good / int(here.sum()) if here.any() else None,
            "ttft_p90_met": ttft["p90"] is not None and ttft["p90"] <= slo.ttft_p90_s,
        },
        "offload_fraction": float(remote[routed].mean()) if routed.any() else None,
        "egress_bps": rate((requests.loc[landed, "kv_bytes"].sum() + requests.loc[fetched, "fetched_bytes"].sum()) * 8),
        "egress_queue_s": stats((landed_s - requests["prefill_end_s"])[measured & remote]),
    }
