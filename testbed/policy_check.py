"""`prfaas policy check`: whether a policy keeps the contract of `testbed.scheduler.api.Policy`.

Its source is read (`policy_check_source.py`), then it is run in four processes with other hash seeds
(`policy_check_run.py`); what they decided is compared here, and how long it took held against what a request can wait.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from testbed import fast
from testbed.policies import SHIPPED, load_policy, wants_future
from testbed.policy_check_source import Violation, read_source
from testbed.scenario_data import ScenarioError

MOST_US: Final = {"12": 100.0, "64": 400.0}
"""Microseconds that a decision may take, by the number of instances: at the gateway a thousand requests a second, with
all that they need besides, leave no more. The shipped policy's take 5 and 13."""

MOST_TICK_MS: Final = 20.0
"""Milliseconds that a tick may take, in the median: the gateway serves nobody meanwhile."""

HASH_SEEDS: Final = ("1", "2", "3", "4")
"""Of the processes: the first of five names in a set is the same in all of them one time in 125."""
LONGEST_S: Final = 300.0

REMEDIES: Final = {
    "purity": "read the view, keep what you need of it as numbers and names, and change nothing",
    "contract": "answer a Decision for live nodes of the view, or a Reject; see testbed.scheduler.api.Policy",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check. route_us: by instances. decisions: that all processes made alike."""

    policy: str
    violations: list[Violation] = field(default_factory=list)
    route_us: dict[str, float] = field(default_factory=dict)
    tick_ms: float | None = None
    decisions: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "ok": not self.violations,
            "violations": [one._asdict() for one in self.violations],
            "route_us": self.route_us,
            "tick_ms": self.tick_ms,
            "decisions": self.decisions,
        }


def check_policy(name: str) -> Checked:
    """Check a policy by its name. Raises ScenarioError for one that cannot be loaded or started."""
    made = load_policy(name)
    at_class = _at_class(type(made))
    violations = []
    if name not in SHIPPED:
        file = inspect.getsourcefile(type(made))
        violations += read_source(Path(file)) if file is not None else []
    if wants_future(made):
        remedy = "leave wants_future out: a policy that is told the future is an upper bound, not a scheduler"
        return Checked(name, [*violations, Violation("sight", at_class, "wants to be told the future", remedy)])
    with ThreadPoolExecutor(max_workers=2) as threads:
        runs = list(threads.map(lambda seed: _watched(name, seed), HASH_SEEDS))
    for kind, where, what in runs[0]["problems"]:
        violations.append(Violation(kind, _shown(where), what, REMEDIES[kind]))
    violations += _differing(runs, at_class)
    speed = runs[0]["speed_us"]
    for count, took_us in speed.items():
        if took_us > MOST_US[count]:
            what = f"a decision takes {took_us:,.0f} us at {count} instances, at most {MOST_US[count]:g} are to spare"
            violations.append(Violation("speed", at_class, what, "move what does not depend on the request to tick"))
    if runs[0]["tick_ms"] > MOST_TICK_MS:
        what = f"a tick takes {runs[0]['tick_ms']:,.0f} ms, at most {MOST_TICK_MS:g} are to spare"
        violations.append(Violation("speed", at_class, what, "do it less often, or in parts"))
    decisions = sum(len(lines) for lines in runs[0]["decided"].values())
    return Checked(name, list(dict.fromkeys(violations)), speed, runs[0]["tick_ms"], decisions)


def _differing(runs: list[dict[str, Any]], at_class: str) -> list[Violation]:
    """Where a process decided otherwise than the first: one place is enough."""
    pairs = [(load, one, run["decided"][load]) for load, one in runs[0]["decided"].items() for run in runs[1:]]
    for load, one, other in pairs:
        apart = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if apart is None and len(one) == len(other):
            continue
        shown = f"{one[apart]} / {other[apart]}" if apart is not None else f"{len(one)} / {len(other)} of them"
        what = f"two processes decided otherwise on the same events ({load}): {shown}"
        remedy = "no chance without a seed of its own, no order of a set, no hash of a text; sort what you iterate over"
        return [Violation("determinism", at_class, what, remedy)]
    return []


def _watched(name: str, hash_seed: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "testbed.policy_check_run", name]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, fast.PURE: "1"},
            capture_output=True,
            timeout=LONGEST_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ScenarioError(
            f"policy {name!r}: not done with 800 requests after {LONGEST_S:g} s; does it wait for something?"
        ) from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it ended without a word"]
        raise ScenarioError(f"policy {name!r}: cannot be run: {last[0]}")
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


def _at_class(made: type) -> str:
    try:
        return _shown(f"{inspect.getsourcefile(made)}:{inspect.getsourcelines(made)[1]}")
    except (OSError, TypeError):
        return made.__module__


def _shown(where: str) -> str:
    path, _, line = where.rpartition(":")
    here = Path.cwd()
    return f"{Path(path).relative_to(here)}:{line}" if Path(path).is_relative_to(here) else where
