"""Hostile clients against a real gateway: others are served, and it stays small. Figures: `tests.bench.hostile`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from testbed.scenario import load
from tests.wire import hostile
from tests.wire.loopback import PATIENCE_S, Loopback

MOST_BYTES = 600e6
ASK = {"prfaas": {"input_tokens": 512}, "max_tokens": 2}
REFUSED = {
    "slow_head": {408},
    "slow_body": {408},
    "large_body": {413},
    "large_chunks": {413},
    "malformed": {400, 403, 404, 405, 431},
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Loopback]:
    sets = ["scale.time_scale=10", "scale.byte_scale=0.001", "telemetry_s=1"]
    with Loopback(load("toy", sets).only("prfaas-pd")) as fleet:
        yield fleet


@pytest.mark.parametrize("attack", hostile.ATTACKS)
def test_others_are_served_and_the_gateway_stays_small(fleet: Loopback, attack: str) -> None:
    gateway = psutil.Process(fleet.processes["gateway"].pid)
    words = [sys.executable, "-m", "tests.wire.hostile", attack, str(fleet.port), "2"]
    served = 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as hostile_client:
        while hostile_client.poll() is None:
            status, _, _ = fleet.call("POST", "/v1/completions", ASK)
            assert status == 200
            assert gateway.memory_info().rss < MOST_BYTES
            served += 1
    assert hostile_client.returncode == 0
    assert served > 0
    assert "internal" not in fleet.log("gateway")
    assert "Traceback" not in fleet.log("gateway")


@pytest.mark.parametrize("attack", ["large_body", "large_chunks", "malformed"])
def test_what_is_refused_is_refused_in_words_and_counted(fleet: Loopback, attack: str) -> None:
    before = sum(fleet.status()["clients"]["refused"].values())
    answers = hostile.attack(attack, fleet.port, 2.0)
    assert set(answers) <= REFUSED[attack], answers
    assert len(answers) == len(REFUSED[attack]) or attack == "malformed"
    after = fleet.status()["clients"]["refused"]
    assert sum(after.values()) > before
    text = fleet.call("GET", "/metrics")[2]
    for reason, count in after.items():
        assert f'prfaas_http_refused_total{{reason="{reason}"}} {count}.0' in text.splitlines()


def test_ten_thousand_idle_connections_leave_room(fleet: Loopback) -> None:
    words = [sys.executable, "-m", "tests.wire.hostile", "idle", str(fleet.port), "4"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as idle:
        seen = []
        while idle.poll() is None:
            clients = fleet.status()["clients"]
            seen.append(clients["connections"])
            assert clients["connections"] <= clients["most"]
        idle.wait(PATIENCE_S)
    assert max(seen) > 1000, "the attack was none"
