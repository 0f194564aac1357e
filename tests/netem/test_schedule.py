"""Links that vary: what each model's rate does, that it is the same everywhere, and what is refused."""

from __future__ import annotations

import hashlib
import math
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netem.courses import Constant, Markov, Ramp, Square, Stationary, Steps
from netem.fluid import TCP_EFFICIENCY, FluidLink
from netem.link import LinkError
from netem.schedule import KINDS, Outage, Schedule, data_of, from_data
from netem.schedule_files import Csv, Mahimahi
from netem.token_bucket import TokenBucket, TokenBucketSpec, saturated
from tests.netem.test_fluid import drain, integral_bits

GBIT = 1e9
CSV = b"t_s,rate_bps\n0,8gbps\n10,1000000000\n12.5,2 Gbit/s\n"
EXAMPLES: dict[str, dict[str, Any]] = {
    "constant": {"rate_bps": "5gbps"},
    "steps": {"steps": [[0, "8gbps"], [10, 1e9], [12.5, "2 Gbit/s"]]},
    "square": {"high_bps": "8gbps", "low_bps": "1gbps", "period_s": 60},
    "ramp": {"from_bps": "8gbps", "to_bps": "1gbps", "ramp_s": 100, "start_s": 20},
    "sawtooth": {"low_bps": "1gbps", "high_bps": "8gbps", "period_s": 60},
    "diurnal": {"mean_bps": "4gbps", "amplitude": 0.5},
    "stationary": {"mean_bps": "4gbps", "cv": 0.1, "dip_every_s": 300},
    "markov": {"good_bps": "8gbps", "bad_bps": "1gbps", "good_s": 60, "bad_s": 20},
    "csv": {"file": "link.csv"},
    "mahimahi": {"file": "link.trace"},
    "token_bucket": {"peak_bps": "10gbps", "base_bps": "1gbps", "budget_bytes": 675e9},
}
FILES = {"link.csv": CSV, "link.trace": b"".join(b"%d\n" % ms for ms in range(1, 1001))}


def schedule(kind: str, seed: int = 0, **given: Any) -> Schedule:
    made = from_data({"kind": kind, **EXAMPLES[kind], **given}, seed=seed, read=FILES.__getitem__)
    assert isinstance(made, Schedule)
    return made


def refused(data: object, **options: Any) -> LinkError:
    with pytest.raises(LinkError) as caught:
        from_data(data, **options)
    return caught.value


SCHEDULES = [kind for kind in KINDS if kind != "token_bucket"]


class TestEverySchedule:
    """What holds for all models."""

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_carries_the_sum_of_its_steps(self, kind: str) -> None:
        made = schedule(kind, outages=[{"at_s": 30, "duration_s": 5}])
        steps = made.steps(0, 700)
        assert made.integral_bits(0, 700) == pytest.approx(integral_bits(steps, 0, 700), rel=1e-9)
        assert made.integral_bits(25, 410.5) == pytest.approx(integral_bits(steps, 25, 410.5), rel=1e-9)
        assert made.mean_bps(25, 410.5) * 385.5 == pytest.approx(made.integral_bits(25, 410.5))

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_has_the_rate_of_its_last_step(self, kind: str) -> None:
        made = schedule(kind)
        steps = made.steps(3, 500)
        assert steps[0][0] == 3
        for (from_s, rate_bps), (to_s, _) in pairwise(steps):
            assert made.rate_bps(from_s) == made.rate_bps((from_s + to_s) / 2) == rate_bps

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_steps_only_where_it_changes_and_in_order(self, kind: str) -> None:
        steps = schedule(kind, outages=[{"at_s": 30, "duration_s": 5}]).steps(0, 700)
        assert all(before[0] < after[0] and before[1] != after[1] for before, after in pairwise(steps))

    @pytest.mark.parametrize("kind", SCHEDULES)
    @pytest.mark.parametrize("min_step_s", [0.05, 0.7, 4.0])
    def test_can_be_had_in_steps_that_are_not_too_close_and_carry_the_same(self, kind: str, min_step_s: float) -> None:
        made = schedule(kind, outages=[{"at_s": 30, "duration_s": 5}, {"at_s": 50, "duration_s": 4.5, "kind": "down"}])
        steps = made.steps(0, 600, min_step_s)
        assert min((to_s - from_s for (from_s, _), (to_s, _) in pairwise(steps)), default=9) >= min_step_s * (1 - 1e-6)
        assert integral_bits(steps, 0, 600) == pytest.approx(made.integral_bits(0, 600), rel=1e-9)
        assert {(30.0, 0.0), (50.0, 0.0)} <= set(steps)
        assert {35.0, 54.5} <= {at_s for at_s, _ in steps}

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_is_the_same_whatever_was_asked_of_it_before(self, kind: str) -> None:
        asked, fresh = schedule(kind, seed=4), schedule(kind, seed=4)
        asked.rate_bps(431)
        asked.steps(20, 30, 0.5)
        assert asked.steps(0, 500) == fresh.steps(0, 500)
        assert asked == fresh

    @pytest.mark.parametrize("kind", KINDS)
    def test_goes_to_data_and_back(self, kind: str) -> None:
        made = from_data({"kind": kind, **EXAMPLES[kind]}, seed=4, read=FILES.__getitem__)
        data = made.to_data() if isinstance(made, Schedule) else data_of(made)
        assert data["kind"] == kind
        assert from_data(data, seed=9, read=FILES.__getitem__) == made

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_never_has_a_tiny_rate(self, kind: str) -> None:
        rates = {rate_bps for _, rate_bps in schedule(kind, outages=[{"at_s": 1, "duration_s": 1}]).steps(0, 2000)}
        assert min(rates - {0.0}) >= 1e6

    def test_is_the_same_in_another_process(self) -> None:
        code = (
            "import json; from hashlib import sha256; from netem.schedule import from_data\n"
            f"data = {[{'kind': kind, **EXAMPLES[kind]} for kind in ('stationary', 'markov')]!r}\n"
            "print([sha256(json.dumps(from_data(d, seed=7).steps(0, 5000)).encode()).hexdigest() for d in data])"
        )
        runs = {
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
            ).stdout
            for seed in ("1", "2")
        }
        assert len(runs) == 1

    def test_knows_its_identity(self) -> None:
        assert schedule("markov", 1).sha256 == schedule("markov", 1).sha256
        assert len({schedule(kind, seed).sha256 for kind in ("markov", "stationary", "square") for seed in (1, 2)}) == 5
        moved = from_data({"kind": "csv", "file": "elsewhere.csv"}, read=lambda name: CSV)
        assert isinstance(moved, Schedule)
        assert moved.sha256 == schedule("csv").sha256 != schedule("csv", scale=2).sha256

    def test_draws_other_numbers_than_the_load_of_the_same_seed(self) -> None:
        drawn = [rate_bps for _, rate_bps in schedule("stationary", seed=1, dip_every_s=None).steps(0, 500)]
        load = np.random.default_rng(1).standard_normal(500)
        assert abs(np.corrcoef(drawn, load)[0, 1]) < 0.15


