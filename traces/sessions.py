"""Conversations of several turns that share prefixes, as the requests of a synthetic workload.

A turn's prompt is the previous prompt, the previous answer and new user tokens; the first turn's is the system prompt,
which all conversations share, and user tokens. What is not modelled: agents' tool calls, branches, edited histories.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from traces.request import Request, TraceError
from traces.rows import Floats, Ints

LEAD_MEANS = 16
"""Conversations begin this many mean conversations before 0, so that the load is steady from 0 on: one in e^16, a ten
millionth, lasts longer."""


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, rng: np.random.Generator, count: int) -> Ints: ...


@dataclass(frozen=True, slots=True)
class Sessions:
    """The shape of conversations.

    turns_mean: of the geometric number of turns a conversation has, >= 1; at most turns_max, so that the true mean is
        ``mean_turns``.
    think_s: mean, in s, > 0, of the exponential time from a turn's arrival to the next. The load is open-loop: the time
        that the answer takes is part of it, and an answer that takes longer does not delay the next turn.
    system_tokens: the prompt that all conversations begin with, >= 0.
    max_input_tokens: the longest prompt. A turn whose prompt would be longer begins its conversation anew, as a chat
        client does at the end of its window: system prompt and user tokens alone, under another session name.
    block_size: tokens a block of the prefix-chained ids, >= 1. Full blocks of a conversation keep their ids in its
        later turns, the system prompt's full blocks are everybody's, and a partial last block is nobody else's.
    Raises TraceError for anything else.
    """

    turns_mean: float
    think_s: float
    turns_max: int = 64
    system_tokens: int = 0
    max_input_tokens: int = 131072
    block_size: int = 512

    def __post_init__(self) -> None:
        if not (math.isfinite(self.turns_mean) and self.turns_mean >= 1):
            raise TraceError(f"sessions: turns_mean = {self.turns_mean}: must be a finite number of turns, 1 or more")
        if not (math.isfinite(self.think_s) and self.think_s > 0):
            raise TraceError(f"sessions: think_s = {self.think_s}: must be a finite number of seconds above 0")
        for name, least in (("turns_max", 1), ("system_tokens", 0), ("max_input_tokens", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise TraceError(f"sessions: {name} = {getattr(self, name)}: must be {least} or more")

    def check_longest(self, user_tokens: int) -> None:
        """Raises TraceError when a first turn of ``user_tokens`` would already be longer than max_input_tokens."""
        if self.system_tokens + user_tokens > self.max_input_tokens:
            raise TraceError(
                f"sessions: system_tokens = {self.system_tokens} and up to {user_tokens} user tokens a turn are more "
                f"than max_input_tokens = {self.max_input_tokens}; shorten them or raise it"
            )

    @property
    def mean_turns(self) -> float:
        """Turns of a conversation, in expectation: sum over k < turns_max of (1 - 1/turns_mean)^k."""
        more = 1 - 1 / self.turns_mean
        return (1 - more**self.turns_max) * self.turns_mean

    @property
    def lead_s(self) -> float:
        """How long before 0 conversations begin, s."""
        return LEAD_MEANS * self.turns_mean * self.think_s

    def canonical(self) -> dict[str, Any]:
        """The parameters as they enter the identity."""
        return {**asdict(self), "turns_mean": float(self.turns_mean), "think_s": float(self.think_s)}

    def sample_input_tokens(self, lengths: Lengths, output_tokens: tuple[int, int], count: int) -> Ints:
        """Prompt lengths of at least ``count`` turns of whole conversations, always the same for equal parameters: the
        distribution that policies and the closed form are told."""
        rng = np.random.Generator(np.random.PCG64(0))
        turns = self._turns(rng, math.ceil(count / self.mean_turns) + 1)
        while turns.sum() < count:
            turns = np.concatenate([turns, self._turns(rng, len(turns))])
        users = lengths.sample(rng, int(turns.sum()))
        return self._prompts(turns, users, rng.integers(*output_tokens, size=len(users), endpoint=True))[0]

    def requests(
        self,
        starts_s: Floats,
        duration_s: float,
        lengths: Lengths,
        output_tokens: tuple[int, int],
        rngs: tuple[np.random.Generator, np.random.Generator, np.random.Generator],
    ) -> list[Request]:
        """The turns in [0, duration_s) of conversations that begin at starts_s, sorted by arrival.

        starts_s: from -lead_s on. lengths: new user tokens of every turn. output_tokens: (low, high), both included.
        rngs: for turns and think times, for user tokens, for output tokens.
        """
        for_turns, for_inputs, for_outputs = rngs
        turns = self._turns(for_turns, len(starts_s))
        gaps = for_turns.exponential(self.think_s, int(turns.sum()))
        first = np.cumsum(turns) - turns
        gaps[first] = 0.0
        since = np.cumsum(gaps)
        arrivals = since + np.repeat(starts_s - since[first], turns)
        alive = arrivals[first + turns - 1] >= 0
        arrivals, turns = arrivals[np.repeat(alive, turns)], turns[alive]
        inputs = lengths.sample(for_inputs, len(arrivals))
        outputs = for_outputs.integers(*output_tokens, size=len(arrivals), endpoint=True)
        prompts, fresh = self._prompts(turns, inputs, outputs)
        session = np.repeat(np.arange(len(turns)), turns)
        offered: list[Request] = []
        system = range(self.system_tokens // self.block_size)
        ids = itertools.count(len(system))
        known: list[int] = []
        restarts, current = 0, -1
        for arrival_s, prompt, output, new, number in zip(
            arrivals.tolist(), prompts.tolist(), outputs.tolist(), fresh.tolist(), session.tolist(), strict=True
        ):
            if new:
                known = list(system)
                restarts = restarts + 1 if number == current else 0
                current = number
            if not 0 <= arrival_s < duration_s:
                continue
            full, partial = divmod(prompt, self.block_size)
            known.extend(itertools.islice(ids, full - len(known)))
            hashes = (*known, next(ids)) if partial else tuple(known)
            name = f"s{number}.{restarts}" if restarts else f"s{number}"
            offered.append(Request(arrival_s, prompt, output, hashes, self.block_size, name))
        return sorted(offered, key=lambda request: request.arrival_s)

    def _turns(self, rng: np.random.Generator, count: int) -> Ints:
        return np.minimum(rng.geometric(1 / self.turns_mean, count), self.turns_max)

    def _prompts(self, turns: Ints, users: Ints, outputs: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Of each turn, conversation after conversation: its prompt's tokens, and whether it begins anew."""
        prompts, fresh = np.empty(len(users), dtype=np.int64), np.zeros(len(users), dtype=np.bool_)
        fresh[np.cumsum(turns) - turns] = True
        context = 0
        for turn, (user, output, new) in enumerate(zip(users.tolist(), outputs.tolist(), fresh.tolist(), strict=True)):
            if new or context + user > self.max_input_tokens:
                context = self.system_tokens
                fresh[turn] = True
            prompts[turn] = context + user
            context += user + output
        return prompts, fresh
