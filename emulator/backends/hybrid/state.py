"""What crosses the link: the state of one layer as one sealed message, refused when it is not exactly what was meant.

A message is a header, the layer's tensors one after the other, and a seal: a checksum of the header and of the
payload's own checksum, so that the payload can be taken in as it is computed and the header, which names the transfer,
come last. The receiver knows by itself what the header must say (`Expected`: which transfer, which model, how many
tokens). So a message that is damaged, cut off, or of another layer, model or transfer (a replay) is never decoded. The
first token of the answer crosses in a message of the same kind, `encode_token`.
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
HEADER: Final = struct.Struct("<4sHBBHHIIQ16sQ")  # magic, version, kind, dtype, layer, layers, from, tokens, transfer,
# the model's fingerprint, bytes of the payload
_KINDS: Final[tuple[Kind, ...]] = ("linear", "full", "sliding")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES: Final = list(_DTYPES)
SEAL_BYTES: Final = 16
OVERHEAD_BYTES: Final = HEADER.size + SEAL_BYTES
"""Of a message, beside the state itself."""


_TOKEN: Final = struct.Struct("<4sHHIQ16s")  # magic, version, the token, tokens before it, transfer, fingerprint
_TOKEN_MAGIC: Final = b"PFHT"
TOKEN_BYTES: Final = _TOKEN.size + SEAL_BYTES
"""Of the message with the answer's first token."""


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


class Payload:
    """The checksum of a message's payload, taken as it comes to be."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=SEAL_BYTES)

    def add(self, part: bytes | memoryview) -> None:
        """What follows on what was added before."""
        self._digest.update(part)

    def seal(self, header: bytes) -> bytes:
        """The seal of the whole message."""
        return hashlib.blake2b(header + self._digest.digest(), digest_size=SEAL_BYTES).digest()


def header(config: ModelConfig, layer: int, expected: Expected, dtype: str = "float32") -> bytes:
    """The header of a layer's message."""
    payload_bytes = message_bytes(config, layer, expected.tokens, expected.since, dtype) - OVERHEAD_BYTES
    return _header(config, layer, config.kinds[layer], _DTYPES[dtype], expected, payload_bytes)


def encode_token(token: int, expected: Expected) -> bytes:
    """The message of the first token after a state."""
    told = _TOKEN.pack(_TOKEN_MAGIC, VERSION, token, expected.tokens, expected.transfer, expected.fingerprint)
    return told + Payload().seal(told)


def decode_token(message: bytes | memoryview, expected: Expected) -> int:
    """The first token. Raises StateError."""
    told = bytes(message[: _TOKEN.size])
    if len(message) != TOKEN_BYTES or bytes(message[_TOKEN.size :]) != Payload().seal(told):
        raise StateError("the first token: damaged or cut off")
    token: int = _TOKEN.unpack(told)[2]
    if bytes(message) != encode_token(token, expected):
        raise StateError("the first token: of another model, transfer or length than was to come")
    return token


def encode(config: ModelConfig, layer: int, state: LayerState, expected: Expected) -> bytes:
    """The message of one layer's state."""
    kind, parts = config.kinds[layer], _parts(state, expected.since, config.kinds[layer])
    payload = b"".join([_bytes(part) for part in parts])
    told = _header(config, layer, kind, parts[-1].dtype, expected, len(payload))
    return told + payload + _seal(told, payload)


def decode(config: ModelConfig, layer: int, message: bytes | memoryview, expected: Expected) -> LayerState:
    """The state of a layer (of a full-attention one, its tokens from `since` on). Raises StateError."""
    if len(message) < OVERHEAD_BYTES:
        raise StateError(f"layer {layer}: {len(message)} bytes are no message; at least {OVERHEAD_BYTES} are one")
    told, payload = bytes(message[: HEADER.size]), message[HEADER.size : -SEAL_BYTES]
    if told[:4] != MAGIC:
        raise StateError(f"layer {layer}: not a state's message")
    _, version, _, dtype_code, _, _, _, _, transfer, fingerprint, size = HEADER.unpack(told)
    if version != VERSION:
        raise StateError(f"layer {layer}: version {version}; this end speaks {VERSION}")
    if size != len(payload) or bytes(message[-SEAL_BYTES:]) != _seal(told, payload):
        raise StateError(f"layer {layer}: damaged or cut off")
    if fingerprint != expected.fingerprint:
        raise StateError(f"layer {layer}: of another model, {fingerprint.hex()}; here is {expected.fingerprint.hex()}")
    if transfer != expected.transfer:
        raise StateError(f"layer {layer}: of transfer {transfer}; {expected.transfer} was to come")
    kind = config.kinds[layer]
    if dtype_code >= len(_NAMES) or told != _header(
        config, layer, kind, _DTYPES[_NAMES[dtype_code]], expected, len(payload)
    ):
        raise StateError(f"layer {layer}: of another layer, place or length than was to come")
    dtype = _NAMES[dtype_code]
    if len(message) != message_bytes(config, layer, expected.tokens, expected.since, dtype):
        raise StateError(f"layer {layer}: {len(payload)} bytes are not what {expected.tokens} tokens take")
    return _state(config, kind, payload, dtype, expected)


def _parts(state: LayerState, since: int, kind: Kind) -> list[Tensor]:
    if isinstance(state, KvState) and kind == "full":
        return [state.kept[since - (state.end - state.held) :]]
    return state.parts


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
    return HEADER.pack(
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


def _seal(told: bytes, payload: bytes | memoryview) -> bytes:
    whole = Payload()
    whole.add(payload)
    return whole.seal(told)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


assert set(_DTYPES) == set(DTYPE_BYTES)
