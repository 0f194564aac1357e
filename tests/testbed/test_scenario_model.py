"""A scenario with a real model: what it may say, and what this machine must have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from testbed import scenario_model
from testbed.fleet import launch_spec
from testbed.launch.state import StateDir
from testbed.scenario import Scenario, ScenarioError, load
from testbed.simulate import simulate


def launched(scenario: Scenario, folder: Path) -> Any:
    return launch_spec(scenario, scenario.deployments[0], port=1, state=StateDir(folder / "state", create=True))


def test_every_worker_of_the_shipped_one_computes_with_the_same_model_on_a_core(tmp_path: Path) -> None:
    spec = launched(load("hybrid"), tmp_path)
    models = [one.config["model"] for one in spec.processes if one.role in ("prefill", "decode")]
    assert len(models) == 3
    assert {(one["preset"], one["seed"]) for one in models} == {("tiny", 1)}
    assert all(one["core"] is not None for one in models)


def test_timing_emulation_of_it_has_no_model(tmp_path: Path) -> None:
    spec = launched(load("hybrid", ["backend=timing"]), tmp_path)
    assert all(one.config["model"] is None for one in spec.processes if one.role in ("prefill", "decode"))


def test_it_is_simulated_with_its_profile_alone() -> None:
    result = simulate("hybrid", sets=["workload.duration_s=20"])
    assert result.summary["verdict"]["status"] == "valid"
    assert result.requests["kv_bytes"].min() > 0


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("scale.time_scale=10", "scale.time_scale = 10"),
        ("scale.byte_scale=0.5", "scale.byte_scale = 0.5"),
        ("model.preset=huge", "use one of tiny, small"),
        ("model.changes={layers: 0}", "layers"),
        ("model.changes={layers: many}", "layers"),
        ("model.changes={colour: 1}", "colour"),
        ("cache={block_tokens: 100}", "block_tokens = 100"),
    ],
)
def test_what_cannot_be_is_refused(setting: str, told: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        load("hybrid", ["cache_bytes=1e6", setting])
    assert told in str(refused.value)


def test_more_slots_than_the_model_decodes_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"decode\.slots to at most 8"):
        launched(load("hybrid", ["decode.slots=9"]), tmp_path)


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="more than 80% of this machine's memory"):
        launched(load("hybrid", ["transport.landing_bytes=1e13"]), tmp_path)


def test_without_torch_it_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        scenario_model.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    scenario = load("hybrid")
    with pytest.raises(ScenarioError, match=r"needs torch.*pip install"):
        launched(scenario, tmp_path)
    state = StateDir(tmp_path / "state", create=True)
    in_containers = launch_spec(scenario, scenario.deployments[0], port=1, state=state, from_image=True)
    assert [one.config["model"]["preset"] for one in in_containers.processes if one.role == "decode"] == ["tiny"]
