"""A trace is written in the format that the file's name says, whole or not at all, and what is lost is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces.load import Trace, load, save
from traces.request import Request, TraceError


def trace(*requests: Request) -> Trace:
    return Trace(list(requests), len(requests), {}, [], "here", "0" * 64, "synthetic")


CHATS = trace(
    Request(0.0, 1000, 10, (0, 1), 512, 'a "quoted", name'),
    Request(1.2345, 1024, 7, (0, 2), 512, "b"),
    Request(1.2345, 1, 1, (3,), 512),
)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mooncakes_format_keeps_lengths_and_prefixes_and_whole_ms(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.mooncake.jsonl{ending}"
    lost = save(CHATS, path)
    again = load(path)
    assert again.format == "mooncake"
    assert [(r.arrival_s, r.input_tokens, r.output_tokens, r.block_hashes) for r in again.requests] == [
        (0.0, 1000, 10, (0, 1)),
        (1.234, 1024, 7, (0, 2)),
        (1.234, 1, 1, (3,)),
    ]
    assert any("rounded" in what for what in lost)
    assert any("no sessions" in what for what in lost)


def test_smaller_blocks_become_mooncakes_and_the_last_id_inside_names_the_larger_block(tmp_path: Path) -> None:
    """1100 tokens in blocks of 256: 0..4, the last partial; in blocks of 512: 0-1, 2-3, and 4 alone."""
    save(
        trace(Request(0, 1100, 1, (10, 11, 12, 13, 14), 256), Request(0, 600, 1, (10, 11, 99), 256)),
        tmp_path / "t.mooncake.jsonl",
    )
    assert [r.block_hashes for r in load(tmp_path / "t.mooncake.jsonl").requests] == [(11, 13, 14), (11, 99)]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(0, 10, 1), "without block hashes; write our own format"),
        (Request(0, 10, 1, (1,), 48), "block_size = 48"),
        (Request(0, 10, 1, (1,), 1024), "block_size = 1024"),
    ],
)
def test_what_mooncakes_format_cannot_say_is_refused_and_nothing_is_left(
    tmp_path: Path, request_: Request, said: str
) -> None:
    with pytest.raises(TraceError) as refusal:
        save(trace(request_), tmp_path / "t.mooncake.jsonl")
    assert said in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_table_comes_back_without_its_prefixes(tmp_path: Path, name: str) -> None:
    lost = save(CHATS, tmp_path / name)
    again = load(tmp_path / name)
    assert again.format == "table"
    assert [(r.arrival_s, r.input_tokens, r.output_tokens, r.session, r.block_hashes) for r in again.requests] == [
        (r.arrival_s, r.input_tokens, r.output_tokens, r.session, ()) for r in CHATS.requests
    ]
    assert any("no block hashes" in what for what in lost)


def test_our_own_format_loses_nothing(tmp_path: Path) -> None:
    assert save(CHATS, tmp_path / "t.jsonl") == []
    assert load(tmp_path / "t.jsonl").requests == CHATS.requests


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    save(CHATS, path)
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        self.open("wb").write(data[:10])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="full"):
        save(trace(Request(0, 1, 1)), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]
