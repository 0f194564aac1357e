"""Input that would be silently wrong is refused, in a message that names the file, the row, the field and the value."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.traces.files import AZURE_HEADER, AZURE_ROWS, TABLE_MAP, mooncake_row, table, write, write_lines
from traces import prfaas
from traces.load import load
from traces.request import Request, TraceError

IN_MS = [0, 1200, 2100, 4400, 5000]
IN_S = [round(0.3 * i, 1) for i in range(12)]


def refuses(path: Path, *parts: str, columns: dict[str, str] | None = None) -> None:
    """Loading raises a TraceError whose message has the file and each of ``parts``."""
    with pytest.raises(TraceError) as refusal:
        load(path, columns)
    for part in (str(path), *parts):
        assert part in str(refusal.value)


# --- the file -------------------------------------------------------------------------------------------------------


# the names do not hold the bytes: a gzip's hold the second it was made in, and two of pytest's workers may not agree
@pytest.mark.parametrize(
    "content",
    [b"", b"\n \r\n", b"\xef\xbb\xbf", gzip.compress(b"")],
    ids=["nothing", "blank-lines", "byte-order-mark", "gzip-of-nothing"],
)
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    refuses(write(tmp_path / "t", content), "empty")


def test_a_header_without_rows(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", AZURE_HEADER), "no rows")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refuses(tmp_path / "missing", "no such file")
    refuses(tmp_path, "cannot be read")


def test_a_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress((AZURE_HEADER + AZURE_ROWS).encode())
    refuses(write(tmp_path / "t", whole[:-9]), "damaged gzip")
    refuses(write(tmp_path / "t", whole[:12] + b"\xff\xff\xff" + whole[15:]), "damaged gzip")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", "TIMESTAMP\n".encode("utf-16")), "UTF-16")
    refuses(write(tmp_path / "t", b"Time,In,Out\n0,\xff,1\n"), "line 2", "not UTF-8")


def test_a_format_nobody_knows(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", "when,how\n1,2\n"), "'when', 'how'", "give a map")
    refuses(write(tmp_path / "t", '{"when": 1}\n'), "'when'", "no known trace")
    refuses(write(tmp_path / "t", "[{}]"), "JSON lines")


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    refuses(write(tmp_path / "t", pointer), "Git LFS pointer")


# --- missing columns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_mooncake_field_that_is_missing(tmp_path: Path, missing: str) -> None:
    row = mooncake_row(1)
    del row[missing]
    refuses(write_lines(tmp_path / "t", [mooncake_row(), row]), "line 2", repr(missing))


@pytest.mark.parametrize("missing", ["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
def test_an_azure_column_that_is_missing(tmp_path: Path, missing: str) -> None:
    refuses(
        write(tmp_path / "t", AZURE_HEADER.replace(missing, "Other") + AZURE_ROWS), f"no column {missing!r}", "'Other'"
    )


def test_a_mapped_column_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "t", "Time,In,Out\n0,1,1\n")
    refuses(path, "no column 'Input'", "'In'", columns={**TABLE_MAP, "input_tokens": "Input"})
    refuses(path, "no column 'Who'", columns={**TABLE_MAP, "session": "Who"})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"arrival_s": "Time", "input_tokens": "In"}, "no output_tokens"),
        ({"input_tokens": "In", "output_tokens": "Out"}, "no arrival"),
        ({**TABLE_MAP, "arrival_ms": "Time"}, "arrival_s and arrival_ms"),
        ({**TABLE_MAP, "prompt": "In"}, "unknown key 'prompt'"),
    ],
)
def test_a_map_that_says_too_little_or_too_much(tmp_path: Path, columns: dict[str, str], said: str) -> None:
    refuses(write(tmp_path / "t", "Time,In,Out\n0,1,1\n"), said, columns=columns)


def test_a_map_for_json_lines(tmp_path: Path) -> None:
    refuses(write_lines(tmp_path / "t", [mooncake_row()]), "take no map", columns=TABLE_MAP)


def test_a_row_that_was_cut_or_has_a_comma_too_many(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", AZURE_HEADER + AZURE_ROWS + "2023-11-16 18:16:00.0,17"), "line 4", "2 fields")
    refuses(write(tmp_path / "t", AZURE_HEADER + "2023-11-16 18:15:46.6,1,374,44\n"), "line 2", "4 fields")
    refuses(write_lines(tmp_path / "t", [mooncake_row()]).with_name("t"), columns=TABLE_MAP)
    refuses(write(tmp_path / "t", '{"timestamp": 0, "input_length": 5\n'), "line 1", "not JSON")


def test_a_column_that_is_named_twice(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", "Time,In,In,Out\n0,1,1,1\n"), "'In' is named twice", columns=TABLE_MAP)


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["nan", "NaN", "inf", "", "many"])
@pytest.mark.parametrize("column", ["Time", "In", "Out"])
def test_a_cell_that_is_no_number(tmp_path: Path, column: str, cell: str) -> None:
    cells = {"Time": "1", "In": "5", "Out": "5"} | {column: cell}
    path = write(tmp_path / "t", "Time,In,Out\n0,5,5\n" + ",".join(cells.values()) + "\n")
    refuses(path, "line 3", f"{column} = {cell!r}", columns=TABLE_MAP)


@pytest.mark.parametrize("cell", ["-5", "1.5"])
@pytest.mark.parametrize("column", ["ContextTokens", "GeneratedTokens"])
def test_a_length_that_is_no_count(tmp_path: Path, column: str, cell: str) -> None:
    cells = {"TIMESTAMP": "2023-11-16 18:15:46.6", "ContextTokens": "3", "GeneratedTokens": "4"} | {column: cell}
    path = write(tmp_path / "t", AZURE_HEADER + AZURE_ROWS + ",".join(cells.values()) + "\n")
    refuses(path, "line 4", f"{column} = {cell!r}", "whole number of tokens")


@pytest.mark.parametrize("field", ["input_length", "output_length"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "7", None, True])
def test_a_mooncake_length_that_is_no_count(tmp_path: Path, field: str, value: object) -> None:
    path = write_lines(tmp_path / "t", [mooncake_row(), mooncake_row(1) | {field: value}])
    refuses(path, "line 2", f"{field} = {value!r}", ">= 1")


@pytest.mark.parametrize("value", ["0", None, True, [0]])
def test_a_mooncake_stamp_that_is_no_number(tmp_path: Path, value: object) -> None:
    refuses(write_lines(tmp_path / "t", [mooncake_row(value)]), "line 1", f"timestamp = {value!r}")


def test_nan_in_json_lines(tmp_path: Path) -> None:
    refuses(write_lines(tmp_path / "t", [mooncake_row(), mooncake_row(float("nan"))]), "line 2", "NaN")


def test_a_negative_stamp(tmp_path: Path) -> None:
    refuses(write_lines(tmp_path / "t", [mooncake_row(-3000)]), "line 1", "timestamp = -3000")
    refuses(write(tmp_path / "t", "Time,In,Out\n0,1,1\n-1,1,1\n"), "line 3", "Time = -1", columns=TABLE_MAP)


@pytest.mark.parametrize(
    "stamp", ["2023-11-16", "16.11.2023 18:15", "1700000000", "2023-11-16 18:15:46.66805900123", ""]
)
def test_an_azure_stamp_that_is_no_date_and_time(tmp_path: Path, stamp: str) -> None:
    refuses(write(tmp_path / "t", AZURE_HEADER + f"{stamp},1,1\n"), "line 2", f"TIMESTAMP = {stamp!r}")


def test_a_date_that_is_not_in_the_calendar(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", AZURE_HEADER + AZURE_ROWS + "2023-02-30 00:00:00,1,1\n"), "line 4", "calendar")


def test_dates_mapped_as_seconds_point_to_the_right_key(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", "Time,In,Out\n2023-11-16 18:15:46,1,1\n"), "arrival_time=", columns=TABLE_MAP)


def test_a_table_in_which_every_request_failed(tmp_path: Path) -> None:
    refuses(write(tmp_path / "t", "Time,In,Out\n0,5,0\n1,0,5\n"), "none of its 2 rows", columns=TABLE_MAP)


# --- block hashes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "ids"), [(1000, (0,)), (1000, (0, 1, 2)), (1024, (0, 1, 2)), (1025, (0, 1)), (5, ())]
)
def test_a_hash_count_other_than_ceil_of_input_over_block(tmp_path: Path, tokens: int, ids: tuple[int, ...]) -> None:
    path = write_lines(tmp_path / "t", [mooncake_row(), mooncake_row(1, tokens, ids=ids)])
    refuses(path, "line 2", f"{len(ids)} hash_ids for input_length = {tokens}", f"must be {-(-tokens // 512)}")


@pytest.mark.parametrize("ids", ["0 1", [0, 1.5], [0, None], None])
def test_hashes_that_are_no_list_of_ids(tmp_path: Path, ids: object) -> None:
    refuses(write_lines(tmp_path / "t", [mooncake_row(ids=ids)]), "line 1", "hash_ids")


# --- units ----------------------------------------------------------------------------------------------------------


def test_ms_taken_for_s(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"Time read as arrival_s means one request every 1250 s.*arrival_ms="):
        table(tmp_path / "t", list(IN_MS))
    assert table(tmp_path / "t", list(IN_MS), "arrival_ms").requests[-1].arrival_s == 5.0


def test_ms_since_1970_taken_for_s_are_refused_at_any_rate(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"1700000000004 read as arrival_s is past the year 5138.*arrival_ms="):
        table(tmp_path / "t", [1_700_000_000_000 + i for i in range(5)])


def test_us_taken_for_ms(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="arrival_us="):
        table(tmp_path / "t", [stamp * 1000 for stamp in IN_MS], "arrival_ms")


def test_s_taken_for_ms(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"3333 requests/s.*arrival_s="):
        table(tmp_path / "t", list(IN_S), "arrival_ms")
    refuses(
        write_lines(tmp_path / "t", [mooncake_row(stamp) for stamp in IN_S]), "timestamp read as arrival_ms", "3333"
    )


def test_whole_numbers_of_a_slow_trace_are_read_and_the_doubt_is_noted(tmp_path: Path) -> None:
    assert any("do not show their unit" in note for note in table(tmp_path / "t", [0, 4, 9, 12]).notes)
    assert table(tmp_path / "t", [0.0, 4.5, 9, 12]).notes == []


def test_who_knows_better_turns_the_unit_check_off_and_it_is_noted(tmp_path: Path) -> None:
    trace = table(tmp_path / "t", list(IN_MS), check_units=False)
    assert trace.requests[-1].arrival_s == 5000
    assert any("was not checked" in note for note in trace.notes)


def test_ms_in_our_own_format(tmp_path: Path) -> None:
    rows = [Request(stamp * 100.0, 1, 1) for stamp in range(12)]
    refuses(write(tmp_path / "t", prfaas.to_rows(rows)), "arrival_s", "divide it by 1000")


# --- our own format -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"arrival_s": 0, "input_tokens": 5}', "no field 'output_tokens'"),
        ('{"arrival_s": 0, "input_tokens": 5, "output_tokens": 5, "block_hash": []}', "unknown field 'block_hash'"),
        ('{"arrival_s": "0", "input_tokens": 5, "output_tokens": 5}', "arrival_s = '0' has the wrong type"),
        ('{"arrival_s": 0, "input_tokens": 5.0, "output_tokens": 5}', "input_tokens = 5.0 has the wrong type"),
        ('{"arrival_s": -1, "input_tokens": 5, "output_tokens": 5}', "arrival_s = -1"),
        ('{"arrival_s": 0, "input_tokens": 0, "output_tokens": 5}', "input_tokens = 0"),
        (
            '{"arrival_s": 0, "input_tokens": 5, "output_tokens": 5, "block_hashes": [1, 2], "block_size": 4096}',
            "must be 1",
        ),
    ],
)
def test_a_row_of_our_own_that_is_wrong(tmp_path: Path, row: str, said: str) -> None:
    good = '{"arrival_s": 0, "input_tokens": 5, "output_tokens": 5}\n'
    refuses(write(tmp_path / "t", good + row), "line 2", said)
