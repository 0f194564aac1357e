"""Little's law on every stage of a run in virtual time: L = lambda W, from two counts that do not share their figures.

The *driver* counts: whenever a message passes it that moves a request from one stage to the next, it adds its own clock
to that passage. The area under N(t), the number in a stage, from the empty start to the empty end, is the sum of the
times at which requests left it less the sum of those at which they came: L = area / T. The *requests* count: lambda W =
(sum of sojourns by the stamps in the rows) / T.

What is independent: the clock (the driver's against the stamps that the machines wrote), the requests (those whose
messages passed against those that have a row), the way through (a message lost, doubled, late or of the wrong stage).
What is not: both are sums of differences of times, so for right stamps the law holds to rounding, at any load and in
overload too. It checks the accounting, not whether the run was in a steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from emulator.messages import Admitted, Announce, Finished, Landed, Prefilled

GATES: Final = ("arrive", "prefill_start", "prefill_end", "landed", "admitted", "finished")
"""The passages, in order; stage i lies between gates i and i + 1."""

STAGES: Final = ("queue", "prefill", "transfer", "admission", "decode")

TOLERANCE: Final = 1e-6
"""Of L, and of one request beside it: what rounding may leave of sums of 10^6 times of 10^6 s."""

GATE_OF: Final[dict[type, int]] = {Announce: 1, Prefilled: 2, Landed: 3, Admitted: 4, Finished: 5}
"""The kinds of message that take a request through a gate; most are none."""


@dataclass(slots=True)
class Passages:
    """What the driver counts, by gate. counts: passages; sums_s: the sum of the driver's clock at them; shape (6,)."""

    counts: list[int] = field(default_factory=lambda: [0] * len(GATES))
    sums_s: list[float] = field(default_factory=lambda: [0.0] * len(GATES))

    def passes(self, now_s: float, gate: int) -> None:
        """A message passes the driver at its `now_s` (model seconds); gate: the `GATE_OF` its kind, 0 an arrival."""
        self.counts[gate] += 1
        self.sums_s[gate] += now_s


def littles_law(passages: Passages, requests: pd.DataFrame, end_s: float) -> dict[str, Any]:
    """L and lambda W of every stage over 0 .. end_s (model seconds), from the driver's count and from the rows.

    requests: the request table of a run that ended empty. `holds` is None where the law cannot be checked: requests
    that were retried or did not complete leave a stage elsewhere than at its end. Else False names what is broken in
    `problems`.
    """
    clean = bool(((requests["status"] == "ok") & (requests["attempts"] == 1)).all())
    out: dict[str, Any] = {"holds": None, "tolerance": TOLERANCE, "problems": [], "stages": {}}
    if not len(requests) or not clean or end_s <= 0:
        return out
    stamps = [requests[f"{gate}_s"].to_numpy(dtype=np.float64) for gate in GATES]
    for i, stage in enumerate(STAGES):
        in_stage = (passages.sums_s[i + 1] - passages.sums_s[i]) / end_s
        sojourn_s = float((stamps[i + 1] - stamps[i]).sum())
        rate_rps, mean_s = len(requests) / end_s, sojourn_s / len(requests)
        out["stages"][stage] = {"mean_in_stage": in_stage, "rate_rps": rate_rps, "mean_sojourn_s": mean_s}
        if not abs(in_stage - rate_rps * mean_s) <= TOLERANCE * (1 + in_stage):  # a missing stamp breaks it, too
            out["problems"].append(
                f"Little's law is broken in {stage}: {in_stage:.6g} requests are in it by the driver's count, "
                f"lambda W by the requests' stamps is {rate_rps * mean_s:.6g}"
            )
    out["problems"] += _miscounted(passages.counts, len(requests))
    out["holds"] = not out["problems"]
    return out


def _miscounted(counts: Sequence[int], rows: int) -> list[str]:
    return [
        f"{count} requests passed {gate}, but there are rows for {rows}"
        for gate, count in zip(GATES, counts, strict=True)
        if count != rows
    ]
