"""Policies side by side, and runs under several seeds: the same requests for all, paired differences, nothing lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from testbed import cli, show
from testbed import load as wire
from testbed.assemble import build_workload, capacity_rps
from testbed.cli import series as commands
from testbed.compare import compare, figures, repeats
from testbed.report.intervals import interval
from testbed.report.rows import PARTS
from testbed.report.summary import EXIT_CODES
from testbed.scenario import Scenario, ScenarioError, load
from testbed.series import arms, completed_ttft_s, place, policy_names, read_ttft_s, runs
from testbed.simulate import simulate, write
from traces.client_rows import INCONCLUSIVE

SHORT = ("--duration-s", "60", "--jobs", "1")


def toy(*sets: str) -> Scenario:
    """Its deployment with both sites, under `static`."""
    return load("toy", ["workload.duration_s=60", "workload.warmup_s=0", *sets]).only("prfaas-pd")


@pytest.fixture
def prfaas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """prfaas(*arguments) -> (exit code, standard output, standard error), in a folder of the test's own."""
    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(show.out, "_width", 200)  # what the environment says was read when it was made
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return run


class TestNames:
    def test_are_split_at_commas(self) -> None:
        assert policy_names("prfaas, static,own.module:Policy") == ["prfaas", "static", "own.module:Policy"]

    @pytest.mark.parametrize(
        ("text", "part"), [("prfaas,", "empty name"), ("naive,static,naive", "naive is there twice")]
    )
    def test_that_say_nothing_are_refused(self, text: str, part: str) -> None:
        with pytest.raises(ScenarioError, match=part):
            policy_names(text)


class TestArms:
    def test_have_the_same_requests_whatever_their_order(self) -> None:
        made = [*arms(toy(), ["static", "naive"]), *arms(toy(), ["naive", "homogeneous"])]
        offered = [build_workload(arm, arm.deployments[0])[0].requests for arm in made]
        assert all(requests == offered[0] for requests in offered)

    def test_a_load_fraction_is_of_the_deployment_under_its_own_policy(self) -> None:
        scenario = toy("workload.load_fraction=0.5")
        (arm,) = arms(scenario, ["naive"])
        assert arm.workload.rate_rps == pytest.approx(0.5 * capacity_rps(scenario, scenario.deployments[0]))

    def test_a_policy_under_which_the_deployment_serves_nothing_is_refused(self) -> None:
        with pytest.raises(ScenarioError, match=r"policy 'naive': deployment homogeneous .*serves nothing"):
            arms(load("toy").only("homogeneous"), ["homogeneous", "naive"])

    def test_runs_are_interleaved_with_the_seeds_in_pairs(self) -> None:
        order = [(run.deployments[0].policy.name, run.seed) for run in runs(arms(toy(), ["static", "naive"]), 2)]
        assert order == [("static", 1), ("naive", 1), ("static", 2), ("naive", 2)]

    def test_each_run_has_a_folder_of_its_own(self) -> None:
        run = toy("deployments.prfaas-pd.policy={name: 'own.module:Policy'}", "seed=3")
        named = {flags: str(place(Path("r"), run, policies=flags[0], repeats=flags[1])) for flags in
                 ((False, False), (False, True), (True, False), (True, True))}  # fmt: skip
        assert named == {
            (False, False): "r",
            (False, True): "r/seed-3",
            (True, False): "r/own.module.Policy",
            (True, True): "r/own.module.Policy/seed-3",
        }


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return simulate(toy()).summary


def with_ttft(summary: dict[str, Any], mean_s: float | None, status: str = "valid") -> dict[str, Any]:
    changed = {"ttft_s": {**summary["ttft_s"], "mean": mean_s}, "verdict": {"status": status, "reasons": []}}
    return {**summary, **changed}


