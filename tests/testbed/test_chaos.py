"""Chaos: faults and experiments as data, what a run is judged by, and experiments in virtual time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from emulator.messages import Hinder
from testbed.chaos import experiment as experiments
from testbed.chaos import faults, virtual, wire
from testbed.chaos.experiment import Experiment, parse
from testbed.chaos.journal import Check, Journal
from testbed.chaos.judge import judge, largest_queue
from testbed.chaos.load import leaving, stalled
from testbed.chaos.orders import hinder, wall_steps
from testbed.chaos.wire import account_checks
from testbed.cli import app
from testbed.launch.state import StateDir, TestbedError
from testbed.scenario import Scale, ScenarioError, load
from traces.load import Trace
from traces.request import Request

SCENARIO = load("chaos")
CALM = {"goodput": 0.9}


def made(*method: dict[str, Any], **more: Any) -> Experiment:
    """An experiment on the scenario `chaos` with this method."""
    data = {
        "name": "x",
        "description": "d",
        "scenario": "chaos",
        "hypothesis": {"before": CALM, "after": CALM, "recovery_s": 40},
        "method": list(method),
    }
    return parse({**data, **more}, "x.yaml")


def fault(kind: str, at_s: float, duration_s: float | None = 10.0, **more: Any) -> dict[str, Any]:
    timed = {} if duration_s is None else {"duration_s": duration_s}
    return {"kind": kind, "at_s": at_s, **timed, **more}


def run(experiment: Experiment, policy: str = "prfaas") -> tuple[pd.DataFrame, Journal]:
    journal = Journal(experiment, "virtual", policy, 1)
    table = virtual.run(experiment, experiment.resolved(), policy, journal)
    journal.judged(judge(experiment, experiment.resolved(), table))
    return table, journal


class TestData:
    """What an experiment's file may say, and how it is refused."""

    @pytest.mark.parametrize(
        ("method", "told"),
        [
            (fault("killed_worker", 100, node="prfaas-9"), "no such worker; there are prfaas-0"),
            (fault("landing_full", 100, node="prfaas-0"), "a prefill node has no landing room"),
            (fault("outage", 100, how="off"), "must be 'stall', 'blackhole' or 'down'"),
            (fault("outage", 100, duration_s=-1), "duration_s = -1: must be above 0"),
            (fault("outage", 100, for_s=3), "for_s: unknown key"),
            (fault("eruption", 100), "kind"),
            (fault("link_steps", 100, steps=[[0, "3gbps"], [10, "4gbps"]]), "raise duration_s above it"),
            (fault("link_steps", 100, steps=[[1, "3gbps"]]), "the first must be at 0 s"),
            (fault("slow_worker", 100, node="prfaas-0", factor=1), "factor = 1: must be above 1"),
            (fault("delay_spike", 100, delay_s=0.1, jitter_s=0.2), "more than delay_s"),
            (fault("outage", 10), "the window before would be from 30 to 10 s"),
            (fault("outage", 340), "the window after would be"),
        ],
    )
    def test_a_fault_that_cannot_be_is_refused(self, method: dict[str, Any], told: str) -> None:
        with pytest.raises(ScenarioError, match="x") as refused:
            made(method).resolved()
        assert told in str(refused.value)

    def test_a_worker_is_not_taken_away_twice_at_once(self) -> None:
        both = made(fault("lost_site", 100, 30), fault("frozen_worker", 120, 30, node="prfaas-1"))
        with pytest.raises(ScenarioError, match="prfaas-1 is lost_site from 100 to 130 s already"):
            both.resolved()
        made(fault("lost_site", 100, 30), fault("frozen_worker", 131, 30, node="prfaas-1")).resolved()

    def test_a_hypothesis_without_a_bound_is_refused(self) -> None:
        with pytest.raises(ScenarioError, match="before: no bound"):
            made(fault("outage", 100), hypothesis={"before": {}, "after": CALM, "recovery_s": 1})

    @pytest.mark.parametrize("extra", [{"loss_burst": {}}, {"delay_spike": {"jitter_s": 0.1}}])
    def test_virtual_time_refuses_what_it_cannot_do(self, extra: dict[str, dict[str, Any]]) -> None:
        [(kind, more)] = extra.items()
        with pytest.raises(ScenarioError, match="take --clock wire"):
            made(fault(kind, 100, **more)).check_clock("virtual")

    def test_every_shipped_experiment_is_one_and_together_they_have_every_kind(self) -> None:
        every = [experiments.load(name) for name in experiments.shipped()]
        for one in every:
            one.resolved()
            one.check_clock(one.clocks[0])
        assert {f.kind for one in every for f in one.method} == set(experiments._kinds())
        assert {f.how for one in every for f in one.method if isinstance(f, faults.Outage)} == {
            "stall", "blackhole", "down"
        }  # fmt: skip


