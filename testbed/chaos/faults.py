"""Faults as data: what goes wrong, when (model seconds from t = 0) and for how long. Healing is part of the fault.

A fault says nothing about a clock: `virtual.py` and `wire.py` each know how to bring one about and how to heal it.
Those of the link are layers over what the scenario makes of it; where two say the same thing, the later one in the list
wins, but an outage holds as long as any fault has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from testbed.scenario_workload import Number, Part, Positive, Rate

Share = Annotated[float, Field(gt=0, le=1)]
Node = Annotated[str, Field(pattern=r"^[a-z][a-z-]*-[0-9]+$")]


Step = Annotated[tuple[Annotated[Number, Field(ge=0)], Rate], Field(strict=False)]


class Timed(Part):
    """What every fault has. at_s: when it begins; duration_s: until it heals; model seconds."""

    at_s: Annotated[Number, Field(ge=0)]
    duration_s: Positive

    @property
    def healed_s(self) -> float:
        """When it is over, model seconds."""
        return self.at_s + self.duration_s

    @property
    def nodes(self) -> tuple[str, ...]:
        """The workers it is about, by name."""
        return ()


class LinkSteps(Timed):
    """The link's rate takes steps, in both directions: (seconds after at_s, bits/s), the first at 0; then it is what it
    was."""

    kind: Literal["link_steps"] = "link_steps"
    steps: Annotated[list[Step], Field(min_length=1)]

    @model_validator(mode="after")
    def _in_order(self) -> LinkSteps:
        times = [at_s for at_s, _ in self.steps]
        if times[0] != 0 or any(b <= a for a, b in pairwise(times)):
            raise ValueError("steps: the first must be at 0 s, and each later than the one before; put them in order")
        if times[-1] >= self.duration_s:
            raise ValueError(
                f"steps: the last, at {times[-1]:g} s, is not before the fault is over; raise duration_s above it"
            )
        return self


class Outage(Timed):
    """Nothing passes, in both directions. how: stall (packets wait in the WAN), blackhole (they are dropped there),
    down (the interfaces are). In virtual time the three are the same: what is under way waits."""

    kind: Literal["outage"] = "outage"
    how: Literal["stall", "blackhole", "down"] = "blackhole"


class LossBurst(Timed):
    """A fraction of the packets is lost, in both directions. On the wire only: what TCP makes of it does not scale."""

    kind: Literal["loss_burst"] = "loss_burst"
    loss: Annotated[float, Field(gt=0, le=0.5)] = 0.02


class DelaySpike(Timed):
    """The link's one-way delay is delay_s, moved by up to jitter_s either way; model seconds. Virtual time knows no
    jitter."""

    kind: Literal["delay_spike"] = "delay_spike"
    delay_s: Positive = 0.2
    jitter_s: Annotated[Number, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _arrives_after_it_left(self) -> DelaySpike:
        if self.jitter_s > self.delay_s:
            raise ValueError(f"jitter_s = {self.jitter_s:g}: more than delay_s = {self.delay_s:g}; lower it")
        return self


class SlowWorker(Timed):
    """What the worker computes takes `factor` times as long: each prefill, and the decode steps of each request, that
    begins meanwhile. A worker that changes its role is rid of it."""

    kind: Literal["slow_worker"] = "slow_worker"
    node: Node
    factor: Annotated[Number, Field(gt=1, le=1000)] = 4.0

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node,)


class KilledWorker(Timed):
    """The worker's process is killed, and started anew, empty, when duration_s are over."""

    kind: Literal["killed_worker"] = "killed_worker"
    node: Node

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node,)


class FrozenWorker(Timed):
    """The worker's process is stopped (SIGSTOP), its connections stay; then it goes on (SIGCONT), and catches up with
    its schedule."""

    kind: Literal["frozen_worker"] = "frozen_worker"
    node: Node

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node,)


class LostSite(Timed):
    """Every worker of the PrfaaS site at once: killed (its power is gone) or frozen (it is out of reach, and holds all
    that it has). The other site has control itself: losing it is losing everything."""

    kind: Literal["lost_site"] = "lost_site"
    how: Literal["killed", "frozen"] = "killed"


class LandingFull(Timed):
    """`fraction` of the decode node's landing room is taken by somebody else: what does not fit waits to be granted."""

    kind: Literal["landing_full"] = "landing_full"
    node: Node
    fraction: Share = 1.0

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node,)


class ClientsLeave(Part):
    """At at_s (model seconds) `fraction` of the clients that wait for an answer, or read one, close their connection.
    Who, is drawn from the experiment's seed. There is nothing to heal."""

    kind: Literal["clients_leave"] = "clients_leave"
    at_s: Annotated[Number, Field(ge=0)]
    fraction: Share = 0.5

    @property
    def healed_s(self) -> float:
        """When it is over, model seconds."""
        return self.at_s

    @property
    def nodes(self) -> tuple[str, ...]:
        return ()


