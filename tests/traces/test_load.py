"""A file becomes a Trace: its format is told by content, odd but readable files are read, and rows are conserved."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.files import (
    AZURE_HEADER,
    AZURE_ROWS,
    BURST_HEADER,
    BURST_ROWS,
    TABLE_MAP,
    mooncake_row,
    qwen_row,
    table,
    write,
    write_lines,
)
from traces.load import Trace, load, save
from traces.request import Request, TraceError


def test_mooncake_rows_become_requests_in_seconds(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", [mooncake_row(0), mooncake_row(2999, 1024, 7, (0, 2))])
    trace = load(path)
    assert trace.format == "mooncake"
    assert trace.requests == [
        Request(0.0, 1000, 10, (0, 1), 512),
        Request(2.999, 1024, 7, (0, 2), 512),
    ]


def test_azure_stamps_keep_their_seventh_digit(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t", AZURE_HEADER + AZURE_ROWS))
    assert trace.format == "azure"
    assert [request.arrival_s for request in trace.requests] == [0.0, 4.314579]
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [(374, 44), (396, 109)]
    late = AZURE_HEADER + "2023-11-16 18:15:46.0000000,1,1\n2023-11-16 18:15:46.0000001,1,1\n"
    assert load(write(tmp_path / "t", late)).requests[1].arrival_s == 1e-7


def test_azure_2024_stamps_carry_a_zone_and_may_have_no_fraction(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00+00:00,5,5\n2024-05-10 00:00:00.5+00:00,5,5\n2024-05-10 02:00:01+02:00,5,5\n"
    trace = load(write(tmp_path / "t", AZURE_HEADER + rows))
    assert [request.arrival_s for request in trace.requests] == [0.0, 0.5, 1.0]


def test_any_csv_is_read_through_a_map(tmp_path: Path) -> None:
    path = write(tmp_path / "t", 'Out,Name,Time,In\n10,"a, b",0.5,100\n20,c,1.5,200\n')
    trace = load(path, {**TABLE_MAP, "session": "Name"})
    assert trace.format == "table"
    assert trace.requests == [Request(0.0, 100, 10, session="a, b"), Request(1.0, 200, 20, session="c")]


@pytest.mark.parametrize(
    ("key", "stamps"),
    [
        ("arrival_s", ["1700000000.25", "1700000001.75"]),
        ("arrival_ms", ["1700000000250", "1700000001750"]),
        ("arrival_us", ["250000", "1750000"]),
        ("arrival_ns", ["250000000", "1750000000"]),
        ("arrival_time", ["2024-01-01T00:00:00.25Z", "2024-01-01T00:00:01.75Z"]),
    ],
)
def test_the_key_of_the_map_says_the_unit(tmp_path: Path, key: str, stamps: list[object]) -> None:
    assert [request.arrival_s for request in table(tmp_path / "t", stamps, key).requests] == [0.0, 1.5]


def test_columns_with_our_names_need_no_map(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t", "arrival_ms,input_tokens,output_tokens\n0,5,6\n250,7,8\n"))
    assert trace.requests == [Request(0.0, 5, 6), Request(0.25, 7, 8)]


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace"])
def test_the_name_of_the_file_does_not_matter(tmp_path: Path, name: str) -> None:
    assert load(write_lines(tmp_path / name, [mooncake_row()])).format == "mooncake"
    assert load(write(tmp_path / name, AZURE_HEADER + AZURE_ROWS)).format == "azure"
    assert load(write(tmp_path / name, BURST_HEADER + BURST_ROWS)).format == "burstgpt"
    assert load(write_lines(tmp_path / name, [qwen_row()])).format == "qwen_bailian"


@pytest.mark.parametrize("text", ["azure", "mooncake", "burstgpt", "qwen_bailian"])
@pytest.mark.parametrize("dress", ["gzip", "crlf", "bom", "no last newline", "blank lines at the end", "all of them"])
def test_odd_but_readable_files_give_the_same_requests(tmp_path: Path, text: str, dress: str) -> None:
    path = tmp_path / "plain"
    if text == "mooncake":
        write_lines(path, [mooncake_row(0), mooncake_row(20)])
    elif text == "qwen_bailian":
        write_lines(path, [qwen_row(0), qwen_row(1, 0.5)])
    else:
        write(path, AZURE_HEADER + AZURE_ROWS if text == "azure" else BURST_HEADER + BURST_ROWS)
    data = path.read_bytes()
    if dress in ("no last newline", "all of them"):
        data = data.rstrip(b"\n")
    if dress == "blank lines at the end":
        data += b"\n\n"
    if dress in ("crlf", "all of them"):
        data = data.replace(b"\n", b"\r\n")
    if dress in ("bom", "all of them"):
        data = b"\xef\xbb\xbf" + data
    if dress in ("gzip", "all of them"):
        data = gzip.compress(data)
    odd = load(write(tmp_path / "odd", data))
    assert odd.requests == load(path).requests
    assert (odd.format, odd.rows_read) == (text, 2)


def test_the_sha256_is_that_of_the_stored_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.gz", gzip.compress((AZURE_HEADER + AZURE_ROWS).encode()))
    assert load(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_unsorted_file_is_sorted_and_says_so(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t", [mooncake_row(20, output=1), mooncake_row(0, output=2), mooncake_row(20, output=3)]
    )
    trace = load(path)
    assert [request.output_tokens for request in trace.requests] == [2, 1, 3]
    assert any("not sorted: 1 rows" in note for note in trace.notes)


def test_a_sorted_file_says_nothing(tmp_path: Path) -> None:
    assert load(write(tmp_path / "t", AZURE_HEADER + AZURE_ROWS)).notes == []


def test_quantised_stamps_are_pointed_out(tmp_path: Path) -> None:
    rows = [mooncake_row(stamp) for stamp in (0, 0, 3000, 3000)]
    assert any("4 requests on 2 stamps" in note for note in load(write_lines(tmp_path / "t", rows)).notes)


def test_ids_that_name_a_block_and_not_a_prefix_are_pointed_out(tmp_path: Path) -> None:
    rows = [mooncake_row(ids=(0, 7)), mooncake_row(ids=(1, 7))]
    assert any(
        "1 of 3 block ids follow more than one prefix" in n for n in load(write_lines(tmp_path / "t", rows)).notes
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    )
)
def test_rows_are_conserved_and_sorted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    text = "Time,In,Out\n" + "".join(f"{stamp / 1000},{tokens},{output}\n" for stamp, tokens, output in rows)
    path = write(tmp_path_factory.mktemp("rows") / "t", text)
    good = [row for row in rows if row[1] and row[2]]
    if not good:
        with pytest.raises(TraceError):
            load(path, TABLE_MAP)
        return
    trace = load(path, TABLE_MAP)
    arrivals = [request.arrival_s for request in trace.requests]
    assert trace.rows_read == len(rows) == len(trace.requests) + sum(trace.dropped.values())
    assert arrivals == sorted(arrivals)
    assert sorted((r.input_tokens, r.output_tokens) for r in trace.requests) == sorted(row[1:] for row in good)


requests_st = st.builds(
    lambda arrival, tokens, output, size, session: Request(
        arrival, tokens, output, tuple(range(-(-tokens // size))) if size else (), size, session
    ),
    st.floats(0, 1e6),
    st.integers(1, 5000),
    st.integers(1, 2**40),
    st.sampled_from([0, 16, 512]),
    st.text(max_size=5),
)


@pytest.mark.parametrize("name", ["load.jsonl", "load.jsonl.gz"])
@settings(deadline=None)
@given(requests=st.lists(requests_st, min_size=1, max_size=10))
def test_a_saved_trace_comes_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, requests: list[Request]
) -> None:
    requests.sort(key=lambda request: request.arrival_s)
    path = tmp_path_factory.mktemp("save") / name
    trace = Trace(requests, len(requests), {}, [], "here", "0" * 64, "synthetic")
    save(trace, path)
    again = load(path, check_units=False)
    assert again.format == "prfaas"
    assert again.requests == requests
    assert again.rows_sha256 == trace.rows_sha256


def test_a_trace_refuses_rows_that_do_not_add_up() -> None:
    with pytest.raises(TraceError, match="rows_read = 3: must be 1 kept \\+ 1 dropped"):
        Trace([Request(0, 1, 1)], 3, {"why": 1}, [], "t", "", "table")


def test_a_trace_refuses_unsorted_requests() -> None:
    with pytest.raises(TraceError, match="sorted"):
        Trace([Request(1, 1, 1), Request(0, 1, 1)], 2, {}, [], "t", "", "table")
