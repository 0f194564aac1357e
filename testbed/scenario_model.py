"""The part of a scenario that says which model computes, where `backend` is `hybrid`, and what that asks of the rest.

A model that really computes takes real time and sends real bytes, so nothing of such a scenario is scaled.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import psutil
from pydantic import Field, model_validator

from emulator.backends.hybrid.config import MAX_BATCH, ModelConfig, ModelError, preset
from emulator.backends.hybrid.spec import ModelSpec
from testbed.scenario_data import ScenarioError
from testbed.scenario_workload import Part, Whole

REMEDY = "pip install 'prfaas-testbed[model]' (in a checkout: pip install -e '.[model]')"
MOST_MEMORY = 0.8
"""The share of this machine's memory that the workers' bounds may come to."""
WORKER_BYTES = 400 << 20
"""Of a worker beside its bounds: the interpreter, torch, a tiny model."""


class Model(Part):
    """preset: tiny or small (`emulator/backends/hybrid/config.py`). changes: of its fields, such as {window: 256}.
    weights: a safetensors file; without one they are drawn from `seed`, and the answers are noise, exactly so."""

    preset: str = "tiny"
    changes: dict[str, Any] = Field(default_factory=dict)
    seed: Whole = 1
    weights: str | None = None

    @model_validator(mode="after")
    def _can_be(self) -> Model:
        try:
            preset(self.preset, **self.changes)
        except ModelError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def config(self) -> ModelConfig:
        """The model's shape. Raises ModelError."""
        return preset(self.preset, **self.changes)

    def spec(self, index: int) -> ModelSpec:
        """For a worker; its number says which of this machine's cores it computes on."""
        cores = sorted(os.sched_getaffinity(0))
        return ModelSpec(self.preset, self.changes, self.seed, self.weights, cores[index % len(cores)])


def check_model(scenario: Any) -> None:
    """Raises ValueError for what else a scenario says and a model that computes cannot have."""
    scale = scenario.scale
    for key in ("time_scale", "byte_scale"):
        if getattr(scale, key) != 1:
            raise ValueError(
                f"scale.{key} = {getattr(scale, key):g}: with backend hybrid everything is real: it must be 1"
            )
    config = scenario.model.config
    if scenario.cache_bytes and scenario.cache.block_tokens % config.chunk:
        raise ValueError(
            f"cache.block_tokens = {scenario.cache.block_tokens}: must be a multiple of the model's chunk, "
            f"{config.chunk}"
        )


def check_slots(scenario: str, deployment: str, slots: int) -> None:
    """Raises ScenarioError where a decode step would have more requests than the model's batch."""
    if slots > MAX_BATCH:
        raise ScenarioError(
            f"scenario {scenario}: deployment {deployment}: {slots} decode slots: the model decodes {MAX_BATCH} "
            f"requests at once; set decode.slots to at most {MAX_BATCH}, or take a profile measured with so many"
        )


def check_installed(scenario: Any) -> None:
    """Whether what runs here has what a model needs. Raises ScenarioError without torch."""
    for module in ("torch", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise ScenarioError(
                f"scenario {scenario.name}: backend hybrid computes with a real model and needs {module}, which is not "
                f"installed: {REMEDY}; or take --set backend=timing"
            )


def check_memory(scenario: Any, workers: int) -> None:
    """Whether this machine has the memory for so many workers. Raises ScenarioError."""
    transport = scenario.transport
    each = max(transport.outbox_bytes + scenario.cache_bytes, transport.landing_bytes) + WORKER_BYTES
    most = MOST_MEMORY * psutil.virtual_memory().total
    if workers * each > most:
        raise ScenarioError(
            f"scenario {scenario.name}: {workers} workers of up to {each} bytes (transport.outbox_bytes + cache_bytes, "
            f"or transport.landing_bytes) are more than {MOST_MEMORY:.0%} of this machine's memory, "
            f"{most:.0f}; lower them"
        )
