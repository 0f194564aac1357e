"""The courses a link's rate can take, as data: one frozen dataclass a model, in model units (s, bits/s), seeded.

A course is asked for its `points()`: (t_s, rate_bps) in order of time, the first at 0, each holding until the next;
infinitely many of a course that repeats or goes on, else the last one holds for ever. Every course checks itself when
it is made and raises LinkError with field, value and remedy. No rate lies between 0 and MIN_RATE_BPS: a link that is
down is an outage (rate 0, see `netem.schedule`), never a tiny rate.

Which models, and why: García-Dorado et al., arXiv:1512.01129 and Lai et al., HotCloud'18 (between VPCs: stationary,
a few percent of variation, dips); Uta et al., NSDI'20 (token buckets, see `netem.token_bucket`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from operator import itemgetter
from typing import ClassVar, NoReturn

from numpy.random import PCG64, Generator, SeedSequence

from netem.link import MIN_RATE_BPS, LinkError

Point = tuple[float, float]
"""Time, model seconds, and the rate from then on, bits/s."""

STREAM = 0x6C696E6B
"""Keeps a link's draws apart from those that other rooms take of the same seed ("link")."""
MOST_SIGMAS = 4.0
"""A stationary rate's noise is cut off here, which changes its deviation by less than 0.1 %."""
_STEPS_A_CYCLE = 100


def refuse(field: str, value: object, problem: str, remedy: str) -> NoReturn:
    raise LinkError(f"{field}: {value!r} {problem}; {remedy}", field, value, remedy)


def number(field: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A plain finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, value, "is not a number", "give a plain number in the unit of the field's name")
    if not math.isfinite(value):
        refuse(field, value, "is not finite", "give a plain number in the unit of the field's name")
    if not low <= value <= high:
        remedy = f"give {low:g} to {high:g}" if high < math.inf else f"give at least {low:g}"
        refuse(field, value, "is out of bounds", remedy)
    return float(value)


def seconds(field: str, value: object) -> float:
    """A span of time."""
    if number(field, value) <= 0:
        refuse(field, value, "is no span of time", "give seconds, more than 0")
    return float(value)  # type: ignore[arg-type]


def rate(field: str, value: object) -> float:
    """A rate a link can have for a while: at least the floor."""
    if number(field, value) <= 0:
        refuse(field, value, "is no rate", "a link that is down is an outage: list it in outages")
    if float(value) < MIN_RATE_BPS:  # type: ignore[arg-type]
        remedy = "give at least 1mbit (is it Mbit/s, or bytes? a plain number is bits/s), or list an outage in outages"
        refuse(field, value, "bits/s is below the floor of 1 Mbit/s", remedy)
    return float(value)  # type: ignore[arg-type]


def repeated(points: Iterable[Point], period_s: float) -> Iterator[Point]:
    """The points of one period, over and over."""
    cycle = list(points)
    for k in count():
        for at_s, rate_bps in cycle:
            yield k * period_s + at_s, rate_bps


def overlaid(points: Iterable[Point], spans: Iterable[Point], factor: float) -> Iterator[Point]:
    """The points with their rates times `factor` inside `spans`: (start_s, end_s), apart, in order."""
    edges = ((at_s, 1, by) for start_s, end_s in spans for at_s, by in ((start_s, factor), (end_s, 1.0)))
    merged = heapq.merge(((at_s, 0, rate_bps) for at_s, rate_bps in points), edges)
    rate_bps, by = 0.0, 1.0
    for at_s, together in groupby(merged, key=itemgetter(0)):
        for _, edge, value in together:
            rate_bps, by = (rate_bps, value) if edge else (value, by)
        yield at_s, rate_bps * by


def _staircase(length_s: float, step_s: float | None, mean: Callable[[float, float], float]) -> list[Point]:
    """[0, length_s) in equal steps of at most step_s; mean(a, b): the rate's mean between two times."""
    steps = _STEPS_A_CYCLE if step_s is None else max(2, math.ceil(length_s / step_s - 1e-9))
    edges = [length_s * i / steps for i in range(steps + 1)]
    return [(a, mean(a, b)) for a, b in pairwise(edges)]


def _step(step_s: float | None, length_s: float) -> None:
    if step_s is not None and seconds("step_s", step_s) > length_s / 2:
        refuse("step_s", step_s, f"leaves fewer than two steps of {length_s:g} s", "give a shorter one")


@dataclass(frozen=True, slots=True)
class Constant:
    """One rate for ever."""

    kind: ClassVar[str] = "constant"
    period_s: ClassVar[None] = None
    duration_s: ClassVar[float | None] = 0.0
    rate_bps: float

    def __post_init__(self) -> None:
        rate("rate_bps", self.rate_bps)

    def points(self) -> Iterator[Point]:
        yield 0.0, self.rate_bps


