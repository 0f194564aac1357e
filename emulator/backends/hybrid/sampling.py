"""Which token comes next, from the logits: greedy, or by chance that is drawn from the request's seed and the place.

No generator goes from token to token and from request to request: the same request gives the same answer in any batch,
and at its second attempt as at its first.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from emulator.computing import Sampling

Logits = npt.NDArray[np.floating[Any]]


def choose(logits: Logits, sampling: Sampling, place: int) -> int:
    """The token at `place` (from 0) of the answer. logits: [vocabulary]; of equal ones the lower token comes first."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    cumulated = np.cumsum(weights[order]) / weights.sum()
    nucleus = int(np.searchsorted(cumulated, sampling.top_p)) + 1  # the fewest tokens that have top_p between them
    nucleus = min(nucleus, len(order))
    drawn = _uniform(sampling.seed, place) * cumulated[nucleus - 1]
    return int(order[min(int(np.searchsorted(cumulated, drawn, side="right")), nucleus - 1)])


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on these two alone."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, place), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
