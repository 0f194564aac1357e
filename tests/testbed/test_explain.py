"""What is told of one request: its life, the decision and what it was made of, and what had changed before.

The rows that runs keep are enough to redo a decision by hand, which is done here for all of them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from emulator.profile import load_profile
from testbed.cli import main
from testbed.explain import explain
from testbed.policies import CAVEAT
from testbed.report.rows import PARTS
from testbed.runs import RunError, find_run
from testbed.simulate import Result, simulate, write

DROP = ["phases.0.duration_s=60", "phases.1.duration_s=60", "phases.2.duration_s=60", "workload.warmup_s=0"]
TALKS = [
    "phases=[]",
    "workload.duration_s=120",
    "workload.warmup_s=0",
    "workload.lengths={kind: lognormal, mu: 8.5, sigma: 1.0, min_tokens: 128, max_tokens: 32768}",
    "workload.sessions={turns_mean: 4, think_s: 10, system_tokens: 2000, max_input_tokens: 131072}",
    "cache_bytes=1099511627776",
]
PROFILES = {"prfaas": "h200-1t", "pd": "h20-1t"}


@pytest.fixture(scope="module")
def drop() -> Result:
    """A short link-drop: 100 Gbps, from 60 s on 5, from 120 s on 100 again."""
    return simulate("link-drop", sets=DROP)


@pytest.fixture(scope="module")
def talks() -> Result:
    """Conversations on the same fleet, with prefix caches."""
    return simulate("link-drop", sets=TALKS)


@pytest.fixture(scope="module")
def folders(drop: Result, talks: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs' results, `drop` and `talks`."""
    top = tmp_path_factory.mktemp("results")
    write(drop, top / "drop", "csv")
    write(talks, top / "talks", "csv")
    return top


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


class TestTheRowsAreEnoughToRedoADecision:
    def test_the_site_follows_from_the_uncached_length_and_t(self, drop: Result, talks: Result) -> None:
        for rows in (drop.requests, talks.requests):
            longest = rows[["l_pd", "l_prfaas"]].max(axis=1)
            judged = rows["input_tokens"] - longest.where(rows["regime"] == "abundant", rows["l_pd"])
            by_t = (judged > rows["threshold_tokens"]) == (rows["prefill_site"] == "prfaas")
            assert (by_t | rows["reason"].astype(str).str.endswith("far behind")).all()
            assert by_t.mean() > 0.8
        assert set(drop.requests["regime"]) == {"abundant", "scarce"}

    def test_the_cost_is_what_the_nodes_profile_says(self, drop: Result, talks: Result) -> None:
        for rows in (drop.requests, talks.requests):
            for site, of_site in rows.groupby("prefill_site", observed=True):
                profile = load_profile(PROFILES[str(site)])
                costs = [profile.t_prefill(tokens) for tokens in of_site["prefill_tokens"]]
                assert of_site["prefill_cost_s"].tolist() == pytest.approx(costs)

    def test_what_was_to_be_computed_is_what_the_decision_did_not_reuse(self, talks: Result) -> None:
        rows = talks.requests
        assert (rows["prefill_tokens"] <= rows["input_tokens"]).all()
        fetched = rows[rows["cache_node"] != ""]
        assert len(fetched) > 5
        assert (fetched["cache_node"].astype(str) != fetched["prefill_node"].astype(str)).all()
        assert (fetched["prefill_tokens"] < fetched["input_tokens"]).all()

    def test_the_queue_is_the_work_that_was_there_before(self, drop: Result) -> None:
        rows = drop.requests.sort_values("route_s", kind="stable")
        for _, at_node in rows.groupby("prefill_node", observed=True):
            waits = at_node["prefill_start_s"] - at_node["route_s"]
            assert (at_node["prefill_queue_s"] >= waits - 1e-6).all()  # one under way counts whole
            assert at_node["prefill_queue_s"].iloc[0] == 0


