"""The OpenAI-compatible edge as data: what a body means, which bodies are refused, what an answer looks like."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.openai_api import DONE, ApiError, Ask, Chunks, Limits, parse, stream_error, usage, whole

LIMITS = Limits(model="prfaas", max_input_tokens=1000, max_output_tokens=500, default_chat_tokens=77)
USER = {"role": "user", "content": "hello"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "prfaas",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "ignore_eos",
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "echo",
        "suffix",
        "tools",
        "functions",
        "temperature",
    ]
)


def asked(chat: bool = False, **body: Any) -> Ask:
    return parse(orjson.dumps(body), chat=chat, limits=LIMITS)


def refused(chat: bool = False, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        asked(chat, **body)
    return error.value


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return json.loads(data[6:])


class TestAPrompt:
    def test_as_text_has_a_token_a_utf8_byte(self) -> None:
        assert asked(prompt="héllo").input_tokens == 6

    def test_as_token_ids_has_one_each(self) -> None:
        assert asked(prompt=[5, 6, 7]).input_tokens == 3

    @pytest.mark.parametrize("prompt", [["hello"], [[1, 2, 3, 4, 5]]])
    def test_as_a_batch_of_one_is_that_one(self, prompt: list[Any]) -> None:
        assert asked(prompt=prompt).input_tokens == 5

    def test_as_messages_counts_roles_and_text_parts(self) -> None:
        assert asked(chat=True, messages=[USER]).input_tokens == len("user: hello\n") - 1
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        assert asked(chat=True, messages=[{"role": "user", "content": parts}]) == asked(chat=True, messages=[USER])

    def test_can_be_replayed_by_its_shape_alone(self) -> None:
        ask = asked(prfaas={"input_tokens": 600, "block_hashes": [1, 2], "block_size": 512, "session": "s1"})
        assert (ask.input_tokens, ask.block_hashes, ask.block_size, ask.session) == (600, (1, 2), 512, "s1")

    def test_replayed_needs_no_blocks(self) -> None:
        for blocks in ({}, {"block_hashes": None}, {"block_hashes": [], "block_size": 512}):
            ask = asked(prfaas={"input_tokens": 600, **blocks})
            assert (ask.block_hashes, ask.block_size) == ((), 0)


class TestAnAsk:
    def test_has_openais_defaults(self) -> None:
        ask = asked(prompt="x")
        assert (ask.output_tokens, ask.stream, ask.include_usage) == (16, False, False)
        assert asked(chat=True, messages=[USER]).output_tokens == LIMITS.default_chat_tokens

    def test_takes_either_name_of_its_length(self) -> None:
        assert asked(prompt="x", max_tokens=5).output_tokens == 5
        assert asked(chat=True, messages=[USER], max_completion_tokens=5).output_tokens == 5
        assert asked(chat=True, messages=[USER], max_completion_tokens=None, max_tokens=5).output_tokens == 5

    def test_streams_with_usage_on_demand(self) -> None:
        ask = asked(prompt="x", stream=True, stream_options={"include_usage": True})
        assert (ask.stream, ask.include_usage) == (True, True)

    def test_ignores_how_tokens_would_be_sampled(self) -> None:
        assert asked(prompt="x", temperature=0.7, top_p=1, seed=3, stop=["a"], user="me") == asked(prompt="x")

    def test_may_say_the_harmless_form_of_what_is_not_supported(self) -> None:
        harmless: dict[str, Any] = {"n": 1, "best_of": 1, "logprobs": False, "echo": False, "suffix": None, "tools": []}
        assert asked(prompt="x", **harmless) == asked(prompt="x")


class TestARefusal:
    """Names the field, the value and the remedy, and has OpenAI's shape."""

    @pytest.mark.parametrize(
        ("raw", "part"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"\xff\xfe", "not JSON"),
            (b'{"prompt": "\\ud800"}', "not JSON"),
            (b'{"max_tokens": NaN}', "not JSON"),
            (b"[1, 2]", "the body is a list of 2; send a JSON object"),
            (b"null", "the body is null"),
            (b"[" * 100_000, "not JSON"),
        ],
    )
    def test_of_what_is_no_json_object(self, raw: bytes, part: str) -> None:
        with pytest.raises(ApiError) as error:
            parse(raw, chat=False, limits=LIMITS)
        assert error.value.status == 400
        assert part in error.value.message

    def test_of_another_model_is_a_404(self) -> None:
        error = refused(model="gpt-4o", prompt="x")
        assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
        assert "'gpt-4o'" in error.message
        assert "'prfaas'" in error.message

    @pytest.mark.parametrize(
        ("field", "value", "shown"),
        [
            ("n", 2, "n = 2"),
            ("best_of", 3, "best_of = 3"),
            ("logprobs", 5, "logprobs = 5"),
            ("logprobs", True, "logprobs = true"),
            ("top_logprobs", 2, "top_logprobs = 2"),
            ("echo", True, "echo = true"),
            ("suffix", "end", "suffix = 'end'"),
            ("tools", [{"type": "function"}], "tools = a list of 1"),
            ("functions", [{}], "functions = a list of 1"),
        ],
    )
    def test_of_what_would_change_the_answers_shape(self, field: str, value: Any, shown: str) -> None:
        error = refused(prompt="x", **{field: value})
        assert (error.status, error.param) == (400, field)
        assert error.message == f"{shown}: not supported by this testbed; leave it out"

    @pytest.mark.parametrize(
        ("prompt", "shown"),
        [
            (None, "null"),
            ("", "''"),
            ([], "a list of 0"),
            (5, "5"),
            ({"a": 1}, "an object"),
            (["a", "b"], "a list of 2"),
            ([1, -1], "a list of 2"),
            ([1.5], "a list of 1"),
            ([True], "a list of 1"),
        ],
    )
    def test_of_a_prompt(self, prompt: Any, shown: str) -> None:
        error = refused(prompt=prompt)
        assert error.param == "prompt"
        assert error.message.startswith(f"prompt = {shown}: must be a text that is not empty, or a list of token ids")

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            (None, "messages"),
            ([], "messages"),
            ("hello", "messages"),
            (["hello"], "messages.0"),
            ([USER, {"content": "no role"}], "messages.1"),
            ([{"role": "user", "content": 5}], "messages.0.content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content"),
            ([{"role": "user", "content": ["text"]}], "messages.0.content"),
        ],
    )
    def test_of_messages_names_the_one(self, messages: Any, param: str) -> None:
        assert refused(chat=True, messages=messages).param == param

    @pytest.mark.parametrize(
        ("extension", "param", "part"),
        [
            (None, "prfaas", "= null: must be an object with input_tokens"),
            ([], "prfaas", "a list of 0"),
            ({}, "prfaas.input_tokens", "= null: must be a whole number of at least 1"),
            ({"input_tokens": 0}, "prfaas.input_tokens", "= 0"),
            ({"input_tokens": True}, "prfaas.input_tokens", "= true"),
            ({"input_tokens": 2.5}, "prfaas.input_tokens", "= 2.5"),
            ({"tokens": 5}, "prfaas", "prfaas.tokens: unknown field; known: input_tokens"),
            ({"input_tokens": 9, "block_hashes": 5}, "prfaas.block_hashes", "one a block"),
            ({"input_tokens": 9, "block_hashes": 0}, "prfaas.block_hashes", "one a block"),
            ({"input_tokens": 9, "block_hashes": ["a"], "block_size": 9}, "prfaas.block_hashes", "whole numbers"),
            ({"input_tokens": 9, "block_hashes": [1]}, "prfaas.block_size", "= null"),
            ({"input_tokens": 9, "block_hashes": [1], "block_size": 0}, "prfaas.block_size", "= 0"),
            ({"input_tokens": 9, "block_hashes": [1], "block_size": 8}, "prfaas.block_hashes", "must be 2"),
            ({"input_tokens": 9, "session": 5}, "prfaas.session", "= 5: must be a text"),
        ],
    )
    def test_of_a_replayed_prompt(self, extension: Any, param: str, part: str) -> None:
        error = refused(prfaas=extension)
        assert error.param == param
        assert part in error.message

    @pytest.mark.parametrize("value", [0, -1, 501, 2.5, "5", True, [1], 2**63])
    @pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
    def test_of_a_length(self, field: str, value: Any) -> None:
        error = refused(prompt="x", **{field: value})
        assert error.param == field
        assert error.message.endswith("must be a whole number from 1 to 500")

    @pytest.mark.parametrize(
        ("field", "value", "param"),
        [
            ("stream", 1, "stream"),
            ("stream", "yes", "stream"),
            ("ignore_eos", 0, "ignore_eos"),
            ("stream_options", True, "stream_options"),
            ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
        ],
    )
    def test_of_a_flag(self, field: str, value: Any, param: str) -> None:
        assert refused(prompt="x", **{field: value}).param == param

    @pytest.mark.parametrize(
        ("chat", "body", "param"),
        [
            (False, {"prompt": "x" * 1001}, "prompt"),
            (True, {"messages": [{"role": "user", "content": "x" * 1001}]}, "messages"),
            (False, {"prfaas": {"input_tokens": 1001}}, "prfaas.input_tokens"),
        ],
    )
    def test_of_a_prompt_beyond_the_profiles(self, chat: bool, body: dict[str, Any], param: str) -> None:
        error = refused(chat, **body)
        assert (error.param, error.code) == (param, "context_length_exceeded")
        assert "profiles end at 1000: shorten it" in error.message

    def test_of_a_huge_value_is_short(self) -> None:
        assert len(refused(model="x" * 100_000, prompt="x").message) < 300
        assert len(refused(prfaas={"x" * 100_000: 1}).message) < 300

    def test_has_openais_shape(self) -> None:
        assert json.loads(refused(prompt="").body())["error"].keys() == {"message", "type", "param", "code"}
        assert json.loads(ApiError(400, "m").body())["error"]["type"] == "invalid_request_error"
        assert json.loads(ApiError(503, "m").body())["error"]["type"] == "server_error"

    @given(st.dictionaries(FIELDS, JSON_VALUES, max_size=6), st.booleans())
    def test_is_all_that_ever_happens_to_a_body(self, body: dict[str, Any], chat: bool) -> None:
        self.parses_or_refuses(json.dumps(body).encode(), chat)

    @given(st.binary(max_size=40), st.booleans())
    def test_is_all_that_ever_happens_to_bytes(self, raw: bytes, chat: bool) -> None:
        self.parses_or_refuses(raw, chat)

    def parses_or_refuses(self, raw: bytes, chat: bool) -> None:
        try:
            ask = parse(raw, chat=chat, limits=LIMITS)
        except ApiError as error:
            json.loads(error.body())
        else:
            assert 1 <= ask.input_tokens <= LIMITS.max_input_tokens


