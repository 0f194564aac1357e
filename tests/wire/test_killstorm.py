"""A small storm, and a dead delay line under load. The whole one: `python -m tests.wire.killstorm --n 50`."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from testbed.launch import handover, namespaces
from tests.wire import host
from tests.wire.killstorm import MOMENTS, VICTIMS, Kill, Plan, Storm, main, plans

REFUSAL = namespaces.refusal()
pytestmark = [pytest.mark.wire, pytest.mark.measures, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]


def test_a_seed_names_the_plan_and_every_victim_and_moment_has_its_turn() -> None:
    rounds = list(islice(plans(seed=5), 60))
    assert rounds == list(islice(plans(seed=5), 60)) != list(islice(plans(seed=6), 60))
    assert {one.moment for one in rounds} == set(MOMENTS)
    assert {kill.victim for one in rounds for kill in one.kills} == set(VICTIMS)


def test_three_kills_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--n", "3", "--seed", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["killed"] >= 3


def test_a_delay_line_that_dies_under_load_is_started_again_and_the_run_says_so(tmp_path: Path) -> None:
    before = host.snapshot()
    found = Storm(tmp_path, 1, Plan("run", (Kill(5.5, "delay line", 0.0),))).run()
    assert found.wrong == []
    assert found.load.startswith("invalid: ")
    assert "the delay line died" in found.load
    assert host.differences(before, host.snapshot()) == []


def test_what_is_left_is_found(tmp_path: Path) -> None:
    """The storm's own eyes: a file, a temporary folder and a port of a testbed that are still there."""
    storm = Storm(tmp_path, 1, Plan("idle", ()))
    storm.state.mkdir()
    (storm.state / "agent.sock").touch()
    (tmp_path / "tmp" / "prfaas-load-1").mkdir()
    with handover.open_port(storm.port):
        storm._nothing_left()
    assert [one.split(" ")[1].rsplit("/", 1)[-1] for one in storm.round.wrong] == [
        "agent.sock",
        "prfaas-load-1",
        "port",
    ]


def test_a_host_that_was_touched_is_told() -> None:
    before = {"links": ["lo", "eth0"], "mounts": ["/"]}
    assert host.differences(before, before) == []
    after = {"links": ["lo", "w-pd"], "mounts": ["/"]}
    assert host.differences(before, after) == ["links: gone: eth0", "links: new: w-pd"]
