"""Little's law, L = lambda W, in every run: the number in a stage and the sojourns there, from two accounts.

In virtual time the driver counts every message (`testbed.report.little`): exact. On the wire the workers say, whenever
they give an account of themselves, how many requests they hold, which is L by samples; the rows' stamps are lambda W.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from testbed.assemble import instances
from testbed.invariants.finding import Finding, Run, held, not_checked
from testbed.replay import EVENTS_FILE

Floats = np.ndarray[Any, np.dtype[np.float64]]

WIRE_SHARE: Final = 0.05
WIRE_REQUESTS: Final = 0.1
"""On the wire L is known once a `telemetry_s`: it may be off by so much of itself, and so many requests an instance."""


def littles_law(run: Run) -> Finding:
    """L = lambda W. In virtual time in every stage: the area under the number of requests in it, by the driver's count
    of messages, is the sum of their sojourns, by the machines' stamps. On the wire for prefill (from the route to its
    end) and for decode slots, all instances together: the workers' own counts against the stamps.

    value: the largest difference, requests; bound: rounding, on the wire 5 % of L and a tenth of a request an instance.
    Where requests were retried or failed, or nodes changed their roles, it is not checked.
    """
    if run.on_wire:
        return _by_accounts(run)
    law = run.summary["littles_law"]
    if law["holds"] is None:
        return not_checked("littles_law", "requests were retried or did not complete: they leave a stage midway")
    apart = [abs(one["mean_in_stage"] - one["rate_rps"] * one["mean_sojourn_s"]) for one in law["stages"].values()]
    value, bound = max(apart), law["tolerance"]
    if law["holds"]:
        return held("littles_law", "L = lambda W in every stage", value, bound)
    return Finding("littles_law", "broken", value, bound, "; ".join(law["problems"]), "invalid")


def _by_accounts(run: Run) -> Finding:
    name, rows = "littles_law", run.requests
    moved = bool(run.timeline["event"].isin(["role", "node"]).any())
    clean = bool(((rows["status"] == "ok") & (rows["attempts"] == 1)).all())
    if run.folder is None or not (run.folder / EVENTS_FILE).is_file():
        return not_checked(name, "this run kept no log of the workers' accounts")
    if moved or not clean or run.disturbed or not len(rows):
        return not_checked(name, "requests were retried or did not complete, or nodes did not stay what they were")
    role_of = {node: role for node, _, role in instances(run.scenario.deployments[0])}
    told = _accounts(run.folder / EVENTS_FILE, role_of)
    step_s = (rows["finished_s"] - rows["admitted_s"]) / (rows["output_tokens"] - 1).clip(lower=1)
    spans = {
        "prefill": (rows["route_s"], rows["prefill_end_s"], rows["prefill_node"]),
        "decode": (rows["admitted_s"], rows["finished_s"] + step_s, rows["decode_node"]),
    }
    worst, words, bound = -1.0, "no worker gave an account of itself", 0.0
    for role, (came, went, node_of) in spans.items():
        here = [node for node, one in told.items() if role_of.get(node) == role and len(one) > 1 and one[-1, 0] > 0]
        if not here:
            continue
        counted = sum(_area(told[node]) / told[node][-1, 0] for node in here)
        stayed = 0.0
        for node in here:
            end_s, its = told[node][-1, 0], (node_of == node).to_numpy()
            from_s, until_s = came.to_numpy(np.float64)[its], went.to_numpy(np.float64)[its]
            stayed += float((np.minimum(until_s, end_s) - np.minimum(from_s, end_s)).sum()) / end_s
        apart, most = abs(counted - stayed), WIRE_SHARE * counted + WIRE_REQUESTS * len(here)
        if apart - most > worst - bound or worst < 0:
            worst, bound = apart, most
            words = f"{role}: {counted:.3f} requests by the workers' own counts, lambda W by the stamps is {stayed:.3f}"
    if worst < 0:
        return not_checked(name, words)
    return Finding(name, "held" if worst <= bound else "broken", worst, bound, words, "invalid")


def _accounts(events: Path, role_of: Mapping[str, str]) -> dict[str, Floats]:
    """By node, (model second, requests that it prefills or is to, or that have a slot) of each account from t = 0 on;
    shape (n, 2)."""
    told: dict[str, list[tuple[float, int]]] = {}
    with events.open("rb") as file:
        for line in file:
            if b'"Telemetry"' in line:
                event = orjson.loads(line)["event"]
                if event["type"] == "Telemetry" and event["t_s"] >= 0:
                    waiting = event["queued_requests"] if role_of.get(event["node"]) == "prefill" else 0
                    told.setdefault(event["node"], []).append((event["t_s"], waiting + event["running_requests"]))
    return {node: np.array([(0.0, 0), *sorted(rows)], dtype=np.float64) for node, rows in told.items()}


def _area(told: Floats) -> float:
    """Under the number of requests, which stays as it was told last."""
    return float((told[:-1, 1] * np.diff(told[:, 0])).sum())
