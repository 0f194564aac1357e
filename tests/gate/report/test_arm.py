"""What is drawn of a run, against what its rows say."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from testbed.explain import Explainer
from testbed.gate.report.arm import QUANTILES, distribution, drawn, parts, short
from testbed.report.rows import PARTS


def test_a_small_distribution_is_told_whole():
    assert distribution(np.array([3.0, 1.0, np.nan, 2.0, 2.0])) == {
        "s": [1.0, 2.0, 2.0, 3.0],
        "share": [0.25, 0.5, 0.75, 1.0],
    }


def test_a_large_one_keeps_its_ends_and_is_right_where_it_is_told():
    values = np.random.default_rng(1).lognormal(size=10_000)
    told = distribution(values)
    assert len(told["s"]) == QUANTILES
    assert told["s"][0] == pytest.approx(values.min(), rel=1e-3)
    assert told["s"][-1] == pytest.approx(values.max(), rel=1e-3)
    for second, share in zip(told["s"][::20], told["share"][::20], strict=True):
        assert (values <= second).mean() == pytest.approx(share, abs=1e-3)


def test_nobody_has_no_distribution():
    assert distribution(np.array([])) == {"s": [], "share": []}


def test_parts_are_means_of_all_and_of_the_slowest_tenth():
    table = pd.DataFrame({f"ttft_{part}_s": np.zeros(20) for part in PARTS} | {"ttft_s": np.arange(20.0)})
    table["ttft_queue_s"] = np.arange(20.0)
    told = parts(table)
    assert told["all"]["queue"] == 9.5
    assert told["slowest"]["queue"] == 18.5  # of 18 and 19


def test_what_is_no_number_is_none():
    assert short([1.23456, np.nan, np.inf]) == [1.235, None, None]


def test_a_run_over_time_is_what_happened_to_it(folder: Path):
    run = folder / "link-drop" / "candidate"
    told = drawn(run, Explainer(run).requests)
    at_s, rate = told["time"]["t_s"], told["time"]["applied_gbps"]
    middle = [value for second, value in zip(at_s, rate, strict=True) if 65 < second < 115]
    assert middle
    assert set(middle) == {5.0}
    assert set(told["time"]["threshold_k"]) == {19.64}
    assert max(told["time"]["sending"]) > 0
    assert told["roles"] == {
        "t_s": told["roles"]["t_s"],
        "prefill, prfaas": [4.0] * 2,
        "prefill, pd": [3.0] * 2,
        "decode, pd": [5.0] * 2,
    }
