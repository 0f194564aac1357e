"""Chaos in containers, by its command: a worker's container is killed and started, another paused, the link cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from testbed.launch import engine as engines
from tests.wire.loopback import free_port

pytestmark = pytest.mark.docker

EXPERIMENT = """
name: contained
description: What a container engine can do to a worker, and an outage of the link.
scenario: chaos
set: [workload.duration_s=130, workload.warmup_s=0]
clocks: [wire]
hypothesis:
  before: {errors: 1}
  after: {errors: 0}
  recovery_s: 20
method:
  - {kind: killed_worker, node: prfaas-1, at_s: 40, duration_s: 20}
  - {kind: frozen_worker, node: pd-p-0, at_s: 50, duration_s: 10}
  - {kind: outage, at_s: 80, duration_s: 3, how: blackhole}
"""
DEEDS = {
    "prfaas-1 killed": 40, "prfaas-1 killed: healed": 60, "pd-p-0 frozen": 50, "pd-p-0 frozen: healed": 60,
}  # fmt: skip


def test_every_fault_is_done_in_its_time_and_nothing_of_it_is_left() -> None:
    with tempfile.TemporaryDirectory(prefix="prf") as name:
        place = Path(name)
        (place / "contained.yaml").write_text(EXPERIMENT)
        environment = {**os.environ, "PRFAAS_STATE": str(place / "state"), "PYTHONPATH": str(engines.REPOSITORY)}
        words = ["chaos", "contained.yaml", "--clock", "wire", "--launcher", "compose", "--port", str(free_port())]
        done = subprocess.run(
            [sys.executable, "-m", "testbed.cli", *words, "--out", "out", "--json"],
            env=environment, cwd=place, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode in (0, 3), done.stderr  # 3: too busy a machine for the figures, not for what was done
        told = json.loads((place / "out" / "contained" / "prfaas" / "journal.json").read_text())
    assert (told["rollback"]["failed"], told["rollback"]["status"]) == ([], "clean")
    did = {one["what"]: one for one in told["journal"]}
    for what, at_s in DEEDS.items():
        assert did[what]["asked_s"] == at_s
        assert at_s - 0.01 <= did[what]["true_s"] < at_s + 20, what
        assert "failed" not in did[what]["detail"]
    assert told["windows"]["after"]["values"]["errors"] == 0
    assert engines.containers(engines.connect()) == {}
