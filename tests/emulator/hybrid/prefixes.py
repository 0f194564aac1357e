"""A cached prefix of a sequence, as a prefill node would have kept it."""

from __future__ import annotations

from emulator.backends.hybrid.held import Prefix, Snapshot
from emulator.backends.hybrid.layers import KvState
from emulator.backends.hybrid.model import SequenceState


def prefix_of(whole: SequenceState, tokens: int, snapshot: Snapshot) -> SequenceState:
    """The state after the first `tokens`: its kept rows cut, its other layers as they were then."""
    rows = {i: one.kept[:tokens] for i, one in enumerate(whole.layers) if isinstance(one, KvState)}
    return Prefix([rows], snapshot, tokens).state(len(whole.layers))
