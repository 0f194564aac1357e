"""What prefill and decode of one worker share: the model, its compute thread, and how a state lands and is verified.

A state that has landed is verified in a thread of its own, so that neither the event loop nor the model waits; nobody
but its machine's `Landed` brings it to life, and one that is withdrawn meanwhile is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from emulator.backend import Host
from emulator.backends.hybrid.model import HybridModel, SequenceState
from emulator.backends.hybrid.parcel import parcel_bytes, unpack
from emulator.backends.hybrid.state import Expected, StateError
from emulator.backends.hybrid.thread import ComputeThread
from emulator.clock import Clock
from emulator.log import Log
from emulator.messages import Damaged, Expect, Landed

log = Log("hybrid")


@dataclass(frozen=True, slots=True)
class Node:
    """One worker's means. refused: states that landed whole and were not what was to come, by reason."""

    model: HybridModel
    fingerprint: bytes
    thread: ComputeThread
    helper: ThreadPoolExecutor
    clock: Clock
    host: Host
    refused: Counter[str]

    def transfer_bytes(self, tokens: int) -> int:
        """What crosses from prefill to decode, after `tokens` tokens."""
        return parcel_bytes(self.model.config, tokens, answer=True)

    def help(self, work: Callable[[], None]) -> None:
        """Do it in the helper's thread. Where it raises the node ends, as where computing does: nobody would ever hear
        of what was to come of it."""
        self.helper.submit(work).add_done_callback(self._helped)

    def _helped(self, done: Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.error("helping_failed", cause=error)
            self.thread.tell(partial(self.host.stop, f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class Arrived:
    """A state that has landed and was verified; first: the answer's first token, where one came with it."""

    state: SequenceState
    first: int | None


class Landings:
    """Transfers that land at one machine. answer: with a first token each."""

    def __init__(self, node: Node, *, answer: bool) -> None:
        self._node = node
        self._answer = answer
        self._coming: dict[int, tuple[bytearray, int]] = {}  # by token: memory, tokens of the sequence
        self._checking: set[int] = set()
        self._arrived: dict[int, Arrived] = {}

    def memory(self, expected: Expect, size_bytes: int) -> memoryview:
        memory = bytearray(size_bytes)
        self._coming[expected.token] = (memory, expected.tokens)
        return memoryview(memory)

    def withdraw(self, token: int) -> None:
        self._coming.pop(token, None)
        self._checking.discard(token)
        self._arrived.pop(token, None)

    def take(self, token: int) -> Arrived | None:
        """What has arrived under the token; it is the caller's from then on."""
        return self._arrived.pop(token, None)

    def landed(self, token: int) -> None:
        """All bytes are there: verify them."""
        found = self._coming.pop(token, None)
        if found is not None:
            self._checking.add(token)
            self._node.help(partial(self._verify, token, *found))

    def close(self) -> None:
        self._coming.clear()
        self._checking.clear()
        self._arrived.clear()

    def _verify(self, token: int, memory: bytearray, tokens: int) -> None:
        """In the helper's thread."""
        node = self._node
        expected = Expected(node.fingerprint, token, tokens)
        verified: Callable[[], None]
        try:
            state, first = unpack(node.model.config, memory, expected, answer=self._answer)
            arrived = Arrived(state, first)
            verified = lambda: self._intact(token, arrived)  # noqa: E731
        except StateError as error:
            reason = str(error)
            verified = lambda: self._damaged(token, reason)  # noqa: E731
        node.thread.tell(verified)

    def _intact(self, token: int, arrived: Arrived) -> None:
        if token in self._checking:
            self._checking.remove(token)
            self._arrived[token] = arrived
            self._node.host.hear(Landed(token))

    def _damaged(self, token: int, reason: str) -> None:
        if token in self._checking:
            self._checking.remove(token)
            self._node.refused[reason] += 1
            log.warning("state_refused", token=token, reason=reason)
            self._node.host.hear(Damaged(token, f"the state that came was refused: {reason}"))
