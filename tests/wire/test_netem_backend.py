"""The agent where the kernel has sch_netem, which User-Mode Linux does: delay, loss, steps, order, what it refuses.

`python -m tests.wire.test_netem_backend` does the measuring as that kernel's only program and prints JSON; the tests
read it. It has no nf_tables for IPv4, hence no NFQUEUE: nothing but netem can have done it. Figures beside the delay
line's are `prfaas link verify --matrix`'s.
"""

from __future__ import annotations

import json
import math
import subprocess
from contextlib import suppress
from typing import Any

import pytest

from netem.link import expected_goodput_bps
from tests.wire import uml
from tests.wire.test_delay import RATE_BPS, bench, probe, put
from tests.wire.test_link import PROBE_PORT, Bench

WHY_NOT = uml.why_not()
pytestmark = [pytest.mark.wire, pytest.mark.measures, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RTTS_S = (0.005, 0.030, 0.080)
LOSS = 0.01
PACKETS = 4000
TRAIN = ("--packets", str(PACKETS), "--packets-per-s", "2500")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed = uml.run("tests.wire.test_netem_backend", work=tmp_path_factory.mktemp("uml"))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_the_agent_found_netem_and_says_so(measured: dict[str, Any]) -> None:
    link = measured["link"]
    assert (link["delay_by"]["delay"], link["delay_by"]["jitter"]) == ("netem", None)
    assert "nfnetlink_queue" in link["delay_by"]["missing"]
    assert link["kept"]["10:0"]["delay_us"] == link["kept"]["20:0"]["delay_us"] == 40_000
    assert link["counters"]["delay_line"] is None


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_the_round_trip_is_both_delays(measured: dict[str, Any], rtt_s: float) -> None:
    found = measured["delays"][f"{rtt_s}"]
    assert found["rtt_min_s"] >= rtt_s
    assert found["rtt_p50_s"] <= rtt_s * 1.05 + 0.0015  # this kernel is a process, on a machine that may be busy


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_delay_alone_neither_loses_nor_reorders(measured: dict[str, Any], rtt_s: float) -> None:
    train = measured["delays"][f"{rtt_s}"]["train"]
    assert (train["lost"], train["reordered"]) == (0, 0)


def test_goodput_is_the_rate_less_headers_behind_a_delay(measured: dict[str, Any]) -> None:
    assert abs(measured["goodput_bps"] / expected_goodput_bps(RATE_BPS) - 1) <= 0.05


def test_a_rate_step_keeps_the_delay(measured: dict[str, Any]) -> None:
    """netem's own `change` does not touch it, and htb's has nothing to do with it."""
    step = measured["rate_step"]
    assert step["kept"]["10:0"]["delay_us"] == 15_000
    assert step["kept"]["1:10"]["rate_bps"] == 20e6
    assert 0.030 <= step["rtt_min_s"] <= 0.030 * 1.05 + 0.0015


def test_loss_is_of_single_packets(measured: dict[str, Any]) -> None:
    error = math.sqrt(PACKETS * LOSS * (1 - LOSS))
    assert abs(measured["loss"]["lost"] - PACKETS * LOSS) <= 4 * error
    assert measured["loss"]["reordered"] == 0


def test_a_delay_that_gets_shorter_reorders_nothing(measured: dict[str, Any]) -> None:
    assert measured["live"]["changes"] >= 5
    assert (measured["live"]["train"]["lost"], measured["live"]["train"]["reordered"]) == (0, 0)


@pytest.mark.parametrize("field", ["jitter_s", "outage"])
def test_what_needs_the_delay_line_is_refused_with_the_module(measured: dict[str, Any], field: str) -> None:
    status, answer = measured["refused"][field]
    assert (status, answer["error"]["field"]) == (400, f"to_pd.{field}")
    assert "modprobe nfnetlink_queue" in answer["error"]["remedy"]


def test_a_link_that_is_down_comes_back_with_its_delay(measured: dict[str, Any]) -> None:
    found = measured["down"]
    assert found["kept"] == "down"
    assert found["answered"] is False
    assert found["rtt_min_s"] >= 0.030


# ---- what the other kernel does


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"delays": {}, "refused": {}}
    with bench() as made:
        for rtt_s in RTTS_S:
            put(made, {"delay_s": rtt_s / 2})
            found["delays"][f"{rtt_s}"] = probe(made, *TRAIN)
        found["link"] = made.request("GET", "/link")[1]["to_pd"]
        put(made, {"delay_s": 0.015})
        found["goodput_bps"] = max(probe(made, "--connections", "4", seconds=4)["goodput_bps"] for _ in range(2))
        put(made, {"rate_bps": 20e6})
        kept = made.request("GET", "/link")[1]["to_pd"]["kept"]
        found["rate_step"] = {**probe(made), "kept": kept}
        put(made, {"rate_bps": RATE_BPS, "delay_s": 0.002, "to_pd": {"loss": LOSS}})
        found["loss"] = probe(made, *TRAIN)["train"]
        put(made, {"loss": 0.0})
        found["live"] = live(made)
        found["refused"]["jitter_s"] = made.request("PUT", "/link", {"to_pd": {"delay_s": 0.01, "jitter_s": 0.001}})
        found["refused"]["outage"] = made.request("PUT", "/link", {"to_pd": {"outage": "stall"}})
        put(made, {"delay_s": 0.015})
        found["down"] = down(made)
    return found


def live(made: Bench) -> dict[str, Any]:
    """Long, shorter, longer, while a train passes."""
    running = made.probe(PROBE_PORT, 0.5, *TRAIN)
    changes = 0
    while running.poll() is None:
        put(made, {"delay_s": (0.02, 0.005, 0.01)[changes % 3]})
        changes += 1
        with suppress(subprocess.TimeoutExpired):
            running.wait(0.1)
    assert running.stdout is not None
    return {"train": json.loads(running.stdout.read())["train"], "changes": changes}


def down(made: Bench) -> dict[str, Any]:
    put(made, {"to_pd": {"outage": "down"}})
    kept = made.request("GET", "/link")[1]["to_pd"]["outage_kept"]
    asking = made.probe(PROBE_PORT, 0.2)
    try:
        answered = asking.wait(10) == 0
    except subprocess.TimeoutExpired:
        answered = False
    asking.kill()
    asking.wait()
    put(made, {"to_pd": {"outage": None}})
    return {"kept": kept, "answered": answered, "rtt_min_s": probe(made)["rtt_min_s"]}


if __name__ == "__main__":
    print(json.dumps(measure()))
