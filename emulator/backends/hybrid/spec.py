"""Which model a worker computes with, as its configuration file says. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """changes: of the preset's fields. weights: a safetensors file, else they are drawn from `seed`. core: of this
    machine, where it computes; None for any."""

    preset: str
    changes: dict[str, Any]
    seed: int
    weights: str | None = None
    core: int | None = None
