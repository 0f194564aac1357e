"""A transfer as a whole: the messages of all layers, one after the other, and last the answer's first token, if any.

`Parcel` is the sender's end. A compute thread puts the state in as it comes to be; what is contiguous from the start
may leave, though the layer that it belongs to is not done: the rows of a full-attention layer exist long before its
last token has attended. `unpack` is the receiver's end, and takes nothing before all of it was verified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emulator.backends.hybrid.config import ModelConfig
from emulator.backends.hybrid.layers import KvState, LayerState
from emulator.backends.hybrid.model import SequenceState
from emulator.backends.hybrid.state import (
    HEADER,
    SEAL_BYTES,
    TOKEN_BYTES,
    Expected,
    Payload,
    StateError,
    decode,
    decode_token,
    encode_token,
    header,
    message_bytes,
)


def parcel_bytes(config: ModelConfig, tokens: int, *, answer: bool) -> int:
    """How long a transfer of the state after `tokens` is. answer: with a first token."""
    layers = sum(message_bytes(config, layer, tokens) for layer in range(config.layers))
    return layers + (TOKEN_BYTES if answer else 0)


class Parcel:
    """The bytes of one transfer at its sender: an `emulator.frames.Source`.

    `take` is called by whoever computes, all else by the event loop. Nothing is ready before the transfer has its
    number, and a first token, which is the last there is, not before `close`.
    """

    def __init__(self, config: ModelConfig, fingerprint: bytes, tokens: int, *, answer: bool) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._tokens = tokens
        self._memory = bytearray(parcel_bytes(config, tokens, answer=answer))
        self._view = memoryview(self._memory)
        self._starts = [0]
        for layer in range(config.layers):
            self._starts.append(self._starts[-1] + message_bytes(config, layer, tokens))
        self._payloads = [Payload() for _ in range(config.layers)]
        self._rows = 0  # of the present layer that were taken in
        self._filled = HEADER.size  # up to here there is payload, from the present layer's header on
        self._done = 0  # layers whose payload is whole
        self._answer = answer
        self._token: int | None = None  # the first token
        self._expected: Expected | None = None
        self._sealed = 0  # layers
        self._ready = 0

    # computing
    def take(self, layer: int, state: LayerState, *, done: bool) -> bool:
        """What a layer's state has become; done: it is whole. Layers come in order. Whether there is more to send."""
        before = self._filled
        if isinstance(state, KvState) and self._config.kinds[layer] == "full":
            rows = state.kept[self._rows :]
            self._rows = state.held
            if len(rows):
                self._put(layer, rows)
        elif done:
            for part in state.parts:
                self._put(layer, part)
        if done:
            assert self._filled == self._starts[layer + 1] - SEAL_BYTES, "not the size that the configuration says"
            self._rows = 0
            self._filled += SEAL_BYTES + HEADER.size
            self._done = layer + 1
        return self._filled > before

    def close(self, token: int | None = None) -> None:
        """All layers are in. token: the first one of the answer."""
        self._token = token

    def _put(self, layer: int, part: Tensor) -> None:
        data = part.detach().contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data
        self._view[self._filled : self._filled + len(data)] = data
        self._payloads[layer].add(data)
        self._filled += len(data)

    # sending
    def bind(self, transfer: int) -> None:
        """The number of the transfer is known."""
        self._expected = Expected(self._fingerprint, transfer, self._tokens)
        for layer in range(self._config.layers):
            start = self._starts[layer]
            self._view[start : start + HEADER.size] = header(self._config, layer, self._expected)
        self.advance()

    def advance(self) -> None:
        """Seal what is whole."""
        if self._expected is None:
            return
        done, filled = self._done, self._filled
        for layer in range(self._sealed, done):
            start, end = self._starts[layer], self._starts[layer + 1]
            told = bytes(self._view[start : start + HEADER.size])
            self._view[end - SEAL_BYTES : end] = self._payloads[layer].seal(told)
        self._sealed = done
        if done < self._config.layers:
            self._ready = max(self._starts[done], min(filled, self._starts[done + 1] - SEAL_BYTES))
            return
        self._ready = self._starts[-1]
        if self._answer and self._token is not None:
            self._view[self._ready :] = encode_token(self._token, self._expected)
            self._ready = len(self._memory)

    def ready_bytes(self) -> int:
        return self._ready

    def read(self, offset: int, length: int) -> memoryview:
        return self._view[offset : offset + length]


def unpack(
    config: ModelConfig, memory: bytes | bytearray | memoryview, expected: Expected, *, answer: bool
) -> tuple[SequenceState, int | None]:
    """The state that has landed, and the first token. Raises StateError for anything but what was to come."""
    size = parcel_bytes(config, expected.tokens, answer=answer)
    if len(memory) != size:
        raise StateError(f"{len(memory)} bytes; the state after {expected.tokens} tokens takes {size}")
    view, start, layers = memoryview(memory), 0, []
    for layer in range(config.layers):
        end = start + message_bytes(config, layer, expected.tokens)
        layers.append(decode(config, layer, view[start:end], expected))
        start = end
    token = decode_token(view[start:], expected) if answer else None
    return SequenceState(layers, expected.tokens), token