class TestComparison:
    def test_differences_are_paired_by_seed(self, summary: dict[str, Any]) -> None:
        a = {seed: with_ttft(summary, mean_s) for seed, mean_s in ((1, 1.0), (2, 5.0), (3, 9.0))}
        b = {seed: with_ttft(summary, mean_s) for seed, mean_s in ((3, 8.5), (1, 0.5), (2, 4.5))}
        found = compare({"a": a, "b": b})
        assert found["differences"]["b"]["ttft_mean_s"] == {"mean": -0.5, "low": -0.5, "high": -0.5}
        assert found["figures"]["b"]["ttft_mean_s"] == pytest.approx(interval([0.5, 4.5, 8.5]))
        assert set(found["differences"]) == {"b"}

    def test_a_seed_that_only_one_ran_under_makes_no_pair(self, summary: dict[str, Any]) -> None:
        a = {1: with_ttft(summary, 1.0), 2: with_ttft(summary, 50.0)}
        found = compare({"a": a, "b": {1: with_ttft(summary, 3.0)}})
        assert found["differences"]["b"]["ttft_mean_s"] == {"mean": 2.0, "low": None, "high": None}
        assert found["figures"]["a"]["ttft_mean_s"]["mean"] == 25.5

    def test_a_figure_that_one_of_them_lacks_has_no_difference(self, summary: dict[str, Any]) -> None:
        found = compare({"a": {1: with_ttft(summary, None)}, "b": {1: with_ttft(summary, 3.0)}})
        assert found["differences"]["b"]["ttft_mean_s"]["mean"] is None

    def test_a_run_that_is_not_valid_is_named_and_counts(self, summary: dict[str, Any]) -> None:
        by_seed = {1: with_ttft(summary, 1.0), 2: with_ttft(summary, 3.0, "invalid")}
        found = compare({"a": by_seed})
        assert found["runs"]["a"] == {"seeds": [1, 2], "verdicts": ["valid", "invalid"], "reasons": [[], []]}
        repeated = repeats(by_seed)
        assert (repeated["n"], repeated["seeds"], repeated["verdicts"]) == (2, [1, 2], ["valid", "invalid"])
        assert repeated["figures"]["ttft_mean_s"]["mean"] == found["figures"]["a"]["ttft_mean_s"]["mean"] == 2.0

    def test_the_parts_make_up_the_mean(self, summary: dict[str, Any]) -> None:
        of = figures(summary)
        assert sum(of[f"ttft_{part}_mean_s"] or 0 for part in PARTS) == pytest.approx(of["ttft_mean_s"])


def test_the_drawn_ttfts_are_those_of_the_summary(tmp_path: Path) -> None:
    result = simulate(toy("workload.warmup_s=20"))
    write(result, tmp_path, "csv")
    drawn, read = completed_ttft_s(result.requests), read_ttft_s(tmp_path)
    assert drawn.mean() == pytest.approx(result.summary["ttft_s"]["mean"])
    assert read == pytest.approx(drawn)
    assert len(drawn) == result.summary["requests"]["in_window"] < len(result.requests)


