"""A cloud's token bucket: peak rate while a budget of bytes lasts, base rate when it is used up (Uta et al., NSDI'20:
10 Gbps, and 1 Gbps after some ten minutes). It depends on what is sent, so it is no `Schedule` but is fed back to.

Whoever has the link asks `next_s()` when to look, and then tells `advance` the time and how many bits have been sent
*in all*: virtual time those of `FluidLink.delivered_bytes` (divided by TCP's efficiency: bits on the wire), the agent
those of its class's counter. Both then set the rate they are told. Deterministic; one bucket a direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from netem.courses import Point, number, rate, refuse

RESUME_S = 1.0
"""A bucket that was empty is at its peak again once it holds what the peak sends in this time (or is full)."""
LOOK_S = 0.05
"""Never two looks closer together; what is sent beyond an empty bucket meanwhile is owed."""
_BIT = 1e-3


@dataclass(frozen=True, slots=True)
class TokenBucketSpec:
    """peak_bps, base_bps: the two rates. budget_bytes: what the bucket holds at most; initial_bytes: at t = 0, full
    unless given. refill_bps: at which it fills, all the time; base_bps unless given."""

    kind: ClassVar[str] = "token_bucket"
    peak_bps: float
    base_bps: float
    budget_bytes: float
    initial_bytes: float | None = None
    refill_bps: float | None = None

    def __post_init__(self) -> None:
        if rate("base_bps", self.base_bps) >= rate("peak_bps", self.peak_bps):
            refuse("base_bps", self.base_bps, f"is not below peak_bps = {self.peak_bps:g}", "exchange them")
        if number("budget_bytes", self.budget_bytes) <= 0:
            refuse("budget_bytes", self.budget_bytes, "is no budget", "give bytes, more than 0")
        if self.initial_bytes is not None:
            number("initial_bytes", self.initial_bytes, 0.0, self.budget_bytes)
        if self.refill_bps is not None and not 0 < number("refill_bps", self.refill_bps) < self.peak_bps:
            refuse(
                "refill_bps", self.refill_bps, f"is not between 0 and peak_bps = {self.peak_bps:g}", "give one that is"
            )


class TokenBucket:
    """The bucket of one direction, as it is at the last look. Times in s, from 0 on; bits as they are on the wire.

    resume_s, look_s: in the clock's own seconds, see RESUME_S and LOOK_S, which are model seconds.
    """

    def __init__(self, spec: TokenBucketSpec, *, resume_s: float = RESUME_S, look_s: float = LOOK_S) -> None:
        self.spec = spec
        self._look_s = look_s
        self._budget = spec.budget_bytes * 8
        self._refill = spec.base_bps if spec.refill_bps is None else spec.refill_bps
        self._resume = min(self._budget, spec.peak_bps * resume_s)
        self._tokens = self._budget if spec.initial_bytes is None else spec.initial_bytes * 8
        self._at_s, self._sent = 0.0, 0.0
        self._full_rate = self._tokens > _BIT

    @property
    def rate_bps(self) -> float:
        """What the link may send from the last look on."""
        return self.spec.peak_bps if self._full_rate else self.spec.base_bps

    def advance(self, t_s: float, sent_bits: float) -> float:
        """The rate from t_s on; sent_bits: all that was ever sent, by then. Raises LinkError for one that falls."""
        number("t_s", t_s, self._at_s)
        number("sent_bits", sent_bits, self._sent)
        filled = self._tokens + self._refill * (t_s - self._at_s) - (sent_bits - self._sent)
        self._tokens = min(self._budget, filled)
        self._at_s, self._sent = t_s, sent_bits
        self._full_rate = self._tokens > _BIT if self._full_rate else self._tokens >= self._resume - _BIT
        return self.rate_bps

    def next_s(self) -> float:
        """When the rate may change at the earliest: the bucket is empty at the peak, or fills while nobody sends."""
        if self._full_rate:
            wait_s = self._tokens / (self.spec.peak_bps - self._refill)
        else:
            wait_s = (self._resume - self._tokens) / self._refill
        return self._at_s + max(self._look_s, wait_s)


def saturated(spec: TokenBucketSpec, end_s: float) -> list[Point]:
    """(t_s, rate_bps) in [0, end_s) for somebody who always sends all that he may."""
    bucket, at_s, sent = TokenBucket(spec), 0.0, 0.0
    points = [(0.0, bucket.rate_bps)]
    while (next_s := bucket.next_s()) < end_s:
        sent += bucket.rate_bps * (next_s - at_s)
        at_s = next_s
        if bucket.advance(at_s, sent) != points[-1][1]:
            points.append((at_s, bucket.rate_bps))
    return points
