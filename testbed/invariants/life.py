"""Every request has one life: none is lost or doubled, and what happens in it happens in its order."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from testbed.invariants.finding import Finding, Run, held, not_checked
from testbed.report.window import completed
from testbed.scheduler.api import PRFAAS

INSIDE: Final = ("arrive_s", "route_s", "prefill_start_s", "prefill_end_s", "landed_s", "admitted_s", "finished_s")
"""The system's own stamps, in the order in which they have to come."""

AROUND: Final = (
    ("sched_s", "send_s"),
    ("send_s", "arrive_s"),
    ("admitted_s", "first_token_s"),
    ("headers_s", "first_token_s"),
    ("first_token_s", "last_token_s"),
    ("last_token_s", "done_s"),
    ("finished_s", "done_s"),
)
"""The client's stamps among them, pairs of which the first comes first."""

LAST: Final = ("finished_s", "last_token_s")
"""As well where every token has a text: of a model's, the last that a client sees may come before the end."""

ROUNDING_S: Final = 1e-6
WIRE_WALL_S: Final = 0.001
"""Wall seconds by which stamps may differ on the wire, where several processes' meet, and scheduled times real ones."""


def conserved(run: Run) -> Finding:
    """Every request that was offered ends once: completed, with all its stamps and all the tokens that were asked for,
    or failed, with a reason.

    value: requests of which that is not so; bound: 0.
    """
    rows = run.requests
    scheduled = int(run.summary["requests"]["scheduled"])
    ok = completed(rows)
    missing = rows["output_tokens_asked"] - rows["output_tokens"]
    told_all = missing == 0 if run.scenario.backend == "timing" else missing >= 0  # a model may have said all it had
    whole = rows[list(INSIDE)].notna().all(axis=1) & told_all
    wrong = {
        "offered without a row, or a row without being offered": abs(scheduled - len(rows)),
        "of an id that another has": int(rows["request_id"].duplicated().sum()),
        "completed without all its stamps or tokens": int((ok & ~whole).sum()),
        "failed without a reason": int((~ok & (rows["error"] == "") & (rows["client_error"] == "")).sum()),
    }
    lost = sum(wrong.values())
    if not lost:
        return held("conserved", f"all {scheduled} requests completed or failed with a reason", 0, 0)
    named = ", ".join(f"{count} {what}" for what, count in wrong.items() if count)
    return Finding("conserved", "broken", lost, 0, f"requests are not conserved: {named}", "invalid")


def causal(run: Run) -> Finding:
    """No stamp of a request is before one that has to come first, and nothing crosses between the sites in less than
    the link's delay (jitter off, where its schedule leaves it alone): neither the order of a prefill nor its KV.

    value: the largest step back, model seconds; bound: rounding, on the wire 1 ms of wall time.
    """
    rows, link = run.requests, run.scenario.link
    if run.disturbed:
        return not_checked("causal", "a worker that was frozen catches up by its schedule, not by the clock")
    slack_s = WIRE_WALL_S * run.scenario.scale.time_scale if run.on_wire else ROUNDING_S
    pairs = [*pairwise(INSIDE), *AROUND, *([LAST] if run.scenario.backend == "timing" else [])]
    back_s, where = _farthest_back(run, pairs)
    if link.delay_s and link.schedule is None:
        least_s = link.delay_s - link.jitter_s
        remote = (rows["prefill_site"] == PRFAAS).to_numpy()
        for first, then in (("route_s", "prefill_start_s"), ("prefill_end_s", "landed_s")):
            took_s = (rows[then] - rows[first]).to_numpy(np.float64)[remote]
            early_s = float(np.nanmax(least_s - took_s, initial=-np.inf))
            if early_s > back_s:
                back_s, where = early_s, f"{then} after {first} across a link with a delay of {least_s:g} s"
    back_s = max(0.0, back_s)
    if back_s <= slack_s:
        return held("causal", "no stamp is before its cause", back_s, slack_s)
    sentence = f"a stamp is before its cause by {back_s:.6g} s: {where}"
    return Finding("causal", "broken", back_s, slack_s, sentence, "invalid")


def _farthest_back(run: Run, pairs: list[tuple[str, str]]) -> tuple[float, str]:
    worst_s, where = -np.inf, ""
    columns = {name: run.requests[name].to_numpy(np.float64) for pair in pairs for name in pair}
    for first, then in pairs:
        back = columns[first] - columns[then]
        if np.isnan(back).all():
            continue
        at = int(np.nanargmax(back))
        if back[at] > worst_s:
            worst_s = float(back[at])
            where = f"{then} before {first}, request {run.requests['request_id'].iloc[at]}"
    return worst_s, where
