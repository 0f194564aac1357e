"""What the live page costs the gateway: its CPU time with nobody watching, one client and five.

    python -m tests.bench.dashboard --json

The smoke scenario's testbed as `prfaas up` makes it (or, with `--on loopback` and where namespaces cannot be made,
without its link), under a steady load of short requests, whose records and rows a look has to go over. The kinds take
turns in short spans, so that what else the machine does falls on all of them; figures are the gateway's CPU seconds
(user and system) a wall second, and the paired differences to nobody watching in the same turn. A page's opening, with
all that it is told of what has been, is in them. Watchers read as a browser does, and count what they are told. Exit
code 1 when one client costs `--bar` of a core or more, at the median.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from testbed.launch import namespaces
from testbed.load import Testbed
from testbed.scenario import load
from tests.bench.gateway import running

WATCHERS = (0, 1, 5)
WARM_UP_S = 3.0
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 1024


@contextlib.contextmanager
def watching(port: int, count: int) -> Iterator[list[int]]:
    """So many clients of the feed; the looks that each has been told of, complete when it is left."""
    looks = [0] * count
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(count)]

    def read(which: int, response: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while line := response.readline():
                looks[which] += line == b"event: now\n"

    readers = []
    for which, connection in enumerate(connections):
        connection.request("GET", "/prfaas/live")
        sock, response = connection.sock, connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the feed answered {response.status}: {response.read()!r}")
        readers.append((threading.Thread(target=read, args=(which, response), daemon=True), sock))
        readers[-1][0].start()
    try:
        yield looks
    finally:
        for reader, sock in readers:
            with contextlib.suppress(OSError):
                sock.shutdown(2)
            reader.join()


@contextlib.contextmanager
def loaded(port: int, clients: int) -> Iterator[None]:
    """Short prompts with long answers, one after the other from each client."""
    enough = threading.Event()
    body = json.dumps({"prfaas": {"input_tokens": INPUT_TOKENS}, "max_tokens": OUTPUT_TOKENS}).encode()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not enough.is_set():
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"a request failed: {answer.read()!r}")
            answer.read()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        enough.set()
        for one in threads:
            one.join(30)


def gateway_of(testbed: Testbed) -> psutil.Process:
    """The gateway's process: the one whose configuration is that of this testbed."""
    config = str(testbed.state.config_file("gateway"))
    for process in psutil.process_iter(["cmdline"]):
        if config in (process.info["cmdline"] or ()):
            return process
    raise SystemExit("the gateway's process was not found")


def measure(testbed: Testbed, turns: int, span_s: float) -> dict[int, list[float]]:
    """CPU seconds a wall second of the gateway, a turn each, by how many watch."""
    process = gateway_of(testbed)
    found: dict[int, list[float]] = {count: [] for count in WATCHERS}
    for turn in range(turns):
        for count in WATCHERS if turn % 2 else reversed(WATCHERS):
            begun_s, used = time.monotonic(), process.cpu_times()
            with watching(testbed.port, count) as looks:
                time.sleep(span_s)
            now = process.cpu_times()
            if any(told < span_s - 2 for told in looks):
                raise SystemExit(f"in {span_s:g} s the watchers were told of {looks} looks only")
            spent_s = now.user + now.system - used.user - used.system
            found[count].append(spent_s / (time.monotonic() - begun_s))
    return found


def told(found: dict[int, list[float]]) -> dict[str, Any]:
    """Medians of all spans, of each kind less nobody watching in the same turn, and over it."""
    nobody = found[0]
    out: dict[str, Any] = {}
    for count, spans in found.items():
        more = [one - other for one, other in zip(spans, nobody, strict=True)]
        out[str(count)] = {
            "cores": round(statistics.median(spans), 4),
            "more_cores": round(statistics.median(more), 4),
            "more_cores_spread": [round(min(more), 4), round(max(more), 4)],
            "ratio": round(statistics.median(spans) / statistics.median(nobody), 3) if any(nobody) else None,
        }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dashboard", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--on", choices=("namespaces", "loopback"), help="namespaces where they can be made")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--span-s", type=float, default=5.0, help="wall seconds that are counted, of each kind a turn")
    parser.add_argument("--clients", type=int, default=40, help="that keep a request under way each")
    parser.add_argument("--bar", type=float, default=0.05, help="of a core, that one client has to cost less than")
    options = parser.parse_args()
    on = options.on or ("loopback" if namespaces.refusal() else "namespaces")
    folder = Path(tempfile.mkdtemp(prefix="prf"))
    try:
        with running(load("smoke").only("prfaas-pd"), on, folder) as testbed, loaded(testbed.port, options.clients):
            time.sleep(WARM_UP_S)
            figures = told(measure(testbed, options.turns, options.span_s))
            ended = testbed.call("GET", "/prfaas/status")["session"]["ended"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    passed = figures["1"]["more_cores"] < options.bar
    if options.json:
        settings = {
            "on": on,
            "turns": options.turns,
            "span_s": options.span_s,
            "clients": options.clients,
            "bar": options.bar,
        }
        print(
            json.dumps(
                {
                    "bench": "dashboard",
                    "passed": passed,
                    **settings,
                    "requests": ended,
                    "load_average": os.getloadavg()[0],
                    "watchers": figures,
                },
                indent=1,
            )
        )
    else:
        for count, of in figures.items():
            print(
                f"{count} watching: {of['cores']:.1%} of a core, {of['more_cores']:+.1%} (x {of['ratio']}; "
                f"{of['more_cores_spread'][0]:+.1%} to {of['more_cores_spread'][1]:+.1%} over the turns)"
            )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