class TestTheLife:
    def test_is_its_stamps_in_order_and_the_parts_of_its_ttft(self, folders: Path) -> None:
        found = explain(str(folders / "drop"), "r0000100")
        times = [one["at_s"] for one in found["stamps"]]
        assert times == sorted(times)
        assert found["stamps"][0]["after_s"] is None
        assert sum(one["after_s"] for one in found["stamps"][1:]) == pytest.approx(times[-1] - times[0])
        assert sum(found["ttft_parts_s"][part] for part in PARTS) == pytest.approx(found["ttft_s"], abs=1e-6)

    def test_is_that_of_its_row(self, folders: Path, drop: Result) -> None:
        row = drop.requests.set_index("request_id").loc["r0000100"]
        found = explain(str(folders / "drop"), "r0000100")
        assert found["input_tokens"] == row["input_tokens"]
        assert found["decision"]["prefill_node"] == row["prefill_node"]
        assert found["decision"]["threshold_tokens"] == row["threshold_tokens"]
        assert found["decision"]["prefill_queue_s"] == pytest.approx(row["prefill_queue_s"], abs=1e-9)

    def test_is_the_same_from_parquet(self, folders: Path, drop: Result, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        write(drop, tmp_path / "drop", "parquet")
        ours, theirs = (explain(str(top / "drop"), "r0000100") for top in (tmp_path, folders))
        assert ours["ttft_s"] == pytest.approx(theirs["ttft_s"])
        for name, value in theirs["decision"].items():
            assert ours["decision"][name] == (pytest.approx(value) if isinstance(value, float) else value)
        ours_changed, theirs_changed = ([one["trigger"] for one in found["changes_before"]] for found in (ours, theirs))
        assert ours_changed == theirs_changed != []


class TestTheCache:
    def test_says_where_the_prefix_came_from_and_what_it_saved(self, folders: Path, talks: Result) -> None:
        rows = talks.requests
        row = rows[(rows["cache_node"] != "") & (rows["cached_tokens"] > 0)].iloc[0]
        found = explain(str(folders / "talks"), row["request_id"])["cache"]
        profile = load_profile(PROFILES[row["prefill_site"]])
        total, used = int(row["input_tokens"]), int(row["cached_tokens"])
        assert (found["from"], found["used_tokens"]) == (row["cache_node"], used)
        assert found["saved_s"] == pytest.approx(profile.t_prefill(total) - profile.t_prefill(total - used))
        assert found["saved_kv_bytes"] == pytest.approx(profile.s_kv(total) - profile.s_kv(total - used))

    def test_of_its_own_node_needs_no_fetch(self, folders: Path, talks: Result) -> None:
        rows = talks.requests
        row = rows[(rows["cache_node"] == "") & (rows["cached_tokens"] > 0)].iloc[0]
        assert explain(str(folders / "talks"), row["request_id"])["cache"]["from"] == row["prefill_node"]

    def test_is_nothing_where_nothing_was_reused(self, folders: Path) -> None:
        assert explain(str(folders / "drop"), "r0000100")["cache"] is None


class TestWhatHadChanged:
    def test_is_the_latest_of_each_kind_before_it_was_routed(self, folders: Path, drop: Result) -> None:
        rows, timeline = drop.requests, drop.timeline
        late = rows[(rows["route_s"] > 100) & (rows["route_s"] < 119)].iloc[-1]
        changes = {one["kind"]: one for one in explain(str(folders / "drop"), late["request_id"])["changes_before"]}
        moves = timeline[(timeline["event"] == "threshold") & (timeline["t_s"] <= late["route_s"])].iloc[-1]
        assert changes["threshold"]["t_s"] == pytest.approx(moves["t_s"])
        assert float(changes["threshold"]["after"]) == late["threshold_tokens"]
        assert changes["threshold"]["trigger"] == moves["trigger"]
        assert (changes["link"]["t_s"], changes["link"]["trigger"]) == (60, "phase drop")
        assert all(one["t_s"] <= late["route_s"] for one in changes.values())

    def test_is_nothing_before_anything_did(self, folders: Path) -> None:
        assert explain(str(folders / "drop"), "r0000000")["changes_before"] == []


class TestWhatWentWrong:
    @pytest.fixture
    def broken(self, folders: Path, drop: Result, tmp_path: Path) -> Path:
        """Three requests as a run on the wire may have them: retried and failed, refused, never seen by the gateway."""
        table = drop.requests.astype({"reason": "str", "error": "str", "error_message": "str", "status": "str"})
        table = table.head(3).copy()
        table.loc[0, ["status", "error", "error_message", "attempts"]] = ["failed", "node_lost", "pd-d-1 was lost", 3]
        table.loc[0, ["admitted_s", "finished_s", "first_token_s", "done_s", "ttft_s", "e2e_s"]] = math.nan
        nodes = ["prefill_node", "decode_node", "prefill_site", "cache_node", "regime"]
        table = table.astype(dict.fromkeys(nodes, "str"))
        table.loc[1, nodes] = ""
        table.loc[1, ["status", "error", "reason", "prefill_tokens"]] = ["failed", "rejected", "full house", 0]
        table.loc[2, [*nodes, "reason"]] = ""
        table.loc[2, ["status", "client_error"]] = ["failed", "refused"]
        table.loc[2, ["arrive_s", "route_s", "attempts", "cached_tokens", "prefill_tokens"]] = math.nan
        write(drop, tmp_path / "run", "none")
        table.to_csv(tmp_path / "run" / "requests.csv", index=False)
        return tmp_path / "run"

    def test_a_failed_request_has_its_error_and_its_tries(
        self, broken: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = explain(str(broken), "r0000000")
        assert (found["status"], found["error"], found["attempts"]) == ("failed", "node_lost", 3)
        assert command("explain", str(broken), "r0000000") == 0
        told = capsys.readouterr().out
        assert "failed (node_lost: pd-d-1 was lost)" in told
        assert "in attempt 3" in told

    def test_a_refused_one_has_the_reason_and_no_node(self, broken: Path) -> None:
        found = explain(str(broken), "r0000001")
        assert (found["decision"]["reason"], found["decision"]["prefill_node"]) == ("full house", "")
        assert found["cache"] is None

    def test_one_that_the_gateway_never_saw_has_the_clients_word(
        self, broken: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = explain(str(broken), "r0000002")
        assert (found["decision"], found["client_error"]) == (None, "refused")
        assert command("explain", str(broken), "r0000002") == 0
        assert "control never decided on it" in capsys.readouterr().out


class TestWhatIsNotThere:
    def test_a_run(self, folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "results").symlink_to(folders)
        assert find_run("drop") == Path("results/drop")
        with pytest.raises(RunError, match=r"drob: no such run.*did you mean drop\?"):
            explain("drob", "r0000000")

    def test_a_folder_of_several_runs_names_them(self, folders: Path) -> None:
        with pytest.raises(RunError, match="several runs; name one of them: drop, talks"):
            find_run(str(folders))

    def test_a_folder_without_results(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=r"no summary.json in it"):
            find_run(str(tmp_path))

    @pytest.mark.parametrize(("wrong", "near"), [("100", "r0000100"), ("r000100", "r0000100"), ("R0000100", "0000100")])
    def test_a_request_with_those_near_it(self, folders: Path, wrong: str, near: str) -> None:
        with pytest.raises(RunError, match=f"no request '{wrong}' among its .*{near}"):
            explain(str(folders / "drop"), wrong)

    def test_rows(self, drop: Result, tmp_path: Path) -> None:
        write(drop, tmp_path / "run", "none")
        with pytest.raises(RunError, match="no row a request; prfaas simulate keeps them with --requests csv"):
            explain(str(tmp_path / "run"), "r0000000")

    def test_is_a_users_error(self, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("explain", str(folders / "drop"), "nobody") == 2
        assert "error: " in capsys.readouterr().err


class TestTheCommand:
    def test_tells_it_to_a_person(self, folders: Path, talks: Result, capsys: pytest.CaptureFixture[str]) -> None:
        rows = talks.requests
        row = rows[(rows["cache_node"] != "") & (rows["cached_tokens"] > 0)].iloc[0]
        assert command("explain", str(folders / "talks"), row["request_id"]) == 0
        told = capsys.readouterr().out
        for part in (
            f"decision: {row['reason']}",
            f"prefill at {row['prefill_node']} ({row['prefill_site']})",
            f"t was {row['threshold_tokens']:,.0f} tokens",
            f"bandwidth {row['regime']}",
            f"l_pd {row['l_pd']:,}, l_prfaas {row['l_prfaas']:,}",
            f"from {row['cache_node']}",
            "TTFT ",
        ):
            assert part in told

    def test_is_one_json_object(self, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("explain", str(folders / "drop"), "r0000100", "--json") == 0
        assert json.loads(capsys.readouterr().out)["request_id"] == "r0000100"

    def test_says_of_an_oracle_what_it_is(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write(simulate("link-drop", policy="oracle", sets=DROP), tmp_path / "run", "csv")
        assert command("explain", str(tmp_path / "run"), "r0000100") == 0
        assert f"oracle: {CAVEAT}" in capsys.readouterr().out


def test_an_infinite_threshold_is_no_number_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: Result = simulate("link-drop", policy="oracle", sets=[*DROP, "deployments.0.fleet.n_prfaas=0"])
    assert isinstance(found.requests, pd.DataFrame)
    write(found, tmp_path / "run", "csv")
    assert command("explain", str(tmp_path / "run"), "r0000001", "--json") == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert told["decision"]["threshold_tokens"] is None
