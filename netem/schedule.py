"""Links that vary: a `Schedule` is a course of the link's rate and its outages, as immutable data, in model units.

The same object drives the wire (the agent applies its `steps`) and the virtual link (`netem.fluid`), and is the same in
any process: what is random in it is drawn from its seed alone. `from_data` makes one from a scenario's `link.schedule`
(a mapping: `kind` and that model's parameters), `to_data` goes back. Read first: `netem/courses.py` (the models), then
`schedule_files.py` (recorded ones), `token_bucket.py` (the one model that depends on what is sent).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby, pairwise
from typing import Any, ClassVar, Final, Protocol

from netem.courses import (
    Constant,
    Diurnal,
    Markov,
    Point,
    Ramp,
    Sawtooth,
    Square,
    Stationary,
    Steps,
    number,
    overlaid,
    refuse,
    seconds,
)
from netem.link import OUTAGES, LinkError, OutageKind, parse_rate
from netem.schedule_files import Csv, Mahimahi
from netem.token_bucket import TokenBucketSpec

MIN_STEP_S: Final = 0.05
"""How close steps may be on the wire, wall seconds (network design page, rule 6)."""
MOST_POINTS: Final = 5_000_000
_ROOM = 1 - 1e-9  # for rounding in times


class Course(Protocol):
    """What `netem.courses` and `schedule_files` make. period_s: after which it repeats; duration_s: after which its
    last rate holds; neither: it goes on, drawn from its seed."""

    kind: ClassVar[str]

    @property
    def period_s(self) -> float | None: ...
    @property
    def duration_s(self) -> float | None: ...
    def points(self) -> Iterator[Point]: ...


COURSES: Final[dict[str, Any]] = {
    one.kind: one for one in (Constant, Steps, Square, Ramp, Sawtooth, Diurnal, Stationary, Markov, Csv, Mahimahi)
}
KINDS: Final = (*COURSES, TokenBucketSpec.kind)


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which nothing arrives. stall: packets wait; blackhole: they are lost; down: the interface is."""

    at_s: float
    duration_s: float
    kind: OutageKind = "stall"

    def __post_init__(self) -> None:
        number("at_s", self.at_s, 0.0)
        seconds("duration_s", self.duration_s)
        if self.kind not in OUTAGES:
            refuse("kind", self.kind, "is no outage", f"{_near(self.kind, OUTAGES)}use {', '.join(OUTAGES)}")

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s


class _Drawn:
    """A course's points as far as anybody asked, changes only, and the bits carried until each."""

    def __init__(self, points: Iterator[Point]) -> None:
        self.times: list[float] = []
        self.rates: list[float] = []
        self.bits: list[float] = []
        self._more, self._until_s = points, -math.inf

    def reach(self, t_s: float) -> None:
        """Draw all points up to t_s and at least one after it, if there is one."""
        while self._until_s <= t_s:
            at_s, rate_bps = next(self._more, (math.inf, 0.0))
            self._until_s = at_s
            if at_s == math.inf or (self.rates and rate_bps == self.rates[-1]):
                continue
            if len(self.times) >= MOST_POINTS:
                refuse("t_s", t_s, f"s is more than {MOST_POINTS} steps away", "take longer steps, or ask for less")
            self.bits.append(self.bits[-1] + self.rates[-1] * (at_s - self.times[-1]) if self.times else 0.0)
            self.times.append(at_s)
            self.rates.append(rate_bps)

    def bits_until(self, t_s: float) -> float:
        self.reach(t_s)
        i = bisect_right(self.times, t_s) - 1
        return self.bits[i] + self.rates[i] * (t_s - self.times[i])


