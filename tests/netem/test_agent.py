"""The agent's configuration and its HTTP interface, with shapers that only remember. Real kernels: tests/wire."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from netem.agent import COUNTER_COLUMNS, MIN_STEP_S, Agent, AgentConfig, begin_afresh
from netem.agent_http import application
from netem.backend import Delays, choose
from netem.link import Impairment, LinkError, LinkState
from netem.plan import Command, plan
from netem.tc import Applied, ClassCounters, Counters


class FakeShaper:
    """Takes states as a kernel would; `broken` makes it refuse, by `refusal`."""

    def __init__(self) -> None:
        self.states: list[LinkState] = []
        self.netem_delays = False
        self.broken = False
        self.refusal: Exception = LinkError("interface w-pd: the kernel kept another state than asked")

    async def apply(self, state: LinkState, *, netem_delays: bool = True) -> Applied:
        if self.broken:
            raise self.refusal
        changed = not self.states or self.states[-1] != state
        self.states.append(state)
        self.netem_delays = netem_delays
        now_ns = time.monotonic_ns()
        return Applied(now_ns, now_ns, int(changed))

    async def read_back(self) -> tuple[Command, ...]:
        return plan(self.states[-1])

    async def counters(self) -> Counters:
        return Counters(123, ClassCounters(1000, 2, 3, 4, 1), ClassCounters(50, 1, 0, 0, 0), 0)


class FakeKeeper:
    """A delay line that serves once something is asked of it."""

    def __init__(self) -> None:
        self.wanted: dict[str, Impairment] = {}
        self.refusal: LinkError | None = None

    async def prepare(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def apply(self, wanted: dict[str, Impairment]) -> set[str]:
        changed = {way for way, asked in wanted.items() if self.wanted.get(way, Impairment()) != asked}
        self.wanted = wanted
        return changed if any(asked.does_something for asked in wanted.values()) else set()

    async def describe(self) -> dict[str, dict[str, Any]]:
        return {way: {"deaths": 0} for way, asked in self.wanted.items() if asked.does_something}


class FakeOutages:
    """A kernel that drops and takes down as asked."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"to_pd": None, "to_prfaas": None}

    async def apply(self, wanted: dict[str, Any]) -> set[str]:
        wanted = {way: None if kind == "stall" else kind for way, kind in wanted.items()}
        changed = {way for way in wanted if wanted[way] != self.now[way]}
        self.now = wanted
        return changed

    async def read_back(self) -> dict[str, Any]:
        return self.now


LINE = {"netem": "no such kind", "nfqueue": ""}
BOTH = {"netem": "", "nfqueue": ""}

VALID: dict[str, Any] = {
    "socket": "s",
    "interfaces": {"to_pd": "w-pd", "to_prfaas": "w-prfaas"},
    "state": {"rate_bps": 20e6},
    "applied_log": "a",
    "counters_csv": "c",
    "ready_file": "r",
}


@pytest.fixture
async def agent() -> Agent:
    config = AgentConfig(**VALID, sample_s=0.01)
    shapers: Any = {direction: FakeShaper() for direction in config.interfaces}
    keeper: Any = FakeKeeper()
    outages: Any = FakeOutages()
    made = Agent(config, shapers, keeper, outages, Delays(choose(LINE)), io.StringIO(), io.StringIO())
    await made.start()
    return made


@pytest.fixture
async def client(agent: Agent) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(application(agent))) as opened:
        yield opened


def log(agent: Agent) -> list[dict[str, Any]]:
    assert isinstance(agent.applied_log, io.StringIO)
    return [json.loads(line) for line in agent.applied_log.getvalue().splitlines()]


async def test_get_link_tells_asked_kept_applied_and_counters(client: TestClient[Any, Any]) -> None:
    answer = await (await client.get("/link")).json()
    assert answer["to_pd"]["asked"]["rate_bps"] == 20e6
    assert answer["to_pd"]["kept"]["1:10"]["rate_bps"] == 20e6
    assert answer["to_pd"]["applied"]["t_applied_ns"] >= answer["to_pd"]["applied"]["t_asked_ns"] > 0
    assert answer["to_prfaas"]["counters"]["kv"]["sent_bytes"] == 1000


