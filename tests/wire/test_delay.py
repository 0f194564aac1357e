"""Delay, jitter and loss on a real kernel, through the agent: round trips, losses, order, and a line that is killed.

One child (`python -m tests.wire.test_delay SCENARIO` under unshare) does the measuring and prints JSON; the tests read
it. Round trips are judged by their medians, since this machine may be busy.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from netem.capabilities import probe as probe_kernel
from netem.topology import build
from tests.wire.test_link import PROBE_PORT, ROOTLESS, WHY_NOT, Bench, child, isolation, result, until

pytestmark = [pytest.mark.wire, pytest.mark.measures, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RTTS_S = (0.005, 0.030, 0.080)
LOSSES = (0.001, 0.01)
PACKETS = 20_000
RATE_BPS = 100e6
WAYS = ("to_pd", "to_prfaas")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return child("measure", isolation(), "tests.wire.test_delay", timeout_s=240)


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_the_round_trip_is_what_was_asked(measured: dict[str, Any], rtt_s: float) -> None:
    found = measured["delays"][f"{rtt_s}"]
    assert found["rtt_min_s"] >= rtt_s
    assert found["rtt_p50_s"] <= rtt_s * 1.05 + 0.0005


@pytest.mark.parametrize("rtt_s", RTTS_S)
def test_delay_alone_loses_and_reorders_nothing(measured: dict[str, Any], rtt_s: float) -> None:
    train = measured["delays"][f"{rtt_s}"]["train"]
    assert (train["sent"], train["lost"], train["reordered"]) == (PACKETS, 0, 0)
    for line in measured["delays"][f"{rtt_s}"]["lines"].values():
        assert (line["lost"], line["overflowed"], line["verdict_errors"]) == (0, 0, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_is_the_fraction_asked_for(measured: dict[str, Any], loss: float, way: str) -> None:
    train = measured["losses"][f"{loss} {way}"]
    error = math.sqrt(PACKETS * loss * (1 - loss))
    assert abs(train["lost"] - PACKETS * loss) <= 4 * error, train
    assert train["reordered"] == 0


def test_jitter_moves_the_round_trip_and_reorders_nothing(measured: dict[str, Any]) -> None:
    found = measured["jitter"]  # 30 ms +- 2 * 5 ms
    assert found["rtt_p99_s"] - found["rtt_min_s"] > 0.003
    assert found["rtt_min_s"] >= 0.020
    assert found["train"]["reordered"] == found["train"]["lost"] == 0


def test_each_direction_has_its_own_delay(measured: dict[str, Any]) -> None:
    assert 0.040 <= measured["one_way"]["rtt_p50_s"] <= 0.0425
    assert measured["one_way"]["asked"] == {"to_pd": 0.03, "to_prfaas": 0.01}


def test_a_live_change_loses_and_reorders_nothing(measured: dict[str, Any]) -> None:
    train = measured["live"]["train"]
    assert measured["live"]["changes"] >= 10
    assert (train["lost"], train["reordered"]) == (0, 0)


def test_with_loss_packets_are_dropped_one_by_one(measured: dict[str, Any]) -> None:
    """A super-packet would take 40 others with it, and count as one."""
    line = measured["cut"]
    assert line["lost"] + line["passed"] >= 0.8 * measured["cut_segments"]


@pytest.fixture(scope="module")
def killed() -> dict[str, Any]:
    """By isolation. Both at once: they mostly wait, and nothing of it is about speed."""
    ways = {"as-is": isolation(), "user-namespace": ROOTLESS}
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(child, "kill", way, "tests.wire.test_delay") for name, way in ways.items()}
        return {name: one.result() for name, one in running.items()}


@pytest.mark.parametrize("isolate", ["as-is", "user-namespace"])
def test_a_killed_line_is_an_outage_is_started_again_and_counted(killed: dict[str, Any], isolate: str) -> None:
    found = killed[isolate]
    assert found["before"]["deaths"] == 0
    assert found["after"]["deaths"] == 1
    assert not found["after"]["down"]
    assert 0 < found["after"]["outage_s"] < 5
    assert found["after"]["pid"] != found["before"]["pid"]
    assert found["goodput_bps"] > 0  # and the connection that asked for the train lived through it
    assert found["rtt_min_s"] >= 0.030
    assert found["train"]["lost"] > 0


def test_the_delay_stays_when_the_agent_leaves_and_the_next_one_finds_it() -> None:
    found = child("agents", isolation(), "tests.wire.test_delay")
    assert found["alone_rtt_min_s"] >= 0.030
    assert found["pids"][0] == found["pids"][1]
    assert 0.010 <= found["second_rtt_p50_s"] <= 0.0110
    assert found["deaths"] == 0


@pytest.mark.parametrize("isolate", [isolation(), ROOTLESS], ids=["as-is", "user-namespace"])
def test_the_delay_line_is_found_where_it_works(isolate: list[str]) -> None:
    found = {one.name: one for one in probe_kernel(isolate)}
    assert found["rate"].backend == "htb"
    assert found["delay, loss"].backend in ("netem", "delay line (NFQUEUE)")
    assert found["jitter, stall"].backend == "delay line (NFQUEUE)"
    assert bool(found["punctuality"].remedy) == (isolate is ROOTLESS or os.geteuid() != 0)


# ---- what the child does


@contextmanager
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        made = Bench(build(), Path(stack.enter_context(tempfile.TemporaryDirectory())))
        agent = made.start_agent(RATE_BPS)
        stack.callback(agent.wait, 10)
        stack.callback(agent.terminate)
        server = made.serve(PROBE_PORT)
        stack.callback(server.wait, 10)
        stack.callback(server.terminate)
        yield made


def put(made: Bench, body: object) -> None:
    status, answer = made.request("PUT", "/link", body)
    assert status == 200, answer


def lines(made: Bench) -> dict[str, Any]:
    return {way: counted["delay_line"] for way, counted in made.counters().items()}


def probe(made: Bench, *options: str, seconds: float = 0.5) -> Any:
    return result(made.probe(PROBE_PORT, seconds, *options))


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"delays": {}, "losses": {}}
    train = ("--packets", str(PACKETS), "--packets-per-s", "10000")
    with bench() as made:
        for rtt_s in RTTS_S:
            put(made, {"delay_s": rtt_s / 2})
            found["delays"][f"{rtt_s}"] = {**probe(made, *train, seconds=1.0), "lines": lines(made)}
        put(made, {"delay_s": 0.015, "jitter_s": 0.005})
        found["jitter"] = probe(made, *train, seconds=1.0)
        put(made, {"jitter_s": 0.0, "to_pd": {"delay_s": 0.03}, "to_prfaas": {"delay_s": 0.01}})
        found["one_way"] = probe(made)
        found["one_way"]["asked"] = {way: line["asked"]["delay_s"] for way, line in lines(made).items()}
        found["live"] = live(made)
        put(made, {"delay_s": 0.002})
        for loss in LOSSES:
            for way in WAYS:
                put(made, {"loss": 0.0, way: {"loss": loss}})
                reverse = ("--reverse",) if way == "to_prfaas" else ()
                found["losses"][f"{loss} {way}"] = probe(made, *train, *reverse)["train"]
        put(made, {"loss": 0.0, "to_pd": {"loss": 1e-4}})
        before = lines(made)["to_pd"]
        sent = made.counters()["to_pd"]["kv"]["sent_bytes"]
        probe(made, seconds=1.0)
        after = lines(made)["to_pd"]
        found["cut"] = {name: after[name] - before[name] for name in ("lost", "passed")}
        found["cut_segments"] = (made.counters()["to_pd"]["kv"]["sent_bytes"] - sent) / 1514
    return found


def live(made: Bench) -> dict[str, Any]:
    """The delay goes up and down while a train passes."""
    running = made.probe(PROBE_PORT, 0.5, "--packets", str(PACKETS), "--packets-per-s", "5000")
    changes = 0
    while running.poll() is None:
        put(made, {"delay_s": (0.02, 0.005, 0.01)[changes % 3], "jitter_s": (0.0, 0.004)[changes % 2]})
        changes += 1
        time.sleep(0.1)
    found = {"train": result(running)["train"], "changes": changes}
    put(made, {"jitter_s": 0.0})
    return found


def kill() -> dict[str, Any]:
    with bench() as made:
        put(made, {"delay_s": 0.015})
        before = lines(made)["to_pd"]
        running = made.probe(PROBE_PORT, 4, "--packets", "20000", "--packets-per-s", "5000")
        time.sleep(4)
        os.kill(before["pid"], signal.SIGKILL)
        until(lambda: lines(made)["to_pd"]["deaths"] == 1 and not lines(made)["to_pd"]["down"])
        during = result(running)
        return {
            "before": before,
            "after": lines(made)["to_pd"],
            "goodput_bps": during["goodput_bps"],
            "train": during["train"],
            "rtt_min_s": probe(made)["rtt_min_s"],
        }


def agents() -> dict[str, Any]:
    with ExitStack() as stack:
        made = Bench(build(), Path(stack.enter_context(tempfile.TemporaryDirectory())))
        first = made.start_agent(RATE_BPS)
        server = made.serve(PROBE_PORT)
        put(made, {"delay_s": 0.015})
        pids = [lines(made)["to_pd"]["pid"]]
        first.terminate()
        first.wait(10)
        alone = probe(made)
        (made.dir / "ready").unlink()
        second = made.start_agent(RATE_BPS)
        put(made, {"delay_s": 0.005})
        found = lines(made)["to_pd"]
        answer = probe(made)
        for process in (second, server):
            process.terminate()
            process.wait(10)
        return {
            "alone_rtt_min_s": alone["rtt_min_s"],
            "pids": [*pids, found["pid"]],
            "second_rtt_p50_s": answer["rtt_p50_s"],
            "deaths": found["deaths"],
        }


if __name__ == "__main__":
    print(json.dumps({"measure": measure, "kill": kill, "agents": agents}[sys.argv[1]]()))
