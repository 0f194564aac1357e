"""What a page draws of one run, from its results folder: how TTFT is distributed, what it is made of, and the link, the
threshold, queues and roles over time. Pure but for reading the folder; JSON-ready, model units, None for what is not
known.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.report.link_axis import Axis, link_axis
from testbed.report.rows import PARTS
from testbed.report.steps import Steps
from testbed.report.window import completed
from testbed.runs import read_scenario

QUANTILES: Final = 240
"""At most so many points of a distribution."""
BINS: Final = 300
"""At most so many bins of time are drawn."""
SLOWEST: Final = 0.1
"""The share of requests whose TTFT is called the slowest."""
QUEUES: Final = ("waiting_pd", "waiting_prfaas", "sending", "admitting")
ROLES: Final = ("prefill, prfaas", "prefill, pd", "decode, pd")

Series = list[float | None]


def drawn(folder: Path, requests: pd.DataFrame) -> dict[str, Any]:
    """Everything of a run. requests: its table. Raises RunError for a folder without its files."""
    axis = link_axis(folder)
    inside = requests[completed(requests) & requests["in_window"].astype(bool)]
    return {
        "ttft": distribution(inside["ttft_s"].to_numpy(np.float64)),
        "parts": parts(inside),
        **over_time(axis),
        "roles": roles(axis, folder),
    }


def distribution(values: np.ndarray[Any, Any]) -> dict[str, Series]:
    """The empirical distribution function as a step line, thinned evenly in rank, both ends kept.

    s: values, rising. share: of all that are at most that value.
    """
    ordered = np.sort(values[~np.isnan(values)])
    if not ordered.size:
        return {"s": [], "share": []}
    ranks = np.unique(np.linspace(0, ordered.size - 1, min(QUANTILES, ordered.size)).round().astype(int))
    shares = (ranks + 1) / ordered.size
    return {"s": short(ordered[ranks]), "share": short(shares)}


def parts(requests: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """Mean seconds of each part of the TTFT: over all requests, and over the slowest tenth of them."""
    ordered = requests.sort_values("ttft_s", ascending=False, kind="stable")
    slowest = ordered.head(math.ceil(len(ordered) * SLOWEST))
    return {
        name: {part: _finite(rows[f"ttft_{part}_s"].mean()) for part in PARTS}
        for name, rows in (("all", requests), ("slowest", slowest))
    }


def over_time(axis: Axis) -> dict[str, Any]:
    """{"time": series by name over bins, "events": what happened}. A bin's figures stand at its end."""
    stride = -(-len(axis.table) // BINS)
    table = axis.table.iloc[::stride]
    time = {
        "t_s": short(table["end_s"]),
        "applied_gbps": short(table["to_pd_applied_bps"] / 1e9),
        "goodput_gbps": short(table["to_pd_goodput_bps"] / 1e9),
        "threshold_k": short(table["threshold_tokens"] / 1e3),
        "optimum_k": short(table["optimum_tokens"] / 1e3),
        **{name: short(table[name]) for name in QUEUES},
    }
    kinds = ("regime", "role", "joined", "node", "policy", "fault")
    events = [{"t_s": one["t_s"], "text": _event(one)} for one in axis.events if one["event"] in kinds]
    return {"time": time, "events": events[:200]}


def _event(one: dict[str, Any]) -> str:
    node = f" {one['node']}" if one["node"] else ""
    return f"{one['event']}{node}: {one['before'] or 'none'} to {one['after'] or 'none'} ({one['trigger'] or ''})"


def roles(axis: Axis, folder: Path) -> dict[str, Any]:
    """How many instances serve in each role over time, as steps: {"t_s", then ROLES}. One that reloads for another role
    serves in none; one that is lost keeps its role here, and is an event of `over_time`."""
    fleet = read_scenario(folder).deployments[0].fleet
    first = dict(zip(ROLES, (fleet.n_prfaas, fleet.n_p, fleet.n_d), strict=True))
    counts = dict(first)
    moves: dict[str, list[tuple[float, float]]] = {name: [] for name in ROLES}
    for one in axis.events:
        if one["event"] == "role":
            name, by = f"{one['before']}, pd", -1
        elif one["event"] == "joined":
            name, by = f"{one['after']}, pd", 1
        else:
            continue
        counts[name] += by
        moves[name].append((float(one["t_s"]), float(counts[name])))
    times = np.array(sorted({0.0, axis.end_s, *(at_s for steps in moves.values() for at_s, _ in steps)}))
    return {
        "t_s": short(times),
        **{
            name: short(Steps(float(first[name]), moves[name]).at(times))
            for name in ROLES
            if first[name] or moves[name]
        },
    }


def short(values: Any) -> Series:
    """Numbers with four digits that mean something; None for what is none, or infinite."""
    return [None if not math.isfinite(value) else float(f"{value:.4g}") for value in np.asarray(values, np.float64)]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
