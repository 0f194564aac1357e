"""Does the gate tell wrong schedulers from the right one? Every fault of `tests.gate.faults` is judged by it.

    python -m tests.gate.mutants --suite quick
    python -m tests.gate.mutants --suite full --only link timing --json

A fault is flagged when the verdict is `worse`. The policy unchanged, under a class of its own and under other seeds,
must not be. The exit code is 1 when a suite does not hold its bar: `full` flags every fault, any other suite nine of
ten.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from testbed.gate import suite as suites
from testbed.gate.cache import default_folder
from testbed.gate.result import GateResult
from testbed.gate.whole import gate
from tests.gate.faults import FAULTS

PACKAGE = "tests.gate.faults."
BASELINE = "prfaas"
UNCHANGED = "unchanged:Unchanged"


def worst(result: GateResult) -> str:
    """What told: the objective that is furthest on the wrong side, or the invariants that broke."""
    for scenario in result.scenarios:
        for invariant in scenario.invariants:
            if invariant.worse:
                return f"{scenario.name}: {invariant.name}"
    told = [(one.change, scenario.name, one) for scenario in result.scenarios for one in scenario.objectives]
    worse = [(change, name, one) for change, name, one in told if one.verdict == "worse" and change is not None]
    if not worse:
        return "; ".join(result.reasons[:1])
    _, name, one = min(worse, key=lambda item: item[0])
    effect = "" if one.effect is None else f" {one.effect:+.0%}" if one.relative else f" {one.effect:+.3g} {one.unit}"
    return f"{name}: {one.metric}{effect}"


def judged(suite: suites.Suite, candidate: str, jobs: int | None, *, a_a: bool = False) -> dict[str, Any]:
    """A row of the table."""
    began = time.monotonic()
    result = gate(suite, BASELINE, candidate, cache=default_folder(), jobs=jobs, a_a=a_a)
    return {
        "policy": "other seeds" if a_a else candidate.removeprefix(PACKAGE),
        "verdict": result.verdict,
        "where": worst(result) if result.verdict not in ("same", "better") else "",
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gate.mutants", description="What the gate finds.")
    parser.add_argument("--suite", default="quick", help="a suite's name or file")
    parser.add_argument("--only", nargs="*", help="faults whose names contain one of these")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    suite = suites.load(asked.suite)
    names = [name for name in FAULTS if not asked.only or any(part in name for part in asked.only)]
    rows = []
    for name in names:
        rows.append(judged(suite, PACKAGE + name, asked.jobs))
        print(f"{rows[-1]['policy']:<32}{rows[-1]['verdict']:<14}{rows[-1]['where']}", file=sys.stderr, flush=True)
    unchanged = [
        judged(suite, PACKAGE + UNCHANGED, asked.jobs),
        judged(suite, BASELINE, asked.jobs, a_a=True),
    ]
    flagged = sum(row["verdict"] == "worse" for row in rows)
    least = len(names) if asked.suite == "full" else -(-9 * len(names) // 10)
    ok = flagged >= least and all(row["verdict"] not in ("worse", "invalid") for row in unchanged)
    if asked.json:
        print(json.dumps({"suite": asked.suite, "ok": ok, "flagged": flagged, "of": len(names), "least": least,
                          "faults": rows, "unchanged": unchanged}, indent=2))  # fmt: skip
    else:
        for row in [*rows, *unchanged]:
            print(f"{row['policy']:<32}{row['verdict']:<14}{row['wall_s']:>6} s  {row['where']}")
        print(f"{asked.suite}: {flagged} of {len(names)} faults flagged, at least {least} have to be")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
