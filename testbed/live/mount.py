"""What the gateway mounts: the live page, its feed, its controls.

GET    /dashboard, /dashboard/{name}     the page
GET    /prfaas/live                      the feed (`feed`)
POST   /prfaas/link                      the link is another for a while (`asked.LinkStep`)
GET    /prfaas/faults                    the faults by hand that there are, and what may be asked
POST   /prfaas/faults                    one more (`asked.KINDS`)
DELETE /prfaas/faults, /prfaas/faults/N  all of them, or one, heal now
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from emulator.messages import Hinder
from testbed.json_http import json_object, json_response
from testbed.launch.state import StateDir
from testbed.live import asked
from testbed.live.access import check_reader, check_writer
from testbed.live.feed import Feed
from testbed.live.page import Page
from testbed.live.troubles import Troubles
from testbed.live.watch import Watch
from testbed.scenario import Scenario
from testbed.session import Session


class Live:
    """scenario: with one deployment. folder: the state directory. session: the present one. order(node, message): to a
    worker; False: it cannot be reached. late_s: the gateway's own lateness, p99, wall seconds."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        roles: dict[str, str],
        session: Callable[[], Session | None],
        order: Callable[[str, Hinder], bool],
        late_s: Callable[[], float],
    ) -> None:
        self._scenario, self._roles, self._session = scenario, roles, session
        self._troubles = Troubles(scenario, StateDir(folder), roles, order, self._tell)
        self._page = Page()
        self._feed = Feed(
            lambda: Watch(scenario, folder, self._present, self._troubles, late_s), scenario.deployments[0]
        )

    def add_to(self, app: web.Application) -> None:
        """Add the routes, and an end that goes with the application's."""
        app.add_routes(
            [
                web.get("/dashboard", self._page.get),
                web.get("/dashboard/{name}", self._page.get),
                web.get("/prfaas/live", self._feed.get),
                web.post("/prfaas/link", self._post_link),
                web.get("/prfaas/faults", self._get_faults),
                web.post("/prfaas/faults", self._post_fault),
                web.delete("/prfaas/faults", self._delete_faults),
                web.delete("/prfaas/faults/{id}", self._delete_fault),
            ]
        )
        app.on_shutdown.append(self._feed.close)
        app.on_shutdown.append(self._close_troubles)

    def session_began(self) -> None:
        """For the gateway: a load began or ended."""
        self._troubles.session_began()

    def _present(self) -> Session:
        session = self._session()
        assert session is not None
        return session

    def _tell(self, what: str, node: str, healed: bool) -> None:
        self._present().disturbed(what, node, healed=healed)

    async def _post_link(self, request: web.Request) -> web.Response:
        check_writer(request)
        step = asked.link_step(await json_object(request, None), self._scenario.scale)
        return json_response(self._troubles.described(await self._troubles.begin(step)))

    async def _get_faults(self, request: web.Request) -> web.Response:
        check_reader(request)
        return json_response({"faults": self._troubles.told(), "possible": self._troubles.possible()})

    async def _post_fault(self, request: web.Request) -> web.Response:
        check_writer(request)
        fault = asked.fault(await json_object(request, None), self._scenario.scale, self._roles)
        return json_response(self._troubles.described(await self._troubles.begin(fault)))

    async def _delete_faults(self, request: web.Request) -> web.Response:
        check_writer(request)
        return self._healing(self._troubles.heal_all())

    async def _delete_fault(self, request: web.Request) -> web.Response:
        check_writer(request)
        return self._healing([self._troubles.heal(request.match_info["id"])])

    def _healing(self, troubles: list[Any]) -> web.Response:
        return json_response({"healing": [one.id for one in troubles]})

    async def _close_troubles(self, app: web.Application) -> None:
        await self._troubles.close()
