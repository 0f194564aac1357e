"""The figures of a trace, against inputs that are computed by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.traces.files import trace_at
from traces.info import describe, dispersion, interarrival_cv, prefix
from traces.load import Trace
from traces.request import Request
from traces.tools import slice_time


def test_rows_duration_rate_and_stamps() -> None:
    figures = describe(slice_time(trace_at(0, 1, 1, 5, 9), 0, 6))
    assert (figures["rows_read"], figures["kept"], figures["dropped"]) == (5, 4, {"outside the slice": 1})
    assert (figures["duration_s"], figures["rate_rps"], figures["stamps"]) == (5, 3 / 5, 3)
    assert figures["notes"] == ["slice: 6 s from 0 s on"]


def test_length_percentiles() -> None:
    requests = [Request(i, tokens, 7) for i, tokens in enumerate(range(1, 102))]
    figures = describe(Trace(requests, 101, {}, [], "t", "", "table"))
    assert figures["input_tokens"] == {"mean": 51, "p50": 51, "p90": 91, "p99": 100, "min": 1, "max": 101}
    assert set(figures["output_tokens"].values()) == {7}


def test_dispersion_counts_whole_windows_only() -> None:
    # Windows of 1 s hold 2, 0 and 1 arrivals: mean 1, variance 1. The arrival at 3 s begins a window that never ends.
    assert dispersion(np.array([0, 0.5, 2.5, 3.0]), 1) == 1.0
    assert dispersion(np.arange(0, 100, 0.5), 1) == 0.0
    assert dispersion(np.array([0, 0.5, 1.9]), 1) is None


def test_dispersion_sees_a_slow_swing_that_the_cv_does_not() -> None:
    times = np.concatenate([np.arange(0, 300, 1.0), np.arange(300, 600, 0.5), np.arange(600, 900, 1.0)])
    cv = interarrival_cv(times)
    slow = dispersion(times, 60)
    assert cv is not None
    assert slow is not None
    assert cv < 1 < slow


def test_the_cv_of_gaps() -> None:
    assert interarrival_cv(np.array([0, 1, 2, 3])) == 0
    assert interarrival_cv(np.array([0.0, 0.0, 2.0])) == 1
    assert interarrival_cv(np.array([0.0, 1.0])) is None
    assert interarrival_cv(np.array([1.0, 1.0, 1.0])) is None


def test_a_prefix_hit_is_a_leading_run_of_known_blocks() -> None:
    requests = [
        Request(0, 30, 1, (1, 2, 3), 10),
        Request(1, 30, 1, (1, 2, 4), 10),  # two hits
        Request(2, 30, 1, (9, 2, 3), 10),  # none: its prefix is new
        Request(3, 5, 1),  # says nothing of its content
    ]
    assert prefix(requests) == {"block_size": 10, "blocks": 9, "distinct_blocks": 5, "hit_ratio": 2 / 9}


def test_equal_ids_of_other_block_sizes_do_not_match() -> None:
    figures = prefix([Request(0, 10, 1, (1,), 10), Request(1, 20, 1, (1,), 20)])
    assert figures == {"block_size": [10, 20], "blocks": 2, "distinct_blocks": 2, "hit_ratio": 0.0}


def test_figures_that_are_not_defined_are_none() -> None:
    figures = describe(trace_at(0))
    assert (figures["rate_rps"], figures["interarrival_cv"], figures["prefix"]) == (None, None, None)
    assert figures["dispersion"] == {"1s": None, "10s": None, "60s": None}


@pytest.mark.parametrize("trace", [trace_at(0, 1, 2), trace_at(0)])
def test_the_figures_are_plain_json(trace: Trace) -> None:
    assert json.loads(json.dumps(describe(trace), allow_nan=False)) == describe(trace)
