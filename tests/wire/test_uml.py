"""The link of this kernel beside real netem, which User-Mode Linux has (Debian: user-mode-linux, kmod): a few cells of
`prfaas link verify --matrix --in-uml`, which measures all of them.

A machine that is busy may spoil a cell, which then says so, and its test is skipped: it was not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from netem.uml import missing
from tests.wire.test_link import ROOM

WHY_NOT = missing()
pytestmark = [
    pytest.mark.wire,
    pytest.mark.measures,
    pytest.mark.skipif(WHY_NOT is not None or os.geteuid() != 0, reason=WHY_NOT or "needs root"),
]

KINDS = ("rtt", "loss", "far")
MATRIX = ["link", "verify", "--matrix", "--quick", "--in-uml", "--json", "--seconds", "1", "--cells", ",".join(KINDS)]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    command = [sys.executable, "-m", "testbed.cli", *MATRIX]
    done = subprocess.run(command, cwd=ROOM, capture_output=True, text=True, timeout=400)
    assert done.returncode in (0, 1, 3), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_there_netem_has_the_delay_and_the_loss(result: dict[str, Any]) -> None:
    assert result["machines"]["uml"]["delay_by"]["delay"] == "netem"
    assert result["machines"]["uml"]["kernel"] != result["machines"]["native"]["kernel"]


def test_its_clock_goes_as_this_machines(result: dict[str, Any]) -> None:
    assert abs(result["machines"]["uml"]["clock_error"]) <= 0.005


@pytest.mark.parametrize("machine", ["native", "uml"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cell_holds(result: dict[str, Any], kind: str, machine: str) -> None:
    (cell,) = (one for one in result["machines"][machine]["cells"] if one["kind"] == kind)
    if cell["verdict"] == "invalid":
        pytest.skip(f"not measured: {'; '.join(cell['spoilt'])}")
    assert cell["wrong"] == []
    assert cell["verdict"] == "pass"


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_agree(result: dict[str, Any], kind: str) -> None:
    (found,) = (one for one in result["agreement"] if one["cell"].startswith(kind))
    if found["ok"] is None:
        pytest.skip("not measured: the machine was busy")
    assert found["wrong"] == []
