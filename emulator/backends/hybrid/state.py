"""What crosses the link: the state of one layer as one sealed message, refused when it is not exactly what was meant.

A message is a header, the layer's tensors one after the other, and a checksum of both. The receiver knows by itself
what the header must say (`Expected`: which transfer, which model, how many tokens). So a message that is damaged, cut
off, or of another layer, model or transfer (a replay) is never decoded.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from emulator.backends.hybrid.config import DTYPE_BYTES, Kind, ModelConfig
from emulator.backends.hybrid.layers import KvState, LayerState, LinearState

MAGIC: Final = b"PFHS"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sHBBHHIIQ16sQ")  # magic, version, kind, dtype, layer, layers, from, tokens, transfer,
# the model's fingerprint, bytes of the payload
_KINDS: Final[tuple[Kind, ...]] = ("linear", "full", "sliding")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES: Final = list(_DTYPES)
SEAL_BYTES: Final = 16
OVERHEAD_BYTES: Final = _HEADER.size + SEAL_BYTES
"""Of a message, beside the state itself."""


class StateError(ValueError):
    """A message that is not the state that was to come."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What both ends know of a transfer. fingerprint: of the model, 16 bytes; transfer: its number; tokens: of the
    sequence; since: the tokens before it are cached at the receiver, and only what follows crosses."""

    fingerprint: bytes
    transfer: int
    tokens: int
    since: int = 0


def message_bytes(config: ModelConfig, layer: int, tokens: int, since: int = 0, dtype: str = "float32") -> int:
    """How long the message of a layer is: S_kv's share of that layer, and the overhead."""
    kind = config.kinds[layer]
    return OVERHEAD_BYTES + config.layer_bytes(kind, tokens - since if kind == "full" else tokens, dtype)


def encode(config: ModelConfig, layer: int, state: LayerState, expected: Expected) -> bytes:
    """The message of one layer's state."""
    kind, parts = config.kinds[layer], _parts(state, expected.since, config.kinds[layer])
    payload = b"".join([_bytes(part) for part in parts])
    header = _header(config, layer, kind, parts[-1].dtype, expected, len(payload))
    return header + payload + _seal(header, payload)


def decode(config: ModelConfig, layer: int, message: bytes | memoryview, expected: Expected) -> LayerState:
    """The state of a layer (of a full-attention one, its tokens from `since` on). Raises StateError."""
    if len(message) < OVERHEAD_BYTES:
        raise StateError(f"layer {layer}: {len(message)} bytes are no message; at least {OVERHEAD_BYTES} are one")
    header, payload = bytes(message[: _HEADER.size]), message[_HEADER.size : -SEAL_BYTES]
    if header[:4] != MAGIC:
        raise StateError(f"layer {layer}: not a state's message")
    _, version, _, dtype_code, _, _, _, _, transfer, fingerprint, size = _HEADER.unpack(header)
    if version != VERSION:
        raise StateError(f"layer {layer}: version {version}; this end speaks {VERSION}")
    if size != len(payload) or bytes(message[-SEAL_BYTES:]) != _seal(header, payload):
        raise StateError(f"layer {layer}: damaged or cut off")
    if fingerprint != expected.fingerprint:
        raise StateError(f"layer {layer}: of another model, {fingerprint.hex()}; here is {expected.fingerprint.hex()}")
    if transfer != expected.transfer:
        raise StateError(f"layer {layer}: of transfer {transfer}; {expected.transfer} was to come")
    kind = config.kinds[layer]
    if dtype_code >= len(_NAMES) or header != _header(
        config, layer, kind, _DTYPES[_NAMES[dtype_code]], expected, len(payload)
    ):
        raise StateError(f"layer {layer}: of another layer, place or length than was to come")
    dtype = _NAMES[dtype_code]
    if len(message) != message_bytes(config, layer, expected.tokens, expected.since, dtype):
        raise StateError(f"layer {layer}: {len(payload)} bytes are not what {expected.tokens} tokens take")
    return _state(config, kind, payload, dtype, expected)


def _parts(state: LayerState, since: int, kind: Kind) -> list[Tensor]:
    if isinstance(state, LinearState):
        return [state.memory, state.recent]
    return [state.kept[since - (state.end - state.held) :] if kind == "full" else state.kept]


def _state(config: ModelConfig, kind: Kind, payload: bytes | memoryview, dtype: str, expected: Expected) -> LayerState:
    if kind == "linear":
        heads, dim = config.linear_heads, config.linear_dim
        cut = 4 * heads * dim * dim
        memory = _tensor(payload[:cut], torch.float32).view(heads, dim, dim)
        return LinearState(memory, _tensor(payload[cut:], _DTYPES[dtype]).view(config.conv_width - 1, -1))
    rows = _tensor(payload, _DTYPES[dtype]).view(-1, config.kept_width(kind))
    return KvState(rows, len(rows), expected.tokens)


def _header(
    config: ModelConfig, layer: int, kind: Kind, dtype: torch.dtype, expected: Expected, payload_bytes: int
) -> bytes:
    names = {value: name for name, value in _DTYPES.items()}
    return _HEADER.pack(
        MAGIC,
        VERSION,
        _KINDS.index(kind),
        _NAMES.index(names[dtype]),
        layer,
        config.layers,
        expected.since if kind == "full" else 0,
        expected.tokens,
        expected.transfer,
        expected.fingerprint,
        payload_bytes,
    )


def _seal(header: bytes, payload: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(header, digest_size=SEAL_BYTES)
    digest.update(payload)
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


assert set(_DTYPES) == set(DTYPE_BYTES)
