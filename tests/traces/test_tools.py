"""The tools keep every row accounted for, keep the order, and say in a note what they did."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.files import trace_at
from traces.info import describe
from traces.load import Trace
from traces.request import Request, TraceError
from traces.tools import (
    AFTER_LOAD,
    OUTSIDE_SLICE,
    concat,
    rate_rps,
    scale_rate,
    scale_time,
    slice_time,
    take_load,
    with_arrivals,
)

arrivals_st = st.lists(st.integers(0, 50).map(lambda stamp: stamp * 0.3), min_size=1, max_size=60).map(sorted)


def arrivals(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


def ids(trace: Trace) -> list[int]:
    """The requests by their place in ``trace_at``, from 1."""
    return [request.input_tokens for request in trace.requests]


def test_a_slice_has_its_start_and_not_its_end_and_begins_at_zero() -> None:
    part = slice_time(trace_at(0, 1, 2, 3, 4), 1, 2)
    assert arrivals(part) == [0, 1]
    assert ids(part) == [2, 3]
    assert part.dropped == {OUTSIDE_SLICE: 3}
    assert part.rows_read == 5
    assert part.notes == ["slice: 2 s from 1 s on"]


def test_a_slice_beyond_the_end_says_that_it_is_short() -> None:
    assert slice_time(trace_at(0, 1, 2), 1, 100).notes == [
        "slice: 100 s from 1 s on; its last request comes 1 s into it"
    ]


def test_slices_of_slices_add_up_what_they_drop() -> None:
    part = slice_time(slice_time(trace_at(0, 1, 2, 3, 4), 1, 3), 1, 1)
    assert ids(part) == [3]
    assert part.dropped == {OUTSIDE_SLICE: 4}


@pytest.mark.parametrize(
    ("start_s", "duration_s"), [(-1, 1), (0, 0), (0, -1), (float("nan"), 1), (0, float("inf")), (5, 1)]
)
def test_a_slice_with_nothing_in_it_is_refused(start_s: float, duration_s: float) -> None:
    with pytest.raises(TraceError, match="test: "):
        slice_time(trace_at(0, 1, 2), start_s, duration_s)


def test_scaling_time_stretches_the_clock() -> None:
    assert arrivals(scale_time(trace_at(0, 1, 3), 2)) == [0, 2, 6]


def test_scaling_the_rate_makes_the_mean_rate_the_target() -> None:
    trace = scale_rate(trace_at(0, 1, 3, 4), 3)
    assert rate_rps(trace) == pytest.approx(3)
    assert arrivals(trace) == pytest.approx([0, 0.25, 0.75, 1])
    assert trace.notes == ["rate scaled from 0.75 to 3 requests/s, by stretching time"]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_factor_or_rate_that_is_not_above_zero_is_refused(value: float) -> None:
    for tool in (scale_time, scale_rate):
        with pytest.raises(TraceError, match="finite number above 0"):
            tool(trace_at(0, 1), value)


def test_a_trace_of_one_stamp_has_no_rate_to_scale() -> None:
    with pytest.raises(TraceError, match="no rate to scale"):
        scale_rate(trace_at(1, 1), 3)


@settings(deadline=None)
@given(arrivals_st, st.floats(0.01, 100))
def test_scaling_the_rate_keeps_shape_order_and_count(times: list[float], target_rps: float) -> None:
    trace = trace_at(*times)
    if rate_rps(trace) is None:
        return
    scaled = scale_rate(trace, target_rps)
    assert ids(scaled) == ids(trace)
    assert rate_rps(scaled) == pytest.approx(target_rps)
    assert describe(scaled)["interarrival_cv"] == pytest.approx(describe(trace)["interarrival_cv"])


def test_as_is_moves_nothing_and_says_so() -> None:
    trace = with_arrivals(trace_at(0, 0, 3), "as_is")
    assert arrivals(trace) == [0, 0, 3]
    assert trace.notes == ["arrivals as is"]


def test_spread_spaces_each_stamp_evenly_up_to_the_next() -> None:
    trace = with_arrivals(trace_at(0, 0, 0, 3, 5, 5), "spread")
    assert arrivals(trace) == [0, 1, 2, 3, 5, 6.25]
    assert ids(trace) == [1, 2, 3, 4, 5, 6]


def test_spread_needs_a_next_stamp() -> None:
    with pytest.raises(TraceError, match="one stamp"):
        with_arrivals(trace_at(3, 3), "spread")


def test_another_word_for_arrivals_is_refused() -> None:
    with pytest.raises(TraceError, match="must be as_is or spread"):
        with_arrivals(trace_at(0, 1), "smooth")  # type: ignore[arg-type]


@settings(deadline=None)
@given(arrivals_st)
def test_spread_keeps_order_count_and_the_interval_of_every_stamp(times: list[float]) -> None:
    trace = trace_at(*times)
    stamps = sorted(set(times))
    if len(stamps) < 2:
        return
    spread = with_arrivals(trace, "spread")
    assert ids(spread) == ids(trace)
    assert spread.rows_read == trace.rows_read
    assert arrivals(spread) == sorted(arrivals(spread))
    for was, now in zip(times[: times.index(stamps[-1])], arrivals(spread), strict=False):
        assert was <= now < stamps[stamps.index(was) + 1]
    assert arrivals(with_arrivals(trace, "spread")) == arrivals(spread)


def test_a_load_takes_as_many_rows_as_it_needs_and_fills_its_duration() -> None:
    load = take_load(trace_at(2, 3, 4, 5, 10, 20), 0.4, 10)
    assert ids(load) == [1, 2, 3, 4]
    assert arrivals(load) == [0, 1.25, 2.5, 3.75]
    assert load.dropped == {AFTER_LOAD: 2}


def test_a_load_of_all_rows_gives_the_last_stamp_a_period_too() -> None:
    assert arrivals(take_load(trace_at(0, 1, 2, 3), 1, 4)) == [0, 1, 2, 3]
    assert arrivals(take_load(trace_at(0, 0, 3, 3), 0.5, 8)) == [0, 0, 4, 4]


def test_a_load_that_ends_inside_a_burst_still_ends_in_time() -> None:
    assert arrivals(take_load(trace_at(0, 0, 3, 3, 6), 0.5, 6)) == [0, 0, 3]


def test_a_trace_too_short_for_a_load_says_how_long_it_lasts() -> None:
    with pytest.raises(TraceError, match="600 s at 2 requests/s need 1200 requests, the trace has 4 and lasts 2 s"):
        take_load(trace_at(0, 1, 2, 3), 2, 600)


def test_a_load_of_one_stamp_is_refused() -> None:
    with pytest.raises(TraceError, match="one stamp"):
        take_load(trace_at(1, 1), 2, 1)


@settings(deadline=None)
@given(arrivals_st, st.floats(0.1, 10), st.floats(0.5, 50))
def test_a_load_has_its_rate_its_order_and_lies_in_its_duration(
    times: list[float], target: float, duration: float
) -> None:
    trace = trace_at(*times)
    needed = max(1, round(target * duration))
    if needed > len(times) or len(set(times)) < 2:
        return
    load = take_load(trace, target, duration)
    assert ids(load) == ids(trace)[:needed]
    assert arrivals(load)[0] == 0
    assert all(0 <= time < duration for time in arrivals(load))
    assert load.rows_read == len(load.requests) + sum(load.dropped.values())


def chat(sha256: str, *arrivals_s: float) -> Trace:
    """Requests of one conversation, all with block 5, from a source with this identity."""
    requests = [Request(arrival, 10, 1, (5,), 10, "a") for arrival in arrivals_s]
    return Trace(requests, len(requests), {}, [], f"file {sha256}", sha256, "prfaas")


def test_joined_traces_follow_each_other_at_their_starts() -> None:
    joined = concat([(0, trace_at(0, 1)), (10, trace_at(0.5, 2)), (12, trace_at(0))])
    assert arrivals(joined) == [0, 1, 10.5, 12, 12]
    assert ids(joined) == [1, 2, 1, 2, 1]


def test_joined_traces_account_for_the_rows_of_all() -> None:
    cut = slice_time(trace_at(0, 1, 2), 0, 1.5)
    joined = concat([(0, cut), (5, cut), (9, slice_time(trace_at(0, 1), 1, 1))])
    assert joined.rows_read == 8
    assert joined.dropped == {OUTSIDE_SLICE: 3}
    assert joined.notes[1] == "part 2, 2 requests from 5 s on, test: slice: 1.5 s from 0 s on"
    assert joined.source == "test"


def test_parts_of_one_source_share_their_prefixes_and_sessions() -> None:
    joined = concat([(0, chat("one", 0)), (5, chat("one", 0, 1))])
    assert {(request.block_hashes, request.session) for request in joined.requests} == {((5,), "a")}


def test_ids_and_sessions_of_different_sources_are_kept_apart() -> None:
    joined = concat([(0, chat("one", 0)), (5, chat("two", 0, 1)), (9, chat("one", 0))])
    first, second, third, fourth = ((request.block_hashes, request.session) for request in joined.requests)
    assert first == fourth
    assert second == third
    assert not set(first) & set(second)


def test_the_identity_of_joined_traces_is_that_of_the_parts_and_their_starts() -> None:
    one, two = chat("one", 0), chat("two", 0)
    joined = concat([(0, one), (5, two)])
    assert joined.sha256 == concat([(0.0, one), (5.0, two)]).sha256
    others = [concat([(0, one), (6, two)]), concat([(0, two), (5, one)]), concat([(0, one)])]
    assert len({joined.sha256, one.sha256, *(other.sha256 for other in others)}) == 5


def test_a_part_may_begin_with_the_last_request_of_the_one_before_and_not_sooner() -> None:
    assert arrivals(concat([(0, trace_at(0, 5)), (5, trace_at(0))])) == [0, 5, 5]
    with pytest.raises(
        TraceError, match=r"part start_s = 4: the part before it ends with a request at 5 s; start later"
    ):
        concat([(0, trace_at(0, 5)), (4, trace_at(2))])


@pytest.mark.parametrize("start_s", [-1, float("nan"), float("inf")])
def test_a_start_that_is_no_time_is_refused(start_s: float) -> None:
    with pytest.raises(TraceError, match="part start_s"):
        concat([(start_s, trace_at(0))])


def test_no_parts_are_refused() -> None:
    with pytest.raises(TraceError, match="no parts"):
        concat([])


def test_the_tools_keep_the_identity_of_the_file_and_change_that_of_the_rows() -> None:
    trace = trace_at(0, 1, 2)
    slower = scale_time(trace, 2)
    assert slower.sha256 == trace.sha256
    assert slower.rows_sha256 != trace.rows_sha256