class TestInVirtualTime:
    def test_a_comparison_is_the_policies_runs_and_their_differences(self, prfaas: Any) -> None:
        code, out, _ = prfaas("simulate", "toy", *SHORT, "--policy", "static,naive", "--rate-rps", "1", "--json")
        found = json.loads(out)
        assert (code, list(found["policies"])) == (0, ["static", "naive"])
        for name, of in found["policies"].items():
            _, alone, _ = prfaas("simulate", "toy", "--duration-s", "60", "--policy", name, "--rate-rps", "1", "--json")
            assert {**of, "results": None} == json.loads(alone)
        difference = found["differences"]["naive"]
        assert difference["offered_rps"]["mean"] == 0
        assert difference["offload_fraction"]["mean"] == 1 - found["policies"]["static"]["offload_fraction"]

    def test_repeats_give_paired_intervals_on_any_number_of_cores(self, prfaas: Any) -> None:
        arguments = ("simulate", "toy", "--duration-s", "60", "--policy", "static,naive", "--repeats", "3", "--json")
        code, out, _ = prfaas(*arguments, "--jobs", "1")
        assert (code, out) == prfaas(*arguments, "--jobs", "2")[:2]
        found = json.loads(out)
        assert found["runs"]["naive"] == {"seeds": [1, 2, 3], "verdicts": ["valid"] * 3, "reasons": [[]] * 3}
        base, other = ([simulate(run).summary["ttft_s"]["mean"] for run in runs([arm], 3)]
                       for arm in arms(toy("workload.warmup_s=6"), ["static", "naive"]))  # fmt: skip
        expected = interval([b - a for a, b in zip(base, other, strict=True)])
        assert found["differences"]["naive"]["ttft_mean_s"] == pytest.approx(expected)

    def test_for_people_is_a_column_a_policy(self, prfaas: Any) -> None:
        _, out, _ = prfaas("simulate", "toy", *SHORT, "--policy", "static,naive,homogeneous")
        (head,) = [line for line in out.splitlines() if "naive" in line]
        assert head.index("static") < head.index("naive") < head.index("homogeneous")
        for row in ("offered", "completed", "TTFT P99", "part: queue", "goodput", "egress wait", "verdict"):
            assert row in out

    def test_results_are_kept_where_asked(self, prfaas: Any, tmp_path: Path) -> None:
        words = ("--policy", "static,naive", "--repeats", "2", "--out", "here", "--requests", "csv", "--json")
        _, out, _ = prfaas("simulate", "toy", *SHORT, *words)
        assert json.loads(out) == {**json.loads((tmp_path / "here/comparison.json").read_text()), "results": "here"}
        kept = [pd.read_csv(tmp_path / f"here/{name}/seed-2/requests.csv") for name in ("static", "naive")]
        assert kept[0][["sched_s", "input_tokens"]].equals(kept[1][["sched_s", "input_tokens"]])

    def test_repeats_of_one_policy_are_kept_too(self, prfaas: Any, tmp_path: Path) -> None:
        _, out, _ = prfaas("simulate", "toy", *SHORT, "--repeats", "2", "--out", "here", "--json")
        assert json.loads((tmp_path / "here/repeats.json").read_text()) == json.loads(out)["repeats"]

    @pytest.mark.parametrize("policies", ["static", "static,naive"])
    def test_the_figure_names_the_policies(self, prfaas: Any, tmp_path: Path, policies: str) -> None:
        code, _, err = prfaas("simulate", "toy", *SHORT, "--policy", policies, "--plot", "figure.svg")
        assert (code, "drew figure.svg" in err) == (0, True)
        drawn = (tmp_path / "figure.svg").read_text()
        assert [name for name in ("static", "naive") if f">{name}<" in drawn] == policies.split(",")

    @pytest.mark.parametrize("suffix", ["png", "pdf"])
    def test_the_figure_is_of_the_kind_asked_for(self, prfaas: Any, tmp_path: Path, suffix: str) -> None:
        prfaas("simulate", "toy", *SHORT, "--policy", "static,naive", "--repeats", "2", "--plot", f"figure.{suffix}")
        start = {"png": b"\x89PNG", "pdf": b"%PDF"}[suffix]
        assert (tmp_path / f"figure.{suffix}").read_bytes().startswith(start)

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (["--deployment", "homogeneous", "--policy", "homogeneous,naive"], "serves nothing"),
            (["--policy", "static,naiv"], "did you mean naive?"),
            (["--policy", "static,nowhere:Policy"], "must be importable"),
            (["--policy", "static,unlicensed_policy:CannotStart"], "cannot start: RuntimeError: no licence"),
            (["--policy", "static,naive", "--plot", "figure.gif"], "a figure ends in"),
            (["--policy", "static,naive", "--plot", "nowhere/figure.svg"], "there is no folder nowhere"),
            (["--policy", "static,naive", "--trace-out", "trace.json"], "a trace is of one policy"),
        ],
    )
    @pytest.mark.parametrize("command", ["simulate", "run"])
    def test_what_cannot_be_is_said_before_anything_starts(
        self, prfaas: Any, tmp_path: Path, command: str, words: list[str], part: str
    ) -> None:
        text = (
            "class CannotStart:\n    def start(self, setup): raise RuntimeError('no licence')\n    def route(self): ..."
        )
        (tmp_path / "unlicensed_policy.py").write_text(text)
        code, out, err = prfaas(command, "toy", "--duration-s", "60", "--out", "here", *words)
        assert (code, out) == (2, "")
        assert part in err
        assert not (tmp_path / "here").exists()
        assert not list((tmp_path / "state").glob("testbed.json"))

    def test_a_policy_that_fails_is_named_and_makes_the_exit_code(self, prfaas: Any, tmp_path: Path) -> None:
        text = "class Wrong:\n    def start(self, setup): print('started')\n    def route(self, request, view): 1 / 0\n"
        (tmp_path / "wrong_policy.py").write_text(text)
        words = ("simulate", "toy", "--duration-s", "60", "--jobs", "2", "--policy", "static,wrong_policy:Wrong")
        code, out, _ = prfaas(*words, "--json")
        assert code == EXIT_CODES["failed"]
        assert json.loads(out)["runs"]["wrong_policy:Wrong"]["verdicts"] == ["failed"]
        shown = prfaas(*words)[1]
        assert "wrong_policy:Wrong, seed 1: failed" in shown
        assert "the policy failed on" in shown


