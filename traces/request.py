"""The one row every trace becomes: a Request.

A loader (one file a format) turns a public trace into a list of these; synthetic generators make them; replay sends
them. Times are seconds from the start of the trace; lengths are tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


class TraceError(ValueError):
    """A trace that cannot be used. The message names the file, the row or field, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    arrival_s: seconds since the start of the trace, >= 0 and finite.
    input_tokens, output_tokens: >= 1.
    block_hashes: one id a block of ``block_size`` tokens of the prompt, prefix-chained (equal ids mean an equal
    prefix up to and
        including that block); empty when the trace says nothing about content. The last block may be partial.
    block_size: tokens a block; 0 when there are no hashes.
    session: a conversation's name, or "" when the trace has none.

    Raises TraceError for a value outside these ranges, or when len(block_hashes) != ceil(input_tokens / block_size).
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    block_size: int = 0
    session: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise TraceError(f"arrival_s = {self.arrival_s}: must be a finite number of seconds >= 0")
        for field in ("input_tokens", "output_tokens"):
            if getattr(self, field) < 1:
                raise TraceError(f"{field} = {getattr(self, field)}: must be at least 1 token")
        if self.block_hashes:
            if self.block_size < 1:
                raise TraceError(
                    f"block_size = {self.block_size}: must be at least 1 token when there are block hashes"
                )
            blocks = -(-self.input_tokens // self.block_size)
            if len(self.block_hashes) != blocks:
                raise TraceError(
                    f"{len(self.block_hashes)} block hashes for {self.input_tokens} tokens in blocks of "
                    f"{self.block_size}: must be {blocks}"
                )
