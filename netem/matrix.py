"""Measures cells (`cells.py`) over a link of its own (`bench.py`), one line of JSON on stdout a result as it comes.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m netem.matrix --plan JSON [--until-eof]

The same in User-Mode Linux, where it is the only program. The plan: {"cells": [fields of Cell], "agent": {fields of the
agent's configuration, beside its files}}. Lines: {"event": "up", kernel, delay_by, congestion_control, cpus}, {"event":
"begin", cell, tries}, {"event": "cell", ..., tries}, of which a cell's last one counts, and {"event": "clock", "t_ns"}
first and last, for who has another clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from netem import probe
from netem.bench import Bench, link
from netem.cells import (
    SETTLED_S,
    STEP_TOLERANCE,
    STEPS_BPS,
    Cell,
    Found,
    asked_of,
    expected_goodput,
    first_second_bound_bits,
    judge,
    spoilt,
)
from netem.link import DIRECTIONS, LinkError, expected_goodput_bps
from netem.meter import Meter
from netem.timelines import delivered, first_second_bps, goodput_bps, step_response_s
from netem.topology import TopologySettings

TRIES: Final = 4
"""Of a cell that a busy machine spoilt: the later ones after all other cells, as what keeps a machine busy takes its
time."""
_LEAD_S = 0.2
_CATCH_UP_S = 2.5  # what lost packets held back comes: two of TCP's timeouts, the second doubled
_STEP_AT_S = (2.0, 4.0)
_RUN = "/run"


def measured(bench: Bench, cell: Cell) -> dict[str, Any]:
    """A cell's result: what was asked and found, its `verdict` (pass, fail, invalid), what is `wrong`, and `spoilt`."""
    found, meter = _try(bench, cell)
    figures = asdict(meter.read(cell.bucket_s))
    wrong = judge(cell, found)
    why = spoilt(cell, found, figures, wrong)
    return {
        **asked_of(cell),
        "found": {**asdict(found), "loss_bounds": found.loss_bounds},
        "meter": figures,
        "verdict": "invalid" if why else "fail" if wrong else "pass",
        "wrong": wrong,
        "spoilt": why,
    }


def _try(bench: Bench, cell: Cell) -> tuple[Found, Meter]:
    asked: dict[str, Any] = {"rate_bps": cell.rate_bps, "delay_s": cell.delay_s, "jitter_s": cell.jitter_s, "loss": 0.0}
    if cell.direction and cell.loss:
        asked[cell.direction] = {"loss": cell.loss}
    with Meter() as meter:
        try:
            by_netem = bench.put(asked)[DIRECTIONS[0]]["delay_by"]["delay"] == "netem"
            before = bench.counters()
            found = _HOW[cell.kind](bench, cell)
            return _with_counters(cell, found, before, bench.counters(), by_netem), meter
        except (LinkError, OSError) as failed:
            return Found(failure=f"it could not be measured: {failed}"), meter


def _with_counters(cell: Cell, found: Found, before: Any, after: Any, by_netem: bool) -> Found:
    def grown(read: Callable[[Any], int]) -> int:
        return sum(read(after[way]) - read(before[way]) for way in DIRECTIONS)

    lines = [(before[way]["delay_line"] or {}, after[way]["delay_line"] or {}) for way in DIRECTIONS]
    if any(was.get("down") or now.get("down") or now.get("deaths", 0) > was.get("deaths", 0) for was, now in lines):
        return replace(found, failure="the delay line died: the link was down until it served again")
    queue = grown(lambda one: one["kv"]["drops"] + one["control"]["drops"])
    of_line = grown(lambda one: one["delay_line"]["overflowed"] if one["delay_line"] else 0)
    congested = cell.kind not in ("rtt", "jitter", "loss")  # TCP finds the rate by filling the queue
    asked_for = cell.loss > 0 and by_netem  # netem counts what it loses on purpose as drops of its class
    return replace(
        found,
        drops=of_line + (0 if congested or asked_for else queue),
        congestion_drops=queue if congested else 0,
        direct_packets=sum(after[way]["direct_packets"] for way in DIRECTIONS),
    )


