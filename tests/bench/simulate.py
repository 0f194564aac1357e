"""How fast virtual time is, what memory it takes, and that a request costs the same in a long run as in a short one.

    python -m tests.bench.simulate --json
    python -m tests.bench.simulate --requests-count 1000000 --runs 1 --json
    python -m tests.bench.simulate --queueing --json

`paper`, its first deployment and policy, on one core. Requests/s are the median of the runs, by wall time and by
process time, over the run itself (without making the workload and the tables); `whole_s` is all of it but writing rows.
`loop_ns` is what one iteration of a plain Python loop takes on this machine at the same moment: on a shared machine it
is the figure to read the others by. `growth` is the cost of a request in a run ten times as long, over that in a short
one, taken by turns in this process. `compiled`: whether it was virtual time as `make fast` makes it, or plain Python.
Peak memory is the process's own highest, at the end (VmHWM). Exit code 1 when a bar given with --bar-* is missed, or,
under --queueing, when theory (at 90 %) lies outside its 99 % interval.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import testbed
from testbed.assemble import capacity_rps
from testbed.scenario import load
from testbed.simulate import Result, simulate, write
from tests.bench.queueing import Wait, md1, mmc


def loop_ns(count: int = 1_000_000) -> float:
    """Process time of one iteration of a plain loop, nanoseconds."""
    started, total = time.process_time_ns(), 0
    for i in range(count):
        total += i
    return (time.process_time_ns() - started) / count


def one(count: int) -> tuple[Result, dict[str, float]]:
    """One run of about `count` requests, timed."""
    scenario = load("paper")
    rate = 0.8 * capacity_rps(scenario, scenario.deployments[0])
    duration_s = count / rate
    sets = [f"workload.duration_s={duration_s}", f"workload.warmup_s={duration_s / 10}"]
    cpu, wall = time.process_time(), time.perf_counter()
    result = simulate("paper", sets=sets)
    whole_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    requests = len(result.requests)
    return result, {
        "requests": requests,
        "requests_per_s": requests / result.wall_s,
        "whole_s": whole_s,
        "whole_cpu_s": cpu_s,
        "requests_per_cpu_s": requests / (cpu_s - (whole_s - result.wall_s)),
        "us_per_request": (cpu_s - (whole_s - result.wall_s)) / requests * 1e6,
        "loop_ns": loop_ns(),
    }


def speed(count: int, runs: int, rows: str) -> dict[str, Any]:
    """The figures of `runs` runs, medians; rows written as asked into a folder that goes again."""
    timed = []
    for _ in range(runs):
        result, figures = one(count)
        if rows != "none":
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                write(result, Path(folder) / "out", rows)
            figures["write_s"] = time.perf_counter() - started
        timed.append(figures)
        del result
    return {key: statistics.median(run[key] for run in timed) for key in timed[0]}


def growth(count: int, turns: int = 3) -> float:
    """What a request costs in a run of 10 x count over one of count: the median of `turns` pairs."""
    one(count)
    taken = [(one(10 * count)[1]["us_per_request"], one(count)[1]["us_per_request"]) for _ in range(turns)]
    return statistics.median(long / short for long, short in taken)


def queueing() -> dict[str, Any]:
    """Mean waits at 90 % beside theory: 3 and 4 million requests."""
    return {
        "M/D/1": _told(md1(0.9, runs=30, count=100_000, seed=1)),
        "M/M/2": _told(mmc(0.9, 2, runs=40, count=100_000, seed=1)),
    }


def _told(wait: Wait) -> dict[str, Any]:
    return {
        "requests": wait.requests,
        "mean_wait": wait.mean_s,
        "theory": wait.theory_s,
        "error": wait.mean_s / wait.theory_s - 1,
        "half_width": wait.half_s / wait.mean_s,
        "agrees": wait.agrees,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.simulate", description="The speed of virtual time.")
    parser.add_argument("--requests-count", type=int, default=20_000, help="requests a run, about")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", choices=("none", "csv", "parquet"), default="none", help="rows to write")
    parser.add_argument("--no-growth", action="store_true", help="leave the tenfold run out")
    parser.add_argument("--queueing", action="store_true", help="waits at 90 %% beside theory, instead of the speed")
    parser.add_argument("--bar-rps", type=float, default=0.0, help="least requests a second of process time")
    parser.add_argument("--bar-mb", type=float, default=float("inf"), help="most peak memory, 10^6 bytes")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.queueing:
        found = queueing()
        ok = all(wait["agrees"] for wait in found.values())
    else:
        found = {"compiled": testbed.COMPILED, **speed(asked.requests_count, asked.runs, asked.requests)}
        if not asked.no_growth:
            found["growth"] = growth(max(1000, asked.requests_count // 4))
        found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        ok = found["requests_per_cpu_s"] >= asked.bar_rps and found["peak_mb"] <= asked.bar_mb
    if asked.json:
        print(json.dumps({"ok": ok, **found}, indent=2))
    else:
        for key, value in found.items():
            print(f"{key}: {value:,.3f}" if isinstance(value, float) else f"{key}: {value}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
