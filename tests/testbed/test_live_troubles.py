"""Faults by hand: brought about, on record, and healed, however they end. On the wire: tests/wire/test_dashboard.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from emulator.messages import Hinder
from testbed.chaos.faults import (
    FrozenWorker,
    KilledWorker,
    LandingFull,
    LostSite,
    Outage,
    SlowWorker,
)
from testbed.launch.state import StateDir, TestbedError
from testbed.live import troubles as module
from testbed.live.asked import LinkStep
from testbed.live.troubles import Troubles
from testbed.openai_api import ApiError
from tests.testbed.live_session import ROLES, SCENARIO

LONG_S = 36000.0  # model seconds; an hour
SHORT_S = 1.0  # model seconds; a tenth of a wall second


class Desk:
    """Troubles, with everything they turn to written down. refusing: what the outside refuses.
    frail: a worker that takes no signal. dead: those that are."""

    def __init__(self, folder: Path) -> None:
        self.orders: list[tuple[str, Hinder]] = []
        self.told: list[tuple[str, str, bool]] = []
        self.layers: list[Any] = []
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.refusing = self.frail = ""
        self.dead: set[str] = set()
        self.troubles = Troubles(SCENARIO, StateDir(folder), ROLES, self._order, self._tell)
        self.troubles._supervisor = self  # type: ignore[assignment]

    def _order(self, node: str, message: Hinder) -> bool:
        self.orders.append((node, message))
        return not self.refusing

    def _tell(self, what: str, node: str, healed: bool) -> None:
        self.told.append((what, node, healed))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.posted.append((path, body))
        if self.refusing:
            raise TestbedError(self.refusing)
        if body["name"] in {self.frail, *self.dead} and path == "/signal":
            raise TestbedError(f"{body['name']} cannot be signalled")
        if body.get("signal") == "KILL":
            self.dead.add(body["name"])
        return {}

    async def get(self, path: str) -> dict[str, Any]:
        names = (*ROLES, "prfaas-1")
        return {"processes": [{"name": name, "state": "dead" if name in self.dead else "running"} for name in names]}

    async def gone(self) -> None:
        """Until no fault is left."""
        async with asyncio.timeout(20):
            while self.troubles.told():
                await asyncio.sleep(0.01)


@pytest.fixture
async def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    made = Desk(tmp_path)

    class Layer:
        """As a LinkLayer, without an agent."""

        faults: Sequence[str] = ()

        def __init__(self, state: StateDir, name: str, t0_ns: int, steps: Any) -> None:
            self.name, self.steps, self.open = name, steps, False

        def __enter__(self) -> Layer:
            if made.refusing:
                raise TestbedError(made.refusing)
            self.open = True
            made.layers.append(self)
            return self

        def __exit__(self, *exc: object) -> None:
            self.open = False

    monkeypatch.setattr(module, "LinkLayer", Layer)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    yield made
    await made.troubles.close()


async def test_a_step_of_the_link_is_a_layer_with_its_end_and_both_are_on_record(desk: Desk) -> None:
    one = await desk.troubles.begin(LinkStep(at_s=0.0, duration_s=SHORT_S, rate_bps=4e9, delay_s=0.5))
    (layer,) = desk.layers
    assert (layer.name, layer.steps) == ("page-1", [(0.0, {"rate_bps": 4e7, "delay_s": 0.05}), (0.1, {})])
    assert (one.what, layer.open) == ("link: 4 Gbps, delay 500 ms", True)
    await desk.gone()
    assert not layer.open
    said = "link: 4 Gbps, delay 500 ms (page-1"
    assert desk.told == [(f"{said}, 1 s)", "", False), (f"{said})", "", True)]


async def test_a_step_of_one_direction_says_nothing_of_the_other(desk: Desk) -> None:
    await desk.troubles.begin(LinkStep(at_s=0.0, duration_s=LONG_S, direction="to_pd", rate_bps=4e9))
    assert desk.layers[0].steps[0] == (0.0, {"to_pd": {"rate_bps": 4e7}})


async def test_an_outage_is_healed_by_a_button(desk: Desk) -> None:
    one = await desk.troubles.begin(Outage(at_s=0.0, duration_s=LONG_S, how="stall"))
    (told,) = desk.troubles.told()
    assert (told["what"], told["state"]) == ("outage (stall)", "holds")
    assert 0 < told["heals_in_s"] <= LONG_S
    desk.troubles.heal(one.id)
    await desk.gone()
    assert not desk.layers[0].open


async def test_what_the_agent_refuses_is_not_there(desk: Desk) -> None:
    desk.refusing = "no such rate"
    with pytest.raises(ApiError, match=r"link: 4 Gbps: no such rate") as refused:
        await desk.troubles.begin(LinkStep(at_s=0.0, duration_s=LONG_S, rate_bps=4e9))
    assert (refused.value.status, desk.troubles.told(), desk.told) == (409, [], [])


async def test_faults_of_one_worker_are_one_order_and_each_heals_by_itself(desk: Desk) -> None:
    room = SCENARIO.transport.landing_bytes
    slow = await desk.troubles.begin(SlowWorker(at_s=0.0, duration_s=LONG_S, node="pd-d-0", factor=4.0))
    await desk.troubles.begin(LandingFull(at_s=0.0, duration_s=LONG_S, node="pd-d-0", fraction=0.5))
    await desk.troubles.begin(SlowWorker(at_s=0.0, duration_s=LONG_S, node="pd-p-0", factor=2.0))
    desk.troubles.heal(slow.id)
    async with asyncio.timeout(20):
        while len(desk.troubles.told()) > 2:
            await asyncio.sleep(0.01)
    desk.troubles.heal_all()
    await desk.gone()
    assert [order for node, order in desk.orders if node == "pd-d-0"] == [
        Hinder(4.0, 0), Hinder(4.0, room // 2), Hinder(1.0, room // 2), Hinder()
    ]  # fmt: skip
    assert [order for node, order in desk.orders if node == "pd-p-0"] == [Hinder(2.0), Hinder()]


async def test_a_held_worker_goes_on(desk: Desk) -> None:
    await desk.troubles.begin(FrozenWorker(at_s=0.0, duration_s=SHORT_S, node="pd-d-0"))
    await desk.gone()
    assert desk.posted == [("/signal", {"name": "pd-d-0", "signal": name}) for name in ("STOP", "CONT")]


async def test_a_killed_worker_is_started_again(desk: Desk) -> None:
    await desk.troubles.begin(KilledWorker(at_s=0.0, duration_s=SHORT_S, node="pd-d-0"))
    await desk.gone()
    assert desk.posted == [("/signal", {"name": "pd-d-0", "signal": "KILL"}), ("/restart", {"name": "pd-d-0"})]


async def test_the_lost_site_is_its_workers_and_no_others(desk: Desk) -> None:
    await desk.troubles.begin(LostSite(at_s=0.0, duration_s=LONG_S))
    assert desk.posted == [("/signal", {"name": "prfaas-0", "signal": "KILL"})]


async def test_a_site_with_a_dead_worker_is_not_lost_by_halves(desk: Desk) -> None:
    desk.troubles._roles = {**ROLES, "prfaas-1": "prefill"}
    desk.dead = {"prfaas-1"}
    with pytest.raises(ApiError, match=r"prfaas-1 is dead already"):
        await desk.troubles.begin(LostSite(at_s=0.0, duration_s=LONG_S, how="frozen"))
    assert desk.posted == []


@pytest.mark.parametrize(
    ("how", "undone"),
    [("frozen", ("/signal", {"name": "prfaas-0", "signal": "CONT"})), ("killed", ("/restart", {"name": "prfaas-0"}))],
)
async def test_a_site_that_cannot_be_lost_whole_is_as_it_was(
    desk: Desk, how: Literal["frozen", "killed"], undone: tuple[str, dict[str, str]]
) -> None:
    desk.troubles._roles = {**ROLES, "prfaas-1": "prefill"}
    desk.frail = "prfaas-1"
    with pytest.raises(ApiError, match="prfaas-1 cannot be signalled"):
        await desk.troubles.begin(LostSite(at_s=0.0, duration_s=LONG_S, how=how))
    assert undone in desk.posted
    assert desk.troubles.told() == []


async def test_who_was_ended_while_frozen_is_not_held_any_more(desk: Desk) -> None:
    await desk.troubles.begin(FrozenWorker(at_s=0.0, duration_s=SHORT_S, node="pd-d-0"))
    desk.dead = {"pd-d-0"}
    await desk.gone()
    assert len(desk.posted) == 1


async def test_a_worker_is_taken_away_once_only(desk: Desk) -> None:
    first = await desk.troubles.begin(LostSite(at_s=0.0, duration_s=LONG_S))
    with pytest.raises(ApiError, match=rf"prfaas-0 is lost_site already \({first.id}\); heal it first"):
        await desk.troubles.begin(FrozenWorker(at_s=0.0, duration_s=LONG_S, node="prfaas-0"))


async def test_there_is_a_bound_on_how_many(desk: Desk) -> None:
    for _ in range(module.MOST):
        await desk.troubles.begin(Outage(at_s=0.0, duration_s=LONG_S))
    with pytest.raises(ApiError, match="16 faults are there already; heal one first"):
        await desk.troubles.begin(Outage(at_s=0.0, duration_s=LONG_S))


async def test_what_cannot_be_healed_says_so_and_is_tried_until_it_is(desk: Desk) -> None:
    await desk.troubles.begin(FrozenWorker(at_s=0.0, duration_s=SHORT_S, node="pd-d-0"))
    desk.refusing = "the supervisor does not answer"
    async with asyncio.timeout(20):
        while (told := desk.troubles.told()[0])["state"] != "stuck":
            await asyncio.sleep(0.01)
    assert (told["why"], told["heals_in_s"]) == ("the supervisor does not answer", None)
    assert not desk.told[-1][2]
    desk.refusing = ""
    await desk.gone()
    assert desk.told[-1][2]


async def test_whoever_asked_may_leave_and_it_still_heals(desk: Desk) -> None:
    asking = asyncio.create_task(desk.troubles.begin(Outage(at_s=0.0, duration_s=SHORT_S)))
    await asyncio.sleep(0)
    asking.cancel()
    await desk.gone()
    assert [healed for _, _, healed in desk.told] == [False, True]
    assert not desk.layers[0].open


async def test_a_new_session_knows_what_goes_on_and_forgets_what_its_workers_forgot(desk: Desk) -> None:
    await desk.troubles.begin(Outage(at_s=0.0, duration_s=LONG_S))
    await desk.troubles.begin(SlowWorker(at_s=0.0, duration_s=LONG_S, node="pd-d-0"))
    desk.told.clear()
    desk.troubles.session_began()
    async with asyncio.timeout(20):
        while len(desk.troubles.told()) > 1:
            await asyncio.sleep(0.01)
    assert desk.told == [("outage (blackhole) (page-1, since before)", "", False)]


async def test_one_that_is_not_there_cannot_be_healed(desk: Desk) -> None:
    with pytest.raises(ApiError, match="no fault 'page-7'; there are: none") as refused:
        desk.troubles.heal("page-7")
    assert refused.value.status == 404
