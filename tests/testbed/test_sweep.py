"""The load sweep, the points it is made of, and the studies that use them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed import cli, openquestion, points
from testbed.points import GROWING, Point, Runner, backlog_growth, key, measure
from testbed.report.intervals import interval, over_runs, student_t
from testbed.scenario import Scenario, ScenarioError, load
from testbed.sweep import FRACTIONS, at_slo, bracket, capacity, next_rate, stable, sweep


def toy(rate_rps: float, *sets: str, deployment: str = "naive", duration_s: float = 200) -> Scenario:
    load_sets = [f"workload.rate_rps={rate_rps}", f"workload.duration_s={duration_s}", "workload.warmup_s=0"]
    return load("toy", [*load_sets, *sets]).only(deployment)


def command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    printed = capsys.readouterr()
    return int(left.value.code or 0), printed.out, printed.err


class TestGrowth:
    def test_a_steady_state_does_not_grow(self) -> None:
        arrive = np.arange(0.0, 1000.0)
        assert backlog_growth(arrive, arrive + 7.5, 100, 1000) == pytest.approx(0, abs=1e-4)

    @pytest.mark.parametrize("rho", [1.01, 1.25, 2.0])
    def test_overload_grows_by_what_is_not_served(self, rho: float) -> None:
        arrive = np.arange(0.0, 2000.0)
        served = arrive * rho  # one server, rho seconds each
        assert backlog_growth(arrive, served, 200, 2000) == pytest.approx(1 - 1 / rho, abs=2e-3)

    def test_a_burst_that_is_worked_off_is_no_growth(self) -> None:
        arrive = np.sort(np.concatenate((np.arange(0.0, 1000.0, 2), np.full(200, 900.0))))
        free, first_token = 0.0, []
        for at in arrive:
            free = max(free, at) + 0.25
            first_token.append(free)
        assert backlog_growth(arrive, np.array(first_token), 0, 1000) == pytest.approx(0, abs=1e-3)

    def test_requests_without_a_first_token_stay_in_the_backlog(self) -> None:
        arrive = np.arange(0.0, 1000.0)
        assert backlog_growth(arrive, np.full_like(arrive, np.nan), 0, 1000) == pytest.approx(1.0)

    def test_nothing_arrives(self) -> None:
        assert backlog_growth(np.array([]), np.array([]), 0, 10) == 0.0


class TestInterval:
    @pytest.mark.parametrize(("df", "t"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (19, 2.0930), (200, 1.9719)])
    def test_students_t(self, df: int, t: float) -> None:
        assert student_t(df) == pytest.approx(t, abs=1e-4)

    def test_by_hand(self) -> None:
        found = interval([1.0, 2.0, 3.0])
        half = 4.302653 / math.sqrt(3)
        assert found == {"mean": 2.0, "low": pytest.approx(2 - half), "high": pytest.approx(2 + half)}

    def test_one_value_has_no_interval_and_a_missing_one_does_not_count(self) -> None:
        assert interval([None, 2.0]) == {"mean": 2.0, "low": None, "high": None}
        assert over_runs([{"a": None}, {"a": None}]) == {"a": {"mean": None, "low": None, "high": None}}


def rated(**good: bool) -> dict[float, dict[str, Any]]:
    return {float(rate[1:]): {"growing": not is_good, "slo_met": True} for rate, is_good in good.items()}


class TestSearch:
    def test_a_good_rate_above_a_bad_one_counts_for_nothing(self) -> None:
        assert bracket(rated(r1=True, r2=True, r3=False, r4=True), stable) == (2.0, 3.0)

    def test_halves_until_the_tolerance(self) -> None:
        known = rated(r1=True, r2=False)
        assert next_rate(known, stable, 4, 0.01) == 1.5
        known |= {1.99: {"growing": False, "slo_met": True}}
        assert next_rate(known, stable, 4, 0.01) is None

    def test_goes_up_while_all_is_good_but_not_for_ever(self) -> None:
        assert next_rate(rated(r1=True, r2=True), stable, 4, 0.01) == pytest.approx(2.3)
        assert next_rate(rated(r1=True, r4=True), stable, 4, 0.01) is None

    def test_gives_up_where_the_lowest_is_bad(self) -> None:
        assert next_rate(rated(r1=False, r2=False), stable, 4, 0.01) is None

    def test_the_slo_needs_queues_that_do_not_grow(self) -> None:
        assert not at_slo({"slo_met": True, "growing": True})
        assert not at_slo({"slo_met": False, "growing": False})


class TestPoints:
    def test_overload_is_told_by_its_queues_and_stops_early(self) -> None:
        over = measure(Point(toy(3.0, duration_s=1000), probe=0.25))
        assert over["stopped_early"]
        assert over["growing"]
        assert over["growth"] == pytest.approx(1 - 1.6 / 3.0, abs=0.06)
        under = measure(Point(toy(0.8, duration_s=1000), probe=0.25))
        assert (under["stopped_early"], under["growing"], under["slo_met"]) == (False, False, True)

    def test_processes_change_nothing(self) -> None:
        asked = [Point(toy(rate)) for rate in (0.4, 0.8, 1.2)]
        with Runner(jobs=1) as one, Runner(jobs=2) as two:
            assert one.run(asked) == two.run(asked)

    def test_a_point_is_known_by_all_it_depends_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base = toy(1.0)
        others = [
            toy(1.1), toy(1.0, "seed=2"), toy(1.0, deployment="homogeneous"), toy(1.0, "link.rate_bps=9gbps"),
            base.only(None, "homogeneous"),
        ]  # fmt: skip
        keys = {key(Point(one)) for one in [base, toy(1.0), *others]} | {key(Point(base, probe=0.5))}
        assert len(keys) == 2 + len(others)
        monkeypatch.setattr(points, "code_version", lambda: "another")
        assert key(Point(base)) not in keys

    def test_a_profile_of_ones_own_is_part_of_the_key(self, tmp_path: Path) -> None:
        shipped = Path(points.__file__).parents[1] / "emulator" / "profiles" / "toy.yaml"
        mine = tmp_path / "mine.yaml"
        mine.write_text(shipped.read_text())
        point = Point(toy(1.0, f"deployments.naive.profiles.prfaas={mine}"))
        before = key(point)
        mine.write_text(shipped.read_text() + "# changed\n")
        assert key(point) != before

    def test_interrupted_goes_on_where_it_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = [Point(toy(rate)) for rate in (0.4, 0.8, 1.2)]
        ran: list[float] = []

        def until_second(point: Point) -> points.Figures:
            if len(ran) == 2:
                raise KeyboardInterrupt
            ran.append(point.scenario.workload.rate_rps or 0)
            return measure(point)

        monkeypatch.setattr(points, "measure", until_second)
        with pytest.raises(KeyboardInterrupt), Runner(jobs=1, folder=tmp_path) as runner:
            runner.run(asked)
        assert len(list(tmp_path.glob("*.json"))) == 2
        ran.clear()
        with Runner(jobs=1, folder=tmp_path) as runner:
            resumed = runner.run(asked)
        assert ran == [1.2]
        assert resumed == [measure(point) for point in asked]

    def test_half_a_file_is_run_again(self, tmp_path: Path) -> None:
        point = Point(toy(0.4))
        (tmp_path / f"{key(point)}.json").write_text('{"growth": 0.')
        with Runner(jobs=1, folder=tmp_path) as runner:
            assert runner.run([point]) == [measure(point)]

    def test_on_a_local_ray_cluster(self, tmp_path: Path) -> None:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'prfaas-testbed[ray]'")
        from ray.cluster_utils import Cluster

        asked = [Point(toy(rate)) for rate in (0.4, 0.8)]
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            with Runner(ray=cluster.address, folder=tmp_path) as runner:
                assert runner.run(asked) == [measure(point) for point in asked]
        finally:
            cluster.shutdown()

    def test_no_ray_cluster_there(self) -> None:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'prfaas-testbed[ray]'")
        with pytest.raises(ScenarioError, match=r"--ray 127\.0\.0\.1:1: no cluster there"), Runner(ray="127.0.0.1:1"):
            pass


Found = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A sweep of the toy's PrfaaS-PD, and where its points are."""
    folder = tmp_path_factory.mktemp("points")
    with Runner(jobs=1, folder=folder) as runner:
        return sweep(load("toy").only("prfaas-pd"), runner, point_requests=1000), folder


