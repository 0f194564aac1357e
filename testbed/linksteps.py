"""Layers over the link of a running testbed, from outside: a load's schedule or phases is one, a fault of the link
another.

The shaper's agent, beside the link, makes each step in its time and tells when the kernel had it; it takes the layer
off when the connection is closed, so that the link is what it was even when this process is killed. A thread listens.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from netem.token_bucket import RESUME_S, TokenBucketSpec
from testbed.launch import client
from testbed.launch.client import Stream
from testbed.launch.state import StateDir, TestbedError
from testbed.link_schedule import bucket_of, link_changes
from testbed.phases import LinkStep
from testbed.scenario import Scale, Scenario

CLOSE_S: Final = 2 * client.TIMEOUT_S
"""Wall seconds in which the link is what remains, once a layer's connection is closed."""
POLL_S: Final = 0.02
LAYER: Final = "schedule"
METERED: Final = "token bucket"


class LinkLayer:
    """A context: while it is open, the agent lays `steps` over the link. Everything in wall units.

    name: by which the agent's log and `prfaas link show` know it, one at a time of a name. t0_ns: monotonic. steps:
    (seconds after t0, partial state as for PUT /link), in order; each replaces what the layer said before, {} says
    nothing. token_bucket: `netem.token_bucket.TokenBucketSpec`'s fields and resume_s, of each direction.

    `events`: the agent's rows so far, see netem.agent. `faults`, whole once it is closed: a sentence for each step
    that could not be had, and for an agent that was lost. Raises TestbedError on entering when the agent is gone, or
    refuses; after leaving, the link is what it is without the layer.
    """

    def __init__(
        self,
        state: StateDir,
        name: str,
        t0_ns: int,
        steps: Sequence[tuple[float, Mapping[str, Any]]],
        *,
        token_bucket: Mapping[str, Any] | None = None,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.name, self.t0_ns = name, t0_ns
        self._state = state
        self._body = {
            "name": name,
            "t0_ns": t0_ns,
            "steps": [{"at_s": at_s, "state": dict(said)} for at_s, said in steps],
            "token_bucket": token_bucket,
        }
        self._closing, self._lost = threading.Event(), threading.Event()
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._listen, name=f"link-layer-{name}", daemon=True)

    def __enter__(self) -> LinkLayer:
        self._stream = client.agent(self._state).stream("/layers", self._body)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._stream is not None
        self._closing.set()
        self._stream.close()
        self._thread.join()
        deadline_s = time.monotonic() + CLOSE_S
        try:
            while any(self.name in one["layers"] for one in client.agent(self._state).get("/link").values()):
                if time.monotonic() > deadline_s:
                    raise TestbedError(f"it did not restore it within {CLOSE_S:g} s; see `prfaas logs agent`")
                time.sleep(POLL_S)
        except TestbedError as error:
            self.faults.append(f"the link was left as {self.name} had it: {error}")

    @property
    def lost(self) -> bool:
        """Whether the agent went away while the layer was there."""
        return self._lost.is_set()

    def _listen(self) -> None:
        assert self._stream is not None
        for row in self._stream:
            if "error" in row:
                self.faults.append(
                    f"{self.name}: the link's step at {row['at_s']:g} wall s was not made: {row['error']}"
                )
            else:
                self.events.append(row)
        if not self._closing.is_set():
            self._lost.set()
            self.faults.append(f"{self.name}: the link's agent was lost; the link does what it did then")


class LinkSteps:
    """A context: while it is open, the link does what `scenario` says. t0_ns: the load's t = 0, monotonic.

    Read when it is closed: `events`, a row of the timeline a step and direction (model seconds and bits/s), and
    `faults`, as of a LinkLayer. Raises TestbedError on entering when the agent is gone, or cannot do it.
    """

    def __init__(self, scenario: Scenario, state: StateDir, t0_ns: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self._scale, self._t0_ns = scenario.scale, t0_ns
        self._steps = link_changes(scenario)
        bucket = bucket_of(scenario)
        wall_bucket = None if bucket is None else wall_token_bucket(bucket, scenario.scale)
        self._layer: LinkLayer | None = None
        if self._steps or bucket is not None:
            steps = wall_steps(self._steps, scenario.scale)
            self._layer = LinkLayer(state, LAYER, t0_ns, steps, token_bucket=wall_bucket)

    def __enter__(self) -> LinkSteps:
        if self._layer is not None:
            self._layer.__enter__()
        return self

    @property
    def lost(self) -> bool:
        """Whether the agent went away meanwhile."""
        return self._layer is not None and self._layer.lost

    def __exit__(self, *exc: object) -> None:
        if self._layer is None:
            return
        self._layer.__exit__(*exc)
        self.faults += self._layer.faults
        by_time = {step.at_s / self._scale.time_scale: step for step in self._steps}
        for row in self._layer.events:
            before_bps, now_bps = (
                0.0 if row[which]["outage"] else row[which]["rate_bps"] for which in ("before", "state")
            )
            if (before_bps, row["before"]["outage"]) == (now_bps, row["state"]["outage"]):
                continue
            before_bps, now_bps = (round(self._scale.model_bps(one), 3) for one in (before_bps, now_bps))
            asked = by_time.get(row["at_s"])
            trigger = METERED if asked is None else asked.trigger
            step = LinkStep(row["at_s"], before_bps, now_bps, trigger, row["state"]["outage"])
            applied_s = (row["t_applied_ns"] - self._t0_ns) * 1e-9 * self._scale.time_scale
            late_s = row["late_s"] * self._scale.time_scale
            self.events.append({**step.event(applied_s, row["direction"], before_bps), "late_s": late_s})


def wall_steps(steps: Sequence[LinkStep], scale: Scale) -> list[tuple[float, dict[str, Any]]]:
    """A load's steps as a layer's. In an outage the rate stays what it was, and only what arrives is none."""
    made: list[tuple[float, dict[str, Any]]] = []
    rate: dict[str, Any] = {}
    for step in steps:
        if step.outage is None:
            rate = {"rate_bps": scale.wall_bps(step.rate_bps)}
        made.append((step.at_s / scale.time_scale, {**rate, "outage": step.outage}))
    return made


def wall_token_bucket(spec: TokenBucketSpec, scale: Scale) -> dict[str, Any]:
    """A scenario's token bucket on this machine's wire."""
    fields = {key: value for key, value in dataclasses.asdict(spec).items() if value is not None}
    wall = {
        key: scale.wall_bps(value) if key.endswith("_bps") else value * scale.byte_scale
        for key, value in fields.items()
    }
    return {**wall, "resume_s": RESUME_S / scale.time_scale}
