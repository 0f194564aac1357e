"""What the link did, from the files that its agent writes anyway: a sample of its counters every quarter of a second
(`link-counters.csv`) and each step with the time at which the kernel had it (`link-applied.jsonl`).

Nothing is asked of the agent for it. Here the wall's rates and delays become the model's.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from netem.link import DIRECTIONS
from testbed.live.tail import Tail
from testbed.scenario import Scale

COUNTERS_BACK_BYTES: Final = 512 << 10
STEPS_BACK_BYTES: Final = 64 << 10
TOGETHER_NS: Final = 250_000_000
"""Both directions' steps of one cause are made one after the other within this time."""
SAID: Final = ("rate_bps", "delay_s", "jitter_s", "loss", "outage", "per_flow_bps")


class Sample(NamedTuple):
    """Of one direction, model units. set_bps: 0 in an outage. measured_bps: on the wire, headers included, since the
    sample before; None for the first."""

    t_ns: int
    direction: str
    set_bps: float | None
    measured_bps: float | None


class Step(NamedTuple):
    """A step of one direction, or of both at once. before, after: the link's states, model units; None: the first."""

    t_ns: int
    directions: tuple[str, ...]
    layer: str | None
    before: dict[str, Any] | None
    after: dict[str, Any]


class LinkLog:
    """Reads on, from `since_ns` (CLOCK_MONOTONIC). folder: the state directory.

    `states`: by direction, what the link does now, model units; empty where there is no agent.
    """

    def __init__(self, folder: Path, scale: Scale, since_ns: int) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self._scale, self._since_ns = scale, since_ns
        self._counters = Tail(folder / "link-counters.csv", COUNTERS_BACK_BYTES)
        self._steps = Tail(folder / "link-applied.jsonl", STEPS_BACK_BYTES)
        self._before: dict[str, tuple[int, int]] = {}  # direction -> when, KV bytes

    def samples(self) -> list[Sample]:
        """The samples since the last call, in order."""
        made = []
        for row in csv.reader(self._counters.lines()):
            if len(row) < 7 or row[1] not in DIRECTIONS:  # the header
                continue
            t_ns, direction, sent_bytes = int(row[0]), row[1], int(row[2])
            then_ns, then = self._before.get(direction, (0, 0))
            self._before[direction] = (t_ns, sent_bytes)
            if t_ns <= self._since_ns:
                continue
            counts_on = then_ns and sent_bytes >= then and t_ns > then_ns
            measured = (sent_bytes - then) * 8e9 / (t_ns - then_ns) if counts_on else None
            made.append(
                Sample(
                    t_ns,
                    direction,
                    self._scale.model_bps(float(row[6])) if row[6] else None,
                    None if measured is None else self._scale.model_bps(measured),
                )
            )
        return made

    def steps(self) -> list[Step]:
        """The steps since the last call, in order; what both directions did together is one."""
        made: list[Step] = []
        for line in self._steps.lines():
            row = orjson.loads(line)
            direction, t_ns = row["direction"], row["t_applied_ns"]
            before, after = self.states.get(direction), self._state(row["state"])
            self.states[direction] = after
            if t_ns <= self._since_ns or before == after:
                continue
            step = Step(t_ns, (direction,), row["layer"], before, after)
            last = made[-1] if made else None
            if last is not None and last[2:] == step[2:] and t_ns - last.t_ns < TOGETHER_NS:
                made[-1] = last._replace(directions=(*last.directions, direction))
            else:
                made.append(step)
        return made

    def _state(self, wall: dict[str, Any]) -> dict[str, Any]:
        state = {key: wall[key] for key in SAID}
        state["rate_bps"] = self._scale.model_bps(wall["rate_bps"])
        if wall["per_flow_bps"] is not None:
            state["per_flow_bps"] = self._scale.model_bps(wall["per_flow_bps"])
        for key in ("delay_s", "jitter_s"):
            state[key] = wall[key] * self._scale.time_scale
        return state
