"""Nothing of a testbed listens where it must not: every listening socket of each of its namespaces, and of the host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netem.topology import ADDRESSES
from testbed.launch import namespaces, processes
from tests.wire.host import marked
from tests.wire.loopback import free_port
from tests.wire.sockets import Listener, listeners
from tests.wire.sockets import namespaces as by_namespace

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

REPOSITORY = Path(__file__).parents[2]
LOOPBACK = ("127.0.0.1", "::1")
SETS = (
    "cache_bytes=1e9",
    "link.delay_s=0.02",
    "link.jitter_s=0.005",  # has a delay line
    "link.cross_traffic=[{direction: to_pd, kind: elastic, flows: 1}, "
    "{direction: to_pd, kind: constant, rate_bps: 1e8}]",
)
BUSY_S = 2.0  # a load is under way


def prfaas(state: Path, *words: str) -> subprocess.Popen[str]:
    own = {**os.environ, "PRFAAS_STATE": str(state), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "testbed.cli", *words],
        env=own,
        cwd=state.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    """A testbed with all kinds of processes, listened to while a load of two Locust processes is under way."""
    with tempfile.TemporaryDirectory(prefix="prf") as folder:
        state = Path(folder) / "state"
        port = free_port()
        try:
            up = prfaas(state, "up", "smoke", "--port", str(port), *(word for one in SETS for word in ("--set", one)))
            assert up.wait(120) == 0, up.stdout and up.stdout.read()
            load = prfaas(state, "load", "--duration-s", "80", "--rate-rps", "1", "--workers", "2")
            deadline = time.monotonic() + 60
            while sum("locust" in one for one in marked(state)) < 3 and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(BUSY_S)
            own = [process.id.pid for process in processes.find(state)]
            marks = marked(state)
            everybody = {*own, *(int(one.split()[0]) for one in marks)}
            yield {
                "port": port,
                "state": state,
                "host": listeners(holders=everybody),
                "inside": {name: listeners(pid) for name, pid in by_namespace(own).items()},
                "locust": [one for one in marks if "locust" in one],
            }
            load.communicate(timeout=120)
        finally:
            prfaas(state, "down").wait(60)


def test_on_the_host_it_is_loopback_and_the_testbeds_own_directory(seen: dict[str, Any]) -> None:
    assert len(seen["locust"]) >= 3, "the load was not under way"
    wrong = [
        str(one)
        for one in seen["host"]
        if one.address not in LOOPBACK and not one.address.startswith(str(seen["state"]))
    ]
    assert wrong == []
    assert Listener("tcp", "127.0.0.1", seen["port"]) in seen["host"]


def test_inside_it_is_the_sites_own_addresses_and_loopback(seen: dict[str, Any]) -> None:
    host = os.readlink("/proc/self/ns/net")
    inside = {name: found for name, found in seen["inside"].items() if name != host}
    assert len(inside) == 4, "the sites, the WAN, and the supervisor's own"
    allowed = {*LOOPBACK, *ADDRESSES.values()}
    wrong = [
        f"{name}: {one}"
        for name, found in inside.items()
        for one in found
        if one.address not in allowed and not one.address.startswith(str(seen["state"]))
    ]
    assert wrong == []
    for site, address in ADDRESSES.items():
        ports = {one.port for found in inside.values() for one in found if one.address == address}
        assert len(ports) >= 3, f"{site}: too few to have been looked at"


def test_the_search_finds_each_kind() -> None:
    with contextlib.ExitStack() as stack:
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0prfaas-test")
        abstract.listen()
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", 0))
        found = listeners()
        assert Listener("unix", "@prfaas-test") in found
        assert Listener("tcp", "0.0.0.0", tcp.getsockname()[1]) in found
        assert Listener("udp", "0.0.0.0", udp.getsockname()[1]) in found
