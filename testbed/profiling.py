"""Profiles of the model that computes here: measured by itself, with what it was measured on."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from emulator.backends.hybrid.config import ModelConfig, ModelError, preset
from emulator.measured import Step, text_of
from emulator.profile import ProfileError
from testbed.report.provenance import machine

if TYPE_CHECKING:
    from emulator.backends.hybrid.measure import Measured
    from emulator.backends.hybrid.model import HybridModel

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Found:
    """text: the profile, as YAML; uncertain: the standard error of its least certain figure, as a share; summary: for
    people and --json."""

    text: str
    uncertain: float
    summary: dict[str, Any]


def measure_alone(
    name: str,
    preset_name: str,
    changes: Mapping[str, Any],
    *,
    device: str,
    lengths: Sequence[int],
    batches: Sequence[int],
    threads: int,
    rounds: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Found:
    """The model's profile when nothing else runs. Raises ProfileError for a model, device or length that cannot be."""
    if device not in DTYPES:
        raise ProfileError(f"device: {device!r}: use cpu or cuda")
    for module in ("torch", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise ProfileError(f"{module} is not installed: pip install 'prfaas-testbed[model]'")
    from emulator.backends.hybrid.measure import check, measure

    with _cores(threads) as cores:
        try:
            check(lengths, batches)
            config = preset(preset_name, **changes)
            measured = measure(_model(config, device, threads), lengths, batches, rounds=rounds, tell=tell)
        except ModelError as error:
            raise ProfileError(str(error)) from None
    where = _hardware(device)
    measurement = {
        "taken_at": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        "device": where,
        "dtype": DTYPES[device],
        "threads": threads,
        "cores": cores,
        "beside": "nothing",
        "rounds": rounds,
        "uncertain": round(measured.uncertain, 4),
        "model": {"preset": preset_name, **changes, "fingerprint": config.fingerprint},
    }
    text = text_of(
        name=name,
        model=f"hybrid {config.name}: {config.layers} layers {config.pattern}, {DTYPES[device]}",
        hardware=f"{where}, {threads} thread{'s' * (threads > 1)}" if device == "cpu" else where,
        prefill_s={length: one.median_s for length, one in measured.prefill.items()},
        kv_bytes=measured.kv_bytes,
        steps=[Step(b, b * length, one.median_s) for (b, length), one in measured.decode.items()],
        slots=max(batches),
        pieces=measured.pieces,
        source=f"prfaas profile: medians of {rounds} rounds, standard error at most {measured.uncertain:.1%}",
        measurement=measurement,
    )
    return Found(text, measured.uncertain, _summary(name, measured) | {"measurement": measurement})


def _model(config: ModelConfig, device: str, threads: int) -> HybridModel:
    import torch

    from emulator.backends.hybrid.model import HybridModel

    torch.set_num_threads(threads)
    if device == "cpu":
        return HybridModel.seeded(config, 1)
    if not torch.cuda.is_available():
        raise ProfileError("device: cuda: this torch finds no GPU; use --device cpu")
    return HybridModel.seeded(config, 1, rows=GPU_ROWS).to("cuda", torch.bfloat16)


GPU_ROWS = 2048
"""Tokens of a prefill's block on a GPU, which wants much to do at once."""


def _hardware(device: str) -> str:
    if device == "cpu":
        return str(machine()["cpu"])
    import torch

    return torch.cuda.get_device_name()


@contextmanager
def _cores(threads: int) -> Iterator[list[int]]:
    """Keep this process to as many cores as it has threads, the last ones."""
    before = os.sched_getaffinity(0)
    if threads > len(before):
        raise ProfileError(f"threads: {threads}: this machine has {len(before)} cores")
    chosen = sorted(before)[-threads:]
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)


def _summary(name: str, measured: Measured) -> dict[str, Any]:
    return {
        "name": name,
        "prefill": [
            {
                "tokens": length,
                "seconds": one.median_s,
                "spread": one.spread,
                "kv_bytes": measured.kv_bytes[length],
                "kv_bps": 8 * measured.kv_bytes[length] / one.median_s,
            }
            for length, one in measured.prefill.items()
        ],
        "decode": [
            {"requests": batch, "tokens": length, "seconds": one.median_s, "spread": one.spread}
            for (batch, length), one in sorted(measured.decode.items())
        ],
    }
