"""Qwen-Bailian's JSON-lines files: seconds, 16-token blocks whose ids name content, chats that follow each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces.files import qwen_row, write_lines
from traces.info import describe
from traces.load import Trace, load
from traces.request import Request, TraceError


def read(tmp_path: Path, *rows: dict[str, object]) -> Trace:
    return load(write_lines(tmp_path / "t", list(rows)))


def test_rows_become_requests(tmp_path: Path) -> None:
    trace = read(tmp_path, qwen_row(7, 61.0), qwen_row(8, 62.5, 33, (1, 2, 3)))
    assert trace.format == "qwen_bailian"
    assert trace.requests == [
        Request(0.0, 20, 10, (1, 2), 16, "7"),
        Request(1.5, 33, 10, (1, 2, 3), 16, "8"),
    ]
    assert trace.notes == []


def test_a_conversation_is_named_by_its_first_chat(tmp_path: Path) -> None:
    rows = [
        qwen_row(1, 0.0),
        qwen_row(2, 1.0, parent_chat_id=1, turn=2),
        qwen_row(3, 2.0, parent_chat_id=2, turn=3),
        qwen_row(4, 3.0, parent_chat_id=1, turn=2),
        qwen_row(5, 4.0, parent_chat_id=99, turn=2),
        qwen_row(6, 5.0, parent_chat_id=5, turn=3),
    ]
    names = [request.session for request in read(tmp_path, *rows).requests]
    assert names == ["1", "1", "1", "1", "99", "99"]


def test_the_order_of_the_file_does_not_change_the_conversations(tmp_path: Path) -> None:
    rows = [qwen_row(3, 2.0, parent_chat_id=2), qwen_row(2, 1.0, parent_chat_id=1), qwen_row(1, 0.0)]
    assert {request.session for request in read(tmp_path, *rows).requests} == {"1"}


def test_ids_of_content_are_chained_so_that_equal_content_after_another_prefix_is_no_hit(tmp_path: Path) -> None:
    rows = [qwen_row(0, 0.0, 48, (1, 7, 9)), qwen_row(1, 1.0, 48, (2, 7, 9)), qwen_row(2, 2.0, 48, (1, 7, 8))]
    trace = read(tmp_path, *rows)
    first, second, third = (request.block_hashes for request in trace.requests)
    assert not set(first) & set(second)
    assert first[:2] == third[:2]
    assert first[2] != third[2]
    assert describe(trace)["prefix"] == {"block_size": 16, "blocks": 9, "distinct_blocks": 7, "hit_ratio": 2 / 9}
    assert any("1 of 5 block ids follow more than one prefix" in note for note in trace.notes)


def test_rows_of_zero_tokens_are_dropped_and_named(tmp_path: Path) -> None:
    rows = [qwen_row(0), qwen_row(1, 0.5, output_length=0), qwen_row(2, 1.0, 0, ())]
    trace = read(tmp_path, *rows)
    assert trace.dropped == {"input_length is 0": 1, "output_length is 0": 1}
    assert (trace.rows_read, len(trace.requests)) == (3, 1)


def test_a_file_of_such_rows_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none of its 1 rows"):
        read(tmp_path, qwen_row(output_length=0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timestamp": -0.5}, "timestamp = -0.5: must be 0 or more"),
        ({"timestamp": "0"}, "timestamp = '0': must be a number of seconds"),
        ({"input_length": -1}, "input_length = -1"),
        ({"output_length": -1}, "output_length = -1"),
        ({"output_length": 1.5}, "output_length = 1.5"),
        ({"hash_ids": [1]}, "1 hash_ids for input_length = 20: must be 2, one a block of 16 tokens"),
        ({"hash_ids": [1, "2"]}, "hash_ids = [1, '2']"),
        ({"chat_id": "a"}, "chat_id = 'a': must be a whole number"),
        ({"parent_chat_id": None}, "parent_chat_id = None: must be a whole number"),
    ],
)
def test_a_row_that_is_wrong(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(TraceError) as refusal:
        read(tmp_path, qwen_row(), qwen_row(1, 0.5) | change)
    assert f"{tmp_path / 't'}, line 2" in str(refusal.value)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "missing", ["chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"]
)
def test_a_field_that_is_missing(tmp_path: Path, missing: str) -> None:
    row = qwen_row()
    del row[missing]
    with pytest.raises(TraceError, match=f"line 1: no field '{missing}'; a Qwen-Bailian row has"):
        read(tmp_path, row)


def test_type_and_turn_are_not_needed(tmp_path: Path) -> None:
    row = qwen_row()
    del row["type"], row["turn"]
    assert len(read(tmp_path, row).requests) == 1


def test_a_chat_that_is_its_own_ancestor(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: chat_id = 1 is its own ancestor"):
        read(tmp_path, qwen_row(1, parent_chat_id=2), qwen_row(2, 1.0, parent_chat_id=1))


def test_ms_taken_for_s(tmp_path: Path) -> None:
    rows = [qwen_row(i, 250 * i) for i in range(12)]
    with pytest.raises(TraceError, match=r"one request every 250 s.*divide milliseconds by 1000"):
        read(tmp_path, *rows)
