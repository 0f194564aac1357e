"""The tensors of a node's cached prefixes, beside the pool that decides which of them there are.

A pool block stands for the rows that the full-attention layers keep of its tokens, a snapshot for the states of all
other layers after it. Both go by the block's id; what the pool evicts is dropped in the same moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emulator.backends.hybrid.config import ModelConfig, ModelError
from emulator.backends.hybrid.layers import KvState, LayerState
from emulator.backends.hybrid.model import SequenceState
from emulator.backends.hybrid.state import OVERHEAD_BYTES
from emulator.kvcache import CacheShape, Ids, NodePool

Snapshot = Mapping[int, LayerState]
"""The states of the layers that are not full attention, by layer."""


def cache_shape(config: ModelConfig, block_tokens: int) -> CacheShape:
    """What a cached prefix of this model weighs, as it crosses. Raises ModelError for blocks that cannot be."""
    if block_tokens % config.chunk:
        raise ModelError(f"block_tokens = {block_tokens}: a multiple of the model's chunk, {config.chunk}, is needed")
    if "sliding" in config.kinds and block_tokens < config.window:
        raise ModelError(f"block_tokens = {block_tokens}: at least the sliding window, {config.window}, is needed")
    full = sum(config.layer_bytes(kind, block_tokens) for kind in config.kinds if kind == "full")
    other = sum(config.layer_bytes(kind, block_tokens) for kind in config.kinds if kind != "full")
    if not full:
        raise ModelError(f"pattern = {config.pattern!r}: without a full-attention layer there is nothing to cache")
    return CacheShape(block_tokens, full, other + config.layers * OVERHEAD_BYTES)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached prefix, as long as somebody has it: whatever is evicted meanwhile, its tensors stay. blocks: of each
    block the rows of each full-attention layer; snapshot: after the last."""

    blocks: Sequence[Mapping[int, Tensor]]
    snapshot: Snapshot
    tokens: int

    def state(self, layers: int) -> SequenceState:
        """A state of its own, that may go on."""
        whole: list[LayerState] = []
        for layer in range(layers):
            if layer in self.snapshot:
                whole.append(self.snapshot[layer].clone())
            else:
                whole.append(KvState(torch.cat([block[layer] for block in self.blocks]), self.tokens, self.tokens))
        return SequenceState(whole, self.tokens)


class Held:
    """What the pool of one node stands for. The pool tells what it evicts from the making of this on."""

    def __init__(self, config: ModelConfig, pool: NodePool) -> None:
        self._config = config
        self._pool = pool
        self._full = [layer for layer, kind in enumerate(config.kinds) if kind == "full"]
        self._blocks: dict[int, dict[int, Tensor]] = {}
        self._snapshots: dict[int, Snapshot] = {}
        pool.on_evicted = self._evicted

    @property
    def bytes_held(self) -> int:
        """Of all tensors."""
        blocks = sum(rows.nbytes for block in self._blocks.values() for rows in block.values())
        states = [state for snapshot in self._snapshots.values() for state in snapshot.values()]
        return blocks + sum(part.nbytes for state in states for part in state.parts)

    def keep(self, ids: Ids, state: SequenceState, snapshots: Mapping[int, Snapshot]) -> None:
        """The prefix of these blocks, of a sequence whose state is given, and the snapshots after some of its blocks
        (by number, from 1): of both what the pool holds now."""
        size = self._pool.shape.block_tokens
        for i, one in enumerate(ids[: self._pool.present(ids)]):
            if one not in self._blocks:
                self._blocks[one] = {
                    layer: _rows(state.layers[layer])[i * size : (i + 1) * size].clone() for layer in self._full
                }
        for number, snapshot in snapshots.items():
            if self._pool.match(ids[:number]) == number:
                self._snapshots[ids[number - 1]] = snapshot

    def prefix(self, ids: Ids) -> Prefix:
        """What is held of these blocks, which the pool holds, and usable after the last."""
        tokens = len(ids) * self._pool.shape.block_tokens
        return Prefix([self._blocks[one] for one in ids], self._snapshots[ids[-1]], tokens)

    def _evicted(self, ids: Ids, snapshot: bool) -> None:
        for one in ids:
            (self._snapshots if snapshot else self._blocks).pop(one, None)


def _rows(state: LayerState) -> Tensor:
    assert isinstance(state, KvState)
    return state.kept
