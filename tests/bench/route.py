"""What a decision of the shipped policy costs, by the number of instances, with and without cached prefixes.

    python -m tests.bench.route --json

Process time of `Prfaas.route` alone, the median of several rounds, microseconds; and of `Control.handle(Arrive)` with
it, directory and accounting included. `loop_ns` is what one iteration of a plain Python loop takes at the same
moment. Exit code 1 when a bar given with --bar-us (at 12 instances; at 64 with --bar-64-us) is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

from testbed.assemble import (
    control_rules,
    cost_functions,
    instances,
    lengths_of_workload,
    max_input_tokens,
    policy_setup,
)
from testbed.control import Arrive, Control, NodeSpec, NodeUp
from testbed.scenario import load
from testbed.scheduler.api import RequestView
from testbed.scheduler.baselines import Homogeneous
from testbed.scheduler.prfaas import Prfaas
from tests.bench.simulate import loop_ns

FLEETS = {12: (4, 3, 5), 64: (21, 16, 27)}
"""Instances: (remote prefill, local prefill, local decode), in the paper's proportions."""


def fleet_of(count: int) -> tuple[Control, Prfaas]:
    """Control of a fleet with everything up, and its policy."""
    prfaas, p, d = FLEETS[count]
    scenario = load("paper", [f"deployments.prfaas-pd.fleet={{n_prfaas: {prfaas}, n_p: {p}, n_d: {d}}}"])
    deployment = scenario.deployments[0]
    policy = Prfaas()
    lengths = lengths_of_workload(scenario.workload, max_input_tokens(scenario, deployment))
    policy.start(policy_setup(scenario, deployment, lengths, {}))
    fleet = [NodeSpec(name, site, role, 20) for name, site, role in instances(deployment)]
    rules = control_rules(scenario, deployment)
    control = Control(fleet, cost_functions(scenario, deployment), 100e9, policy, Homogeneous(), rules)
    for spec in fleet:
        control.handle(0.0, NodeUp(spec.name, spec.role))
    return control, policy


def timed_us(call: Callable[[int], object], count: int = 2000, rounds: int = 7) -> float:
    """Microseconds of process time a call, the median of the rounds."""
    found = []
    for _ in range(rounds):
        started = time.process_time_ns()
        for i in range(count):
            call(i)
        found.append((time.process_time_ns() - started) / count / 1e3)
    return statistics.median(found)


def measure(count: int) -> dict[str, float]:
    """The figures of a fleet of `count` instances."""
    control, policy = fleet_of(count)
    view = control.view
    holders = [node.name for node in view.nodes.values() if node.role == "prefill"]
    hits = {name: 512 * (i % 20 + 1) for i, name in enumerate(holders)}
    plain = [RequestView(f"r{i}", 0.0, 400 + 60 * i) for i in range(2000)]
    cached = [
        one._replace(input_tokens=one.input_tokens + 12_000, l_pd=9728, l_prfaas=10_240, hits=hits) for one in plain
    ]
    return {
        "route_us": timed_us(lambda i: policy.route(plain[i], view)),
        "route_cached_us": timed_us(lambda i: policy.route(cached[i], view)),
        "arrive_us": timed_us(lambda i: control.handle(0.0, Arrive(f"a{i}", 400 + 60 * i, 1024)), rounds=3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.route", description="What a decision costs.")
    parser.add_argument("--bar-us", type=float, default=float("inf"), help="most microseconds at 12 instances")
    parser.add_argument("--bar-64-us", type=float, default=float("inf"), help="most microseconds at 64")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = {str(count): measure(count) for count in FLEETS}
    bars = {"12": asked.bar_us, "64": asked.bar_64_us}
    ok = all(max(found[n]["route_us"], found[n]["route_cached_us"]) <= bars[n] for n in found)
    if asked.json:
        print(json.dumps({"ok": ok, "loop_ns": loop_ns(), **found}, indent=2))
    else:
        for name, figures in found.items():
            print(f"{name} instances: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
