"""What the faults of the load make of it: a clock that stands still, and clients that leave. Pure; the same for both
clocks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from testbed.chaos.experiment import Experiment
from testbed.chaos.faults import LoadStalls
from traces.load import Trace


def stalled(trace: Trace, experiment: Experiment) -> Trace:
    """The trace with the requests of every stall moved to its end, in their order."""
    stalls = [fault for fault in experiment.method if isinstance(fault, LoadStalls)]
    if not stalls:
        return trace
    requests = trace.requests
    for stall in stalls:
        requests = [
            replace(one, arrival_s=stall.healed_s) if stall.at_s <= one.arrival_s < stall.healed_s else one
            for one in requests
        ]
    return replace(trace, requests=requests)


def leaving(waiting: Sequence[str], fraction: float, chance: random.Random) -> list[str]:
    """Whose clients leave: `fraction` of those that wait, rounded up, in their order."""
    chosen = set(chance.sample(range(len(waiting)), math.ceil(fraction * len(waiting))))
    return [one for index, one in enumerate(waiting) if index in chosen]
