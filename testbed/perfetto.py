"""A run as a Chrome trace, to be opened at ui.perfetto.dev or chrome://tracing: where every request was, and when.

Written from the request table alone, so that virtual time and the wire are seen alike. One process a node, its lanes
below it: what a node does at one time is on different lanes, so spans of a lane never overlap.

    prefill node    `prefill` (one lane: one request at a time), `queue`
    decode node     `transfer` (KV that arrives, from its prefill's start), `admission`, `decode` (a lane a slot)
    scheduler       the threshold as a counter, its changes, role changes, requests that failed

Times are microseconds of model time since t = 0, the format's own unit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pandas as pd

SPANS: Final = (
    # name, node's column, from, to
    ("queue", "prefill_node", "arrive_s", "prefill_start_s"),
    ("prefill", "prefill_node", "prefill_start_s", "prefill_end_s"),
    ("transfer", "decode_node", "prefill_start_s", "landed_s"),
    ("admission", "decode_node", "landed_s", "admitted_s"),
    ("decode", "decode_node", "admitted_s", "finished_s"),
)
"""The transfer's span is the layer-wise one: from the prefill's start, since its bytes flow while later layers compute;
what a TTFT sees of it is what is left after the prefill's end (`exposed_s` among its arguments)."""

RoleChange = tuple[float, str, str]
"""(model second, node, new role)."""

Event = dict[str, Any]


def trace_events(requests: pd.DataFrame, role_changes: Sequence[RoleChange] = ()) -> list[Event]:
    """The trace's events: metadata first, then by time. requests: the request table, or the gateway's rows alone.

    A request has the spans whose both ends it has: one that failed in its queue has none. A stamp that lies before the
    one it follows by rounding makes a span of no length.
    """
    nodes = sorted({*_words(requests, "prefill_node"), *_words(requests, "decode_node")} - {""})
    process = {node: i + 2 for i, node in enumerate(nodes)}
    metadata = [_name("process_name", 1, 0, "scheduler"), *(_name("process_name", p, 0, n) for n, p in process.items())]
    events: list[Event] = []
    thread = dict.fromkeys(process.values(), 0)
    for name, column, start, end in SPANS:
        for node, rows in _by_node(requests, column, start, end):
            lanes = _lanes(rows[start].to_numpy(np.float64), rows[end].to_numpy(np.float64))
            first = thread[process[node]] + 1
            thread[process[node]] += int(lanes.max()) + 1
            one = lanes.max() == 0
            metadata += [
                _name("thread_name", process[node], first + i, name if one else f"{name} {i + 1}")
                for i in range(int(lanes.max()) + 1)
            ]
            events += _spans(name, rows, start, end, process[node], first + lanes)
    events += _scheduling(requests, role_changes)
    events.sort(key=lambda event: event["ts"])
    return metadata + events


def write_trace(path: Path, requests: pd.DataFrame, role_changes: Sequence[RoleChange] = ()) -> None:
    """Write the trace as one JSON object. Raises OSError where the file cannot be written."""
    data = {"displayTimeUnit": "ms", "traceEvents": trace_events(requests, role_changes)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY))


def _words(requests: pd.DataFrame, column: str) -> list[str]:
    return [str(word) for word in requests[column].dropna().unique()]


def _by_node(requests: pd.DataFrame, column: str, start: str, end: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows that have a span, node by node, in order of their start and, at one time, of their end."""
    there = requests[requests[start].notna() & requests[end].notna()]
    for node, rows in there.groupby(there[column].astype(str), sort=True):
        if node:
            yield str(node), rows.sort_values([start, end, "request_id"])


def _lanes(starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The lane of every span, the lowest that is free at its start; starts ascend. Shape as given."""
    out = np.zeros(len(starts), dtype=np.int64)
    busy: list[tuple[float, int]] = []  # (until, lane)
    free: list[int] = []
    lanes = 0
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        out[i] = lane
        heapq.heappush(busy, (max(start, end), lane))
    return out


def _spans(
    name: str, rows: pd.DataFrame, start: str, end: str, process: int, threads: np.ndarray[Any, Any]
) -> list[Event]:
    columns = zip(
        rows["request_id"].astype(str), rows[start], rows[end], threads.tolist(), rows["input_tokens"],
        rows["kv_bytes"], rows["prefill_site"].astype(str), rows["reason"].astype(str), rows["prefill_end_s"],
        strict=True,
    )  # fmt: skip
    out: list[Event] = []
    for request_id, from_s, to_s, thread, tokens, kv_bytes, site, reason, prefilled_s in columns:
        arguments: dict[str, Any] = {"stage": name, "input_tokens": int(tokens), "prefill_site": site}
        if name == "transfer":
            arguments |= {"kv_bytes": int(kv_bytes), "exposed_s": max(0.0, to_s - prefilled_s)}
        if name == "queue":
            arguments["reason"] = reason
        out.append(
            {
                "name": request_id,
                "cat": name,
                "ph": "X",
                "ts": from_s * 1e6,
                "dur": max(0.0, (to_s - from_s) * 1e6),
                "pid": process,
                "tid": thread,
                "args": arguments,
            }
        )
    return out


def _scheduling(requests: pd.DataFrame, role_changes: Sequence[RoleChange]) -> list[Event]:
    """The threshold where it changes, role changes, and the requests that failed."""
    out = [_instant(f"{node} is now {role}", at_s, "role_change") for at_s, node, role in role_changes]
    routed = requests[requests["route_s"].notna()].sort_values("route_s")
    threshold = routed["threshold_tokens"]
    changed = routed[threshold.notna() & np.isfinite(threshold) & (threshold != threshold.shift())]
    for at_s, tokens in zip(changed["route_s"], changed["threshold_tokens"], strict=True):
        out.append({"name": "threshold", "ph": "C", "ts": at_s * 1e6, "pid": 1, "args": {"tokens": tokens}})
    lost = requests[(requests["status"].astype(str) != "ok") & requests["arrive_s"].notna()]
    for request_id, error, at_s in zip(lost["request_id"], lost["error"], lost["arrive_s"], strict=True):
        out.append(_instant(f"{request_id}: {error}", at_s, "failed"))
    return out


def _instant(name: str, at_s: float, kind: str) -> Event:
    return {"name": name, "cat": kind, "ph": "i", "s": "p", "ts": at_s * 1e6, "pid": 1, "tid": 1}


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
