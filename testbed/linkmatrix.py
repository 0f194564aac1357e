"""The link by itself, measured: brings one up (no testbed need be), measures every cell of `netem.cells`, judges.

The measuring runs as pid 1 of namespaces of its own (`netem.matrix`), or as the only program of User-Mode Linux
(`netem.uml`), where netem has the delay and the loss. It ends with this process, however that ends, and the kernel
removes all of it. Wall units throughout: this is about the wire, not about a scenario.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final

from netem.cells import GOODPUT_TOLERANCE, RTT_SLACK_S, Cell, Settings, full, of_kinds, quick
from netem.link import DIRECTIONS, LinkError
from netem.uml import missing
from testbed.launch.namespaces import unshare_argv

NATIVE: Final = "native"
UML: Final = "uml"
MOST_IN_UML_BPS: Final = 1e9
CLOCK_TOLERANCE: Final = 0.005
END_S: Final = 10.0
PACKETS_IN_UML, PACKETS_PER_S_IN_UML = 10_000, 2_500.0  # what its one CPU sends and receives in time

Say = Callable[[str], None]


def matrix(
    settings: Settings, *, kinds: Sequence[str] | None, short: bool, in_uml: bool, say: Say, only: str | None = None
) -> dict[str, Any]:
    """{"ok", "status", "machines": {"native": ..., "uml": ...}, "agreement": [...]}, wall units.

    kinds: of `netem.cells.KINDS`; all but bdp unless given. short: one cell of each kind. in_uml: there as well, up to
    1 Gbit/s, compared. only: what a cell's name has to contain. `status`: pass, fail or invalid (see `judged`).
    Raises LinkError when no link can be brought up, or no cell is left.
    """
    choose = quick if short else full
    machines = {NATIVE: (settings, max(cell.rate_bps for cell in full(settings)))}
    if in_uml:
        if lacking := missing():
            raise LinkError(f"--in-uml: {lacking}")
        machines[UML] = (_for_uml(settings), MOST_IN_UML_BPS)
    cells_of = {}
    for machine, (its_settings, most_bps) in machines.items():
        cells = of_kinds(list(choose(its_settings, most_bps)), kinds)
        if machine == UML:  # jitter is the delay line's, which that kernel does not have
            cells = [cell for cell in cells if cell.kind != "jitter"]
        cells = [cell for cell in cells if only is None or only in cell.name]
        if not cells:
            asked = {"--cells": ",".join(kinds or ()), "--only": only, "--quick": "of each kind" if short else None}
            told = ", ".join(f"{option} {value}" for option, value in asked.items() if value)
            why = "; jitter is not measured there" if machine == UML and "jitter" in (kinds or ()) else ""
            raise LinkError(f"{told}: leaves no cell {machine}{why}; leave an option out: names are told on stderr")
        cells_of[machine] = cells
    results = {machine: _of_machine(machine, cells, say) for machine, cells in cells_of.items()}
    agreement = agree(results[NATIVE]["cells"], results[UML]["cells"]) if in_uml else []
    return {**judged(results, agreement), "machines": results, "agreement": agreement}


def _for_uml(settings: Settings) -> Settings:
    return replace(settings, packets=PACKETS_IN_UML, packets_per_s=PACKETS_PER_S_IN_UML)


def _of_machine(machine: str, cells: Sequence[Cell], say: Say) -> dict[str, Any]:
    """{"kernel", "delay_by", "congestion_control", "took_s", "clock_error", "cells"}. Raises LinkError."""
    started_s = time.monotonic()
    plan = {"cells": [asdict(cell) for cell in cells], "agent": {"state": {"rate_bps": cells[0].rate_bps}}}
    about: dict[str, Any] = {}
    clocks: list[Mapping[str, int]] = []
    found: dict[str, dict[str, Any]] = {}
    for line in _lines("netem.uml" if machine == UML else "netem.matrix", plan):
        match line.pop("event"):
            case "up":  # once for cells without loss, once for those with it
                about = {key: line[key] for key in ("kernel", "delay_by", "congestion_control", "cpus")}
                say(f"{machine}: Linux {line['kernel']}, {line['delay_by']['delay'] or 'nothing'} delays")
            case "clock":
                clocks.append(line)
            case "begin":
                place = f"{len(found) + 1}/{len(cells)}" if line["tries"] == 1 else f"try {line['tries']}"
                say(f"[{machine} {place}] {line['cell']} ...")
            case "cell":
                found[line["cell"]] = line
                if told := [*line["wrong"], *line["spoilt"]]:
                    say(f"  {line['verdict']}: {'; '.join(told)}")
    return {
        **about,
        "took_s": time.monotonic() - started_s,
        "clock_error": clock_error(clocks),
        "cells": list(found.values()),
    }


def clock_error(clocks: Sequence[Mapping[str, int]]) -> float | None:
    """How much faster a guest's clock goes than this machine's, as a fraction; None on this machine itself."""
    if len(clocks) < 2 or "host_ns" not in clocks[0]:
        return None
    first, last = clocks[0], clocks[-1]
    return (last["t_ns"] - first["t_ns"]) / (last["host_ns"] - first["host_ns"]) - 1


def _lines(module: str, plan: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the module says, in namespaces of its own, as it comes. Raises LinkError with what went wrong."""
    argv = [*unshare_argv(), sys.executable, "-m", module, "--plan", json.dumps(plan), "--until-eof"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
            with suppress(subprocess.TimeoutExpired):  # then it is ended, and that is an error
                process.wait(END_S)
        finally:
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if process.returncode != 0:
            said.seek(0)
            why = said.read().strip().removeprefix("error: ")
            raise LinkError(why or f"{module} ended with {process.returncode}; see 'prfaas doctor'")


def judged(results: Mapping[str, Mapping[str, Any]], agreement: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"ok", "status", "counts", "wrong_clocks"}.

    fail: a cell failed, or the machines do not agree. invalid: none did, but a cell was spoilt, or a guest's clock goes
    wrong, by which nothing can be judged. pass: everything was measured and holds.
    """
    counts = Counter(cell["verdict"] for one in results.values() for cell in one["cells"])
    wrong_clocks = [name for name, one in results.items() if abs(one["clock_error"] or 0.0) > CLOCK_TOLERANCE]
    if wrong_clocks:
        status = "invalid"
    elif counts["fail"] or any(one["ok"] is False for one in agreement):
        status = "fail"
    else:
        status = "invalid" if counts["invalid"] else "pass"
    return {"ok": status == "pass", "status": status, "counts": dict(counts), "wrong_clocks": wrong_clocks}


def agree(native: Sequence[Mapping[str, Any]], uml: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cell by cell, what both measured: goodput and round trip within 2 % of each other (and 0.5 ms), and losses that
    can be of one link. `ok` is None where either was spoilt."""
    others = {cell["cell"]: cell for cell in uml}
    return [_compared(one, others[one["cell"]]) for one in native if one["cell"] in others]


def _compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    apart: dict[str, float] = {}
    wrong = []
    for figure, slack in (("goodput_bps", 0.0), ("rtt_p50_s", RTT_SLACK_S)):
        here, there = one["found"][figure], other["found"][figure]
        if here is not None and there is not None and not one["loss"]:
            apart[figure] = there / here - 1
            if abs(there - here) > GOODPUT_TOLERANCE * here + slack:
                wrong.append(figure)
    for way in DIRECTIONS:
        bounds = [cell["found"]["loss_bounds"].get(way) for cell in (one, other)]
        if all(bounds) and not max(low for low, _ in bounds) <= min(high for _, high in bounds):
            wrong.append(f"loss {way}")
    measured = "invalid" not in (one["verdict"], other["verdict"])
    return {"cell": one["cell"], "apart": apart, "wrong": wrong, "ok": not wrong if measured else None}
