"""Cross-traffic: what else crosses the link, as data. One frozen `Source` a competitor, seeded, in whatever units its
maker speaks (model or wall: s, bits/s, consistently).

An *elastic* source is `flows` long TCP flows that take what they get; a *constant* one sends datagrams at a rate,
whatever becomes of them. Either is there all the time, or in spells. `spells()` says when, the same in any process:
virtual time (`netem.fluid`) and the wire (`netem.rivals`) both ask it.

Why real competitors and not only a narrower link: TCP shares by connection, so what a competitor takes depends on how
many connections the KV has at that moment (Ballani et al., SIGCOMM'11: what a tenant gets depends on its neighbours).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from operator import itemgetter
from typing import Final, Literal, NamedTuple, get_args

from numpy.random import PCG64, Generator, SeedSequence

from netem.courses import check_seed, number, refuse, seconds
from netem.link import DIRECTIONS

Kind = Literal["elastic", "constant"]
Law = Literal["exponential", "fixed"]
Spell = tuple[float, float]
"""From when to when a source sends; the end may be infinite."""

STREAM: Final = 0x726976616C
"""Keeps these draws apart from those that other rooms take of the same seed ("rival")."""
MOST_FLOWS: Final = 64
MOST_SOURCES: Final = 128  # they have as many ports, docs/contracts.md


class Present(NamedTuple):
    """What competes in one direction from a time on: elastic flows, and bits/s of datagrams, headers counted."""

    at_s: float
    flows: int
    constant_bps: float


@dataclass(frozen=True, slots=True)
class Source:
    """One competitor, in one direction. Raises LinkError for what none can be.

    flows: of an elastic one. rate_bps: of a constant one, what it takes of the link, headers counted. It sends from
    start_s on, for duration_s (for ever unless given), all that time; or, with on_s and off_s, in spells that last so
    long: exactly (`fixed`, beginning with one), or on average (`exponential`; whether it begins with one is drawn, in
    equilibrium). stream: tells sources of one seed apart.
    """

    direction: str
    kind: Kind
    flows: int | None = None
    rate_bps: float | None = None
    on_s: float | None = None
    off_s: float | None = None
    law: Law = "exponential"
    start_s: float = 0.0
    duration_s: float | None = None
    seed: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        _one_of("direction", self.direction, DIRECTIONS)
        _one_of("kind", self.kind, get_args(Kind))
        _one_of("law", self.law, get_args(Law))
        if self.kind == "elastic":
            self._takes("flows", "rate_bps")
            if isinstance(self.flows, bool) or not isinstance(self.flows, int) or not 1 <= self.flows <= MOST_FLOWS:
                refuse("flows", self.flows, "is no number of flows", f"give 1 to {MOST_FLOWS}")
        else:
            self._takes("rate_bps", "flows")
            if number("rate_bps", self.rate_bps) <= 0:
                refuse("rate_bps", self.rate_bps, "is no rate", "give bits/s, more than 0, or leave the source out")
        for name, other in (("on_s", "off_s"), ("off_s", "on_s")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                refuse(name, None, f"is missing beside {other}", "give both, or neither for a source without pauses")
            if getattr(self, name) is not None:
                seconds(name, getattr(self, name))
        number("start_s", self.start_s, 0.0)
        if self.duration_s is not None:
            seconds("duration_s", self.duration_s)
        check_seed(self.seed)

    def _takes(self, needed: str, other: str) -> None:
        if getattr(self, needed) is None:
            refuse(needed, None, f"is missing; {self.kind} cross-traffic needs it", f"add {needed}")
        if getattr(self, other) is not None:
            what = f"has no meaning for {self.kind} cross-traffic"
            refuse(other, getattr(self, other), what, f"leave it out, and give {needed}")

    @property
    def end_s(self) -> float:
        """From when on it never sends again."""
        return math.inf if self.duration_s is None else self.start_s + self.duration_s

    def spells(self) -> Iterator[Spell]:
        """When it sends, apart from each other and in order. Equal sources have equal spells."""
        for start_s, stop_s in self._spells():
            if start_s >= self.end_s:
                return
            yield start_s, min(stop_s, self.end_s)

    def _spells(self) -> Iterator[Spell]:
        if self.on_s is None or self.off_s is None:
            yield self.start_s, math.inf
            return
        if self.law == "fixed":
            for k in count():
                start_s = self.start_s + k * (self.on_s + self.off_s)
                yield start_s, start_s + self.on_s
        draw = Generator(PCG64(SeedSequence([STREAM, self.seed, self.stream])))
        at_s = self.start_s
        if draw.uniform() >= self.on_s / (self.on_s + self.off_s):
            at_s += draw.exponential(self.off_s)
        while True:
            stop_s = at_s + draw.exponential(self.on_s)
            yield at_s, stop_s
            at_s = stop_s + draw.exponential(self.off_s)


def _one_of(field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        refuse(field, value, "is none of them", f"use {' or '.join(known)}")


def present(sources: Sequence[Source], direction: str) -> Iterator[Present]:
    """What competes in a direction, at every time at which that changes, in order; nothing competes before the first.

    Without end where a source's spells have none.
    """
    edges = heapq.merge(*(_edges(one) for one in sources if one.direction == direction), key=itemgetter(0))
    flows, rates, before = 0, 0.0, (0, 0.0)
    for at_s, together in groupby(edges, key=itemgetter(0)):
        for _, more_flows, more_bps in together:
            flows, rates = flows + more_flows, rates + more_bps
        now = flows, max(0.0, round(rates, 3))  # sums of what comes and goes leave no dust
        if now != before:
            before = now
            yield Present(at_s, *now)


def _edges(source: Source) -> Iterator[tuple[float, int, float]]:
    flows, rate_bps = source.flows or 0, source.rate_bps or 0.0
    for start_s, stop_s in source.spells():
        yield start_s, flows, rate_bps
        if stop_s < math.inf:
            yield stop_s, -flows, -rate_bps
