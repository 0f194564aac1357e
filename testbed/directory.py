"""The cache directory: which nodes hold which cached prefix, as far as control has been told.

A prefix goes by the id of its last whole block, which is chained over all before it. The directory may be stale: a node
looks again before it uses a prefix, and computes what is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.scheduler.api import NO_HITS


class Directory:
    """Usable prefixes by node. block_tokens: tokens a block."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holders: dict[int, tuple[str, ...]] = {}
        self._held: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Prefixes that somebody holds."""
        return len(self._holders)

    def changed(self, node: str, added: Sequence[int], removed: Sequence[int]) -> None:
        """A node's own word on what it holds now, and no longer."""
        held = self._held.setdefault(node, set())
        for block in removed:
            if block in held:
                held.remove(block)
                self._drop(node, block)
        for block in added:
            if block not in held:
                held.add(block)
                self._holders[block] = (*self._holders.get(block, ()), node)

    def forget(self, node: str) -> None:
        """The node is gone, or began anew: it holds nothing."""
        for block in self._held.pop(node, ()):
            self._drop(node, block)

    def holders(self, block: int) -> Sequence[str]:
        """The nodes that hold the prefix which ends with this block."""
        return self._holders.get(block, ())

    def hits(self, ids: Sequence[int]) -> Mapping[str, int]:
        """The longest prefix that each node holds of a prompt of these blocks, tokens; nodes without one are absent."""
        holders = self._holders
        known = [i for i, block in enumerate(ids, 1) if block in holders]
        if not known:
            return NO_HITS
        found: dict[str, int] = {}
        for i in known:  # the longest comes last
            for node in holders[ids[i - 1]]:
                found[node] = i * self.block_tokens
        return found

    def _drop(self, node: str, block: int) -> None:
        left = tuple(name for name in self._holders[block] if name != node)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
