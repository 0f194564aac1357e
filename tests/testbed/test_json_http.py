"""The gateway's JSON edge: what comes in wrong, and what a handler raises, is an answer with the API's error body."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from testbed.json_http import check_finite, errors_as_answers, json_object, json_response
from testbed.openai_api import ApiError


async def _echo(request: web.Request) -> web.Response:
    body = await json_object(request, {"rate_rps", "busy", "broken"})
    check_finite(body.get("rate_rps"), "rate_rps")
    if body.get("busy"):
        raise ApiError(429, "later", retry_after_s=0.2)
    if body.get("broken"):
        raise RuntimeError("a defect")
    return json_response(body)


async def _post(data: bytes, path: str = "/") -> tuple[int, dict[str, Any], str | None]:
    app = web.Application(middlewares=[errors_as_answers])
    app.add_routes([web.post("/", _echo)])
    async with TestClient(TestServer(app)) as client, client.post(path, data=data) as answer:
        return answer.status, await answer.json(), answer.headers.get("Retry-After")


@pytest.mark.parametrize(("data", "body"), [(b"", {}), (b'{"rate_rps": 2.5}', {"rate_rps": 2.5})])
async def test_an_object_comes_in_and_goes_out(data: bytes, body: dict[str, Any]) -> None:
    assert await _post(data) == (200, body, None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b'{"rate": 1}', "rate: unknown field; known: broken, busy, rate_rps"),
        (b'{"rate_rps": true}', "rate_rps = True: must be a finite number"),
    ],
)
async def test_a_wrong_body_is_named(data: bytes, message: str) -> None:
    status, body, _ = await _post(data)
    assert status == 400
    assert body["error"]["message"].startswith(message)


async def test_a_refusal_says_when_to_come_again_in_whole_seconds() -> None:
    assert (await _post(b'{"busy": 1}'))[::2] == (429, "1")


async def test_a_path_that_is_not_there_answers_like_the_api() -> None:
    status, body, _ = await _post(b"", "/elsewhere")
    assert (status, body["error"]["message"]) == (404, "POST /elsewhere: Not Found")


async def test_a_defect_is_not_shown_to_the_client() -> None:
    status, body, _ = await _post(b'{"broken": 1}')
    assert (status, body["error"]["code"]) == (500, "internal")
    assert "a defect" not in body["error"]["message"]
