"""The timing backend: no model runs, time passes as the profile says, and the answer's tokens are their own numbers.

Token k reads " k", so that a client can check that an answer is whole and in order.
"""

from __future__ import annotations

import msgspec

from emulator.backend import Bounds, Host
from emulator.batching import decode_instance
from emulator.computing import ComputeMessage
from emulator.decode_instance import DecodeInstance
from emulator.decode_step import AffineStep
from emulator.frames import Source
from emulator.instance import PrefillInstance
from emulator.kvcache import CacheShape, NodePool
from emulator.messages import Expect, Landed, Tokens, Transmit
from emulator.profile import Profile


def text_of(first: int, count: int) -> str:
    """The text of tokens first .. first + count - 1 (from 0)."""
    return "".join([f" {k}" for k in range(first, first + count)])


class TimingBackend:
    """Emulated time: the machines know when everything ends, and bytes stand for KV without being any."""

    refused_states = 0

    def __init__(
        self, profile: Profile, bounds: Bounds, host: Host, *, step_s: float, step: AffineStep | None, pieces: int
    ) -> None:
        self._profile = profile
        self._bounds = bounds
        self._host = host
        self._step_s, self._step, self._pieces = step_s, step, pieces

    def machine(self, role: str, token_base: int) -> PrefillInstance | DecodeInstance:
        bounds, profile = self._bounds, self._profile
        if role == "decode":
            return decode_instance(
                bounds.name,
                slots=bounds.slots,
                step_s=self._step_s,
                timing=self._step,
                landing_bytes=bounds.landing_bytes,
                stream_interval=bounds.stream_interval,
                token_base=token_base,
            )
        pool = None
        if bounds.cache_bytes:
            first, last = profile.first_tokens, profile.last_tokens
            shape = CacheShape.of(profile.s_kv, bounds.block_tokens, first_tokens=first, last_tokens=last)
            pool = NodePool(bounds.cache_bytes, shape)
        return PrefillInstance(
            bounds.name,
            profile.timing,
            pieces=self._pieces,
            outbox_bytes=bounds.outbox_bytes,
            pool=pool,
            token_base=token_base,
        )

    def tell(self, message: ComputeMessage) -> None:
        raise TypeError(f"{message!r}: nothing computes here")

    def source(self, order: Transmit) -> Source | None:
        return None

    def memory(self, expected: Expect, size_bytes: int) -> memoryview | None:
        return None

    def withdraw(self, token: int) -> None:
        """Nothing is kept of what lands."""

    def landed(self, token: int) -> None:
        self._host.hear(Landed(token))

    def fill(self, tokens: Tokens) -> Tokens:
        return msgspec.structs.replace(tokens, text=text_of(tokens.first, tokens.count))

    def close(self) -> bool:
        """Nothing goes on."""
        return True