class TestTheModels:
    """Each does what its docstring says."""

    def test_constant(self) -> None:
        made = schedule("constant")
        assert made.steps(0, 1e9) == [(0, 5 * GBIT)]
        assert (made.period_s, made.duration_s) == (None, 0)

    def test_steps_hold_the_last_rate_or_repeat(self) -> None:
        held, again = schedule("steps"), schedule("steps", repeat_s=20)
        assert held.steps(0, 1e6) == [(0, 8 * GBIT), (10, GBIT), (12.5, 2 * GBIT)]
        assert (held.period_s, held.duration_s) == (None, 12.5)
        assert again.steps(15, 33) == [(15, 2 * GBIT), (20, 8 * GBIT), (30, GBIT), (32.5, 2 * GBIT)]
        assert (again.period_s, again.duration_s) == (20, None)

    def test_square(self) -> None:
        made = schedule("square", duty=0.25)
        assert made.steps(0, 100) == [(0, 8 * GBIT), (15, GBIT), (60, 8 * GBIT), (75, GBIT)]
        assert made.mean_bps(0, 600) == pytest.approx((8 * 0.25 + 0.75) * GBIT)

    def test_ramp_is_stairs_around_the_line_and_then_holds(self) -> None:
        made = schedule("ramp", step_s=5)
        line = lambda t_s: 8 * GBIT - 7 * GBIT * min(1, max(0, (t_s - 20) / 100))  # noqa: E731
        assert all(abs(made.rate_bps(t_s) - line(t_s)) <= 7 * GBIT * 2.5 / 100 + 1 for t_s in range(200))
        assert made.mean_bps(20, 120) == pytest.approx(4.5 * GBIT)
        assert len(made.steps(0, 500)) == 1 + 20 + 1
        assert (made.rate_bps(19.9), made.rate_bps(120), made.duration_s) == (8 * GBIT, GBIT, 120)

    def test_sawtooth_rises_and_falls_back_at_once(self) -> None:
        made = schedule("sawtooth", step_s=6)
        rates = [rate_bps for _, rate_bps in made.steps(0, 60)]
        assert rates == sorted(rates)
        assert made.steps(59, 61) == [(59, pytest.approx(7.65 * GBIT)), (60, pytest.approx(1.35 * GBIT))]
        assert made.mean_bps(0, 60) == pytest.approx(4.5 * GBIT)

    def test_diurnal_peaks_where_it_is_told_and_keeps_its_mean(self) -> None:
        made = schedule("diurnal", peak_s=43_200, step_s=600)
        assert made.mean_bps(0, 86_400) == pytest.approx(4 * GBIT)
        assert made.rate_bps(43_200) == pytest.approx(6 * GBIT, rel=0.001)
        assert made.rate_bps(86_400) == pytest.approx(2 * GBIT, rel=0.001)
        assert made.rate_bps(43_200 + 86_400) == made.rate_bps(43_200)

    @pytest.mark.parametrize("cv", [0.02, 0.05, 0.10])
    def test_stationary_has_its_mean_its_variation_and_its_memory(self, cv: float) -> None:
        """50,000 steps with a memory of 10 are 2,500 independent ones: 2 % of the mean's deviation, three times."""
        made = schedule("stationary", seed=11, cv=cv, dip_every_s=None, correlation_s=10)
        rates = np.array([made.rate_bps(t_s) for t_s in range(50_000)])
        assert rates.mean() == pytest.approx(4 * GBIT, rel=3 * cv * 0.02)
        assert rates.std() / rates.mean() == pytest.approx(cv, rel=0.05)
        for lag in (1, 10):
            assert np.corrcoef(rates[:-lag], rates[lag:])[0, 1] == pytest.approx(math.exp(-lag / 10), abs=0.05)

    def test_stationary_dips_as_often_as_deep_and_as_long_as_it_is_told(self) -> None:
        """Of 1,000 Poisson dips the count is within 10 % (three deviations), lengths are exact unless dips overlap."""
        made = schedule("stationary", seed=3, cv=0, dip_every_s=300, dip_depth=0.4, dip_s=10)
        steps = made.steps(0, 300_000)
        assert sorted({rate_bps for _, rate_bps in steps}) == [pytest.approx(2.4 * GBIT), 4 * GBIT]
        lengths = [b[0] - a[0] for a, b in pairwise(steps) if a[1] < 3 * GBIT]
        assert len(lengths) == pytest.approx(1000 * math.exp(-10 / 300), rel=0.1)
        assert min(lengths) == pytest.approx(10)
        in_dips = 1 - math.exp(-10 / 300)
        assert sum(lengths) / 300_000 == pytest.approx(in_dips, rel=0.1)
        assert made.mean_bps(0, 300_000) == pytest.approx(4 * GBIT * (1 - 0.4 * in_dips), rel=0.005)

    def test_stationary_dips_do_not_change_the_noise_between_them(self) -> None:
        dipping, calm = (
            schedule("stationary", seed=5, cv=0.05),
            schedule("stationary", seed=5, cv=0.05, dip_every_s=None),
        )
        ratios = {round(dipping.rate_bps(t_s + 0.5) / calm.rate_bps(t_s + 0.5), 9) for t_s in range(5000)}
        assert ratios == {1.0, 0.5}

    def test_markov_is_in_each_state_as_long_as_it_is_told(self) -> None:
        """4,000 sojourns of each state: their means within 5 % (three deviations)."""
        made = schedule("markov", seed=2)
        steps = made.steps(0, 320_000)
        good = [b[0] - a[0] for a, b in pairwise(steps) if a[1] == 8 * GBIT]
        bad = [b[0] - a[0] for a, b in pairwise(steps) if a[1] == GBIT]
        assert np.mean(good) == pytest.approx(60, rel=0.05)
        assert np.mean(bad) == pytest.approx(20, rel=0.05)
        assert np.std(good) == pytest.approx(60, rel=0.1)  # exponential: its deviation is its mean
        assert made.mean_bps(0, 320_000) == pytest.approx((8 * 60 + 20) / 80 * GBIT, rel=0.05)

    def test_markov_begins_in_equilibrium(self) -> None:
        begins_good = sum(schedule("markov", seed=seed).rate_bps(0) == 8 * GBIT for seed in range(400))
        assert begins_good / 400 == pytest.approx(0.75, abs=0.065)


