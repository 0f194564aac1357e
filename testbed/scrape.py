"""The metrics of everybody behind the gateway, through the gateway: one address is enough to scrape a whole testbed.

Workers answer on their site's address and the agent on its Unix socket, neither of which the host reaches; the gateway
reaches both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from testbed.json_http import json_response
from testbed.openai_api import ApiError

AGENT: Final = "agent"
TIMEOUT_S: Final = 5.0
MOST_BYTES: Final = 1 << 20


class Scraper:
    """model: what clients call the model. workers: name -> (host, metrics port). agent_sock: the agent's socket."""

    def __init__(self, model: str, workers: Mapping[str, tuple[str, int]], agent_sock: Path) -> None:
        self._model, self._workers, self._agent_sock = model, workers, agent_sock

    def targets(self, request: web.Request) -> list[dict[str, Any]]:
        """What Prometheus' http_sd takes: each process by its path at the address that was asked.

        The gateway, where a whole fleet looks like one server, has vLLM's label `model_name`, so that dashboards made
        for vLLM find it and count no worker a second time.
        """
        paths = {name: f"/metrics/{name}" for name in (AGENT, *self._workers)}
        gateway = {"__metrics_path__": "/metrics", "process": "gateway", "model_name": self._model}
        others = [{"__metrics_path__": path, "process": name} for name, path in paths.items()]
        return [{"targets": [request.host], "labels": labels} for labels in (gateway, *others)]

    async def get_targets(self, request: web.Request) -> web.Response:
        """GET /metrics/targets"""
        return json_response(self.targets(request))

    async def get_others(self, request: web.Request) -> web.Response:
        """GET /metrics/{name}"""
        name = request.match_info["name"]
        if name == AGENT:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(str(self._agent_sock))
            url = "http://agent/metrics"
        elif name in self._workers:
            connector = aiohttp.TCPConnector()
            host, port = self._workers[name]
            url = f"http://{host}:{port}/metrics"
        else:
            known = ", ".join([AGENT, *self._workers])
            raise ApiError(404, f"/metrics/{name}: no such process; there are {known}", code="not_found")
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, http.get(url) as answer:
                body = bytearray()
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise ApiError(502, f"{name} answers more than {MOST_BYTES} bytes", code="bad_gateway")
                kind = answer.headers.get("Content-Type", "text/plain")
                status = answer.status
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            told = f"{name} does not answer ({error or type(error).__name__}); see `prfaas status`"
            raise ApiError(502, told, code="bad_gateway") from None
        return web.Response(body=bytes(body), status=status, headers={"Content-Type": kind})
