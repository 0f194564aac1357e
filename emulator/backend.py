"""What a worker needs of whoever computes: emulated time, or a model.

`backends/timing.py` is the first, `backends/hybrid/backend.py` the second. A worker carries one backend for its whole
life, and one machine at a time, which the backend makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from emulator.computing import ComputeMessage
from emulator.decode_instance import DecodeInstance
from emulator.frames import Source
from emulator.instance import PrefillInstance
from emulator.messages import AnyMessage, Expect, Tokens, Transmit


@dataclass(frozen=True, slots=True)
class Host:
    """What a backend may call, on the event loop's thread. hear(message): the present machine does. wake(): there is
    more to send. stop(why): it cannot go on."""

    hear: Callable[[AnyMessage], None]
    wake: Callable[[], None]
    stop: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a machine of either role may have, and its name. Model bytes; as in the worker's configuration."""

    name: str
    outbox_bytes: int
    landing_bytes: int
    cache_bytes: int
    block_tokens: int
    slots: int
    stream_interval: int


class Backend(Protocol):
    """All calls are made on the event loop's thread."""

    def machine(self, role: str, token_base: int) -> PrefillInstance | DecodeInstance:
        """An empty machine of the role; what was the machine before is over."""
        ...

    def tell(self, message: ComputeMessage) -> None:
        """What the machine asks for."""
        ...

    def source(self, order: Transmit) -> Source | None:
        """Who has the bytes of a transfer that begins; None where they stand for themselves."""
        ...

    def memory(self, expected: Expect, size_bytes: int) -> memoryview | None:
        """Where a transfer lands; None where its bytes are of no use."""
        ...

    def withdraw(self, token: int) -> None:
        """What is landing, or has landed, under this token is nobody's."""
        ...

    def landed(self, token: int) -> None:
        """All bytes are there: the machine hears `Landed`, or `Damaged` where they are not what was to come."""
        ...

    def fill(self, tokens: Tokens) -> Tokens:
        """The same with its text."""
        ...

    @property
    def refused_states(self) -> int:
        """Transfers that were whole, and not what was to come."""
        ...

    def close(self) -> bool:
        """Compute no more; whether what was under way has ended."""
        ...
