"""The OpenAI-compatible edge as data: request bodies in, validated; response bodies and stream chunks out.

No model runs behind the timing backend, so sampling settings are accepted and have no effect (where one computes,
`openai_model.py` reads them); what would change the *shape* of an answer and cannot be honoured (n, best_of, logprobs,
echo, suffix, tools) is refused. Prompts: text (one token a UTF-8 byte), token ids, or the replay extension
`"prfaas": {"input_tokens", "block_hashes", "block_size"}` instead of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from emulator.kvcache import hash_blocks
from testbed.openai_model import Work, work_of

DONE: Final = b"data: [DONE]\n\n"
LEAST_BODY_BYTES: Final = 1 << 20
MOST_HASHES: Final = 1 << 14  # of a prompt
MOST_SESSION_CHARACTERS: Final = 256
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
    """What a client asked for. Lengths in tokens. work: for a model that computes."""

    model: str
    chat: bool
    input_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    block_hashes: tuple[int, ...] = ()
    block_size: int = 0
    session: str = ""
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What this testbed serves: its model's name, the longest prompt its profiles know, the longest answer.

    computes: a model does. block_tokens: then, of its prefix cache, 0 without one.
    """

    model: str
    max_input_tokens: int
    max_output_tokens: int
    default_chat_tokens: int
    computes: bool = False
    block_tokens: int = 0

    @property
    def most_body_bytes(self) -> int:
        """Of a request: as many token ids, or characters, each of them escaped, as the longest prompt has."""
        return max(LEAST_BODY_BYTES, 12 * self.max_input_tokens)


def parse(raw: bytes, *, chat: bool, limits: Limits) -> Ask:
    """Validate a request body. Raises ApiError (400; 404 for another model), naming field, value and remedy."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}; send a JSON object") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {_shown(body)}; send a JSON object")
    model = body.get("model", limits.model)
    if model != limits.model:
        raise ApiError(
            404,
            f"model = {_shown(model)}: this testbed serves {limits.model!r}; see /v1/models",
            "model",
            "model_not_found",
        )
    for field, harmless in _SHAPE.items():
        if body.get(field) not in harmless:
            raise ApiError(400, f"{field} = {_shown(body[field])}: not supported by this testbed; leave it out", field)
    tokens, hashes, block_size, session = _prompt(body, chat)
    if tokens > limits.max_input_tokens:
        raise ApiError(
            400,
            f"the prompt has {tokens} tokens; this testbed's profiles end at {limits.max_input_tokens}: shorten it",
            "prfaas.input_tokens" if "prfaas" in body else "messages" if chat else "prompt",
            "context_length_exceeded",
        )
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    asked = body.get(name)
    output = limits.default_chat_tokens if asked is None and chat else DEFAULT_MAX_TOKENS if asked is None else asked
    if isinstance(output, bool) or not isinstance(output, int) or not 1 <= output <= limits.max_output_tokens:
        limit = limits.max_output_tokens
        raise ApiError(400, f"{name} = {_shown(output)}: must be a whole number from 1 to {limit}", name)
    stream = _flag(body.get("stream"), "stream")
    _flag(body.get("ignore_eos"), "ignore_eos")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        example = '{"include_usage": true}'
        raise ApiError(
            400, f"stream_options = {_shown(options)}: must be an object such as {example}", "stream_options"
        )
    include_usage = _flag((options or {}).get("include_usage"), "stream_options.include_usage")
    work = None
    if limits.computes:
        work = work_of(body, chat=chat, wrong=lambda message, field: ApiError(400, message, field))
        if limits.block_tokens:
            block_size = limits.block_tokens
            hashes = hash_blocks(work.prompt, block_size)
    return Ask(limits.model, chat, tokens, output, stream, include_usage, hashes, block_size, session, work)


def _flag(value: Any, field: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{field} = {_shown(value)}: must be true or false", field)
    return bool(value)


def _shown(value: Any) -> str:
    """A client's value in an error, short enough to read."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return len(prompt.encode()), (), 0, ""
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return len(prompt), (), 0, ""
    raise ApiError(
        400,
        f"prompt = {_shown(prompt)}: must be a text that is not empty, or a list of token ids (one prompt a request)",
        "prompt",
    )


