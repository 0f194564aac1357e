"""Was this machine free enough to measure? A thread that wakes on a grid notes how late it is, and CPU use is read.

What is late by less than the shaper's bucket lasts is made up for; what is late by more is time the machine took away
from the link, and the share of it (`stolen`) is the error it may have made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICK_S: Final = 0.004
_STAT = Path("/proc/stat")
_CGROUPS = Path("/sys/fs/cgroup")
SELF: Final = Path("/proc/self/cgroup")
_IDLE, _STEAL = (3, 4), 7  # columns of /proc/stat's first line: idle and iowait; steal


@dataclass(frozen=True, slots=True)
class Metered:
    """How late a timer woke its thread (s); `stolen`: share of the time that it was late beyond the bucket's;
    `cpu_busy`: share of all cores' time, everybody's, or of what a container may have, its own, whichever is more;
    `taken`: share of all cores' time that a virtual machine's host gave to others, as the kernel counts it."""

    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    stolen: float
    cpu_busy: float
    taken: float


def metered(lates_s: Sequence[float], wall_s: float, bucket_s: float, cpu_busy: float, taken: float) -> Metered:
    """The figures of what was noted in `wall_s`; bucket_s: how long the shaper's bucket makes up for."""
    ordered = sorted(lates_s) or [0.0]
    stolen = sum(late - bucket_s for late in lates_s if late > bucket_s) / wall_s
    middle, high = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return Metered(middle, high, ordered[-1], stolen, cpu_busy, taken)


class Meter:
    """A context; `read` what was seen while it was open."""

    def __init__(self) -> None:
        self._lates_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="netem-meter", daemon=True)

    def __enter__(self) -> Meter:
        self._from_s, self._cpu, self._used_s = time.monotonic(), _cpu(), own_limits(SELF)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()
        self._wall_s = time.monotonic() - self._from_s
        busy, taken, all_ = (now - before for now, before in zip(_cpu(), self._cpu, strict=True))
        own = shares(self._used_s, own_limits(SELF), self._wall_s)
        self._busy = max(busy / max(1, all_), *own, 0.0)
        self._taken = taken / max(1, all_)

    def read(self, bucket_s: float) -> Metered:
        return metered(self._lates_s, self._wall_s, bucket_s, self._busy, self._taken)

    def _tick(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set():
            due_s += TICK_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            self._lates_s.append(max(0.0, now_s - due_s))
            due_s = max(due_s, now_s - TICK_S)  # a gap is one lateness, not one for every tick in it


def own_limits(group: Path, top: Path = _CGROUPS) -> dict[Path, tuple[float, float]]:
    """Control groups around a process that bound its CPU time: seconds used so far, and cores it may have. group: its
    /proc/PID/cgroup. Nothing where nothing bounds it, or with control groups of version 1."""
    try:
        line = next(line for line in group.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return {}
    found = {}
    here = top / line[3:].lstrip("/")
    for folder in (here, *here.parents):
        if folder != top and top not in folder.parents:
            break
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                used_us = dict(one.split() for one in (folder / "cpu.stat").read_text().splitlines())["usage_usec"]
                found[folder] = (int(used_us) * 1e-6, int(quota) / int(period))
        except (OSError, ValueError, KeyError):
            continue
    return found


def shares(
    before: Mapping[Path, tuple[float, float]], after: Mapping[Path, tuple[float, float]], wall_s: float
) -> list[float]:
    """Of what each group may have in wall_s, how much it used."""
    return [
        (used_s - before[folder][0]) / (wall_s * cores) for folder, (used_s, cores) in after.items() if folder in before
    ]


def _cpu() -> tuple[int, int, int]:
    """(busy, taken by a host, which counts as busy, all) in the kernel's ticks, of all cores together."""
    ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - sum(ticks[column] for column in _IDLE), ticks[_STEAL], sum(ticks)
