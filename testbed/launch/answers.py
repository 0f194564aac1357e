"""How the supervisor's control socket takes its requests and tells what is wrong with them."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from testbed.launch.state import TestbedError


@web.middleware
async def errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Middleware: whatever is wrong is answered as {"error": text}."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
    except ValueError as error:
        return web.json_response({"error": str(error)}, status=400)


async def body_of(request: web.Request, keys: set[str]) -> dict[str, Any]:
    """The request's JSON object, which has exactly these keys. Raises TestbedError."""
    try:
        body = await request.json()
    except ValueError:
        raise TestbedError(f"{request.path}: the body is not JSON") from None
    if not isinstance(body, dict) or set(body) != keys:
        raise TestbedError(f"{request.path}: the body is an object with {', '.join(sorted(keys))}")
    return body