class TestLayers:
    """Faults of the link lie over what the scenario makes of it."""

    DIP = faults.LinkSteps(at_s=10, duration_s=20, steps=[(0.0, 4e9), (5.0, 6e9)])
    CUT = faults.Outage(at_s=12, duration_s=6)
    OTHER = faults.LinkSteps(at_s=14, duration_s=4, steps=[(0.0, 1e9)])

    def test_a_dip_is_there_for_its_time_and_then_what_the_scenario_has_by_then(self) -> None:
        rates = faults.effective_rates(16e9, [(20.0, 8e9)], [self.DIP])
        assert rates == [(10, 4e9), (15, 6e9), (30, 8e9)]

    def test_the_later_fault_wins_but_an_outage_holds(self) -> None:
        rates = faults.effective_rates(16e9, [], [self.CUT, self.DIP, self.OTHER])
        assert rates == [(10, 4e9), (12, 0.0), (18, 6e9), (30, 16e9)]

    def test_a_spike_within_another_heals_to_it(self) -> None:
        long = faults.DelaySpike(at_s=10, duration_s=20, delay_s=0.1)
        short = faults.DelaySpike(at_s=15, duration_s=5, delay_s=0.5)
        assert faults.effective_delays(0.01, [long, short]) == [(10, 0.1), (15, 0.5), (20, 0.1), (30, 0.01)]

    def test_on_the_wire_rates_and_times_are_scaled(self) -> None:
        scale = Scale(time_scale=10, byte_scale=0.001)
        assert wall_steps(self.DIP, scale) == [(1, {"rate_bps": 4e7}), (1.5, {"rate_bps": 6e7}), (3, {})]
        spike = faults.DelaySpike(at_s=10, duration_s=10, delay_s=0.5, jitter_s=0.1)
        assert wall_steps(spike, scale)[0] == (1, {"delay_s": 0.05, "jitter_s": 0.01})
        assert wall_steps(self.CUT, scale) == [(1.2, {"outage": "blackhole"}), (1.8, {})]


