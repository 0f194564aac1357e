"""The command `prfaas` as people and scripts meet it: what it prints where, and what it ends with.

Nothing here starts a testbed; the state directory is the test's own and empty.
"""

from __future__ import annotations

import csv
import errno
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from testbed import cli, show
from testbed.cli.shared import load_overrides
from testbed.scenario import ScenarioError, load


@dataclass
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)  # one object, and nothing else
        return found


@pytest.fixture
def prfaas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """prfaas(*arguments): the command, in a folder and with a state directory of the test's own."""
    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(show.out, "_width", 200)  # what the environment says was read when it was made
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        told = capsys.readouterr()
        code = end.value.code
        assert isinstance(code, int)
        assert "Traceback" not in told.out + told.err
        return Ended(code, told.out, told.err)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [{"timestamp": 3000 * i, "input_length": 1024, "output_length": 5, "hash_ids": [0, i + 1]} for i in range(9)]
    path = tmp_path / "my trace: 1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TestHelp:
    @pytest.mark.parametrize(
        "command",
        [[], ["plan"], ["simulate"], ["run"], ["up"], ["load"], ["status"], ["logs"], ["down"], ["doctor"], ["link"]]
        + [["link", verb] for verb in ("show", "set", "verify", "plot")]
        + [["trace", verb] for verb in ("info", "convert", "fetch")],
    )
    def test_every_command_has_it(self, prfaas: Any, command: list[str]) -> None:
        ended = prfaas(*command, "--help")
        assert ended.code == 0
        assert ended.out.startswith("Usage: prfaas")

    def test_the_installed_script_is_this_command(self) -> None:
        script = Path(sys.executable).parent / "prfaas"
        ended = subprocess.run([script, "plan", "-h"], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0
        assert "equations (1)-(8)" in ended.stdout

    def test_is_quick_since_it_imports_no_room(self) -> None:
        code = (
            "import sys; from testbed import cli\n"
            "try: cli.main(['--help'])\n"
            "except SystemExit: pass\n"
            "heavy = {'aiohttp', 'matplotlib', 'pandas', 'locust', 'torch'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


class TestPlan:
    @pytest.mark.parametrize("scenario", ["toy", "paper", "smoke"])
    def test_json_is_one_object_on_standard_output(self, prfaas: Any, scenario: str) -> None:
        ended = prfaas("plan", scenario, "--json")
        assert ended.code == 0
        assert ended.err == ""
        plan = ended.json
        assert plan["scenario"] == scenario
        assert [one["name"] for one in plan["deployments"]] == ["prfaas-pd", "homogeneous", "naive"]
        figures = {"threshold_tokens", "n_prfaas", "n_p", "n_d", "offload_fraction", "lambda_max_rps", "bottleneck"}
        figures |= {"theta_prfaas_rps", "theta_pd_p_rps", "theta_pd_d_rps", "ratio", "ttft_unloaded_s", "egress_bps"}
        assert all(figures <= set(one) for one in plan["deployments"])

    def test_the_papers_optimum_is_found(self, prfaas: Any) -> None:
        best = prfaas("plan", "paper", "--json").json["deployments"][0]
        assert (best["n_prfaas"], best["n_p"], best["n_d"]) == (4, 3, 5)
        assert best["lambda_max_rps"] == pytest.approx(3.24, rel=0.05)

    def test_the_toy_is_as_in_the_walk_through(self, prfaas: Any) -> None:
        toy = prfaas("plan", "toy", "--json").json
        assert toy["deployments"][0]["threshold_tokens"] == 8192
        assert "paper" not in toy

    def test_for_people_is_a_table_with_the_papers_figures_beside_ours(self, prfaas: Any) -> None:
        ended = prfaas("plan", "paper")
        assert ended.code == 0
        assert "prfaas-pd" in ended.out
        assert "(paper 3.240, " in ended.out
        assert "Lambda_max with expectations" in ended.out
        assert "paper" not in prfaas("plan", "toy").out.replace("(the paper)", "")

    def test_takes_overrides(self, prfaas: Any) -> None:
        plan = prfaas("plan", "toy", "--json", "--set", "link.rate_bps=1gbps", "--set", "workload.output_tokens=7").json
        assert (plan["link_bps"], plan["output_tokens"]) == (1e9, 7)

    def test_takes_the_form(self, prfaas: Any) -> None:
        assert prfaas("plan", "toy", "--json", "--form", "expectation").json["form"] == "expectation"
        assert prfaas("plan", "toy", "--form", "median").code == 2

    def test_reads_a_file(self, prfaas: Any, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(load("toy", ["name=mine"]).to_yaml())
        assert prfaas("plan", "mine.yaml", "--json").json["scenario"] == "mine"

    @pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
    def test_draws_figure_5(self, prfaas: Any, tmp_path: Path, suffix: str) -> None:
        ended = prfaas("plan", "paper", "--plot", f"figure.{suffix}", "--json")
        assert ended.code == 0
        assert ended.json["scenario"] == "paper"
        assert "drew figure" in ended.err
        assert (tmp_path / f"figure.{suffix}").stat().st_size > 1000

    @pytest.mark.parametrize("path", ["figure.bmp", "nowhere/figure.png"])
    def test_a_figure_that_cannot_be_drawn_is_a_usage_error(self, prfaas: Any, path: str) -> None:
        ended = prfaas("plan", "toy", "--plot", path)
        assert ended.code == 2
        assert path in ended.err


class TestAUsersError:
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["plan", "papr"], "did you mean paper?"),
            (["plan", "./nowhere.yaml"], "./nowhere.yaml: no such file"),
            (["plan", "toy", "--set", "link.rate=1"], "link.rate: unknown key; did you mean rate_bps?"),
            (["plan", "toy", "--set", "link.rate_bps=100MB/s"], "may mean bytes"),
            (["plan", "toy", "--set", "nonsense"], "must be key=value"),
            (["plan", "toy", "--set", "deployments.0.profiles.pd=h20"], "did you mean h20-1t?"),
            (["simulate", "toy", "--deployment", "nive"], "no deployment 'nive'"),
            (["simulate", "smoke", "--deployment", "homogeneous", "--policy", "naive"], "serves nothing under it"),
            (["up", "toy", "--policy", "naiv"], "did you mean naive?"),
            (["up", "toy", "--policy", "nowhere:Policy"], "must be importable"),
            (["run", "toy", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
            (["up", "smoke", "--set", "scale.byte_scale=1e-9"], "can be shaped: raise one of the three"),
            (["trace", "info", "nowhere.jsonl"], "nowhere.jsonl"),
        ],
    )
    def test_is_one_line_on_standard_error_and_exit_code_2(
        self, prfaas: Any, arguments: list[str], part: str, tmp_path: Path
    ) -> None:
        ended = prfaas(*arguments)
        assert ended.code == 2
        assert ended.out == ""
        assert [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert part in ended.err
        assert not list((tmp_path / "state").glob("testbed.json"))  # nothing was started

    def test_with_json_leaves_standard_output_empty(self, prfaas: Any) -> None:
        ended = prfaas("plan", "papr", "--json")
        assert (ended.code, ended.out) == (2, "")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["nonsense"],
            ["plan"],
            ["plan", "toy", "--nonsense"],
            ["up", "toy", "--port", "70000"],
            ["link", "set", "--rate", "8gbps", "--direction", "up"],
            ["link", "set", "--outage", "blackout"],
            ["trace", "info", "x.csv", "--map", "nonsense"],
            ["run", "toy", "--rate-rps", "1", "--load-fraction", "0.5"],
        ],
    )
    def test_of_usage_shows_how_it_goes(self, prfaas: Any, arguments: list[str]) -> None:
        ended = prfaas(*arguments)
        assert ended.code == 2
        assert "Usage: prfaas" in ended.err
        assert "Error: " in ended.err


class TestWithoutATestbed:
    @pytest.mark.parametrize(
        "arguments",
        [["load"], ["load", "toy"], ["link", "show"], ["link", "set", "--rate", "8gbps"], ["link", "verify"]],
    )
    def test_a_command_that_needs_one_says_how_to_start_it(self, prfaas: Any, arguments: list[str]) -> None:
        ended = prfaas(*arguments)
        assert ended.code == 2
        assert ended.err == "error: no testbed is up; start one with `prfaas up`\n"

    def test_status_says_so_and_is_1(self, prfaas: Any) -> None:
        assert prfaas("status").code == 1
        assert "no testbed is up" in prfaas("status").out
        ended = prfaas("status", "--json")
        assert ended.code == 1
        assert (ended.json["up"], ended.json["gateway"]) == (False, None)

    def test_down_has_nothing_to_do(self, prfaas: Any) -> None:
        assert prfaas("down").out == "nothing was up\n"
        assert prfaas("down", "--json").json == {"removed": []}

    def test_logs_knows_none(self, prfaas: Any) -> None:
        for ended in (prfaas("logs"), prfaas("logs", "gateway")):
            assert ended.code == 2
            assert "no testbed was started" in ended.err

    def test_doctor_looks_for_leftovers(self, prfaas: Any) -> None:
        ended = prfaas("doctor", "--leftovers", "--json")
        assert ended.code == (1 if ended.json["leftovers"] else 0)


SQUARE = "{kind: square, high_bps: 8gbps, low_bps: 1gbps, period_s: 60}"


class TestLinkPlot:
    def test_json_has_the_steps_and_the_figures(self, prfaas: Any) -> None:
        shown = prfaas("link", "plot", SQUARE, "--json", "--duration-s", "100").json
        assert shown["steps"] == [[0, 8e9], [30, 1e9], [60, 8e9], [90, 1e9]]
        assert (shown["end_s"], shown["changes"], shown["down_s"]) == (100, 3, 0)
        assert (shown["mean_bps"], shown["min_bps"], shown["max_bps"]) == (pytest.approx(5.2e9), 1e9, 8e9)
        assert shown["schedule"]["kind"] == "square"

    @pytest.mark.parametrize(
        ("name", "text", "steps"),
        [
            ("a.yaml", SQUARE, [[0, 8e9], [30, 1e9], [60, 8e9], [90, 1e9]]),
            (
                "a.json",
                '{"kind": "constant", "rate_bps": 1e9, "outages": {"at_s": 5, "duration_s": 1}}',
                [[0, 1e9], [5, 0], [6, 1e9]],
            ),
            ("a.csv", "t_s,rate_bps\n0,1gbps\n5,2gbps\n", [[0, 1e9], [5, 2e9]]),
            ("recorded", "".join(f"{ms}\n" for ms in range(1, 1001)), [[0, 12e6]]),
        ],
    )
    def test_reads_a_file_for_what_it_is(self, prfaas: Any, tmp_path: Path, name: str, text: str, steps: Any) -> None:
        (tmp_path / name).write_text(text)
        assert prfaas("link", "plot", name, "--json").json["steps"][:4] == steps

    def test_shows_what_a_scenario_does(self, prfaas: Any, tmp_path: Path) -> None:
        phases = prfaas("link", "plot", "link-drop", "--json").json
        assert phases["steps"] == [[0, 100e9], [300, 5e9], [600, 100e9]]
        scenario = load("toy", [f"link.schedule={SQUARE}", "workload.duration_s=70", "workload.warmup_s=0"])
        (tmp_path / "mine.yaml").write_text(scenario.to_yaml())
        own = prfaas("link", "plot", "mine.yaml", "--json").json
        assert (own["name"], own["end_s"], own["steps"]) == ("toy", 70, [[0, 8e9], [30, 1e9], [60, 8e9]])

    def test_shows_a_token_bucket_as_it_is_when_it_is_always_used(self, prfaas: Any) -> None:
        bucket = "{kind: token_bucket, peak_bps: 10gbps, base_bps: 1gbps, budget_bytes: 675e9}"
        shown = prfaas("link", "plot", bucket, "--json").json
        assert shown["steps"] == [[0, 10e9], [pytest.approx(600), 1e9]]

    def test_draws_from_the_seed(self, prfaas: Any) -> None:
        drawn = [
            prfaas("link", "plot", "{kind: stationary, mean_bps: 8gbps}", "--json", "--seed", seed).json["steps"]
            for seed in ("1", "1", "2")
        ]
        assert drawn[0] == drawn[1] != drawn[2]

    @pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
    def test_draws_it(self, prfaas: Any, tmp_path: Path, suffix: str) -> None:
        ended = prfaas("link", "plot", SQUARE, "--out", f"link.{suffix}")
        assert (ended.code, ended.err) == (0, f"drew link.{suffix}\n")
        magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
        assert (tmp_path / f"link.{suffix}").read_bytes().startswith(magic)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["{kind: sqare}"], "schedule.kind: 'sqare' is no model; did you mean square?"),
            (["{kind: "], "SCHEDULE: line 1: not YAML"),
            (["papr"], "did you mean paper?"),
            (["none.csv"], "none.csv: cannot be read"),
            ([SQUARE, "--out", "a.gif"], "a figure ends in .png, .svg, .pdf"),
            ([SQUARE, "--duration-s", "0"], "0: must be seconds, more than 0"),
            ([SQUARE, "--duration-s", "nan"], "nan: must be seconds, more than 0"),
        ],
    )
    def test_refuses(self, prfaas: Any, arguments: list[str], said: str) -> None:
        ended = prfaas("link", "plot", *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err


class TestTraceInfo:
    def test_describes_a_trace(self, prfaas: Any, trace: str) -> None:
        described = prfaas("trace", "info", trace, "--json").json
        assert described["rows_read"] == 9
        assert prfaas("trace", "info", trace).code == 0

    def test_maps_columns(self, prfaas: Any, tmp_path: Path) -> None:
        with (tmp_path / "own.csv").open("w") as file:
            csv.writer(file).writerows([["when", "in", "out"], *([i, 100, 10] for i in range(5))])
        maps = ["--map", "arrival_s=when", "--map", "input_tokens=in", "--map", "output_tokens=out"]
        assert prfaas("trace", "info", "own.csv", *maps, "--json").json["rows_read"] == 5


class TestTraceConvert:
    @pytest.mark.parametrize(
        ("name", "written"), [("t.jsonl", "prfaas"), ("t.mooncake.jsonl.gz", "mooncake"), ("t.csv", "table")]
    )
    def test_writes_the_format_that_the_ending_says(self, prfaas: Any, trace: str, name: str, written: str) -> None:
        result = prfaas("trace", "convert", trace, name, "--json").json
        assert (result["rows_read"], result["kept"], result["dropped"]) == (9, 9, {})
        again = prfaas("trace", "info", name, "--json").json
        assert (again["format"], again["kept"], again["duration_s"]) == (written, 9, 24)

    def test_reports_what_a_slice_leaves_out_and_what_the_format_cannot_hold(self, prfaas: Any, trace: str) -> None:
        result = prfaas("trace", "convert", trace, "t.csv", "--start-s", "3", "--duration-s", "9", "--json").json
        assert (result["rows_read"], result["kept"]) == (9, 3)
        assert result["dropped"] == {"outside the slice": 6}
        assert any("no block hashes" in note for note in result["notes"])

    def test_a_start_alone_keeps_all_that_follows(self, prfaas: Any, trace: str) -> None:
        assert prfaas("trace", "convert", trace, "t.jsonl", "--start-s", "3", "--json").json["kept"] == 8

    @pytest.mark.parametrize(
        ("option", "value", "rate_rps"),
        [("--rate-rps", "2", 2), ("--time-scale", "3", 1 / 9), ("--duration-s", "7", 1 / 3)],
    )
    def test_stretches_time(self, prfaas: Any, trace: str, option: str, value: str, rate_rps: float) -> None:
        assert prfaas("trace", "convert", trace, "t.jsonl", option, value).code == 0
        assert prfaas("trace", "info", "t.jsonl", "--json").json["rate_rps"] == pytest.approx(rate_rps)

    def test_replaces_a_file_only_by_force(self, prfaas: Any, trace: str, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text("mine")
        refused = prfaas("trace", "convert", trace, "t.jsonl")
        assert refused.code == 2
        assert "t.jsonl: exists already; name another file, or replace it with --force" in refused.err
        assert (tmp_path / "t.jsonl").read_text() == "mine"
        assert prfaas("trace", "convert", trace, "t.jsonl", "--force").code == 0
        assert prfaas("trace", "info", "t.jsonl", "--json").json["kept"] == 9

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["t.parquet"], ".jsonl, .mooncake.jsonl or .csv"),
            (["nowhere/t.jsonl"], "there is no folder nowhere"),
            (["t.jsonl", "--rate-rps", "2", "--time-scale", "2"], "both stretch the clock; give one"),
            (["t.jsonl", "--rate-rps", "-2"], "target rate = -2"),
            (["t.jsonl", "--start-s", "99"], "no request from 99 s"),
            (["t.jsonl", "--map", "input_tokens=In"], "JSON lines take no map"),
        ],
    )
    def test_refuses(self, prfaas: Any, trace: str, tmp_path: Path, arguments: list[str], said: str) -> None:
        ended = prfaas("trace", "convert", trace, *arguments)
        assert ended.code == 2
        assert said in ended.err
        assert not list(tmp_path.glob("t.*"))


