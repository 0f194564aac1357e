"""Phases: named spans of a scenario's time, one after another from t = 0, each with its own workload or link.

Pure: from a scenario's phases to `Segment`s (stretches of time in which the workload does not change) and to the
link's steps. What a phase does not say is the scenario's own. A phase with `ramp` gets to what it says gradually.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, model_validator

from netem.link import OutageKind
from testbed.scenario_workload import (
    Arrivals,
    Count,
    LogNormal,
    Mix,
    Name,
    Part,
    Positive,
    Rate,
    Workload,
    check_one_rate,
)

SEGMENT_S: Final = 60.0
LEAST_SEGMENTS: Final = 10
"""A ramp has a segment a minute, but never fewer than these."""

OFFERS: Final = ("rate_rps", "load_fraction", "lengths", "output_tokens", "arrivals")
"""What a phase can say of the workload; the keys of both."""


class Phase(Part):
    """A span of time. ramp: lengths (mu, sigma) and rate move linearly from the phase before's to this one's, in steps
    of a minute, or ten steps if it is shorter than ten minutes; everything else changes at its start."""

    name: Name
    duration_s: Positive
    rate_rps: Positive | None = None
    load_fraction: Annotated[float, Field(gt=0, le=10)] | None = None
    lengths: Annotated[LogNormal | Mix, Field(discriminator="kind")] | None = None
    output_tokens: Count | None = None
    arrivals: Arrivals | None = None
    link_rate_bps: Rate | None = None
    ramp: bool = False

    @model_validator(mode="after")
    def _one_rate(self) -> Phase:
        check_one_rate(self.rate_rps, self.load_fraction)
        return self

    def workload(self, base: Workload) -> Workload:
        """What is offered in this phase, once a ramp has ended: its own, else the scenario's (`base`)."""
        own = {key: value for key in OFFERS if (value := getattr(self, key)) is not None}
        if "rate_rps" in own or "load_fraction" in own:
            own |= {"rate_rps": self.rate_rps, "load_fraction": self.load_fraction}
        return base.model_copy(update={**own, "duration_s": self.duration_s, "warmup_s": 0.0})


def is_whole(base: Workload) -> bool:
    """Whether a workload cannot be cut into phases: a trace, or conversations, which last. The link's phases can."""
    return base.trace is not None or base.sessions is not None


def check_phases(phases: Sequence[Phase], base: Workload) -> None:
    """Raises ValueError, with key and remedy, for phases that go neither together nor with the scenario's workload."""
    names = [phase.name for phase in phases]
    if len(set(names)) != len(names):
        raise ValueError(f"phases: names must differ, and {', '.join(names)} do not; rename one")
    total_s = sum(phase.duration_s for phase in phases)
    if phases and not math.isclose(total_s, base.duration_s):
        raise ValueError(
            f"workload.duration_s = {base.duration_s:g}: the phases last {total_s:g} s in all; leave it out, or change "
            "their duration_s"
        )
    before: Workload | None = None
    for phase in phases:
        where = f"phases.{phase.name}"
        said = [key for key in OFFERS if getattr(phase, key) is not None] + ["ramp"] * phase.ramp
        if said and is_whole(base):
            what = "a trace is" if base.trace is not None else "conversations are"
            raise ValueError(f"{where}.{said[0]}: {what} offered whole, phases can only change the link; leave it out")
        this = phase.workload(base)
        if this.arrivals.kind in ("as-is", "spread") and base.trace is None:
            raise ValueError(f"{where}.arrivals.kind {this.arrivals.kind} needs a trace; use poisson or another")
        if phase.ramp:
            _check_ramp(where, before, this)
        before = this


def _check_ramp(where: str, before: Workload | None, this: Workload) -> None:
    if before is None:
        raise ValueError(f"{where}.ramp: the first phase has none before it to come from; leave it out")
    if this.arrivals.kind in ("mmpp", "diurnal"):
        raise ValueError(
            f"{where}.ramp: {this.arrivals.kind} arrivals have a course of their own, which a ramp would cut into "
            "pieces; use poisson, gamma or uniform"
        )
    gradual = isinstance(before.lengths, LogNormal) and isinstance(this.lengths, LogNormal)
    if not gradual and before.lengths != this.lengths:
        raise ValueError(f"{where}.ramp: only lognormal lengths can move to others; leave it out, or use lognormal")


