"""The layers of the hybrid model: each prefills many tokens of one sequence, and decodes one token of many sequences.

Prefill works in blocks of `rows` tokens at fixed places (multiples of `rows` from the sequence's start), the last one
padded: what a token's arithmetic is depends on its place alone, never on where a cached prefix ended or on who else is
computed. Decode works on a full batch for the same reason; rows without a request are padding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emulator.backends.hybrid.config import Kind, ModelConfig
from emulator.backends.hybrid.delta import chunked, recurrent_step


@dataclass(slots=True)
class LinearState:
    """What a linear layer remembers: memory [heads, dk, dv], float32; recent: the convolution's last inputs
    [width - 1, channels]."""

    memory: Tensor
    recent: Tensor

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

    def clone(self) -> KvState:
        return KvState(self.kept.clone(), self.held, self.end)

    def extend(self, new: Tensor) -> None:
        """Tokens after those held. new: [n, width]."""
        need = self.held + len(new)
        if need > len(self.rows):
            grown = self.rows.new_empty(max(need, 2 * len(self.rows)), self.rows.shape[1])
            grown[: self.held] = self.kept
            self.rows = grown
        self.rows[self.held : need] = new
        self.held, self.end = need, self.end + len(new)

    def forget(self, window: int) -> None:
        """All but the last `window` tokens."""
        if self.held > window:
            self.rows, self.held = self.kept[-window:].clone(), window


LayerState = LinearState | KvState


def blocks_of(x: Tensor, rows: int) -> list[Tensor]:
    """x [n, ...] in blocks of `rows` rows, the last padded with zeros."""
    blocks = list(torch.split(x, rows))
    missing = rows - len(blocks[-1])
    blocks[-1] = torch.cat([blocks[-1], x.new_zeros(missing, *x.shape[1:])]) if missing else blocks[-1]
    return blocks


def by_rows(apply: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """apply to each block of x [n, width]; [n, ...]."""
    return torch.cat([apply(block) for block in blocks_of(x, rows)])[: len(x)]


def rotate(x: Tensor, at: Tensor, base: float) -> Tensor:
    """Rotary position embedding. x: [n, ..., d] of tokens at places `at` [n]; d even."""
    half = x.shape[-1] // 2
    turns = at.to(torch.float32)[:, None] * base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    turns = turns.view(len(at), *([1] * (x.dim() - 2)), half)
    cos, sin = turns.cos(), turns.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, 2 * config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class LinearAttention(nn.Module):
    """A gated delta-rule layer (`delta.py`) behind a short causal convolution; its state does not grow."""

    kind: Kind = "linear"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.linear_heads * config.linear_dim
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.empty(3 * inner, config.conv_width))
        self.forget = nn.Linear(config.d_model, inner + config.linear_heads)  # decays, and write strengths
        self.gate = nn.Linear(config.d_model, inner, bias=False)
        self.norm = RMSNorm(config.linear_dim, config.norm_eps)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def empty(self, device: torch.device, dtype: torch.dtype) -> LinearState:
        config = self.config
        heads, dim = config.linear_heads, config.linear_dim
        memory = torch.zeros(heads, dim, dim, device=device)
        return LinearState(memory, torch.zeros(config.conv_width - 1, 3 * heads * dim, device=device, dtype=dtype))

    def _inputs(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, log a [..., heads, d] and b [..., heads], in float32. x: [..., d_model]; mixed: [..., 3 inner]."""
        config = self.config
        shape = (*x.shape[:-1], config.linear_heads, config.linear_dim)
        q, k, v = (part.reshape(shape).float() for part in F.silu(mixed).chunk(3, -1))
        q = F.normalize(q, dim=-1) / math.sqrt(config.linear_dim)
        decay, write = torch.split(self.forget(x).float(), [shape[-1] * shape[-2], shape[-2]], -1)
        log_a = -config.gate_bound * torch.sigmoid(decay.reshape(shape))
        return q, F.normalize(k, dim=-1), v, log_a, torch.sigmoid(write.contiguous())

    def _finish(self, x: Tensor, read: Tensor) -> Tensor:
        """read: [..., heads, dv], float32."""
        gated = self.norm(read).flatten(-2).to(x.dtype) * F.silu(self.gate(x))
        out: Tensor = self.out(gated)
        return out

    def prefill(
        self, x: Tensor, state: LinearState, rows: int, keep: Sequence[int] = ()
    ) -> tuple[Tensor, LinearState, dict[int, LinearState]]:
        """x: [n, d_model] from a multiple of `rows` on. keep: numbers of these tokens after which the state is wanted
        as well, multiples of the chunk."""
        width = self.config.conv_width
        raw = by_rows(self.qkv, x, rows)
        seen = torch.cat([state.recent, raw])
        mixed = F.conv1d(seen.T.unsqueeze(0), self.conv.unsqueeze(1), groups=len(self.conv))[0].T
        x_blocks, mixed_blocks = blocks_of(x, rows), blocks_of(mixed, rows)
        made = [self._inputs(*pair) for pair in zip(x_blocks, mixed_blocks, strict=True)]
        q, k, v, log_a, b = (torch.cat(part)[: len(x)].transpose(0, 1) for part in zip(*made, strict=True))
        read, memory, kept = chunked(q, k, v, log_a, b, state.memory, self.config.chunk, tuple(keep))
        reads = blocks_of(read.transpose(0, 1), rows)
        out = torch.cat([self._finish(*pair) for pair in zip(x_blocks, reads, strict=True)])[: len(x)]
        snapshots = {n: LinearState(one, seen[n : n + width - 1].clone()) for n, one in kept.items()}
        return out, LinearState(memory, seen[len(seen) - width + 1 :].clone()), snapshots

    def decode(self, x: Tensor, states: Sequence[LinearState]) -> Tensor:
        """x: [batch, d_model]; the first len(states) rows are requests, whose states move on by a token."""
        raw = self.qkv(x)
        recent, memory = (
            F.pad(torch.stack(parts), (*[0] * (2 * parts[0].dim()), 0, len(x) - len(parts)))
            for parts in ([one.recent for one in states], [one.memory for one in states])
        )
        seen = torch.cat([recent, raw.unsqueeze(1)], 1)
        mixed = seen[:, 0] * self.conv[:, 0]
        for i in range(1, self.config.conv_width):  # a matrix product's arithmetic depends on the row
            mixed = mixed + seen[:, i] * self.conv[:, i]
        q, k, v, log_a, b = self._inputs(x, mixed)
        read, memory = recurrent_step(q, k, v, log_a, b, memory)
        for i, one in enumerate(states):
            one.memory, one.recent = memory[i], seen[i, 1:].clone()
        return self._finish(x, read)