@dataclass(frozen=True)
class Schedule:
    """The rate of one direction of a link over time, from t = 0 on. Model seconds, bits/s.

    course: what the rate does; where it is 0 (a recorded one) it stalls. outages: apart from each other, at absolute
    times, whatever the course's period. Equal schedules have equal steps. Raises LinkError.
    """

    course: Course
    outages: tuple[Outage, ...] = ()
    _drawn: _Drawn = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for before, after in pairwise(self.outages):
            if after.at_s <= before.end_s:
                refuse("outages", after.at_s, f"s is not after the outage that ends at {before.end_s:g} s", "join them")
        points = self.course.points()
        if self.outages:
            points = overlaid(points, [(one.at_s, one.end_s) for one in self.outages], 0.0)
        object.__setattr__(self, "_drawn", _Drawn(points))

    @property
    def period_s(self) -> float | None:
        """After this time the course (not the outages) repeats; None: it does not."""
        return self.course.period_s

    @property
    def duration_s(self) -> float | None:
        """From this time on the last value holds; None: it repeats, or goes on as drawn from its seed."""
        holds_s = self.course.duration_s
        return None if holds_s is None else max([holds_s, *(one.end_s for one in self.outages)])

    def rate_bps(self, t_s: float) -> float:
        """The rate at a time: of a step, the new one. 0 in an outage."""
        number("t_s", t_s, 0.0)
        self._drawn.reach(t_s)
        return self._drawn.rates[bisect_right(self._drawn.times, t_s) - 1]

    def integral_bits(self, start_s: float, end_s: float) -> float:
        """Bits that the link can carry between two times: the bound on what is delivered."""
        _check_span(start_s, end_s)
        return self._drawn.bits_until(end_s) - self._drawn.bits_until(start_s)

    def mean_bps(self, start_s: float, end_s: float) -> float:
        """The mean rate between two times, outages included."""
        return self.integral_bits(start_s, end_s) / (end_s - start_s)

    def outage(self, t_s: float) -> OutageKind | None:
        """The kind of the outage there is at a time, if there is one."""
        kinds = [one.kind for one in self.outages if one.at_s <= t_s < one.end_s]
        return kinds[0] if kinds else "stall" if self.rate_bps(t_s) == 0 else None

    def steps(self, start_s: float, end_s: float, min_step_s: float = 0.0) -> list[Point]:
        """(t_s, rate_bps) in [start_s, end_s): the rate at start_s, then every change; none sooner than min_step_s
        after the one before.

        Changes that come sooner become one step at their mean rate, so the steps carry what the schedule does (up to
        min_step_s past end_s is not looked at). Outages keep their times; one that is too short, or too close to
        another, raises LinkError.
        """
        points = self._points(start_s, end_s)
        if number("min_step_s", min_step_s, 0.0) == 0:
            return points
        spells = [list(spell) for _, spell in groupby(points, key=lambda point: point[1] > 0)]
        edges = [spell[0][0] for spell in spells] + [end_s]
        out: list[Point] = []
        for i, (spell, (from_s, to_s)) in enumerate(zip(spells, pairwise(edges), strict=True)):
            last = i == len(spells) - 1
            if not last and to_s - from_s < min_step_s * _ROOM:
                what = "an outage" if spell[0][1] == 0 else "a time between outages"
                refuse(
                    f"outages, at {from_s:g} s",
                    to_s - from_s,
                    f"s is too short for {what}",
                    f"steps are {min_step_s:g} s apart at least here: make it longer, or a recording's window_s",
                )
            out += self._spaced(spell, to_s, min_step_s, last)
        return [one for one, before in zip(out, [(0.0, -1.0), *out], strict=False) if one[1] != before[1]]

    def _spaced(self, spell: Sequence[Point], to_s: float, min_step_s: float, last: bool) -> Iterator[Point]:
        """The points of a spell without outages, until to_s; unless it is the last one, a step that begins less than
        min_step_s before its end is one with what is before it."""
        times = [at_s for at_s, _ in spell]
        at_s = times[0]
        while at_s < to_s * _ROOM or at_s == times[0]:
            now = bisect_right(times, at_s) - 1
            if now == len(times) - 1:
                yield at_s, spell[now][1]
                return
            change_s = times[now + 1]
            stop_s = change_s if change_s - at_s >= min_step_s * _ROOM else at_s + min_step_s
            if last:
                stop_s = min(stop_s, to_s)
            elif to_s - stop_s < min_step_s * _ROOM:
                early_s = to_s - min_step_s
                stop_s = early_s if early_s - at_s >= min_step_s * _ROOM else to_s
            yield at_s, spell[now][1] if stop_s <= change_s else self.mean_bps(at_s, stop_s)
            at_s = stop_s

    def _points(self, start_s: float, end_s: float) -> list[Point]:
        _check_span(start_s, end_s)
        drawn = self._drawn
        drawn.reach(end_s)
        first, stop = bisect_right(drawn.times, start_s), bisect_left(drawn.times, end_s)
        inner = list(zip(drawn.times[first:stop], drawn.rates[first:stop], strict=True))
        return [(start_s, drawn.rates[first - 1]), *inner]

    def to_data(self) -> dict[str, Any]:
        """What `from_data` makes it from again; of a recorded one, the file's name and sha256."""
        data = data_of(self.course)
        if self.outages:
            data["outages"] = [{"at_s": o.at_s, "duration_s": o.duration_s, "kind": o.kind} for o in self.outages]
        return data

    @property
    def sha256(self) -> str:
        """Its identity: equal for equal data, wherever a recorded one's file lies."""
        data = {key: value for key, value in self.to_data().items() if key != "file"}
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_files(name: str) -> bytes:
    refuse("file", name, "cannot be read here", "give from_data a way to read files")


