"""A profile from measurements: the decode step fitted to its batches, every figure with its source, written as YAML.

Pure: what was measured comes in as numbers, whoever measured it (`backends/hybrid/measure.py`: a model by itself;
`testbed/calibrate.py`: a testbed under load).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import yaml

from emulator.decode_step import AffineStep
from emulator.profile import ProfileError


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step that was measured: requests in it, tokens of KV in all their contexts, wall seconds."""

    batch: float
    kv_tokens: float
    seconds: float


def fit_step(steps: Sequence[Step]) -> tuple[AffineStep, float]:
    """The affine step nearest to what was measured, by relative squares, and how far the farthest of them is from it
    (0.05: 5 %). No coefficient is below 0. Raises ProfileError for less than one step, or for times that fit none."""
    if not steps:
        raise ProfileError("no decode step was measured: give at least one batch")
    seconds = np.array([one.seconds for one in steps])
    terms = np.array([[1.0, one.batch, one.kv_tokens] for one in steps]) / seconds[:, None]
    best: tuple[float, np.ndarray[Any, Any]] | None = None
    for chosen in (columns for count in (1, 2, 3) for columns in combinations(range(3), count) if 0 in columns):
        found = np.zeros(3)
        found[list(chosen)] = np.linalg.lstsq(terms[:, chosen], np.ones(len(steps)), rcond=None)[0]
        missed = float(np.square(terms @ found - 1).sum())
        if found[0] > 0 and (found >= 0).all() and (best is None or missed < best[0] - 1e-12):
            best = (missed, found)
    if best is None:
        raise ProfileError("the decode steps that were measured fit no base and no growth; measure again")
    base_s, per_request_s, per_kv_token_s = map(float, best[1])
    return AffineStep(base_s, per_request_s, per_kv_token_s), float(np.abs(terms @ best[1] - 1).max())


def text_of(
    *,
    name: str,
    model: str,
    hardware: str,
    prefill_s: Mapping[int, float],
    kv_bytes: Mapping[int, int],
    steps: Sequence[Step],
    slots: int,
    pieces: int,
    source: str,
    measurement: Mapping[str, Any],
) -> str:
    """The profile's YAML. prefill_s, kv_bytes: by tokens. slots: of the decode batch, whose step at the middle length
    is what the closed form reckons with. Raises ProfileError for times that fall with the length, or fit no step."""
    lengths = sorted(prefill_s)
    for short, long in pairwise(lengths):
        if prefill_s[long] < prefill_s[short]:
            raise ProfileError(
                f"a prefill of {long} tokens took {prefill_s[long]:.4g} s, one of {short} tokens "
                f"{prefill_s[short]:.4g} s: the machine was doing something else; measure again when it is not"
            )
    step, farthest = fit_step(steps)
    middle = lengths[len(lengths) // 2]
    measured = {"status": "measured", "source": source}
    content = {
        "name": name,
        "kind": "timing",
        "model": model,
        "hardware": hardware,
        "lengths_tokens": lengths,
        "s_kv": {
            "unit": "bytes",
            "values": [float(kv_bytes[length]) for length in lengths],
            "status": "measured",
            "source": "the bytes of a state as it is sent, headers included",
        },
        "t_prefill_s": {"values": [_figure(prefill_s[length]) for length in lengths], **measured},
        "decode_step_s": {
            "value": _figure(step.step_s(slots, slots * middle)),
            "status": "measured",
            "source": f"the fit below for {slots} requests of {middle} tokens",
        },
        "decode_slots": {"value": slots, "status": "assumed", "source": "the largest batch that was measured"},
        "pieces": {
            "value": pieces,
            "status": "measured",
            "source": "so many equal pieces leave, in the mean, when the state's bytes do as its layers are computed",
        },
        "decode_step": {
            "base_s": _figure(step.base_s),
            "per_request_s": _figure(step.per_request_s),
            "per_kv_token_s": _figure(step.per_kv_token_s),
            "status": "measured",
            "source": f"{source}; fitted, the farthest of {len(steps)} figures {farthest:.1%} away",
        },
        "measurement": dict(measurement),
    }
    return yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)


def _figure(seconds: float) -> float:
    """Four digits: more was not measured."""
    return float(f"{seconds:.4g}")