class Attention(nn.Module, ABC):
    """What full and sliding attention share: a state of kept rows, and a softmax over them, in float32."""

    kind: Kind = "full"
    width: int  # numbers kept of a token
    window: int | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def empty(self, device: torch.device, dtype: torch.dtype) -> KvState:
        return KvState(torch.empty(0, self.width, device=device, dtype=dtype), 0, 0)

    @abstractmethod
    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [n, heads, d] and what is kept [n, width] of tokens x [n, d_model] at places `at` [n]."""

    @abstractmethod
    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [heads, m, d] and values [heads, m, dv] of kept rows [m, width]."""

    @abstractmethod
    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        """read: [n, heads, dv]."""

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, at: Tensor, first: int) -> Tensor:
        """q: [n, heads, d] at places `at`; keys and values of the tokens from `first` on. Returns [n, heads, dv]."""
        scores = torch.einsum("nhd,hmd->hnm", q, keys).float() / math.sqrt(q.shape[-1])
        places = torch.arange(first, first + keys.shape[1], device=q.device)
        hidden = places[None, :] > at[:, None]
        if self.window is not None:
            hidden = hidden | (places[None, :] <= at[:, None] - self.window)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).to(values.dtype)
        return torch.einsum("hnm,hmd->nhd", weights, values)

    def prefill(
        self, x: Tensor, state: KvState, rows: int, keep: Sequence[int] = ()
    ) -> tuple[Tensor, KvState, dict[int, KvState]]:
        """x: [n, d_model], tokens from state.end on, a multiple of `rows`. keep: as of `LinearAttention`; only a
        sliding layer forgets, so only its states are copied."""
        start, n = state.end, len(x)
        at = torch.arange(start, start + n + (-n % rows), device=x.device)
        queries = []
        blocks = blocks_of(x, rows)
        for i, block in enumerate(blocks):
            q, new = self.project(block, at[i * rows : (i + 1) * rows])
            queries.append(q)
            state.extend(new[: n - i * rows])
        first = state.end - state.held
        kept = F.pad(state.kept, (0, 0, 0, -state.end % rows))  # whole blocks: what is after the end is never seen
        keys, values = self.keys_values(kept)
        out = []
        for i, q in enumerate(queries):
            end = start + (i + 1) * rows - first
            begin = 0 if self.window is None else max(0, start + i * rows - self.window + 1 - first) // rows * rows
            places = at[i * rows : (i + 1) * rows]
            read = self._attend(q, keys[:, begin:end], values[:, begin:end], places, first + begin)
            out.append(self.finish(blocks[i], read))
        snapshots = {}
        if self.window is not None:
            for place in keep:
                begin = max(0, start + place - self.window - first)
                rows_kept = state.kept[begin : start + place - first].clone()
                snapshots[place] = KvState(rows_kept, len(rows_kept), start + place)
            state.forget(self.window)
        return torch.cat(out)[:n], state, snapshots

    def decode(self, x: Tensor, states: Sequence[KvState]) -> Tensor:
        """As of `LinearAttention`; each request's attention is computed by itself."""
        at = torch.tensor([*(one.end for one in states), *[0] * (len(x) - len(states))], device=x.device)
        q, new = self.project(x, at)
        reads = []
        for i, one in enumerate(states):
            one.extend(new[i : i + 1])
            if self.window is not None:
                one.forget(self.window)
            keys, values = self.keys_values(one.kept)
            reads.append(self._attend(q[i : i + 1], keys, values, at[i : i + 1], one.end - one.held))
        read = torch.cat(reads)
        return self.finish(x, F.pad(read, (0, 0, 0, 0, 0, len(x) - len(states))))


