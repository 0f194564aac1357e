"""What a machine and the backend beside it say to each other where a model really computes (`computed.py`).

None of it crosses a wire, but for `Sampling`, which travels with a request. The machine decides what is computed and
what is kept; the backend says when it is done. Transfers go by their token, prefills and loans by request and attempt.
"""

from __future__ import annotations

from typing import Final

import msgspec

BACKEND: Final = "backend"


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """How a request's tokens are chosen. temperature: 0 is greedy. seed: the same for every attempt. stop: texts that
    end the answer, and are no part of it. ignore_eos: the end-of-sequence token ends nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class ComputeMessage(msgspec.Struct, frozen=True, gc=False):
    """Base of all of them."""


# prefill machine -> backend
class Compute(ComputeMessage, frozen=True, gc=False):
    """Prefill `prompt` after the first `cached_blocks` blocks of `block_ids`, which are held. Its state may be sent
    while it comes to be. slowdown: how many times as long it takes, by a fault."""

    request_id: str
    attempt: int
    prompt: bytes
    block_ids: tuple[int, ...]
    cached_blocks: int
    sampling: Sampling
    slowdown: float


class Keep(ComputeMessage, frozen=True, gc=False):
    """The pool now holds `block_ids` of what was computed, and snapshots after the blocks `snapshots`."""

    request_id: str
    attempt: int
    block_ids: tuple[int, ...]
    snapshots: tuple[int, ...]


class Forget(ComputeMessage, frozen=True, gc=False):
    """Stop computing it, and let go of what was to be sent of it."""

    request_id: str
    attempt: int


class Lend(ComputeMessage, frozen=True, gc=False):
    """The prefix of these blocks, which are held, is to be sent under request and attempt."""

    request_id: str
    attempt: int
    block_ids: tuple[int, ...]


class Install(ComputeMessage, frozen=True, gc=False):
    """The pool now holds the prefix that has landed under `token`; of none of it when `block_ids` is empty."""

    token: int
    block_ids: tuple[int, ...]


# backend -> prefill machine
class Computed(ComputeMessage, frozen=True, gc=False):
    """The prefill computed from start_s to end_s, model seconds; error: why it could not."""

    request_id: str
    attempt: int
    start_s: float
    end_s: float
    error: str = ""


# decode machine -> backend
class Join(ComputeMessage, frozen=True, gc=False):
    """What has landed under `token` has a slot: its first token, which came with it, may leave."""

    request_id: str
    attempt: int
    token: int
    output_tokens: int
    sampling: Sampling


class Step(ComputeMessage, frozen=True, gc=False):
    """Compute one token more of each of these."""

    tokens: tuple[int, ...]
    slowdown: float


class Release(ComputeMessage, frozen=True, gc=False):
    """Let go of the state of a request that landed under `token`."""

    token: int


# backend -> decode machine
class Joined(ComputeMessage, frozen=True, gc=False):
    """The first token is there. ended: why it is the last ("length", "stop"); "" when it is not."""

    token: int
    ended: str


class Stepped(ComputeMessage, frozen=True, gc=False):
    """A step is done; (token, ended) of each that took part."""

    made: tuple[tuple[int, str], ...]
