"""Outages, layers and token buckets on a real kernel, through the agent, with clients and agents that are killed.

One child (`python -m tests.wire.test_layers SCENARIO` under unshare) does the measuring and prints JSON; the tests read
it. What crosses are numbered datagrams, so that what was lost, waited or was overtaken is told apart, and connections
to a control port. How transfers live through outages is tests/wire/outages.py's.
"""

from __future__ import annotations

import csv
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from netem.link import OUTAGES, burst_bytes
from netem.schedule import Schedule, from_data
from netem.topology import ADDRESSES, build
from testbed.launch.state import StateDir
from testbed.linksteps import LinkLayer
from tests.wire.test_link import PROBE_PORT, ROOTLESS, WHY_NOT, Bench, child, isolation, result, until

pytestmark = [pytest.mark.wire, pytest.mark.measures, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RATE_BPS = 100e6
WAYS = ("to_pd", "to_prfaas")
BUCKET = {"peak_bps": 100e6, "base_bps": 10e6, "budget_bytes": 12e6}
SCHEDULE_S = 10
DATAGRAMS = 50
DATA_PORT, CONTROL_PORT = 7500, 7200
SITES = {"to_pd": ("prfaas", "pd"), "to_prfaas": ("pd", "prfaas")}  # from, to


# ---- what the tests say


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return child("measure", isolation(), "tests.wire.test_layers", timeout_s=240)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OUTAGES)
class TestAnOutage:
    def test_is_what_the_kernel_has_and_only_there(self, measured: dict[str, Any], kind: str, way: str) -> None:
        found = measured["kinds"][f"{kind} {way}"]
        assert found["kept"] == {one: kind if one == way else None for one in WAYS}
        assert found["healed"] == dict.fromkeys(WAYS)

    def test_lets_nothing_through_of_either_class(self, measured: dict[str, Any], kind: str, way: str) -> None:
        found = measured["kinds"][f"{kind} {way}"]
        assert (found["before"], found["during"]) == ([*range(DATAGRAMS)], [])
        assert found["control"] == {"before": True, "during": False, "after": True}

    def test_leaves_the_other_direction_unless_the_interface_is_down(
        self, measured: dict[str, Any], kind: str, way: str
    ) -> None:
        other = measured["kinds"][f"{kind} {way}"]["other"]
        assert other == ([] if kind == "down" else [*range(DATAGRAMS)])

    def test_is_over_at_once_when_it_is_healed(self, measured: dict[str, Any], kind: str, way: str) -> None:
        """After a stall what waited comes first, in order; after the others it never comes."""
        late = [*range(100, 100 + DATAGRAMS)] if kind == "stall" else []
        assert measured["kinds"][f"{kind} {way}"]["after"] == [*late, *range(200, 200 + DATAGRAMS)]

    def test_of_a_healthy_link_is_healed_without_a_step(self, measured: dict[str, Any], kind: str, way: str) -> None:
        assert measured["kinds"][f"{kind} {way}"]["rows_of_a_second_healing"] == 0


def test_two_faults_compose_and_what_waits_in_one_waits_through_the_other(measured: dict[str, Any]) -> None:
    found = measured["composed"]
    assert found["states"] == ["stall", "blackhole", "stall", None]
    assert found["during"] == []
    assert found["after"] == [*range(DATAGRAMS)]  # sent in the stall; those of the blackhole are lost


@pytest.mark.parametrize("kind", ["stall", "blackhole"])
def test_an_outage_of_one_direction_costs_the_other_nothing_that_is_under_way(
    measured: dict[str, Any], kind: str
) -> None:
    assert measured["under_way"][kind] == [*range(DATAGRAMS)]


