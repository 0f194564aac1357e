"""What the gateway's endpoints share: JSON bodies in, JSON answers and errors out."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

import orjson
from aiohttp import web

from emulator.log import Log
from testbed.guard import read_body
from testbed.openai_api import ApiError

log = Log("gateway")

JSON: Final = "application/json"


def json_response(body: Any, status: int = 200) -> web.Response:
    """An answer of JSON."""
    return web.Response(body=orjson.dumps(body), status=status, content_type=JSON)


async def json_object(request: web.Request, known: set[str] | None) -> dict[str, Any]:
    """The request's body, an object of `known` fields (None: of any); {} when it is empty. Raises ApiError."""
    raw = await read_body(request)
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    if known is not None and (unknown := set(body) - known):
        raise ApiError(400, f"{min(unknown)}: unknown field; known: {', '.join(sorted(known))}", min(unknown))
    return body


@web.middleware
async def errors_as_answers(request: web.Request, handler: Any) -> web.StreamResponse:
    """Whatever a handler raises, as the error body of the API; what is not the client's fault is logged."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ApiError as error:
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        if "id" in request:
            headers["X-Request-Id"] = request["id"]
        return web.Response(body=error.body(), status=error.status, content_type=JSON, headers=headers)
    except web.HTTPException as error:
        plain = ApiError(error.status, f"{request.method} {request.path}: {error.reason}", code=str(error.status))
        return web.Response(body=plain.body(), status=error.status, content_type=JSON)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        log.error("internal error", cause=error, request_id=request.get("id"), method=request.method, path=request.path)
        internal = ApiError(500, "internal error of the gateway; see `prfaas logs gateway`", code="internal")
        return web.Response(body=internal.body(), status=500, content_type=JSON)


def check_finite(value: Any, field: str) -> None:
    """Raises ApiError unless `value` is a finite number, or missing."""
    if isinstance(value, bool) or not isinstance(value, int | float | None) or not math.isfinite(value or 0):
        raise ApiError(400, f"{field} = {value!r}: must be a finite number", field)
