"""The invariants: each holds in a run as it should be, and each has a run that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pytest

from testbed import simulate as virtual
from testbed.invariants import INVARIANTS, Finding, Run, Twin, check, judge
from testbed.invariants.calm import recurrence, turns
from testbed.invariants.little import littles_law
from testbed.invariants.queues import bursts
from testbed.invariants.work import idle_beside
from testbed.scenario import load, override, shipped
from testbed.scheduler.api import Decision, RequestView, Setup
from testbed.scheduler.baselines import Homogeneous

SHORT = [
    "phases=[{name: before, duration_s: 120}, {name: drop, duration_s: 150, link_rate_bps: 5gbps}, "
    "{name: after, duration_s: 90}]"
]


def ran(scenario: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Run:
    """A run in virtual time, as its invariants see it."""
    seen: list[Run] = []

    def grab(run: Run) -> list[Finding]:
        seen.append(run)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(virtual, "check", grab)
        virtual.simulate(scenario, **options)
    return seen[0]


@pytest.fixture(scope="module")
def run() -> Run:
    """A short link-drop under the shipped policy; not to be changed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return ran("link-drop", monkeypatch, sets=SHORT)


def with_rows(run: Run, change: Callable[[pd.DataFrame], Any]) -> Run:
    """The run with other rows."""
    rows = run.requests.copy()
    changed = change(rows)
    return replace(run, requests=rows if changed is None else changed)


def with_changes(run: Run, event: str, times: Any, **values: Any) -> Run:
    """The run with more events on its timeline."""
    more = pd.DataFrame({"t_s": list(times), "event": event, **values})
    return replace(run, timeline=pd.concat([run.timeline, more], ignore_index=True))


def found(run: Run, name: str) -> Finding:
    (one,) = [finding for finding in check(run) if finding.name == name]
    return one


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