class TestSweep:
    @pytest.mark.parametrize("scenario", ["paper", "toy"])
    def test_queues_grow_above_the_capacity_with_expectations_and_not_below(self, scenario: str) -> None:
        whole = load(scenario)
        for one in whole.deployments:
            capacity_rps = capacity(whole, one).expectation.lambda_max
            for share, grows in ((0.9, False), (1.1, True)):
                rate = share * capacity_rps
                sets = [f"workload.rate_rps={rate}", f"workload.duration_s={3000 / rate}", "workload.warmup_s=0"]
                figures = measure(Point(load(scenario, sets).only(one.name)))
                assert figures["growing"] == grows, (one.name, share, figures["growth"])

    def test_both_limits(self, found: Found) -> None:
        (one,) = found[0]["deployments"]
        assert one["saturated_rps"] == pytest.approx(one["lambda_max_rps"]["expectation"], rel=0.1)
        assert 0 < one["lambda_max_rps"]["simulated"] < one["saturated_rps"]

    def test_a_deployment_is_run_at_the_same_shares_of_its_capacity(self, found: Found) -> None:
        (one,) = found[0]["deployments"]
        shares = [point["load_fraction"] for point in one["points"]]
        assert all(any(abs(share - fraction) < 1e-5 for share in shares) for fraction in FRACTIONS)

    def test_the_limit_is_known_to_the_tolerance(self, found: Found) -> None:
        (one,) = found[0]["deployments"]
        low, high = bracket({point["rate_rps"]: point for point in one["points"]}, at_slo)
        assert low == one["lambda_max_rps"]["simulated"]
        assert high is not None
        assert high - low <= 0.01 * high

    def test_again_runs_nothing_and_finds_the_same(self, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
        result, folder = found
        monkeypatch.setattr(points, "measure", lambda point: pytest.fail("was there already"))
        with Runner(jobs=1, folder=folder) as runner:
            assert sweep(load("toy").only("prfaas-pd"), runner, point_requests=1000) == result

    def test_an_slo_below_the_unloaded_ttft_is_met_nowhere(self) -> None:
        scenario = load("toy", ["slo.ttft_p90_s=1"]).only("naive")
        with Runner(jobs=1) as runner:
            (one,) = sweep(scenario, runner, point_requests=200, tolerance=0.1)["deployments"]
        assert one["lambda_max_rps"]["simulated"] == 0
        assert "misses the SLO even at 5%" in one["note"]

    def test_intervals_over_seeds(self) -> None:
        with Runner(jobs=1) as runner:
            result = sweep(load("toy").only("naive"), runner, repeats=2, point_requests=200, tolerance=0.1)
        (one,) = result["deployments"]
        assert result["seeds"] == [1, 2]
        assert one["intervals"]["saturated"]["mean"] == one["saturated_rps"]
        assert one["intervals"]["saturated"]["low"] <= one["saturated_rps"] <= one["intervals"]["saturated"]["high"]

    def test_repeats_of_a_trace_are_refused(self) -> None:
        scenario = load("toy", ["workload.trace=some.csv", "workload.arrivals={kind: as-is}"])
        with Runner() as runner, pytest.raises(ScenarioError, match="--repeats 3"):
            sweep(scenario, runner, repeats=3)


class TestOpenQuestion:
    def test_the_cells(self) -> None:
        cells = openquestion.cells()
        assert len(cells) == 2 * 4 * 4 * 2 + 4 * 2  # the homogeneous deployment does not use the link
        assert {cell.link_bps for cell in cells if cell.deployment == "homogeneous"} == {None}
        for cell in cells:
            assert cell.rate_rps == cell.load * cell.known.expectation.lambda_max
        narrow = [cell.known.routed.bottleneck for cell in cells if cell.link_bps == 12e9]
        assert set(narrow) == {"link"}

    @pytest.mark.parametrize(
        ("growth", "said"),
        [
            ((0.02, 0.03), "unstable"),
            ((-0.01, GROWING), "stable"),
            ((0.0, 0.02), "undecided"),
            ((None, None), "undecided"),
        ],
    )
    def test_labels(self, growth: tuple[float | None, float | None], said: str) -> None:
        assert openquestion.stability({"mean": 0.0, "low": growth[0], "high": growth[1]}) == said

    def test_a_slower_h20_helps_the_ratios(self) -> None:
        kept = [openquestion._variant(scale).kept for scale in (0.8, 1.0, 1.2)]
        ratios = [one["prfaas-pd"] / one["homogeneous"] for one in kept]
        assert ratios == sorted(ratios)
        assert ratios[1] == pytest.approx(1.548, abs=2e-3)

    def test_capacity_is_that_of_plan(self) -> None:
        paper = load("paper")
        known = capacity(paper, paper.deployment("naive"))
        assert known.closed.lambda_max == pytest.approx(2.501, abs=1e-3)
        assert known.expectation.lambda_max == pytest.approx(2.371, abs=1e-3)
        assert (known.ttft_mean_s, known.ttft_p90_s) == (pytest.approx(1.687, abs=1e-3), pytest.approx(3.516, abs=1e-3))


class TestCommands:
    def test_sweep(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        plot = tmp_path / "sweep.svg"
        arguments = ["sweep", "toy", "--deployment", "naive", "--point-requests", "100", "--jobs", "1"]
        arguments += ["--out", str(tmp_path), "--plot", str(plot)]
        code, out, _ = command([*arguments, "--json"], capsys)
        result = json.loads(out)
        assert code == 0
        assert result == json.loads((tmp_path / "sweep.json").read_text()) | {"results": str(tmp_path)}
        assert set(result["deployments"][0]["lambda_max_rps"]) == {"closed", "expectation", "simulated"}
        drawn = plot.read_bytes()
        code, out, err = command(arguments, capsys)
        assert (code, "at the SLO" in out, "are there already" in err) == (0, True, True)
        assert plot.read_bytes() == drawn

    def test_sweep_refuses_a_figure_it_cannot_draw_before_it_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = command(["sweep", "toy", "--plot", "a.gif", "--out", str(tmp_path / "new")], capsys)
        assert code == 2
        assert "a figure ends in" in err
        assert not (tmp_path / "new").exists()

    def test_simulate_repeats(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["simulate", "toy", "--duration-s", "100", "--jobs", "1", "--json"]
        code, out, _ = command([*arguments, "--repeats", "3"], capsys)
        repeated = json.loads(out)["repeats"]
        assert (code, repeated["n"], repeated["seeds"]) == (0, 3, [1, 2, 3])
        means = []
        for seed in "123":
            _, out, _ = command([*arguments, "--seed", seed], capsys)
            means.append(json.loads(out)["ttft_s"]["mean"])
        assert repeated["figures"]["ttft_mean_s"] == pytest.approx(interval(means))

    @pytest.mark.parametrize(("name", "rows"), [("table6", 29), ("figure5", 9 + 241)])
    def test_figures_that_are_solved(
        self, name: str, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, _ = command(["figure", name, "--out", str(tmp_path), "--format", "pdf"], capsys)
        assert code == 0
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        with (tmp_path / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == rows

    def test_open_question(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(openquestion, "LOADS", (0.9,))
        monkeypatch.setattr(openquestion, "LINKS_BPS", (12e9,))
        monkeypatch.setattr(openquestion, "SCALES", (1.2,))
        monkeypatch.setattr(openquestion, "SETTLED_HOURS", 2)
        arguments = ["figure", "open-question", "--out", str(tmp_path), "--replications", "2", "--duration-s", "30"]
        code, out, _ = command([*arguments, "--jobs", "1", "--json"], capsys)
        files = [Path(name) for name in json.loads(out)["files"]]
        assert code == 0
        assert [path.name for path in files if path.suffix == ".svg"] == [
            "open-question.svg", "open-question-link.svg", "open-question-h20.svg",
        ]  # fmt: skip
        with (tmp_path / "open-question.csv").open() as file:
            cells = list(csv.DictReader(file))
        assert len(cells) == 2 * 2 + 2
        assert {cell["stability"] for cell in cells} <= {"stable", "unstable", "undecided"}
        with (tmp_path / "open-question-h20.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 3
        with (tmp_path / "open-question-settled.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 2 * 3

    def test_a_figure_there_is_none_of(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = command(["figure", "figure6"], capsys)
        assert (code, "table6, figure5, open-question" in err) == (2, True)
