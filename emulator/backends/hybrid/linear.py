"""Linear attention: a gated delta-rule layer behind a short causal convolution. Its state does not grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emulator.backends.hybrid.config import ModelConfig
from emulator.backends.hybrid.delta import chunked, recurrent_step
from emulator.backends.hybrid.layers import Feed, LayerState, LinearState, Mixer, Product, RMSNorm, wide


class LinearAttention(Mixer):
    """Kimi Linear's KDA: the delta rule of `delta.py`, with a decay for every key channel, and a gated output."""

    kind = "linear"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        inner = config.linear_heads * config.linear_dim
        self.qkv = Product(config.d_model, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.empty(3 * inner, config.conv_width))
        self.forget = Product(config.d_model, inner + config.linear_heads)  # decays, and write strengths
        self.gate = Product(config.d_model, inner, bias=False)
        self.norm = RMSNorm(config.linear_dim, config.norm_eps)
        self.out = Product(inner, config.d_model, bias=False)

    def empty(self, device: torch.device, dtype: torch.dtype) -> LinearState:
        heads, dim, width = self.config.linear_heads, self.config.linear_dim, self.config.conv_width
        recent = torch.zeros(width - 1, 3 * heads * dim, device=device, dtype=dtype)
        return LinearState(torch.zeros(heads, dim, dim, device=device, dtype=wide(recent).dtype), recent)

    def convolve(self, seen: Sequence[Tensor]) -> Tensor:
        """seen: the inputs of conv_width places, the token's own the last, [..., channels] each.

        Written out, as a matrix product's arithmetic may depend on the row.
        """
        taps = self.conv.T.contiguous()
        mixed = seen[0] * taps[0]
        for x, tap in zip(seen[1:], taps[1:], strict=True):
            mixed.addcmul_(x, tap)
        return mixed

    def inputs(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, log a [..., heads, d] and b [..., heads], wide. x: [..., d_model]; mixed: [..., 3 inner]."""
        config = self.config
        heads, dim = config.linear_heads, config.linear_dim
        qkv = wide(F.silu(mixed)).view(*x.shape[:-1], 3 * heads, dim)
        qk, v = torch.split(qkv, [2 * heads, heads], -2)
        q, k = F.normalize(qk, dim=-1).chunk(2, -2)
        decay, write = torch.split(wide(self.forget(x)), [heads * dim, heads], -1)
        log_a = decay.sigmoid().view(v.shape) * -config.gate_bound
        return q * (1 / math.sqrt(dim)), k, v, log_a, write.sigmoid()  # apart: row by row, whatever a row's width is

    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        """read: [..., heads, dv], wide."""
        gated = self.norm(read).flatten(-2).to(x.dtype) * F.silu(self.gate(x))
        out: Tensor = self.out(gated)
        return out

    def begin(self, state: LayerState, tokens: int, rows: int) -> Feed:
        assert isinstance(state, LinearState)
        return _LinearFeed(self, state)

    def decode(self, x: Tensor, states: Sequence[LayerState]) -> Tensor:
        n = len(states)
        raw = self.qkv(x)
        recent = raw.new_zeros(len(x), self.config.conv_width - 1, raw.shape[1])
        torch.stack([one.recent for one in states], out=recent[:n])  # type: ignore[union-attr]
        q, k, v, log_a, b = self.inputs(x, self.convolve([*recent.unbind(1), raw]))
        memory = torch.stack([one.memory for one in states])  # type: ignore[union-attr]
        read, memory = recurrent_step(q[:n], k[:n], v[:n], log_a[:n], b[:n], memory)
        for i, one in enumerate(states):
            assert isinstance(one, LinearState)
            one.memory = memory[i].clone()
            one.recent = torch.cat([recent[i, 1:], raw[i : i + 1]])
        return self.finish(x, F.pad(read, (0, 0, 0, 0, 0, len(x) - n)))


class _LinearFeed(Feed):
    def __init__(self, layer: LinearAttention, state: LinearState) -> None:
        self.layer, self.state = layer, state

    def block(self, x: Tensor, real: int) -> Tensor:
        layer, state, rows = self.layer, self.state, len(x)
        seen = torch.cat([state.recent, layer.qkv(x)])
        width = layer.config.conv_width
        q, k, v, log_a, b = layer.inputs(x, layer.convolve([seen[i : i + rows] for i in range(width)]))
        if real < rows:  # what is no token writes nothing and decays nothing
            log_a[real:], b[real:] = 0, 0
        q, k, v, log_a, b = (part.transpose(0, 1) for part in (q, k, v, log_a, b))
        read, state.memory = chunked(q, k, v, log_a, b, state.memory, layer.config.chunk)
        state.recent = seen[real : real + width - 1].clone()
        return layer.finish(x, read.transpose(0, 1))

    def snapshot(self) -> LinearState:
        return self.state.clone()