class TestAnOutage:
    def test_is_a_rate_of_0_and_has_a_kind(self) -> None:
        made = schedule(
            "square", outages=[{"at_s": 10, "duration_s": 5}, {"at_s": 20, "duration_s": 2, "kind": "down"}]
        )
        assert made.steps(5, 30) == [(5, 8e9), (10, 0), (15, 8e9), (20, 0), (22, 8e9)]
        assert [made.outage(t_s) for t_s in (9.9, 10, 14.9, 15, 21)] == [None, "stall", "stall", None, "down"]

    def test_ends_with_the_rate_there_is_then(self) -> None:
        made = schedule("square", outages=[{"at_s": 29, "duration_s": 2, "kind": "blackhole"}])
        assert made.steps(0, 40) == [(0, 8e9), (29, 0), (31, 1e9)]
        assert made.mean_bps(0, 40) == pytest.approx((8e9 * 29 + 1e9 * 9) / 40)

    def test_makes_a_schedule_that_holds_last_longer(self) -> None:
        assert schedule("steps", outages=[{"at_s": 50, "duration_s": 5}]).duration_s == 55

    def test_keeps_its_times_when_steps_around_it_are_too_close(self) -> None:
        made = Schedule(Steps(((0, 8e9), (9.99, 1e9), (15.01, 4e9))), (Outage(10, 5),))
        assert made.steps(0, 20, 0.05) == [
            (0, 8e9), (9.95, pytest.approx(8e9 * 0.8 + 1e9 * 0.2)), (10, 0), (15, pytest.approx(3.4e9)), (15.05, 4e9)
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("outages", "what"),
        [
            ([Outage(10, 0.04)], "too short for an outage"),
            ([Outage(10, 1), Outage(11.03, 1)], "too short for a time between outages"),
        ],
    )
    def test_that_is_too_short_for_the_steps_is_refused(self, outages: list[Outage], what: str) -> None:
        made = Schedule(Constant(1e9), tuple(outages))
        assert len(made.steps(0, 20)) == 1 + 2 * len(outages)
        with pytest.raises(LinkError, match=what):
            made.steps(0, 20, 0.05)


