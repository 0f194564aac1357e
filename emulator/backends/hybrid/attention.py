"""Full and sliding-window attention: latent (MLA) and grouped (GQA). Their state is a row for each token kept.

The attention itself is torch's `scaled_dot_product_attention`. Latent attention decodes in the absorbed form: queries
are taken to the latent space, so that a step reads the latent rows once instead of expanding them to keys and values.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from emulator.backends.hybrid.config import ModelConfig
from emulator.backends.hybrid.layers import Feed, KvState, LayerState, Mixer, Product, RMSNorm


def rotate(x: Tensor, at: Tensor, base: float) -> Tensor:
    """Rotary position embedding. x: [n, ..., d] of tokens at places `at` [n]; d even."""
    half = x.shape[-1] // 2
    turns = at.to(torch.float32)[:, None] * base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    turns = turns.view(len(at), *([1] * (x.dim() - 2)), half)
    cos, sin = turns.cos(), turns.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Mask:
    """Which of the last tokens a block's rows see: of those up to the block's end, a row sees all up to itself, or the
    last `window` of them. Made once for `most` tokens, and cut to what there is. flash: for a kernel that knows
    causality by itself."""

    def __init__(self, rows: int, most: int, window: int | None, like: Tensor, *, flash: bool) -> None:
        self.rows = rows
        self.flash = flash and window is None
        if self.flash:
            return
        row = torch.arange(rows, device=like.device).unsqueeze(1)
        place = torch.arange(rows - most, rows, device=like.device)
        hidden = place > row
        if window is not None:
            hidden = hidden | (place <= row - window)
        self.whole = like.new_zeros(rows, most).masked_fill_(hidden, -math.inf)

    def of(self, tokens: int) -> Tensor | CausalBias:
        """For a block at the end of so many."""
        return causal_lower_right(self.rows, tokens) if self.flash else self.whole[:, -tokens:]


class Attention(Mixer):
    """What full and sliding attention share."""

    width: int  # numbers kept of a token
    out: Product
    window: int | None = None

    def empty(self, device: torch.device, dtype: torch.dtype) -> KvState:
        return KvState(torch.empty(0, self.width, device=device, dtype=dtype), 0, 0)

    @abstractmethod
    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [n, heads, d] and what is kept [n, width] of tokens x [n, d_model] at places `at` [n]."""

    @abstractmethod
    def reader(self, state: KvState, tokens: int, rows: int) -> Reader:
        """Attends for a prefill by `tokens` that is about to begin."""

    @abstractmethod
    def read_one(self, q: Tensor, state: KvState) -> Tensor:
        """One token's attention to all that is kept. q: [heads, d]; returns [heads, head_dim]."""

    def finish(self, read: Tensor) -> Tensor:
        """read: [n, heads, head_dim]."""
        out: Tensor = self.out(read.flatten(1))
        return out

    def begin(self, state: LayerState, tokens: int, rows: int) -> Feed:
        assert isinstance(state, KvState)
        return _AttentionFeed(self, state, tokens, rows)

    def decode(self, x: Tensor, states: Sequence[LayerState]) -> Tensor:
        at = torch.zeros(len(x), dtype=torch.long)
        at[: len(states)] = torch.tensor([one.end for one in states])  # type: ignore[union-attr]
        at = at.to(x.device)
        q, new = self.project(x, at)
        read = q.new_zeros(*q.shape[:2], self.config.head_dim)
        for i, one in enumerate(states):
            assert isinstance(one, KvState)
            one.extend(new[i : i + 1])
            if self.window is not None:
                one.forget(self.window)
            read[i] = self.read_one(q[i], one)
        return self.finish(read)


class Reader:
    """A prefill's attention: `read` takes a block's queries, once its rows are in the state."""

    def read(self, q: Tensor, new: Tensor) -> Tensor:
        """q: [rows, heads, d]; new: the block's own rows [rows, width]; returns [rows, heads, head_dim]."""
        raise NotImplementedError


class _AttentionFeed(Feed):
    def __init__(self, layer: Attention, state: KvState, tokens: int, rows: int) -> None:
        self.layer, self.state = layer, state
        if layer.window is None:
            state.reserve(state.end + tokens + -tokens % rows)
        self.reader = layer.reader(state, tokens, rows)

    def block(self, x: Tensor, real: int) -> Tensor:
        layer, state = self.layer, self.state
        at = torch.arange(state.end, state.end + len(x), device=x.device)
        q, new = layer.project(x, at)
        state.extend(new)  # what is no token comes after all that is one, and is seen by none
        read = self.reader.read(q, new)
        state.drop(len(x) - real)
        if layer.window is not None:
            state.forget(layer.window)
        return layer.finish(read)

    def snapshot(self) -> KvState | None:
        return None if self.layer.window is None else self.state.clone()