def total_s(phases: Any) -> float | None:
    """How long the phases last in all, from a scenario's plain data; None for what is no list of phases."""
    if not isinstance(phases, list) or not phases:
        return None
    said = [phase.get("duration_s") for phase in phases if isinstance(phase, dict)]
    spans_s = [one for one in said if isinstance(one, int | float) and math.isfinite(one) and one > 0]
    return float(sum(spans_s)) if len(spans_s) == len(phases) else None


def spans(phases: Sequence[Phase]) -> list[tuple[float, float]]:
    """(start, end) of each phase, model seconds."""
    ends = list(accumulate(phase.duration_s for phase in phases))
    return list(zip([0.0, *ends], ends, strict=False))


def link_rates(phases: Sequence[Phase], link_bps: float) -> list[float]:
    """The link's rate in each phase, bits/s; link_bps: the scenario's."""
    return [link_bps if phase.link_rate_bps is None else phase.link_rate_bps for phase in phases]


@dataclass(frozen=True, slots=True)
class LinkStep:
    """A change of the link's rate, bits/s, at a model second. trigger: what brings it about, such as a phase.

    outage: how the link is cut from then on, where the rate is 0.
    """

    at_s: float
    before_bps: float
    rate_bps: float
    trigger: str
    outage: OutageKind | None = None

    def event(self, at_s: float, direction: str, before_bps: float) -> dict[str, Any]:
        """The step as a row of the timeline: when it really was, and from what, in one direction.

        An outage is a rate of 0, and its kind stands with what brings it about: "schedule: blackhole".
        """
        trigger = f"{self.trigger}: {self.outage}" if self.outage else self.trigger
        words = {"t_s": at_s, "direction": direction, "kind": "link", "node": "", "trigger": trigger}
        return {**words, "before": before_bps, "after": self.rate_bps}


def link_steps(phases: Sequence[Phase], link_bps: float) -> list[LinkStep]:
    """Where the link's rate changes, from the scenario's own `link_bps` on."""
    steps, now_bps = [], link_bps
    for phase, (start_s, _), rate_bps in zip(phases, spans(phases), link_rates(phases, link_bps), strict=True):
        if rate_bps != now_bps:
            steps.append(LinkStep(start_s, now_bps, rate_bps, f"phase {phase.name}"))
            now_bps = rate_bps
    return steps


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time in which the workload does not change.

    phase: its index. start_s: model seconds. workload: with its rate_rps, lasting as long as the segment.
    """

    phase: int
    start_s: float
    workload: Workload

    @property
    def rate_rps(self) -> float:
        """Its mean rate, requests/s."""
        assert self.workload.rate_rps is not None
        return self.workload.rate_rps


def segments(phases: Sequence[Phase], base: Workload, rate_rps: Callable[[Workload], float]) -> list[Segment]:
    """The segments of all phases, in order: one a phase, more of a ramp. rate_rps: the rate a workload asks for.

    A ramp's segments have the values in the middle of their time.
    """
    made: list[Segment] = []
    before, before_rps = base, 0.0
    for index, (phase, (start_s, _)) in enumerate(zip(phases, spans(phases), strict=True)):
        this = phase.workload(base)
        this_rps = rate_rps(this)
        count = max(LEAST_SEGMENTS, math.ceil(phase.duration_s / SEGMENT_S)) if phase.ramp else 1
        length_s = phase.duration_s / count
        for i in range(count):
            share = (i + 0.5) / count if phase.ramp else 1.0
            changed = {
                "rate_rps": _between(before_rps, this_rps, share),
                "load_fraction": None,
                "duration_s": length_s,
                "lengths": _lengths_between(before.lengths, this.lengths, share),
            }
            made.append(Segment(index, start_s + i * length_s, this.model_copy(update=changed)))
        before, before_rps = this, this_rps
    return made


def seed(scenario_seed: int, index: int) -> int:
    """The seed of a segment: its own, and the same whatever the other segments are."""
    return int(np.random.SeedSequence([scenario_seed, index]).generate_state(1, np.uint64)[0])


def _between(before: float, this: float, share: float) -> float:
    return before + (this - before) * share


def _lengths_between(before: LogNormal | Mix, this: LogNormal | Mix, share: float) -> LogNormal | Mix:
    if not isinstance(before, LogNormal) or not isinstance(this, LogNormal):
        return this
    mu, sigma = _between(before.mu, this.mu, share), _between(before.sigma, this.sigma, share)
    return this.model_copy(update={"mu": mu, "sigma": sigma})