class TestFiles:
    def csv(self, text: str | bytes, **options: Any) -> Schedule:
        content = text if isinstance(text, bytes) else text.encode()
        made = from_data({"kind": "csv", "file": "a.csv", **options}, read=lambda name: content)
        assert isinstance(made, Schedule)
        return made

    def mahimahi(self, stamps: list[int], **options: Any) -> Schedule:
        content = "".join(f"{ms}\n" for ms in stamps).encode()
        made = from_data({"kind": "mahimahi", "file": "a.up", **options}, read=lambda name: content)
        assert isinstance(made, Schedule)
        return made

    def test_a_csv_is_its_steps(self) -> None:
        assert schedule("csv").steps(0, 100) == schedule("steps").steps(0, 100)
        assert schedule("csv", repeat_s=20).rate_bps(25) == 8e9
        assert schedule("csv", scale=0.5).rate_bps(0) == 4e9

    @pytest.mark.parametrize(
        "text", ["\ufefft_s,rate_bps\r\n0,1e9\r\n2,5gbps", "t_s, rate_bps\n0, 1gbps\n2 ,5000mbit\n\n"]
    )
    def test_a_csv_may_come_from_elsewhere(self, text: str) -> None:
        assert self.csv(text).steps(0, 9) == [(0, 1e9), (2, 5e9)]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "a.csv: is empty"),
            ("\n\n", "a.csv: is empty"),
            ("t_s,rate_bps\n", "a.csv: [] has no step"),
            ("time,rate\n0,1e9\n", "a.csv, line 1: 'time,rate' is not the header; write t_s,rate_bps"),
            ("0,1e9\n", "a.csv, line 1: '0,1e9' is not the header"),
            ("t_s,rate_bps\n0,1e9,5\n", "a.csv, line 2: '0,1e9,5' is not a time and a rate"),
            ("t_s,rate_bps\n0,1e9\n\n2,1e9\n", "a.csv, line 3: '' is not a time and a rate"),
            ("t_s,rate_bps\n0,1e9\nsoon,1e9\n", "a.csv, line 3, t_s: 'soon' is not a number"),
            ("t_s,rate_bps\n0,1e9\nnan,1e9\n", "a.csv, line 3, t_s: nan is not finite"),
            ("t_s,rate_bps\n1,1e9\n", "a.csv, line 2, t_s: 1.0 s is not where a schedule begins"),
            ("t_s,rate_bps\n0,1e9\n0,2e9\n", "a.csv, line 3, t_s: 0.0 s does not come after the 0 s before it"),
            ("t_s,rate_bps\n0,1e9\n5,2e9\n4,1e9\n", "a.csv, line 4, t_s: 4.0 s does not come after the 5 s"),
            ("t_s,rate_bps\n0,0\n", "a.csv, line 2, rate_bps: '0' is no rate; take the line out, and list the time as"),
            ("t_s,rate_bps\n0,-5\n", "a.csv, line 2, rate_bps: '-5' is not a rate"),
            ("t_s,rate_bps\n0,nan\n", "a.csv, line 2, rate_bps: 'nan' is not a rate"),
            (
                "t_s,rate_bps\n0,1e9\n5,999999\n",
                "a.csv, line 3, rate_bps: 999999.0 bits/s is below the floor of 1 Mbit/s",
            ),
            ("t_s,rate_bps\n0,100MB/s\n", "a.csv, line 2, rate_bps: '100MB/s' may mean bytes; write bits"),
            ("t_s,rate_bps\n0,1Gibit\n", "a.csv, line 2, rate_bps: '1Gibit' has the unknown unit 'Gibit'"),
            (b"t_s,rate_bps\n0,\xff\n", "a.csv, line 2: is not UTF-8 text"),
        ],
    )
    def test_a_wrong_csv_is_refused_in_one_sentence(self, text: str | bytes, said: str) -> None:
        with pytest.raises(LinkError) as caught:
            self.csv(text)
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)

    def test_scaled_below_the_floor_is_refused_with_the_scale(self) -> None:
        with pytest.raises(LinkError, match=r"a.csv, line 2, rate_bps x scale = 0.0001: 100000.0 bits/s is below"):
            self.csv("t_s,rate_bps\n0,1e9\n", scale=1e-4)

    def test_a_mahimahi_file_delivers_all_its_packets_in_each_period(self) -> None:
        draw = random.Random(1)
        stamps = sorted(draw.randrange(1, 9_731) for _ in range(60_000))
        for window_s in (0.05, 0.1, 0.33, 1.0, 20.0):
            made = self.mahimahi(stamps, window_s=window_s)
            assert made.period_s == stamps[-1] / 1000
            assert made.integral_bits(0, 3 * made.period_s) == pytest.approx(3 * 60_000 * 12_000, rel=1e-9)

    def test_a_mahimahi_packet_counts_in_the_window_that_ends_with_it(self) -> None:
        made = self.mahimahi([*range(1, 101)] * 1 + [*range(102, 201, 2)], window_s=0.1)
        assert made.steps(0, 0.2) == [(0, pytest.approx(12e6)), (pytest.approx(0.1), pytest.approx(6e6))]
        assert made.rate_bps(0.25) == pytest.approx(12e6)  # from its beginning

    def test_a_steady_mahimahi_file_does_not_step(self) -> None:
        assert self.mahimahi([*range(1, 1001)]).steps(0, 5) == [(0, pytest.approx(12e6))]

    def test_a_mahimahi_window_without_packets_is_a_stall(self) -> None:
        made = self.mahimahi([*range(1, 101), *range(301, 401)], window_s=0.1)
        assert [rate_bps > 0 for _, rate_bps in made.steps(0, 0.4)] == [True, False, True]
        assert (made.outage(0.05), made.outage(0.25)) == (None, "stall")

    def test_a_mahimahi_file_may_hold_its_last_rate_and_be_scaled(self) -> None:
        made = self.mahimahi([*range(1, 101), *range(102, 201, 2)], repeat=False, scale=100)
        assert (made.period_s, made.duration_s) == (None, pytest.approx(0.1))
        assert made.rate_bps(1000) == pytest.approx(600e6)

    @pytest.mark.parametrize(
        ("text", "options", "said"),
        [
            ("", {}, "a.up: is empty; give a whole number of ms a line"),
            ("1\n2.5\n", {}, "a.up, line 2: '2.5' is not a whole number of ms"),
            ("1\n\n3\n", {}, "a.up, line 2: '' is not a whole number of ms"),
            ("-1\n", {}, "a.up, line 1: '-1' is not a whole number of ms"),
            ("1 2\n", {}, "a.up, line 1: '1 2' is not a whole number of ms"),
            ("5\n3\n", {}, "a.up, line 2: 3 ms comes before the 5 ms above it; sort the file"),
            ("0\n0\n", {}, "a.up, line 2: 0 ms: the file lasts no time"),
            (
                "100\n",
                {},
                "a.up, 0 to 0.1 s: 120000.0 bits/s is below the floor of 1 Mbit/s; give a longer window_s, or",
            ),
            ("100\n200\n", {"window_s": 0}, "schedule.window_s: 0 is no span of time"),
            ("100\n200\n", {"window_s": 1e-4}, "schedule.window_s: 0.0001 s is shorter than the file's millisecond"),
            ("100\n", {"scale": "10"}, "schedule.scale: '10' is not a number"),
            ("100\n", {"repeat": "yes"}, "schedule.repeat: 'yes' is not true or false"),
        ],
    )
    def test_a_wrong_mahimahi_file_is_refused_in_one_sentence(self, text: str, options: Any, said: str) -> None:
        data = {"kind": "mahimahi", "file": "a.up", **options}
        assert str(refused(data, read=lambda name: text.encode())).startswith(said)

    def test_a_file_is_held_to_the_sum_it_was_named_with(self) -> None:
        data = {"kind": "csv", "file": "a.csv", "sha256": hashlib.sha256(CSV).hexdigest()}
        assert from_data(data, read=lambda name: CSV)
        wrong = refused(data, read=lambda name: CSV + b"20,1e9\n")
        assert str(wrong).startswith(f"schedule.sha256: {data['sha256']!r} is not that of a.csv")

    def test_a_file_that_nobody_can_read_is_refused(self) -> None:
        assert str(refused({"kind": "csv", "file": "a.csv"})).startswith("schedule.file: 'a.csv' cannot be read here")