class TestOnTheWire:
    """The order of loads, what is kept and what the command ends with; virtual time stands in for the wire."""

    @pytest.fixture
    def offer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        """offer(policies, repeats, ends) -> (exit code, loads). ends: what becomes of a load, by its number from 1."""
        scenario = toy("workload.rate_rps=1")

        def offered(
            policies: str | None, repeats: int, ends: dict[int, Any]
        ) -> tuple[int, list[tuple[str | None, int]]]:
            loads: list[tuple[str | None, int]] = []

            def offer_load(
                testbed: wire.Testbed, run: Scenario, out: Path, policy: str | None, workers: int
            ) -> wire.Outcome:
                loads.append((policy, run.seed))
                out.mkdir(parents=True, exist_ok=True)
                end = ends.get(len(loads), "valid")
                if isinstance(end, BaseException):
                    raise end
                result = simulate(run)
                write(result, out, "csv")
                status = "invalid" if end == "interrupted" else end
                code = INCONCLUSIVE if end == "interrupted" else EXIT_CODES[status]
                summary = {**result.summary, "verdict": {"status": status, "reasons": []}}
                return wire.Outcome(out, summary, code, result.requests, {})

            monkeypatch.setattr(commands, "offer_load", offer_load)
            code = commands.offer(
                wire.Testbed(None, scenario, 0),  # type: ignore[arg-type]
                commands.arms_of(scenario, policies, None),
                repeats,
                out=tmp_path / "here",
                workers=1,
                trace_out=None,
                plot=None,
                json=True,
            )
            return code, loads

        return offered

    def test_policies_take_turns_on_one_testbed(self, offer: Any) -> None:
        code, loads = offer("static,naive,homogeneous", 2, {})
        assert code == 0
        assert loads == [(name, seed) for seed in (1, 2) for name in (None, "naive", "homogeneous")]

    def test_repeats_are_as_in_virtual_time(
        self, offer: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, loads = offer(None, 3, {})
        repeated = json.loads(capsys.readouterr().out)["repeats"]
        assert (code, loads) == (0, [(None, 1), (None, 2), (None, 3)])
        means = [simulate(run).summary["ttft_s"]["mean"] for run in runs([toy("workload.rate_rps=1")], 3)]
        assert repeated["figures"]["ttft_mean_s"] == pytest.approx(interval(means))
        assert repeated == json.loads((tmp_path / "here/repeats.json").read_text())
        assert all((tmp_path / f"here/seed-{seed}/summary.json").exists() for seed in (1, 2, 3))

    def test_one_run_of_one_policy_is_a_plain_run(
        self, offer: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, loads = offer("naive", 1, {})
        assert (code, loads) == (0, [("naive", 1)])
        assert json.loads(capsys.readouterr().out)["results"] == str(tmp_path / "here")
        assert not (tmp_path / "here/repeats.json").exists()

    def test_the_worst_run_makes_the_exit_code(self, offer: Any, capsys: pytest.CaptureFixture[str]) -> None:
        code, _ = offer(None, 3, {1: "failed", 2: "invalid"})
        assert code == EXIT_CODES["invalid"]
        assert json.loads(capsys.readouterr().out)["repeats"]["verdicts"] == ["failed", "invalid", "valid"]

    @pytest.mark.parametrize("end", ["interrupted", KeyboardInterrupt()])
    def test_interrupted_it_keeps_what_ended(
        self, offer: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, end: Any
    ) -> None:
        code, loads = offer("static,naive", 2, {4: end})
        found = json.loads(capsys.readouterr().out)
        assert (code, len(loads)) == (INCONCLUSIVE, 4)
        assert [found["runs"][name]["seeds"] for name in ("static", "naive")] == [[1, 2], [1]]
        assert not any(folder.is_dir() and not any(folder.iterdir()) for folder in tmp_path.rglob("*"))
        assert found["runs"] == json.loads((tmp_path / "here/comparison.json").read_text())["runs"]

    def test_interrupted_in_its_first_run_it_shows_that_one(
        self, offer: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, loads = offer(None, 3, {1: "interrupted"})
        assert (code, len(loads)) == (INCONCLUSIVE, 1)
        assert json.loads(capsys.readouterr().out)["repeats"]["verdicts"] == ["invalid"]

    def test_a_testbed_that_is_lost_on_the_way_takes_nothing_with_it(self, offer: Any, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="gone"):
            offer(None, 3, {3: OSError("gone")})
        assert json.loads((tmp_path / "here/repeats.json").read_text())["seeds"] == [1, 2]
