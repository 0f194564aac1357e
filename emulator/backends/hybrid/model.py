"""The model: byte-level, decoder-only, layers of several kinds; prefill of one sequence layer by layer, batched decode.

model = HybridModel.seeded(SMALL, seed=1)
state = model.empty()
logits = model.prefill(tokens, state, on_layer=send)     # [258]; send(i, state of layer i) while later ones compute
logits = model.decode(tokens, [state, ...])              # [requests, 258]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from emulator.backends.hybrid.attention import GroupedAttention, LatentAttention
from emulator.backends.hybrid.config import MAX_BATCH, VOCABULARY, ModelConfig, ModelError
from emulator.backends.hybrid.layers import GatedMlp, LayerState, Mixer, RMSNorm, pad_rows
from emulator.backends.hybrid.linear import LinearAttention


@dataclass(slots=True)
class SequenceState:
    """What the model remembers of one sequence. tokens: how many it has seen; layers: a state each."""

    layers: list[LayerState]
    tokens: int = 0

    def clone(self) -> SequenceState:
        return SequenceState([one.clone() for one in self.layers], self.tokens)


@dataclass(slots=True)
class Snapshots:
    """States after a number of tokens, of the layers that do not keep every token: place -> layer -> state."""

    places: dict[int, dict[int, LayerState]] = field(default_factory=dict)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.before = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = _mixer(config, kind)
        self.between = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = GatedMlp(config)

    def prefill(
        self, x: Tensor, state: LayerState, tokens: int, rows: int, keep: Sequence[int], on_block: Callable[[], None]
    ) -> dict[int, LayerState]:
        """x: [tokens, padded to a multiple of rows, d_model], which becomes the layer's output. Returns the states
        after each of `keep`, numbers of these tokens and multiples of `rows`, where a later state has them not within.
        on_block: called after every `rows` of them.
        """
        feed = self.mixer.begin(state, tokens, rows)
        kept: dict[int, LayerState] = {}
        for done, part in zip(range(rows, len(x) + 1, rows), torch.split(x, rows), strict=True):
            part += feed.block(self.before(part), min(rows, tokens - done + rows))
            part += self.mlp(self.between(part))
            if done in keep and (one := feed.snapshot()) is not None:
                kept[done] = one
            on_block()
        return kept

    def decode(self, x: Tensor, states: Sequence[LayerState]) -> Tensor:
        """x: [batch, d_model], the first len(states) of which are requests."""
        x = x + self.mixer.decode(self.before(x), states)
        out: Tensor = x + self.mlp(self.between(x))
        return out


def _mixer(config: ModelConfig, kind: str) -> Mixer:
    if kind == "linear":
        return LinearAttention(config)
    if kind == "full" and config.attention == "mla":
        return LatentAttention(config)
    return GroupedAttention(config, sliding=kind == "sliding")


class HybridModel(nn.Module):
    """rows: tokens of a prefill's block, a multiple of the chunk; more for a GPU."""

    def __init__(self, config: ModelConfig, rows: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.rows = config.chunk if rows is None else rows
        if self.rows % config.chunk:
            raise ModelError(f"rows: {self.rows}: give a multiple of the chunk, {config.chunk}")
        self.embed = nn.Embedding(VOCABULARY, config.d_model)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.kinds)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)

    @classmethod
    def seeded(cls, config: ModelConfig, seed: int, rows: int | None = None) -> HybridModel:
        """With random weights, the same for the same seed on every machine with this torch."""
        model = cls(config, rows)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                with torch.no_grad():
                    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
                    if name.endswith(("out.weight", "mlp.down.weight")):
                        weight.mul_((2 * config.layers) ** -0.5)
            elif name.endswith("bias"):
                with torch.no_grad():
                    weight.uniform_(-3.0, 3.0, generator=generator)  # heads that forget fast, and slowly
        return model.eval().requires_grad_(False)

    def save(self, path: Path) -> None:
        """As safetensors, with the shape's fingerprint."""
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, path, {"shape": self.config.fingerprint})

    @classmethod
    def load(cls, config: ModelConfig, path: Path, rows: int | None = None) -> HybridModel:
        """Raises ModelError for a file that is not this shape's weights."""
        model = cls(config, rows)
        try:
            model.load_state_dict(load_file(path))
        except (OSError, RuntimeError, ValueError) as wrong:
            told = str(wrong).splitlines()[0]
            raise ModelError(f"{path}: not weights of {config.name} ({told}); save them from such a model") from None
        return model.eval().requires_grad_(False)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes: the shape's and the weights' identity; what it computes with another is not to be decoded here."""
        digest = hashlib.blake2b(self.config.fingerprint.encode(), digest_size=16)
        for name, weight in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(str(weight.dtype).encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()

    @property
    def layers(self) -> list[Block]:
        """From the first."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def empty(self) -> SequenceState:
        """Of a sequence without tokens."""
        return SequenceState([block.mixer.empty(self.device, self.dtype) for block in self.layers])

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        on_layer: Callable[[int, LayerState], None] = lambda layer, state: None,
        on_block: Callable[[int, LayerState], None] = lambda layer, state: None,
        keep: Sequence[int] = (),
    ) -> tuple[Tensor, Snapshots]:
        """Let the sequence go on by `tokens`, which changes `state`; the logits after the last one, [vocabulary].

        state: of a multiple of `rows` tokens (a cached prefix), or empty. on_layer: called as each layer is done;
        on_block: as it is done with each block of `rows` tokens, which is then in its state; either may raise.
        keep: places, in tokens of the whole sequence and multiples of `rows`, to have snapshots of. Raises ModelError.
        """
        start, n = state.tokens, len(tokens)
        if not n:
            raise ModelError("tokens: none; give one at least")
        if start % self.rows:
            raise ModelError(f"state: of {start} tokens; a prefill goes on from a multiple of {self.rows}")
        wrong = [place for place in keep if place % self.rows or not start < place <= start + n]
        if wrong:
            raise ModelError(f"keep: {wrong}: multiples of {self.rows} in ({start}, {start + n}] can be kept")
        inner = [place - start for place in keep]
        x = pad_rows(self.embed(torch.as_tensor(tokens, dtype=torch.long, device=self.device)), self.rows)
        snapshots = Snapshots({place: {} for place in keep})
        for i, block in enumerate(self.layers):
            told = partial(on_block, i, state.layers[i])
            for done, one in block.prefill(x, state.layers[i], n, self.rows, inner, told).items():
                snapshots.places[start + done][i] = one
            on_layer(i, state.layers[i])
        state.tokens = start + n
        return self._logits(x[n - 1 : n])[0], snapshots

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], states: Sequence[SequenceState]) -> Tensor:
        """One token of each request more, which changes the states; [requests, vocabulary]. Raises ModelError."""
        if not 0 < len(tokens) == len(states) <= MAX_BATCH:
            raise ModelError(f"tokens: {len(tokens)} for {len(states)} states; give one each, at most {MAX_BATCH}")
        padded = [*tokens, *[0] * (MAX_BATCH - len(tokens))]
        x = self.embed(torch.tensor(padded, dtype=torch.long, device=self.device))
        for i, block in enumerate(self.layers):
            x = block.decode(x, [state.layers[i] for state in states])
        for state in states:
            state.tokens += 1
        return self._logits(x)[: len(tokens)]

    def _logits(self, x: Tensor) -> Tensor:
        """x: [n, d_model], n of 1 or MAX_BATCH; a single row is computed as a batch is."""
        rows = torch.nn.functional.pad(x, (0, 0, 0, MAX_BATCH - len(x)))
        out: Tensor = self.head(self.norm(rows))
        return out[: len(x)].float()
