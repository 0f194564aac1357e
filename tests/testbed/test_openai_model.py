"""What a request is for a model that computes, and what of it is refused rather than ignored."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from emulator.computing import Sampling
from emulator.kvcache import hash_blocks
from testbed.openai_api import ApiError, Ask, Chunks, Limits, parse, usage, whole
from testbed.openai_model import Work

LIMITS = Limits(
    model="prfaas", max_input_tokens=1000, max_output_tokens=500, default_chat_tokens=77, computes=True, block_tokens=4
)


def asked(*, chat: bool = False, **body: Any) -> Ask:
    content = {} if chat or "prompt" in body or "prfaas" in body else {"prompt": "hello, world"}
    return parse(orjson.dumps({**content, **body}), chat=chat, limits=LIMITS)


def work(**body: Any) -> Work:
    found = asked(**body).work
    assert found is not None
    return found


def test_a_text_is_its_bytes_and_token_ids_are_bytes_too() -> None:
    assert work(prompt="é").prompt == b"\xc3\xa9"
    assert work(prompt=[0, 255, 7]).prompt == b"\x00\xff\x07"
    assert work(prompt=["one"]).prompt == b"one"


def test_a_chat_is_its_roles_and_contents() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    ask = asked(chat=True, messages=[{"role": "user", "content": "a"}, {"role": "system", "content": parts}])
    assert ask.work is not None
    assert ask.work.prompt == b"user:a\nsystem:bc\n"
    assert ask.input_tokens == len(ask.work.prompt)


def test_blocks_are_those_of_the_prompt_itself() -> None:
    ask = asked(prompt="hello, world")
    assert (ask.block_hashes, ask.block_size) == (hash_blocks(b"hello, world", 4), 4)


def test_sampling_is_what_was_said() -> None:
    said = work(temperature=0.5, top_p=0.9, seed=7, stop=["a", "bc"], ignore_eos=True, return_token_ids=True)
    assert said.sampling == Sampling(0.5, 0.9, 7, ("a", "bc"), True)
    assert said.return_token_ids
    assert work(stop="end").sampling.stop == ("end",)


def test_unsaid_it_is_openai_s_default_with_a_seed_for_the_request() -> None:
    first, second = work().sampling, work().sampling
    assert (first.temperature, first.top_p, first.stop, first.ignore_eos) == (1.0, 1.0, (), False)
    assert first.seed != second.seed


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [256]}, "prompt"),
        ({"prfaas": {"input_tokens": 5}}, "prfaas"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "all"}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"top_k": 5}, "top_k"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(**body)
    assert (refused.value.status, refused.value.param) == (400, field)
    assert field in refused.value.message


def test_an_answer_says_why_it_ended_and_has_its_tokens_for_who_asks() -> None:
    ask = asked(return_token_ids=True)
    body = json.loads(whole(ask, "id", 1, "ab", (97, 98), "stop", usage(ask, 2)))
    assert body["choices"][0] == {
        "index": 0, "logprobs": None, "finish_reason": "stop", "text": "ab", "token_ids": [97, 98],
    }  # fmt: skip
    chunks = Chunks(ask, "id", 1)
    assert json.loads(chunks.text("", (195,))[6:])["choices"][0]["token_ids"] == [195]
    assert chunks.is_worth_sending("")
    assert not Chunks(asked(), "id", 1).is_worth_sending("")
    assert json.loads(chunks.last("stop")[6:])["choices"][0]["finish_reason"] == "stop"
