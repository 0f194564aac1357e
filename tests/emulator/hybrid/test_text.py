"""Tokens become text: characters whole, nothing of a stop text, and an end with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.backends.hybrid.config import BOS, EOS
from emulator.backends.hybrid.text import Answer
from emulator.computing import Sampling


def told(tokens: list[int], sampling: Sampling | None = None, most: int = 1000) -> tuple[list[str], str]:
    """What leaves after each token, up to the end, and why it ended."""
    answer = Answer(most, Sampling() if sampling is None else sampling)
    parts = []
    for token in tokens:
        ended = answer.push(token)
        parts.append(answer.take()[0])
        if ended:
            return parts, ended
    return parts, ""


def test_a_character_leaves_when_it_is_whole() -> None:
    assert told(list("aé€".encode()))[0] == ["a", "", "é", "", "", "€"]


def test_what_is_no_character_is_replaced_and_what_is_cut_off_at_the_end_too() -> None:
    assert told([0xFF, ord("a")])[0] == ["\ufffd", "a"]
    assert told([ord("a"), 0xE2, 0x82], most=3) == (["a", "", "\ufffd"], "length")


@given(st.text(max_size=40))
def test_the_parts_make_the_whole(text: str) -> None:
    data = list(text.encode())
    assert "".join(told(data, most=len(data) + 1)[0]) == text


def test_an_answer_ends_at_its_length() -> None:
    assert told(list(b"abc"), most=2) == (["a", "b"], "length")


def test_the_end_of_sequence_ends_it_unless_it_is_ignored_and_is_no_text() -> None:
    assert told([ord("a"), EOS, ord("b")]) == (["a", ""], "stop")
    assert told([BOS, ord("a"), EOS, ord("b")], Sampling(ignore_eos=True))[0] == ["", "a", "", "b"]


def test_a_stop_text_ends_it_and_nothing_of_it_leaves() -> None:
    parts, ended = told(list(b"one, END two"), Sampling(stop=("END",)))
    assert ("".join(parts), ended) == ("one, ", "stop")


def test_what_may_be_the_beginning_of_a_stop_text_waits() -> None:
    assert told(list(b"aENx"), Sampling(stop=("END",)))[0] == ["a", "", "", "ENx"]
    assert told(list(b"aEN"), Sampling(stop=("END",)), most=3) == (["a", "", "EN"], "length")


@pytest.mark.parametrize(("stops", "rest"), [(("b", "ab"), ""), (("bc", "b"), "a")])
def test_of_several_stop_texts_the_first_to_be_there_counts(stops: tuple[str, ...], rest: str) -> None:
    parts, ended = told(list(b"abc"), Sampling(stop=stops))
    assert ("".join(parts), ended) == (rest, "stop")


def test_the_tokens_leave_with_the_text() -> None:
    answer = Answer(10, Sampling())
    for token in "é".encode():
        answer.push(token)
    assert answer.take() == ("é", (0xC3, 0xA9))
    assert answer.take() == ("", ())
