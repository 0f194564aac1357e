"""The gate's arithmetic: a confidence sequence for paired differences, and a bootstrap over runs. Pure, numpy only.

One number a seed comes in: requests of a run are correlated, so a run is one observation. Looking after every round and
stopping when it is decided would make an ordinary interval lie; a confidence *sequence* holds at all times at once.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_FOLD: Final = math.log(1000.0)
"""A ratio further from 1 than a thousandfold counts as that: 0, or no value in one arm only, is one."""

RESAMPLES: Final = 4000
BOOTSTRAP_CONFIDENCE: Final = 0.95


def log_ratio(baseline: float, candidate: float) -> float:
    """ln(candidate / baseline) of two values >= 0, within +-MOST_FOLD; 0 when both are 0."""
    if baseline == candidate:
        return 0.0
    if baseline <= 0.0 or candidate <= 0.0:
        return MOST_FOLD if candidate > baseline else -MOST_FOLD
    return min(max(math.log(candidate / baseline), -MOST_FOLD), MOST_FOLD)


def radius(n: int, deviation: float, alpha: float, weight: float) -> float:
    """Half the width, at n observations, of a sequence of intervals that all hold the true mean with chance 1 - alpha.

    The t-test's martingale of Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with
    unknown variance" (arXiv:2310.03722, theorem 4.7 and its corollary): with V = sum x_i^2, S = sum x_i, c^2 = weight,

        G_n = sqrt(c^2 / (n + c^2)) ((n + c^2) V / ((n + c^2) V - S^2))^(n/2)

    is, for independent normal x_i of mean 0 and any deviation, a non-negative martingale from 1 (a normal mixture over
    mean/deviation of variance 1/c^2, a right Haar one over the deviation), so by Ville's inequality it ever reaches
    1/alpha with chance alpha at most. A mean m is in the interval while G_n of x_i - m is below 1/alpha. With
    sum (x_i - m)^2 = n (deviation^2 + (mean - m)^2) that is |mean - m| < radius,

        radius^2 = deviation^2 (n + c^2) (1 - q) / (q (n + c^2) - c^2),    q = (alpha^2 c^2 / (n + c^2))^(1/n).

    deviation: the root of the mean squared deviation (divisor n). Infinite while n is too small for any bound.
    """
    q = (alpha * alpha * weight / (n + weight)) ** (1.0 / n)
    room = q * (n + weight) - weight
    if room <= 0.0:
        return math.inf
    return deviation * math.sqrt((n + weight) * (1.0 - q) / room)


@cache
def best_weight(n: int, alpha: float) -> float:
    """The weight with which the radius at n observations is smallest; validity does not depend on it."""
    grid = np.geomspace(1e-3, 10.0 * n, 4001)
    found = min((radius(n, 1.0, alpha, float(weight)), float(weight)) for weight in grid)
    return found[1]


def sequence_interval(differences: Floats, alpha: float, planned: int) -> tuple[float, float]:
    """(low, high) of the mean difference, valid at whatever n one looks. differences: shape (n,), n >= 1, finite.

    planned: the most observations there will be; the interval is narrowest there. Equal differences have no width, so
    the caller sees to it that there are several.
    """
    n = len(differences)
    mean, deviation = float(differences.mean()), float(differences.std())
    if deviation == 0.0 and n > 1:
        return mean, mean
    half = radius(n, deviation, alpha, best_weight(max(2, planned), alpha)) if n > 1 else math.inf
    return mean - half, mean + half


def bootstrap_interval(
    differences: Floats, confidence: float = BOOTSTRAP_CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """(low, high) of the mean difference by resampling runs: bias-corrected and accelerated (Efron 1987).

    differences: shape (n,), one a run. With z0 = Phi^-1(share of resampled means below the mean) and the acceleration
    a = sum(l^3) / (6 sum(l^2)^1.5), l the jackknife's mean less its values, the ends are the quantiles
    Phi(z0 + (z0 + z) / (1 - a (z0 + z))), z = +-Phi^-1((1 + confidence) / 2). The mean twice when nothing varies.
    """
    n = len(differences)
    mean = float(differences.mean())
    left_out = (differences.sum() - differences) / max(1, n - 1)
    lean = left_out.mean() - left_out
    squares = float((lean**2).sum())
    if n < 2 or squares == 0.0:
        return mean, mean
    drawn = np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, n))
    means = np.sort(differences[drawn].mean(axis=1))
    normal = NormalDist()
    below = (float((means < mean).mean()) + float((means <= mean).mean())) / 2
    z0 = normal.inv_cdf(min(max(below, 0.5 / RESAMPLES), 1 - 0.5 / RESAMPLES))
    acceleration = float((lean**3).sum()) / (6.0 * squares**1.5)
    ends = []
    for z in (normal.inv_cdf((1 - confidence) / 2), normal.inv_cdf((1 + confidence) / 2)):
        tilted = z0 + z
        ends.append(normal.cdf(z0 + tilted / (1.0 - acceleration * tilted)))
    low, high = np.quantile(means, ends).tolist()
    return float(low), float(high)