def _goodput(bench: Bench, cell: Cell) -> Found:
    lasts_s = cell.seconds + _CATCH_UP_S
    sent = bench.call(probe.traffic, lasts_s, cell.connections, cell.direction == DIRECTIONS[1])
    skip_s = probe.settled_s(cell.seconds, cell.full_rtt_s)
    rate_bps, _ = goodput_bps(sent.timelines, cell.seconds, skip_s, _CATCH_UP_S)
    expected_bps = expected_goodput(cell)
    first_bits = first_second_bps(sent.timelines, sent.began_ns) / expected_goodput_bps(1.0)  # headers too
    return Found(
        goodput_bps=rate_bps,
        expected_bps=expected_bps,
        error=rate_bps / expected_bps - 1,
        first_second_bits=first_bits,
        first_second_bound_bits=first_second_bound_bits(cell.rate_bps),
        congestion_control=sent.congestion_control,
    )


def _idle(bench: Bench, cell: Cell) -> Found:
    least_s, p50_s, p99_s, jitter_s = probe.rtt_figures(bench.call(probe.round_trips))
    ways = [cell.direction] if cell.direction else DIRECTIONS
    trains = {
        way: asdict(bench.call(probe.train, cell.packets, cell.packets_per_s, way == DIRECTIONS[1])) for way in ways
    }
    return Found(rtt_min_s=least_s, rtt_p50_s=p50_s, rtt_p99_s=p99_s, rtt_jitter_s=jitter_s, trains=trains)


def _far(bench: Bench, cell: Cell) -> Found:
    found = _goodput(bench, cell)
    least_s, p50_s, p99_s, jitter_s = probe.rtt_figures(bench.call(probe.round_trips))
    return replace(found, rtt_min_s=least_s, rtt_p50_s=p50_s, rtt_p99_s=p99_s, rtt_jitter_s=jitter_s)


def _step(bench: Bench, cell: Cell) -> Found:
    """From the lower rate to the higher and back, under one connection."""
    low_bps, high_bps = STEPS_BPS
    stepped_ns: dict[str, int] = {}
    refused: list[str] = []

    def step() -> None:
        start_s = time.monotonic()
        for which, at_s, rate_bps in (("up", _STEP_AT_S[0], high_bps), ("down", _STEP_AT_S[1], low_bps)):
            time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            try:
                answer = bench.put({"rate_bps": rate_bps})
            except (LinkError, OSError) as error:
                refused.append(f"the step {which} to {rate_bps:g} bits/s could not be had: {error}")
                return
            stepped_ns[which] = int(answer[cell.direction]["applied"]["t_applied_ns"])

    stepping = threading.Thread(target=step, name="netem-step", daemon=True)
    stepping.start()
    sent = bench.call(probe.traffic, cell.seconds, cell.connections, cell.direction == DIRECTIONS[1])
    stepping.join()
    if refused:
        return Found(failure=refused[0])
    response_s = {
        which: step_response_s(sent.timelines, stepped_ns[which], expected_goodput_bps(rate_bps), STEP_TOLERANCE)
        for which, rate_bps in (("up", high_bps), ("down", low_bps))
        if which in stepped_ns
    }
    return Found(step_s={"up": None, "down": None, **response_s}, congestion_control=sent.congestion_control)


def _schedule(bench: Bench, cell: Cell) -> Found:
    """A course of a step every 50 ms, under one connection, from its first second to its end."""
    t0_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
    steps = [{"at_s": at_s, "state": {"rate_bps": rate_bps}} for at_s, rate_bps in cell.steps]
    with bench.playing(t0_ns, steps) as rows:
        lasts_s = _LEAD_S + cell.seconds + _LEAD_S
        sent = bench.call(probe.traffic, lasts_s, cell.connections, cell.direction == DIRECTIONS[1])
    start_ns, end_ns = (t0_ns + round(at_s * 1e9) for at_s in (SETTLED_S, cell.seconds))
    if min(one[-1][0] if one else 0 for one in sent.timelines) < end_ns:
        return Found(failure="the connection did not survive the schedule")
    span_s = cell.seconds - SETTLED_S
    rate_bps = delivered(sent.timelines, start_ns, end_ns) * 8 / span_s
    expected_bps = expected_goodput(cell, SETTLED_S, cell.seconds)
    if refused := [row["error"] for row in rows if "error" in row]:
        return Found(failure=f"a step could not be had: {refused[0]}")
    played = [row for row in rows if row["direction"] == cell.direction]
    return Found(
        goodput_bps=rate_bps,
        expected_bps=expected_bps,
        error=rate_bps / expected_bps - 1,
        steps=len(played),
        late_step_s=max((row["late_s"] for row in played), default=None),
        congestion_control=sent.congestion_control,
    )


