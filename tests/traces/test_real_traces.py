"""The real public traces, where this machine holds them: the figures that are known of them, and the time to load."""

from __future__ import annotations

import time

import pytest

from tests.traces.files import AZURE, MOONCAKE, needs
from traces.info import describe
from traces.load import load
from traces.tools import take_load, with_arrivals


@needs(MOONCAKE)
def test_mooncake_conversation() -> None:
    figures = describe(load(MOONCAKE))
    assert (figures["format"], figures["rows_read"], figures["kept"], figures["stamps"]) == (
        "mooncake",
        12031,
        12031,
        1180,
    )
    assert figures["duration_s"] == pytest.approx(3537, abs=0.5)
    assert figures["input_tokens"]["mean"] == pytest.approx(12_035, abs=0.5)
    assert figures["output_tokens"]["mean"] == pytest.approx(343, abs=0.5)
    assert figures["prefix"]["hit_ratio"] == pytest.approx(0.366, abs=5e-4)
    assert figures["prefix"]["block_size"] == 512


@needs(MOONCAKE)
def test_mooncake_spread_removes_the_bursts_of_its_stamps_and_keeps_its_prefixes() -> None:
    trace = load(MOONCAKE)
    as_is, spread = describe(trace), describe(with_arrivals(trace, "spread"))
    assert as_is["dispersion"]["1s"] > 5
    assert spread["dispersion"]["1s"] < 1
    assert spread["dispersion"]["60s"] == pytest.approx(as_is["dispersion"]["60s"], rel=0.1)
    assert spread["prefix"] == as_is["prefix"]


@needs(MOONCAKE)
def test_mooncake_as_a_load_of_ten_minutes() -> None:
    figures = describe(take_load(load(MOONCAKE), 2.5, 600))
    assert figures["kept"] == 1500
    assert figures["rate_rps"] == pytest.approx(2.5, rel=0.01)


@needs(AZURE)
def test_azure_conversation() -> None:
    figures = describe(load(AZURE))
    assert (figures["format"], figures["rows_read"], figures["kept"], figures["prefix"]) == (
        "azure",
        19366,
        19366,
        None,
    )
    assert figures["duration_s"] == pytest.approx(3502, abs=0.5)
    assert figures["input_tokens"]["mean"] == pytest.approx(1155, abs=0.5)
    assert figures["output_tokens"]["mean"] == pytest.approx(211, abs=0.5)


@pytest.mark.parametrize(
    "path", [pytest.param(MOONCAKE, marks=needs(MOONCAKE)), pytest.param(AZURE, marks=needs(AZURE))]
)
def test_a_real_trace_loads_in_well_under_two_seconds(path: object) -> None:
    start_s = time.process_time()
    load(str(path))
    assert time.process_time() - start_s < 1
