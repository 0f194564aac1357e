"""A link that falls and comes back, again and again, is not followed to and fro: what counts then is its mean.

Following a dip costs: while t is high the local site takes more than it can do, and what piled up there stays when the
link is back. That pays for a dip that lasts; of one that others have just gone before, it is not to be expected.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

REMEMBERED_S: Final = 120.0
"""A turn is remembered for as long, model seconds, and the mean is over as long."""
TURNS: Final = 3
"""So many turns that are remembered are flapping: down, up, down."""
TURN: Final = 0.3
"""What makes a turn, relative to the higher of two rates."""


class Flaps:
    """Told the link's estimate at every tick. Ours, not the paper's."""

    def __init__(self) -> None:
        self._turns: deque[float] = deque()  # when
        self._seen: deque[tuple[float, float]] = deque()  # (s, bits/s), whenever it became another
        self._falling: bool | None = None
        self._farthest_bps = 0.0  # how far it went since the last turn

    def see(self, now_s: float, bps: float) -> None:
        """The estimate as it is now, bits/s. Times never go back."""
        if not self._seen:
            self._farthest_bps = bps
        if not self._seen or bps != self._seen[-1][1]:
            self._seen.append((now_s, bps))
        forgotten_s = now_s - REMEMBERED_S
        while len(self._seen) > 1 and self._seen[1][0] <= forgotten_s:
            self._seen.popleft()
        while self._turns and self._turns[0] <= forgotten_s:
            self._turns.popleft()
        if not self._falling and bps < (1 - TURN) * self._farthest_bps:
            self._turn(now_s, bps, falling=True)
        elif self._falling and self._farthest_bps < (1 - TURN) * bps:
            self._turn(now_s, bps, falling=False)
        else:
            self._farthest_bps = min(bps, self._farthest_bps) if self._falling else max(bps, self._farthest_bps)

    def _turn(self, now_s: float, bps: float, *, falling: bool) -> None:
        self._turns.append(now_s)
        self._falling, self._farthest_bps = falling, bps

    @property
    def flapping(self) -> bool:
        """Whether the link turned so often of late that its next turn is to be expected."""
        return len(self._turns) >= TURNS

    def lasting_bps(self, now_s: float) -> float:
        """What to reckon with, bits/s, once something was seen: the estimate, or its mean over time if it flaps."""
        if not self.flapping:
            return self._seen[-1][1]
        start_s = now_s - REMEMBERED_S
        spans = pairwise([*self._seen, (now_s, 0.0)])
        bits = sum(bps * (end_s - max(at_s, start_s)) for (at_s, bps), (end_s, _) in spans)
        return bits / (now_s - max(self._seen[0][0], start_s))
