"""The OpenAI-compatible edge as data: request bodies in, validated; response bodies and stream chunks out.

No model runs behind the timing backend, so sampling settings are accepted and have no effect; what would change the
*shape* of an answer and cannot be honoured (n, best_of, logprobs, echo, suffix, tools) is refused. Prompts: text (one
token a UTF-8 byte), token ids, or the replay extension `"prfaas": {"input_tokens", "block_hashes", "block_size"}`
instead of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
DEFAULT_MAX_TOKENS: Final = 16  # the OpenAI default of /v1/completions


class ApiError(Exception):
    """An answer with an error body, OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str = "invalid_request",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return orjson.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asked for. Lengths in tokens."""

    model: str
    chat: bool
    input_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    block_hashes: tuple[int, ...] = ()
    block_size: int = 0
    session: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this testbed serves: its model's name, the longest prompt its profiles know, the longest answer."""

    model: str
    max_input_tokens: int
    max_output_tokens: int
    default_chat_tokens: int


def parse(raw: bytes, *, chat: bool, limits: Limits) -> Ask:
    """Validate a request body. Raises ApiError (400; 404 for another model), naming field, value and remedy."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}; send a JSON object") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; send a JSON object")
    model = body.get("model", limits.model)
    if model != limits.model:
        raise ApiError(
            404, f"model {model!r}: this testbed serves {limits.model!r}; see /v1/models", "model", "model_not_found"
        )
    for field, harmless in _SHAPE.items():
        if body.get(field) not in harmless:
            raise ApiError(400, f"{field} = {body[field]!r}: not supported by this testbed; leave it out", field)
    tokens, hashes, block_size, session = _prompt(body, chat)
    if tokens > limits.max_input_tokens:
        raise ApiError(
            400,
            f"the prompt has {tokens} tokens; this testbed's profiles end at {limits.max_input_tokens}: shorten it",
            "messages" if chat else "prompt",
            "context_length_exceeded",
        )
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    asked = body.get(name)
    output = limits.default_chat_tokens if asked is None and chat else DEFAULT_MAX_TOKENS if asked is None else asked
    if isinstance(output, bool) or not isinstance(output, int) or not 1 <= output <= limits.max_output_tokens:
        raise ApiError(400, f"{name} = {output!r}: must be a whole number from 1 to {limits.max_output_tokens}", name)
    for field in ("stream", "ignore_eos"):
        if body.get(field) not in (None, True, False):
            raise ApiError(400, f"{field} = {body[field]!r}: must be true or false", field)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError(
            400, f"stream_options = {options!r}: must be an object such as {{'include_usage': true}}", "stream_options"
        )
    include_usage = bool((options or {}).get("include_usage", False))
    return Ask(limits.model, chat, tokens, output, bool(body.get("stream")), include_usage, hashes, block_size, session)


_SHAPE: Final[dict[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "functions": (None, []),
}


def _prompt(body: dict[str, Any], chat: bool) -> tuple[int, tuple[int, ...], int, str]:
    """(tokens, block hashes, block size, session) of whichever kind of prompt the body has."""
    if "prfaas" in body:
        return _replayed(body["prfaas"])
    if chat:
        return _chat_tokens(body.get("messages")), (), 0, ""
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return len(prompt.encode()), (), 0, ""
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return len(prompt), (), 0, ""
    shown = repr(prompt) if not isinstance(prompt, list) else f"a list of {len(prompt)}"
    raise ApiError(
        400,
        f"prompt = {shown[:80]}: must be a text that is not empty, or a list of token ids (one prompt a request)",
        "prompt",
    )


def _replayed(extension: Any) -> tuple[int, tuple[int, ...], int, str]:
    if not isinstance(extension, dict):
        raise ApiError(400, f"prfaas = {extension!r}: must be an object with input_tokens", "prfaas")
    unknown = set(extension) - {"input_tokens", "block_hashes", "block_size", "session"}
    if unknown:
        raise ApiError(
            400,
            f"prfaas.{min(unknown)}: unknown field; known: input_tokens, block_hashes, block_size, session",
            "prfaas",
        )
    tokens = extension.get("input_tokens")
    if type(tokens) is not int or tokens < 1:
        raise ApiError(
            400, f"prfaas.input_tokens = {tokens!r}: must be a whole number of at least 1", "prfaas.input_tokens"
        )
    hashes, size = extension.get("block_hashes") or [], extension.get("block_size") or 0
    if not isinstance(hashes, list) or not all(type(h) is int for h in hashes):
        raise ApiError(400, "prfaas.block_hashes: must be a list of whole numbers, one a block", "prfaas.block_hashes")
    if hashes and (type(size) is not int or size < 1):
        raise ApiError(
            400, f"prfaas.block_size = {size!r}: must be at least 1 when there are block_hashes", "prfaas.block_size"
        )
    if hashes and len(hashes) != -(-tokens // size):
        raise ApiError(
            400,
            f"prfaas.block_hashes: {len(hashes)} of them for {tokens} tokens in blocks of {size}; "
            f"must be {-(-tokens // size)}",
            "prfaas.block_hashes",
        )
    session = extension.get("session", "")
    if not isinstance(session, str):
        raise ApiError(400, f"prfaas.session = {session!r}: must be a text", "prfaas.session")
    return tokens, tuple(hashes), size if hashes else 0, session


def _chat_tokens(messages: Any) -> int:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: must be a list of at least one message", "messages")
    total = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages.{i}: must be an object with a role and a content", f"messages.{i}")
        content = message.get("content", "")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        else:
            parts = [content]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(
                400, f"messages.{i}.content: must be a text, or a list of text parts", f"messages.{i}.content"
            )
        total += len(message["role"].encode()) + sum(len(part.encode()) for part in parts) + 2  # "role: ...\n"
    return total


def usage(ask: Ask, tokens: int, cached: int = 0) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": ask.input_tokens,
        "completion_tokens": tokens,
        "total_tokens": ask.input_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Chunks:
    """The chunks of one answer, as server-sent events."""

    def __init__(self, ask: Ask, answer_id: str, created: int) -> None:
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        self._chat = ask.chat
        self._null_usage = ask.include_usage
        self._base = {"id": answer_id, "object": kind, "created": created, "model": ask.model}

    def role(self) -> bytes:
        """The role chunk a chat stream opens with."""
        return self._event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text(self, text: str) -> bytes:
        if self._chat:
            return self._event({"index": 0, "delta": {"content": text}, "finish_reason": None})
        return self._event({"index": 0, "text": text, "logprobs": None, "finish_reason": None})

    def last(self) -> bytes:
        """The chunk that says why the answer ended: its length, always, since nothing stops early here."""
        if self._chat:
            return self._event({"index": 0, "delta": {}, "finish_reason": "length"})
        return self._event({"index": 0, "text": "", "logprobs": None, "finish_reason": "length"})

    def usage(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._base, "choices": [], "usage": usage}) + b"\n\n"

    def _event(self, choice: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._null_usage:
            body["usage"] = None
        return b"data: " + orjson.dumps(body) + b"\n\n"


def whole(ask: Ask, answer_id: str, created: int, text: str, usage: dict[str, Any]) -> bytes:
    """The body of an answer that was not streamed."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    if ask.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if ask.chat else "text_completion"
    return orjson.dumps(
        {"id": answer_id, "object": kind, "created": created, "model": ask.model, "choices": [choice], "usage": usage}
    )


def stream_error(message: str, code: str) -> bytes:
    """An error after the headers: the stream ends with it, without [DONE]."""
    return (
        b"data: "
        + orjson.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}})
        + b"\n\n"
    )
