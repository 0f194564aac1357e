"""A decode node's computing: steps of all requests that have joined, from states that were computed elsewhere.

The event loop owns the answers, the compute thread the states while a step runs; what is let go meanwhile is computed
to the step's end, and its token is nobody's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import msgspec

from emulator.backends.hybrid.model import SequenceState
from emulator.backends.hybrid.node import Landings, Node
from emulator.backends.hybrid.sampling import choose
from emulator.backends.hybrid.text import Answer
from emulator.computing import ComputeMessage, Join, Joined, Release, Sampling, Step, Stepped
from emulator.messages import Key, Tokens


@dataclass(slots=True)
class _Sequence:
    """A request that is being decoded. last: its newest token, not yet part of the state."""

    token: int
    key: Key
    state: SequenceState
    last: int
    sampling: Sampling
    answer: Answer


class DecodeSide:
    """The computing of one decode machine. The loop's thread calls everything."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._sequences: dict[int, _Sequence] = {}  # by token
        self._answers: dict[Key, Answer] = {}
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.landings = Landings(node, answer=True)

    def tell(self, message: ComputeMessage) -> None:
        match message:
            case Join():
                self._join(message)
            case Step():
                members = [self._sequences[token] for token in message.tokens]
                self._node.thread.submit(partial(self._step, members, message.slowdown))
            case Release():
                self.landings.withdraw(message.token)
                if (one := self._sequences.pop(message.token, None)) is not None:
                    del self._answers[one.key]

    def fill(self, tokens: Tokens) -> Tokens:
        answer = self._answers.get((tokens.request_id, tokens.attempt))
        if answer is None:
            return tokens
        text, ids = answer.take()
        return msgspec.structs.replace(tokens, text=text, ids=ids)

    def close(self) -> None:
        self._closed = True
        self._sequences.clear()
        self._answers.clear()
        self.landings.close()

    def _join(self, message: Join) -> None:
        arrived = self.landings.take(message.token)
        assert arrived is not None, "a machine admits what has landed"
        assert arrived.first is not None, "what lands at a decode node brings a first token"
        answer = Answer(message.output_tokens, message.sampling)
        one = _Sequence(
            message.token,
            (message.request_id, message.attempt),
            arrived.state,
            arrived.first,
            message.sampling,
            answer,
        )
        self._sequences[message.token] = one
        self._answers[one.key] = answer
        ended = answer.push(arrived.first)
        self._loop.call_soon(self._hear, Joined(message.token, ended))

    def _hear(self, message: Joined | Stepped) -> None:
        if not self._closed:
            self._node.host.hear(message)

    def _step(self, members: list[_Sequence], slowdown: float) -> None:
        """In the compute thread."""
        began_s = time.monotonic()
        logits = self._node.model.decode([one.last for one in members], [one.state for one in members]).numpy()
        chosen = [choose(row, one.sampling, one.answer.count) for row, one in zip(logits, members, strict=True)]
        if slowdown > 1:
            time.sleep((slowdown - 1) * (time.monotonic() - began_s))
        self._node.thread.tell(partial(self._stepped, members, chosen))

    def _stepped(self, members: list[_Sequence], chosen: list[int]) -> None:
        made = []
        for one, token in zip(members, chosen, strict=True):
            one.last = token
            made.append((one.token, one.answer.push(token)))
        self._hear(Stepped(tuple(made)))