class TestHold:
    @pytest.mark.parametrize("name", [name for name in shipped() if name not in ("conversation", "hybrid")])
    def test_all_in_every_shipped_scenario(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        scenario = load(name)
        if scenario.workload.trace is not None or scenario.backend != "timing":
            pytest.skip("needs its trace, or is not for virtual time")
        findings = check(ran(name, monkeypatch))
        assert [one.sentence for one in findings if one.status == "broken"] == []
        assert {one.name for one in findings if one.status == "not_checked"} <= {"recovered"}

    def test_there_are_twelve_and_each_says_what_it_is(self, run: Run) -> None:
        assert len(check(run)) == len(INVARIANTS) == 12
        assert all(invariant.__doc__ for invariant in INVARIANTS)
        assert len({one.name for one in check(run)}) == 12

    def test_all_where_the_link_stepped(self, run: Run) -> None:
        assert {name for name, status in statuses(check(run)).items() if status != "held"} <= {"no_cycle"}  # too short
        assert found(run, "recovered").status == "held"

    def test_where_requests_were_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sets = ["link.schedule={kind: constant, rate_bps: 20gbps, outages: [{at_s: 60, duration_s: 15}]}"]
        sets += ["phases=[]", "workload.duration_s=200", "link.rate_bps=20gbps"]
        again = ran("link-drop", monkeypatch, sets=sets)
        assert (again.requests["attempts"] > 1).any()
        assert "broken" not in statuses(check(again)).values()

    def test_with_cached_prefixes_a_small_outbox_and_answers_of_one_token(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sets = ["cache_bytes=60e9", "workload.sessions={turns_mean: 6, think_s: 20, system_tokens: 4096}"]
        sets += ["workload.lengths={kind: lognormal, mu: 8.0, sigma: 1.0, min_tokens: 128, max_tokens: 32768}"]
        sets += ["phases=[]", "workload.duration_s=200", "workload.rate_rps=2.5", "workload.output_tokens=1"]
        sets += ["transport.outbox_bytes=4e9", "link.delay_s=0.03"]
        cached = ran("link-drop", monkeypatch, sets=sets)
        assert (cached.requests["cached_tokens"] > 0).any()
        assert [one.sentence for one in check(cached) if one.means == "invalid" and one.status == "broken"] == []


class TestBreak:
    """Each of them, by the smallest change of a run that holds."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: rows.iloc[1:],
            lambda rows: pd.concat([rows, rows.iloc[:1]]),
            lambda rows: rows.assign(finished_s=rows["finished_s"].where(rows.index > 0)),
            lambda rows: rows.assign(output_tokens=rows["output_tokens"] - (rows.index == 0)),
            lambda rows: rows.assign(status=np.where(rows.index == 0, "failed", "ok")),
        ],
    )
    def test_a_request_that_is_lost_doubled_cut_short_or_failed_for_nothing(
        self, run: Run, change: Callable[[pd.DataFrame], pd.DataFrame]
    ) -> None:
        one = found(with_rows(run, change), "conserved")
        assert (one.status, one.means) == ("broken", "invalid")

    @pytest.mark.parametrize(
        ("first", "then"),
        [("arrive_s", "route_s"), ("prefill_end_s", "landed_s"), ("admitted_s", "first_token_s")],
    )
    def test_a_stamp_before_its_cause(self, run: Run, first: str, then: str) -> None:
        def swap(rows: pd.DataFrame) -> None:
            rows.loc[3, then] = rows.loc[3, first] - 0.001

        one = found(with_rows(run, swap), "causal")
        assert (one.status, one.means) == ("broken", "invalid")
        assert one.value == pytest.approx(0.001)

    def test_a_models_last_tokens_may_have_no_text(self, run: Run) -> None:
        """Then a client's last token is one before them; its end is still the request's."""

        def without_text(rows: pd.DataFrame) -> None:
            rows.loc[3, "last_token_s"] = rows.loc[3, "finished_s"] - 0.002

        def ended_early(rows: pd.DataFrame) -> None:
            rows.loc[3, ["last_token_s", "done_s"]] = rows.loc[3, "finished_s"] - 0.002

        computed = replace(run, scenario=run.scenario.model_copy(update={"backend": "hybrid"}))
        assert found(with_rows(computed, without_text), "causal").status == "held"
        assert found(with_rows(run, without_text), "causal").status == "broken"
        assert found(with_rows(computed, ended_early), "causal").status == "broken"

    def test_what_crosses_faster_than_the_link(self, run: Run) -> None:
        far = replace(run, scenario=override(run.scenario, ["link.delay_s=0.05"]))
        assert found(far, "causal").status == "broken"

    def test_bytes_that_nobody_made(self, run: Run) -> None:
        summary = {**run.summary, "link": {**run.summary["link"], "kv_bytes": run.summary["link"]["kv_bytes"] + 10**6}}
        assert found(replace(run, summary=summary), "bytes").status == "broken"

    def test_kv_that_is_not_s_kv(self, run: Run) -> None:
        def bits(rows: pd.DataFrame) -> None:
            rows["kv_bytes"] *= 8

        one = found(with_rows(run, bits), "bytes")
        assert one.status == "broken"
        assert "S_kv" in one.sentence

    def test_littles_law_where_a_stage_has_other_sojourns(self, run: Run) -> None:
        law = {**run.summary["littles_law"], "holds": False, "problems": ["L is not lambda W"]}
        one = found(replace(run, summary={**run.summary, "littles_law": law}), "littles_law")
        assert (one.status, one.means) == ("broken", "invalid")

    @pytest.mark.parametrize(("lost", "status"), [(0.0, "held"), (0.3, "broken")])
    def test_littles_law_on_the_wire_by_what_workers_say_they_hold(
        self, run: Run, tmp_path: Path, lost: float, status: str
    ) -> None:
        """lost: the share of what the prefill nodes hold that they do not tell of."""
        rows, lines = run.requests, []
        for node in sorted(set(rows["prefill_node"])):
            its = rows[(rows["prefill_node"] == node).to_numpy()]
            for t_s in np.arange(0.0, 400.0, 0.5).tolist():
                count = int(((its["route_s"] <= t_s) & (t_s < its["prefill_end_s"])).sum())
                told = {"queued_requests": 0, "running_requests": count * (1 - lost)}
                lines.append({"t_s": t_s, "event": {"type": "Telemetry", "node": node, "t_s": t_s, **told}})
        (tmp_path / "events.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        on_wire = replace(run, summary={**run.summary, "clock": "wire"}, folder=tmp_path, twin=None)
        one = littles_law(on_wire)
        assert (one.status, one.means) == (status, "invalid")
        assert one.sentence.startswith("prefill: ")

    @pytest.mark.parametrize("first", ["prefill_start_s", "admitted_s"])
    def test_an_instance_that_dawdles_beside_its_queue(self, run: Run, first: str) -> None:
        def later(rows: pd.DataFrame) -> None:
            stamps = ["prefill_start_s", "prefill_end_s", "landed_s", "admitted_s", "finished_s"]
            rows.loc[100, stamps[stamps.index(first) :]] += 2.0

        one = found(with_rows(run, later), "work")
        assert (one.status, one.means) == ("broken", "invalid")

    def test_a_policy_that_decides_by_chance(self, run: Run) -> None:
        one = found(replace(run, twin=(7, "request r3: here, and a second time there")), "deterministic")
        assert (one.status, one.means) == ("broken", "failed")

    def test_queues_that_do_not_drain(self, run: Run) -> None:
        def late(rows: pd.DataFrame) -> None:
            rows.loc[rows.index[-1], ["prefill_start_s", "prefill_end_s", "landed_s", "admitted_s", "finished_s"]] += (
                400
            )

        assert found(with_rows(run, late), "drained").status == "broken"
        assert found(with_rows(run, late), "not_starved").status == "broken"

    def test_queues_that_stay_after_a_burst(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = ran("burst", monkeypatch, policy="homogeneous")
        one = found(slow, "drained")
        assert one.status == "broken"
        assert "after phase burst" in one.sentence

    def test_requests_that_failed_in_a_burst_wait_no_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        burst = ran("burst", monkeypatch)
        start_s, end_s = bursts(burst.scenario)[0][1:]

        def some_failed(rows: pd.DataFrame) -> None:
            rows.loc[rows["arrive_s"].between(start_s, end_s) & (rows.index % 3 == 0), "admitted_s"] = np.nan

        assert found(with_rows(burst, some_failed), "drained").status == "held"

    def test_a_threshold_that_never_stays(self, run: Run) -> None:
        moving = with_changes(run, "threshold", np.arange(20.0, 40.0, 2.0), before=1e4, after=2e4)
        one = found(moving, "threshold_changes")
        assert (one.status, one.value, one.means) == ("broken", 10, "note")

    def test_roles_that_come_and_go(self, run: Run) -> None:
        assert found(with_changes(run, "role", [1.0, 200.0, 400.0, 599.0]), "role_changes").status == "broken"
        assert found(with_changes(run, "role", [1.0, 200.0, 400.0, 601.5]), "role_changes").status == "held"

    def test_a_threshold_that_goes_in_circles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calm = ran("link-drop", monkeypatch, sets=["phases=[]", "workload.duration_s=600"])
        times = np.arange(10.0, 590.0, 20.0)
        up = np.arange(len(times)) % 2 == 0
        circling = with_changes(calm, "threshold", times, before=np.where(up, 1e4, 2e4), after=np.where(up, 2e4, 1e4))
        one = found(circling, "no_cycle")
        assert one.status == "broken"
        assert one.value == pytest.approx(1.0, abs=0.1)

    def test_a_backlog_that_stays_after_the_link_fell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stuck = ran("link-drop", monkeypatch, policy="static")
        one = found(stuck, "recovered")
        assert one.status == "broken"
        assert one.value == pytest.approx(300, abs=5)


class TestMeaning:
    def test_a_default_is_a_note_and_a_promise_broken_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for sets, status in (([], "valid"), (["bounds.recover_s=120"], "failed"), (["bounds.recover_s=1000"], "valid")):
            summary = virtual.simulate("link-drop", policy="static", sets=sets).summary
            assert summary["verdict"]["status"] == status

    def test_accounts_that_disagree_make_a_run_invalid_whatever_else_failed(self) -> None:
        summary = {"verdict": {"status": "failed", "reasons": ["a"]}}
        judge(summary, [Finding("bytes", "broken", 1, 0, "b", "invalid"), Finding("x", "broken", 1, 0, "c", "note")])
        assert summary["verdict"] == {"status": "invalid", "reasons": ["a", "b"]}
        assert [one["name"] for one in summary["invariants"]] == ["bytes", "x"]  # type: ignore[index]


class Moody(Homogeneous):
    """Decides by how many of its kind there are: no two objects decide alike."""

    made = 0

    def start(self, setup: Setup) -> None:
        Moody.made += 1
        self.mood = Moody.made

    def route(self, request: Any, view: Any) -> Any:
        decision = super().route(request, view)
        return decision._replace(reason=str(self.mood)) if isinstance(decision, Decision) else decision


class Failing(Homogeneous):
    def route(self, request: Any, view: Any) -> Any:
        raise KeyError("always")


class TestTwin:
    def test_a_policy_that_shares_state_between_its_objects_is_found_out(self) -> None:
        summary = virtual.simulate("toy", policy=f"{__name__}:Moody").summary
        assert summary["verdict"]["status"] == "failed"
        assert "decides otherwise when asked again" in summary["verdict"]["reasons"][-1]

    def test_one_that_raises_alike_is_deterministic(self) -> None:
        summary = virtual.simulate("toy", policy=f"{__name__}:Failing").summary
        (one,) = [one for one in summary["invariants"] if one["name"] == "deterministic"]
        assert one["status"] == "held"
        assert summary["policy_errors"]

    def test_it_asks_no_more_than_it_is_to(self) -> None:
        class Counting(Homogeneous):
            calls = 0

            def route(self, request: Any, view: Any) -> Any:
                Counting.calls += 1
                return "no decision"

        twin, policy = Twin(Counting(), most=3), Counting()
        for i in range(5):
            twin.ask(policy, RequestView(f"r{i}", 0.0, 100), None)  # type: ignore[arg-type]
        assert (Counting.calls, twin.told) == (8, (3, ""))

    def test_a_policy_without_tick_changes_nothing(self) -> None:
        assert list(Twin(Homogeneous()).tick(Homogeneous(), None)) == []  # type: ignore[arg-type]

    def test_it_changes_no_result(self) -> None:
        one, other = (virtual.simulate("link-drop", sets=SHORT).requests for _ in range(2))
        assert one.equals(other)


class TestArithmetic:
    """By hand."""

    def test_idle_beside(self) -> None:
        # busy 2..4 and 6..9; one waits 1..2, one 3..6 (idle 4..6), one 6..9.5 (idle 9..9.5)
        ready, start = np.array([1.0, 3.0, 6.0]), np.array([2.0, 6.0, 9.5])
        busy_from, until = np.array([2.0, 6.0, 9.5]), np.array([4.0, 9.0, 10.0])
        assert idle_beside(ready, start, busy_from, until, 1).tolist() == [1.0, 2.0, 0.5]

    def test_idle_beside_two_slots(self) -> None:
        # slots taken 0..4, 1..3, 3.5..5: both are until 3, then one is free until 3.5
        busy_from, until = np.array([0.0, 1.0, 3.5]), np.array([4.0, 3.0, 5.0])
        assert idle_beside(np.array([1.5]), np.array([3.5]), busy_from, until, 2).tolist() == [0.5]

    @pytest.mark.parametrize(
        ("values", "count"),
        [([0, 0.04, 0], 0), ([0, 1, 2, 3], 0), ([0, 1, 0], 1), ([0, 1, 0, 1, 0.97, 1, 0], 3), ([3, 1, 2], 1)],
    )
    def test_turns(self, values: list[float], count: int) -> None:
        assert turns(np.array(values, dtype=float)) == count

    def test_recurrence(self) -> None:
        rng = np.random.default_rng(7)
        assert recurrence(np.sin(np.arange(80) / 2)) > 0.9
        assert recurrence(np.repeat([0.0, 1.0] * 6, 5)) == pytest.approx(1.0)
        assert recurrence(rng.normal(size=80)) < 0.4
        assert recurrence(np.repeat(np.arange(8.0), 10)) == 0.0
        assert recurrence(np.full(80, 3.0)) == 0.0

    def test_bursts(self) -> None:
        assert bursts(load("burst")) == [("burst", 300, 330)]
        assert bursts(load("link-drop")) == []
        assert bursts(load("mix-shift")) == []
