"""`summary.json`: the figures of a load and the verdict on it, by the definitions of the metrics page.

The verdict is `invalid` when the meter failed (late clients or timers, a saturated machine, unshaped packets), `failed`
when the system did (requests that ended with an error), else `valid`. Figures of an invalid run are shown all the same,
and must not be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd

from testbed.report.changes import changes_of
from testbed.report.phases import phase_figures, scheduler_figures
from testbed.report.window import Targets, completed, window_figures
from traces.client_rows import FAILED, INVALID, PASS

EXIT_CODES: Final = {"valid": PASS, "failed": FAILED, "invalid": INVALID}
"""A command's, by the verdict."""

POLICY_FAILURES: Final = 0.01
"""A run in which the policy failed on this share of the requests says nothing about the policy."""


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
    cross_bytes: dict[str, int] | None = None  # of cross-traffic, by direction, headers included; not in wan_tx_bytes


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
    ok, slo = completed(requests), Targets(slo_ttft_s, slo_tpot_s)
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
    changes, present = changes_of(totals, requests), totals.get("threshold_tokens")
    summary: dict[str, Any] = {
        "verdict": verdict,
        "requests": {
            "scheduled": scheduled,
            "completed": int(ok.sum()),
            "failed": failed,
            "by_error": by_error,
            "in_window": int(requests["in_window"].sum()),
            "retried": int((requests["attempts"].fillna(0) > 1).sum()),
        },
        "window_s": [warmup_s, duration_s],
        **window_figures(requests, warmup_s, duration_s, slo),
        "link": {
            "asked": link.asked,
            "measured": link.measured,
            "wan_tx_bytes": link.wan_tx_bytes,
            "kv_bytes": link.kv_bytes,
            "framing": link.wan_tx_bytes / link.kv_bytes - 1 if link.kv_bytes else None,
            "direct_packets": link.direct_packets,
            "retransmits": link.retransmits,
            "cross_bytes": link.cross_bytes,
            # Of a late writer or a reconnection, too: by themselves no fault.
            "refused_frames": totals.get("refused_frames", 0),
        },
        "scheduler": scheduler_figures(changes, present, expected["optima"]),
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
        "phases": phase_figures(requests, changes, present, expected["optima"], warmup_s=warmup_s, slo=slo),
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
