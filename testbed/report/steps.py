"""Functions of time that stand still between steps, such as a rate or a threshold: their means and last values in bins,
and the figures of points in bins. Pure, numpy alone; a million points cost fractions of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Steps:
    """`values[i]` holds from `times[i]` on; before the first, `base`."""

    def __init__(self, base: float, steps: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(steps, key=lambda step: step[0])
        self.times = np.array([at_s for at_s, _ in ordered], dtype=np.float64)
        self.values = np.array([base, *(value for _, value in ordered)], dtype=np.float64)

    def at(self, times: Array) -> Array:
        """The values at given times, a step at that very time included."""
        return self.values[np.searchsorted(self.times, times, "right")]

    def means(self, edges: Array) -> Array:
        """The mean in each bin between ascending edges."""
        inside = self.times[(self.times > edges[0]) & (self.times < edges[-1])]
        cuts = np.union1d(edges, inside)
        area = np.concatenate([[0.0], np.cumsum(self.at(cuts[:-1]) * np.diff(cuts))])
        return np.diff(area[np.searchsorted(cuts, edges)]) / np.diff(edges)


def bin_of(times: Array, edges: Array) -> Array:
    """The bin of each time, -1 for one outside (or NaN); the edges are evenly spaced, the last one is outside."""
    with np.errstate(invalid="ignore"):
        at = np.floor((times - edges[0]) / (edges[1] - edges[0]))
        return np.where((at >= 0) & (at < len(edges) - 1), at, -1).astype(np.int64)


def counts(bins: Array, count: int, weights: Array | None = None) -> Array:
    """How many, or what weight, is in each of `count` bins; those in bin -1 are left out."""
    there = bins >= 0
    return np.bincount(bins[there], None if weights is None else weights[there], minlength=count)


def largest(values: Array, bins: Array, count: int) -> Array:
    """The largest value in each bin; NaN in one that has none."""
    out = np.full(count, -np.inf)
    there = (bins >= 0) & ~np.isnan(values)
    np.maximum.at(out, bins[there], values[there])
    out[out == -np.inf] = np.nan
    return out


def means(values: Array, bins: Array, count: int) -> Array:
    """The mean value in each bin; NaN in one that has none."""
    there = np.where(np.isnan(values), -1, bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        return counts(there, count, np.nan_to_num(values)) / counts(there, count)


def quantiles(values: Array, bins: Array, count: int, points: Sequence[float]) -> list[Array]:
    """The quantiles (shares of 1) of the values in each bin, between values by straight lines; NaN where there are
    none."""
    there = (bins >= 0) & ~np.isnan(values)
    values, bins = values[there], bins[there]
    values = values[np.lexsort((values, bins))]
    sizes = np.bincount(bins, minlength=count)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    out = []
    for point in points:
        made = np.full(count, np.nan)
        full = sizes > 0
        place = point * (sizes[full] - 1)
        low = np.floor(place).astype(np.int64)
        first, high = starts[full], np.minimum(low + 1, sizes[full] - 1)
        made[full] = values[first + low] + (values[first + high] - values[first + low]) * (place - low)
        out.append(made)
    return out
