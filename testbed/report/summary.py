"""`summary.json`: the figures of a load and the verdict on it, by the definitions of the metrics page.

The verdict is `invalid` when the meter failed (late clients or timers, a saturated machine, unshaped packets), `failed`
when the system did (requests that ended with an error), else `valid`. Figures of an invalid run are shown all the same,
and must not be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.report.rows import PARTS
from traces.client_rows import FAILED, INVALID, PASS

EXIT_CODES: Final = {"valid": PASS, "failed": FAILED, "invalid": INVALID}
"""A command's, by the verdict."""

TPOT_TOLERANCE: Final = 0.01
"""In the paper's scenario an emulated decode step *is* the SLO's: met within this tolerance of the stamps."""

POLICY_FAILURES: Final = 0.01
"""A run in which the policy failed on this share of the requests says nothing about the policy."""

Stats = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Meter:
    """How well the run was measured, wall units, and the bounds it has to keep."""

    client_late_p99_s: float | None
    timer_late_p99_s: float
    timer_late_max_s: float
    gateway_late_p99_s: float
    cpu_mean: float | None  # share of all cores
    cpu_max: float | None
    late_bound_s: float
    cpu_bound: float
    faults: Sequence[str] = field(default_factory=tuple)

    def problems(self) -> list[str]:
        """What makes the run invalid, a sentence each."""
        out = list(self.faults)
        named = {
            "requests were sent late: p99 of t_send - t_sched": self.client_late_p99_s,
            "workers' timers fired late: p99": self.timer_late_p99_s,
            "the gateway's event loop lagged: p99": self.gateway_late_p99_s,
        }
        for what, late_s in named.items():
            if late_s is not None and late_s > self.late_bound_s:
                out.append(f"{what} is {late_s * 1e3:.1f} ms of wall time, the bound is {self.late_bound_s * 1e3:g} ms")
        if self.cpu_mean is not None and self.cpu_mean > self.cpu_bound:
            out.append(
                f"the machine was {self.cpu_mean:.0%} busy, the bound is {self.cpu_bound:.0%}: believe no timing"
            )
        return out


PERFECT_METER: Final = Meter(None, 0.0, 0.0, 0.0, None, None, late_bound_s=0.0, cpu_bound=1.0)
"""Virtual time is never late."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The link during the load: bytes on the wire are wall bytes."""

    asked: dict[str, Any]
    measured: dict[str, Any] | None
    wan_tx_bytes: int  # KV class towards the pd site, headers included
    kv_bytes: int  # KV from the prfaas site that landed, bytes on the wire
    direct_packets: int
    retransmits: int


