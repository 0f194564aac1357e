"""The hybrid model: its chunk-parallel form is the recurrence, and no token's arithmetic depends on its company."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulator.backends.hybrid.attention import rotate
from emulator.backends.hybrid.config import MAX_BATCH, PRESETS, SMALL, TINY, ModelConfig, ModelError, preset
from emulator.backends.hybrid.delta import chunked, recurrent
from emulator.backends.hybrid.layers import BIG, BLOCK_ROWS, ONEDNN, KvState, LinearState, Product
from emulator.backends.hybrid.model import HybridModel
from tests.emulator.hybrid.prefixes import prefix_of

VARIANTS = {
    "3:1 KDA:MLA": TINY,
    "3:1 KDA:GQA": preset("tiny", attention="gqa"),
    "7:1 KDA:MLA": preset("tiny", pattern="LLLLLLLF", layers=8),
    "5:1 SWA:GQA": preset("tiny", pattern="SSSSSF", layers=6, attention="gqa"),
    "full": preset("tiny", pattern="F"),
    "3:1 KDA:MLA, wide enough for oneDNN": preset("small", layers=2, pattern="LF"),
    "5:1 SWA:GQA, wide enough for oneDNN": preset("small", layers=2, pattern="SF", attention="gqa", window=128),
}


def bytes_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> HybridModel:
    return HybridModel.seeded(VARIANTS[request.param], 1)


class TestDelta:
    def inputs(self, tokens: int) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(3)
        heads, dim = 2, 32
        q, k, v = (torch.randn(heads, tokens, dim, generator=g) for _ in range(3))
        log_a = -torch.sigmoid(4 * torch.randn(heads, tokens, dim, generator=g))  # from hardly any decay to the bound
        b = torch.sigmoid(2 * torch.randn(heads, tokens, generator=g))
        return [q / math.sqrt(dim), torch.nn.functional.normalize(k, dim=-1), v, log_a, b]

    @pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000, 4096])
    def test_chunk_parallel_is_the_recurrence(self, tokens: int) -> None:
        given = self.inputs(tokens)
        state = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(4))
        exact, exact_state = recurrent(*[x.double() for x in given], state.double())
        out, after = chunked(*given, state, 64)
        assert (out - exact).norm() < 1e-5 * exact.norm()
        assert (after - exact_state).norm() < 1e-5 * exact_state.norm()

    def test_the_greatest_decay_there_can_be_overflows_nothing(self) -> None:
        q, k, v, log_a, b = self.inputs(128)
        given = [q, k, v, torch.full_like(log_a, -1.0), b]
        state = torch.zeros(2, 32, 32)
        out, after = chunked(*given, state, 64)
        exact, _ = recurrent(*[x.double() for x in given], state.double())
        assert torch.isfinite(after).all()
        assert (out - exact).norm() < 1e-5 * exact.norm()


class TestModel:
    def test_decoding_a_prompt_is_prefilling_it(self, model: HybridModel) -> None:
        prompt = bytes_of(200)
        at_once, one_by_one = model.empty(), model.empty()
        logits, _ = model.prefill(prompt, at_once)
        model.prefill(prompt[:50], one_by_one)
        for token in prompt[50:]:
            last = model.decode([token], [one_by_one])[0]
        assert torch.allclose(logits, last, atol=1e-4)
        assert at_once.tokens == one_by_one.tokens == 200

    def test_after_a_cached_prefix_the_logits_are_the_same_bits(self, model: HybridModel) -> None:
        prompt = bytes_of(300)
        whole = model.empty()
        logits, snapshots = model.prefill(prompt, whole, keep=[64, 192])
        for place in (64, 192):
            again = prefix_of(whole, place, snapshots.places[place])
            assert torch.equal(model.prefill(prompt[place:], again)[0], logits)

    def test_in_a_batch_the_logits_are_the_same(self, model: HybridModel) -> None:
        """To the last bits: which row of a matrix product a request is may change those, on some processors."""
        states = []
        for i in range(MAX_BATCH):
            states.append(model.empty())
            model.prefill(bytes_of(40 + 30 * i, seed=i), states[i])
        alone = [model.decode([i], [state.clone()])[0] for i, state in enumerate(states)]
        together = model.decode(list(range(MAX_BATCH)), [state.clone() for state in states])
        backwards = model.decode(list(range(MAX_BATCH))[::-1], [state.clone() for state in states[::-1]])
        for i in range(MAX_BATCH):
            for other in (together[i], backwards[MAX_BATCH - 1 - i]):
                assert (other - alone[i]).abs().max() < 1e-5 * max(1.0, float(alone[i].abs().max()))
                assert other.argmax() == alone[i].argmax()

    def test_layers_are_handed_over_in_order_each_as_it_will_stay(self, model: HybridModel) -> None:
        state = model.empty()
        seen = []
        model.prefill(bytes_of(100), state, on_layer=lambda layer, one: seen.append((layer, one.clone())))
        assert [layer for layer, _ in seen] == list(range(model.config.layers))
        for (_, then), now in zip(seen, state.layers, strict=True):
            if isinstance(then, KvState) and isinstance(now, KvState):
                assert torch.equal(then.kept, now.kept)
            elif isinstance(then, LinearState) and isinstance(now, LinearState):
                assert torch.equal(then.memory, now.memory)
                assert torch.equal(then.recent, now.recent)
            else:
                raise AssertionError("another kind of state")

    def test_what_is_kept_weighs_what_the_configuration_says(self, model: HybridModel) -> None:
        for tokens in (1, 100, 300):
            state = model.empty()
            model.prefill(bytes_of(tokens), state)
            weight = sum(part.nbytes for one in state.layers for part in one.parts)
            assert weight == model.config.state_bytes(tokens)

    def test_a_later_byte_changes_nothing_before_it(self, model: HybridModel) -> None:
        prompt = bytes_of(130)
        short, long = model.empty(), model.empty()
        _, kept = model.prefill(prompt[:128], short, keep=[128])
        _, kept_too = model.prefill(prompt, long, keep=[128])
        for layer, one in kept.places[128].items():
            other = kept_too.places[128][layer]
            if isinstance(one, LinearState) and isinstance(other, LinearState):
                assert torch.equal(one.memory, other.memory)
            elif isinstance(one, KvState) and isinstance(other, KvState):
                assert torch.equal(one.kept, other.kept)

    def test_an_earlier_byte_changes_the_logits(self, model: HybridModel) -> None:
        """A model that looks at its last bytes only would pass every other test."""
        prompt = bytes_of(100)
        one, _ = model.prefill(prompt, model.empty())
        other, _ = model.prefill([(prompt[0] + 1) % 256, *prompt[1:]], model.empty())
        assert (one - other).abs().max() > 1e-5


def test_seeds_and_files_give_the_same_model(tmp_path: Path) -> None:
    one, other = HybridModel.seeded(TINY, 1), HybridModel.seeded(TINY, 2)
    assert one.fingerprint != other.fingerprint
    one.save(tmp_path / "tiny.safetensors")
    again = HybridModel.load(TINY, tmp_path / "tiny.safetensors")
    assert again.fingerprint == one.fingerprint == HybridModel.seeded(TINY, 1).fingerprint
    with pytest.raises(ModelError, match=r"not weights of tiny-heads=4"):
        HybridModel.load(preset("tiny", heads=4), tmp_path / "tiny.safetensors")
    with pytest.raises(ModelError, match="not weights"):
        HybridModel.load(TINY, tmp_path / "none")


def test_small_has_about_25_million_parameters() -> None:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in HybridModel(SMALL).parameters())
    assert 22e6 < count < 28e6


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))

    def product(i: int, j: int) -> float:
        return float((rotate(q, torch.tensor([i]), 1e4) * rotate(k, torch.tensor([j]), 1e4)).sum())

    assert rotate(q, torch.tensor([77]), 1e4).norm() == pytest.approx(float(q.norm()), rel=1e-5)
    assert product(105, 100) == pytest.approx(product(5, 0), abs=1e-4)
    assert product(105, 100) != pytest.approx(product(50, 0), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": "LXF"}, "pattern: 'LXF'"),
        ({"pattern": ""}, "pattern"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads: 2"),
        ({"layers": 0}, "layers: 0"),
        ({"rope_dim": 15}, "rope_dim: 15"),
        ({"chunk": 128}, "float32 overflows"),
        ({"attention": "nsa"}, "attention: 'nsa'"),
        ({"layer": 3}, "layer: no field"),
    ],
)
def test_what_cannot_be_a_model_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        preset("tiny", **changes)


def test_unknown_presets_and_wrong_calls_are_refused() -> None:
    with pytest.raises(ModelError, match="use one of tiny, small"):
        preset("large")
    model = HybridModel.seeded(TINY, 1)
    with pytest.raises(ModelError, match="tokens: none"):
        model.prefill([], model.empty())
    with pytest.raises(ModelError, match=r"keep: \[65\]"):
        model.prefill(bytes_of(100), model.empty(), keep=[65])
    state = model.empty()
    model.prefill(bytes_of(65), state)
    with pytest.raises(ModelError, match="multiple of 64"):
        model.prefill(bytes_of(10), state)
    with pytest.raises(ModelError, match="at most 8"):
        model.decode([1] * 9, [state] * 9)
    with pytest.raises(ModelError, match="rows: 96"):
        HybridModel(TINY, rows=96)
    assert set(PRESETS) == {"tiny", "small"}
    assert isinstance(TINY, ModelConfig)


def test_a_products_layout_for_blocks_follows_its_weights() -> None:
    """A copy, other weights and another type have their own."""
    torch.manual_seed(0)
    one = Product(256, 256)
    assert one.weight.numel() >= BIG
    x = torch.randn(BLOCK_ROWS, 256)

    def exact(product: Product) -> Tensor:
        return torch.nn.functional.linear(x.to(product.weight.dtype), product.weight, product.bias)

    with torch.inference_mode():
        assert torch.allclose(one(x), exact(one), atol=1e-5)
        assert (one._laid_out is not None) == ONEDNN
        other, copied = Product(256, 256), copy.deepcopy(one)
        assert not torch.allclose(one(x), exact(other), atol=1e-2)
        copied.weight.copy_(other.weight)  # the copy's layout is still to be made
        copied.bias.copy_(other.bias)
        assert torch.allclose(copied(x), exact(other), atol=1e-5)
        one.load_state_dict(other.state_dict())
        assert torch.allclose(one(x), exact(other), atol=1e-5)
        one.double()
        assert torch.equal(one(x.double()), exact(one))
        few = Product(256, 256)
        few(x[:8])
        assert few._laid_out is None, "a decode step's rows take torch's way"
