"""The Chrome trace of a run: well-formed, in order, and nothing on a lane overlaps."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pandas as pd
import pytest
from typer.testing import CliRunner

from testbed.cli import app
from testbed.perfetto import SPANS, trace_events, write_trace
from testbed.simulate import Result, simulate

Event = dict[str, Any]
ROUNDING_US = 1e-3


@pytest.fixture(scope="module")
def result() -> Result:
    sets = ["workload.duration_s=300", "workload.warmup_s=30", "workload.load_fraction=1.1", "link.rate_bps=8gbps"]
    return simulate("paper", policy="static", sets=sets)


@pytest.fixture(scope="module")
def events(result: Result) -> list[Event]:
    return trace_events(result.requests, role_changes=[(10.0, "pd-p-0", "decode")])


def spans(events: list[Event], stage: str = "") -> list[Event]:
    return [event for event in events if event["ph"] == "X" and stage in ("", event["cat"])]


def test_events_are_in_order_of_time_and_last_no_less_than_nothing(events: list[Event]) -> None:
    stamps = [event["ts"] for event in events if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    assert stamps[0] >= 0
    assert all(event["dur"] >= 0 for event in spans(events))


def test_nothing_on_a_lane_overlaps(events: list[Event]) -> None:
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in spans(events):
        lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        assert len({event["cat"] for event in lane}) == 1
        for before, after in pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING_US


def test_a_node_prefills_one_request_at_a_time_on_one_lane(events: list[Event]) -> None:
    lanes: dict[int, set[int]] = defaultdict(set)
    for event in spans(events, "prefill"):
        lanes[event["pid"]].add(event["tid"])
    assert len(lanes) == 7  # 4 PrfaaS, 3 local
    assert all(len(threads) == 1 for threads in lanes.values())


def test_a_decode_node_has_no_more_lanes_than_slots(events: list[Event]) -> None:
    lanes: dict[int, set[int]] = defaultdict(set)
    for event in spans(events, "decode"):
        lanes[event["pid"]].add(event["tid"])
    assert len(lanes) == 5
    assert all(len(threads) <= 20 for threads in lanes.values())


def test_every_request_has_every_span_with_the_tables_times(events: list[Event], result: Result) -> None:
    rows = result.requests.set_index("request_id")
    for stage, _, start, end in SPANS:
        found = {event["name"]: event for event in spans(events, stage)}
        assert set(found) == set(rows.index), stage
        some = found["r0000100"]
        assert some["ts"] == pytest.approx(rows.loc["r0000100", start] * 1e6)
        assert some["dur"] == pytest.approx((rows.loc["r0000100", end] - rows.loc["r0000100", start]) * 1e6)


def test_every_lane_and_node_has_a_name(events: list[Event]) -> None:
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans(events)} == named
    nodes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert nodes[0] == "scheduler"
    assert "prfaas-0" in nodes
    assert "pd-d-4" in nodes


def test_the_threshold_and_role_changes_are_shown(events: list[Event]) -> None:
    assert [event["args"]["tokens"] for event in events if event["ph"] == "C"] == [24484.0]  # that of 8 Gbps
    roles = [event for event in events if event.get("cat") == "role_change"]
    assert [(event["name"], event["ts"]) for event in roles] == [("pd-p-0 is now decode", 10e6)]


def test_a_request_that_failed_is_a_mark_and_has_only_the_spans_it_lived(result: Result) -> None:
    rows = result.requests.head(5).copy()
    rows["status"], rows["error"] = rows["status"].astype(str), rows["error"].astype(str)
    rows.loc[2, ["status", "error"]] = "failed", "attempt_failed"
    rows.loc[2, ["landed_s", "admitted_s", "finished_s"]] = float("nan")
    events = trace_events(rows)
    assert [event["name"] for event in events if event.get("cat") == "failed"] == ["r0000002: attempt_failed"]
    assert {event["cat"] for event in spans(events) if event["name"] == "r0000002"} == {"queue", "prefill"}


def test_no_requests_make_an_empty_trace(result: Result) -> None:
    assert [event["name"] for event in trace_events(result.requests.head(0))] == ["process_name"]


def test_the_file_is_one_json_object(result: Result, tmp_path: Path) -> None:
    write_trace(tmp_path / "deep" / "trace.json", result.requests.head(10))
    data = orjson.loads((tmp_path / "deep" / "trace.json").read_bytes())
    assert set(data) == {"displayTimeUnit", "traceEvents"}


def test_the_gateways_rows_as_the_wire_writes_them_make_a_trace(result: Result, tmp_path: Path) -> None:
    result.requests.head(20).to_csv(tmp_path / "requests.csv", index=False)
    assert len(spans(trace_events(pd.read_csv(tmp_path / "requests.csv", keep_default_na=True)))) == 100


def test_simulate_writes_a_trace_where_it_is_told(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    arguments = ["simulate", "toy", "--duration-s", "30", "--warmup-s", "3", "--trace-out", str(out), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert spans(orjson.loads(out.read_bytes())["traceEvents"])
