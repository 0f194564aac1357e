"""Text for a trace without: of exactly the rows' lengths, and shared where the rows share."""

from __future__ import annotations

import orjson
import pytest

from traces.request import Request
from traces.sse import request_bytes
from traces.text import prompt_text


@pytest.mark.parametrize("tokens", [1, 2, 17, 4096])
def test_it_is_as_long_as_the_row_says_a_byte_a_token(tokens: int) -> None:
    assert len(prompt_text(Request(0.0, tokens, 1), 0, 1).encode()) == tokens


def test_rows_and_seeds_have_texts_of_their_own_and_the_same_again() -> None:
    row = Request(0.0, 500, 1)
    texts = [prompt_text(row, index, seed) for index, seed in ((0, 1), (1, 1), (0, 2))]
    assert len(set(texts)) == 3
    assert texts[0] == prompt_text(row, 0, 1)


def test_blocks_of_the_same_hash_have_the_same_text() -> None:
    one = prompt_text(Request(0.0, 250, 1, (1, 2, 3), 100), 0, 1)
    other = prompt_text(Request(0.0, 300, 1, (1, 2, 4), 100), 7, 1)
    assert one[:200] == other[:200]
    assert one[200:] != other[200:250]


def test_a_replay_sends_it_as_a_prompt_greedy() -> None:
    row = Request(0.0, 5, 3)
    body = orjson.loads(request_bytes(("h", 1), "m", row, "r", "words").split(b"\r\n\r\n")[1])
    assert (body["prompt"], body["temperature"], body["ignore_eos"]) == ("words", 0, True)
    assert "prfaas" not in body