class TestTraceFetch:
    @pytest.fixture
    def server(self, trace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        handler = functools.partial(Quiet, directory=str(Path(trace).parent))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
            thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
            thread.start()
            yield f"http://127.0.0.1:{listening.server_port}/{quote(Path(trace).name)}"
            listening.shutdown()
            thread.join()

    def test_without_a_name_lists_what_is_known_and_whose_sum_is_not(self, prfaas: Any) -> None:
        traces = {one["name"]: one for one in prfaas("trace", "fetch", "--json").json["traces"]}
        assert traces["mooncake-conversation"]["sha256"].startswith("b8cbb061")
        assert traces["burstgpt-3"]["sha256"] is None
        assert "sha256 not known here: --sha256 is needed" in prfaas("trace", "fetch").out

    def test_keeps_a_file_with_the_right_sum(self, prfaas: Any, trace: str, server: str) -> None:
        right = hashlib.sha256(Path(trace).read_bytes()).hexdigest()
        ended = prfaas("trace", "fetch", "mooncake-conversation", "--url", server, "--sha256", right, "--json")
        assert (ended.code, ended.json["file"], ended.json["sha256"]) == (0, "conversation_trace.jsonl", right)
        assert prfaas("trace", "info", "conversation_trace.jsonl", "--json").json["kept"] == 9
        again = prfaas("trace", "fetch", "mooncake-conversation", "--url", server, "--sha256", right)
        assert again.code == 2
        assert "conversation_trace.jsonl: exists already" in again.err

    def test_refuses_a_file_with_another_sum_than_the_known_one(self, prfaas: Any, server: str, tmp_path: Path) -> None:
        ended = prfaas("trace", "fetch", "mooncake-conversation", "--url", server, "--out", "here.jsonl")
        assert ended.code == 2
        assert "expected b8cbb061" in ended.err
        assert not list(tmp_path.glob("*here*"))

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["burstgpt-3"], "burstgpt-3: its sha256 is not known here"),
            (["burstgtp-1"], "did you mean burstgpt-1?"),
            (["burstgpt-1", "--sha256", "12"], "must be 64 hexadecimal digits"),
            (["burstgpt-1", "--url", "http://127.0.0.1:1/t.csv"], "cannot be fetched"),
        ],
    )
    def test_refuses(self, prfaas: Any, server: str, arguments: list[str], said: str) -> None:
        ended = prfaas("trace", "fetch", *arguments)
        assert ended.code == 2
        assert said in ended.err


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class TestTheLoadsOwnOptions:
    def test_lay_over_the_scenario(self) -> None:
        sets = load_overrides(None, None, 100.0, None, 1e-05, None)
        workload = load("toy", sets).workload
        assert (workload.duration_s, workload.warmup_s, workload.rate_rps) == (100, 10, 1e-05)
        assert workload.load_fraction is None

    def test_a_trace_of_any_name_replaces_the_synthetic_arrivals(self, trace: str) -> None:
        workload = load("smoke", load_overrides(trace, None, None, None, None, None)).workload
        assert workload.trace == trace
        assert (workload.arrivals.kind, workload.arrivals.cv) == ("as-is", None)

    def test_arrivals_keep_the_scenarios_cv_where_it_means_something(self) -> None:
        assert load("smoke", load_overrides(None, "gamma", None, None, None, None)).workload.arrivals.cv == 2
        assert load("smoke", load_overrides(None, "poisson", None, None, None, None)).workload.arrivals.cv is None
        with pytest.raises(ScenarioError, match="kind mmpp needs states"):
            load("toy", load_overrides(None, "mmpp", None, None, None, None))
        states = (
            "workload.arrivals={kind: mmpp, states: [{multiplier: 1, sojourn_s: 9}, {multiplier: 2, sojourn_s: 9}]}"
        )
        assert load("toy", [states, *load_overrides(None, "mmpp", None, None, None, None)]).workload.arrivals.states


