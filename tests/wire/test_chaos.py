"""Chaos on the wire, by its command: what is asserted holds on a busy machine too (what was done, and what is left)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.launch import namespaces, processes

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

EXPERIMENT = """
name: medley
description: One fault of every kind that acts on a process, on the link or on the load.
scenario: chaos
set: [workload.duration_s=150, workload.warmup_s=0]
clocks: [wire]
hypothesis:
  before: {errors: 1}
  after: {errors: 0}
  recovery_s: 20
method:
  - {kind: killed_worker, node: prfaas-1, at_s: 45, duration_s: 10}
  - {kind: frozen_worker, node: pd-p-0, at_s: 50, duration_s: 10}
  - {kind: slow_worker, node: prfaas-0, at_s: 50, duration_s: 15, factor: 3}
  - {kind: landing_full, node: pd-d-0, at_s: 52, duration_s: 10}
  - {kind: link_steps, at_s: 55, duration_s: 15, steps: [[0, 8gbps], [5, 4gbps]]}
  - {kind: outage, at_s: 60, duration_s: 3, how: blackhole}
  - {kind: clients_leave, at_s: 66, fraction: 0.5}
  - {kind: load_stalls, at_s: 68, duration_s: 4}
"""
DEEDS = {
    "prfaas-1 killed": 45, "prfaas-1 killed: healed": 55, "pd-p-0 frozen": 50, "pd-p-0 frozen: healed": 60,
    "prfaas-0 3 times slower": 50, "prfaas-0 3 times slower: healed": 65,
    "100% of pd-d-0's landing room taken": 52, "100% of pd-d-0's landing room taken: healed": 62,
    "50% of the clients leave": 66, "the load's clock stands still: healed": 72,
}  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of its own; nothing of a testbed is left when the test is over."""
    with tempfile.TemporaryDirectory(prefix="prf") as name:
        folder = Path(name)
        (folder / "medley.yaml").write_text(EXPERIMENT)
        yield folder
        assert processes.find(folder / "state") == []


def start(place: Path) -> subprocess.Popen[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PRFAAS_STATE": str(place / "state"), "PYTHONPATH": str(root)}
    words = ("chaos", "medley.yaml", "--clock", "wire", "--port", str(port), "--out", "out", "--json")
    return subprocess.Popen(
        [sys.executable, "-m", "testbed.cli", *words],
        env=environment, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def journal(place: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((place / "out" / "medley" / "prfaas" / "journal.json").read_text())
    return told


def test_every_fault_is_done_in_its_time_and_nothing_of_it_is_left(place: Path) -> None:
    child = start(place)
    _, said = child.communicate(timeout=240)
    assert child.returncode in (0, 3), said  # 3: too busy a machine for the figures, not for what was done
    told = journal(place)
    assert (told["rollback"]["failed"], told["rollback"]["status"]) == ([], "clean")
    done = {one["what"]: one for one in told["journal"]}
    for what, at_s in DEEDS.items():
        assert done[what]["asked_s"] == at_s
        assert at_s - 0.01 <= done[what]["true_s"] < at_s + 20, what
        assert "failed" not in done[what]["detail"]
    rates = [one["asked_s"] for one in told["journal"] if one["what"].startswith("link 8 Gbps")]
    assert sorted(set(rates)) == [55, 60, 70]
    assert told["windows"]["during"]["values"]["left"] > 0
    assert told["windows"]["after"]["values"]["errors"] == 0


def test_an_interrupted_experiment_is_rolled_back_all_the_same(place: Path) -> None:
    child = start(place)
    deadline = time.monotonic() + 120
    pid = None
    while pid is None and time.monotonic() < deadline and child.poll() is None:
        pid = stopped(place / "state")
        time.sleep(0.05)
    assert pid is not None, "no worker was ever frozen"
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 4, said
    told = journal(place)
    assert told["verdict"]["status"] == "inconclusive"
    assert told["rollback"]["failed"] == []
    assert told["rollback"]["status"] == "clean"


def stopped(state: Path) -> int | None:
    """The pid of a stopped process of that testbed."""
    for found in processes.find(state):
        try:
            if Path(f"/proc/{found.id.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return found.id.pid
        except OSError:
            continue
    return None
