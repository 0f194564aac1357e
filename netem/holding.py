"""When a packet leaves the delay line: pure, in integer nanoseconds of one clock. `delay.py` carries it out.

A packet that arrives at t is due at t + delay + jitter(t), and never before the one ahead of it. `jitter` is a
continuous function of time between -jitter_s and +jitter_s, straight between seeded knots that stand 4 jitter_s apart:
it falls by at most half of what time advances, so that it never reorders, and its mean is the delay itself however
dense the packets are (independent draws that may not overtake push a dense stream to delay + jitter).

In a stall the line's own clock stands still: what waits keeps its pace once it goes on, what came meanwhile is due one
delay later, and nobody was late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from netem.link import Impairment

_KNOTS_APART = 4
_NO_KNOT = -2  # no knot follows it
_BUCKET_NS = 5_000
_BUCKETS = 4_000


@dataclass(slots=True)
class Lateness:
    """How long after their due times packets were released. Buckets of 5 us up to 20 ms; the maximum is exact."""

    buckets: list[int] = field(default_factory=lambda: [0] * (_BUCKETS + 1))
    max_ns: int = 0

    def add(self, late_ns: int) -> None:
        self.buckets[min(late_ns // _BUCKET_NS, _BUCKETS)] += 1
        if late_ns > self.max_ns:
            self.max_ns = late_ns

    def quantile_s(self, quantile: float) -> float:
        """Seconds that this share of packets was late at most, rounded up to a bucket; 0.0 while there were none."""
        rank, passed = quantile * sum(self.buckets), 0
        for bucket, count in enumerate(self.buckets):
            passed += count
            if count and passed >= rank:
                return min((bucket + 1) * _BUCKET_NS, self.max_ns) * 1e-9
        return 0.0


class Jitter:
    """The offset in time, ns. Asked with times that never decrease by more than what one knot spans."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._bound_ns = self._left = self._right = self._knot = 0

    def set(self, bound_ns: int) -> None:
        """Offsets stay within +-bound_ns from here on."""
        self._bound_ns = bound_ns
        self._knot = _NO_KNOT

    def at(self, t_ns: int) -> int:
        if not self._bound_ns:
            return 0
        apart = _KNOTS_APART * self._bound_ns
        knot, inside = divmod(t_ns, apart)
        if knot > self._knot:
            draw = self._random.uniform
            following = self._right if knot == self._knot + 1 else round(draw(-self._bound_ns, self._bound_ns))
            self._left, self._right = following, round(draw(-self._bound_ns, self._bound_ns))
            self._knot = knot
        return self._left + (self._right - self._left) * inside // apart


class Holding:
    """One direction's packets, in order. Ids grow; what is lost is not held. Times passed in are the machine's."""

    def __init__(self, seed: str) -> None:
        self.impairment = Impairment()
        self.passed = self.lost = 0
        self.lateness = Lateness()
        self._waiting: deque[tuple[int, int]] = deque()  # (due ns, id)
        self._newest_due_ns = 0
        self._delay_ns = 0
        self._stopped_ns: int | None = None  # the line's clock, while it stands
        self._behind_ns = 0  # how far it is behind the machine's, by all stalls that are over
        self._loss_random = Random(f"{seed}/loss")
        self._jitter = Jitter(Random(f"{seed}/jitter"))

    @property
    def held(self) -> int:
        return len(self._waiting)

    @property
    def due_ns(self) -> int | None:
        """When the first of those waiting is to leave; None with none, and in a stall."""
        return self._waiting[0][0] + self._behind_ns if self._waiting and self._stopped_ns is None else None

    def set(self, impairment: Impairment, now_ns: int) -> None:
        """From here on; what waits keeps its due time but for stalls, and what comes later stays behind it."""
        if impairment.stalled and self._stopped_ns is None:
            self._stopped_ns = now_ns - self._behind_ns
        elif not impairment.stalled and self._stopped_ns is not None:
            self._behind_ns = now_ns - self._stopped_ns
            self._stopped_ns = None
        if impairment.jitter_s != self.impairment.jitter_s:
            self._jitter.set(round(impairment.jitter_s * 1e9))
        self.impairment = impairment
        self._delay_ns = round(impairment.delay_s * 1e9)

    def arrive(self, packet: int, t_ns: int) -> bool:
        """Hold a packet that arrived at t_ns. False: it is lost, and the caller drops it."""
        loss = self.impairment.loss
        if loss and self._loss_random.random() < loss:
            self.lost += 1
            return False
        line_ns = t_ns - self._behind_ns
        if self._stopped_ns is not None and line_ns > self._stopped_ns:
            line_ns = self._stopped_ns
        self._newest_due_ns = max(self._newest_due_ns, line_ns + self._delay_ns + self._jitter.at(line_ns))
        self._waiting.append((self._newest_due_ns, packet))
        return True

    def release(self, now_ns: int) -> int | None:
        """The id up to which everything is due by now (None: nothing is), which the caller lets go in order."""
        waiting, newest = self._waiting, None
        if self._stopped_ns is not None:
            return None
        line_ns = now_ns - self._behind_ns
        while waiting and waiting[0][0] <= line_ns:
            due_ns, newest = waiting.popleft()
            self.passed += 1
            self.lateness.add(line_ns - due_ns)
        return newest
