"""The link's steps during a load on the wire, against an agent that only remembers. Real ones: tests/wire."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.launch import client
from testbed.launch.state import StateDir, TestbedError
from testbed.link_schedule import link_changes
from testbed.linksteps import LinkSteps, wall_steps
from testbed.scenario import Scenario, load
from tests.testbed.test_phases import with_phases

WALL = 160e6
"""What the link has before the load, wall bits/s; the toy's model rates are 20 times as much."""


class FakeStream:
    """The rows of a layer's connection, for as long as nobody closes it."""

    def __init__(self, agent: FakeAgent, layer: dict[str, Any]) -> None:
        self._agent, self._layer = agent, layer
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def step(self, late_s: float = 0.001) -> None:
        """The next of the layer's steps is made, as far as the agent is not broken."""
        step = self._layer["steps"].pop(0)
        if self._agent.broken is not None:
            self._rows.put({"layer": "schedule", "at_s": step["at_s"], "error": self._agent.broken})
            return
        self.say(step["at_s"], step["state"], late_s)

    def say(self, at_s: float, said: dict[str, Any], late_s: float = 0.001) -> None:
        for way, before in self._agent.states.items():
            now = {**before, **said.get(way, said)}
            self._agent.states[way] = now
            applied_ns = self._layer["t0_ns"] + round((at_s + late_s) * 1e9)
            row = {"layer": "schedule", "direction": way, "at_s": at_s, "t_applied_ns": applied_ns}
            self._rows.put({**row, "late_s": late_s, "before": before, "state": now})

    def lose(self) -> None:
        self._rows.put(None)

    def close(self) -> None:
        self._agent.restore(self._layer["name"])
        self._rows.put(None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows.get, None)


class FakeAgent:
    """Takes layers as the shaper's agent would; `broken` is why it makes no step."""

    def __init__(self) -> None:
        self.base = {
            way: {"rate_bps": rate, "outage": None} for way, rate in (("to_pd", WALL), ("to_prfaas", WALL / 2))
        }
        self.states: dict[str, dict[str, Any]] = dict(self.base)
        self.layers: list[dict[str, Any]] = []
        self.playing: list[str] = []
        self.stream_: FakeStream | None = None
        self.broken: str | None = None
        self.gone = False

    def stream(self, path: str, body: dict[str, Any]) -> FakeStream:
        assert path == "/layers"
        if self.gone:
            raise TestbedError("no testbed is up")
        self.layers.append(json.loads(json.dumps(body)))
        self.playing.append(body["name"])
        self.stream_ = FakeStream(self, self.layers[-1])
        return self.stream_

    def restore(self, name: str) -> None:
        self.playing.remove(name)
        self.states = dict(self.base)

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/link"
        if self.gone:
            raise TestbedError("the agent is gone")
        return {way: {"layers": list(self.playing)} for way in self.states}

    @property
    def made(self) -> FakeStream:
        assert self.stream_ is not None
        return self.stream_


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    fake = FakeAgent()
    monkeypatch.setattr(client, "agent", lambda state: fake)
    return fake


@pytest.fixture
def state(tmp_path: Any) -> StateDir:
    return StateDir(tmp_path)


def stepping() -> Scenario:
    """The toy, five times as fast as the wall: 8 Gbps, from 1 s on 1 Gbps, a second later 8 again."""
    return with_phases(
        {"name": "wide", "duration_s": 1},
        {"name": "narrow", "duration_s": 1, "link_rate_bps": "1gbps"},
        {"name": "back", "duration_s": 1},
    )


def cut(kind: str) -> Scenario:
    """The toy, whose link is cut from 30 s on for 5."""
    outage = f"{{at_s: 30, duration_s: 5, kind: {kind}}}"
    schedule = f"{{kind: steps, steps: [[0, 8gbps], [20, 4gbps]], outages: [{outage}]}}"
    return load("toy", ["workload.duration_s=300", f"link.schedule={schedule}"])


def played(agent: FakeAgent, state: StateDir, scenario: Scenario, steps: int) -> LinkSteps:
    with LinkSteps(scenario, state, 10**9) as made:
        for _ in range(steps):
            agent.made.step()
    return made


def test_are_a_layer_in_wall_units(agent: FakeAgent, state: StateDir) -> None:
    played(agent, state, stepping(), 0)
    (layer,) = agent.layers
    assert (layer["name"], layer["t0_ns"], layer["token_bucket"]) == ("schedule", 10**9, None)
    assert layer["steps"] == [
        {"at_s": 0.2, "state": {"rate_bps": pytest.approx(1e9 * 0.05), "outage": None}},
        {"at_s": 0.4, "state": {"rate_bps": pytest.approx(8e9 * 0.05), "outage": None}},
    ]


