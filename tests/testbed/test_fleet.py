"""From a scenario to processes: who runs where, with which ports, peers and units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator import flows
from emulator.worker import Config as WorkerConfig
from netem.agent import AgentConfig
from netem.plan import FLOW_PORTS, PROBE_FLOWS
from netem.topology import ADDRESSES
from testbed.fleet import launch_spec, link_rate_bps, link_state
from testbed.gateway import Config as GatewayConfig
from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir
from testbed.scenario import Scenario, ScenarioError, load


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path, create=True)


def spec_of(state: StateDir, scenario: Scenario | None = None, deployment: str | None = None) -> LaunchSpec:
    scenario = scenario or load("toy")
    return launch_spec(scenario, scenario.deployment(deployment), port=8123, state=state)


def config(spec: LaunchSpec, name: str) -> dict[str, Any]:
    found = next(process for process in spec.processes if process.name == name).config
    assert found is not None
    return dict(found)


def as_read_by(kind: Any, data: dict[str, Any]) -> Any:
    """The configuration as its process will decode it."""
    return msgspec.json.decode(json.dumps(data).encode(), type=kind)


class TestTheProcesses:
    def test_are_the_link_then_decode_then_prefill_then_the_gateway(self, state: StateDir) -> None:
        stages = {process.name: process.stage for process in spec_of(state).processes}
        assert stages == {
            "agent": 0, "pd-d-0": 1, "pd-d-1": 1, "prfaas-0": 2, "prfaas-1": 2, "pd-p-0": 2, "gateway": 3,
        }  # fmt: skip

    def test_are_in_their_sites(self, state: StateDir) -> None:
        sites = {process.name: process.site for process in spec_of(state).processes}
        assert sites["agent"] == "wan"
        assert {sites[name] for name in ("prfaas-0", "prfaas-1")} == {"prfaas"}
        assert {sites[name] for name in ("pd-p-0", "pd-d-0", "pd-d-1", "gateway")} == {"pd"}

    def test_only_the_gateway_listens_for_the_host(self, state: StateDir) -> None:
        spec = spec_of(state)
        assert [process.name for process in spec.processes if process.listens] == ["gateway"]
        assert spec.port == 8123

    def test_can_read_their_configurations(self, state: StateDir) -> None:
        spec = spec_of(state)
        for process in spec.processes:
            kind: Any = {"agent": AgentConfig, "gateway": GatewayConfig}.get(process.name, WorkerConfig)
            if kind is AgentConfig:
                continue
            as_read_by(kind, config(spec, process.name))

    @pytest.mark.parametrize("name", ["prfaas-pd", "homogeneous", "naive"])
    def test_are_as_many_as_the_fleet_says(self, state: StateDir, name: str) -> None:
        scenario = load("paper")
        fleet = scenario.deployment(name).fleet
        workers = [p.name for p in spec_of(state, scenario, name).processes if p.name not in ("agent", "gateway")]
        assert len(workers) == fleet.n_prfaas + fleet.n_p + fleet.n_d


class TestPortsAndPeers:
    def test_every_worker_has_ports_of_its_own_within_the_contracts_ranges(self, state: StateDir) -> None:
        spec = spec_of(state, load("toy", ["deployments.0.fleet={n_prfaas: 20, n_p: 14, n_d: 30}"]))
        workers = [config(spec, process.name) for process in spec.processes if process.name not in ("agent", "gateway")]
        control, data = [one["control_port"] for one in workers], [one["data_port"] for one in workers]
        scraped = [one["metrics_port"] for one in workers]
        assert len(set(control)) == len(set(data)) == len(set(scraped)) == 64
        assert all(7168 <= port <= 7231 for port in control)
        assert all(7232 <= port <= 7295 for port in scraped)
        assert all(7296 <= port <= 7423 for port in data)

    def test_a_fleet_with_more_workers_than_there_are_ports_is_refused(self, state: StateDir) -> None:
        with pytest.raises(ScenarioError, match="65 instances; this machine's wire has ports for 64"):
            spec_of(state, load("toy", ["deployments.0.fleet={n_prfaas: 20, n_p: 15, n_d: 30}"]))

    def test_workers_listen_at_their_sites_address(self, state: StateDir) -> None:
        spec = spec_of(state)
        assert config(spec, "prfaas-0")["host"] == ADDRESSES["prfaas"] == "10.77.1.1"
        assert config(spec, "pd-d-0")["host"] == ADDRESSES["pd"] == "10.77.2.1"

    def test_a_worker_knows_where_those_listen_that_it_may_exchange_kv_with(self, state: StateDir) -> None:
        """Any pd node may be converted; without a cache two prfaas nodes never have anything for each other."""
        spec = spec_of(state)
        assert set(config(spec, "prfaas-0")["peers"]) == {"pd-p-0", "pd-d-0", "pd-d-1"}
        assert set(config(spec, "pd-d-0")["peers"]) == {"prfaas-0", "prfaas-1", "pd-p-0", "pd-d-1"}
        for name, peer in config(spec, "pd-p-0")["peers"].items():
            worker = config(spec, name)
            listens = {key: worker[key] for key in ("host", "control_port", "data_port", "role")}
            assert peer == {**listens, "first_flow": None}

    def test_with_a_cache_prfaas_nodes_fetch_from_each_other_too(self, state: StateDir) -> None:
        spec = spec_of(state, load("toy", ["cache_bytes=1e9"]))
        assert set(config(spec, "prfaas-0")["peers"]) == {"prfaas-1", "pd-p-0", "pd-d-0", "pd-d-1"}

    @pytest.mark.parametrize(("sets", "pairs"), [([], 9), (["cache_bytes=1e9"], 10)])
    def test_one_node_of_every_pair_dials(self, state: StateDir, sets: list[str], pairs: int) -> None:
        spec = spec_of(state, load("toy", sets))
        workers = [process.name for process in spec.processes if process.name not in ("agent", "gateway")]
        dialled = [{name, other} for name in workers for other in config(spec, name)["dials"]]
        assert len(dialled) == pairs
        known = [{name, other} for name in workers for other in config(spec, name)["peers"]]
        assert all(dialled.count(pair) == 1 for pair in known)

    def test_prefill_nodes_dial_decode_nodes_which_start_before_them(self, state: StateDir) -> None:
        spec = spec_of(state)
        assert {"pd-d-0", "pd-d-1"} <= set(config(spec, "prfaas-0")["dials"])
        assert config(spec, "pd-d-1")["dials"] == ()

    def test_the_gateway_knows_every_worker_where_it_listens(self, state: StateDir) -> None:
        spec = spec_of(state)
        for node in config(spec, "gateway")["nodes"]:
            worker = config(spec, node["name"])
            assert all(node[key] == worker[key] for key in ("site", "role", "host", "control_port"))
            assert node["slots"] == (10 if worker["site"] == "pd" else 0)  # any local node may come to decode

    def test_one_secret_is_shared_and_new_each_time(self, state: StateDir) -> None:
        first, second = ({p.config["secret"] for p in spec_of(state).processes if p.name != "agent" and p.config}
                         for _ in range(2))  # fmt: skip
        assert len(first) == len(second) == 1
        assert first != second


class TestCapsAFlow:
    CAP = "link.per_flow_bps=2gbps"

    def numbers(self, spec: LaunchSpec, site: str) -> list[int]:
        """Of every numbered connection that leaves a site."""
        workers = [
            as_read_by(WorkerConfig, config(spec, process.name))
            for process in spec.processes
            if process.site == site and process.name not in ("agent", "gateway")
        ]
        return [
            peer.first_flow + i
            for worker in workers
            for peer in worker.peers.values()
            if peer.first_flow is not None
            for i in range(worker.connections)
        ]

    def test_no_two_connections_of_a_site_have_the_same_number(self, state: StateDir) -> None:
        spec = spec_of(state, load("toy", [self.CAP, "cache_bytes=1000000000"]))
        for site, connections in (("prfaas", 2 * 3 * 4), ("pd", 3 * 2 * 4)):
            numbers = self.numbers(spec, site)
            assert sorted(numbers) == list(range(connections))
        assert config(spec, "agent")["flows"] == 24

    def test_nothing_goes_back_without_a_cache(self, state: StateDir) -> None:
        spec = spec_of(state, load("toy", [self.CAP, "cache_bytes=0"]))
        assert self.numbers(spec, "pd") == []
        assert len(self.numbers(spec, "prfaas")) == config(spec, "agent")["flows"]

    def test_the_agent_is_asked_for_the_walls_cap(self, state: StateDir) -> None:
        scenario = load("toy", [self.CAP, "scale.byte_scale=0.001", "scale.time_scale=5"])
        assert config(spec_of(state, scenario), "agent")["state"]["per_flow_bps"] == 10e6

    def test_without_caps_connections_are_the_kernels_to_number(self, state: StateDir) -> None:
        spec = spec_of(state)
        assert self.numbers(spec, "prfaas") == []
        assert (config(spec, "agent")["flows"], config(spec, "agent")["state"]["per_flow_bps"]) == (0, None)

    def test_more_connections_than_there_are_numbers_are_refused(self, state: StateDir) -> None:
        with pytest.raises(ScenarioError, match="tells 248 connections apart"):
            spec_of(state, load("toy", [self.CAP, "transport.connections=64"]))

    def test_the_numbers_mean_the_same_to_sender_and_shaper(self) -> None:
        assert (FLOW_PORTS[0], PROBE_FLOWS.stop) == (flows.FIRST_PORT, flows.NUMBERS)
        for turn in range(64):
            assert (flows.FIRST_PORT + flows.NUMBERS * turn + 7) & (FLOW_PORTS[1] | 0xFF) == FLOW_PORTS[0] | 7


class TestUnits:
    def test_a_wall_rate_is_the_model_rate_times_both_scales(self) -> None:
        smoke = load("smoke")
        assert smoke.scale.wall_bps(16e9) == pytest.approx(160e6)
        assert smoke.scale.model_bps(160e6) == pytest.approx(16e9)

    def test_the_agent_is_asked_for_the_walls_rate_and_delay(self, state: StateDir) -> None:
        scenario = load("smoke", ["link.delay_s=0.3", "link.jitter_s=0.05", "link.loss=0.01", "seed=7"])
        agent = config(spec_of(state, scenario), "agent")
        assert agent["state"] == {
            "rate_bps": pytest.approx(160e6),
            "delay_s": pytest.approx(0.03),
            "jitter_s": pytest.approx(0.005),
            "loss": 0.01,
            "per_flow_bps": None,
        }
        assert agent["seed"] == 7

    @pytest.mark.parametrize(("delay_s", "why"), [(100, "is it milliseconds"), (1e-6, "microsecond")])
    def test_a_delay_that_the_wire_cannot_have_is_refused_before_anything_starts(
        self, delay_s: float, why: str
    ) -> None:
        with pytest.raises(ScenarioError, match=rf"scenario smoke: .*time_scale = 10\) link\.delay_s: .*{why}"):
            link_state(load("smoke", [f"link.delay_s={delay_s}"]))

    def test_workers_get_model_units_and_the_scales(self, state: StateDir) -> None:
        worker = config(spec_of(state, load("smoke")), "prfaas-0")
        assert (worker["time_scale"], worker["byte_scale"]) == (10, 0.001)
        assert worker["outbox_bytes"] == 32 * 2**30
        assert (worker["pieces"], worker["connections"], worker["stream_interval"]) == (16, 4, 32)

    def test_every_worker_knows_the_pool_that_it_has_when_it_prefills(self, state: StateDir) -> None:
        spec = spec_of(state, load("toy", ["cache_bytes=1e9", "cache.block_tokens=256"]))
        for name in ("prfaas-0", "pd-p-0", "pd-d-0"):
            assert (config(spec, name)["cache_bytes"], config(spec, name)["block_tokens"]) == (10**9, 256)
        assert config(spec_of(state), "prfaas-0")["cache_bytes"] == 0

    def test_decode_is_the_pd_profiles_whatever_the_scenario_overrides(self, state: StateDir) -> None:
        spec = spec_of(state, load("toy", ["decode.step_s=0.05", "decode.slots=3"]))
        assert config(spec, "pd-d-0")["decode_step_s"] == 0.05
        assert [node["slots"] for node in config(spec, "gateway")["nodes"] if node["role"] == "decode"] == [3, 3]

    def test_each_site_has_its_own_profile(self, state: StateDir) -> None:
        spec = spec_of(state, load("paper"))
        assert config(spec, "prfaas-0")["profile"] == "h200-1t"
        assert config(spec, "pd-p-0")["profile"] == "h20-1t"

    @pytest.mark.parametrize(("scale", "remedy"), [(1e-9, "raise one of the three"), (1, "lower one of the three")])
    def test_a_rate_that_no_kernel_shapes_is_refused_before_anything_starts(self, scale: float, remedy: str) -> None:
        scenario = load("smoke", [f"scale.byte_scale={scale}", "scale.time_scale=1000"])
        with pytest.raises(ScenarioError, match=rf"scenario smoke: link\.rate_bps = 1\.6e\+10 x .*bits/s.*{remedy}"):
            link_rate_bps(scenario)


class TestTheFingerprint:
    def test_is_of_what_is_started_and_not_of_the_load(self, state: StateDir) -> None:
        of_a_load = load("toy", ["workload.rate_rps=1", "seed=7", "slo.ttft_p90_s=1"])
        assert spec_of(state, of_a_load).fingerprint == spec_of(state).fingerprint
        assert spec_of(state, load("toy", ["link.rate_bps=1gbps"])).fingerprint != spec_of(state).fingerprint
        assert spec_of(state, deployment="naive").fingerprint != spec_of(state).fingerprint