def from_data(
    data: object, *, seed: int = 0, read: Callable[[str], bytes] = _no_files, where: str = "schedule"
) -> Schedule | TokenBucketSpec:
    """The schedule of a mapping: `kind`, that model's parameters, `outages`. Rates may be texts such as 5gbps.

    seed: for a model that has one, unless the mapping says its own. read: a file's content by its name, as given;
    where: what messages call the mapping. Raises LinkError for whatever is unknown, missing or cannot be.
    """
    if not isinstance(data, Mapping):
        refuse(
            where, data, "is not a mapping", "give e.g. {kind: square, high_bps: 8gbps, low_bps: 1gbps, period_s: 60}"
        )
    given = dict(data)
    kind = given.pop("kind", None)
    if kind not in KINDS:
        refuse(f"{where}.kind", kind, "is no model", f"{_near(kind, KINDS)}use {', '.join(KINDS)}")
    model = COURSES.get(kind, TokenBucketSpec)
    outages = given.pop("outages", None) if model is not TokenBucketSpec else None
    try:
        apart = _outages(outages)
        course = model(**_parameters(model, given, seed, read))
        return course if model is TokenBucketSpec else Schedule(course, apart)
    except LinkError as wrong:
        if wrong.field is None or wrong.field.startswith(f"{given.get('file')}"):  # it says where already
            raise
        raise LinkError(f"{where}.{wrong}", f"{where}.{wrong.field}", wrong.value, wrong.remedy) from None


class _UnreadError(Exception):
    """A file would be read now."""


def check(data: object) -> Schedule | TokenBucketSpec | None:
    """What `from_data` makes of a mapping without reading a file: None when that is all that is left to do."""

    def unread(name: str) -> bytes:
        raise _UnreadError

    try:
        return from_data(data, read=unread)
    except _UnreadError:
        return None


def _parameters(model: Any, given: dict[str, Any], seed: int, read: Callable[[str], bytes]) -> dict[str, Any]:
    """The arguments of a model's class, from a mapping's."""
    names = [one.name for one in fields(model) if one.name != "content"]
    known = [*names, *(["sha256"] if "file" in names else []), *(["outages"] if model is not TokenBucketSpec else [])]
    for name in given:
        if name not in known:
            whole = next((f"did you mean {one}? " for one in names if one.startswith(f"{name}_")), "")
            remedy = f"{whole or _near(name, known)}{model.kind} knows {', '.join(known)}"
            refuse(str(name), given[name], f"is no parameter of {model.kind}", remedy)
    asked = {"seed": seed, **given} if "seed" in names else dict(given)
    for one in fields(model):
        if one.default is MISSING and one.name not in asked and one.name != "content":
            refuse(one.name, None, f"is missing; {model.kind} needs it", f"add {one.name}")
    optional = {one.name for one in fields(model) if one.default is None}
    out = {name: _value(name, value) for name, value in asked.items() if value is not None or name not in optional}
    if "file" in names:
        said = out.pop("sha256", None)
        out["content"] = read(out["file"])
        is_now = hashlib.sha256(out["content"]).hexdigest()
        if said is not None and said != is_now:
            refuse(
                "sha256",
                said,
                f"is not that of {out['file']}, {is_now}",
                "give the file that was meant, or leave it out",
            )
    return out


def _value(name: str, value: Any) -> Any:
    if name.endswith("_bps"):
        return parse_rate(value, name)
    if name == "steps":
        pairs = value if isinstance(value, list | tuple) else [value]
        for i, pair in enumerate(pairs):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                refuse(f"steps[{i}]", pair, "is not a time and a rate", "write [12.5, 5gbps]")
        return tuple(
            (number(f"steps[{i}]", at_s), parse_rate(rate_bps, f"steps[{i}]"))
            for i, (at_s, rate_bps) in enumerate(pairs)
        )
    if name in ("file", "sha256") and not isinstance(value, str):
        refuse(name, value, "is not a text", "quote it")
    return value


def _outages(given: Any) -> tuple[Outage, ...]:
    if given is None:
        return ()
    names = [one.name for one in fields(Outage)]
    out = []
    for i, one in enumerate(given if isinstance(given, list | tuple) else [given]):
        if not isinstance(one, Mapping) or not {"at_s", "duration_s"} <= set(one) <= set(names):
            refuse(
                f"outages[{i}]",
                one,
                "is not an outage",
                "write {at_s: 60, duration_s: 5, kind: stall}, and nothing else",
            )
        try:
            out.append(Outage(**one))
        except LinkError as wrong:
            field_ = f"outages[{i}].{wrong.field}"
            raise LinkError(f"outages[{i}].{wrong}", field_, wrong.value, wrong.remedy) from None
    return tuple(out)


def data_of(course: Any) -> dict[str, Any]:
    """A course, or a token bucket, as plain data: what its class was given; a file's sha256 for its content."""
    data: dict[str, Any] = {"kind": course.kind}
    for one in fields(course):
        value = getattr(course, one.name)
        if one.name == "content":
            data["sha256"] = hashlib.sha256(value).hexdigest()
        elif one.name == "steps":
            data["steps"] = [list(step) for step in value]
        elif value is not None:
            data[one.name] = value
    return data


def _near(name: object, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]}? " if near else ""


def _check_span(start_s: float, end_s: float) -> None:
    number("start_s", start_s, 0.0)
    if number("end_s", end_s) <= start_s:
        refuse("end_s", end_s, f"s is not after start_s = {start_s:g}", "give a later one")