SQUARE = {"kind": "square", **EXAMPLES["square"]}


class TestWrongData:
    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (None, "schedule: None is not a mapping"),
            ([SQUARE], "schedule: [{"),
            ({}, "schedule.kind: None is no model; use constant, steps, square, "),
            ({"kind": "sqaure"}, "schedule.kind: 'sqaure' is no model; did you mean square? use"),
            ({"kind": ["square"]}, "schedule.kind: ['square'] is no model; "),
            ({"kind": "constant"}, "schedule.rate_bps: None is missing; constant needs it; add rate_bps"),
            ({**SQUARE, "dutty": 1}, "schedule.dutty: 1 is no parameter of square; did you mean duty? square knows"),
            ({**SQUARE, "high": 1}, "schedule.high: 1 is no parameter of square; did you mean high_bps? "),
            ({**SQUARE, "content": b""}, "schedule.content: b'' is no parameter of square; "),
            ({**SQUARE, "low_bps": "9gbps"}, "schedule.low_bps: 9000000000.0 is not below high_bps = 8e+09"),
            ({**SQUARE, "low_bps": 0}, "schedule.low_bps: 0 is no rate"),
            ({**SQUARE, "low_bps": -1e9}, "schedule.low_bps: -1000000000.0 is no rate"),
            ({**SQUARE, "low_bps": math.nan}, "schedule.low_bps: nan is not finite"),
            ({**SQUARE, "low_bps": True}, "schedule.low_bps: True is not a number"),
            ({**SQUARE, "low_bps": "1MB/s"}, "schedule.low_bps: '1MB/s' may mean bytes"),
            ({**SQUARE, "low_bps": 8000}, "schedule.low_bps: 8000.0 bits/s is below the floor of 1 Mbit/s"),
            ({**SQUARE, "period_s": 0}, "schedule.period_s: 0 is no span of time"),
            ({**SQUARE, "period_s": "60s"}, "schedule.period_s: '60s' is not a number"),
            ({**SQUARE, "period_s": math.inf}, "schedule.period_s: inf is not finite"),
            ({**SQUARE, "period_s": None}, "schedule.period_s: None is not a number"),
            ({**SQUARE, "duty": 50}, "schedule.duty: 50 is out of bounds; give 0.001 to 0.999"),
            ({"kind": "steps", "steps": []}, "schedule.steps: [] has no step"),
            ({"kind": "steps", "steps": [[0, "1gbps"], [1]]}, "schedule.steps[1]: [1] is not a time and a rate"),
            ({"kind": "steps", "steps": 7}, "schedule.steps[0]: 7 is not a time and a rate"),
            ({"kind": "steps", "steps": [[0, "1gbps"], [0, 1e9]]}, "schedule.steps[1]: 0.0 s does not come after"),
            ({"kind": "steps", "steps": [[5, "1gbps"]]}, "schedule.steps[0]: 5.0 s is not where a schedule begins"),
            ({"kind": "steps", "steps": [[0, 1e9], [9, 2e9]], "repeat_s": 9}, "schedule.repeat_s: 9 s ends before"),
            ({"kind": "ramp", **EXAMPLES["ramp"], "step_s": 60}, "schedule.step_s: 60 leaves fewer than two steps"),
            (
                {"kind": "ramp", **EXAMPLES["ramp"], "start_s": -1},
                "schedule.start_s: -1 is out of bounds; give at least 0",
            ),
            (
                {"kind": "diurnal", "mean_bps": "1.5mbit", "amplitude": 0.5},
                "schedule.amplitude: 0.5 takes the rate below",
            ),
            ({"kind": "stationary", "mean_bps": "1gbps", "cv": 5}, "schedule.cv: 5 is out of bounds; give 0 to 0.2"),
            ({"kind": "stationary", "mean_bps": "1.2mbit"}, "schedule.mean_bps: 1200000.0 falls below the floor"),
            ({"kind": "stationary", "mean_bps": "1gbps", "seed": -1}, "schedule.seed: -1 is no seed"),
            (
                {"kind": "stationary", "mean_bps": "1gbps", "dip_every_s": 9, "dip_depth": 1},
                "schedule.dip_depth: 1 is out",
            ),
            ({"kind": "markov", **EXAMPLES["markov"], "bad_s": 0}, "schedule.bad_s: 0 is no span of time"),
            ({"kind": "csv", "file": 3}, "schedule.file: 3 is not a text"),
            ({**SQUARE, "outages": [{"at_s": 1}]}, "schedule.outages[0]: {'at_s': 1} is not an outage; write"),
            ({**SQUARE, "outages": {"at_s": 1, "duration_s": 0}}, "schedule.outages[0].duration_s: 0 is no span"),
            (
                {**SQUARE, "outages": [{"at_s": 1, "duration_s": 1, "kind": "blackhol"}]},
                "schedule.outages[0].kind: 'blackhol' is no outage; did you mean blackhole? use stall, blackhole, down",
            ),
            (
                {**SQUARE, "outages": [{"at_s": 1, "duration_s": 4}, {"at_s": 5, "duration_s": 1}]},
                "schedule.outages: 5 s is not after the outage that ends at 5 s; join them",
            ),
            (
                {"kind": "token_bucket", **EXAMPLES["token_bucket"], "outages": []},
                "schedule.outages: [] is no parameter",
            ),
            ({"kind": "token_bucket", **EXAMPLES["token_bucket"], "initial_bytes": 1e12}, "schedule.initial_bytes: "),
            ({"kind": "token_bucket", **EXAMPLES["token_bucket"], "refill_bps": 2e10}, "schedule.refill_bps: "),
            ({"kind": "token_bucket", **EXAMPLES["token_bucket"], "budget_bytes": 0}, "schedule.budget_bytes: 0 is no"),
        ],
    )
    def test_is_refused_with_field_value_and_remedy(self, data: object, said: str) -> None:
        wrong = refused(data, read=FILES.__getitem__)
        assert str(wrong).startswith(said)
        assert "; " in str(wrong)
        assert wrong.field is not None

    @pytest.mark.parametrize(
        ("text", "bps"),
        [("1mbit", 1e6), ("40 Gbit", 40e9), ("2.5gbps", 2.5e9), ("1500000", 1.5e6), (1e6, 1e6), ("8 Gbit/s", 8e9)],
    )
    def test_units_are_exact(self, text: str | float, bps: float) -> None:
        made = from_data({"kind": "constant", "rate_bps": text})
        assert isinstance(made, Schedule)
        assert made.rate_bps(0) == bps

    @pytest.mark.parametrize(
        ("start_s", "end_s"), [(-1, 5), (5, 5), (5, 1), (0, math.nan), (math.nan, 1), (0, math.inf)]
    )
    def test_a_span_that_is_none_is_refused(self, start_s: float, end_s: float) -> None:
        for ask in (schedule("square").steps, schedule("square").integral_bits, schedule("square").mean_bps):
            with pytest.raises(LinkError, match=r"start_s|end_s"):
                ask(start_s, end_s)

    def test_more_steps_than_anybody_can_use_are_refused(self) -> None:
        with pytest.raises(LinkError, match="more than 5000000 steps away"):
            Schedule(Square(2e9, 1e9, 1e-5)).rate_bps(1e6)


