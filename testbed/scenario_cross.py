"""A scenario's `link.cross_traffic`: what competes with the KV on the link, in the real system's units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from netem.cross import MOST_FLOWS, Law, Source
from netem.link import DIRECTIONS, LinkError
from testbed.scenario_workload import Count, Number, Part, Positive, Rate, Whole


class CrossTraffic(Part):
    """One competitor, in one direction: `elastic`, `flows` long TCP flows that take what they get, or `constant`,
    datagrams at rate_bps of the link (headers counted), whatever becomes of them.

    It sends from start_s on, for duration_s (as long as the load unless given): all that time, or in spells of on_s,
    off_s apart, exactly so long (`law: fixed`) or in the mean (`exponential`), drawn from `seed` (the scenario's, and
    the source's place in the list, unless given).
    """

    direction: Literal["to_pd", "to_prfaas"]
    kind: Literal["elastic", "constant"]
    flows: Annotated[Count, Field(le=MOST_FLOWS)] | None = None
    rate_bps: Rate | None = None
    on_s: Positive | None = None
    off_s: Positive | None = None
    law: Law = "exponential"
    start_s: Annotated[Number, Field(ge=0)] = 0.0
    duration_s: Positive | None = None
    seed: Annotated[Whole, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _can_be(self) -> CrossTraffic:
        try:
            self.source(0, 0)
        except LinkError as error:
            raise ValueError(str(error)) from None
        return self

    def source(self, scenario_seed: int, place: int) -> Source:
        """What virtual time and the wire are told, in model units."""
        own = self.model_dump(exclude={"seed"})
        if self.seed is not None:
            return Source(**own, seed=self.seed)
        return Source(**own, seed=scenario_seed, stream=place)


def sources(given: Sequence[CrossTraffic], scenario_seed: int) -> list[Source]:
    """What competes, in model units, each drawn from the scenario's seed and its place unless it has a seed."""
    return [one.source(scenario_seed, place) for place, one in enumerate(given)]


def check_cross_traffic(given: Sequence[CrossTraffic], rate_bps: float, least_s: float) -> None:
    """Raises ValueError for datagrams that leave the KV nothing of a link of rate_bps, and for spells below least_s
    (model seconds), in which no flow of the wire gets going."""
    for direction in DIRECTIONS:
        together = sum(one.rate_bps or 0.0 for one in given if one.direction == direction)
        if together >= rate_bps:
            raise ValueError(
                f"link.cross_traffic: the constant sources {direction} send {together:g} bits/s together, and the link "
                f"carries {rate_bps:g}: nothing would be left for KV; lower their rate_bps (an outage is no traffic: "
                "link.schedule has outages)"
            )
    for place, one in enumerate(given):
        for name in ("on_s", "off_s"):
            spell_s = getattr(one, name)
            if spell_s is not None and spell_s < least_s:
                raise ValueError(
                    f"link.cross_traffic.{place}.{name} = {spell_s:g}: at scale.time_scale the wire takes spells of "
                    f"at least {least_s:g} model seconds (in the mean); make it longer"
                )
