"""A suite's scenarios on the wire: few runs, coarse minimums; a tripwire, and a check that virtual time tells the
truth.

Seeds are paired and the arms take turns at going first, on one testbed: what drifts, drifts for both. A run whose meter
failed is tried once more, and is invalid when that fails too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from testbed.gate.fingerprints import like
from testbed.gate.jobs import Measured
from testbed.gate.measure import own_findings
from testbed.gate.run import ARMS, Course, Done, Gate
from testbed.scenario import Scenario
from testbed.simulate import simulate

if TYPE_CHECKING:
    from testbed.gate.whole import BringUp
    from testbed.load import Testbed

TRIES: Final = 2
FIDELITY: Final = 0.25
"""How far P90 TTFT in virtual time may be from the wire's before a reader is told."""


def run_wire(gate: Gate, bring_up: BringUp, out: Path) -> None:
    """Run the wire's scenarios of a gate, each on a testbed of its own. out: where each run's results go.

    bring_up: the testbed of a scenario, up as long as its context.
    """
    for course in (course for course in gate.courses if course.compared.clock == "wire"):
        with bring_up(course.scenario.only(None, gate.arms["baseline"].policy)) as testbed:
            while not course.stopped:
                for _ in range(gate.count(course)):
                    _pair(gate, course, testbed, out / course.compared.name)
                gate.look(course)


def _pair(gate: Gate, course: Course, testbed: Testbed, out: Path) -> None:
    """One seed under both arms."""
    i = len(course.runs["baseline"])
    ran: dict[str, Done] = {}
    for arm in ARMS if i % 2 == 0 else ARMS[::-1]:
        step = gate.step(course, arm, i)
        ran[arm] = Done(_measure(step.job.scenario, testbed, out / f"{arm}-{step.seed}"), cached=False)
        gate.tell(2, len(ran))
    gate.done += len(ran)
    for arm in ARMS:
        course.runs[arm].append(ran[arm])


def _measure(scenario: Scenario, testbed: Testbed, folder: Path) -> Measured:
    """One load, tried again when its meter failed, beside the same in virtual time. folder: of the try that counts; one
    that failed is put aside, as `FOLDER-invalid-1`."""
    from testbed.load import run_load

    name, up = scenario.deployments[0].policy.name, testbed.scenario.deployments[0].policy.name
    started_s = time.perf_counter()
    for attempt in range(1, TRIES + 1):
        outcome = run_load(testbed, scenario, folder, policy=None if name == up else name)
        if attempt == TRIES or outcome.summary["verdict"]["status"] != "invalid":
            break
        folder.rename(folder.with_name(f"{folder.name}-invalid-{attempt}"))
    summary: dict[str, Any] = outcome.summary
    facts = orjson.loads((outcome.folder / "provenance.json").read_bytes())
    virtual = simulate(scenario).summary["ttft_s"]["p90"]
    return {
        "status": summary["verdict"]["status"],
        "reasons": summary["verdict"]["reasons"],
        "summary": summary,
        "findings": [*own_findings(summary), fidelity(virtual, summary["ttft_s"]["p90"])],
        "like": like(scenario, (), facts["trace"]["rows_sha256"]),
        "digest": "",
        "requests": summary["requests"]["scheduled"],
        "wall_s": time.perf_counter() - started_s,
    }


def fidelity(virtual_s: float | None, wire_s: float | None) -> dict[str, Any]:
    """Whether P90 TTFT in virtual time is the wire's: a finding that nobody promised, so that it is shown."""
    apart = None if not virtual_s or not wire_s else abs(virtual_s / wire_s - 1)
    return {
        "name": "virtual time agrees",
        "status": "not_checked" if apart is None else "held" if apart <= FIDELITY else "broken",
        "value": apart,
        "bound": FIDELITY,
        "sentence": f"P90 TTFT is {virtual_s or 0:.2f} s in virtual time and {wire_s or 0:.2f} s on the wire",
        "promised": False,
    }
