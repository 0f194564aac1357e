"""The live page as it is served: its files, who may ask, the feed. In a browser: tests/wire/test_dashboard.py."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from testbed.json_http import errors_as_answers
from testbed.live import feed
from testbed.live.mount import Live
from tests.testbed.live_session import ROLES, SCENARIO, LongAway, Played, played

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "testbed/live/assets"
HEADERS = {"X-Prfaas": "1"}
SLOW = {"kind": "slow_worker", "node": "pd-d-0", "duration_s": 36000}


@dataclass
class Served:
    """A gateway's live part. `fleet` may be replaced: another session."""

    client: TestClient[web.Request, web.Application]
    live: Live
    fleet: Played

    @asynccontextmanager
    async def watching(self, query: str = "") -> AsyncIterator[Watcher]:
        async with self.client.get(f"/prfaas/live{query}") as answer:
            assert answer.status == 200, await answer.text()
            yield Watcher(answer)


class Watcher:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self, kind: str) -> dict[str, Any]:
        """The next event's data; it has to be of that kind."""
        name = (await self._answer.content.readline()).decode().strip()
        data = (await self._answer.content.readline()).decode().removeprefix("data: ")
        assert await self._answer.content.readline() == b"\n"
        assert name == f"event: {kind}"
        told: dict[str, Any] = json.loads(data)
        return told


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with played(tmp_path) as fleet:
        here: list[Served] = []
        live = Live(SCENARIO, tmp_path, ROLES, lambda: here[0].fleet.session, lambda node, order: True, lambda: 0.001)
        app = web.Application(middlewares=[errors_as_answers])
        live.add_to(app)
        async with TestClient(TestServer(app)) as client:
            here.append(Served(client, live, fleet))
            yield here[0]


class TestThePage:
    def test_every_file_of_it_is_in_a_wheel(self) -> None:
        told = tomllib.loads((ROOT / "pyproject.toml").read_text())
        globs = told["tool"]["setuptools"]["package-data"]["testbed"]
        for path in (path for path in ASSETS.rglob("*") if path.is_file()):
            name = str(path.relative_to(ROOT / "testbed"))
            assert any(fnmatch.fnmatch(name, glob) for glob in globs), name

    async def test_it_asks_for_nothing_that_is_not_there(self, served: Served) -> None:
        seen, left = set(), ["/dashboard"]
        while left:
            path = left.pop()
            seen.add(path)
            answer = await served.client.get(path)
            text = await answer.text()
            assert answer.status == 200, path
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            if "vendor" not in path and "uPlot" not in path:
                assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
            found = re.findall(r'(?:src|href)="(/dashboard[^"]*)"', text)
            found += [f"/dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
            left += [one for one in found if one not in seen]
        assert {"/dashboard/charts.js", "/dashboard/uPlot.iife.min.js", "/dashboard/uPlot.LICENSE"} <= seen

    async def test_a_browser_that_has_a_file_is_not_sent_it_again(self, served: Served) -> None:
        first = await served.client.get("/dashboard")
        again = await served.client.get("/dashboard", headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status, await again.read()) == (304, b"")

    async def test_no_other_file_is_served(self, served: Served) -> None:
        for name in ("page.py", "..%2fpage.py", "vendor.sh"):
            assert (await served.client.get(f"/dashboard/{name}")).status == 404


class TestWhoMayAsk:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "127.1.2.3"])
    async def test_whoever_asks_for_this_machine(self, served: Served, host: str) -> None:
        assert (await served.client.get("/dashboard", headers={"Host": host})).status == 200

    @pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "10.77.2.1", "[::1", ""])
    @pytest.mark.parametrize("path", ["/dashboard", "/prfaas/live", "/prfaas/faults"])
    async def test_but_not_under_another_name(self, served: Served, host: str, path: str) -> None:
        answer = await served.client.get(path, headers={"Host": host})
        assert answer.status == 403
        assert "localhost" in (await answer.json())["error"]["message"]

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/prfaas/link"),
            ("POST", "/prfaas/faults"),
            ("DELETE", "/prfaas/faults"),
            ("DELETE", "/prfaas/faults/page-1"),
        ],
    )
    async def test_a_form_of_another_page_can_do_nothing(self, served: Served, method: str, path: str) -> None:
        answer = await served.client.request(method, path, json=SLOW)
        assert answer.status == 403
        assert "X-Prfaas: missing" in (await answer.json())["error"]["message"]
        foreign = {**HEADERS, "Host": "evil.example"}
        assert (await served.client.request(method, path, json=SLOW, headers=foreign)).status == 403


