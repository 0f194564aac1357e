"""Which cached prefixes are hot: how many requests of late found them.

A prefix is known by its last block, whose id is chained over all before it. Counts are of two halves of a window that
take turns, so nothing is ever swept, and what nobody asks for is forgotten within a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Hot(NamedTuple):
    """A prefix: the first `blocks` of `ids`, which `hits` requests of the window found cached somewhere."""

    ids: tuple[int, ...]
    blocks: int
    hits: int

    @property
    def block_id(self) -> int:
        """The id of the last block, which stands for the prefix."""
        return self.ids[self.blocks - 1]


class Heat:
    """Hits by prefix over the last half to whole `window_s` (model seconds).

    most: prefixes that a half may count; of more, the first come are counted, which the hot ones are among.
    """

    def __init__(self, window_s: float, most: int = 4096) -> None:
        self._half_s = window_s / 2
        self._most = most
        self._turn_s = self._half_s
        self._now: dict[int, Hot] = {}
        self._before: dict[int, Hot] = {}

    def __len__(self) -> int:
        """Prefixes that are counted."""
        return len(self._now.keys() | self._before.keys())

    def note(self, now_s: float, ids: tuple[int, ...], lengths: Iterable[int]) -> None:
        """A request of these blocks has come, of which so many blocks, each > 0, are cached at one node or another."""
        self._turn(now_s)
        counted = self._now
        for blocks in set(lengths):
            block_id = ids[blocks - 1]
            one = counted.get(block_id)
            if one is not None:
                counted[block_id] = Hot(one.ids, blocks, one.hits + 1)
            elif len(counted) < self._most:
                counted[block_id] = Hot(ids, blocks, 1)

    def hottest(self, now_s: float, least: int) -> list[Hot]:
        """The prefixes found at least `least` times, by the blocks they spared, most first."""
        self._turn(now_s)
        found = []
        for block_id in self._now.keys() | self._before.keys():
            one, other = self._now.get(block_id), self._before.get(block_id)
            known = one or other
            hits = (one.hits if one else 0) + (other.hits if other else 0)
            if known is not None and hits >= least:
                found.append(known._replace(hits=hits))
        return sorted(found, key=lambda hot: (-hot.hits * hot.blocks, hot.block_id))

    def _turn(self, now_s: float) -> None:
        if now_s < self._turn_s:
            return
        late = now_s - self._turn_s >= self._half_s  # nothing was asked for a whole half
        self._before, self._now = ({} if late else self._now), {}
        self._turn_s = now_s + self._half_s