class TestLoad:
    """What happens to the load is a change of the trace, or of who waits for an answer."""

    def test_the_requests_of_a_stall_come_at_its_end(self) -> None:
        held = [Request(arrival_s=s, input_tokens=1, output_tokens=1) for s in (99.0, 100.0, 104.0, 105.0, 106.0)]
        trace = Trace(held, len(held), {}, [], "a test", "", "prfaas")
        came = stalled(trace, made(fault("load_stalls", 100, 5)))
        assert [one.arrival_s for one in came.requests] == [99.0, 105.0, 105.0, 105.0, 106.0]

    def test_who_leaves_is_drawn_by_the_seed(self) -> None:
        there = [f"r{i}" for i in range(20)]
        gone = leaving(there, 0.33, random.Random("1"))
        assert len(gone) == 7
        assert gone == leaving(there, 0.33, random.Random("1")) != leaving(there, 0.33, random.Random("2"))

    def test_faults_of_one_worker_are_one_message(self) -> None:
        slow = faults.SlowWorker(at_s=1, duration_s=1, node="pd-d-0", factor=2)
        full = faults.LandingFull(at_s=1, duration_s=1, node="pd-d-0", fraction=0.5)
        room = SCENARIO.transport.landing_bytes
        assert hinder([slow, slow, full], SCENARIO) == Hinder(4.0, room // 2)
        assert hinder([], SCENARIO) == Hinder()


def rows(*rows: tuple[float, float, float, str]) -> pd.DataFrame:
    """A request table: (due, first token, over, error)."""
    table = pd.DataFrame(rows, columns=["sched_s", "first_token_s", "ended_s", "error"])
    table["ttft_s"] = table["first_token_s"] - table["sched_s"]
    table["tpot_s"] = 0.025
    table["client_error"] = ""
    table["status"] = ["ok" if not error else "failed" for error in table["error"]]
    return table


class TestJudge:
    """The hypothesis against the requests."""

    EXPERIMENT = made(
        fault("outage", 100, 50),
        hypothesis={
            "before": {"goodput": 0.9, "errors": 0},
            "during": {"ttft_p90_s": 20, "queue": 40},
            "after": {"goodput": 0.9},
            "recovery_s": 10,
        },
    )
    BEFORE = tuple((40.0 + i, 41.0 + i, 45.0 + i, "") for i in range(50))
    DURING = tuple((100.0 + i, 110.0 + i, 115.0 + i, "") for i in range(55))
    AFTER = tuple((160.0 + i, 161.0 + i, 165.0 + i, "") for i in range(100))

    def verdict(self, *requests: tuple[float, float, float, str]) -> dict[str, Any]:
        judged = judge(self.EXPERIMENT, SCENARIO, rows(*requests))
        verdict: dict[str, Any] = judged["verdict"]
        return verdict

    def test_a_hypothesis_that_holds(self) -> None:
        assert self.verdict(*self.BEFORE, *self.DURING, *self.AFTER) == {"status": "passed", "reasons": []}

    def test_a_bound_that_breaks_says_which_where_and_by_how_much(self) -> None:
        slow = [(due, due + 30, due + 40, "") for due, *_ in self.DURING]
        told = self.verdict(*self.BEFORE, *slow, *self.AFTER)
        assert told == {"status": "broken", "reasons": ["during: ttft_p90_s 30, at most 20"]}

    def test_too_few_requests_judge_nothing(self) -> None:
        told = self.verdict(*self.BEFORE, *self.DURING, *self.AFTER[:5])
        assert told["status"] == "inconclusive"
        assert told["reasons"] == ["after: 5 requests, 30 are needed to judge; lengthen the window"]

    def test_what_is_under_way_when_a_fault_comes_is_hit_by_it(self) -> None:
        lost = (95.0, math.nan, 101.0, "node_lost")
        found = judge(self.EXPERIMENT, SCENARIO, rows(*self.BEFORE, lost, *self.DURING, *self.AFTER))
        assert found["windows"]["before"]["values"]["errors"] == 0
        assert found["windows"]["during"]["values"]["errors"] == pytest.approx(1 / 56)

    def test_a_client_that_left_is_no_error_of_the_system(self) -> None:
        left = [(due, math.nan, due + 1, "client_gone") for due, *_ in self.BEFORE[:10]]
        found = judge(self.EXPERIMENT, SCENARIO, rows(*self.BEFORE[10:], *left, *self.DURING, *self.AFTER))
        values = found["windows"]["before"]["values"]
        assert (values["left"], values["errors"], values["goodput"]) == (10, 0, 1)

    def test_the_queue_is_who_waits_for_a_first_token_at_any_time(self) -> None:
        waiting = rows((1, 9, 10, ""), (2, 4, 10, ""), (3, 5, 10, ""), (5, math.nan, 7, "node_lost"), (6, 8, 9, ""))
        assert largest_queue(waiting, 0, 20) == 3
        assert largest_queue(waiting, 4.5, 4.6) == 2  # those who came before and still wait
        assert largest_queue(waiting, 9.5, 20) == 0

    def test_recovery_is_when_no_more_wait_than_ever_did_before(self) -> None:
        piled = [(140.0 + i / 10, 175.0 + i / 10, 180.0, "") for i in range(50)]
        judged = judge(self.EXPERIMENT, SCENARIO, rows(*self.BEFORE, *self.DURING, *piled, *self.AFTER))
        assert judged["recovered_s"] == pytest.approx(175 + 4.9 - 150, abs=1.5)


class TestJournal:
    """A failed rollback is never a success, and it does not change the verdict."""

    def journal(self, *checks: Check) -> Journal:
        journal = Journal(made(fault("outage", 100)), "wire", "prfaas", 1)
        journal.judged({"windows": {}, "recovered_s": 0.0, "verdict": {"status": "passed", "reasons": []}})
        journal.checks(checks)
        return journal

    def test_clean(self) -> None:
        journal = self.journal(Check("link", True, 1))
        assert (journal.exit_code, journal.to_json()["rollback"]["status"]) == (0, "clean")

    def test_what_was_left_behind_is_named_beside_the_verdict(self) -> None:
        journal = self.journal(Check("link", True, 1), Check("pd-d-0: slots", False, 3))
        assert journal.verdict["status"] == "passed"
        assert (journal.exit_code, journal.to_json()["rollback"]["failed"]) == (1, ["pd-d-0: slots: 3"])

    def test_a_rollback_that_nobody_looked_at_is_no_success(self) -> None:
        assert self.journal().exit_code == 1
        assert self.journal().to_json()["rollback"]["status"] == "not verified"

    def test_a_run_that_is_no_measurement_is_invalid_whatever_it_showed(self) -> None:
        journal = Journal(made(fault("outage", 100)), "wire", "prfaas", 1)
        journal.unsound.append("the machine was busy")
        journal.judged({"windows": {}, "recovered_s": 0.0, "verdict": {"status": "broken", "reasons": ["slow"]}})
        journal.checks([Check("link", True, 1)])
        assert journal.exit_code == 3
        assert journal.verdict["reasons"] == ["the machine was busy", "slow"]

    def test_interrupted_is_inconclusive(self) -> None:
        journal = Journal(made(fault("outage", 100)), "wire", "prfaas", 1)
        journal.checks([Check("link", True, 1)])
        journal.cut_short("interrupted")
        assert journal.exit_code == 4

    def test_what_workers_still_hold_is_found_in_their_last_accounts(self) -> None:
        idle = {"queued_requests": 0, "queued_tokens": 0, "running_requests": 0, "outbox_bytes": 0, "landing_bytes": 0,
                "waiting_grants": 0, "held_blocks": 0, "open_transfers": 0, "slowdown": 1.0}  # fmt: skip
        accounts = {"a": idle, "b": {**idle, "outbox_bytes": 7}, "c": {**idle, "slowdown": 4.0}}
        found = {one.what.split(":")[0]: one.found for one in account_checks({"in_flight": 0, "accounts": accounts}) if
                 not one.ok}  # fmt: skip
        assert found == {"b": "outbox_bytes 7", "c": "slowdown 4.0"}


class TestRollback:
    """On the wire; what it does in namespaces: tests/wire/test_chaos.py."""

    def test_a_frozen_worker_that_died_keeps_no_other_from_going_on(self, tmp_path: Path) -> None:
        experiment = made(fault("lost_site", 100, how="frozen"))
        testbed = wire.Testbed(StateDir(tmp_path), experiment.resolved(), 1)
        troubles = wire.Troubles(testbed, testbed.scenario, experiment, Journal(experiment, "wire", "prfaas", 1))
        went_on = []

        class Supervisor:
            """prfaas-0 is dead, and nobody has started it again."""

            def post(self, path: str, body: dict[str, str]) -> None:
                if body["name"] == "prfaas-0" and body["signal"] == "CONT":
                    raise TestbedError("prfaas-0 was ended by SIGKILL; it cannot be signalled")
                if body["signal"] == "CONT":
                    went_on.append(body["name"])

            def get(self, path: str) -> dict[str, list[Any]]:
                return {"processes": []}

        troubles._supervisor = Supervisor()  # type: ignore[assignment]
        troubles._signal(["prfaas-0", "prfaas-1"], "STOP")
        troubles._undo()
        assert went_on == ["prfaas-1"]


class TestVirtual:
    """Experiments in virtual time: every fault has its effect, heals, and leaves nothing behind."""

    def test_every_shipped_experiment_holds_under_prfaas_and_rolls_back(self) -> None:
        for experiment in experiments.suite("virtual"):
            _, journal = run(experiment)
            assert (experiment.name, journal.verdict["reasons"], journal.left_behind) == (experiment.name, [], [])
            assert journal.exit_code == 0

    @pytest.mark.parametrize(
        ("name", "policy", "broken"),
        [
            ("link-dip", "static", "during: ttft_p90_s"),
            ("link-dip", "naive", "during: goodput"),
            ("lost-site", "static", "after: goodput"),
            ("outage", "static", "after: goodput"),
            ("killed-workers", "naive", "during: goodput"),
        ],
    )
    def test_where_others_fail(self, name: str, policy: str, broken: str) -> None:
        _, journal = run(experiments.load(name), policy)
        assert journal.verdict["status"] == "broken"
        assert any(reason.startswith(broken) for reason in journal.verdict["reasons"])
        assert journal.clean

    def test_a_dead_worker_serves_nobody_until_it_is_back_and_its_requests_are_tried_elsewhere(self) -> None:
        table, journal = run(made(fault("killed_worker", 100, 60, node="prfaas-1")))
        meanwhile = table[(table["prefill_start_s"] > 100) & (table["prefill_start_s"] < 160)]
        assert "prfaas-1" not in set(meanwhile["prefill_node"])
        assert "prfaas-1" in set(table.loc[table["prefill_start_s"] > 160, "prefill_node"])
        assert set(table["status"]) == {"ok"}
        assert table["attempts"].max() == 2
        assert journal.clean

    def test_a_frozen_worker_says_nothing_until_it_goes_on(self) -> None:
        table, journal = run(made(fault("frozen_worker", 100, 2, node="pd-d-0")))
        mine = table[table["decode_node"] == "pd-d-0"]
        assert not ((mine["landed_s"] > 100) & (mine["landed_s"] < 102)).any()
        assert set(table["status"]) == {"ok"}
        assert table["attempts"].max() == 1  # two seconds are too short to be missed
        assert journal.clean

    def test_a_node_that_is_frozen_for_longer_is_silent_and_comes_back(self) -> None:
        table, journal = run(made(fault("frozen_worker", 100, 30, node="prfaas-0")))
        started = table.loc[table["prefill_node"] == "prfaas-0", "prefill_start_s"]
        assert not ((started > 105) & (started < 130)).any()
        assert (started > 135).any()
        assert journal.clean

    def test_a_slow_worker_is_slow_for_what_begins_meanwhile(self) -> None:
        table, _ = run(made(fault("slow_worker", 100, 60, node="pd-p-0", factor=5)))
        mine = table[table["prefill_node"] == "pd-p-0"]
        stretch = (mine["prefill_end_s"] - mine["prefill_start_s"]) / mine["prefill_cost_s"]
        inside = (mine["prefill_start_s"] >= 100) & (mine["prefill_start_s"] < 160)
        assert stretch[inside].to_numpy() == pytest.approx(5)
        assert stretch[~inside].to_numpy() == pytest.approx(1)

    def test_nothing_lands_where_the_room_is_taken(self) -> None:
        table, journal = run(made(fault("landing_full", 100, 20, node="pd-d-1")))
        landed = table.loc[table["decode_node"] == "pd-d-1", "landed_s"]
        begun = 105  # what was granted before may still land
        assert not ((landed > begun) & (landed < 120)).any()
        assert (landed > 120).any()
        assert journal.clean

    def test_nothing_crosses_in_an_outage(self) -> None:
        table, _ = run(made(fault("outage", 100, 30)), "naive")
        remote = table[table["prefill_site"] == "prfaas"]
        assert not ((remote["landed_s"] > 100.1) & (remote["landed_s"] < 130)).any()

    def test_a_spike_delays_what_crosses_and_no_message_overtakes_another(self) -> None:
        table, journal = run(made(fault("delay_spike", 100, 50, delay_s=1.0)), "naive")
        late = (table["landed_s"] - table["prefill_end_s"])[table["prefill_site"] == "prfaas"]
        inside = (table["prefill_end_s"] > 101) & (table["prefill_end_s"] < 149)
        assert late[inside].min() >= 1.0
        assert late[~inside].min() < 0.2
        assert journal.clean

    def test_clients_that_leave_are_counted_apart(self) -> None:
        table, journal = run(made(fault("clients_leave", 100, None, fraction=0.5)))
        gone = table[table["error"] == "client_gone"]
        assert len(gone) > 3
        assert set(gone["ended_s"]) == {100.0}
        assert journal.windows["during"]["values"]["left"] == len(gone)
        assert journal.clean

    def test_a_seed_gives_the_same_run_again(self) -> None:
        experiment = made(fault("lost_site", 100, 20), fault("clients_leave", 110, None, fraction=0.5))
        pd.testing.assert_frame_equal(run(experiment)[0], run(experiment)[0])


def test_a_suite_is_judged_by_its_first_policy_and_shows_the_others(tmp_path: Path) -> None:
    words = ["chaos", "outage", "--policy", "prfaas,static", "--json", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert {run["policy"]: run["verdict"]["status"] for run in told["runs"]} == {"prfaas": "passed", "static": "broken"}
    kept = json.loads((tmp_path / "out" / "outage" / "static" / "journal.json").read_text())
    assert kept == told["runs"][1]
    words = ["chaos", "outage", "--policy", "static", "--out", str(tmp_path / "static")]
    assert CliRunner().invoke(app, words).exit_code == 1


def test_an_oracle_cannot_be_told_of_faults() -> None:
    with pytest.raises(ScenarioError, match="told the link's future"):
        virtual.refuse_future("oracle")


def test_an_experiment_leaves_the_scenario_it_is_based_on_alone() -> None:
    experiment = experiments.load("lost-site")
    assert experiment.resolved(7) == SCENARIO.model_copy(update={"seed": 7})
