"""Recorded schedules: a file's content as a course. Whatever is wrong is refused in one sentence that names file, line,
value and remedy (the example is mahimahi's `src/frontend/link_queue.cc`).

- `csv`: a header `t_s,rate_bps`, then one step a line, the first at 0; a rate as `netem.link.parse_rate` takes it.
- `mahimahi`: one whole number of ms a line, at which one packet of 1500 bytes is delivered, in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NoReturn

from netem.courses import Point, check_points, check_repeat, number, rate, repeated, seconds
from netem.link import MIN_RATE_BPS, LinkError, parse_rate

HEADER = "t_s,rate_bps"
PACKET_BITS = 1500 * 8


def _refuse(place: str, value: object, problem: str, remedy: str) -> NoReturn:
    raise LinkError(f"{place}: {value!r} {problem}; {remedy}", place, value, remedy)


def _lines(content: bytes, file: str, example: str) -> list[str]:
    """The lines of a text file, CRLF and a byte-order mark taken off, empty ones at the end too."""
    try:
        lines = content.removeprefix(b"\xef\xbb\xbf").decode().splitlines()
    except UnicodeDecodeError as wrong:
        line = content[: wrong.start].count(b"\n") + 1
        raise LinkError(f"{file}, line {line}: is not UTF-8 text; give a text file, unpacked") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise LinkError(f"{file}: is empty; give {example}")
    return lines


@dataclass(frozen=True)
class Csv:
    """The steps of a CSV file. repeat_s: the period, unless its last rate holds for ever. scale: multiplies its rates.
    content: the file's."""

    kind: ClassVar[str] = "csv"
    file: str
    content: bytes = field(repr=False)
    repeat_s: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        number("scale", self.scale, 1e-6, 1e6)
        by = f" x scale = {self.scale:g}" if self.scale != 1 else ""
        for line, (_, rate_bps) in enumerate(self._steps, start=2):
            rate(f"{self.file}, line {line}, rate_bps{by}", rate_bps)
        check_repeat(self.repeat_s, self._steps[-1][0])

    @property
    def period_s(self) -> float | None:
        return self.repeat_s

    @property
    def duration_s(self) -> float | None:
        return self._steps[-1][0] if self.repeat_s is None else None

    def points(self) -> Iterator[Point]:
        steps = self._steps
        return iter(steps) if self.repeat_s is None else repeated(steps, self.repeat_s)

    @cached_property
    def _steps(self) -> list[Point]:
        header, *lines = _lines(self.content, self.file, f"a header {HEADER} and a step a line")
        if header.replace(" ", "") != HEADER:
            _refuse(f"{self.file}, line 1", header, "is not the header", f"write {HEADER}: seconds and bits/s")
        steps = []
        for line, text in enumerate(lines, start=2):
            place = f"{self.file}, line {line}"
            cells = text.split(",")
            if len(cells) != 2:
                _refuse(place, text, "is not a time and a rate", "write them as 12.5,5gbps")
            try:
                at_s = float(cells[0])
            except ValueError:
                _refuse(f"{place}, t_s", cells[0], "is not a number", "give plain seconds")
            steps.append((f"{place}, t_s", at_s, self._rate(f"{place}, rate_bps", cells[1].strip()) * self.scale))
        check_points(steps, self.file)
        return [(at_s, rate_bps) for _, at_s, rate_bps in steps]

    @staticmethod
    def _rate(place: str, text: str) -> float:
        try:
            zero = float(text) == 0
        except ValueError:
            zero = False
        if zero:
            _refuse(place, text, "is no rate", "take the line out, and list the time as an outage in outages")
        return parse_rate(text, place)


@dataclass(frozen=True)
class Mahimahi:
    """The mean rates of a mahimahi file over windows of window_s, its last one half to one and a half times as long;
    a window in which nothing is delivered has rate 0: a stall. Begins anew after its last packet, as in mahimahi,
    unless `repeat` is false: then its last rate holds. scale: multiplies the rates. content: the file's.

    The packet of ms m is of the window that m ends in or lies in: (start, end], so that a period delivers every packet.
    """

    kind: ClassVar[str] = "mahimahi"
    file: str
    content: bytes = field(repr=False)
    window_s: float = 0.1
    scale: float = 1.0
    repeat: bool = True

    def __post_init__(self) -> None:
        number("scale", self.scale, 1e-6, 1e6)
        if not isinstance(self.repeat, bool):
            _refuse("repeat", self.repeat, "is not true or false", "give one of them")
        if seconds("window_s", self.window_s) < 0.001:
            _refuse("window_s", self.window_s, "s is shorter than the file's millisecond", "give at least 0.001")
        edges = [*self._windows, (self._stamps[-1] / 1000, 0.0)]
        for (start_s, rate_bps), (end_s, _) in pairwise(edges):
            if 0 < rate_bps < MIN_RATE_BPS:
                _refuse(
                    f"{self.file}, {start_s:g} to {end_s:g} s",
                    rate_bps,
                    "bits/s is below the floor of 1 Mbit/s",
                    "give a longer window_s, or a larger scale",
                )
        if not self.repeat and edges[-2][1] == 0:
            _refuse(self.file, edges[-2][0], "s begins an outage that would never end", "leave repeat at true")

    @property
    def period_s(self) -> float | None:
        return self._stamps[-1] / 1000 if self.repeat else None

    @property
    def duration_s(self) -> float | None:
        return None if self.repeat else self._windows[-1][0]

    def points(self) -> Iterator[Point]:
        windows = self._windows
        return repeated(windows, self._stamps[-1] / 1000) if self.repeat else iter(windows)

    @cached_property
    def _windows(self) -> list[Point]:
        stamps = self._stamps
        length_s = stamps[-1] / 1000
        windows = max(1, round(length_s / self.window_s))
        packets = [0] * windows
        for ms in stamps:
            packets[min(windows - 1, max(0, math.ceil(ms / 1000 / self.window_s - 1e-9) - 1))] += 1
        starts = [i * self.window_s for i in range(windows)]
        ends = [*starts[1:], length_s]
        bits = PACKET_BITS * self.scale
        return [(a, round(n * bits / (b - a), 3)) for a, b, n in zip(starts, ends, packets, strict=True)]

    @cached_property
    def _stamps(self) -> list[int]:
        stamps: list[int] = []
        for line, text in enumerate(_lines(self.content, self.file, "a whole number of ms a line"), start=1):
            place, stamp = f"{self.file}, line {line}", text.strip()
            if not (stamp.isascii() and stamp.isdigit()):
                _refuse(place, text, "is not a whole number of ms", "a mahimahi file has one a line, a packet each")
            if stamps and int(stamp) < stamps[-1]:
                _refuse(place, int(stamp), f"ms comes before the {stamps[-1]} ms above it", "sort the file")
            stamps.append(int(stamp))
        if stamps[-1] == 0:
            _refuse(f"{self.file}, line {len(stamps)}", 0, "ms: the file lasts no time", "it must end after 0 ms")
        return stamps
