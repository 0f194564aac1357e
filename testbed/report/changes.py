"""What the scheduler changed during a load, and how far that kept it from the optimum.

A change is a dict: t_s (model seconds), kind (threshold, role, ...), node, before, after, trigger. A threshold of None
is one above every length, infinite: JSON has no word for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pandas as pd

SETTLED: Final = 0.10
"""A threshold has settled when it stays within this share of the optimum."""

NEAR: Final = 0.15
"""A threshold is near the optimum within this share of it."""

REACTION_S: Final = 20.0
"""Model seconds in which nobody could know better yet: figures after a change are also given without them."""

Change = dict[str, Any]


def changes_of(totals: dict[str, Any], requests: pd.DataFrame) -> list[Change]:
    """What the scheduler changed, in order: its own account, else what the rows' thresholds show."""
    if "changes" in totals:
        return list(totals["changes"])
    rows = requests[["route_s", "threshold_tokens"]].dropna().sort_values("route_s", kind="stable")
    steps = pairwise(zip(rows["route_s"].tolist(), rows["threshold_tokens"].tolist(), strict=True))
    words = {"kind": "threshold", "node": "", "trigger": ""}
    return [{"t_s": at_s, **words, "before": was, "after": now} for (_, was), (at_s, now) in steps if now != was]


def count(changes: Iterable[Change], kind: str, start_s: float = -math.inf, end_s: float = math.inf) -> int:
    """How many changes of a kind there were in start_s .. end_s."""
    return sum(1 for change in changes if change["kind"] == kind and start_s <= change["t_s"] < end_s)


@dataclass(frozen=True, slots=True)
class Target:
    """A span of time, model seconds, and the threshold that is best in it; None where there is no choice."""

    start_s: float
    end_s: float
    threshold_tokens: float | None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A threshold over time: `values` tokens, each from its `starts_s` on, the first from ever."""

    starts_s: list[float]
    values: list[float]

    def at(self, at_s: float) -> float:
        """The threshold at a model second, a change at that very time included."""
        return next(value for start_s, value in reversed(self.steps()) if start_s <= at_s)

    def steps(self) -> list[tuple[float, float]]:
        """(model second, tokens): from when on each value held."""
        return list(zip(self.starts_s, self.values, strict=True))

    def pieces(self, start_s: float, end_s: float) -> list[tuple[float, float, float]]:
        """(start, end, tokens) of every stretch of start_s .. end_s in which the threshold stands still."""
        ends = [*self.starts_s[1:], math.inf]
        cut = [
            (max(since_s, start_s), min(until_s, end_s), value)
            for (since_s, value), until_s in zip(self.steps(), ends, strict=True)
        ]
        return [piece for piece in cut if piece[0] < piece[1]]


def thresholds(changes: Sequence[Change], last: float | None) -> Thresholds | None:
    """The threshold over time; last: the one that stood in the end. None for a policy that has none."""
    moves = [change for change in changes if change["kind"] == "threshold"]
    if not moves:
        return None if last is None else Thresholds([-math.inf], [last])
    values = [moves[0]["before"], *(change["after"] for change in moves)]
    known = [math.inf if value is None else float(value) for value in values]
    return Thresholds([-math.inf, *(change["t_s"] for change in moves)], known)


def is_within(value: float, target: float, share: float) -> bool:
    """|value / target - 1| <= share."""
    return abs(value - target) <= share * target


def settle_s(over_time: Thresholds | None, targets: Sequence[Target]) -> float | None:
    """Model seconds from the first target's start until the threshold stays within 10 % of each target in its time, to
    the end of the last. None when it does not, or there is no choice."""
    if over_time is None:
        return None
    start_s, settled_s = targets[0].start_s, targets[0].start_s
    for target in targets:
        if not target.threshold_tokens:
            return None
        for _, until_s, value in over_time.pieces(target.start_s, target.end_s):
            if not is_within(value, target.threshold_tokens, SETTLED):
                settled_s = until_s
    return settled_s - start_s if settled_s < targets[-1].end_s else None


def near_fraction(over_time: Thresholds | None, target: Target) -> float | None:
    """The share of a target's time in which the threshold is within 15 % of it; None without a choice or time."""
    if over_time is None or not target.threshold_tokens or target.end_s <= target.start_s:
        return None
    pieces = over_time.pieces(target.start_s, target.end_s)
    near_s = sum(end - start for start, end, value in pieces if is_within(value, target.threshold_tokens, NEAR))
    return near_s / (target.end_s - target.start_s)


def mean_ratio(over_time: Thresholds | None, target: Target) -> float | None:
    """The mean over a target's time of the threshold, over the target; None without a choice, or for an infinite t."""
    if over_time is None or not target.threshold_tokens or target.end_s <= target.start_s:
        return None
    area = sum((end - start) * value for start, end, value in over_time.pieces(target.start_s, target.end_s))
    ratio = area / (target.end_s - target.start_s) / target.threshold_tokens
    return ratio if math.isfinite(ratio) else None