def test_are_noted_down_a_direction_each_in_model_units_when_the_kernel_had_them(
    agent: FakeAgent, state: StateDir
) -> None:
    steps = played(agent, state, stepping(), 2)
    assert steps.faults == []
    first, second = (event for event in steps.events if event["direction"] == "to_prfaas")
    assert {event["kind"] for event in steps.events} == {"link"}
    assert [event["late_s"] for event in steps.events] == pytest.approx([0.001 * 5] * 4)  # model seconds, too
    assert (first["before"], first["after"], first["trigger"]) == (WALL / 2 * 20, 1e9, "phase narrow")
    assert (second["before"], second["after"], second["trigger"]) == (1e9, 8e9, "phase back")
    assert [event["t_s"] for event in (first, second)] == [pytest.approx(1.005), pytest.approx(2.005)]


@pytest.mark.parametrize("kind", ["stall", "blackhole", "down"])
def test_an_outage_keeps_its_kind_and_the_rate_below_it(agent: FakeAgent, state: StateDir, kind: str) -> None:
    steps = played(agent, state, cut(kind), 3)
    rate = {"rate_bps": pytest.approx(4e9 * 0.05)}
    assert [one["state"] for one in json.loads(json.dumps(asked(cut(kind))))] == [
        {**rate, "outage": None}, {**rate, "outage": kind}, {**rate, "outage": None}
    ]  # fmt: skip
    rows = [event for event in steps.events if event["direction"] == "to_pd"]
    assert [(row["before"], row["after"], row["trigger"]) for row in rows] == [
        (WALL * 20, 4e9, "schedule"), (4e9, 0, f"schedule: {kind}"), (0, 4e9, "schedule")
    ]  # fmt: skip


def asked(scenario: Scenario) -> list[dict[str, Any]]:
    return [{"at_s": at_s, "state": said} for at_s, said in wall_steps(link_changes(scenario), scenario.scale)]


def test_a_step_that_changes_nothing_is_no_event(agent: FakeAgent, state: StateDir) -> None:
    with LinkSteps(stepping(), state, 10**9) as steps:
        agent.made.say(0.2, {"rate_bps": WALL})
    assert [event["direction"] for event in steps.events] == ["to_prfaas"]


def test_a_token_bucket_is_in_wall_units_and_its_changes_are_events(agent: FakeAgent, state: StateDir) -> None:
    bucket = "{kind: token_bucket, peak_bps: 8gbps, base_bps: 400mbit, budget_bytes: 20e9}"
    with LinkSteps(load("toy", [f"link.schedule={bucket}"]), state, 10**9) as steps:
        agent.made.say(3.0, {"to_pd": {"rate_bps": 20e6}, "to_prfaas": {}})
    assert agent.layers[0]["token_bucket"] == {
        "peak_bps": pytest.approx(400e6), "base_bps": pytest.approx(20e6), "budget_bytes": pytest.approx(2e8),
        "resume_s": 0.2,
    }  # fmt: skip
    (event,) = steps.events
    assert (event["direction"], event["after"], event["trigger"]) == ("to_pd", 4e8, "token bucket")


def test_leave_the_link_as_it_was_when_the_load_is_interrupted(agent: FakeAgent, state: StateDir) -> None:
    def interrupted() -> None:
        with LinkSteps(stepping(), state, 10**9):
            agent.made.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert agent.states == agent.base


def test_that_cannot_be_had_are_told(agent: FakeAgent, state: StateDir) -> None:
    agent.broken = "the kernel kept another state"
    steps = played(agent, state, stepping(), 2)
    assert steps.faults == [
        "schedule: the link's step at 0.2 wall s was not made: the kernel kept another state",
        "schedule: the link's step at 0.4 wall s was not made: the kernel kept another state",
    ]
    assert steps.events == []


def test_an_agent_that_is_lost_is_told(agent: FakeAgent, state: StateDir) -> None:
    with LinkSteps(stepping(), state, 10**9) as steps:
        agent.made.lose()
        agent.gone = True
        deadline_s = time.monotonic() + 10
        while not steps.lost and time.monotonic() < deadline_s:
            time.sleep(0.005)
    assert [fault.partition(";")[0] for fault in steps.faults] == [
        "schedule: the link's agent was lost",
        "the link was left as schedule had it: the agent is gone",
    ]


def test_an_agent_that_is_gone_refuses_a_link_that_varies(agent: FakeAgent, state: StateDir) -> None:
    agent.gone = True
    with pytest.raises(TestbedError, match="no testbed is up"), LinkSteps(stepping(), state, 10**9):
        pass


def test_of_a_link_that_stands_do_nothing(agent: FakeAgent, state: StateDir) -> None:
    with LinkSteps(load("toy"), state, 10**9) as steps:
        pass
    assert agent.layers == steps.events == []
