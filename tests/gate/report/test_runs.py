"""`prfaas report RUN...`: any runs, refused where more than the policy differs unless one asks for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import orjson
import pytest

from testbed.cli import main
from testbed.gate.report.alike import arms_of, differing, read_run, unlike
from testbed.gate.report.of_runs import view
from testbed.runs import RunError
from testbed.simulate import simulate, write
from tests.gate.report.conftest import DROP


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["report", *map(str, words)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Path, Path]:
    return folder / "link-drop" / "baseline", folder / "link-drop" / "candidate"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Three seeds of two policies."""
    top = tmp_path_factory.mktemp("seeds")
    made: dict[str, list[Path]] = {"prfaas": [], "static": []}
    for policy, folders in made.items():
        for seed in (1, 2, 3):
            folders.append(top / f"{policy}-{seed}")
            write(simulate("link-drop", policy=policy, sets=DROP, seed=seed), folders[-1])
    return made


def test_two_policies_are_compared(pair, tmp_path, capsys):
    assert command(*pair, "--out", tmp_path / "new", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["policies"]) == ["prfaas", "static"]
    assert told["report"] == str(tmp_path / "new" / "report.html")
    assert sorted(one.name for one in (tmp_path / "new").iterdir()) == ["report.html", "report.md", "summary.json"]
    text = (tmp_path / "new" / "report.md").read_text()
    assert "2 runs, all of them valid. P90 TTFT is" in text
    assert "Where static lost most against prfaas" in text


def test_one_run_gets_a_page_beside_what_it_has(pair, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pair[0], run)
    before = {one.name: one.read_bytes() for one in run.iterdir()}
    assert command(run) == 0
    after = {one.name: one.read_bytes() for one in run.iterdir()}
    assert after.keys() - before.keys() == {"report.html"}
    assert {name: after[name] for name in before} == before
    assert b"<h1>Valid: " in after["report.html"]


def test_a_gates_report_is_written_again(result, folder, capsys):
    result.keep(folder)
    assert command(folder) == 0
    assert {"report.html", "report.md", "junit.xml"} <= {one.name for one in folder.iterdir()}


def test_seeds_of_a_policy_are_one_arm_with_intervals(seeds):
    runs = [read_run(path) for folders in seeds.values() for path in folders]
    assert unlike(runs) == []
    arms = arms_of(runs)
    assert {name: list(by) for name, by in arms.items()} == {"prfaas": [1, 2, 3], "static": [1, 2, 3]}
    table = view(arms).overview
    assert table is not None
    row = next(row for row in table.rows if row[0].text == "TTFT, P90")
    assert " to " in row[1].more
    assert row[2].more.startswith("+")
    assert "means over 3 seeds" in table.note


def test_two_runs_of_one_policy_and_seed_are_arms_of_their_own(pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "again")
    arms = arms_of([read_run(pair[0]), read_run(tmp_path / "again")])
    assert list(arms) == [f"prfaas ({pair[0]})", f"prfaas ({tmp_path / 'again'})"]


class TestUnlike:
    def test_another_scenario(self, pair, tmp_path, capsys):
        write(simulate("link-drop", sets=[*DROP, "link.rate_bps=50gbps"], policy="static"), tmp_path / "other")
        assert command(pair[0], tmp_path / "other") == 2
        said = capsys.readouterr().err
        assert "the scenarios differ: link.rate_bps 100000000000.0 and 50000000000.0" in said
        assert "--unlike" in said

    def test_told_to_compare_them_it_says_so_first(self, pair, tmp_path):
        write(simulate("link-drop", sets=[*DROP, "link.rate_bps=50gbps"], policy="static"), tmp_path / "other")
        assert command(pair[0], tmp_path / "other", "--unlike", "--out", tmp_path / "new") == 0
        assert "Note: not alike: " in (tmp_path / "new" / "report.md").read_text().split("|")[0]

    def test_other_requests_under_the_same_seed(self, pair, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(pair[1], other)
        facts = orjson.loads((other / "provenance.json").read_bytes())
        facts["trace"]["rows_sha256"] = "0" * 64
        (other / "provenance.json").write_bytes(orjson.dumps(facts))
        assert unlike([read_run(pair[0]), read_run(other)]) == [
            f"{other} and {pair[0]}: other requests were offered, under the same seed 1"
        ]

    def test_another_clock(self, pair, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(pair[1], other)
        summary = orjson.loads((other / "summary.json").read_bytes())
        (other / "summary.json").write_bytes(orjson.dumps({**summary, "clock": "wire"}))
        assert unlike([read_run(pair[0]), read_run(other)]) == [f"{other}: was on the wire, {pair[0]} in virtual time"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "no such run"),
        (("{0}", "{0}"), "named twice"),
        (("{0}", "--out", "tests"), "is there already"),
    ],
)
def test_what_cannot_be_reported_is_a_usage_error(words, said, pair, capsys):
    assert command(*(word.format(pair[0]) for word in words)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_too_many_side_by_side_are_refused(pair):
    run = read_run(pair[0])
    runs = [
        type(run)(Path(f"/{i}"), {**run.summary, "policy": f"p{i}"}, run.setting, run.trace_sha256, run.machine)
        for i in range(5)
    ]
    with pytest.raises(RunError, match="at most 4"):
        arms_of(runs)


def test_differences_are_named_by_their_path():
    assert differing({"a": {"b": [1, 2]}, "c": 1}, {"a": {"b": [1, 3]}, "d": 2}) == [
        ("a.b.1", 2, 3),
        ("c", 1, None),
        ("d", None, 2),
    ]