class LatentAttention(Attention):
    """MLA: of a token one latent vector and one rotated key are kept, for all heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        heads, dim, rope, latent = config.heads, config.head_dim, config.rope_dim, config.latent_dim
        self.width = config.kept_width("full")
        self.q = nn.Linear(config.d_model, heads * (dim + rope), bias=False)
        self.down = nn.Linear(config.d_model, latent + rope, bias=False)
        self.norm = RMSNorm(latent, config.norm_eps)
        self.up = nn.Linear(latent, 2 * heads * dim, bias=False)
        self.out = nn.Linear(heads * dim, config.d_model, bias=False)

    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        q = self.q(x).view(len(x), config.heads, -1)
        plain, turned = torch.split(q, [config.head_dim, config.rope_dim], -1)
        latent, key = torch.split(self.down(x), [config.latent_dim, config.rope_dim], -1)
        base = config.rope_base
        kept = torch.cat([self.norm(latent), rotate(key, at, base)], -1)
        return torch.cat([plain, rotate(turned, at, base)], -1), kept

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        latent, key = torch.split(rows, [config.latent_dim, config.rope_dim], -1)
        plain, values = self.up(latent).view(len(rows), config.heads, -1).chunk(2, -1)
        shared = key.unsqueeze(1).expand(-1, config.heads, -1)
        return torch.cat([plain, shared], -1).transpose(0, 1), values.transpose(0, 1)

    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        out: Tensor = self.out(read.flatten(1))
        return out


class GroupedAttention(Attention):
    """GQA: keys and values of `kv_heads` heads are kept, each shared by several queries' heads."""

    def __init__(self, config: ModelConfig, *, sliding: bool = False) -> None:
        super().__init__(config)
        self.kind = "sliding" if sliding else "full"
        self.window = config.window if sliding else None
        self.width = config.kept_width("sliding")
        self.q = nn.Linear(config.d_model, config.heads * config.head_dim, bias=False)
        self.kv = nn.Linear(config.d_model, self.width, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.d_model, bias=False)

    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        q = rotate(self.q(x).view(len(x), config.heads, -1), at, config.rope_base)
        keys, values = self.kv(x).view(len(x), 2, config.kv_heads, -1).unbind(1)
        return q, torch.cat([rotate(keys, at, config.rope_base).flatten(1), values.flatten(1)], -1)

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        keys, values = rows.view(len(rows), 2, config.kv_heads, -1).unbind(1)
        times = config.heads // config.kv_heads
        return tuple(x.transpose(0, 1).repeat_interleave(times, 0) for x in (keys, values))  # type: ignore[return-value]

    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        out: Tensor = self.out(read.flatten(1))
        return out
