"""Who sees whom; and that latent attention's decode, which never expands what it kept, is the attention it replaces."""

from __future__ import annotations

import math

import pytest
import torch

from emulator.backends.hybrid.attention import LatentAttention, Mask
from emulator.backends.hybrid.config import TINY, preset
from emulator.backends.hybrid.model import HybridModel


def seen(mask: Mask, tokens: int) -> list[list[int]]:
    """The places that each row of a block at the end of `tokens` tokens sees."""
    visible = mask.of(tokens)
    assert isinstance(visible, torch.Tensor)
    return [[place for place in range(tokens) if row[place] == 0] for row in visible]


def test_a_row_sees_all_up_to_itself() -> None:
    mask = Mask(4, 12, None, torch.zeros(1), flash=False)
    assert seen(mask, 4) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert seen(mask, 8)[0] == [0, 1, 2, 3, 4]
    assert seen(mask, 12)[3] == list(range(12))


def test_a_window_ends_what_a_row_sees() -> None:
    mask = Mask(4, 3 + 4, 3, torch.zeros(1), flash=False)
    assert seen(mask, 4) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert seen(mask, 7) == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]


@pytest.mark.parametrize("tokens", [64, 192])
def test_a_gpus_own_causality_is_the_same(tokens: int) -> None:
    """What is handed to a kernel that knows causality by itself means the same, where it has to be written out."""
    q, k = torch.randn(2, 64, 32), torch.randn(2, tokens, 32)
    v = torch.randn(2, tokens, 32)
    flash = Mask(64, 192, None, q, flash=True).of(tokens)
    written = Mask(64, 192, None, q, flash=False).of(tokens)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.allclose(
        attend(q[None], k[None], v[None], flash), attend(q[None], k[None], v[None], written), atol=1e-5
    )


@torch.inference_mode()
def test_the_absorbed_step_is_attention_to_the_expanded_keys() -> None:
    layer = HybridModel.seeded(preset("tiny", pattern="F", layers=1), 1).layers[0].mixer
    assert isinstance(layer, LatentAttention)
    x = torch.randn(100, TINY.d_model, generator=torch.Generator().manual_seed(0))
    q, rows = layer.project(x, torch.arange(100))
    state = layer.empty(x.device, x.dtype)
    state.extend(rows)
    latent, turned = torch.split(rows, [TINY.latent_dim, TINY.rope_dim], -1)
    plain, values = layer.up(latent).view(100, TINY.heads, 2, TINY.head_dim).unbind(2)
    keys = torch.cat([plain, turned.unsqueeze(1).expand(-1, TINY.heads, -1)], -1)
    scores = torch.einsum("hd,mhd->hm", q[-1], keys) / math.sqrt(q.shape[-1])
    expected = torch.einsum("hm,mhd->hd", scores.softmax(-1), values)
    assert torch.allclose(layer.read_one(q[-1], state), expected, atol=1e-5)
