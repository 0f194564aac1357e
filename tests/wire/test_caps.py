"""Caps a flow on a real kernel: one connection gets its cap, more of them what the link has, and nobody gets round it.

One child (`python -m tests.wire.test_caps` under unshare) does the measuring and prints JSON; the tests read it.
"""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from emulator import flows
from netem.link import expected_goodput_bps
from netem.topology import ADDRESSES, WAN_INTERFACES, build
from tests.wire.test_link import PROBE_PORT, TOLERANCE, WHY_NOT, Bench, child, isolation, result, until

pytestmark = [pytest.mark.wire, pytest.mark.measures, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RATE_BPS, CAP_BPS, LOW_BPS = 100e6, 40e6, 25e6
CONNECTIONS = (1, 2, 4)
DATA_PORT = 7296


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return child("measure", isolation(), "tests.wire.test_caps", timeout_s=180)


@pytest.mark.parametrize("way", list(WAN_INTERFACES))
@pytest.mark.parametrize("connections", CONNECTIONS)
def test_k_connections_get_k_caps_and_the_link_at_most(measured: dict[str, Any], connections: int, way: str) -> None:
    expected_bps = expected_goodput_bps(min(RATE_BPS, connections * CAP_BPS))
    assert abs(measured[f"{connections} {way}"] / expected_bps - 1) <= TOLERANCE


def test_a_cap_can_be_changed_under_traffic(measured: dict[str, Any]) -> None:
    assert abs(measured["raised"] / expected_goodput_bps(60e6) - 1) <= TOLERANCE


def test_the_transports_connections_are_told_apart(measured: dict[str, Any]) -> None:
    """toxiproxy#190: a limit of each that was one of all. Two numbered ones, and two that nobody numbered, together."""
    for bps in measured["transport"]:
        assert abs(bps / expected_goodput_bps(LOW_BPS) - 1) <= 2 * TOLERANCE


def test_the_kv_is_what_all_its_flows_sent_and_nothing_left_unshaped(measured: dict[str, Any]) -> None:
    counted = measured["counted"]
    assert counted["sent_bytes"] >= counted["payload_bytes"] * 1514 / 1448 * 0.99
    assert counted["sent_bytes"] <= counted["payload_bytes"] * 1514 / 1448 * 1.02 + 100_000
    assert counted["backlog_bytes"] > 0
    assert measured["direct_packets"] == [0, 0]


def test_a_cap_does_not_come_or_go_on_a_live_link(measured: dict[str, Any]) -> None:
    status, answer = measured["refused"]
    assert (status, answer["error"]["field"]) == (400, "per_flow_bps")


# ---- what the child does


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = Bench(build(), Path(stack.enter_context(tempfile.TemporaryDirectory())))
        agent = bench.start_agent(RATE_BPS, state={"per_flow_bps": CAP_BPS}, flows=4)
        server = bench.serve(PROBE_PORT)
        for process in (agent, server):
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
        for way in WAN_INTERFACES:
            for connections in CONNECTIONS:
                found[f"{connections} {way}"] = best(bench, connections, way)
        bench.request("PUT", "/link", {"per_flow_bps": 60e6})
        found["raised"] = best(bench, 1, "to_pd", 60e6)
        bench.request("PUT", "/link", {"per_flow_bps": LOW_BPS})
        found["refused"] = bench.request("PUT", "/link", {"per_flow_bps": None})
        found |= transport(bench)
        found["direct_packets"] = [counted["direct_packets"] for counted in bench.counters().values()]
    return found


def best(bench: Bench, connections: int, way: str, cap_bps: float = CAP_BPS) -> float:
    """Goodput, of up to three tries the nearest to what is expected, as this machine may be busy."""
    expected_bps = expected_goodput_bps(min(RATE_BPS, connections * cap_bps))
    reverse = ["--reverse"] if way == "to_prfaas" else []
    tries: list[float] = []
    while len(tries) < 3 and not (tries and abs(tries[-1] / expected_bps - 1) <= TOLERANCE):
        tries.append(result(bench.probe(PROBE_PORT, 3, "--connections", str(connections), *reverse))["goodput_bps"])
    return min(tries, key=lambda bps: abs(bps / expected_bps - 1))


def transport(bench: Bench) -> dict[str, Any]:
    """Four connections to a data port at once: numbers 0 and 3, and two of the kernel's choosing, for three seconds."""
    listener = bench.topology.call("pd", socket.create_server, (ADDRESSES["pd"], DATA_PORT))
    received = [0] * 4

    def drain(i: int, sock: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        while count := sock.recv_into(buffer):
            received[i] += count

    sent_before = bench.counters()["to_pd"]["kv"]["sent_bytes"]
    clients = []
    for i, number in enumerate((0, 3, None, None)):
        client = bench.topology.call("prfaas", socket.socket)
        if number is not None:
            flows.bind(client, number)
        client.connect((ADDRESSES["pd"], DATA_PORT))
        server, _ = listener.accept()
        threading.Thread(target=drain, args=(i, server), daemon=True).start()
        clients.append(client)
    for client in clients:
        threading.Thread(target=flood, args=(client,), daemon=True).start()
    time.sleep(1)
    start, begin_s = list(received), time.monotonic()
    time.sleep(3)
    end, seconds = list(received), time.monotonic() - begin_s
    backlog_bytes = bench.counters()["to_pd"]["kv"]["backlog_bytes"]
    for client in clients:
        client.shutdown(socket.SHUT_RDWR)
    until(lambda: bench.counters()["to_pd"]["kv"]["backlog_bytes"] == 0)
    one, other, *rest = ((after - before) * 8 / seconds for before, after in zip(start, end, strict=True))
    counted = bench.counters()["to_pd"]["kv"]["sent_bytes"] - sent_before
    return {
        "transport": [one, other, sum(rest)],
        "counted": {"sent_bytes": counted, "payload_bytes": sum(received), "backlog_bytes": backlog_bytes},
    }


def flood(client: socket.socket) -> None:
    payload = bytes(1 << 20)
    try:
        while True:
            client.sendall(payload)
    except OSError:
        return


if __name__ == "__main__":
    print(json.dumps(measure()))
