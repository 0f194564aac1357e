"""What a fault comes to: for the link's agent a layer in wall units, for a worker one order.

Experiments and whoever disturbs a testbed by hand (`testbed.live`) both give these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from emulator.messages import Hinder
from testbed.chaos import faults
from testbed.scenario import Scale, Scenario


def wall_steps(fault: Any, scale: Scale) -> list[tuple[float, dict[str, Any]]]:
    """A link fault's layer in wall units."""
    return [(scale.wall_s(at_s), wall_state(said, scale)) for at_s, said in faults.layer_steps(fault)]


def wall_state(said: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """What is said of the link in model units, as this machine's wire has it."""
    state = dict(said)
    if "rate_bps" in state:
        state["rate_bps"] = scale.wall_bps(state["rate_bps"])
    for key in ("delay_s", "jitter_s"):
        if key in state:
            state[key] = scale.wall_s(state[key])
    return state


def hinder(held: Iterable[Any], scenario: Scenario) -> Hinder:
    """The faults that a worker's process has at a time as one message; none heal it."""
    slowdown, fraction = 1.0, 0.0
    for fault in held:
        if isinstance(fault, faults.SlowWorker):
            slowdown *= fault.factor
        else:
            fraction = max(fraction, fault.fraction)
    return Hinder(slowdown, round(fraction * scenario.transport.landing_bytes))