async def test_put_link_lays_over_the_present_state(client: TestClient[Any, Any]) -> None:
    answer = await (await client.put("/link", json={"to_pd": {"rate_bps": 1e8}})).json()
    assert answer["to_pd"]["asked"]["rate_bps"] == 1e8
    assert answer["to_prfaas"]["asked"]["rate_bps"] == 20e6


async def test_a_put_that_cannot_be_had_changes_nothing(client: TestClient[Any, Any], agent: Agent) -> None:
    response = await client.put("/link", json={"to_pd": {"rate_bps": 100}})
    error = (await response.json())["error"]
    assert response.status == 400
    assert (error["field"], error["value"]) == ("to_pd.rate_bps", 100)
    assert error["remedy"] in error["message"]
    assert agent.states["to_pd"] == LinkState(20e6)


async def test_a_body_that_is_not_json_is_a_400(client: TestClient[Any, Any]) -> None:
    response = await client.put("/link", data="20mbit")
    assert response.status == 400
    assert (await response.json())["error"]["field"] == "body"


async def test_a_kernel_that_does_something_else_is_a_500(client: TestClient[Any, Any], agent: Agent) -> None:
    agent.shapers["to_pd"].broken = True  # type: ignore[attr-defined]
    response = await client.put("/link", json={"rate_bps": 1e8})
    assert response.status == 500
    assert "kept another state" in (await response.json())["error"]["message"]
    agent.shapers["to_pd"].broken = False  # type: ignore[attr-defined]
    assert (await client.put("/link", json={"rate_bps": 1e8})).status == 200


async def test_only_real_steps_are_logged_with_their_times(client: TestClient[Any, Any], agent: Agent) -> None:
    await client.put("/link", json={"rate_bps": 20e6})
    await client.put("/link", json={"to_pd": {"rate_bps": 3e7}})
    assert [(row["direction"], row["state"]["rate_bps"]) for row in log(agent)] == [
        ("to_pd", 20e6),
        ("to_prfaas", 20e6),
        ("to_pd", 3e7),
    ]
    assert all(row["t_applied_ns"] > 0 for row in log(agent))


async def test_delay_and_loss_are_asked_of_the_delay_line_per_direction(
    client: TestClient[Any, Any], agent: Agent
) -> None:
    response = await client.put("/link", json={"delay_s": 0.02, "to_pd": {"loss": 0.01}})
    assert response.status == 200
    assert (await response.json())["to_pd"]["asked"]["loss"] == 0.01
    wanted = agent.keeper.wanted  # type: ignore[attr-defined]
    assert {way: (asked.delay_s, asked.loss) for way, asked in wanted.items()} == {
        "to_pd": (0.02, 0.01),
        "to_prfaas": (0.02, 0.0),
    }


async def test_where_netem_delays_the_line_is_not_asked_until_there_is_jitter(
    client: TestClient[Any, Any], agent: Agent
) -> None:
    agent.delays = Delays(choose(BOTH))
    shapers: Any = agent.shapers
    answer = await (await client.put("/link", json={"delay_s": 0.02, "loss": 0.01})).json()
    assert answer["to_pd"]["delay_by"]["delay"] == "netem"
    assert not any(asked.does_something for asked in agent.keeper.wanted.values())  # type: ignore[attr-defined]
    assert all(shaper.netem_delays for shaper in shapers.values())
    answer = await (await client.put("/link", json={"to_pd": {"jitter_s": 0.001}})).json()
    assert answer["to_prfaas"]["delay_by"]["delay"] == "nfqueue"
    assert {asked.delay_s for asked in agent.keeper.wanted.values()} == {0.02}  # type: ignore[attr-defined]
    assert not any(shaper.netem_delays for shaper in shapers.values())


async def test_what_no_backend_can_do_changes_nothing(client: TestClient[Any, Any], agent: Agent) -> None:
    agent.delays = Delays(choose({"netem": "", "nfqueue": "no such target"}))
    response = await client.put("/link", json={"to_pd": {"delay_s": 0.02, "jitter_s": 0.001}})
    error = (await response.json())["error"]
    assert response.status == 400
    assert (error["field"], "modprobe" in error["remedy"]) == ("to_pd.jitter_s", True)
    assert agent.states["to_pd"] == LinkState(20e6)


async def test_the_delay_line_is_counted_once_it_serves(client: TestClient[Any, Any]) -> None:
    assert (await (await client.get("/counters")).json())["to_pd"]["delay_line"] is None
    await client.put("/link", json={"to_pd": {"delay_s": 0.02}})
    assert (await (await client.get("/counters")).json())["to_pd"]["delay_line"] == {"deaths": 0}