class TestSimulate:
    def test_json_is_one_object_and_the_exit_code_its_verdict(self, prfaas: Any) -> None:
        ended = prfaas("simulate", "toy", "--duration-s", "50", "--json")
        assert ended.json["verdict"]["status"] == "valid"
        assert ended.code == 0

    def test_the_report_says_that_it_is_no_measurement_of_a_wire(self, prfaas: Any) -> None:
        out = prfaas("simulate", "toy", "--duration-s", "50").out
        assert "in virtual time (model seconds)" in out
        assert "on the wire" not in out

    def test_writes_where_it_is_told_and_never_over_something(self, prfaas: Any, tmp_path: Path) -> None:
        assert prfaas("simulate", "toy", "--duration-s", "50", "--out", "here").code == 0
        assert (tmp_path / "here" / "summary.json").exists()
        ended = prfaas("simulate", "toy", "--duration-s", "50", "--out", "here")
        assert ended.code == 2
        assert "here" in ended.err


@pytest.mark.parametrize("place", ["/dev/full/results", "/proc/results"])
def test_a_place_that_takes_no_results_is_said_without_a_traceback(prfaas: Any, place: str) -> None:
    ended = prfaas("simulate", "toy", "--duration-s", "50", "--out", place)
    assert ended.code == 2
    assert f"{place}: cannot be made" in ended.err
    assert "defect" not in ended.err


