"""A testbed in containers: who may do what, which ways there are, and what happens when containers end."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from testbed.launch import client, launchers
from testbed.launch.compose_file import INSIDE, WAN
from testbed.launch.state import TestbedError
from testbed.load import run_load
from tests.docker.conftest import Contained

pytestmark = pytest.mark.docker

CONNECTS = """
import json, socket, sys, time
address, seconds = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
end, through = time.monotonic() + seconds, []
while time.monotonic() < end and not through:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(address)
            through.append(time.monotonic_ns())
        except OSError:
            pass
    time.sleep(0.005)
print(json.dumps(through))
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def process(name: str) -> dict[str, Any]:
    told = launchers.status()["supervisor"]["processes"]
    found: dict[str, Any] = next(one for one in told if one["name"] == name)
    return found


def connects(site: str, address: str, port: int, seconds: float) -> list[int]:
    """When (CLOCK_MONOTONIC ns) a site first got through to an address, trying all the time; empty if it did not."""
    argv = [sys.executable, "-c", CONNECTS, address, str(port), str(seconds)]
    answer = client.supervisor(timeout_s=seconds + 20).post(
        "/run", {"site": site, "argv": argv, "timeout_s": seconds + 9}
    )
    assert answer["rc"] == 0, answer
    through: list[int] = json.loads(answer["stdout"])
    return through


def wait_known(contained: Contained, name: str) -> None:
    def known() -> bool:
        nodes = contained.testbed.call("GET", "/prfaas/status")["nodes"]
        return any(one["name"] == name and one["alive"] for one in nodes)

    until(known)