async def test_steps_keep_their_distance(client: TestClient[Any, Any], agent: Agent) -> None:
    await asyncio.gather(*(client.put("/link", json={"rate_bps": rate}) for rate in (3e7, 4e7, 5e7)))
    times = sorted(row["t_applied_ns"] for row in log(agent) if row["direction"] == "to_prfaas")
    assert all(later - before >= MIN_STEP_S * 1e9 * 0.95 for before, later in pairwise(times))


async def sampled(agent: Agent) -> list[dict[str, str]]:
    """What it samples in a moment."""
    task = asyncio.create_task(agent.sample())
    await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert isinstance(agent.counters_csv, io.StringIO)
    rows = list(csv.DictReader(agent.counters_csv.getvalue().splitlines()))
    assert tuple(rows[0]) == COUNTER_COLUMNS
    return rows


async def test_counters_are_sampled_for_both_directions(agent: Agent) -> None:
    rows = await sampled(agent)
    assert list(rows[0].values()) == ["123", "to_pd", "1000", "50", "3", "4", "20000000.0", "0", "", "", "", "", ""]
    assert {row["direction"] for row in rows} == {"to_pd", "to_prfaas"}
    assert len(rows) >= 4


async def test_samples_tell_of_outages_and_of_the_delay_line(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"held": 7, "lost": 2, "late_p99_s": 0.0004, "down": False, "passed": 90}

    async def describe(self: FakeKeeper) -> dict[str, dict[str, Any]]:
        return {"to_pd": line, "to_prfaas": {"down": True, "deaths": 1, "outage_s": 0.3}}

    monkeypatch.setattr(FakeKeeper, "describe", describe)
    agent.states["to_prfaas"] = LinkState(20e6, outage="blackhole")
    to_pd, to_prfaas = (await sampled(agent))[:2]
    assert [to_pd[key] for key in ("outage", "line_held", "line_lost", "line_late_s", "line_down")] == [
        "", "7", "2", "0.0004", "0",
    ]  # fmt: skip
    assert [to_prfaas[key] for key in ("rate_bps", "outage", "line_held", "line_down")] == ["0.0", "blackhole", "", "1"]


async def test_get_counters(client: TestClient[Any, Any]) -> None:
    answer = await (await client.get("/counters")).json()
    assert answer["to_pd"]["control"] == {
        "sent_bytes": 50,
        "packets": 1,
        "drops": 0,
        "backlog_bytes": 0,
        "backlog_packets": 0,
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"interfaces": {}}, "interfaces"),
        ({"interfaces": {"sideways": "w0"}}, "interfaces"),
        ({"sample_s": 0}, "sample_s"),
        ({"state": 20e6}, "state"),
        ({"typo": 1}, "takes no others"),
    ],
)
def test_a_wrong_configuration_names_the_file_and_the_field(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(VALID | change))
    with pytest.raises(LinkError, match=named) as refused:
        AgentConfig.load(path)
    assert str(path) in str(refused.value)


def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text("{")
    with pytest.raises(LinkError, match="no readable JSON"):
        AgentConfig.load(path)


def test_every_direction_needs_a_rate() -> None:
    config = AgentConfig(**(VALID | {"state": {"to_pd": {"rate_bps": 2e7}}}))
    with pytest.raises(LinkError, match="to_prfaas has no rate_bps"):
        config.states()


def test_the_initial_state_may_differ_by_direction() -> None:
    config = AgentConfig(**(VALID | {"state": {"rate_bps": 2e7, "mtu": 9000, "to_pd": {"rate_bps": 4e7}}}))
    assert config.states() == {"to_pd": LinkState(4e7, mtu=9000), "to_prfaas": LinkState(2e7, mtu=9000)}


@pytest.mark.parametrize(("header", "kept"), [(",".join(COUNTER_COLUMNS), True), ("t_ns,direction", False)])
def test_samples_of_other_columns_are_not_gone_on_with(header: str, kept: bool, tmp_path: Path) -> None:
    file = tmp_path / "counters.csv"
    file.write_text(f"{header}\n1,2\n")
    begin_afresh(file)
    assert file.exists() is kept
    begin_afresh(tmp_path / "none.csv")
