"""What is asked of the link's agent, and when the delay line makes a load no measurement. Real links: tests/wire."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from netem.cells import first_second_bound_bits
from testbed import linkctl
from testbed.launch import client
from testbed.launch.state import StateDir
from testbed.load import delay_line_faults
from testbed.report.link_words import verified_lines
from testbed.scenario import load
from testbed.show_link import show_link

COUNTED = {"kv": {"sent_bytes": 1, "drops": 0, "backlog_bytes": 0}, "direct_packets": 0}
ASKED: dict[str, Any] = {
    "rate_bps": 160e6,
    "mtu": 1500,
    "delay_s": 0.015,
    "jitter_s": 0.001,
    "loss": 0.01,
    "outage": "stall",
    "per_flow_bps": 40e6,
}


class FakeAgent:
    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def put(self, path: str, body: Any) -> dict[str, Any]:
        self.bodies.append(body)
        return self.get(path)

    def get(self, path: str) -> dict[str, Any]:
        one = {"interface": "w", "asked": ASKED, "layers": ["dip"], "kept": {}, "applied": {}, "counters": COUNTED}
        one["outage_kept"] = "stall"
        one["delay_by"] = {"delay": "netem", "jitter": None, "why": "sch_netem is there", "missing": ""}
        return {"to_pd": one, "to_prfaas": one}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    fake = FakeAgent()
    monkeypatch.setattr(client, "agent", lambda state: fake)
    return fake


@pytest.mark.parametrize(
    ("direction", "asked", "body"),
    [
        (None, {"rate_bps": 8e9}, {"rate_bps": pytest.approx(80e6)}),
        (None, {"delay_s": 0.3}, {"delay_s": pytest.approx(0.03)}),
        ("to_pd", {"jitter_s": 0.1, "loss": 0.02}, {"to_pd": {"jitter_s": pytest.approx(0.01), "loss": 0.02}}),
        (None, {"delay_s": 0.0, "loss": 0.0}, {"delay_s": 0.0, "loss": 0.0}),
        ("to_pd", {"outage": "blackhole"}, {"to_pd": {"outage": "blackhole"}}),
        (None, {"outage": "none"}, {"outage": None}),
    ],
)
def test_what_is_given_is_asked_for_in_the_walls_units_and_nothing_else(
    agent: FakeAgent, tmp_path: Path, direction: str | None, asked: dict[str, Any], body: dict[str, Any]
) -> None:
    linkctl.change(load("smoke"), StateDir(tmp_path), direction, **asked)  # time_scale 10, byte_scale 0.001
    assert agent.bodies == [body]


def test_an_outage_and_who_laid_something_over_the_link_are_shown(
    agent: FakeAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = linkctl.show(load("smoke"), StateDir(tmp_path))
    assert (shown["to_pd"]["outage"], shown["to_pd"]["outage_kept"], shown["to_pd"]["layers"]) == (
        "stall", "stall", ["dip"]
    )  # fmt: skip
    show_link(shown)
    printed = " ".join(capsys.readouterr().out.split())
    assert "OUTAGE: stall;" in printed
    assert "(netem), 4 Gbps a connection" in printed
    assert "laid over it: dip" in printed


@pytest.mark.parametrize(
    ("cap_bps", "connections", "gets_bps"), [(None, 1, 160e6), (40e6, 1, 40e6), (40e6, 4, 160e6), (10e6, 64, 80e6)]
)
def test_a_capped_link_is_judged_by_what_that_many_connections_get(
    cap_bps: float | None, connections: int, gets_bps: float
) -> None:
    gets, bound_bits = linkctl._attainable({"rate_bps": 160e6, "per_flow_bps": cap_bps}, connections)
    assert gets == gets_bps
    assert gets < bound_bits <= first_second_bound_bits(160e6)


def test_what_was_asked_is_shown_in_model_units(agent: FakeAgent, tmp_path: Path) -> None:
    shown = linkctl.show(load("smoke"), StateDir(tmp_path))["to_pd"]
    assert (shown["rate_bps"], shown["delay_s"], shown["jitter_s"], shown["loss"]) == (
        pytest.approx(16e9),
        pytest.approx(0.15),
        pytest.approx(0.01),
        0.01,
    )


FINE = {"down": False, "deaths": 0, "outage_s": 0.0, "overflowed": 0, "late_p99_s": 0.0002}


def counted(**line: Any) -> dict[str, Any]:
    return {"to_pd": {"delay_line": {**FINE, **line}}, "to_prfaas": {"delay_line": FINE}}


def test_a_link_without_a_delay_line_has_no_faults_of_one() -> None:
    without = {"to_pd": {"delay_line": None}, "to_prfaas": {"delay_line": None}}
    assert delay_line_faults(without, without, 0.02) == []
    assert delay_line_faults(without, counted(), 0.02) == []


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ({"deaths": 1, "outage_s": 0.25}, "the delay line died.*0.25 s"),
        ({"down": True, "deaths": 1}, "the delay line died"),
        ({"overflowed": 3}, "to_pd: the delay line lost 3 packets"),
        ({"late_p99_s": 0.03}, "to_pd: .*30.0 ms late"),
    ],
)
def test_a_delay_line_that_failed_makes_a_load_no_measurement(after: dict[str, Any], fault: str) -> None:
    (told,) = delay_line_faults(counted(), counted(**after), 0.02)
    assert re.search(fault, told)


def test_what_happened_before_the_load_is_not_its_fault() -> None:
    earlier = counted(deaths=2, overflowed=7)
    assert delay_line_faults(earlier, earlier, 0.02) == []


def verified(**differently: Any) -> dict[str, Any]:
    one = {
        "ok": True,
        "wrong": [],
        "asked_bps": 16e9,
        "expected_bps": 15.3e9,
        "measured_bps": 15.29e9,
        "error": -0.0007,
        "first_second_bps": 16.1e9,
        "first_second_bound_bps": 16.6e9,
        "asked_rtt_s": 0.3,
        "rtt_p50_s": 0.301,
        "rtt_jitter_s": 0.002,
        "train": {"lost": 3, "sent": 5000},
    }
    return {"measured": {"directions": {"to_pd": {**one, **differently}}}}


def test_a_runs_report_shows_the_link_asked_and_measured() -> None:
    (row,) = [line for line in verified_lines(verified()) if "to_pd" in line]
    for figure in ("16.000 Gbps", "15.290 Gbps", "-0.07%", "16.100 of at most 16.600", "301.00 ms", "3 of 5000"):
        assert figure in row
    assert "not" not in row


def test_a_runs_report_says_when_the_link_was_another() -> None:
    told = "\n".join(verified_lines(verified(ok=False, wrong=["rtt"])))
    assert "(**not** what was asked: rtt)" in told


def test_a_run_without_a_measured_link_shows_none() -> None:
    assert verified_lines({"measured": None}) == []


@pytest.mark.parametrize(
    ("rate_bps", "per_flow_bps", "mbps"), [(100e6, None, 4.24), (2e6, None, 1.0), (100e6, 3e6, 1.5), (1e6, 5e6, 0.5)]
)
def test_the_train_fits_a_slow_link(rate_bps: float, per_flow_bps: float | None, mbps: float) -> None:
    packets_per_s = linkctl._packets_per_s({"rate_bps": rate_bps, "per_flow_bps": per_flow_bps})
    assert packets_per_s * 106 * 8 / 1e6 == pytest.approx(mbps)