class TestAnAnswer:
    def test_has_usage(self) -> None:
        assert usage(asked(prompt="hello"), 7, cached=2) == {
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    def test_of_a_completion_whole(self) -> None:
        ask = asked(prompt="x")
        body = json.loads(whole(ask, "id-1", 123, " 0 1", (), "length", usage(ask, 2)))
        choice = {"index": 0, "logprobs": None, "finish_reason": "length", "text": " 0 1"}
        assert body["choices"] == [choice]
        assert (body["id"], body["object"], body["created"], body["model"]) == (
            "id-1",
            "text_completion",
            123,
            "prfaas",
        )

    def test_of_a_chat_whole(self) -> None:
        ask = asked(chat=True, messages=[USER])
        body = json.loads(whole(ask, "id-1", 123, " 0 1", (), "length", usage(ask, 2)))
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": " 0 1"}

    def test_of_a_completion_in_chunks(self) -> None:
        chunks = Chunks(asked(prompt="x"), "id-1", 123)
        base = {"id": "id-1", "object": "text_completion", "created": 123, "model": "prfaas"}
        choice = {"index": 0, "logprobs": None}
        assert event(chunks.text(" 0")) == {**base, "choices": [{**choice, "text": " 0", "finish_reason": None}]}
        assert event(chunks.last("length")) == {**base, "choices": [{**choice, "text": "", "finish_reason": "length"}]}

    def test_of_a_chat_in_chunks(self) -> None:
        chunks = Chunks(asked(chat=True, messages=[USER]), "id-1", 123)
        deltas = [event(chunk)["choices"][0] for chunk in (chunks.role(), chunks.text(" 0"), chunks.last("length"))]
        assert [one["delta"] for one in deltas] == [{"role": "assistant", "content": ""}, {"content": " 0"}, {}]
        assert [one["finish_reason"] for one in deltas] == [None, None, "length"]
        assert event(chunks.text(" 0"))["object"] == "chat.completion.chunk"

    def test_in_chunks_with_usage_has_it_once_and_null_before(self) -> None:
        ask = asked(prompt="x", stream=True, stream_options={"include_usage": True})
        chunks = Chunks(ask, "id-1", 123)
        assert event(chunks.text(" 0"))["usage"] is None
        last = event(chunks.usage(usage(ask, 1)))
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 2
        assert "usage" not in event(Chunks(asked(prompt="x"), "id-1", 123).text(" 0"))

    def test_that_fails_midway_ends_in_an_error_event(self) -> None:
        error = event(stream_error("node pd-d-0 was lost", "node_lost"))["error"]
        assert error == {"message": "node pd-d-0 was lost", "type": "server_error", "param": None, "code": "node_lost"}
        assert DONE == b"data: [DONE]\n\n"
