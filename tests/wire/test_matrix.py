"""`prfaas link verify --matrix` on a real link of its own: a few cells, what is told of them, and that nothing is left.

A machine that is busy may spoil a cell, which then says so; what is measured of one that is not spoilt must hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.wire.test_link import ROOM, WHY_NOT, host

pytestmark = [pytest.mark.wire, pytest.mark.measures, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

PRFAAS = [sys.executable, "-m", "testbed.cli", "link", "verify", "--matrix", "--json"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Quick cells of 2 s, a schedule of 4 s; no testbed is up, and there is no state directory."""
    state = tmp_path_factory.mktemp("state") / "none"
    before = host()
    command = [*PRFAAS, "--quick", "--cells", "goodput,loss,schedule", "--seconds", "2", "--schedule-s", "4"]
    env = {**os.environ, "PRFAAS_STATE": str(state)}
    done = subprocess.run(command, cwd=ROOM, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode in (0, 1, 3), done.stderr
    assert host() == before
    assert not state.exists()
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["status"] == {0: "pass", 1: "fail", 3: "invalid"}[done.returncode]
    return found


def test_nothing_that_was_measured_is_wrong(result: dict[str, Any]) -> None:
    assert result["status"] in ("pass", "invalid"), [
        (cell["cell"], cell["wrong"]) for cell in result["machines"]["native"]["cells"] if cell["verdict"] == "fail"
    ]


def test_it_says_on_what_it_was_measured(result: dict[str, Any]) -> None:
    native = result["machines"]["native"]
    assert native["kernel"] == os.uname().release
    assert native["delay_by"]["delay"] in ("nfqueue", "netem")
    assert native["congestion_control"] == "cubic"


def test_each_kind_has_its_figures(result: dict[str, Any]) -> None:
    found = {cell["kind"]: cell["found"] for cell in result["machines"]["native"]["cells"]}
    assert found["goodput"]["first_second_bits"] <= found["goodput"]["first_second_bound_bits"]
    assert 0 < found["loss"]["trains"]["to_pd"]["lost"] < found["loss"]["trains"]["to_pd"]["sent"]
    assert found["schedule"]["goodput_bps"] > 0
    assert all(one["direct_packets"] == 0 for one in found.values())


def test_a_schedule_is_played_step_by_step_under_one_connection(result: dict[str, Any]) -> None:
    (cell,) = (one for one in result["machines"]["native"]["cells"] if one["kind"] == "schedule")
    assert cell["connections"] == 1
    assert cell["found"]["failure"] is None
    assert cell["found"]["steps"] == pytest.approx(80, abs=4)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_however_it_ends(how: signal.Signals) -> None:
    before, alive_before = host(), matrices()
    command = [*PRFAAS, "--cells", "rtt"]
    process = subprocess.Popen(command, cwd=ROOM, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("rtt" in line for line in process.stderr)  # a cell has begun
    assert matrices() - alive_before
    process.send_signal(how)
    process.communicate(timeout=30)
    end_s = time.monotonic() + 20
    while matrices() - alive_before:
        assert time.monotonic() < end_s, "processes of the matrix are left"
        time.sleep(0.05)
    assert host() == before


def matrices() -> set[int]:
    """Processes of any matrix on this machine: what measures, and its agents, whose files lie in its own /run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it ended
            continue
        of_agent = b"netem.agent" in words and any(word.startswith(b"/run/") for word in words)
        if of_agent or b"netem.matrix" in words:
            found.add(int(path.parent.name))
    return found
