"""Testbeds in containers that do not end as they should: nothing of them is left all the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.launch import engine as engines
from testbed.launch import launchers
from testbed.launch.state import StateDir
from tests.docker.conftest import SCENARIO, holds
from tests.wire.loopback import free_port

pytestmark = pytest.mark.docker


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine with a state directory of the test's own; in the end it has what it had."""
    engine = engines.connect()
    before = holds(engine)
    root = Path(tempfile.mkdtemp(prefix="prf"))
    monkeypatch.setenv("PRFAAS_STATE", str(root))
    yield engine
    launchers.down()
    shutil.rmtree(root, ignore_errors=True)
    assert holds(engine) == before


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """`prfaas up` of a small testbed, under way."""
    scenario = tmp_path / "contained.yaml"
    scenario.write_text(yaml.safe_dump(SCENARIO))
    argv = [
        sys.executable,
        "-m",
        "testbed.cli",
        "up",
        str(scenario),
        "--launcher",
        "compose",
        "--port",
        str(free_port()),
    ]

    def interruptible() -> None:  # also where the tests are run in the background, which ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=interruptible)


def test_a_killed_supervisor_leaves_containers_that_down_removes(engine: Any, tmp_path: Path) -> None:
    up = started(tmp_path)
    said, _ = up.communicate(timeout=120)
    assert up.returncode == 0, said
    record = StateDir().read()
    assert record is not None
    os.kill(record.outer.pid, signal.SIGKILL)
    while record.outer.alive():
        time.sleep(0.05)
    assert launchers.status()["stale"]
    assert engines.owner(engine) == str(StateDir().root)
    told = launchers.down()
    assert any(line.startswith("removed container prfaas-gateway") for line in told)
    assert engines.containers(engine) == {}
    assert launchers.down() == []


def test_a_start_that_is_interrupted_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    up = started(tmp_path)
    deadline = time.monotonic() + 120
    while not engines.containers(engine) and up.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    up.send_signal(signal.SIGINT)
    said, _ = up.communicate(timeout=60)
    assert up.returncode == 130, said
    assert engines.containers(engine) == {}
    assert not launchers.status()["up"]