def test_a_full_disk_is_no_defect(prfaas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here/summary.json")

    monkeypatch.setattr("testbed.simulate.write", full)
    ended = prfaas("simulate", "toy", "--duration-s", "50", "--out", "here")
    assert ended.code == 2
    assert "here/summary.json: cannot be written (No space left on device); make room there" in ended.err


def test_a_policy_that_prints_does_not_spoil_the_json(prfaas: Any, tmp_path: Path) -> None:
    text = """
from testbed.scheduler.baselines import Homogeneous
print("read")
class Talks(Homogeneous):
    def start(self, setup): print("started")
"""
    (tmp_path / "talking_policy.py").write_text(text)
    ended = prfaas("simulate", "toy", "--duration-s", "50", "--policy", "talking_policy:Talks", "--json")
    assert json.loads(ended.out)["policy"] == "talking_policy:Talks"
    assert "started" in ended.err


def test_a_policy_that_fails_is_shown_with_what_it_raised(prfaas: Any, tmp_path: Path) -> None:
    text = """
class Wrong:
    def start(self, setup): pass
    def route(self, request, view): return request.length
class CannotStart(Wrong):
    def start(self, setup): raise SystemExit("no licence")
"""
    (tmp_path / "own_policy.py").write_text(text)
    ended = prfaas("simulate", "toy", "--duration-s", "50", "--policy", "own_policy:Wrong")
    assert "times: AttributeError (contained" in ended.out
    assert "first: AttributeError: 'RequestView' object has no attribute 'length'" in ended.out
    ended = prfaas("simulate", "toy", "--duration-s", "50", "--policy", "own_policy:CannotStart")
    assert ended.code == 2
    assert "policy 'own_policy:CannotStart': cannot start: SystemExit: no licence" in ended.err


def test_a_reader_that_leaves_is_no_error() -> None:
    """`prfaas plan paper --json | head -1`."""
    command = f"{sys.executable} -m testbed.cli plan paper --json | head -1"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert ended.stdout == "{\n"
    assert "Traceback" not in ended.stderr
