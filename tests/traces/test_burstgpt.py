"""BurstGPT's CSV files, releases 1 to 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces.files import BURST_HEADER, BURST_ROWS, write
from traces.load import load
from traces.request import Request, TraceError


def test_a_file_is_known_by_its_columns_and_its_failed_requests_are_dropped(tmp_path: Path) -> None:
    failed = "46,ChatGPT,1087,0,1087,API log\n47,GPT-4,0,0,0,API log\n48,GPT-4,10,9,19,API log\n"
    trace = load(write(tmp_path / "t", BURST_HEADER + BURST_ROWS + failed))
    assert trace.format == "burstgpt"
    assert trace.requests == [Request(0.0, 472, 18), Request(40.0, 1087, 230), Request(43.0, 10, 9)]
    assert trace.dropped == {"Request tokens is 0": 1, "Response tokens is 0": 1}
    assert trace.rows_read == 5
    assert trace.notes == []


def test_the_columns_that_release_3_inserts_do_not_shift_the_others(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "100.0,a-1,43,GPT-4,906,446,1352,Conversation log\n151.5,,2,ChatGPT,36,29,65,API log\n"
    trace = load(write(tmp_path / "t", header + rows))
    assert trace.requests == [Request(0.0, 906, 446, session="a-1"), Request(51.5, 36, 29)]


def test_an_unsorted_file_is_sorted_and_says_so(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t", BURST_HEADER + "9,m,3,3,6,l\n5,m,4,4,8,l\n"))
    assert trace.requests == [Request(0.0, 4, 4), Request(4.0, 3, 3)]
    assert any("not sorted: 1 rows" in note for note in trace.notes)


@pytest.mark.parametrize("missing", ["Timestamp", "Request tokens", "Response tokens"])
def test_a_column_that_is_missing(tmp_path: Path, missing: str) -> None:
    path = write(tmp_path / "t", BURST_HEADER.replace(missing, "Other") + BURST_ROWS)
    with pytest.raises(TraceError, match=f"no column '{missing}'"):
        load(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("-1,m,3,3,6,l", "line 4: Timestamp = -1: must be 0 or more"),
        ("nan,m,3,3,6,l", "line 4: Timestamp = 'nan'"),
        (",m,3,3,6,l", "line 4: Timestamp = ''"),
        ("50,m,-3,3,6,l", "line 4: Request tokens = '-3'"),
        ("50,m,3,1.5,6,l", "line 4: Response tokens = '1.5'"),
        ("50,m,3,NaN,6,l", "line 4: Response tokens = 'NaN'"),
        ("50,m,3,3,6", "line 4: 5 fields, the header has 6"),
    ],
)
def test_a_row_that_is_wrong(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(TraceError) as refusal:
        load(write(tmp_path / "t", BURST_HEADER + BURST_ROWS + row + "\n"))
    assert said in str(refusal.value)


def test_a_file_in_which_every_request_failed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none of its 1 rows"):
        load(write(tmp_path / "t", BURST_HEADER + "5,m,3,0,3,l\n"))


def test_ms_taken_for_s_are_refused_and_the_idle_head_of_a_real_file_is_not(tmp_path: Path) -> None:
    idle_head = "".join(f"{50 * i},m,3,3,6,l\n" for i in range(20))
    assert load(write(tmp_path / "t", BURST_HEADER + idle_head)).requests[-1].arrival_s == 950
    busy_in_ms = "".join(f"{1800 * i},m,3,3,6,l\n" for i in range(20))
    path = write(tmp_path / "t", BURST_HEADER + busy_in_ms)
    with pytest.raises(TraceError, match=r"one request every 1800 s.*divide milliseconds by 1000"):
        load(path)
    assert load(path, check_units=False).requests[1].arrival_s == 1800
