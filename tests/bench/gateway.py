"""What the testbed itself adds to a TTFT: its client and return parts, of one request at a time on an idle testbed.

    python -m tests.bench.gateway --json

The real processes at time_scale 1, so that a millisecond measured is a millisecond added: under the namespaces launcher
as `prfaas up` uses it, or, with `--on loopback` and where namespaces cannot be made, on 127.0.0.1. The client is the
replay's own, one connection a request, and the parts are the report's own. A profile of 20 ms prefills keeps it short.
Exit code 1 when the sum of the two medians is not below `--bar-ms`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from testbed.fleet import launch_spec
from testbed.launch import launchers, namespaces
from testbed.launch.state import StateDir
from testbed.load import Testbed
from testbed.report.tables import request_table
from testbed.scenario import Scenario, load
from tests.wire.loopback import Loopback, free_port
from traces.client_rows import ClientRow, write_rows
from traces.request import Request
from traces.sse import exchange, request_bytes

PROFILE = """
name: bench
kind: timing
model: bench
hardware: none
lengths_tokens: [1, 1024]
s_kv: {unit: bytes, values: [100000, 1000000], status: assumed, source: bench}
t_prefill_s: {values: [0.01, 0.02], status: assumed, source: bench}
decode_step_s: {value: 0.001, status: assumed, source: bench}
decode_slots: {value: 10, status: assumed, source: bench}
pieces: {value: 4, status: assumed, source: bench}
"""
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 8
WARM_UP = 10  # requests before those that count
PAUSE_S = 0.01  # between requests
PARTS = ("client", "return")


def scenario(folder: Path) -> Scenario:
    """The toy's fleet on the bench's profile, at the real system's pace and size."""
    path = folder / "bench.yaml"
    path.write_text(PROFILE)
    lengths = f"workload.lengths={{kind: mix, values: [{INPUT_TOKENS}], weights: [1]}}"
    profiles = f"deployments.prfaas-pd.profiles={{prfaas: {path}, pd: {path}}}"
    scale = ["scale={}", "decode={}", "telemetry_s=1", "name=bench"]
    return load("toy", [lengths, profiles, *scale]).only("prfaas-pd")


@contextlib.contextmanager
def running(chosen: Scenario, on: str, folder: Path) -> Iterator[Testbed]:
    """The testbed, up; gone afterwards. The user's own state directory is not touched."""
    if on == "loopback":
        with Loopback(chosen) as fleet:
            yield Testbed(StateDir(fleet.root / "state"), chosen, fleet.port)
        return
    os.environ["PRFAAS_STATE"] = str(folder / "state")
    state = StateDir(create=True)
    try:
        up = launchers.up(launch_spec(chosen, chosen.deployments[0], port=free_port(), state=state))
        yield Testbed(state, chosen, up.port)
    finally:
        launchers.down()


def measure(testbed: Testbed, requests: int, folder: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of each part, of `requests` one at a time."""
    begun = testbed.call("POST", "/prfaas/loads", {"lead_s": 0})
    host = ("127.0.0.1", testbed.port)
    rows = []
    for i in range(WARM_UP + requests):
        message = request_bytes(host, begun["model"], Request(0.0, INPUT_TOKENS, OUTPUT_TOKENS), f"bench-{i}")
        row = ClientRow(f"bench-{i}", i, time.monotonic_ns(), output_tokens_asked=OUTPUT_TOKENS)
        exchange(row, message, host, 10.0)
        if row.error:
            raise SystemExit(f"request {i} failed: {row.error}")
        if i >= WARM_UP:
            rows.append(row)
        time.sleep(PAUSE_S)
    totals = testbed.call("POST", f"/prfaas/loads/{begun['id']}/end")
    write_rows(folder / "client.csv", rows)
    table = request_table(
        testbed.state.loads / totals["rows"],
        folder / "client.csv",
        t0_ns=begun["t0_ns"],
        time_scale=1,
        warmup_s=0,
        duration_s=1e9,
    )
    parts = {part: table[f"ttft_{part}_s"].to_numpy() * 1e3 for part in PARTS}
    parts["sum"] = parts["client"] + parts["return"]
    return {part: spread(values) for part, values in parts.items()}


def spread(values: Any) -> dict[str, float]:
    median, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"median_ms": round(median, 3), "p90_ms": round(p90, 3), "p99_ms": round(p99, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--on", choices=("namespaces", "loopback"), help="namespaces where they can be made")
    parser.add_argument("--bar-ms", type=float, default=3.0, help="what the two medians' sum must stay below")
    options = parser.parse_args()
    on = options.on or ("loopback" if namespaces.refusal() else "namespaces")
    folder = Path(tempfile.mkdtemp(prefix="prf"))
    try:
        with running(scenario(folder), on, folder) as testbed:
            parts = measure(testbed, options.requests, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    added_ms = round(parts["client"]["median_ms"] + parts["return"]["median_ms"], 3)
    passed = added_ms < options.bar_ms
    if options.json:
        settings = {
            "on": on,
            "requests": options.requests,
            "bar_ms": options.bar_ms,
            "load_average": os.getloadavg()[0],
        }
        print(json.dumps({"bench": "gateway", "passed": passed, **settings, "added_ms": added_ms, **parts}, indent=1))
    else:
        each = ", ".join(f"{part} {of['median_ms']:.2f} (p90 {of['p90_ms']:.2f})" for part, of in parts.items())
        print(f"on {on}, one request at a time, ms at the median: {each}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
