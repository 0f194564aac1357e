"""The link's steps during a load on the wire, against an agent that only remembers. Real ones: tests/wire."""

from __future__ import annotations

import time
from typing import Any

import pytest

from testbed.launch import client
from testbed.launch.state import StateDir, TestbedError
from testbed.linksteps import LinkSteps
from testbed.scenario import Scenario, load
from tests.testbed.test_phases import with_phases

WALL = 160e6
"""What the link has before the load, wall bits/s; the toy's model rates are 20 times as much."""


class FakeAgent:
    """Takes rates as the shaper's agent would; `broken` is how it fails."""

    def __init__(self) -> None:
        self.rates = {"to_pd": WALL, "to_prfaas": WALL / 2}
        self.asked: list[Any] = []
        self.broken: TestbedError | None = None

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/link"
        now_ns = time.monotonic_ns()
        return {
            one: {
                "interface": one,
                "asked": {"rate_bps": rate, "mtu": 1500, "delay_s": 0.0, "jitter_s": 0.0, "loss": 0.0},
                "kept": {},
                "applied": {"t_applied_ns": now_ns},
                "counters": {},
            }
            for one, rate in self.rates.items()
        }

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.broken is not None:
            raise self.broken
        self.asked.append(body)
        for one in self.rates:
            self.rates[one] = body.get(one, body)["rate_bps"]
        return self.get(path)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    fake = FakeAgent()
    monkeypatch.setattr(client, "agent", lambda state: fake)
    return fake


@pytest.fixture
def state(tmp_path: Any) -> StateDir:
    return StateDir(tmp_path)


def stepping(narrow_s: float = 1) -> Scenario:
    """The toy, five times as fast as the wall: 8 Gbps, from 1 s on 1 Gbps, `narrow_s` later 8 again."""
    return with_phases(
        {"name": "wide", "duration_s": 1},
        {"name": "narrow", "duration_s": narrow_s, "link_rate_bps": "1gbps"},
        {"name": "back", "duration_s": 1},
    )


def until_asked(agent: FakeAgent, times: int) -> None:
    deadline_s = time.monotonic() + 10
    while len(agent.asked) < times:
        assert time.monotonic() < deadline_s, f"the agent was asked {len(agent.asked)} times, not {times}"
        time.sleep(0.005)


def test_are_asked_for_when_their_phases_begin(agent: FakeAgent, state: StateDir) -> None:
    t0_ns = time.monotonic_ns()
    with LinkSteps(stepping(), state, t0_ns) as steps:
        until_asked(agent, 2)
    assert [asked["rate_bps"] for asked in agent.asked[:2]] == [pytest.approx(1e9 * 0.05), pytest.approx(8e9 * 0.05)]
    assert steps.faults == []
    for event, due_s in zip(steps.events[::2], (1, 2), strict=True):
        assert due_s <= event["t_s"] < due_s + 1  # model seconds: a fifth of one on the wall


def test_are_noted_down_a_direction_each_in_model_units(agent: FakeAgent, state: StateDir) -> None:
    with LinkSteps(stepping(), state, time.monotonic_ns() - 2 * 10**8) as steps:
        until_asked(agent, 2)
    first, second = (event for event in steps.events if event["direction"] == "to_prfaas")
    assert {event["kind"] for event in steps.events} == {"link"}
    assert (first["before"], first["after"], first["trigger"]) == (pytest.approx(WALL / 2 * 20), 1e9, "phase narrow")
    assert (second["before"], second["after"], second["trigger"]) == (1e9, 8e9, "phase back")


def test_leave_the_link_as_it_was_in_each_direction(agent: FakeAgent, state: StateDir) -> None:
    with LinkSteps(stepping(), state, time.monotonic_ns()):
        until_asked(agent, 1)
    assert agent.rates == {"to_pd": WALL, "to_prfaas": WALL / 2}


def test_leave_it_so_when_the_load_is_interrupted(agent: FakeAgent, state: StateDir) -> None:
    def interrupted() -> None:
        with LinkSteps(stepping(narrow_s=1000), state, time.monotonic_ns()):
            until_asked(agent, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert agent.rates == {"to_pd": WALL, "to_prfaas": WALL / 2}
    assert len(agent.asked) == 2  # the step that was due, and back: none that was to come


def test_that_cannot_be_had_are_told(agent: FakeAgent, state: StateDir) -> None:
    agent.broken = TestbedError("the kernel kept another state")
    with LinkSteps(stepping(), state, time.monotonic_ns() - 10**9) as steps:
        deadline_s = time.monotonic() + 10
        while len(steps.faults) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.005)
    assert steps.faults == [
        "the link did not step to 1 Gbps for phase narrow: the kernel kept another state",
        "the link did not step to 8 Gbps for phase back: the kernel kept another state",
        "the link was left at the rate of its last step: the kernel kept another state",
    ]
    assert steps.events == []


def test_of_a_link_that_stands_do_nothing(agent: FakeAgent, state: StateDir) -> None:
    with LinkSteps(load("toy"), state, time.monotonic_ns()) as steps:
        pass
    assert agent.asked == steps.events == []
