"""Two accounts of the same bytes agree: what the requests made, and what the link carried."""

from __future__ import annotations

from typing import Final

import numpy as np

from testbed.assemble import profiles
from testbed.invariants.finding import Finding, Run, held, not_checked
from testbed.lengths import hardware
from testbed.report.window import completed
from testbed.scheduler.api import PD, PRFAAS

ROUNDING_BYTES: Final = 2.0
"""A transfer: its bytes are whole. On the wire each of its pieces is, in wall bytes."""


def bytes_conserved(run: Run) -> Finding:
    """A completed request's KV is S_kv of what was computed of it, and what landed from the remote site is what these
    requests made there, what local prefills fetched, and what was copied ahead of demand.

    Retried and failed requests leave bytes behind that no row has: with them, no less than that has landed.
    value: landed / made - 1; bound: rounding (2 bytes a transfer; on the wire a wall byte a piece besides).
    """
    rows = run.requests
    if run.disturbed:
        return not_checked("bytes", "a worker that is killed takes its counters along")
    if wrong := _made_otherwise(run):
        return Finding("bytes", "broken", None, None, wrong, "invalid")
    ok = completed(rows)
    away, fetched = rows["prefill_site"] == PRFAAS, (rows["prefill_site"] == PD) & (rows["cache_site"] == PRFAAS)
    crossed = float(rows.loc[ok & away, "kv_bytes"].sum() + rows.loc[ok & fetched, "fetched_bytes"].sum())
    copies = run.timeline[run.timeline["event"] == "replicated"]
    copies = copies[copies["node"].astype(str).str.startswith("pd-")]
    crossed += float(copies["after"].astype(float).sum())
    transfers = int((ok & (away | fetched)).sum()) + len(copies)
    landed, slack = float(run.summary["link"]["kv_bytes"]), transfers * ROUNDING_BYTES
    if run.on_wire:
        scale = run.scenario.scale.byte_scale
        landed /= scale
        slack += transfers * run.scenario.pieces(run.scenario.deployments[0], "prfaas") / scale
    clean = bool(ok.all()) and bool((rows["attempts"] <= 1).all())
    apart = landed - crossed
    value, bound = (apart / crossed if crossed else 0.0), (slack / crossed if crossed else 0.0)
    words = f"{landed:,.0f} bytes of KV landed from the remote site, requests account for {crossed:,.0f}"
    if abs(apart) <= slack or (not clean and apart > 0):
        return held("bytes", words if clean else f"{words}; some were tried more than once", value, bound)
    return Finding("bytes", "broken", value, bound, words, "invalid")


def _made_otherwise(run: Run) -> str:
    """What is wrong with the rows' own bytes; empty for nothing."""
    if run.scenario.backend != "timing":  # a model's KV is what it is
        return ""
    rows, ok = run.requests, completed(run.requests).to_numpy()
    tokens = (rows["input_tokens"] - rows["cached_tokens"]).to_numpy(np.float64)
    made, sites = rows["kv_bytes"].to_numpy(np.float64), rows["prefill_site"]
    for site, profile in profiles(run.scenario, run.scenario.deployments[0]).items():
        here = np.flatnonzero(ok & (sites == site).to_numpy())
        if not here.size:
            continue
        due = hardware(profile).s_kv(np.maximum(tokens[here], 1.0))
        off = np.abs(made[here] - due)
        at = int(off.argmax())
        if off[at] > ROUNDING_BYTES:
            return (
                f"request {rows['request_id'].iloc[here[at]]} made {made[here[at]]:,.0f} bytes of KV at {site}, S_kv "
                f"of its {tokens[here[at]]:,.0f} uncached tokens is {due[at]:,.0f}"
            )
    return ""
