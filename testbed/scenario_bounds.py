"""A scenario's `bounds`: how stable its author wants it to be. What is given is promised: a run that breaks it has
failed. What is not given is still checked, against the defaults of `testbed.invariants`, and only reported.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from testbed.scenario_workload import Number, Part, Positive, Whole


class Bounds(Part):
    """Model seconds and counts; null for what the scenario does not promise.

    drain_s: after a burst, and after the last arrival, until the queues are what they were. threshold_changes: in any
    60 s. role_changes: in any 600 s. cycle: the autocorrelation at which a threshold that moves is going in circles.
    recover_s: after a step of the link, until what waits for it takes no longer to cross than `backlog_s`. wait_s: the
    longest that any request waits for its first token, its own prefill not counted.
    """

    drain_s: Positive | None = None
    threshold_changes: Annotated[Whole, Field(ge=0)] | None = None
    role_changes: Annotated[Whole, Field(ge=0)] | None = None
    cycle: Annotated[Number, Field(gt=0, le=1)] | None = None
    recover_s: Positive | None = None
    backlog_s: Positive | None = None
    wait_s: Positive | None = None