def test_a_layers_steps_are_told_and_logged_as_the_kernel_had_them(measured: dict[str, Any]) -> None:
    found = measured["steps"]
    assert found["faults"] == []
    assert [(row["at_s"], row["state"]["rate_bps"]) for row in found["events"]] == [
        (at_s, rate) for at_s, rate in ((0.2, 20e6), (0.4, 50e6), (0.6, 100e6)) for _ in WAYS
    ]
    logged = [(row["layer"], row["direction"], row["t_applied_ns"]) for row in found["log"]]
    assert logged == [("steps", row["direction"], row["t_applied_ns"]) for row in found["events"]]
    assert all(0 <= row["late_s"] < 0.5 for row in found["events"])


@pytest.mark.parametrize("kind", OUTAGES)
def test_a_client_that_is_killed_leaves_the_link_as_it_was(measured: dict[str, Any], kind: str) -> None:
    found = measured["killed_client"][kind]
    assert found["during"] == {"to_pd": kind, "to_prfaas": kind}
    assert found["after"] == {"to_pd": None, "to_prfaas": None}
    assert found["restored_s"] < 2
    assert found["crosses"] == [*range(DATAGRAMS)]


@pytest.mark.parametrize("kind", OUTAGES)
def test_a_link_whose_agent_is_killed_in_an_outage_stays_cut_until_the_next_one(
    measured: dict[str, Any], kind: str
) -> None:
    found = measured["killed_agent"][kind]
    assert found["without"] == []
    assert found["lost"]
    assert found["next"] == {"to_pd": None, "to_prfaas": None}
    assert found["crosses"] == [*range(DATAGRAMS)]


def test_a_token_bucket_lasts_for_its_budget_and_what_refills_it(measured: dict[str, Any]) -> None:
    found = measured["bucket"]
    assert found["faults"] == []
    assert [row["state"]["rate_bps"] for row in found["changes"]][:2] == [BUCKET["peak_bps"], BUCKET["base_bps"]]
    throttled_s = found["throttled_s"]
    expected = BUCKET["budget_bytes"] + BUCKET["base_bps"] / 8 * throttled_s
    assert found["sent_bytes"] == pytest.approx(expected, rel=0.04)


def test_a_token_bucket_that_is_used_up_carries_its_base_rate(measured: dict[str, Any]) -> None:
    assert measured["bucket"]["base_sent_bps"] == pytest.approx(BUCKET["base_bps"], rel=0.15)


def test_a_token_bucket_that_nobody_uses_stays_at_its_peak(measured: dict[str, Any]) -> None:
    assert measured["bucket"]["other_bps"] == BUCKET["peak_bps"]


def test_twenty_steps_a_second_carry_their_integral_on_one_connection(measured: dict[str, Any]) -> None:
    """Ten seconds of them here; `python -m tests.wire.test_layers schedule 60` under unshare does a minute."""
    found = measured["schedule"]
    assert (found["faults"], found["steps"]) == ([], 20 * SCHEDULE_S)
    assert found["sent_bytes"] == pytest.approx(found["integral_bytes"], rel=0.05)
    assert found["sent_bytes"] <= found["integral_bytes"] + found["burst_bytes"]


def test_nothing_leaves_unshaped(measured: dict[str, Any]) -> None:
    assert measured["direct_packets"] == {"to_pd": 0, "to_prfaas": 0}


def test_outages_work_in_a_user_namespace_too() -> None:
    if subprocess.run([*ROOTLESS, "true"], capture_output=True).returncode != 0:
        pytest.skip("user namespaces are not allowed here")
    found = child("kinds", ROOTLESS, "tests.wire.test_layers")
    for kind in OUTAGES:
        assert found[f"{kind} to_pd"]["kept"] == {"to_pd": kind, "to_prfaas": None}
        assert found[f"{kind} to_pd"]["during"] == []
        assert found[f"{kind} to_pd"]["after"][-DATAGRAMS:] == [*range(200, 200 + DATAGRAMS)]


# ---- what the child does


