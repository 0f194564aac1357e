"""What hostile clients do to well-behaved ones: TTFT and errors without and with each of them, on a real testbed.

    python -m tests.bench.hostile [--json]

A well-behaved client asks one request after another; a hostile one (`tests.wire.hostile`), a process of low priority,
comes and goes beside it, each after a quiet span of its own to compare with. Told as well: the gateway's memory and
descriptors at most. Exit code 1 when a well-behaved request failed, or the gateway grew beyond `--memory-mb`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from testbed.launch import namespaces
from testbed.load import Testbed
from tests.bench.gateway import INPUT_TOKENS, PAUSE_S, running, scenario
from tests.wire.hostile import ATTACKS
from traces.client_rows import ClientRow
from traces.request import Request
from traces.sse import exchange, request_bytes

OUTPUT_TOKENS = 4
TIMEOUT_S = 10.0


class WellBehaved:
    """One request after another, and what became of each."""

    def __init__(self, port: int) -> None:
        self._host = ("127.0.0.1", port)
        self._number = 0

    def ask_while(self, goes_on: Callable[[], bool]) -> dict[str, Any]:
        """TTFT (ms, wall; of those that got an answer) and errors of the requests made meanwhile."""
        ttft_ms, errors = [], []
        while goes_on():
            self._number += 1
            name = f"well-{self._number}"
            message = request_bytes(self._host, "prfaas", Request(0.0, INPUT_TOKENS, OUTPUT_TOKENS), name)
            row = ClientRow(name, self._number, time.monotonic_ns(), output_tokens_asked=OUTPUT_TOKENS)
            exchange(row, message, self._host, TIMEOUT_S)
            if row.error or row.t_first_token_ns is None:
                errors.append(row.error)
            else:
                ttft_ms.append((row.t_first_token_ns - row.t_sched_ns) / 1e6)
            time.sleep(PAUSE_S)
        median, p99 = np.percentile(ttft_ms or [float("nan")], [50, 99]).tolist()
        told = {"requests": len(ttft_ms) + len(errors), "errors": sorted(set(errors)), "failed": len(errors)}
        return {**told, "ttft_median_ms": round(median, 2), "ttft_p99_ms": round(p99, 2)}


class Peak:
    """The most memory and descriptors that a process has had, looked at every 0.1 s."""

    def __init__(self, process: psutil.Process) -> None:
        self.rss_mb, self.descriptors = 0.0, 0
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.rss_mb = max(self.rss_mb, self._process.memory_info().rss / 1e6)
            self.descriptors = max(self.descriptors, self._process.num_fds())


def gateway_of(testbed: Testbed) -> psutil.Process:
    """The gateway's process, as the host sees it."""
    config = str(testbed.state.config_file("gateway"))
    return next(one for one in psutil.process_iter() if config in _words(one))


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def measure(testbed: Testbed, name: str, seconds: float) -> dict[str, Any]:
    """A quiet span, and one beside an attack."""
    well = WellBehaved(testbed.port)
    deadline = time.monotonic() + seconds
    quiet = well.ask_while(lambda: time.monotonic() < deadline)
    words = [sys.executable, "-m", "tests.wire.hostile", name, str(testbed.port), str(seconds)]
    with (
        Peak(gateway_of(testbed)) as peak,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19) and None) as hostile,
    ):
        beside = well.ask_while(lambda: hostile.poll() is None)
        assert hostile.stdout is not None
        answers = json.loads(hostile.stdout.read())["answers"]
    clients = testbed.call("GET", "/prfaas/status")["clients"]
    told = {"rss_mb": round(peak.rss_mb, 1), "descriptors": peak.descriptors, "answers": answers}
    return {"attack": name, "quiet": quiet, "beside": beside, **told, "refused": clients["refused"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hostile", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each span, wall seconds")
    parser.add_argument("--on", choices=("namespaces", "loopback"), help="namespaces where they can be made")
    parser.add_argument("--memory-mb", type=float, default=600.0)
    options = parser.parse_args()
    on = options.on or ("loopback" if namespaces.refusal() else "namespaces")
    folder = Path(tempfile.mkdtemp(prefix="prf"))
    try:
        with running(scenario(folder), on, folder) as testbed:
            found = [measure(testbed, name, options.seconds) for name in options.attacks]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    passed = all(one["beside"]["failed"] == 0 and one["rss_mb"] < options.memory_mb for one in found)
    if options.json:
        print(json.dumps({"bench": "hostile", "passed": passed, "on": on, "attacks": found}, indent=1))
    else:
        print("attack         TTFT ms, median (p99)            failed    gateway")
        for one in found:
            quiet, beside = one["quiet"], one["beside"]
            spans = f"{quiet['ttft_median_ms']:.1f} ({quiet['ttft_p99_ms']:.1f}) -> "
            spans += f"{beside['ttft_median_ms']:.1f} ({beside['ttft_p99_ms']:.1f})"
            failed = f"{beside['failed']} of {beside['requests']}"
            print(f"{one['attack']:14} {spans:33} {failed:9} {one['rss_mb']:.0f} MB, {one['descriptors']} descriptors")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