Say = Callable[[Mapping[str, Any]], None]
_HOW: Final[Mapping[str, Callable[[Bench, Cell], Found]]] = {
    "goodput": _goodput,
    "rtt": _idle,
    "jitter": _idle,
    "loss": _idle,
    "far": _far,
    "bdp": _far,
    "step": _step,
    "schedule": _schedule,
}


def run(plan: Mapping[str, Any], say: Say) -> None:
    """Measure every cell of the plan, `say` each line. Raises LinkError when there is no link.

    Cells with loss have a link that carries single packets, which netem needs; all others one that need not.
    """
    cells = [Cell(**asked) for asked in plan["cells"]]
    say({"event": "clock", "t_ns": time.monotonic_ns()})
    for lossy, group in groupby(cells, key=lambda cell: bool(cell.loss)):
        settings = TopologySettings(single_packets=None if lossy else False)
        _run(list(group), plan["agent"], settings, say)
    say({"event": "clock", "t_ns": time.monotonic_ns()})


def _run(
    cells: Sequence[Cell],
    agent: Mapping[str, Any],
    settings: TopologySettings,
    say: Callable[[Mapping[str, Any]], None],
) -> None:
    with tempfile.TemporaryDirectory(dir=_RUN) as directory, link(Path(directory), agent, settings) as bench:
        about = {"kernel": platform.release(), "congestion_control": bench.topology.congestion_control}
        about["delay_by"] = bench.put({})[DIRECTIONS[0]]["delay_by"]
        say({"event": "up", **about, "cpus": os.cpu_count()})
        todo = cells
        for tries in range(1, TRIES + 1):
            spoilt_ones = []
            for cell in todo:
                say({"event": "begin", "cell": cell.name, "tries": tries})
                result = measured(bench, cell)
                say({"event": "cell", **result, "tries": tries})
                if result["spoilt"]:
                    spoilt_ones.append(cell)
            todo = spoilt_ones


def die_with_stdin() -> None:
    """End this process, and as pid 1 all of its namespaces, once whoever holds stdin's other end is gone."""

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def own_run() -> None:
    """A /run of this mount namespace's own, so that nothing stays of what lies in it. Raises LinkError."""
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", _RUN], capture_output=True, text=True)
    if done.returncode != 0:
        why = done.stderr.strip()
        raise LinkError(f"{_RUN}: no file system of its own could be mounted there ({why}); see 'prfaas doctor'")


def command(prog: str, what: str, measure: Callable[[Mapping[str, Any], Say], None]) -> int:
    """The command line of whoever measures a plan's cells, here or in User-Mode Linux; its exit code. What
    measure(plan, say) says are lines of JSON on standard output."""
    parser = argparse.ArgumentParser(prog=prog, description=what)
    parser.add_argument("--plan", required=True, help="JSON: cells, agent")
    parser.add_argument("--until-eof", action="store_true", help="end when stdin does, however the caller ended")
    args = parser.parse_args()
    if args.until_eof:
        die_with_stdin()
    try:
        measure(json.loads(args.plan), lambda line: print(json.dumps(line), flush=True))
    except LinkError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


def _with_own_run(plan: Mapping[str, Any], say: Say) -> None:
    own_run()
    run(plan, say)


if __name__ == "__main__":
    sys.exit(command("python -m netem.matrix", "Measure cells over a link of its own.", _with_own_run))