def stats(values: pd.Series) -> Stats:
    """mean, p50, p90, p99 of the values there are; None without any."""
    given = values.dropna().to_numpy(dtype=np.float64)
    if not given.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(given, [50, 90, 99])
    return {"mean": float(given.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def summarise(
    requests: pd.DataFrame,
    *,
    scheduled: int,
    warmup_s: float,
    duration_s: float,
    slo_ttft_s: float,
    slo_tpot_s: float,
    meter: Meter,
    link: LinkFigures,
    totals: dict[str, Any],
    expected: dict[str, Any],
    broken: Sequence[str] = (),
) -> dict[str, Any]:
    """The summary of one load.

    requests: the request table. totals: what the gateway said at the end. expected: the closed form. broken: what of
    the system is known to have failed, a sentence each.
    """
    window_s = duration_s - warmup_s
    ok = (requests["status"] == "ok") & (requests["client_error"] == "")
    in_window = requests["in_window"]
    site = requests["prefill_site"]
    remote = site == "prfaas"
    measured = in_window & ok
    done_s, landed_s = requests["done_s"], requests["landed_s"]
    completed_inside = ok & (done_s >= warmup_s) & (done_s < duration_s)
    too_slow = requests["tpot_s"] > slo_tpot_s * (1 + TPOT_TOLERANCE)
    good = int((measured & (requests["ttft_s"] <= slo_ttft_s) & ~too_slow).sum())
    landed = remote & (landed_s >= warmup_s) & (landed_s < duration_s)
    routed = in_window & (site != "")

    def of(column: str, rows: pd.Series = measured) -> Stats:  # a column at a time: a million rows are large
        return stats(requests.loc[rows, column])

    def split(rows: pd.Series) -> dict[str, Stats]:
        return {part: of(f"ttft_{part}_s", rows) for part in PARTS}

    by_error = _by_error(requests.loc[~ok, ["error", "client_error"]])
    failed = int((~ok).sum())
    verdict = _verdict(
        meter,
        link,
        scheduled=scheduled,
        seen=len(requests),
        completed=int(ok.sum()),
        failed=failed,
        by_error=by_error,
        broken=broken,
        policy_failures=sum(totals["policy_errors"].values()),
    )
    ttft = of("ttft_s")
    summary: dict[str, Any] = {
        "verdict": verdict,
        "requests": {
            "scheduled": scheduled,
            "completed": int(ok.sum()),
            "failed": failed,
            "by_error": by_error,
            "in_window": int(in_window.sum()),
            "retried": int((requests["attempts"].fillna(0) > 1).sum()),
        },
        "window_s": [warmup_s, duration_s],
        "ttft_s": ttft,
        "tpot_s": of("tpot_s"),
        "e2e_s": of("e2e_s"),
        "ttft_split_s": {
            "overall": split(measured),
            "prfaas": split(measured & remote),
            "pd": split(measured & (site == "pd")),
        },
        "ttft_by_route_s": {name: of("ttft_s", measured & (site == name)) for name in ("prfaas", "pd")},
        "offered_rps": float(in_window.sum() / window_s),
        "throughput_rps": float(completed_inside.sum() / window_s),
        "goodput_rps": good / window_s,
        "slo": {
            "ttft_p90_s": slo_ttft_s,
            "tpot_s": slo_tpot_s,
            "met_fraction": good / int(in_window.sum()) if in_window.any() else None,
            "ttft_p90_met": ttft["p90"] is not None and ttft["p90"] <= slo_ttft_s,
        },
        "offload_fraction": float(remote[routed].mean()) if routed.any() else None,
        "egress_bps": float(requests.loc[landed, "kv_bytes"].sum() * 8 / window_s),
        "egress_queue_s": stats((landed_s - requests["prefill_end_s"])[measured & remote]),
        "link": {
            "asked": link.asked,
            "measured": link.measured,
            "wan_tx_bytes": link.wan_tx_bytes,
            "kv_bytes": link.kv_bytes,
            "framing": link.wan_tx_bytes / link.kv_bytes - 1 if link.kv_bytes else None,
            "direct_packets": link.direct_packets,
            "retransmits": link.retransmits,
            # Of a late writer or a reconnection, too: by themselves no fault.
            "refused_frames": totals.get("refused_frames", 0),
        },
        "scheduler": _scheduler(requests, totals, expected),
        "policy_errors": totals["policy_errors"],
        "policy_error": _first_text(requests["policy_error"]),
        "meter": {
            "client_late_p99_s": meter.client_late_p99_s,
            "timer_late_p99_s": meter.timer_late_p99_s,
            "timer_late_max_s": meter.timer_late_max_s,
            "gateway_late_p99_s": meter.gateway_late_p99_s,
            "cpu_mean": meter.cpu_mean,
            "cpu_max": meter.cpu_max,
            "late_bound_s": meter.late_bound_s,
            "cpu_bound": meter.cpu_bound,
            "time_scale": totals["time_scale"],  # None in virtual time
        },
        "closed_form": expected,
        "phases": [],
    }
    return summary


def _first_text(column: pd.Series) -> str | None:
    """The first text that is not empty, in the table's order."""
    given = column[column.fillna("") != ""]
    return str(given.iloc[0]) if len(given) else None


def _by_error(failed: pd.DataFrame) -> dict[str, int]:
    """Failures by kind: the system's own word where it has one, else the client's."""
    own, client = failed["error"].astype(str), failed["client_error"].astype(str)
    kinds = own.where(own != "", client).replace("", "unknown")
    return {str(kind): int(count) for kind, count in kinds.value_counts().sort_index().items()}


def _scheduler(requests: pd.DataFrame, totals: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    thresholds = requests[["route_s", "threshold_tokens"]].sort_values("route_s")["threshold_tokens"].dropna()
    optimum, present = expected.get("threshold_tokens"), totals.get("threshold_tokens")
    usable = present is not None and optimum is not None and 0 < optimum < float("inf")
    return {
        "threshold_tokens": present,
        "threshold_changes": int((thresholds.diff().fillna(0) != 0).sum()),
        "role_changes": 0,
        "settle_s": None,
        "threshold_over_optimum": present / optimum if usable and present is not None and optimum is not None else None,
    }


def _verdict(
    meter: Meter,
    link: LinkFigures,
    *,
    scheduled: int,
    seen: int,
    completed: int,
    failed: int,
    by_error: dict[str, int],
    broken: Sequence[str],
    policy_failures: int,
) -> dict[str, Any]:
    invalid = meter.problems()
    if link.direct_packets:
        invalid.append(f"{link.direct_packets} packets passed the link unshaped")
    if link.wan_tx_bytes < link.kv_bytes:
        invalid.append(f"{link.kv_bytes} bytes of KV landed, but only {link.wan_tx_bytes} bytes crossed the link")
    if seen != scheduled:
        invalid.append(f"{scheduled} requests were scheduled, but there are rows for {seen}")
    failures = list(broken)
    if policy_failures >= POLICY_FAILURES * max(1, seen):
        failures.append(f"the policy failed on {policy_failures} of {seen} requests: a fallback decided these")
    if failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in by_error.items())
        failures.append(f"{failed} of {scheduled} requests did not complete: {kinds}")
    if invalid:
        return {"status": "invalid", "reasons": invalid + failures}
    if failures:
        return {"status": "failed", "reasons": failures}
    return {"status": "valid", "reasons": []}
