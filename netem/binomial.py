"""How many of n packets a link that loses each with probability p may lose: exact, by the binomial distribution. Pure.

Losses of a real link come one by one and apart from each other, as both mechanisms draw them. So what was counted is
judged by the exact (Clopper-Pearson) interval of p, not by a normal approximation, which is wrong at a few losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

CONFIDENCE = 0.999
"""Of an interval: one good link in a thousand is blamed."""
_HALVINGS = 60


def at_most(k: int, n: int, p: float) -> float:
    """The probability that of n packets at most k are lost. 0 <= k, p a fraction."""
    if k >= n or p <= 0:
        return 1.0
    if p >= 1 or k < 0:
        return 0.0
    odds, first = math.log(p) - math.log1p(-p), n * math.log1p(-p)
    choose = math.lgamma(n + 1)
    terms = (first + choose - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * odds for i in range(k + 1))
    return min(1.0, math.fsum(map(math.exp, terms)))


def interval(lost: int, sent: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """(low, high): the loss fractions that `lost` of `sent` do not speak against, at that confidence."""
    tail = (1 - confidence) / 2
    low = 0.0 if lost == 0 else _where(lambda p: 1 - at_most(lost - 1, sent, p) >= tail)
    high = 1.0 if lost >= sent else _where(lambda p: at_most(lost, sent, p) <= tail)
    return low, high


def _where(reached: Callable[[float], bool]) -> float:
    """The p in [0, 1] at which a condition that stays true once it is becomes true."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
