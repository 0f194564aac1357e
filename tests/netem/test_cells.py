"""Which cells there are, what is wrong with figures that are, and when the machine was too busy to say. No kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from netem.cells import (
    KINDS,
    LOSSES,
    RATES_BPS,
    RTTS_S,
    Cell,
    Found,
    Settings,
    first_second_bound_bits,
    full,
    judge,
    of_kinds,
    quick,
    spoilt,
)
from netem.link import DIRECTIONS

CELLS = of_kinds(list(full(Settings())), None)
FREE = {"stolen": 0.001, "cpu_busy": 0.5, "taken": 0.0, "late_p50_s": 0.0001, "late_p99_s": 0.001, "late_max_s": 0.01}
GOODPUT = Cell("goodput", 100e6, "to_pd", seconds=4)
RTT = Cell("rtt", 100e6, delay_s=0.015, packets=20_000)
LOSS = Cell("loss", 100e6, "to_pd", delay_s=0.0025, loss=0.01, packets=20_000)
STEP = Cell("step", 100e6, "to_pd", seconds=6)
SCHEDULE = Cell("schedule", 200e6, "to_pd", seconds=60)


def train(lost: int = 0, reordered: int = 0, overflowed: int = 0, sent: int = 20_000) -> dict[str, int]:
    return {"sent": sent, "lost": lost, "reordered": reordered, "overflowed": overflowed}


def test_every_rate_is_measured_both_ways_over_one_and_four_connections() -> None:
    found = {(cell.rate_bps, cell.direction, cell.connections) for cell in CELLS if cell.kind == "goodput"}
    assert found == {(rate, way, many) for rate in RATES_BPS for way in DIRECTIONS for many in (1, 4)}


def test_every_round_trip_and_loss_is_measured() -> None:
    assert [cell.rtt_s for cell in CELLS if cell.kind == "rtt"] == list(RTTS_S)
    lossy = {(cell.loss, cell.direction) for cell in CELLS if cell.kind == "loss"}
    assert lossy == {(loss, way) for loss in LOSSES for way in DIRECTIONS}


def test_names_tell_cells_apart_and_quick_has_one_of_each_kind() -> None:
    names = [cell.name for cell in full(Settings())]
    assert len(set(names)) == len(names)
    assert {cell.kind for cell in quick(Settings())} == set(KINDS)


def test_what_is_far_and_fast_is_measured_only_where_it_is_asked_for() -> None:
    assert "bdp" not in {cell.kind for cell in CELLS}
    assert {cell.kind for cell in of_kinds(list(full(Settings())), ["bdp"])} == {"bdp"}


def test_a_matrix_goes_up_to_the_rate_the_machine_carries() -> None:
    assert max(cell.rate_bps for cell in full(Settings(), 1e9)) == 1e9


def test_the_traffic_of_the_whole_matrix_takes_less_than_five_minutes() -> None:
    seconds = sum(cell.seconds + (2 - bool(cell.direction)) * cell.packets / cell.packets_per_s for cell in CELLS)
    assert seconds < 300


def test_a_schedule_has_twenty_steps_a_second_and_is_the_same_for_a_seed() -> None:
    times = [at_s for at_s, _ in SCHEDULE.steps]
    assert 1150 <= len(times) <= 1200
    assert min(after - before for before, after in pairwise(times)) >= 0.0499
    assert SCHEDULE.schedule == replace(SCHEDULE, connections=4).schedule
    assert SCHEDULE.schedule != replace(SCHEDULE, seed=2).schedule


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        (GOODPUT, Found(error=0.0199, first_second_bits=100e6, first_second_bound_bits=101e6, congestion_drops=9)),
        (RTT, Found(rtt_p50_s=0.0319, trains={"to_pd": train(), "to_prfaas": train()})),
        (LOSS, Found(rtt_p50_s=0.3, trains={"to_pd": train(lost=200)})),
        (LOSS, Found(rtt_p50_s=0.0055, trains={"to_pd": train(lost=240)})),
        (STEP, Found(step_s={"up": 0.0, "down": 0.49})),
        (SCHEDULE, Found(error=-0.049)),
    ],
)
def test_what_is_within_the_bounds_is_not_wrong(cell: Cell, found: Found) -> None:
    assert judge(cell, found) == []


@pytest.mark.parametrize(
    ("cell", "found", "said"),
    [
        (GOODPUT, Found(error=-0.0201), "goodput -2.01% off"),
        (GOODPUT, Found(error=0.0201), "goodput"),
        (GOODPUT, Found(error=0.0, first_second_bits=102e6, first_second_bound_bits=101e6), "in the first second"),
        (GOODPUT, Found(error=0.0, direct_packets=1), "1 packets unshaped"),
        (GOODPUT, Found(failure="it could not be measured: gone"), "gone"),
        (RTT, Found(rtt_p50_s=0.0321), "round trip 32.10 ms, 30 .- 2.00 asked"),
        (RTT, Found(rtt_p50_s=0.0279), "round trip"),
        (RTT, Found(trains={"to_pd": train(lost=1)}), "to_pd: 1 of 20000 lost, 0.0% asked"),
        (RTT, Found(trains={"to_pd": train(reordered=1)}), "to_pd: 1 overtaken"),
        (RTT, Found(drops=1), "1 packets dropped"),
        (LOSS, Found(trains={"to_pd": train(lost=100)}), "100 of 20000 lost, 1.0% asked"),
        (LOSS, Found(trains={"to_pd": train(lost=300)}), "300 of 20000"),
        (LOSS, Found(trains={"to_pd": train(lost=0)}), "0 of 20000"),
        (STEP, Found(step_s={"up": None, "down": 0.1}), "the step up never came"),
        (STEP, Found(step_s={"up": 0.0, "down": 0.6}), "the step down took 0.60 s"),
        (SCHEDULE, Found(error=-0.051), "5% allowed"),
    ],
)
def test_what_is_not_is_told_with_its_figures(cell: Cell, found: Found, said: str) -> None:
    (told,) = judge(cell, found)
    assert said.replace(".-", "+-") in told


@pytest.mark.parametrize(
    ("cell", "found", "meter", "wrong", "why"),
    [
        (GOODPUT, Found(), {"stolen": 0.011}, [], "1.1% of the time"),
        (RTT, Found(rtt_p50_s=0.03), {"late_p50_s": 0.0006}, [], "0.60 ms late"),
        (GOODPUT, Found(), {"cpu_busy": 0.99}, ["goodput"], "CPU 99% busy"),
        (GOODPUT, Found(), {"taken": 0.05}, ["goodput"], "the host took 5.0% of the CPU"),
        (RTT, Found(trains={"to_pd": train(overflowed=2)}), {}, [], "the receiver itself lost 2"),
    ],
)
def test_a_busy_machine_spoils_a_cell(
    cell: Cell, found: Found, meter: dict[str, float], wrong: list[str], why: str
) -> None:
    (told,) = spoilt(cell, found, {**FREE, **meter}, wrong)
    assert why in told


@pytest.mark.parametrize(
    ("cell", "found", "meter", "wrong"),
    [
        (GOODPUT, Found(), {}, ["goodput"]),  # a free machine: the link's own fault
        (GOODPUT, Found(), {"taken": 0.5}, []),
        (GOODPUT, Found(), {"taken": 0.005}, ["goodput"]),
        (GOODPUT, Found(), {"cpu_busy": 1.0}, []),  # a full CPU makes no bad link look good
        (GOODPUT, Found(), {"late_p50_s": 0.001}, []),  # no round trip is judged
    ],
)
def test_a_machine_that_was_free_enough_spoils_none(cell: Cell, found: Found, meter: Any, wrong: list[str]) -> None:
    assert spoilt(cell, found, {**FREE, **meter}, wrong) == []


def test_the_first_second_may_have_the_rate_a_bucket_and_a_super_packet() -> None:
    assert first_second_bound_bits(20e6) == 20e6 + 8 * (70_000 + 65_536)
    assert first_second_bound_bits(2e9) == 2e9 + 8 * (1_000_000 + 65_536)