class Layered(Bench):
    """A bench whose agent's socket is where a client looks for it, with numbered datagrams over the link."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(build(), state_dir)
        self.state = StateDir(state_dir)
        self.socket = str(self.state.agent_sock)
        self._senders: dict[str, socket.socket] = {}
        self._receivers: dict[str, socket.socket] = {}
        self._listeners: list[socket.socket] = []
        for way, (here, there) in SITES.items():
            self._receivers[way] = self.topology.call(there, receiver, ADDRESSES[there])
            self._senders[way] = self.topology.call(here, sender, ADDRESSES[there])
            control = (ADDRESSES[there], CONTROL_PORT)
            self._listeners.append(self.topology.call(there, socket.create_server, control))

    def send(self, way: str, first: int = 0) -> None:
        for number in range(first, first + DATAGRAMS):
            try:
                self._senders[way].send(number.to_bytes(4, "big"))
            except OSError:  # an interface that is down says so
                continue

    def received(self, way: str, within_s: float = 0.3) -> list[int]:
        """What arrives until nothing has for `within_s`."""
        found: list[int] = []
        self._receivers[way].settimeout(within_s)
        try:
            while True:
                found.append(int.from_bytes(self._receivers[way].recv(64), "big"))
        except TimeoutError:
            return found

    def crosses(self, way: str) -> list[int]:
        self.send(way)
        return self.received(way)

    def connects(self, way: str, within_s: float = 5) -> bool:
        """Whether a connection to a control port of the other site can be made."""
        here, there = SITES[way]
        try:
            self.topology.call(here, socket.create_connection, (ADDRESSES[there], CONTROL_PORT), within_s).close()
            return True
        except OSError:
            return False

    def put(self, body: object) -> Any:
        status, answer = self.request("PUT", "/link", body)
        assert status == 200, answer
        return answer

    def kept(self) -> dict[str, str | None]:
        """The outages as the agent reads them back."""
        return {way: one["outage_kept"] for way, one in self.request("GET", "/link")[1].items()}

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / "applied.jsonl").read_text().splitlines()]


def receiver(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, DATA_PORT))
    return made


def sender(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.connect((address, DATA_PORT))
    return made


@contextmanager
def bench() -> Iterator[Layered]:
    with ExitStack() as stack:
        made = Layered(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        agent = made.start_agent(RATE_BPS)
        stack.callback(agent.wait, 10)
        stack.callback(agent.terminate)
        yield made


def measure() -> dict[str, Any]:
    with bench() as made:
        found: dict[str, Any] = {
            "kinds": {f"{kind} {way}": outage(made, kind, way) for kind in OUTAGES for way in WAYS}
        }
        found["composed"] = composed(made)
        found["under_way"] = {kind: under_way(made, kind) for kind in ("stall", "blackhole")}
        found["steps"] = steps(made)
        found["killed_client"] = {kind: killed_client(made, kind) for kind in OUTAGES}
        found["bucket"] = bucket(made)
        found["schedule"] = schedule(made, SCHEDULE_S)
        found["direct_packets"] = {way: counted["direct_packets"] for way, counted in made.counters().items()}
    found["killed_agent"] = {kind: killed_agent(kind) for kind in OUTAGES}
    return found


def scheduled() -> dict[str, Any]:
    """`schedule SECONDS`, for people."""
    with bench() as made:
        found = schedule(made, int(sys.argv[2]))
        return found | {"direct_packets": {way: one["direct_packets"] for way, one in made.counters().items()}}


def kinds() -> dict[str, Any]:
    with bench() as made:
        return {f"{kind} to_pd": outage(made, kind, "to_pd") for kind in OUTAGES}


def outage(made: Layered, kind: str, way: str) -> dict[str, Any]:
    other = WAYS[1 - WAYS.index(way)]
    found: dict[str, Any] = {"before": made.crosses(way)}
    control = {"before": made.connects(way)}
    made.put({way: {"outage": kind}})
    found["kept"] = made.kept()
    made.send(way, 100)
    control["during"] = made.connects(way, within_s=0.3)
    found["during"] = made.received(way)
    found["other"] = made.crosses(other)
    made.put({"outage": None})
    found["healed"] = made.kept()
    made.send(way, 200)
    found["after"] = made.received(way)
    control["after"] = made.connects(way)
    rows = len(made.logged())
    made.put({"outage": None})
    return {**found, "control": control, "rows_of_a_second_healing": len(made.logged()) - rows}


def now_ns() -> int:
    return time.monotonic_ns()


def composed(made: Layered) -> dict[str, Any]:
    states = []

    def state() -> None:
        states.append(made.kept()["to_pd"])

    with LinkLayer(made.state, "stall", now_ns(), [(0.0, {"outage": "stall"})]) as stall:
        until(lambda: len(stall.events) == 2)
        state()
        made.send("to_pd")
        with LinkLayer(made.state, "hole", now_ns(), [(0.0, {"to_pd": {"outage": "blackhole"}})]) as hole:
            until(lambda: len(hole.events) == 2)
            found: dict[str, Any] = {"during": made.received("to_pd", within_s=0.2)}
            state()
            made.send("to_pd", 100)
        found["during"] += made.received("to_pd", within_s=0.2)
        state()
    state()
    return {**found, "states": states, "after": made.received("to_pd")}


def under_way(made: Layered, kind: str) -> list[int]:
    """What arrives of what is in the delay line while the other direction is cut and healed."""
    made.put({"to_pd": {"delay_s": 0.5}})
    made.send("to_pd")
    made.put({"to_prfaas": {"outage": kind}})
    made.put({"to_prfaas": {"outage": None}})
    arrived = made.received("to_pd", within_s=0.8)
    made.put({"to_pd": {"delay_s": 0.0}})
    return arrived


def steps(made: Layered) -> dict[str, Any]:
    asked = [(at_s, {"rate_bps": rate}) for at_s, rate in ((0.2, 20e6), (0.4, 50e6))]
    with LinkLayer(made.state, "steps", now_ns(), [*asked, (0.6, {})]) as layer:
        until(lambda: len(layer.events) == 6)
    log = [row for row in made.logged() if row["layer"] == "steps"]
    return {"events": layer.events, "faults": layer.faults, "log": log}


def killed_client(made: Layered, kind: str) -> dict[str, Any]:
    client = subprocess.Popen([sys.executable, "-m", "tests.wire.test_layers", "hold", str(made.dir), kind])
    until(lambda: made.kept() == dict.fromkeys(WAYS, kind))
    found: dict[str, Any] = {"during": made.kept()}
    client.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    client.wait(10)
    until(lambda: made.request("GET", "/link")[1]["to_pd"]["layers"] == [])
    found |= {"restored_s": time.monotonic() - killed_s, "after": made.kept()}
    made.received("to_pd", within_s=0.05)
    return {**found, "crosses": made.crosses("to_pd")}


def hold() -> None:
    """A client that cuts the link for an hour."""
    state, kind = StateDir(Path(sys.argv[2])), sys.argv[3]
    with LinkLayer(state, "held", now_ns(), [(0.0, {"outage": kind}), (3600.0, {})]):
        time.sleep(60)


def killed_agent(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        made = Layered(Path(folder))
        first = made.start_agent(RATE_BPS)
        with LinkLayer(made.state, "held", now_ns(), [(0.0, {"outage": kind}), (3600.0, {})]) as layer:
            until(lambda: len(layer.events) == 2)
            first.send_signal(signal.SIGKILL)
            first.wait(10)
            until(lambda: layer.lost)
            made.send("to_pd", 500)
            found: dict[str, Any] = {"without": made.received("to_pd"), "lost": layer.lost}
            (made.dir / "ready").unlink()
            second = made.start_agent(RATE_BPS)
        found["next"] = made.kept()
        waited = made.received("to_pd")  # of a stall, what was sent in it
        assert waited == ([*range(500, 500 + DATAGRAMS)] if kind == "stall" else []), waited
        found["crosses"] = made.crosses("to_pd")
        second.terminate()
        second.wait(10)
        return found


def bucket(made: Layered) -> dict[str, Any]:
    server = made.serve(PROBE_PORT)
    sent_before = made.counters()["to_pd"]["kv"]["sent_bytes"]
    with LinkLayer(made.state, "bucket", now_ns(), [], token_bucket={**BUCKET, "resume_s": 1.0}) as layer:
        until(lambda: len(layer.events) == 2)
        t0_ns = layer.t0_ns
        probe = made.probe(PROBE_PORT, 4)
        until(lambda: len(layer.events) == 4)
        result(probe)
        other_bps = made.request("GET", "/link")[1]["to_prfaas"]["asked"]["rate_bps"]
    server.terminate()
    server.wait(10)
    changes = [row for row in layer.events if row["direction"] == "to_pd"]
    throttled_ns = changes[1]["t_applied_ns"]
    rows = samples(made)
    base = [row for row in rows if 0.3e9 <= row[0] - throttled_ns <= 1.8e9]
    return {
        "faults": layer.faults,
        "changes": changes,
        "throttled_s": (throttled_ns - t0_ns) * 1e-9,
        "sent_bytes": at(rows, throttled_ns) - sent_before,
        "base_sent_bps": (base[-1][1] - base[0][1]) * 8e9 / (base[-1][0] - base[0][0]),
        "other_bps": other_bps,
    }


def schedule(made: Layered, seconds: int) -> dict[str, Any]:
    """A rate that goes up and down twenty times a second, under one TCP connection: what was sent, by what it might."""
    square = from_data({"kind": "square", "high_bps": 150e6, "low_bps": 50e6, "period_s": 0.1})
    assert isinstance(square, Schedule)
    steps = [(at_s, {"rate_bps": rate_bps}) for at_s, rate_bps in square.steps(0.0, float(seconds))]
    server = made.serve(PROBE_PORT)
    probe = made.probe(PROBE_PORT, seconds + 4)
    time.sleep(1.5)
    with LinkLayer(made.state, "square", now_ns() + 10**8, steps) as layer:
        until(lambda: len(layer.events) == 2 * len(steps), patience_s=seconds + 10)
    goodput = result(probe)["goodput_bps"]
    server.terminate()
    server.wait(10)
    taken = [row for row in layer.events if row["direction"] == "to_pd"]
    rows = samples(made)
    spans = pairwise([(row["t_applied_ns"], row["state"]["rate_bps"]) for row in taken])
    from_ns, until_ns = taken[0]["t_applied_ns"], taken[-1]["t_applied_ns"]
    return {
        "faults": layer.faults,
        "steps": len(taken),
        "late_p99_s": sorted(row["late_s"] for row in taken)[int(0.99 * len(taken))],
        "goodput_bps": goodput,
        "sent_bytes": at(rows, until_ns) - at(rows, from_ns),
        "integral_bytes": sum(rate * (to_ns - at_ns) * 1e-9 / 8 for (at_ns, rate), (to_ns, _) in spans),
        "burst_bytes": burst_bytes(150e6) + 2 * 150e6 / 8 * 0.1,  # and what the samples' spacing blurs
    }


def samples(made: Layered) -> list[tuple[int, int]]:
    """(CLOCK_MONOTONIC ns, KV bytes sent to_pd so far) as the agent sampled them."""
    with open(made.dir / "counters.csv") as opened:
        return [
            (int(row["t_ns"]), int(row["kv_bytes"])) for row in csv.DictReader(opened) if row["direction"] == "to_pd"
        ]


def at(rows: list[tuple[int, int]], t_ns: int) -> float:
    """A counter at a time between two of its samples, at the rate that it had before."""
    i = next(i for i, (sampled_ns, _) in enumerate(rows) if sampled_ns > t_ns) - 1
    (before_ns, before), (last_ns, last) = rows[i - 1], rows[i]
    return last + (last - before) / (last_ns - before_ns) * (t_ns - last_ns)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold()
    print(json.dumps({"measure": measure, "kinds": kinds, "schedule": scheduled}[sys.argv[1]]()))
