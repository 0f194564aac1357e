"""The link's steps during a load on the wire, by its phases or its schedule, asked of the shaper's agent in their time.

A thread beside the load waits on the monotonic clock; what is noted down is when the kernel had the new rate, not when
it was asked. The link gets back what it had, however the load ends.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from netem.link import DIRECTIONS
from testbed import linkctl
from testbed.launch import client
from testbed.launch.state import StateDir, TestbedError
from testbed.link_schedule import link_changes
from testbed.scenario import Scenario

JOIN_S: Final = 2 * client.TIMEOUT_S
"""Wall seconds in which a step that is under way when the load ends is over."""


class LinkSteps:
    """A context: while it is open, the link does what `scenario` says. t0_ns: the load's t = 0, monotonic.

    Read when it is closed: `events`, a row of the timeline a step and direction (model seconds and bits/s), and
    `faults`, a sentence for each step that could not be had. Raises TestbedError on entering when the agent is gone.
    """

    def __init__(self, scenario: Scenario, state: StateDir, t0_ns: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self._scenario, self._state, self._t0_ns = scenario, state, t0_ns
        self._steps = link_changes(scenario)
        self._before: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="link-steps", daemon=True)

    def __enter__(self) -> LinkSteps:
        if self._steps:
            asked = client.agent(self._state).get("/link")
            self._before = {one: {"rate_bps": asked[one]["asked"]["rate_bps"]} for one in DIRECTIONS}
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._steps:
            return
        self._stop.set()
        self._thread.join(JOIN_S)
        try:
            client.agent(self._state).put("/link", self._before)
        except TestbedError as error:
            self.faults.append(f"the link was left at the rate of its last step: {error}")

    def _follow(self) -> None:
        scale = self._scenario.scale
        now_bps = {one: scale.model_bps(self._before[one]["rate_bps"]) for one in DIRECTIONS}
        for step in self._steps:
            due_ns = self._t0_ns + round(step.at_s / scale.time_scale * 1e9)
            if self._stop.wait(max(0.0, (due_ns - time.monotonic_ns()) * 1e-9)):
                return
            try:
                answer = linkctl.change(self._scenario, self._state, None, rate_bps=step.rate_bps)
            except TestbedError as error:
                self.faults.append(f"the link did not step to {step.rate_bps / 1e9:g} Gbps for {step.trigger}: {error}")
                continue
            for direction in DIRECTIONS:
                applied_s = (answer[direction]["applied"]["t_applied_ns"] - self._t0_ns) * 1e-9 * scale.time_scale
                self.events.append(step.event(applied_s, direction, now_bps[direction]))
                now_bps[direction] = step.rate_bps