def _replayed(extension: Any) -> tuple[int, tuple[int, ...], int, str]:
    if not isinstance(extension, dict):
        raise ApiError(400, f"prfaas = {_shown(extension)}: must be an object with input_tokens", "prfaas")
    unknown = set(extension) - {"input_tokens", "block_hashes", "block_size", "session"}
    if unknown:
        raise ApiError(
            400,
            f"prfaas.{min(unknown)[:80]}: unknown field; known: input_tokens, block_hashes, block_size, session",
            "prfaas",
        )
    tokens = extension.get("input_tokens")
    if type(tokens) is not int or tokens < 1:
        raise ApiError(
            400, f"prfaas.input_tokens = {_shown(tokens)}: must be a whole number of at least 1", "prfaas.input_tokens"
        )
    size: Any = 0
    hashes = extension.get("block_hashes")
    if hashes is None:
        hashes = []
    if not isinstance(hashes, list) or not all(type(h) is int for h in hashes):
        raise ApiError(400, "prfaas.block_hashes: must be a list of whole numbers, one a block", "prfaas.block_hashes")
    if len(hashes) > MOST_HASHES:
        told = f"prfaas.block_hashes: {len(hashes)} of them; at most {MOST_HASHES}: use larger blocks"
        raise ApiError(400, told, "prfaas.block_hashes")
    if hashes:
        size = extension.get("block_size")
        if type(size) is not int or size < 1:
            raise ApiError(
                400,
                f"prfaas.block_size = {_shown(size)}: must be a whole number of at least 1 with block_hashes",
                "prfaas.block_size",
            )
        if len(hashes) != -(-tokens // size):
            raise ApiError(
                400,
                f"prfaas.block_hashes: {len(hashes)} of them for {tokens} tokens in blocks of {size}; "
                f"must be {-(-tokens // size)}",
                "prfaas.block_hashes",
            )
    session = extension.get("session", "")
    if not isinstance(session, str) or len(session) > MOST_SESSION_CHARACTERS:
        told = f"prfaas.session = {_shown(session)}: must be a text of at most {MOST_SESSION_CHARACTERS} characters"
        raise ApiError(400, told, "prfaas.session")
    return tokens, tuple(hashes), size, session


def _chat_tokens(messages: Any) -> int:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: must be a list of at least one message", "messages")
    total = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages.{i}: must be an object with a role and a content", f"messages.{i}")
        content = message.get("content", "")
        parts = (
            [p.get("text") if isinstance(p, dict) else None for p in content]
            if isinstance(content, list)
            else [content]
        )
        total += len(message["role"].encode()) + 2  # "role: ...\n"
        for part in parts:
            if not isinstance(part, str):
                raise ApiError(
                    400, f"messages.{i}.content: must be a text, or a list of text parts", f"messages.{i}.content"
                )
            total += len(part.encode())
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
        self._token_ids = ask.work is not None and ask.work.return_token_ids
        self._null_usage = ask.include_usage
        self._base = {"id": answer_id, "object": kind, "created": created, "model": ask.model}

    def role(self) -> bytes:
        """The role chunk a chat stream opens with."""
        return self._event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text(self, text: str, ids: tuple[int, ...] = ()) -> bytes:
        """ids: the tokens, for a client that asked for them."""
        told = {"token_ids": ids} if self._token_ids else {}
        if self._chat:
            return self._event({"index": 0, "delta": {"content": text}, "finish_reason": None, **told})
        return self._event({"index": 0, "text": text, "logprobs": None, "finish_reason": None, **told})

    def is_worth_sending(self, text: str) -> bool:
        """A token whose character is not whole yet has no text."""
        return bool(text) or self._token_ids

    def last(self, reason: str) -> bytes:
        """The chunk that says why the answer ended."""
        if self._chat:
            return self._event({"index": 0, "delta": {}, "finish_reason": reason})
        return self._event({"index": 0, "text": "", "logprobs": None, "finish_reason": reason})

    def usage(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._base, "choices": [], "usage": usage}) + b"\n\n"

    def _event(self, choice: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._null_usage:
            body["usage"] = None
        return b"data: " + orjson.dumps(body) + b"\n\n"


def whole(
    ask: Ask, answer_id: str, created: int, text: str, ids: tuple[int, ...], reason: str, usage: dict[str, Any]
) -> bytes:
    """The body of an answer that was not streamed. reason: why it ended."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
    if ask.work is not None and ask.work.return_token_ids:
        choice["token_ids"] = ids
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
