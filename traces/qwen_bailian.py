"""Qwen-Bailian traces (ATC'25): JSON lines with chat_id, parent_chat_id (-1: none), timestamp (s), input_length,
output_length, type, turn, hash_ids of 16-token blocks.

Each block's hash is of its own content (the last block may be partial and padded), so the ids are chained here: a
Request's ids name a whole prefix. A conversation is named by its first request's chat_id. Source:
github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

import numpy as np

from traces.blocks import chained, check_count, check_row, unchained
from traces.request import Request, TraceError
from traces.rows import JsonLines, Rows, check_not_negative, check_not_too_coarse

BLOCK_TOKENS = 16
FIELDS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
"""What is read; type and turn are not."""
OWN = ("chat_id", "parent_chat_id")
"""The fields that only this trace has."""
NO_PARENT = -1


def read(file: JsonLines, check_units: bool = True) -> Rows:
    """Requests in the file's order, arrival_s seconds after the earliest row; rows of zero tokens are dropped, named.

    Raises TraceError for a missing field, a wrong type, a negative length, a hash count other than ceil(input_length /
    16), chats that are their own ancestors, (with check_units) stamps that can only be ms, or when nothing is left.
    """
    for number, record in zip(file.lines, file.records, strict=True):
        where = f"{file.source}, line {number}"
        check_row(record, where, trace="Qwen-Bailian", fields=FIELDS, unit="seconds", least=0)
        check_count(record, where, BLOCK_TOKENS)
        for name in OWN:
            if type(record[name]) is not int:
                raise TraceError(
                    f"{where}: {name} = {record[name]!r}: must be a whole number; correct or remove the row"
                )
    stamps = np.array([record["timestamp"] for record in file.records], dtype=np.float64)
    check_not_negative(stamps, file.lines, "timestamp", file.source)
    if check_units:
        check_not_too_coarse(
            stamps, "arrival_s", "timestamp", file.source, "divide milliseconds by 1000 (Qwen-Bailian stamps are s)"
        )
    requests = []
    dropped: dict[str, int] = {}
    sessions = _sessions(file)
    for arrival_s, record, session in zip((stamps - stamps.min()).tolist(), file.records, sessions, strict=True):
        lengths = record["input_length"], record["output_length"]
        if 0 in lengths:
            reason = f"{FIELDS[3 + lengths.index(0)]} is 0"
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            requests.append(Request(arrival_s, *lengths, tuple(record["hash_ids"]), BLOCK_TOKENS, session))
    if not requests:
        raise TraceError(f"{file.source}: none of its {len(stamps)} rows has both lengths above 0; give another file")
    notes = []
    wrong, ids = unchained(requests)
    if wrong:
        requests = chained(requests)
        notes.append(f"{wrong} of {ids} block ids follow more than one prefix: they name content, and are chained here")
    return Rows(requests, len(stamps), dropped, notes)


def _sessions(file: JsonLines) -> list[str]:
    """Each row's first ancestor. A parent that the file does not hold (a cut file) is an ancestor all the same."""
    parent = {record["chat_id"]: record["parent_chat_id"] for record in file.records}
    first: dict[int, int] = {}
    for number, record in zip(file.lines, file.records, strict=True):
        path = [record["chat_id"]]
        while path[-1] not in first and (above := parent.get(path[-1], NO_PARENT)) != NO_PARENT:
            if above in path:
                raise TraceError(
                    f"{file.source}, line {number}: chat_id = {path[0]} is its own ancestor by parent_chat_id; correct "
                    "or remove the row"
                )
            path.append(above)
        root = first.get(path[-1], path[-1])
        first.update(dict.fromkeys(path, root))
    return [str(first[record["chat_id"]]) for record in file.records]
