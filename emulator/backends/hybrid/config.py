"""A hybrid model's shape: which layers, of what size, and what their state weighs. No torch here.

Layers are named by letters, repeated over the depth: L linear attention (gated delta rule, as Kimi Linear's KDA), F
full attention (latent KV as in MLA, or GQA), S sliding-window attention. `LLLF` is Kimi Linear's 3:1, `LLLLLLLF`
Ring-2.5's 7:1, `SSSSSF` MiMo-V2-Flash's 5:1 (the paper's Table 1).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Final, Literal

BYTES: Final = 256
BOS: Final = 256
EOS: Final = 257
VOCABULARY: Final = 258
MAX_BATCH: Final = 8
"""Rows of a decode step, requests or padding."""
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
Kind = Literal["linear", "full", "sliding"]
_KINDS: Final[dict[str, Kind]] = {"L": "linear", "F": "full", "S": "sliding"}


class ModelError(ValueError):
    """A model that cannot be: field, value, remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model over bytes. Dimensions are of one head unless they say otherwise.

    pattern: a letter a layer, repeated to `layers`. attention: of its F layers, mla or gqa; sliding ones are gqa.
    latent_dim, rope_dim: what MLA keeps of a token. kv_heads: of GQA. window: tokens a sliding layer sees, its own
    included. conv_width: of the short causal convolution before linear attention. chunk: tokens of the chunk-parallel
    form. gate_bound: most that a linear layer's state decays in one token, as a negative logarithm. Raises ModelError.
    """

    name: str
    layers: int
    d_model: int
    mlp_dim: int
    pattern: str = "LLLF"
    attention: Literal["mla", "gqa"] = "mla"
    heads: int = 4
    head_dim: int = 64
    kv_heads: int = 2
    latent_dim: int = 128
    rope_dim: int = 32
    window: int = 512
    linear_heads: int = 4
    linear_dim: int = 64
    conv_width: int = 4
    chunk: int = 64
    gate_bound: float = 1.0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) - set(_KINDS):
            raise ModelError(f"pattern: {self.pattern!r}: use the letters L, F and S, e.g. LLLF")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "pattern", "attention", "rope_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ModelError(f"{field.name}: {value!r}: give a number above 0")
        if self.attention not in ("mla", "gqa"):
            raise ModelError(f"attention: {self.attention!r}: use mla or gqa")
        if self.heads % self.kv_heads:
            raise ModelError(f"kv_heads: {self.kv_heads}: {self.heads} heads cannot be shared among them evenly")
        if self.rope_dim % 2 or self.rope_dim < 0 or self.head_dim % 2:
            raise ModelError(f"rope_dim: {self.rope_dim}, head_dim: {self.head_dim}: give even numbers")
        if self.chunk * self.gate_bound > 80:
            raise ModelError(
                f"chunk: {self.chunk} x gate_bound {self.gate_bound:g} is over 80, where float32 overflows; lower one"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each layer is, from the first."""
        return tuple(_KINDS[self.pattern[i % len(self.pattern)]] for i in range(self.layers))

    @property
    def fingerprint(self) -> str:
        """The shape's identity: 32 hexadecimal digits. With the weights it is `HybridModel.fingerprint`."""
        data = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()

    def kept_width(self, kind: Kind) -> int:
        """Numbers that an attention layer keeps of one token."""
        if kind == "full" and self.attention == "mla":
            return self.latent_dim + self.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def state_bytes(self, tokens: int, dtype: str = "float32") -> int:
        """S_kv(l) of this model: bytes of the state after `tokens`, without headers. The recurrent part is float32."""
        return sum(self.layer_bytes(kind, tokens, dtype) for kind in self.kinds)

    def layer_bytes(self, kind: Kind, tokens: int, dtype: str = "float32") -> int:
        """The same of one layer: constant for a linear one, in proportion to the tokens of an attention layer."""
        size = DTYPE_BYTES[dtype]
        if kind == "linear":
            channels = 3 * self.linear_heads * self.linear_dim
            return 4 * self.linear_heads * self.linear_dim**2 + size * (self.conv_width - 1) * channels
        kept = tokens if kind == "full" else min(tokens, self.window)
        return size * kept * self.kept_width(kind)


TINY: Final = ModelConfig(
    name="tiny", layers=4, d_model=64, mlp_dim=128, heads=2, head_dim=32, kv_heads=1, latent_dim=32, rope_dim=16,
    window=128, linear_heads=2, linear_dim=32,
)  # fmt: skip
SMALL: Final = ModelConfig(name="small", layers=12, d_model=384, mlp_dim=1024, heads=6, linear_heads=6)
PRESETS: Final = {one.name: one for one in (TINY, SMALL)}
"""`tiny` for tests, `small` of about 25 million parameters."""


def preset(name: str, **changes: object) -> ModelConfig:
    """A preset, with changes; its name then says so. Raises ModelError."""
    if name not in PRESETS:
        raise ModelError(f"model: {name!r}: use one of {', '.join(PRESETS)}")
    if not changes:
        return PRESETS[name]
    unknown = set(changes) - {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown:
        raise ModelError(f"{', '.join(sorted(unknown))}: no field of a model")
    told = "".join(f"-{key}={value}" for key, value in sorted(changes.items()))
    return dataclasses.replace(PRESETS[name], **{"name": name + told, **changes})  # type: ignore[arg-type]
