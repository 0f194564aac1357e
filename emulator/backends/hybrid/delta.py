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

    Returns what it reads, [..., heads, dv], and the new state.
    """
    decayed = state * log_a.exp().unsqueeze(-1)
    read = torch.einsum("...kv,...k->...v", decayed, k)
    new = decayed + torch.einsum("...k,...v->...kv", k, (v - read) * b.unsqueeze(-1))
    return torch.einsum("...kv,...k->...v", new, q), new


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens, one after the other: the definition. Shapes as `chunked`."""
    out = []
    for t in range(q.shape[1]):
        o, state = recurrent_step(q[:, t], k[:, t], v[:, t], log_a[:, t], b[:, t], state)
        out.append(o)
    return torch.stack(out, 1), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state: Tensor, chunk: int, keep: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """All tokens, `chunk` at a time. q, k, log_a: [heads, n, dk]; v: [heads, n, dv]; b: [heads, n]; state:
    [heads, dk, dv].

    Returns what is read, [heads, n, dv], the state after the last token, and those after each of `keep`: numbers of
    tokens, multiples of the chunk.
    """
    heads, n, _ = q.shape
    pad = -n % chunk
    if pad:  # tokens that write nothing and decay nothing
        q, k, v, log_a = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v, log_a))
        b = torch.nn.functional.pad(b, (0, pad))
    count = (n + pad) // chunk
    q, k, v, log_a = (x.reshape(heads, count, chunk, -1) for x in (q, k, v, log_a))
    b = b.reshape(heads, count, chunk, 1)
    log_g = log_a.cumsum(2)
    grown, shrunk = log_g.exp(), (-log_g).exp()
    k_up, k_down, q_up = k * grown, k * shrunk, q * grown
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device)
    lower = (k_up @ k_down.transpose(2, 3)).tril(-1) * b + eye
    solved = torch.linalg.solve_triangular(lower, torch.cat([v * b, k_up * b], -1), upper=False, unitriangular=True)
    values, readers = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    inside = (q_up @ k_down.transpose(2, 3)).tril()
    left = k * (log_g[:, :, -1:] - log_g).exp()  # what is left of each key at the chunk's end
    out, kept = [], {}
    for i in range(count):
        u = values[:, i] - readers[:, i] @ state
        out.append(q_up[:, i] @ state + inside[:, i] @ u)
        state = state * grown[:, i, -1].unsqueeze(-1) + left[:, i].transpose(1, 2) @ u
        if (i + 1) * chunk in keep:
            kept[(i + 1) * chunk] = state
    return torch.cat(out, 1)[:, :n], state, kept
