"""After a step of the link the system comes back within bounded time: what has piled up at the senders is gone."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from netem.fluid import TCP_EFFICIENCY
from testbed.invariants.finding import Finding, Run, at_most, not_checked

Floats = np.ndarray[Any, np.dtype[np.float64]]

TO_PD: Final = "to_pd"


def recovered(run: Run) -> Finding:
    """From every step of the link on, until the next one, the time until what waits at the senders (on the wire also
    in the shaper) takes no longer to cross than `backlog_s` at the link's new rate, and keeps so.

    Of an outage there is no recovery; from its end on there is. A step that the next one follows sooner than the bound,
    and after which it had not recovered by then, says nothing.
    value: the longest, model seconds; bound: `bounds.recover_s` (120), with a backlog of `bounds.backlog_s` (20).
    """
    timeline = run.timeline
    of_link = timeline["direction"] == TO_PD
    steps = timeline[(timeline["event"] == "link") & of_link]
    samples = timeline[timeline["event"].isna() & of_link]
    if steps.empty:
        return not_checked("recovered", "the link did not step")
    bound, means = run.bound("recover_s")
    backlog_s, _ = run.bound("backlog_s")
    times = samples["t_s"].to_numpy(np.float64)
    waits = samples[["unsent_bytes", "backlog_bytes"]].astype(float).fillna(0.0).sum(axis=1).to_numpy(np.float64)
    starts = steps["t_s"].to_numpy(np.float64)
    ends = np.append(starts[1:], times[-1] if times.size else starts[-1])
    worst_s, words, judged = 0.0, "", 0
    for start_s, end_s, after in zip(starts.tolist(), ends.tolist(), steps["after"].astype(float), strict=True):
        inside = (times > start_s) & (times <= end_s)
        if after <= 0 or not inside.any():
            continue
        behind = np.flatnonzero(waits[inside] * 8 / (TCP_EFFICIENCY * after) > backlog_s)
        took_s = float(times[inside][behind[-1]] - start_s) if behind.size else 0.0
        back = not behind.size or behind[-1] < inside.sum() - 1
        if not back and end_s - start_s <= bound:
            continue
        judged += 1
        if took_s >= worst_s:
            worst_s = took_s
            how = "after" if back else "it had not, after"
            words = (
                f"what waited for the link took at most {backlog_s:g} s to cross again: {how} {took_s:.3g} s "
                f"(the step to {after / 1e9:.3g} Gbps at {start_s:.6g} s)"
            )
    if not judged:
        return not_checked("recovered", "no step of the link was followed by time enough to recover")
    return at_most("recovered", worst_s, bound, means, words)