class LatentAttention(Attention):
    """MLA: of a token one latent vector and one rotated key are kept, for all heads."""

    kind = "full"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        heads, dim, rope, latent = config.heads, config.head_dim, config.rope_dim, config.latent_dim
        self.width = config.kept_width("full")
        self.q = Product(config.d_model, heads * (dim + rope), bias=False)
        self.down = Product(config.d_model, latent + rope, bias=False)
        self.norm = RMSNorm(latent, config.norm_eps)
        self.up = Product(latent, 2 * heads * dim, bias=False)
        self.out = Product(heads * dim, config.d_model, bias=False)

    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        q = self.q(x).view(len(x), config.heads, -1)
        plain, turned = torch.split(q, [config.head_dim, config.rope_dim], -1)
        latent, key = torch.split(self.down(x), [config.latent_dim, config.rope_dim], -1)
        base = config.rope_base
        kept = torch.cat([self.norm(latent), rotate(key, at, base)], -1)
        return torch.cat([plain, rotate(turned, at, base)], -1), kept

    def reader(self, state: KvState, tokens: int, rows: int) -> Reader:
        return _LatentReader(self, state, tokens, rows)

    def read_one(self, q: Tensor, state: KvState) -> Tensor:
        config, rows = self.config, state.kept
        to_keys, to_values = self.up.weight.view(config.heads, 2, config.head_dim, -1).unbind(1)
        plain, turned = torch.split(q, [config.head_dim, config.rope_dim], -1)
        absorbed = torch.cat([torch.bmm(plain.unsqueeze(1), to_keys).squeeze(1), turned], -1)
        scale = 1 / math.sqrt(q.shape[-1])
        read = F.scaled_dot_product_attention(absorbed[None, None], rows[None, None], rows[None, None], scale=scale)
        latent = read[0, 0, :, : config.latent_dim]
        return torch.bmm(latent.unsqueeze(1), to_values.mT).squeeze(1)


class _LatentReader(Reader):
    """Keys and values of all tokens so far, expanded once: [heads, most, head_dim + rope_dim] each; values are padded
    to the keys' width, as the kernels want them alike."""

    def __init__(self, layer: LatentAttention, state: KvState, tokens: int, rows: int) -> None:
        self.layer, config, like = layer, layer.config, state.rows
        most = state.end + tokens + -tokens % rows
        self.mask = Mask(rows, most, None, like, flash=like.is_cuda)
        self.keys = like.new_empty(config.heads, most, config.head_dim + config.rope_dim)
        self.values = like.new_zeros(self.keys.shape)
        self.end = 0
        for block in torch.split(state.kept, rows):
            self._expand(block)

    def _expand(self, rows: Tensor) -> None:
        config, span = self.layer.config, slice(self.end, self.end + len(rows))
        latent, key = torch.split(rows, [config.latent_dim, config.rope_dim], -1)
        both = self.layer.up(latent).view(len(rows), config.heads, 2, config.head_dim)
        self.keys[:, span, : config.head_dim] = both[:, :, 0].transpose(0, 1)
        self.keys[:, span, config.head_dim :] = key
        self.values[:, span, : config.head_dim] = both[:, :, 1].transpose(0, 1)
        self.end += len(rows)

    def read(self, q: Tensor, new: Tensor) -> Tensor:
        self._expand(new)
        keys, values = self.keys[None, :, : self.end], self.values[None, :, : self.end]
        queries = q.transpose(0, 1)[None]
        read = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask.of(self.end))
        return read[0, :, :, : self.layer.config.head_dim].transpose(0, 1)


class GroupedAttention(Attention):
    """GQA: keys and values of `kv_heads` heads are kept, each shared by several queries' heads."""

    def __init__(self, config: ModelConfig, *, sliding: bool = False) -> None:
        super().__init__(config)
        self.kind = "sliding" if sliding else "full"
        self.window = config.window if sliding else None
        self.width = config.kept_width("sliding")
        self.q = Product(config.d_model, config.heads * config.head_dim, bias=False)
        self.kv = Product(config.d_model, self.width, bias=False)
        self.out = Product(config.heads * config.head_dim, config.d_model, bias=False)

    def project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        q = rotate(self.q(x).view(len(x), config.heads, -1), at, config.rope_base)
        keys, values = self.kv(x).view(len(x), 2, config.kv_heads, -1).unbind(1)
        return q, torch.cat([rotate(keys, at, config.rope_base).flatten(1), values.flatten(1)], -1)

    def reader(self, state: KvState, tokens: int, rows: int) -> Reader:
        return _GroupedReader(self, state, tokens, rows)

    def keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of kept rows [m, width], without a copy: [kv_heads, 1, m, head_dim] each."""
        config = self.config
        both = rows.view(len(rows), 2, config.kv_heads, 1, config.head_dim).permute(1, 2, 3, 0, 4)
        return both[0], both[1]

    def read_one(self, q: Tensor, state: KvState) -> Tensor:
        keys, values = self.keys_values(state.kept)
        queries = q.view(self.config.kv_heads, 1, -1, self.config.head_dim)
        return F.scaled_dot_product_attention(queries, keys, values).flatten(0, 2)


class _GroupedReader(Reader):
    def __init__(self, layer: GroupedAttention, state: KvState, tokens: int, rows: int) -> None:
        self.layer, self.state = layer, state
        most = state.end + tokens + -tokens % rows if layer.window is None else layer.window + rows
        self.mask = Mask(rows, most, layer.window, state.rows, flash=state.rows.is_cuda)

    def read(self, q: Tensor, new: Tensor) -> Tensor:
        config = self.layer.config
        queries = q.view(len(q), config.kv_heads, -1, config.head_dim).permute(
            1, 2, 0, 3
        )  # [kv_heads, sharing, rows, head_dim]
        keys, values = (x.expand(-1, queries.shape[1], -1, -1) for x in self.layer.keys_values(self.state.kept))
        mask = self.mask.of(self.state.held)
        read = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return read.flatten(0, 1).transpose(0, 1)
