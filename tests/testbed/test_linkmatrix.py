"""What follows from measured cells: the verdict, whether two machines agree, what is printed. Real: tests/wire."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from netem.cells import Cell, Found, Settings, asked_of
from netem.link import LinkError
from testbed import linkmatrix
from testbed.cli import app
from testbed.linkmatrix import agree, clock_error, judged, matrix
from testbed.show_matrix import COLUMNS, markdown, row, tables

GOODPUT = Cell("goodput", 100e6, "to_pd", seconds=4)
RTT = Cell("rtt", 100e6, delay_s=0.015)
LOSS = Cell("loss", 100e6, "to_pd", loss=0.01, delay_s=0.0025)


def measured(cell: Cell, verdict: str = "pass", **figures: Any) -> dict[str, Any]:
    found = Found(**figures)
    told = {**asdict(found), "loss_bounds": found.loss_bounds}
    return {**asked_of(cell), "found": told, "verdict": verdict, "wrong": [], "spoilt": [], "tries": 1}


def machine(*verdicts: str, clock_error: float | None = None) -> dict[str, Any]:
    return {"cells": [measured(GOODPUT, verdict) for verdict in verdicts], "clock_error": clock_error}


def lost(count: int, sent: int) -> dict[str, dict[str, int]]:
    return {"to_pd": {"sent": sent, "lost": count, "reordered": 0, "overflowed": 0}}


@pytest.mark.parametrize(
    ("verdicts", "agreement", "clock", "status"),
    [
        (("pass", "pass"), (True,), None, "pass"),
        (("pass", "fail"), (), None, "fail"),
        (("pass", "invalid"), (), None, "invalid"),
        (("fail", "invalid"), (), None, "fail"),
        (("pass",), (False,), None, "fail"),
        (("pass",), (None,), None, "pass"),
        (("pass",), (), 0.02, "invalid"),
        (("fail",), (), -0.02, "invalid"),
        (("pass",), (), 0.001, "pass"),
    ],
)
def test_the_verdict(verdicts: tuple[str, ...], agreement: tuple[bool | None, ...], clock: float, status: str) -> None:
    found = judged({"native": machine(*verdicts, clock_error=clock)}, [{"ok": ok} for ok in agreement])
    assert (found["status"], found["ok"]) == (status, status == "pass")


@pytest.mark.parametrize(
    ("cell", "native", "uml", "wrong"),
    [
        (GOODPUT, {"goodput_bps": 95e6}, {"goodput_bps": 96.8e6}, []),
        (GOODPUT, {"goodput_bps": 95e6}, {"goodput_bps": 97.0e6}, ["goodput_bps"]),
        (RTT, {"rtt_p50_s": 0.0300}, {"rtt_p50_s": 0.0310}, []),
        (RTT, {"rtt_p50_s": 0.0300}, {"rtt_p50_s": 0.0312}, ["rtt_p50_s"]),
        (LOSS, {"rtt_p50_s": 0.005, "trains": lost(400, 40_000)}, {"rtt_p50_s": 0.02, "trains": lost(120, 10_000)}, []),
        (LOSS, {"trains": lost(400, 40_000)}, {"trains": lost(200, 10_000)}, ["loss to_pd"]),
    ],
)
def test_two_machines_agree_within_two_percent_and_the_statistics_of_loss(
    cell: Cell, native: dict[str, Any], uml: dict[str, Any], wrong: list[str]
) -> None:
    (found,) = agree([measured(cell, **native)], [measured(cell, **uml)])
    assert found["wrong"] == wrong
    assert found["ok"] is (not wrong)


def test_what_was_spoilt_neither_agrees_nor_disagrees_and_what_one_has_alone_is_left_out() -> None:
    other = replace(GOODPUT, rate_bps=2e9)
    here = [measured(GOODPUT, goodput_bps=95e6), measured(other, goodput_bps=1.9e9)]
    (found,) = agree(here, [measured(GOODPUT, "invalid", goodput_bps=50e6)])
    assert (found["cell"], found["ok"]) == (GOODPUT.name, None)


def test_a_guests_clock_is_compared_with_this_machines() -> None:
    first, last = {"t_ns": 0, "host_ns": 10}, {"t_ns": 1_010_000_000, "host_ns": 1_000_000_010}
    assert clock_error([first, last]) == pytest.approx(0.01)
    assert clock_error([{"t_ns": 0}, {"t_ns": 5}]) is None
    assert clock_error([]) is None


def test_a_row_has_every_figure_and_a_bar_where_there_is_none() -> None:
    texts = dict(zip(COLUMNS, row(measured(LOSS, trains=lost(200, 20_000), goodput_bps=95.6e6)["found"]), strict=True))
    assert (texts["measured, Mbit/s"], texts["lost"], texts["overtaken"]) == ("95.60", "200 of 20000", "0")
    assert (texts["expected, Mbit/s"], texts["drops"], texts["up after"]) == ("-", "-", "-")
    stepped = row(measured(GOODPUT, step_s={"up": 0.0, "down": None}, drops=3)["found"])
    texts = dict(zip(COLUMNS, stepped, strict=True))
    assert (texts["up after"], texts["down after"], texts["drops"]) == ("0.00 s", "never", "3")


def test_each_kind_has_a_table_of_the_columns_that_it_fills() -> None:
    (goodput, loss) = tables([measured(GOODPUT, goodput_bps=95e6), measured(LOSS, trains=lost(9, 900))])
    assert goodput[:2] == ("goodput", ["cell", "verdict", "measured, Mbit/s"])
    assert [texts for _, texts in goodput[2]] == [["100 Mbit/s to_pd x1", "pass", "95.00"]]
    assert loss[1] == ["cell", "verdict", "lost", "loss within", "overtaken"]


def test_the_page_has_a_row_a_cell_and_says_how_it_was_made() -> None:
    one = {"kernel": "6.1", "cpus": 2, "delay_by": {"delay": "netem"}, "congestion_control": "cubic", "took_s": 9.0}
    native = {**one, "clock_error": None, "cells": [measured(GOODPUT, goodput_bps=95e6)]}
    guest = {**one, "clock_error": 0.001, "cells": [{**measured(GOODPUT, "fail"), "wrong": ["goodput off"]}]}
    machines = {"native": native, "uml": guest}
    agreement = agree(native["cells"], guest["cells"])
    page = markdown({**judged(machines, agreement), "machines": machines, "agreement": agreement}, "prfaas link verify")
    assert "`prfaas link verify`" in page
    assert page.count("| 100 Mbit/s to_pd x1 |") == 2
    assert page.count(f"| {GOODPUT.name} |") == 1
    assert f"- {GOODPUT.name}: goodput off" in page
    assert "its clock is +0.10% off" in page
    assert "verdict: fail (1 fail, 1 pass); 0 packets unshaped, 0 dropped that were not to be lost." in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick"], "give --matrix too"),
        (["--seed", "0"], "give --matrix too"),
        (["--schedule-s", "60"], "give --matrix too"),
        (["--matrix", "--cells", "rtt,speed"], "use some of goodput, rtt"),
        (["--matrix", "--connections", "2"], "leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], said: str) -> None:
    answer = CliRunner().invoke(app, ["link", "verify", *arguments])
    assert answer.exit_code == 2
    assert said in " ".join(answer.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("kinds", "only", "said"),
    [
        (["rtt"], "90 ms", "--cells rtt, --only 90 ms: leaves no cell native"),
        (["jitter"], None, "--cells jitter: leaves no cell uml; jitter is not measured there"),
    ],
)
def test_what_leaves_no_cell_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], only: str | None, said: str
) -> None:
    monkeypatch.setattr(linkmatrix, "missing", lambda: None)
    monkeypatch.setattr(linkmatrix, "_of_machine", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(LinkError, match=said):
        matrix(Settings(), kinds=kinds, short=False, in_uml=True, say=print, only=only)
