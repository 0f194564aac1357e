"""Cross-traffic on a real kernel: what competitors of `netem.rivals` take of a shaped link, and what they leave.

One child (`python -m tests.wire.test_cross measure` under unshare) does the measuring and prints JSON; the tests read
it. Two pairs of four connections each stand for the KV: `netem.probe` instead of workers.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from netem.link import expected_goodput_bps
from netem.topology import ADDRESSES, build
from tests.wire.test_link import WHY_NOT, Bench, child, isolation, result, until

pytestmark = [pytest.mark.wire, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RATE_BPS = 100e6
SETTLE_S, WINDOW_S = 1.0, 6.0
PAIR: dict[str, Any] = {"direction": "to_pd", "kind": "elastic", "flows": 4}
RIVALS: dict[str, list[dict[str, Any]]] = {
    "nobody": [],
    "one flow": [{"direction": "to_pd", "kind": "elastic", "flows": 1}],
    "eight flows": [{"direction": "to_pd", "kind": "elastic", "flows": 8}],
    "datagrams": [{"direction": "to_pd", "kind": "constant", "rate_bps": 40e6}],
    "too many datagrams": [{"direction": "to_pd", "kind": "constant", "rate_bps": 120e6}],
    "back": [{"direction": "to_prfaas", "kind": "elastic", "flows": 4}],
}


class Crossing:
    """Both sites' processes, as a load holds them."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._lines = {}
        for site, sends in (("prfaas", "to_pd"), ("pd", "to_prfaas")):
            (other,) = set(ADDRESSES) - {site}
            config = {
                "socket": str(bench.dir / f"cross.{site}"), "ready_file": str(bench.dir / f"ready-{site}"),
                "sends": sends, "address": ADDRESSES[site], "peer": ADDRESSES[other],
            }  # fmt: skip
            (bench.dir / f"{site}.json").write_text(json.dumps(config))
            process = bench.start(site, "netem.rivals", "--config", str(bench.dir / f"{site}.json"))
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
            until((bench.dir / f"ready-{site}").exists)
        self._bench = bench

    def begin(self, sources: list[dict[str, Any]]) -> None:
        t0_ns = time.monotonic_ns() + 200_000_000
        for site in ADDRESSES:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(self._bench.dir / f"cross.{site}"))
            self._lines[site] = sock.makefile("rw")
            self.ask(site, {"t0_ns": t0_ns, "sources": sources}, "ready")

    def ask(self, site: str, line: dict[str, Any], answer: str) -> dict[str, Any]:
        stream = self._lines[site]
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        while answer not in (got := json.loads(stream.readline())):
            assert "error" not in got, got
        return got

    def count(self) -> dict[str, Any]:
        """What has landed of each source, and when it was asked."""
        landed: dict[str, Any] = {"t_ns": time.monotonic_ns()}
        for site in ADDRESSES:
            landed |= self.ask(site, {"count": True}, "landed")["landed"]
        return landed

    def stop(self) -> None:
        for site in ADDRESSES:
            self.ask(site, {"stop": True}, "stopped")

    def end(self) -> None:
        for stream in self._lines.values():
            stream.close()


def beside(bench: Bench, crossing: Crossing, rivals: list[dict[str, Any]]) -> dict[str, Any]:
    """Two pairs and `rivals`: goodput of each, bits/s, and what was counted at both ends."""
    before = bench.counters()
    crossing.begin([PAIR, PAIR, *rivals])
    time.sleep(SETTLE_S)
    first = crossing.count()
    time.sleep(WINDOW_S)
    last = crossing.count()
    crossing.stop()
    time.sleep(0.3)
    after, counted = bench.counters(), crossing.count()
    crossing.end()
    seconds = (last.pop("t_ns") - first.pop("t_ns")) / 1e9
    return {
        "goodput_bps": [(last[i]["bytes"] - first[i]["bytes"]) * 8 / seconds for i in sorted(last)],
        "counted": counted,
        "class_bytes": {way: after[way]["kv"]["sent_bytes"] - before[way]["kv"]["sent_bytes"] for way in after},
        "direct": [one["direct_packets"] for one in after.values()],
    }


def measure() -> dict[str, Any]:
    with ExitStack() as stack:
        bench = Bench(build(), Path(stack.enter_context(tempfile.TemporaryDirectory())))
        agent = bench.start_agent(RATE_BPS)
        stack.callback(agent.terminate)
        crossing = Crossing(bench, stack)
        return {name: beside(bench, crossing, rivals) for name, rivals in RIVALS.items()}


if __name__ == "__main__":
    print(json.dumps({"measure": measure}[sys.argv[1]]()))
