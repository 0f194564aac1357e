"""A scenario's cross-traffic: what it may say, what virtual time makes of it, and what a load on the wire holds."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.fluid import TCP_EFFICIENCY
from testbed.crossing import Crossing, wall_sources
from testbed.fleet import launch_spec
from testbed.launch.state import StateDir, TestbedError
from testbed.link_schedule import describe, find
from testbed.scenario import Scenario, ScenarioError, load, parse
from testbed.scenario_cross import sources
from testbed.simulate import simulate

SHORT = ("workload.duration_s=300", "workload.warmup_s=0")
FLOWS = "{direction: to_pd, kind: elastic, flows: 4}"
SPELLS = "{direction: to_pd, kind: elastic, flows: 4, on_s: 20, off_s: 10}"
DATAGRAMS = "{direction: to_pd, kind: constant, rate_bps: 3gbps}"


def toy(*cross: str, sets: tuple[str, ...] = SHORT) -> Scenario:
    return load("toy", [*sets, f"link.cross_traffic=[{', '.join(cross)}]"])


class TestAScenario:
    def test_reads_back_with_its_cross_traffic(self) -> None:
        scenario = toy(SPELLS, DATAGRAMS)
        assert parse(scenario.data(), "again") == scenario
        assert [one.kind for one in scenario.link.cross_traffic] == ["elastic", "constant"]

    def test_draws_each_source_by_itself_unless_it_has_a_seed(self) -> None:
        own = SPELLS.replace("}", ", seed: 9}")
        first, second, third, fourth = (
            next(one.spells()) for one in sources(toy(SPELLS, SPELLS, own, own).link.cross_traffic, 1)
        )
        assert first != second
        assert third == fourth

    def test_needs_another_testbed_only_when_it_is_the_first_to_have_any(self) -> None:
        """What competes comes with the load; whether there are processes for it does not."""
        none, one, other = (scenario.fingerprint(testbed_only=True) for scenario in (toy(), toy(FLOWS), toy(DATAGRAMS)))
        assert none != one == other

    @pytest.mark.parametrize(
        ("cross", "said"),
        [
            ("{direction: to_pd, kind: elastic}", "link.cross_traffic.0: flows: None is missing; elastic"),
            (
                "{direction: to_pd, kind: elastic, flow: 1}",
                "link.cross_traffic.0.flow: unknown key; did you mean flows?",
            ),
            ("{direction: up, kind: elastic, flows: 1}", "link.cross_traffic.0.direction = 'up': must be 'to_pd' or"),
            ("{direction: to_pd, kind: elastic, flows: 99}", "link.cross_traffic.0.flows = 99: must be at most 64"),
            (DATAGRAMS.replace("3gbps", "3GB/s"), "link.cross_traffic.0.rate_bps = '3GB/s': may mean bytes"),
            (DATAGRAMS.replace("3gbps", "9gbps"), "send 9e+09 bits/s together, and the link carries 8e+09"),
            (
                SPELLS.replace("off_s: 10", "off_s: 0.1"),
                "link.cross_traffic.0.off_s = 0.1: at scale.time_scale the wire takes spells of at least 0.25",
            ),
        ],
    )
    def test_that_cannot_be_is_refused_with_key_value_and_remedy(self, cross: str, said: str) -> None:
        with pytest.raises(ScenarioError, match=re.escape(said)):
            toy(cross)

    def test_shows_what_competes_beside_its_link(self, tmp_path: Path) -> None:
        file = tmp_path / "contended.yaml"
        file.write_text(toy(DATAGRAMS.replace("}", ", start_s: 100, duration_s: 60}")).to_yaml())
        told = describe(find(str(file), 1))
        assert told["cross"] == {
            "to_pd": {"mean_flows": 0, "mean_constant_bps": 6e8, "steps": [(100, 0, 3e9), (160, 0, 0)]}
        }  # fmt: skip


class TestVirtualTime:
    def test_has_the_same_spells_as_the_wire(self) -> None:
        scenario = toy(SPELLS, "{direction: to_prfaas, kind: elastic, flows: 1, on_s: 30, off_s: 30}")
        rows = simulate(scenario).timeline.query("event == 'cross'")
        for direction, source in zip(("to_pd", "to_prfaas"), wall_sources(scenario), strict=True):
            edges = iter(edge for spell in source.spells() for edge in spell)
            for at_s in rows[rows.direction == direction].t_s:
                assert at_s == pytest.approx(next(edges) * scenario.scale.time_scale)

    def test_tells_of_it_on_the_timeline(self) -> None:
        rows = simulate(toy(DATAGRAMS.replace("}", ", start_s: 50}"), FLOWS)).timeline.query("event == 'cross'")
        assert list(zip(rows.t_s, rows.before, rows.after, strict=True)) == [
            (0, "nothing", "4 flows"),
            (50, "4 flows", "4 flows + 3 Gbps"),
        ]
        assert set(rows.trigger) == {"cross-traffic"}

    def test_sends_kv_slower_and_counts_only_kv_as_kv(self) -> None:
        alone, beside = (simulate(toy(*cross), policy="naive").summary for cross in ((), (FLOWS,)))
        slow, fast = (one["ttft_split_s"]["overall"]["transfer"]["mean"] for one in (beside, alone))
        assert slow > 2 * fast
        assert beside["link"]["kv_bytes"] == alone["link"]["kv_bytes"]
        assert beside["link"]["wan_tx_bytes"] == alone["link"]["wan_tx_bytes"]
        assert alone["link"]["cross_bytes"] is None

    def test_fills_the_link_with_elastic_flows_and_kv_together(self) -> None:
        result = simulate(toy(FLOWS))
        link = result.summary["link"]
        ended_s = result.requests.finished_s.max()
        carried = link["cross_bytes"]["to_pd"] + link["wan_tx_bytes"]
        assert carried == pytest.approx(8e9 / 8 * ended_s, rel=0.01)
        assert link["cross_bytes"]["to_prfaas"] == 0

    def test_lets_a_token_bucket_pay_for_what_competes_too(self) -> None:
        bucket = "link.schedule={kind: token_bucket, peak_bps: 8gbps, base_bps: 4gbps, budget_bytes: 20e9}"
        result = simulate(toy(DATAGRAMS, sets=(*SHORT, bucket, "workload.load_fraction=0.4")), policy="naive")
        rows = result.timeline.query("event == 'link' and direction == 'to_pd'")
        first = rows.iloc[0]
        landed = result.requests[result.requests.landed_s <= first.t_s].kv_bytes.sum() * 8 / TCP_EFFICIENCY
        used = 20e9 * 8 + 4e9 * first.t_s  # the budget and what came back of it until then
        assert landed < 0.9 * used
        assert landed + 3e9 * first.t_s == pytest.approx(used, rel=0.1)

    def test_comes_to_an_end_beside_traffic_that_does_not(self) -> None:
        narrow = "link.schedule={kind: steps, steps: [[0, 8gbps], [100, 2gbps]]}"  # below the datagrams' rate, for good
        result = simulate(toy(DATAGRAMS, sets=(*SHORT, narrow, "workload.load_fraction=0.2")))
        assert result.summary["verdict"]["status"] == "valid"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path, create=True)
    made.fresh()
    return made


class TestATestbed:
    def test_has_a_process_in_each_site_only_where_something_competes(self, state: StateDir) -> None:
        def names(scenario: Scenario) -> dict[str, str | None]:
            spec = launch_spec(scenario, scenario.deployment(None), port=8123, state=state)
            return {one.name: one.site for one in spec.processes if one.role == "cross"}

        assert names(toy()) == {}
        assert names(toy(FLOWS)) == {"cross-prfaas": "prfaas", "cross-pd": "pd"}

    def test_that_was_started_without_refuses_a_load_with_cross_traffic(self, state: StateDir) -> None:
        with pytest.raises(TestbedError, match=r"no process for cross-traffic .* prfaas down, prfaas up"):
            Crossing(toy(FLOWS), state, time.monotonic_ns()).__enter__()

    def test_is_not_touched_by_a_load_without(self, state: StateDir) -> None:
        with Crossing(toy(), state, time.monotonic_ns()) as crossing:
            pass
        assert (crossing.wire_bytes, crossing.events, crossing.faults) == (None, [], [])


SITES = {"prfaas": ("to_pd", "127.77.1.1"), "pd": ("to_prfaas", "127.77.2.1")}
"""Both sites on the loopback: nothing is shaped there, so that datagrams at a rate and short spells must do."""


@pytest.fixture
def processes(state: StateDir) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    started = {}
    for site, (sends, address) in SITES.items():
        (peer,) = (other for name, (_, other) in SITES.items() if name != site)
        ready = state.ready_file(site)
        config = {
            "socket": str(state.cross_socks[site]),
            "ready_file": str(ready),
            "sends": sends,
            "address": address,
            "peer": peer,
        }
        file = state.root / f"{site}.json"
        file.write_text(json.dumps(config))
        started[site] = subprocess.Popen([sys.executable, "-m", "netem.rivals", "--config", str(file)])
    until = time.monotonic() + 30
    while not all(state.ready_file(site).exists() for site in SITES):
        assert time.monotonic() < until
        time.sleep(0.02)
    yield started
    for process in started.values():
        process.kill()
        process.wait(10)


def held(scenario: Scenario, state: StateDir, wall_s: float) -> Crossing:
    t0_ns = time.monotonic_ns() + 100_000_000
    with Crossing(scenario, state, t0_ns) as crossing:
        time.sleep(0.1 + wall_s)
    return crossing


BACK = "{direction: to_prfaas, kind: elastic, flows: 2, start_s: 1, duration_s: 0.5}"


@pytest.mark.usefixtures("processes")
class TestALoad:
    """On the toy's scale, 3 Gbps are 150 Mbit/s of this machine, and its second 0.2 s."""

    def test_has_its_cross_traffic_while_it_lasts_and_counts_what_landed(self, state: StateDir) -> None:
        scenario = toy(DATAGRAMS, BACK)
        wall_bps = scenario.scale.wall_bps(3e9)
        crossing = held(scenario, state, 1.0)
        assert crossing.wire_bytes is not None
        assert crossing.wire_bytes["to_pd"] * 8 >= 0.5 * wall_bps  # of a second; a busy machine sends less
        assert crossing.wire_bytes["to_prfaas"] > 100_000
        told = [(one["direction"], one["before"], one["after"]) for one in crossing.events]
        assert told == [
            ("to_pd", "nothing", "3 Gbps"),
            ("to_prfaas", "nothing", "2 flows"),
            ("to_prfaas", "2 flows", "nothing"),
        ]
        assert all(one["late_s"] >= 0 for one in crossing.events)

    def test_that_is_gone_takes_its_traffic_with_it_and_the_next_one_is_served(self, state: StateDir) -> None:
        gone = Crossing(toy(DATAGRAMS), state, time.monotonic_ns())
        gone.__enter__()
        gone._close()  # nobody says stop, as when its process is killed
        crossing = held(toy("{direction: to_pd, kind: constant, rate_bps: 1gbps, start_s: 1000}"), state, 0.2)
        assert crossing.faults == []
        assert crossing.wire_bytes == {"to_pd": 0, "to_prfaas": 0}

    def test_is_served_alone(self, state: StateDir) -> None:
        with (
            Crossing(toy(DATAGRAMS), state, time.monotonic_ns()),
            pytest.raises(TestbedError, match="another load has its cross-traffic on the link"),
        ):
            Crossing(toy(DATAGRAMS), state, time.monotonic_ns()).__enter__()

    def test_whose_process_dies_is_no_measurement(
        self, state: StateDir, processes: dict[str, subprocess.Popen[bytes]]
    ) -> None:
        with Crossing(toy(DATAGRAMS), state, time.monotonic_ns()) as crossing:
            processes["pd"].kill()
            processes["pd"].wait(10)
        assert crossing.wire_bytes is None
        assert any(fault.startswith("cross-traffic was lost, nobody counted its bytes") for fault in crossing.faults)


def test_the_wires_spells_last_until_the_load_ends() -> None:
    (one,) = wall_sources(toy(FLOWS))
    assert list(one.spells()) == [(0.0, math.inf)]
