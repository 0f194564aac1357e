"""What the gateway passes on of others' metrics; real ones: tests/wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from testbed import scrape
from testbed.json_http import errors_as_answers
from testbed.scrape import Scraper

Client = TestClient[web.Request, web.Application]
PARTS = [b"first 1\n", b"second 2\n", b"third 3\n"]


async def in_parts(request: web.Request) -> web.StreamResponse:
    """As what comes over a long way does: not at once."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain; version=1"})
    await response.prepare(request)
    for part in PARTS:
        await response.write(part)
        await asyncio.sleep(0.01)
    return response


@asynccontextmanager
async def gateway(tmp_path: Path) -> AsyncIterator[Client]:
    """One whose only worker answers in parts."""
    worker = web.Application()
    worker.router.add_get("/metrics", in_parts)
    async with TestServer(worker) as server:
        scraper = Scraper("prfaas", {"pd-p-0": ("127.0.0.1", server.port or 0)}, tmp_path / "agent.sock")
        app = web.Application(middlewares=[errors_as_answers])
        app.router.add_get("/metrics/targets", scraper.get_targets)
        app.router.add_get("/metrics/{name}", scraper.get_others)
        async with TestClient(TestServer(app)) as client:
            yield client


async def test_an_answer_that_comes_in_parts_is_passed_on_whole(tmp_path: Path) -> None:
    async with gateway(tmp_path) as client:
        answer = await client.get("/metrics/pd-p-0")
        assert (answer.status, await answer.read()) == (200, b"".join(PARTS))
        assert answer.headers["Content-Type"] == "text/plain; version=1"


async def test_one_without_an_end_is_refused_and_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MOST_BYTES", 10)
    async with gateway(tmp_path) as client:
        answer = await client.get("/metrics/pd-p-0")
        assert answer.status == 502
        assert "pd-p-0 answers more than 10 bytes" in (await answer.json())["error"]["message"]


async def test_targets_name_everybody_at_the_address_that_was_asked(tmp_path: Path) -> None:
    async with gateway(tmp_path) as client:
        targets = await (await client.get("/metrics/targets", headers={"Host": "seen.from:9"})).json()
    assert {address for one in targets for address in one["targets"]} == {"seen.from:9"}
    labels = {one["labels"].pop("process"): one["labels"] for one in targets}
    assert labels == {
        "gateway": {"__metrics_path__": "/metrics", "model_name": "prfaas"},
        "agent": {"__metrics_path__": "/metrics/agent"},
        "pd-p-0": {"__metrics_path__": "/metrics/pd-p-0"},
    }
