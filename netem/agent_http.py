"""The agent's HTTP interface: what may be asked of a link, on a Unix socket.

    GET  /link      {"to_pd": {"asked", "base", "layers", "kept", "delay_by", "outage_kept", "applied", "counters"}, ..}
    PUT  /link      the base state: a partial one as in `netem.link.update`; answers as GET
    POST /layers    a layer over it (`netem.layers.LayerSpec`); lives as long as the connection
    GET  /metrics   the same for Prometheus (`netem.metrics`)
    GET  /counters  {"to_pd": {"t_ns", "kv": {...}, "control": {...}, "direct_packets", "delay_line"}, ...}

What the link does (`asked`) is the base state under the layers there are, see `netem.layers.effective`. POST /layers
answers, as they happen, lines of JSON: for each step and direction {"layer", "direction", "at_s", "t_applied_ns",
"late_s", "before", "state"}, the link's whole states; for one that could not be had {"layer", "at_s", "error"}. When
the connection closes, because the client wants it or is dead, the layer is gone and the link is what remains.

`delay_by` is which mechanism has delay and loss (`netem.backend.Delays.describe`). With netem the drops of a class are
its losses too.

`delay_line` is null until delay, jitter or loss is first asked for, and then what `netem.keeper.Keeper.describe` says:
packets held, passed, lost and overflowed, how late they left, and how often the line died (`deaths`: not a valid run).

A state that cannot be had answers 400 {"error": {message, field, value, remedy}}; a kernel that did not do it, 500.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from netem.link import LinkError
from netem.metrics import CONTENT_TYPE, exposition
from netem.playing import play

if TYPE_CHECKING:
    from netem.agent import Agent


def application(agent: Agent) -> web.Application:
    """What the module's docstring lists.

    To be served with `handler_cancellation`: that is how a layer's connection is known to be closed.
    """

    async def get_link(_: web.Request) -> web.Response:
        return web.json_response(await agent.describe())

    async def put_link(request: web.Request) -> web.Response:
        await asyncio.shield(agent.put(await json_body(request, '{"rate_bps": 1e8}')))
        return web.json_response(await agent.describe())

    async def post_layers(request: web.Request) -> web.StreamResponse:
        layer = await agent.open(await json_body(request, '{"name": "dip", "t0_ns": 1, "steps": []}'))
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            async with aclosing(play(agent, layer)) as rows:
                async for row in rows:
                    await response.write(json.dumps(row).encode() + b"\n")
            return response
        finally:
            agent.close(layer)

    async def get_counters(_: web.Request) -> web.Response:
        return web.json_response(await agent.all_counters())

    async def get_metrics(_: web.Request) -> web.Response:
        text = exposition(agent.states, await agent.counters(), await agent.keeper.describe())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def refusals(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except LinkError as refused:
            error = {"message": str(refused), "field": refused.field, "value": refused.value, "remedy": refused.remedy}
            status = 400 if refused.field is not None else 500  # a wrong request, or a kernel that did not do it
            return web.json_response({"error": error}, status=status, dumps=lambda data: json.dumps(data, default=repr))

    app = web.Application(middlewares=[refusals])
    app.add_routes(
        [
            web.get("/link", get_link),
            web.put("/link", put_link),
            web.post("/layers", post_layers),
            web.get("/counters", get_counters),
            web.get("/metrics", get_metrics),
        ]
    )
    return app


async def json_body(request: web.Request, example: str) -> object:
    """The request's body. Raises LinkError where it is no JSON."""
    try:
        return await request.json()
    except ValueError as wrong:
        raise LinkError(f"body: not JSON ({wrong}); send e.g. {example}", "body") from wrong
