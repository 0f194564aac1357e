"""Block ids of prompts, as public JSON-lines traces have them: checked, chained, regrouped into larger blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from traces.request import Request, TraceError
from traces.rows import shown


def check_row(record: dict[str, Any], where: str, *, trace: str, fields: Sequence[str], unit: str, least: int) -> None:
    """One row of a trace: its fields are there, ``timestamp`` is a number of ``unit``, the lengths are counts of
    ``least`` or more, ``hash_ids`` is a list of whole numbers.

    Raises TraceError otherwise. trace: the format's name. where: file and line.
    """
    for name in fields:
        if name not in record:
            raise TraceError(f"{where}: no field {name!r}; a {trace} row has {', '.join(fields)}")
    stamp, hashes = record["timestamp"], record["hash_ids"]
    if type(stamp) not in (int, float) or not math.isfinite(stamp):
        raise TraceError(f"{where}: timestamp = {stamp!r}: must be a number of {unit}; correct or remove the row")
    for name in ("input_length", "output_length"):
        if type(record[name]) is not int or record[name] < least:
            raise TraceError(
                f"{where}: {name} = {record[name]!r}: must be a whole number of tokens >= {least}; correct or remove "
                "the row"
            )
    if not isinstance(hashes, list) or any(type(block) is not int for block in hashes):
        raise TraceError(f"{where}: hash_ids = {shown(repr(hashes))}: must be a list of whole numbers")


def check_count(record: dict[str, Any], where: str, block_tokens: int) -> None:
    """Raises TraceError when a row's ``hash_ids`` are not one a block, the last block partial."""
    blocks = -(-record["input_length"] // block_tokens)
    if len(record["hash_ids"]) != blocks:
        raise TraceError(
            f"{where}: {len(record['hash_ids'])} hash_ids for input_length = {record['input_length']}: must be "
            f"{blocks}, one a block of {block_tokens} tokens; the file has other blocks, or the row is damaged"
        )


def unchained(requests: Sequence[Request]) -> tuple[int, int]:
    """How many ids follow more than one prefix, and how many ids there are. Such an id names a block's own content."""
    parent: dict[int, int | None] = {}
    wrong: set[int] = set()
    for request in requests:
        hashes = request.block_hashes
        for before, block in pairwise((None, *hashes)):
            if block is not None and parent.setdefault(block, before) != before:
                wrong.add(block)
    return len(wrong), len(parent)


def chained(requests: Sequence[Request]) -> list[Request]:
    """The same requests with ids that name a whole prefix: equal exactly where all ids up to there are equal."""
    ids: dict[tuple[int, int], int] = {}
    out = []
    for request in requests:
        before, hashes = -1, []
        for block in request.block_hashes:
            before = ids.setdefault((before, block), len(ids))
            hashes.append(before)
        out.append(replace(request, block_hashes=tuple(hashes)))
    return out


def regrouped(request: Request, block_tokens: int) -> tuple[int, ...]:
    """The ids of larger blocks: of prefix-chained ids, the last one inside a larger block names all of it.

    block_tokens: a multiple of the request's own block size.
    """
    step, hashes = block_tokens // request.block_size, request.block_hashes
    return tuple(hashes[min(first + step, len(hashes)) - 1] for first in range(0, len(hashes), step))
