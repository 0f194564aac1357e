"""One streamed completion over HTTP/1.1: the request's bytes, the answer's stamps, counts and kind of failure.

``Completion`` reads the body (server-sent events of the OpenAI kind, completions and chat) sans-IO: bytes and the
stamp at which they came go in. ``exchange`` does one request on a connection of its own. It uses the standard
library's sockets, which Locust makes cooperative; alone it blocks, and nothing here patches the process.

Every ``data:`` line is one JSON object, as every OpenAI-compatible server sends it; lines end with LF or CRLF. The
object is parsed (orjson, about a microsecond), not searched: only the parsed one tells a token from a role chunk, an
empty string or a usage chunk. HTTP is parsed by llhttp (geventhttpclient): chunked, content-length and close-delimited
bodies end where they end, and what ``recv`` brought is looked at straight away. Locust's own client would hide
connecting and waiting for its pool, and its ``iter_lines`` holds tokens back until 1024 bytes are there.
"""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any

import orjson
from geventhttpclient.response import HTTPParseError, HTTPResponse

from traces.client_rows import ClientRow
from traces.request import Request

Address = tuple[str, int]
DRAIN_S = 1.0
"""Wall seconds that a server may take to end a response after ``[DONE]``."""


_CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")


def has_token(chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries model output: non-empty text, content, reasoning or tool-call delta."""
    for choice in chunk.get("choices") or ():
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if delta and any(delta.get(key) for key in _CONTENT_KEYS):
            return True
    return False


class Completion:
    """The state of one stream. ``feed`` it; read the fields at any time.

    t_first_token_ns, t_last_token_ns: stamps of the bytes that completed the first and last chunk with a token.
    chunks: chunks with a token. output_tokens: completion_tokens of the last usage seen, None before.
    done: ``[DONE]`` came. error: the message of an error sent inside the stream, "" when none.
    """

    __slots__ = ("_buffer", "_event", "chunks", "done", "error", "output_tokens", "t_first_token_ns", "t_last_token_ns")

    def __init__(self) -> None:
        self._buffer = b""
        self._event = b""
        self.t_first_token_ns: int | None = None
        self.t_last_token_ns: int | None = None
        self.chunks = 0
        self.output_tokens: int | None = None
        self.done = False
        self.error = ""

    def feed(self, stamp_ns: int, data: bytes) -> None:
        """Take body bytes, cut anywhere, that ``recv`` returned at stamp_ns."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._line(stamp_ns, line.removesuffix(b"\r"))

    def finish(self, stamp_ns: int) -> None:
        """The body has ended: take a last line that had no newline."""
        if self._buffer:
            self.feed(stamp_ns, b"\n")

    def failure(self, tokens_asked: int) -> str:
        """The kind of failure of a body that has ended, "" when it is whole.

        ``stream_error`` an error event, an error object or a line that is no chunk; ``no_done`` no ``[DONE]``;
        ``no_usage`` no token count; ``short_stream`` fewer tokens than asked for: under ignore_eos some were lost.
        """
        if self.error:
            return "stream_error"
        if not self.done:
            return "no_done"
        if self.output_tokens is None:
            return "no_usage"
        return "short_stream" if self.output_tokens < tokens_asked else ""

    def _line(self, stamp_ns: int, line: bytes) -> None:
        if not line:
            self._event = b""
        elif line.startswith(b"data:"):
            self._data(stamp_ns, line[5:].lstrip(b" "))
        elif line.startswith(b"event:"):
            self._event = line[6:].strip()

    def _data(self, stamp_ns: int, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = None
        if self._event == b"error" or not isinstance(chunk, dict) or chunk.get("error"):
            self._fail(data)
            return
        try:
            if has_token(chunk):
                if self.t_first_token_ns is None:
                    self.t_first_token_ns = stamp_ns
                self.t_last_token_ns = stamp_ns
                self.chunks += 1
            usage = chunk.get("usage")
            if usage and usage.get("completion_tokens") is not None:
                self.output_tokens = int(usage["completion_tokens"])
        except (AttributeError, TypeError, ValueError):
            self._fail(data)

    def _fail(self, data: bytes) -> None:
        self.error = self.error or data.decode("utf-8", "replace") or "error event"


def request_bytes(host: Address, model: str, request: Request, request_id: str, prompt: str | None = None) -> bytes:
    """The whole HTTP request: a streamed completion, of a prompt (greedy), or without one with the replay extension
    (docs/contracts.md) instead.

    host: what the Host header says.
    """
    content: dict[str, Any] = {"prompt": prompt, "temperature": 0}
    if prompt is None:
        content = {
            "prfaas": {
                "input_tokens": request.input_tokens,
                "block_hashes": request.block_hashes,
                "block_size": request.block_size,
                "session": request.session,
            }
        }
    body = orjson.dumps(
        {
            "model": model,
            **content,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    name = f"[{host[0]}]" if ":" in host[0] else host[0]
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {name}:{host[1]}\r\nX-Request-Id: {request_id}\r\n"
        "Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def exchange(row: ClientRow, message: bytes, host: Address, timeout_s: float) -> None:
    """Send message on a new connection, read the answer to its end and fill row. Failures go into row, none is raised.

    timeout_s: wall seconds for everything, connecting included. Kinds of error: ``connect``, ``timeout``,
    ``disconnected`` (cut before the declared end), ``bad_http``, ``http_<status>``, those of ``Completion.failure``.
    """
    completion = Completion()
    row.t_send_ns = time.monotonic_ns()
    until_ns = row.t_send_ns + int(timeout_s * 1e9)
    step = "connect"
    try:
        with socket.create_connection(host, timeout_s) as connection:
            step = "disconnected"
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(message)
            _read(row, completion, connection, until_ns)
    except TimeoutError:
        row.error = "timeout"
    except OSError:
        row.error = step
    except HTTPParseError:
        row.error = "bad_http"
    finally:
        row.t_done_ns = row.t_done_ns or time.monotonic_ns()
        row.t_first_token_ns, row.t_last_token_ns = completion.t_first_token_ns, completion.t_last_token_ns
        row.chunks, row.output_tokens = completion.chunks, completion.output_tokens
    if row.http_status == http.client.OK and (completion.done or completion.error or not row.error):
        row.error = completion.failure(row.output_tokens_asked)


class _Response(HTTPResponse):
    """llhttp's parser, handing out body bytes as they come."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.body = bytearray()

    def _on_body(self, buf: bytearray) -> None:
        self.body += buf

    @property
    def started(self) -> bool:
        return self.headers_complete and self.get_code() >= http.client.OK

    @property
    def ended(self) -> bool:
        return self.message_complete and self.get_code() >= http.client.OK


def _read(row: ClientRow, completion: Completion, connection: socket.socket, until_ns: int) -> None:
    response = _Response()
    while not response.ended:
        connection.settimeout(max((until_ns - time.monotonic_ns()) / 1e9, 1e-3))
        data = connection.recv(65536)
        now_ns = time.monotonic_ns()
        try:
            response.feed(data)
        except HTTPParseError:
            if data:
                raise
            raise ConnectionError("cut before the declared end") from None
        if not data and not response.ended:
            raise ConnectionError("closed without an answer")
        if response.started and row.t_headers_ns is None:
            row.t_headers_ns, row.http_status = now_ns, response.get_code()
        if row.http_status == http.client.OK:
            completion.feed(now_ns, bytes(response.body))
            if response.ended:
                completion.finish(now_ns)
            if completion.done and row.t_done_ns is None:
                row.t_done_ns = now_ns
                until_ns = min(until_ns, now_ns + int(DRAIN_S * 1e9))
        response.body.clear()
    if row.http_status != http.client.OK:
        row.error = f"http_{row.http_status}"
    if row.t_done_ns is None:
        row.t_done_ns = now_ns
