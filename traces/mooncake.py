"""Mooncake traces (FAST'25): JSON lines with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks.

Equal ids mean an equal prefix up to and including that block, the last block may be partial. Source:
github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from traces.request import Request, TraceError
from traces.rows import JsonLines, Rows, check_not_negative, check_not_too_fine, shown

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(file: JsonLines, check_units: bool = True) -> Rows:
    """Requests in the file's order, arrival_s seconds after the earliest row. Nothing is dropped: a length of zero is
    refused here, as this format has no failed requests.

    Raises TraceError for a missing field, a wrong type, a length below 1, a hash count other than ceil(input_length /
    512), or (with check_units) a rate that shows that the stamps are seconds.
    """
    for number, record in zip(file.lines, file.records, strict=True):
        _check(record, f"{file.source}, line {number}")
    stamps = np.array([record["timestamp"] for record in file.records], dtype=np.float64)
    check_not_negative(stamps, file.lines, "timestamp", file.source)
    if check_units:
        check_not_too_fine(
            stamps, "arrival_ms", "timestamp", file.source, "multiply seconds by 1000 (Mooncake stamps are ms)"
        )
    arrivals = ((stamps - stamps.min()) / 1000).tolist()
    requests = [
        Request(arrival_s, record["input_length"], record["output_length"], tuple(record["hash_ids"]), BLOCK_TOKENS)
        for arrival_s, record in zip(arrivals, file.records, strict=True)
    ]
    return Rows(requests, len(requests), notes=_unchained(requests))


def _check(record: dict[str, Any], where: str) -> None:
    for name in FIELDS:
        if name not in record:
            raise TraceError(f"{where}: no field {name!r}; a Mooncake row has {', '.join(FIELDS)}")
    stamp, hashes = record["timestamp"], record["hash_ids"]
    if type(stamp) not in (int, float) or not math.isfinite(stamp):
        raise TraceError(f"{where}: timestamp = {stamp!r}: must be a number of milliseconds; correct or remove the row")
    for name in ("input_length", "output_length"):
        if type(record[name]) is not int or record[name] < 1:
            raise TraceError(
                f"{where}: {name} = {record[name]!r}: must be a whole number of tokens >= 1; correct or remove the row"
            )
    if not isinstance(hashes, list) or any(type(block) is not int for block in hashes):
        raise TraceError(f"{where}: hash_ids = {shown(repr(hashes))}: must be a list of whole numbers")
    blocks = -(-record["input_length"] // BLOCK_TOKENS)
    if len(hashes) != blocks:
        raise TraceError(
            f"{where}: {len(hashes)} hash_ids for input_length = {record['input_length']}: must be {blocks}, one a "
            f"block of {BLOCK_TOKENS} tokens; the file has other blocks, or the row is damaged"
        )


def _unchained(requests: list[Request]) -> list[str]:
    """A note when an id follows two prefixes: ids then name a block's own content, and prefix hits are over-counted."""
    parent: dict[int, int | None] = {}
    wrong: set[int] = set()
    for request in requests:
        before: int | None = None
        for block in request.block_hashes:
            if parent.setdefault(block, before) != before:
                wrong.add(block)
            before = block
    if not wrong:
        return []
    return [
        f"{len(wrong)} of {len(parent)} block ids follow more than one prefix: not prefix-chained, so hits are "
        "over-counted"
    ]
