"""`provenance.json`: what a result depends on besides the scenario, so that it can be repeated, or not compared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from netem.link import LinkError
from testbed.launch import client
from testbed.launch.launchers import COMPOSE
from testbed.launch.state import StateDir, TestbedError
from testbed.link_schedule import schedule_of
from testbed.scenario import Scenario
from traces.load import Trace

_PACKAGES = ("prfaas-testbed", "aiohttp", "locust", "msgspec", "numpy", "pandas", "pydantic", "pyroute2", "uvloop")


def provenance(scenario: Scenario, trace: Trace, state: StateDir | None) -> dict[str, Any]:
    """Code, versions, machine, seed and trace of a run. state: of the testbed it ran on, None in virtual time."""
    launched = _launched(state)
    computes = (
        scenario.backend == "hybrid" and launched["launcher"] != COMPOSE
    )  # there the image has a torch of its own
    packages = (*_PACKAGES, "torch") if computes else _PACKAGES
    return {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": _git(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "machine": machine() | {"root": os.geteuid() == 0},
        "congestion_control": scenario.link.congestion_control if state is not None else None,
        **launched,
        "scenario": {"name": scenario.name, "fingerprint": scenario.fingerprint()},
        "seed": scenario.seed,
        "trace": {
            "format": trace.format,
            "sha256": trace.sha256,
            "rows_sha256": trace.rows_sha256,
            "rows_read": trace.rows_read,
            "kept": len(trace.requests),
            "dropped": trace.dropped,
            "notes": trace.notes,
        },
        "link_schedule_sha256": _schedule_sha256(scenario),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def machine() -> dict[str, Any]:
    """What computes here."""
    return {
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "cpu": _cpu_model(),
    }


def _launched(state: StateDir | None) -> dict[str, Any]:
    """{"launcher", "image", "tcp_rto_max_s"}: who started the processes; in containers of which image (its versions are
    `compose/requirements*.lock`'s, not this host's); most wall seconds between two tries of TCP in the sites.

    All None in virtual time and of a testbed that is gone; the last also where the kernel has no such bound to set (its
    own is 120 s).
    """
    told: dict[str, Any] = dict.fromkeys(("launcher", "image", "tcp_rto_max_s"))
    if state is None or (record := state.read()) is None:
        return told
    try:
        topology = client.supervisor(state).get("/status")["topology"]
    except TestbedError:
        return told
    return {**told, "launcher": record.launcher, **{name: topology.get(name) for name in ("image", "tcp_rto_max_s")}}


def _schedule_sha256(scenario: Scenario) -> str | None:
    """The identity of the link's schedule, a recording's content included; None without one, or when that has gone."""
    try:
        schedule = schedule_of(scenario)
    except LinkError:
        return None
    return None if schedule is None else schedule.sha256


def _git() -> dict[str, Any] | None:
    """Revision of the checkout the code runs from, and whether it was changed; None outside one."""
    here = Path(__file__).parent
    try:
        top = _output(here, "rev-parse", "--show-toplevel")
        if not (Path(top) / "testbed" / "scheduler").is_dir():
            return None
        return {"revision": _output(here, "rev-parse", "HEAD"), "dirty": bool(_output(here, "status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