class LoadStalls(Timed):
    """The clock of the load stands still: the requests of duration_s come all at once, when it is over. They are due
    then, so their TTFT counts from then."""

    kind: Literal["load_stalls"] = "load_stalls"


Fault = Annotated[
    LinkSteps
    | Outage
    | LossBurst
    | DelaySpike
    | SlowWorker
    | KilledWorker
    | FrozenWorker
    | LostSite
    | LandingFull
    | ClientsLeave
    | LoadStalls,
    Field(discriminator="kind"),
]
LINK: Final = (LinkSteps, Outage, LossBurst, DelaySpike)
"""The faults that are layers over the link."""

PROCESS: Final = (KilledWorker, FrozenWorker, LostSite)
"""The faults that take workers away: no two of one worker at a time."""


def layer_steps(fault: Any) -> list[tuple[float, dict[str, Any]]]:
    """A link fault as a layer: (model second, what it says of both directions from then on), model units; {}: nothing.

    Keys as of `netem.link.LinkState`.
    """
    match fault:
        case LinkSteps():
            said: list[tuple[float, dict[str, Any]]] = [
                (fault.at_s + after_s, {"rate_bps": rate_bps}) for after_s, rate_bps in fault.steps
            ]
        case Outage():
            said = [(fault.at_s, {"outage": fault.how})]
        case LossBurst():
            said = [(fault.at_s, {"loss": fault.loss})]
        case DelaySpike():
            said = [(fault.at_s, {"delay_s": fault.delay_s, "jitter_s": fault.jitter_s})]
        case _:
            raise TypeError(f"{fault!r} is no fault of the link")
    return [*said, (fault.healed_s, {})]


def effective_rates(
    nominal_bps: float, base: Sequence[tuple[float, float]], faults: Sequence[Any]
) -> list[tuple[float, float]]:
    """Where the link's rate changes, (model second, bits/s), 0 for an outage: the scenario's own steps under the
    faults' layers."""
    layers = [layer_steps(fault) for fault in faults if isinstance(fault, LinkSteps | Outage)]
    times = sorted({at_s for at_s, _ in base} | {at_s for layer in layers for at_s, _ in layer})
    out: list[tuple[float, float]] = []
    now_bps = nominal_bps
    for at_s in times:
        rate_bps = _last(base, at_s, nominal_bps)
        said = [_last(layer, at_s, {}) for layer in layers]
        for one in said:
            rate_bps = one.get("rate_bps", rate_bps)
        if any("outage" in one for one in said):
            rate_bps = 0.0
        if rate_bps != now_bps:
            out.append((at_s, rate_bps))
            now_bps = rate_bps
    return out


def effective_delays(delay_s: float, faults: Sequence[Any]) -> list[tuple[float, float]]:
    """Where the link's one-way delay changes, model seconds both."""
    layers = [layer_steps(fault) for fault in faults if isinstance(fault, DelaySpike)]
    out: list[tuple[float, float]] = []
    for at_s in sorted({at_s for layer in layers for at_s, _ in layer}):
        now_s = delay_s
        for layer in layers:
            now_s = _last(layer, at_s, {}).get("delay_s", now_s)
        out.append((at_s, now_s))
    return out


def _last(steps: Sequence[tuple[float, Any]], at_s: float, otherwise: Any) -> Any:
    """What the last step by `at_s` says."""
    said = [what for step_s, what in steps if step_s <= at_s]
    return said[-1] if said else otherwise


def describe(fault: Any) -> str:
    """A fault in a few words, for a journal and a table."""
    match fault:
        case LinkSteps():
            return "link " + ", ".join(f"{rate_bps / 1e9:g} Gbps" for _, rate_bps in fault.steps)
        case Outage():
            return f"outage ({fault.how})"
        case LossBurst():
            return f"loss {fault.loss:.2%}"
        case DelaySpike():
            return f"delay {fault.delay_s:g} s" + (f" +-{fault.jitter_s:g} s" if fault.jitter_s else "")
        case SlowWorker():
            return f"{fault.node} {fault.factor:g} times slower"
        case KilledWorker():
            return f"{fault.node} killed"
        case FrozenWorker():
            return f"{fault.node} frozen"
        case LostSite():
            return f"PrfaaS site {fault.how}"
        case LandingFull():
            return f"{fault.fraction:.0%} of {fault.node}'s landing room taken"
        case ClientsLeave():
            return f"{fault.fraction:.0%} of the clients leave"
        case _:
            return "the load's clock stands still"
