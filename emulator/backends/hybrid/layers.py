"""What all layers of the hybrid model have: their states, normalisation, the gated MLP, and the interface of a mixer.

Prefill works in blocks of `rows` tokens at fixed places (multiples of `rows` from the sequence's start), the last one
padded: what a token's arithmetic is depends on its place alone, never on where a cached prefix ended or on who else is
computed. Decode computes the products with weights on a full batch, rows without a request being padding, and all else
for each request by itself.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emulator.backends.hybrid.config import Kind, ModelConfig

BLOCK_ROWS: Final = 32
"""Rows from which on a product is a prefill's block; a decode step has MAX_BATCH at most."""
BIG: Final = 32_768
"""Numbers in a matrix from which on oneDNN earns its call."""
ONEDNN: Final = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class LinearState:
    """What a linear layer remembers: memory [heads, dk, dv], float32; recent: the convolution's last inputs
    [width - 1, channels]."""

    memory: Tensor
    recent: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """All that is remembered, in the order in which it crosses."""
        return [self.memory, self.recent]

    def clone(self) -> LinearState:
        return LinearState(self.memory.clone(), self.recent.clone())


@dataclass(slots=True)
class KvState:
    """What an attention layer remembers: rows [room, width], the first `held` of which count, of the tokens up to
    `end`."""

    rows: Tensor
    held: int
    end: int

    @property
    def kept(self) -> Tensor:
        """[held, width]"""
        return self.rows[: self.held]

    @property
    def parts(self) -> list[Tensor]:
        """All that is remembered, in the order in which it crosses."""
        return [self.kept]

    def clone(self) -> KvState:
        return KvState(self.kept.clone(), self.held, self.end)

    def reserve(self, room: int) -> None:
        """Room for so many tokens in all."""
        if room > len(self.rows):
            grown = self.rows.new_empty(room, self.rows.shape[1])
            grown[: self.held] = self.kept
            self.rows = grown

    def extend(self, new: Tensor) -> None:
        """Tokens after those held. new: [n, width]."""
        need = self.held + len(new)
        if need > len(self.rows):
            self.reserve(max(need, 2 * len(self.rows)))
        self.rows[self.held : need] = new
        self.held, self.end = need, self.end + len(new)

    def drop(self, last: int) -> None:
        """The last few tokens were none."""
        self.held, self.end = self.held - last, self.end - last

    def forget(self, window: int) -> None:
        """All but the last `window` tokens."""
        if self.held > window:
            self.rows, self.held = self.kept[-window:].clone(), window


LayerState = LinearState | KvState


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is: what is summed up over many tokens."""
    return x if x.dtype == torch.float64 else x.float()


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with zeros after it, to a multiple of `rows` rows."""
    missing = -len(x) % rows
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


class Product(nn.Linear):
    """x W' (+ b). A prefill's blocks in float32 on an x86 CPU go through oneDNN, with the weights laid out for it once:
    it takes the widest vectors on any maker's processor, where torch's own choice (MKL) does on Intel's alone.

    A decode step's few rows are bound by memory, and a small product by its call: they take torch's way. Weights do not
    change once they were used.
    """

    _laid_out: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self._by_onednn(x):
            return super().forward(x)
        if self._laid_out is None:
            self._laid_out = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), len(x))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._laid_out, self.bias, "none", [], "")
        return out

    def _by_onednn(self, x: Tensor) -> bool:
        worth_it = len(x) >= BLOCK_ROWS and self.weight.numel() >= BIG
        return worth_it and ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"

    def _apply(self, fn: Any, recurse: bool = True) -> Product:
        self._laid_out = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        self._laid_out = None
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict[str, Any]:  # a copy lays out its own
        return {**self.__dict__, "_laid_out": None}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        broad = wide(x)
        scaled = broad * torch.rsqrt(broad.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Product(config.d_model, 2 * config.mlp_dim, bias=False)
        self.down = Product(config.mlp_dim, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Mixer(nn.Module, ABC):
    """The part of a layer that looks at other tokens: it prefills a sequence block by block, and decodes one token of
    each of several sequences."""

    kind: Kind

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def empty(self, device: torch.device, dtype: torch.dtype) -> LayerState:
        """The state of a sequence without tokens."""

    @abstractmethod
    def begin(self, state: LayerState, tokens: int, rows: int) -> Feed:
        """A prefill of a sequence in `state` by `tokens`, in blocks of `rows`."""

    @abstractmethod
    def decode(self, x: Tensor, states: Sequence[LayerState]) -> Tensor:
        """x: [batch, d_model]; the first len(states) rows are requests, whose states move on by a token. Returns as
        many rows."""


class Feed(ABC):
    """A prefill of one layer that is under way."""

    @abstractmethod
    def block(self, x: Tensor, real: int) -> Tensor:
        """The next block, [rows, d_model], of which the first `real` rows are tokens; the state moves on by them."""

    @abstractmethod
    def snapshot(self) -> LayerState | None:
        """The state as it is now, in memory of its own; None where a later state has it within itself."""