class TestTheControls:
    async def test_a_fault_is_made_told_and_healed(self, served: Served) -> None:
        answer = await served.client.post("/prfaas/faults", json=SLOW, headers=HEADERS)
        made = await answer.json()
        assert (answer.status, made["what"], made["state"]) == (200, "pd-d-0 4 times slower", "holds")
        there = (await (await served.client.get("/prfaas/faults")).json())["faults"]
        assert [one["id"] for one in there] == [made["id"]]
        healing = await served.client.delete(f"/prfaas/faults/{made['id']}", headers=HEADERS)
        assert (await healing.json()) == {"healing": [made["id"]]}
        changes = [one for one in served.fleet.session.control.changes if one.kind == "fault"]
        assert changes[0].after == f"pd-d-0 4 times slower ({made['id']}, 3.6e+04 s)"

    async def test_what_is_out_of_reach_is_not_offered(self, served: Served, tmp_path: Path) -> None:
        possible = (await (await served.client.get("/prfaas/faults")).json())["possible"]
        assert not possible["link"]
        assert "killed_worker" not in possible["kinds"]
        (tmp_path / "supervisor.sock").touch()
        assert "killed_worker" in (await (await served.client.get("/prfaas/faults")).json())["possible"]["kinds"]

    async def test_a_link_without_an_agent_says_so(self, served: Served) -> None:
        body = {"rate_bps": 4e9, "duration_s": 60}
        answer = await served.client.post("/prfaas/link", json=body, headers=HEADERS)
        assert answer.status == 409
        assert "no testbed is up" in (await answer.json())["error"]["message"]


class TestTheFeed:
    async def test_who_is_who_comes_first_and_then_what_is(self, served: Served) -> None:
        served.fleet.first_token("a", 5000, ttft_s=4.0, cached=2500)
        async with served.watching() as watcher:
            hello = await watcher.next("hello")
            now = await watcher.next("now")
        assert (hello["scenario"], hello["scale"]) == ("smoke", {"time_scale": 10.0, "byte_scale": 0.001})
        assert now["session"] == {
            "id": "20260101-000000-abcdef", "load": True, "policy": "long-away", "in_flight": 1, "ended": {}
        }  # fmt: skip
        assert [one["name"] for one in now["nodes"]] == list(ROLES)
        assert (now["nodes"][2]["decoding_requests"], now["stages"]["decoding"]) == (1, 1)
        assert now["scheduler"]["threshold_tokens"] == 1000.0
        assert (now["recent"]["offloaded"], now["recent"]["cached"]) == (1.0, 0.5)
        assert now["recent"]["reasons"] == [{"reason": "long", "site": "prfaas", "requests": 1}]

    async def test_what_happens_is_told_once(self, served: Served) -> None:
        async with served.watching() as watcher:
            await watcher.next("hello")
            served.fleet.session.disturbed("outage (stall)", "", healed=False)
            told = await watcher.next("now")
            assert [(one["kind"], one["text"], one["why"]) for one in told["events"]] == [
                ("fault", "outage (stall)", "by hand")
            ]
            assert (await watcher.next("now"))["events"] == []

    async def test_the_policy_is_the_one_in_charge(self, served: Served) -> None:
        served.fleet.session.set_policy(LongAway(), "another", {})
        async with served.watching() as watcher:
            await watcher.next("hello")
            assert (await watcher.next("now"))["session"]["policy"] == "another"

    async def test_whoever_comes_later_is_told_what_has_been(self, served: Served) -> None:
        served.fleet.session.disturbed("outage (stall)", "", healed=False)
        async with served.watching() as watcher:
            assert [one["text"] for one in (await watcher.next("hello"))["events"]] == ["outage (stall)"]
            assert (await watcher.next("now"))["events"] == []

    async def test_another_session_is_an_event_and_the_last_ones_changes_are_not_lost(
        self, served: Served, tmp_path: Path
    ) -> None:
        async with served.watching() as watcher:
            await watcher.next("hello")
            first = served.fleet
            first.session.disturbed("outage (stall)", "", healed=False)
            served.fleet = Played(tmp_path, "adhoc-2", first.session)
            told = await watcher.next("now")
            served.fleet.session.close()
        assert [one["kind"] for one in told["events"]] == ["fault", "load"]
        assert (told["session"]["id"], told["session"]["load"]) == ("adhoc-2", False)

    async def test_all_watch_the_same_looks_and_nobody_is_looked_for(self, served: Served) -> None:
        assert served.live._feed._watch is None
        async with served.watching() as one, served.watching() as other:
            await one.next("hello")
            await other.next("hello")
            await one.next("now")  # the look at the other's coming
            assert (await one.next("now"))["t_s"] == (await other.next("now"))["t_s"]
        async with served.watching() as one:
            await one.next("hello")
        for _ in range(200):
            if served.live._feed._watch is None:
                break
            await served.client.get("/prfaas/faults")
        assert served.live._feed._watch is None

    async def test_the_end_is_told(self, served: Served) -> None:
        async with served.watching() as watcher:
            await watcher.next("hello")
            await served.live._feed.close(served.client.app)  # type: ignore[arg-type]
            assert await watcher.next("bye") == {}

    async def test_too_many_are_refused(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feed, "MOST_WATCHERS", 1)
        async with served.watching() as watcher:
            await watcher.next("hello")
            answer = await served.client.get("/prfaas/live")
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")

    @pytest.mark.parametrize("since", ["yesterday", "nan", "inf"])
    async def test_a_time_that_is_none_is_refused(self, served: Served, since: str) -> None:
        answer = await served.client.get(f"/prfaas/live?since={since}")
        assert answer.status == 400
        assert f"since = '{since}'" in (await answer.json())["error"]["message"]
