"""What the model takes on this machine: seconds of a prefill and of a decode step, bytes of a state. Its stopwatch.

Every length and batch is taken once a round, so that a machine that slows down does so for all of them. A figure is a
median; its spread says whether the machine was doing anything else.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from emulator.backends.hybrid.config import BYTES, MAX_BATCH, ModelConfig, ModelError
from emulator.backends.hybrid.model import HybridModel, SequenceState
from emulator.backends.hybrid.parcel import parcel_bytes

STEPS = 8
"""Decode steps of a round, after one that is not counted."""
MOST_PIECES = 64


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall seconds of one thing, each time it was done."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the times lie within this share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s

    @property
    def uncertain(self) -> float:
        """The median's standard error, as a share of it: 0.93 of the spread, by the root of the number of times."""
        return 0.93 * self.spread / math.sqrt(len(self.seconds))


@dataclass(frozen=True, slots=True)
class Measured:
    """prefill: by tokens; decode: by requests and tokens of each one's context; kv_bytes: of a state as it crosses, by
    tokens; leaves: when a byte of it may leave, in the mean, as a share of the prefill, by tokens."""

    prefill: dict[int, Timed] = field(default_factory=dict)
    decode: dict[tuple[int, int], Timed] = field(default_factory=dict)
    kv_bytes: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, float] = field(default_factory=dict)

    @property
    def pieces(self) -> int:
        """The number of equal pieces, one after each equal part of the prefill, whose bytes leave as late as these do
        in the mean: of k pieces that is after (k + 1) / 2k of it."""
        middle = statistics.median(self.leaves.values())
        return min(range(1, MOST_PIECES + 1), key=lambda k: abs((k + 1) / (2 * k) - middle))

    @property
    def uncertain(self) -> float:
        """The most uncertain of all."""
        return max(one.uncertain for one in (*self.prefill.values(), *self.decode.values()))


def check(lengths: Sequence[int], batches: Sequence[int]) -> None:
    """Raises ModelError for what cannot be measured, or makes no profile."""
    if len(set(lengths)) < 2 or min(lengths) < 1:
        raise ModelError(f"lengths: {list(lengths)}: give at least two different numbers of tokens, from 1 on")
    if not batches or min(batches) < 1 or max(batches) > MAX_BATCH:
        raise ModelError(f"batches: {list(batches)}: give numbers of requests from 1 to {MAX_BATCH}")


def measure(
    model: HybridModel,
    lengths: Sequence[int],
    batches: Sequence[int],
    *,
    rounds: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Prefill prompts of these lengths, and decode these batches at each of them. Raises ModelError."""
    check(lengths, batches)
    ordered, cuda = sorted(set(lengths)), model.device.type == "cuda"

    def now_s() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, BYTES, (ordered[-1],), generator=generator).tolist()
    prefill: dict[int, list[float]] = {length: [] for length in ordered}
    decode: dict[tuple[int, int], list[float]] = {}
    weights: dict[int, int] = {}
    leaves: dict[int, float] = {}
    for done in range(-1, rounds):  # the first one is a warm-up
        tell(f"round {done + 1} of {rounds}" if done >= 0 else "warm-up")
        for length in ordered:
            state = model.empty()
            began_s = now_s()
            model.prefill(prompt[:length], state)
            took_s = now_s() - began_s
            weights[length] = kv_bytes(model.config, state)
            if done < 0:
                leaves[length] = _leaves(model, prompt[:length], now_s)
            steps: dict[int, list[float]] = {}
            for batch in sorted(set(batches)):
                states = [state.clone() for _ in range(batch)]
                marks = []
                for _ in range(STEPS + 1):
                    model.decode([0] * batch, states)
                    marks.append(now_s())
                steps[batch] = [after - before for before, after in pairwise(marks)]
            if done >= 0:
                prefill[length].append(took_s)
                for batch, taken in steps.items():
                    decode.setdefault((batch, length), []).extend(taken)
    return Measured(
        {length: Timed(tuple(seconds)) for length, seconds in prefill.items()},
        {key: Timed(tuple(seconds)) for key, seconds in decode.items()},
        weights,
        leaves,
    )


def kv_bytes(config: ModelConfig, state: SequenceState) -> int:
    """S_kv: what a transfer of this state weighs, headers and the first token included."""
    tensors = sum(part.nbytes for one in state.layers for part in one.parts)
    return tensors + parcel_bytes(config, state.tokens, answer=True) - config.state_bytes(state.tokens)


def _leaves(model: HybridModel, prompt: Sequence[int], now_s: Callable[[], float]) -> float:
    """When a byte of the state may leave, in the mean: a full-attention layer's rows while it computes, evenly; all
    others at their layer's end. A share of the prefill."""
    ends = [now_s()]
    model.prefill(prompt, model.empty(), on_layer=lambda layer, state: ends.append(now_s()))
    sizes = [model.config.layer_bytes(kind, len(prompt)) for kind in model.config.kinds]
    when = [
        (start + end) / 2 if kind == "full" else end
        for kind, (start, end) in zip(model.config.kinds, pairwise(ends), strict=True)
    ]
    mean = sum(size * at for size, at in zip(sizes, when, strict=True)) / sum(sizes)
    return (mean - ends[0]) / (ends[-1] - ends[0])
