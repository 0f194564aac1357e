"""The gated delta rule, twice: token by token, and chunk-parallel; the same function of its input.

For one head, with queries q, keys k (of length 1), values v, write strengths b in (0, 1) and decays a in (0, 1] for
every key channel:

    S_t = (I - b_t k_t k_t') Diag(a_t) S_(t-1) + b_t k_t v_t'        o_t = S_t' q_t

(gated delta networks, Yang et al. 2024; with a decay a channel, Kimi Linear's KDA). In a chunk whose decays multiply up
to G_i by token i, u_i = b_i (v_i - k_i' Diag(a_i) S_(i-1)) obeys a triangular system; the rest is matrix products:

    (I + b A) U = b (V - K+ S_0),  A = strictly lower part of K+ K-',  K+ = K G,  K- = K / G
    O = Q+ S_0 + (lower part of Q+ K-') U,        S_C = Diag(G_C) S_0 + (K G_C / G)' U

K / G overflows unless chunk x the greatest decay is bounded: `ModelConfig` sees to that.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token. q, k, log_a: [..., heads, dk]; v: [..., heads, dv]; b: [..., heads]; state: [..., heads, dk, dv].

    Returns what it reads, [..., heads, dv], and the new state. Every head of every leading index is computed by itself.
    """
    new = (state * log_a.exp().unsqueeze(-1)).flatten(0, -3)
    key = k.reshape(len(new), -1, 1)
    read = torch.bmm(key.mT, new)
    new.baddbmm_(key, (v.reshape(read.shape) - read) * b.reshape(-1, 1, 1))
    return torch.bmm(q.reshape(key.shape).mT, new).view(v.shape), new.view(state.shape)


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens, one after the other: the definition. Shapes as `chunked`."""
    out = []
    for t in range(q.shape[1]):
        o, state = recurrent_step(q[:, t], k[:, t], v[:, t], log_a[:, t], b[:, t], state)
        out.append(o)
    return torch.stack(out, 1), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """All tokens, `chunk` at a time. q, k, log_a: [heads, n, dk]; v: [heads, n, dv]; b: [heads, n]; state:
    [heads, dk, dv].

    Returns what is read, [heads, n, dv], and the state after the last token.
    """
    if k.shape[1] <= chunk:
        return _one(q, k, v, log_a, b, state)
    return _many(q, k, v, log_a, b, state, chunk)


def _one(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A single chunk, for a processor with a cache: as few passes and products as there can be."""
    heads, n, dim = k.shape
    b = b.unsqueeze(-1)
    grown = log_a.cumsum(1).exp_()
    up = k.new_empty(heads, 2 * n, dim)  # K+, and below it Q+
    torch.mul(k, grown, out=up[:, :n])
    torch.mul(q, grown, out=up[:, n:])
    down = (k / grown).mT
    products, against = up @ down, up @ state
    missing = (v - against[:, :n]).mul_(b)
    u = torch.empty_like(missing)
    torch.linalg.solve_triangular(products[:, :n] * b, missing, upper=False, unitriangular=True, out=u)
    out = torch.baddbmm(against[:, n:], products[:, n:].tril_(), u)
    end = grown[:, -1].unsqueeze(-1)
    return out, torch.baddbmm(state * end, down * end, u)


def _many(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Several chunks, for a GPU: what they all do alike is done at once. From chunk to chunk goes one product,
    S_C = T S_0 + W with T = Diag(G_C) - L' (I + b A)^-1 b K+, W = L' (I + b A)^-1 b V and L = K G_C / G.
    """
    heads, n, _ = q.shape
    pad = -n % chunk
    if pad:  # tokens that write nothing and decay nothing
        q, k, v, log_a = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v, log_a))
        b = torch.nn.functional.pad(b, (0, pad))
    q, k, v, log_a = (x.reshape(heads, -1, chunk, x.shape[-1]) for x in (q, k, v, log_a))
    b = b.reshape(heads, -1, chunk, 1)
    grown = log_a.cumsum(2).exp()
    k_up, down, q_up = k * grown, (k / grown).mT, q * grown
    end = grown[:, :, -1]
    solved = torch.linalg.solve_triangular(
        (k_up @ down) * b, torch.cat([v, k_up], -1) * b, upper=False, unitriangular=True
    )
    moved = (down * end.unsqueeze(-1)) @ solved
    added, through = moved[..., : v.shape[-1]], torch.diag_embed(end) - moved[..., v.shape[-1] :]
    starts = []
    for i in range(q.shape[1]):
        starts.append(state)
        state = torch.baddbmm(added[:, i], through[:, i], state)
    start = torch.stack(starts, 1)
    u = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ start
    out = q_up @ start + (q_up @ down).tril_() @ u
    return out.flatten(1, 2)[:, :n], state