class TestATokenBucket:
    SPEC = TokenBucketSpec(peak_bps=10e9, base_bps=1e9, budget_bytes=675e9)

    def drive(self, bucket: TokenBucket, demand: Any, until_s: float) -> list[tuple[float, float]]:
        """A sender of demand(t) bits/s at most: (t_s, rate) at every look at which the rate changes."""
        at_s, sent, changes = 0.0, 0.0, [(0.0, bucket.rate_bps)]
        while at_s < until_s:
            next_s = bucket.next_s()
            assert next_s >= at_s + 0.05 - 1e-9
            sent += min(bucket.rate_bps, demand(at_s)) * (next_s - at_s)
            at_s = next_s
            if bucket.advance(at_s, sent) != changes[-1][1]:
                changes.append((at_s, bucket.rate_bps))
        return changes

    def test_lasts_ten_minutes_at_its_peak(self) -> None:
        """Uta et al.: 10 Gbps for about ten minutes, then 1."""
        assert saturated(self.SPEC, 5000) == [(0, 10e9), (pytest.approx(600), 1e9)]

    def test_that_was_used_up_refills_when_nobody_sends(self) -> None:
        changes = self.drive(TokenBucket(self.SPEC), lambda t_s: 0 if 700 <= t_s < 710 else math.inf, 730)
        assert [rate for _, rate in changes[:3]] == [10e9, 1e9, 10e9]
        assert 710 - 1 <= changes[2][0] <= 721

    def test_that_is_not_used_stays_at_its_peak(self) -> None:
        assert self.drive(TokenBucket(self.SPEC), lambda t_s: 0.99e9, 20_000) == [(0, 10e9)]

    def test_over_a_long_time_gives_no_more_than_budget_and_refill(self) -> None:
        spec = TokenBucketSpec(peak_bps=10e9, base_bps=1e9, budget_bytes=1e9, initial_bytes=0, refill_bps=2e9)
        bucket, at_s, sent = TokenBucket(spec), 0.0, 0.0
        assert bucket.rate_bps == 1e9
        while at_s < 2000:
            next_s = bucket.next_s()
            sent += bucket.rate_bps * (next_s - at_s)
            at_s = next_s
            bucket.advance(at_s, sent)
        assert sent == pytest.approx(2e9 * at_s, rel=0.01)

    @pytest.mark.parametrize(("t_s", "sent"), [(9, 1e9), (11, 1e6), (math.nan, 1e9), (11, math.nan)])
    def test_refuses_a_time_or_a_count_that_falls(self, t_s: float, sent: float) -> None:
        bucket = TokenBucket(self.SPEC)
        bucket.advance(10, 1e9)
        with pytest.raises(LinkError):
            bucket.advance(t_s, sent)