@dataclass(frozen=True, slots=True)
class Steps:
    """Rates from given times on, the first at 0. repeat_s: the period, unless the last rate holds for ever."""

    kind: ClassVar[str] = "steps"
    steps: tuple[Point, ...]
    repeat_s: float | None = None

    def __post_init__(self) -> None:
        check_points([(f"steps[{i}]", at_s, rate_bps) for i, (at_s, rate_bps) in enumerate(self.steps)], "steps")
        for i, (_, rate_bps) in enumerate(self.steps):
            rate(f"steps[{i}]", rate_bps)
        check_repeat(self.repeat_s, self.steps[-1][0])

    @property
    def period_s(self) -> float | None:
        return self.repeat_s

    @property
    def duration_s(self) -> float | None:
        return self.steps[-1][0] if self.repeat_s is None else None

    def points(self) -> Iterator[Point]:
        return iter(self.steps) if self.repeat_s is None else repeated(self.steps, self.repeat_s)


def check_points(points: list[tuple[str, float, float]], where: str) -> None:
    """Refuses (name, t_s, rate) rows that do not begin at 0 or do not come one after another."""
    if not points:
        refuse(where, [], "has no step", "give at least [0, RATE]")
    for name, at_s, _ in points:
        number(name, at_s)
    name, first_s, _ = points[0]
    if first_s != 0:
        refuse(name, first_s, "s is not where a schedule begins", "the first step's time is 0: say the rate from there")
    for (_, before_s, _), (name, at_s, _) in pairwise(points):
        if at_s <= before_s:
            refuse(name, at_s, f"s does not come after the {before_s:g} s before it", "sort the steps, each time once")


def check_repeat(repeat_s: float | None, last_s: float) -> None:
    if repeat_s is not None and seconds("repeat_s", repeat_s) <= last_s:
        refuse("repeat_s", repeat_s, f"s ends before the last step at {last_s:g} s", "give a longer period")


@dataclass(frozen=True, slots=True)
class Square:
    """high_bps for `duty` of each period, then low_bps."""

    kind: ClassVar[str] = "square"
    duration_s: ClassVar[None] = None
    high_bps: float
    low_bps: float
    period_s: float
    duty: float = 0.5

    def __post_init__(self) -> None:
        ordered(self.low_bps, self.high_bps)
        seconds("period_s", self.period_s)
        number("duty", self.duty, 0.001, 0.999)

    def points(self) -> Iterator[Point]:
        return repeated([(0.0, self.high_bps), (self.duty * self.period_s, self.low_bps)], self.period_s)


def ordered(low_bps: float, high_bps: float) -> None:
    if rate("low_bps", low_bps) >= rate("high_bps", high_bps):
        refuse("low_bps", low_bps, f"is not below high_bps = {high_bps:g}", "exchange them")


@dataclass(frozen=True, slots=True)
class Ramp:
    """from_bps until start_s, linearly to to_bps in duration_s, which then holds. step_s: of the stairs it is made of,
    each at its mean; a hundredth of the ramp unless given."""

    kind: ClassVar[str] = "ramp"
    period_s: ClassVar[None] = None
    from_bps: float
    to_bps: float
    ramp_s: float
    start_s: float = 0.0
    step_s: float | None = None

    def __post_init__(self) -> None:
        rate("from_bps", self.from_bps)
        rate("to_bps", self.to_bps)
        seconds("ramp_s", self.ramp_s)
        number("start_s", self.start_s, 0.0)
        _step(self.step_s, self.ramp_s)

    @property
    def duration_s(self) -> float:
        return self.start_s + self.ramp_s

    def points(self) -> Iterator[Point]:
        if self.start_s:
            yield 0.0, self.from_bps
        slope = (self.to_bps - self.from_bps) / self.ramp_s
        stairs = _staircase(self.ramp_s, self.step_s, lambda a, b: self.from_bps + slope * (a + b) / 2)
        yield from ((self.start_s + at_s, rate_bps) for at_s, rate_bps in stairs)
        yield self.duration_s, self.to_bps


@dataclass(frozen=True, slots=True)
class Sawtooth:
    """Linearly from low_bps to high_bps in each period, then at once back. step_s: as Ramp's."""

    kind: ClassVar[str] = "sawtooth"
    duration_s: ClassVar[None] = None
    low_bps: float
    high_bps: float
    period_s: float
    step_s: float | None = None

    def __post_init__(self) -> None:
        ordered(self.low_bps, self.high_bps)
        _step(self.step_s, seconds("period_s", self.period_s))

    def points(self) -> Iterator[Point]:
        slope = (self.high_bps - self.low_bps) / self.period_s
        stairs = _staircase(self.period_s, self.step_s, lambda a, b: self.low_bps + slope * (a + b) / 2)
        return repeated(stairs, self.period_s)


