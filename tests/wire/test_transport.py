"""The KV transport across a really shaped link, between processes in namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wire, pytest.mark.measures]

ROOT = Path(__file__).parents[2]


@cache
def missing() -> str | None:
    """What this machine lacks for namespaces and the yardstick; None when nothing."""
    for program in ("unshare", "nsenter", "iperf3"):
        if shutil.which(program) is None:
            return f"needs {program}"
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    made = subprocess.run(["unshare", *user, "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "needs the right to make namespaces: see 'prfaas doctor'" if made.returncode else None


def interfaces() -> set[str]:
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def test_transfers_cross_a_shaped_link_whole_and_fill_it() -> None:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    before = interfaces()
    # The bench's own bar is for a quiet machine.
    options = ["--rates-mbit", "100", "--rounds", "1", "--seconds", "2", "--transfer-mb", "2", "--bar", "0.7"]
    bench = subprocess.run(
        [sys.executable, "-m", "tests.bench.transport", "--json", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert bench.returncode == 0, bench.stdout + bench.stderr
    (figures,) = json.loads(bench.stdout)["rates"]
    assert figures["ours"]["goodput_bps"] <= 100e6  # it really went through the shaper
    assert figures["ours"]["refused"] == 0
    assert interfaces() == before
