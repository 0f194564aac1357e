"""Mooncake traces (FAST'25): JSON lines with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks.

Equal ids mean an equal prefix up to and including that block, the last block may be partial. Source:
github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import orjson

from traces.blocks import check_count, check_row, regrouped, unchained
from traces.request import Request, TraceError
from traces.rows import JsonLines, Rows, check_not_negative, check_not_too_fine

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(file: JsonLines, check_units: bool = True) -> Rows:
    """Requests in the file's order, arrival_s seconds after the earliest row. Nothing is dropped: a length of zero is
    refused here, as this format has no failed requests.

    Raises TraceError for a missing field, a wrong type, a length below 1, a hash count other than ceil(input_length /
    512), or (with check_units) a rate that shows that the stamps are seconds.
    """
    for number, record in zip(file.lines, file.records, strict=True):
        where = f"{file.source}, line {number}"
        check_row(record, where, trace="Mooncake", fields=FIELDS, unit="milliseconds", least=1)
        check_count(record, where, BLOCK_TOKENS)
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
    wrong, ids = unchained(requests)
    notes = [
        f"{wrong} of {ids} block ids follow more than one prefix: not prefix-chained, so hits are over-counted"
    ] * bool(wrong)
    return Rows(requests, len(requests), notes=notes)


def to_rows(requests: Iterable[Request]) -> bytes:
    """The requests as a Mooncake file: stamps in whole ms, ids of 512-token blocks made of the request's own.

    Raises TraceError for a request without block hashes, or whose blocks do not fit into 512 tokens.
    """
    lines = []
    for request in requests:
        if not request.block_hashes:
            raise TraceError(
                "a Mooncake row needs hash_ids, and this trace has a request without block hashes; "
                "write our own format (.jsonl) or .csv"
            )
        if BLOCK_TOKENS % request.block_size:
            raise TraceError(
                f"block_size = {request.block_size}: Mooncake blocks have {BLOCK_TOKENS} tokens, and these do not fit "
                "into them; write our own format (.jsonl)"
            )
        row = (
            round(request.arrival_s * 1000),
            request.input_tokens,
            request.output_tokens,
            regrouped(request, BLOCK_TOKENS),
        )
        lines.append(orjson.dumps(dict(zip(FIELDS, row, strict=True)), option=orjson.OPT_APPEND_NEWLINE))
    return b"".join(lines)