rates = st.floats(1e6, 1e8)
spans = st.floats(0.2, 20)
courses = st.one_of(
    st.builds(Constant, rates),
    st.lists(st.tuples(spans, rates), min_size=1, max_size=6).map(
        lambda given: Steps(tuple((sum(gap for gap, _ in given[:i]), bps) for i, (_, bps) in enumerate(given)))
    ),
    st.builds(lambda low, by, period_s: Square(low * by, low, period_s), rates, st.floats(1.01, 9), spans),
    st.builds(
        lambda low, by, length_s: Ramp(low, low * by, length_s, step_s=length_s / 7), rates, st.floats(1.1, 9), spans
    ),
    st.builds(lambda mean, seed: Stationary(mean * 10, seed, dip_every_s=7.0, dip_s=1.0), rates, st.integers(0, 99)),
    st.builds(
        lambda low, by, s, seed: Markov(low * by, low, s, s / 3, seed),
        rates,
        st.floats(1.1, 9),
        spans,
        st.integers(0, 99),
    ),
)
outages = st.one_of(st.just(()), st.builds(lambda at_s, length_s: (Outage(at_s, length_s),), st.floats(0.1, 20), spans))
transfers = st.lists(st.tuples(st.floats(0, 4), st.sampled_from("abc"), st.floats(1, 3e7)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(courses, outages, transfers, st.sampled_from([0.0, 7e4, 1e6]), st.one_of(st.none(), st.floats(1e6, 5e7)))
def test_a_link_under_a_schedule_delivers_at_most_its_integral_and_a_burst_over_any_window(
    course: Any, down: tuple[Outage, ...], orders: list[tuple[float, str, float]], burst: float, cap: float | None
) -> None:
    made = Schedule(course, down)
    link = FluidLink(made.rate_bps(0), burst_bytes=burst, per_flow_bps=cap)
    events: list[tuple[float, float | tuple[str, float]]] = list(made.steps(0, 60, 0.05))
    at_s = 0.0
    for gap_s, sender, size in orders:
        at_s += gap_s
        events.append((at_s, (sender, size)))
    seen = [(0.0, 0.0)]
    for token, (now_s, what) in enumerate(sorted(events, key=lambda event: event[0])):
        drain(link, now_s)
        link.advance(now_s)
        seen.append((now_s, link.delivered_bytes(now_s)))
        if isinstance(what, tuple):
            link.transmit(now_s, what[0], "d", token, what[1], 4, now_s - 2, now_s - 1)
        else:
            link.set_capacity(now_s, what)
    seen.append((60.0, link.delivered_bytes(60)))
    steps = made.steps(0, 61, 0.05)
    carried = [integral_bits(steps, 0, t_s) * TCP_EFFICIENCY for t_s, _ in seen]
    for i, (_, before) in enumerate(seen):
        for j in range(i + 1, len(seen)):
            most = (carried[j] - carried[i]) * (1 + 1e-9) + burst * 8 + 1
            assert (seen[j][1] - before) * 8 <= most


@settings(max_examples=200, deadline=None)
@given(courses, outages, st.floats(0.05, 0.2), st.floats(1, 90))
def test_steps_for_the_wire_are_apart_and_carry_what_the_schedule_does(
    course: Any, down: tuple[Outage, ...], min_step_s: float, end_s: float
) -> None:
    made = Schedule(course, down)
    try:
        steps = made.steps(0, end_s, min_step_s)
    except LinkError:
        assert any(one.at_s < min_step_s for one in down)  # the only way in which these can be too close
        return
    assert all(to_s - from_s >= min_step_s * (1 - 1e-6) for (from_s, _), (to_s, _) in pairwise(steps))
    assert integral_bits(steps, 0, end_s) == pytest.approx(made.integral_bits(0, end_s), rel=1e-9)
    for one in down:
        if one.end_s < end_s:
            assert integral_bits(steps, one.at_s, one.end_s) == 0
            assert integral_bits(steps, 0, one.at_s) == pytest.approx(made.integral_bits(0, one.at_s), rel=1e-9)


def test_a_token_bucket_and_a_link_in_virtual_time_drive_each_other() -> None:
    """The bucket is told the bits on the wire, the link the rate; over all it is budget and refill."""
    spec = TokenBucketSpec(peak_bps=10e9, base_bps=1e9, budget_bytes=90e9)  # 80 s at the peak
    bucket, link = TokenBucket(spec), FluidLink(10e9)
    link.transmit(0.0, "p", "d", 1, 1e15, 1, -2.0, -1.0)
    rates = []
    while (now_s := bucket.next_s()) < 500:
        rates.append((now_s, bucket.advance(now_s, link.delivered_bytes(now_s) * 8 / TCP_EFFICIENCY)))
        link.set_capacity(now_s, rates[-1][1])
    assert rates[0] == (pytest.approx(80), 1e9)
    assert link.delivered_bytes(500) * 8 / TCP_EFFICIENCY == pytest.approx(90e9 * 8 + 1e9 * 500, rel=1e-6)


def test_a_link_that_always_has_something_to_send_delivers_its_schedules_integral() -> None:
    made = schedule("markov", seed=3, outages=[{"at_s": 100, "duration_s": 30}])
    link = FluidLink(made.rate_bps(0))
    link.transmit(0.0, "p", "d", 1, 1e15, 1, -2.0, -1.0)
    for at_s, rate_bps in made.steps(0, 1000, 0.05):
        link.set_capacity(at_s, rate_bps)
    assert link.delivered_bytes(1000) * 8 == pytest.approx(made.integral_bits(0, 1000) * TCP_EFFICIENCY, rel=1e-9)


def test_the_files_are_courses_of_their_own() -> None:
    assert Csv("a", CSV) == Csv("a", CSV) != Csv("a", CSV, scale=2.0)
    assert "content" not in repr(Mahimahi("a", FILES["link.trace"]))