@dataclass(frozen=True, slots=True)
class Diurnal:
    """mean_bps x (1 + amplitude x cos(2 pi (t - peak_s) / period_s)). step_s: as Ramp's."""

    kind: ClassVar[str] = "diurnal"
    duration_s: ClassVar[None] = None
    mean_bps: float
    amplitude: float
    period_s: float = 86_400.0
    peak_s: float = 0.0
    step_s: float | None = None

    def __post_init__(self) -> None:
        number("amplitude", self.amplitude, 0.001, 0.999)
        number("peak_s", self.peak_s)
        _step(self.step_s, seconds("period_s", self.period_s))
        if rate("mean_bps", self.mean_bps) * (1 - self.amplitude) < MIN_RATE_BPS:
            refuse("amplitude", self.amplitude, "takes the rate below the floor of 1 Mbit/s", "give a smaller one")

    def points(self) -> Iterator[Point]:
        turn = 2 * math.pi / self.period_s

        def mean(a: float, b: float) -> float:
            swing = (math.sin(turn * (b - self.peak_s)) - math.sin(turn * (a - self.peak_s))) / (turn * (b - a))
            return self.mean_bps * (1 + self.amplitude * swing)

        return repeated(_staircase(self.period_s, self.step_s, mean), self.period_s)


@dataclass(frozen=True, slots=True)
class Stationary:
    """A mean with noise and dips: a rate every step_s, AR(1) with coefficient of variation `cv` and autocorrelation
    exp(-1) after correlation_s; dips come as a Poisson process, one in dip_every_s on average, and take dip_depth of
    the rate away for dip_s (dips that overlap are one, no deeper).

    mean_bps, cv: outside dips. Over all, the mean is mean_bps x (1 - dip_depth x (1 - exp(-dip_s / dip_every_s))).
    """

    kind: ClassVar[str] = "stationary"
    period_s: ClassVar[None] = None
    duration_s: ClassVar[None] = None
    mean_bps: float
    seed: int
    cv: float = 0.05
    step_s: float = 1.0
    correlation_s: float = 10.0
    dip_every_s: float | None = None
    dip_depth: float = 0.5
    dip_s: float = 10.0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        number("cv", self.cv, 0.0, 0.2)
        for name in ("step_s", "correlation_s", "dip_s"):
            seconds(name, getattr(self, name))
        number("dip_depth", self.dip_depth, 0.001, 0.999)
        deepest = 1.0 if self.dip_every_s is None else 1 - self.dip_depth
        if self.dip_every_s is not None:
            seconds("dip_every_s", self.dip_every_s)
        if rate("mean_bps", self.mean_bps) * (1 - MOST_SIGMAS * self.cv) * deepest < MIN_RATE_BPS:
            refuse("mean_bps", self.mean_bps, "falls below the floor of 1 Mbit/s", "raise it, or lower cv or dip_depth")

    def points(self) -> Iterator[Point]:
        noise, dips = _generators(self.seed, 2)
        drawn = self._noisy(noise)
        return drawn if self.dip_every_s is None else overlaid(drawn, self._dips(dips), 1 - self.dip_depth)

    def _noisy(self, draw: Generator) -> Iterator[Point]:
        kept = math.exp(-self.step_s / self.correlation_s)
        new = math.sqrt(1 - kept * kept)
        state = draw.standard_normal()
        for k in count():
            sigmas = max(-MOST_SIGMAS, min(MOST_SIGMAS, state))
            yield k * self.step_s, self.mean_bps * (1 + self.cv * sigmas)
            state = kept * state + new * draw.standard_normal()

    def _dips(self, draw: Generator) -> Iterator[Point]:
        assert self.dip_every_s is not None
        start_s = next_s = draw.exponential(self.dip_every_s)
        while True:
            end_s = next_s + self.dip_s
            next_s += draw.exponential(self.dip_every_s)
            if next_s > end_s:
                yield start_s, end_s
                start_s = next_s


@dataclass(frozen=True, slots=True)
class Markov:
    """Two states that last exponentially long, good_s and bad_s on average; the first one is drawn in equilibrium."""

    kind: ClassVar[str] = "markov"
    period_s: ClassVar[None] = None
    duration_s: ClassVar[None] = None
    good_bps: float
    bad_bps: float
    good_s: float
    bad_s: float
    seed: int

    def __post_init__(self) -> None:
        check_seed(self.seed)
        seconds("good_s", self.good_s)
        seconds("bad_s", self.bad_s)
        if rate("bad_bps", self.bad_bps) >= rate("good_bps", self.good_bps):
            refuse("bad_bps", self.bad_bps, f"is not below good_bps = {self.good_bps:g}", "exchange them")

    def points(self) -> Iterator[Point]:
        (draw,) = _generators(self.seed, 1)
        good = draw.uniform() < self.good_s / (self.good_s + self.bad_s)
        at_s = 0.0
        while True:
            yield at_s, self.good_bps if good else self.bad_bps
            at_s += draw.exponential(self.good_s if good else self.bad_s)
            good = not good


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        refuse("seed", seed, "is no seed", "give a whole number, 0 or more")


def _generators(seed: int, how_many: int) -> list[Generator]:
    return [Generator(PCG64(one)) for one in SeedSequence([STREAM, seed]).spawn(how_many)]