def test_only_the_wan_may_administer_a_network_and_nobody_else_is_root(contained: Contained) -> None:
    for service, container in contained.made.items():
        host, config = container.attrs["HostConfig"], container.attrs["Config"]
        assert host["CapDrop"] == ["ALL"], service
        assert not host["Privileged"], service
        assert host["ReadonlyRootfs"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        added = sorted(name.removeprefix("CAP_") for name in host["CapAdd"] or [])
        assert added == (["DAC_OVERRIDE", "NET_ADMIN"] if service == WAN else []), service
        assert (config["User"].split(":")[0] == "0") == (service == WAN), service
        assert config["Healthcheck"]["Test"], service


def test_a_container_cannot_write_its_file_system_nor_see_the_control_socket(contained: Contained) -> None:
    worker = contained.made["prfaas-0"]
    assert worker.exec_run(["touch", "/opt/prfaas/src/x"]).exit_code != 0
    seen = worker.exec_run(["ls", INSIDE]).output.decode().split()
    assert sorted(seen) == ["config", "logs", "ready"]
    assert worker.exec_run(["ls", f"{INSIDE}/config"]).output.decode().split() == ["prfaas-0.json"]


def test_nothing_is_published_and_the_host_reaches_the_gateway_alone(contained: Contained) -> None:
    assert not any(one.attrs["HostConfig"]["PortBindings"] for one in contained.made.values())
    with IPRoute() as ip:
        addresses = [one.get_attr("IFA_ADDRESS") for one in ip.get_addr(family=socket.AF_INET)]
        routes = [one.get_attr("RTA_DST") for one in ip.get_routes(family=socket.AF_INET) if one["dst_len"]]
    assert not [one for one in (*addresses, *routes) if str(one).startswith("10.77.")]
    assert contained.testbed.call("GET", "/prfaas/status")["nodes"]


@pytest.mark.parametrize("site", ["prfaas", "pd"])
def test_a_site_reaches_the_other_and_nothing_else(contained: Contained, site: str) -> None:
    bridge = contained.engine.networks.get("bridge").attrs["IPAM"]["Config"][0].get("Gateway", "172.17.0.1")
    with socket.create_server((bridge, 0)) as host:  # the engine's own bridge: an address of this host
        assert connects(site, bridge, host.getsockname()[1], 1.0) == []
    worker = next(one for one in contained.testbed.call("GET", "/prfaas/status")["nodes"] if one["site"] != site)
    config = json.loads(contained.testbed.state.config_file(worker["name"]).read_text())
    assert connects(site, config["host"], config["metrics_port"], 0.5)


def test_both_ways_are_shaped_and_measured_so(contained: Contained) -> None:
    link = client.agent().get("/link")
    for direction, interface in (("to_pd", "w-pd"), ("to_prfaas", "w-prfaas")):
        assert link[direction]["interface"] == interface
        assert link[direction]["asked"]["rate_bps"] == 8e9 * 5 * 0.001
        assert link[direction]["counters"]["direct_packets"] == 0
    topology = launchers.status()["supervisor"]["topology"]
    assert topology["congestion_control"] == "cubic"
    assert topology["image"] == contained.made[WAN].attrs["Image"]


def test_a_load_crosses_the_link(contained: Contained, tmp_path: Path) -> None:
    outcome = run_load(contained.testbed, contained.testbed.scenario, tmp_path / "out")
    summary = outcome.summary
    assert summary["requests"]["completed"] == summary["requests"]["scheduled"] > 20
    assert summary["link"]["wan_tx_bytes"] > summary["link"]["kv_bytes"] > 1e6
    assert summary["link"]["direct_packets"] == 0


def test_a_killed_wan_passes_nothing_until_it_is_shaped_again(contained: Contained) -> None:
    supervisor = client.supervisor(timeout_s=60)
    config = json.loads(contained.testbed.state.config_file("pd-d-0").read_text())
    before = contained.testbed.state.root.joinpath("link-applied.jsonl").read_text().splitlines()
    supervisor.post("/signal", {"name": "agent", "signal": "KILL"})
    until(lambda: process("agent")["state"] == "dead")
    assert connects("prfaas", config["host"], config["metrics_port"], 0.5) == []
    supervisor.post("/restart", {"name": "agent"})
    contained.made[WAN].kill()  # and by the engine's own command, behind the supervisor's back
    until(lambda: process("agent")["state"] == "dead")
    begun_ns = time.monotonic_ns()
    contained.made[WAN].start()
    through = connects("prfaas", config["host"], config["metrics_port"], 40.0)
    rows = contained.testbed.state.root.joinpath("link-applied.jsonl").read_text().splitlines()[len(before) :]
    shaped = [json.loads(row) for row in rows if json.loads(row)["t_applied_ns"] > begun_ns]
    assert {row["direction"] for row in shaped} == {"to_pd", "to_prfaas"}
    assert through
    assert through[0] > max(row["t_applied_ns"] for row in shaped)
    counters = client.agent().get("/counters")
    assert all(one["direct_packets"] == 0 for one in counters.values())


def test_what_ends_and_begins_behind_the_supervisors_back_is_known(contained: Contained) -> None:
    contained.made["prfaas-1"].kill()
    until(lambda: process("prfaas-1")["state"] == "dead")
    assert process("prfaas-1")["signal"] == "SIGKILL"
    contained.made["prfaas-1"].start()
    until(lambda: process("prfaas-1")["state"] == "running")
    wait_known(contained, "prfaas-1")


def test_a_worker_is_paused_killed_and_started_again(contained: Contained) -> None:
    supervisor = client.supervisor(timeout_s=60)
    supervisor.post("/signal", {"name": "pd-d-1", "signal": "STOP"})
    assert process("pd-d-1")["frozen"]
    supervisor.post("/signal", {"name": "pd-d-1", "signal": "CONT"})
    assert not process("pd-d-1")["frozen"]
    supervisor.post("/signal", {"name": "pd-d-1", "signal": "STOP"})
    supervisor.post("/signal", {"name": "pd-d-1", "signal": "KILL"})
    until(lambda: process("pd-d-1")["state"] == "dead")
    assert process("pd-d-1")["signal"] == "SIGKILL"
    supervisor.post("/restart", {"name": "pd-d-1"})
    assert process("pd-d-1")["state"] == "running"
    wait_known(contained, "pd-d-1")


def test_one_engine_has_room_for_one_testbed(
    contained: Contained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from testbed.cli.shared import bring_up
    from tests.wire.loopback import free_port

    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "s"))
    with pytest.raises(
        TestbedError, match=rf"one engine has room for one.*PRFAAS_STATE={contained.testbed.state.root}"
    ):
        bring_up(contained.testbed.scenario, free_port(), "compose")
    monkeypatch.setenv("PRFAAS_STATE", str(contained.testbed.state.root))
    assert launchers.status()["up"]
