"""The script for a GPU: run where there is one; its arithmetic and its table everywhere, on a CPU that stands in."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
import torch

from tests.gpu import run
from tests.gpu.run import NO_GPU, main, overlap, table

ON_CPU = ["--device", "cpu", "--lengths", "64", "200"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch finds")
def test_everything_holds_on_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_inconclusive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped: this machine has no GPU" in err


@pytest.fixture(scope="module")
def found() -> Any:
    """What the script found on a CPU."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main([*ON_CPU, "--json"]) == 0
    return json.loads(told.getvalue())


def test_a_cpu_goes_the_same_way_and_says_that_it_is_one(found: Any) -> None:
    shown = table(found)
    assert "CPU, standing in" in shown
    assert shown.count("  ok   ") == 4
    assert "decode step, 8 of 200 tokens" in shown


def test_its_figures_belong_together(found: Any) -> None:
    for row in found["prefill"]:
        assert row["phi_kv_bps"] == pytest.approx(8 * row["s_kv_bytes"] / row["prefill_s"])
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["prefill_s"])
        assert row["peak_share"] is None
        assert 0 <= row["hidden"] <= 1


def test_a_check_that_does_not_hold_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "BFLOAT16_ERROR", 1e-6)
    assert main(ON_CPU) == 1
    assert "FAIL bfloat16 logits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("alone_s", "copies_s", "both_s", "hidden"), [(10, 4, 10, 1), (10, 4, 14, 0), (10, 4, 11, 0.75), (10, 4, 15, 0)]
)
def test_overlap_is_the_share_of_the_copies_that_cost_no_time(
    alone_s: float, copies_s: float, both_s: float, hidden: float
) -> None:
    assert overlap(alone_s, copies_s, both_s) == hidden
