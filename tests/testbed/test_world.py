"""Virtual time when things change: roles, outages of the link, limits. Nothing is lost, nothing is left behind."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from testbed.assemble import build_workload, policy_setup, workload_lengths
from testbed.control import Change, Record
from testbed.link_schedule import link_steps
from testbed.report.collect import Collector
from testbed.report.little import littles_law
from testbed.scenario import load
from testbed.scheduler.api import Action, SetRole, SystemView
from testbed.scheduler.baselines import Static
from testbed.scheduler.prfaas import Prfaas
from testbed.simulate import simulate
from testbed.world import World

LIVELY = ["telemetry_s=1", "scheduler.tick_s=1", "workload.duration_s=600", "workload.warmup_s=0"]
CUT_S, BACK_S = 200.0, 320.0


class Turns(Static):
    """The static policy, which changes the roles of nodes at given times: (model second, node, role)."""

    def __init__(self, *turns: tuple[float, str, Any]) -> None:
        self.turns = list(turns)

    def tick(self, view: SystemView) -> Sequence[Action]:
        if self.turns and view.now_s >= self.turns[0][0]:
            _, node, role = self.turns.pop(0)
            return [SetRole(node, role, "asked for")]
        return ()


class Fails(Static):
    """The static policy, whose look around fails."""

    def tick(self, view: SystemView) -> Sequence[Action]:
        raise RuntimeError("no")


class Run:
    """A scenario under a policy, run to its end. crossed: when control heard of the remote site, and when its orders
    went there, model seconds."""

    def __init__(
        self,
        policy: Any,
        name: str,
        sets: Sequence[str],
        steps: Sequence[tuple[float, float]] = (),
        parameters: Mapping[str, float] | None = None,
    ) -> None:
        scenario = load(name, [*LIVELY, *sets]).only(None)
        deployment = scenario.deployments[0]
        trace, _ = build_workload(scenario, deployment)
        policy.start(policy_setup(scenario, deployment, workload_lengths(scenario, trace), dict(parameters or {})))
        self.scenario, self.policy, self.offered = scenario, policy, len(trace.requests)
        self.records: list[Record] = []
        self.collect = Collector()
        self.world = World(
            scenario, deployment, policy, trace.requests, self.on_end, steps=[*link_steps(scenario), *steps]
        )
        self.control = self.world.control
        self.heard: list[float] = []
        handle = self.control.handle

        def listening(now_s: float, event: Any) -> Any:
            if getattr(event, "node", "").startswith("prfaas"):
                self.heard.append(now_s)
            return handle(now_s, event)

        self.control.handle = listening  # type: ignore[method-assign]
        self.world.run()

    def on_end(self, record: Record) -> None:
        self.records.append(record)
        self.collect(record)

    @property
    def rows(self) -> pd.DataFrame:
        return self.collect.table(warmup_s=0.0, duration_s=self.scenario.workload.duration_s)

    def changes(self, kind: str) -> list[Change]:
        return [change for change in self.control.changes if change.kind == kind]

    def remote_share(self, start_s: float, end_s: float) -> float:
        """Of the requests that came then."""
        sites = Counter(r.prefill_site for r in self.records if start_s <= r.arrive_s < end_s)
        return sites["prfaas"] / sites.total()

    def assert_all_served(self) -> None:
        assert Counter(record.status for record in self.records) == {"ok": self.offered}

    def assert_everything_free(self) -> None:
        control = self.control
        assert not control.live
        assert not control.busy
        assert control.waiting == 0
        for node in control.view.nodes.values():
            counted = (node.queued_requests, node.queued_tokens, node.assigned_requests, node.decoding_requests)
            assert (node.name, counted, node.queued_s) == (node.name, (0, 0, 0, 0), 0.0)
        for name, machine in self.world.machines.items():
            assert machine.next_s() is None, name
            assert (machine.queued_requests, machine.running_requests(math.inf)) == (0, 0), name
            if isinstance(machine, PrefillInstance):
                assert (machine.outbox_used, machine.queued_tokens) == (0, 0), name
            else:
                assert (machine.landing_used, machine.waiting_grants) == (0, 0), name
        assert self.world.link.idle


SETS = ("reload_s=60", "workload.load_fraction=0.6")


@pytest.fixture(scope="module")
def turned() -> Run:
    return Run(Turns((100.0, "pd-p-2", "decode"), (300.0, "pd-d-0", "prefill")), "paper", SETS)


class TestConversion:
    """A node drains, reloads, joins in its new role; nothing is lost on the way."""

    def test_nothing_is_lost_or_tried_again(self, turned: Run) -> None:
        turned.assert_all_served()
        assert {record.attempts for record in turned.records} == {1}

    def test_nothing_is_left_behind(self, turned: Run) -> None:
        turned.assert_everything_free()

    def test_the_machines_are_of_the_new_roles(self, turned: Run) -> None:
        assert isinstance(turned.world.machines["pd-p-2"], DecodeInstance)
        assert isinstance(turned.world.machines["pd-d-0"], PrefillInstance)

    @pytest.mark.parametrize("node", ["pd-p-2", "pd-d-0"])
    def test_from_the_change_until_it_joins_it_gets_nothing(self, turned: Run, node: str) -> None:
        (change,) = [c for c in turned.changes("role") if c.node == node]
        (joined,) = [c for c in turned.changes("joined") if c.node == node]
        routed = [r.route_s for r in turned.records if node in (r.prefill_node, r.decode_node)]
        assert not [at_s for at_s in routed if change.t_s <= at_s < joined.t_s]
        assert min(routed) < change.t_s
        assert max(routed) > joined.t_s

    @pytest.mark.parametrize("node", ["pd-p-2", "pd-d-0"])
    def test_it_joins_when_it_has_drained_and_reloaded(self, turned: Run, node: str) -> None:
        (change,) = [c for c in turned.changes("role") if c.node == node]
        (joined,) = [c for c in turned.changes("joined") if c.node == node]
        drained = [
            record.finished_s if record.decode_node == node else record.admitted_s
            for record in turned.records
            if node in (record.prefill_node, record.decode_node) and record.route_s <= change.t_s
        ]
        started_s = max(change.t_s, *drained)
        assert started_s + 60 <= joined.t_s <= started_s + 60 + 2  # told at the next look

    def test_its_new_role_is_what_it_does_then(self, turned: Run) -> None:
        (joined,) = [c for c in turned.changes("joined") if c.node == "pd-p-2"]
        late = [record for record in turned.records if record.route_s >= joined.t_s]
        assert "pd-p-2" in {record.decode_node for record in late}
        assert "pd-p-2" not in {record.prefill_node for record in late}

    def test_littles_law_holds_across_it(self, turned: Run) -> None:
        assert littles_law(turned.world.passages, turned.rows, turned.world.now_s)["holds"] is True

    def test_the_egress_that_control_counts_is_what_crossed(self, turned: Run) -> None:
        """Up to what landed after the last account."""
        crossed = sum(record.kv_bytes for record in turned.records if record.prefill_site == "prfaas")
        assert 0.97 * crossed < turned.control.view.egress_bytes <= crossed + 100

    def test_with_caches_and_fetches_nothing_is_lost_either(self) -> None:
        sessions = "workload.sessions={turns_mean: 6, think_s: 20, max_input_tokens: 131072}"
        run = Run(
            Turns((60.0, "pd-p-1", "decode"), (200.0, "pd-p-1", "prefill"), (320.0, "pd-d-1", "prefill")),
            "paper",
            ["reload_s=10", "workload.load_fraction=0.5", "cache_bytes=64000000000", sessions, "link.rate_bps=20gbps"],
        )
        assert len(run.changes("joined")) == 3
        run.assert_all_served()
        run.assert_everything_free()

    def test_what_is_asked_for_after_the_last_request_still_ends(self) -> None:
        run = Run(Turns((599.0, "pd-p-2", "decode")), "paper", ["reload_s=300", "workload.load_fraction=0.3"])
        assert len(run.changes("joined")) == 1
        run.assert_everything_free()


CUT = [(CUT_S, 0.0), (BACK_S, 100e9)]
BUSY = ["workload.rate_rps=1.4", "workload.load_fraction=null"]


@pytest.fixture(scope="module")
def cut() -> Run:
    return Run(Prfaas(), "paper", BUSY, CUT)


class TestOutage:
    """The link is cut for two minutes: everything local, nothing lost, and back without a stampede."""

    def test_no_request_is_lost(self, cut: Run) -> None:
        cut.assert_all_served()

    def test_nothing_is_left_behind(self, cut: Run) -> None:
        cut.assert_everything_free()

    def test_what_was_on_its_way_is_tried_once_more(self, cut: Run) -> None:
        again = [record for record in cut.records if record.attempts > 1]
        assert again
        assert {record.attempts for record in again} == {2}
        assert {record.prefill_site for record in again} == {"pd"}
        assert all(CUT_S - 60 < record.arrive_s < CUT_S + 5 for record in again)

    def test_meanwhile_everything_is_local(self, cut: Run) -> None:
        assert cut.remote_share(CUT_S + 5, BACK_S) == 0

    def test_nothing_is_heard_across_and_all_of_it_afterwards(self, cut: Run) -> None:
        assert not [at_s for at_s in cut.heard if CUT_S <= at_s < BACK_S]
        held = Counter(cut.heard)[BACK_S]
        assert held >= 4 * (BACK_S - CUT_S)  # the accounts of four nodes, every second

    def test_the_site_falls_silent_and_is_heard_of_again_once(self, cut: Run) -> None:
        told = [(c.after, c.t_s) for c in cut.changes("node") if c.node == "prfaas-0"]
        assert told == [("silent", CUT_S + 3), ("up", BACK_S)]

    def test_once_what_had_piled_up_is_done_the_site_is_used_as_before(self, cut: Run) -> None:
        before, after = cut.remote_share(0, CUT_S), cut.remote_share(BACK_S + 200, 600)
        assert after == pytest.approx(before, abs=0.12)

    def test_by_t_alone_it_takes_its_share_again_gradually(self) -> None:
        run = Run(Prfaas(), "paper", BUSY, CUT, {"relief_s": 1e9})
        first, later = run.remote_share(BACK_S, BACK_S + 12), run.remote_share(BACK_S + 40, 600)
        assert first < later / 2
        assert later == pytest.approx(run.remote_share(0, CUT_S), abs=0.12)

    def test_the_wait_of_those_that_come_back_first_is_no_longer_than_usual(self, cut: Run) -> None:
        def longest_s(start_s: float, end_s: float) -> float:
            mine = [r for r in cut.records if start_s <= r.arrive_s < end_s and r.prefill_site == "prfaas"]
            return max(r.prefill_start_s - r.route_s for r in mine)

        assert longest_s(BACK_S, BACK_S + 60) <= longest_s(0, CUT_S)

    def test_no_role_changes(self, cut: Run) -> None:
        assert cut.changes("role") == []

    def test_littles_law_says_nothing_of_requests_that_were_tried_again(self, cut: Run) -> None:
        assert littles_law(cut.world.passages, cut.rows, cut.world.now_s)["holds"] is None

    def test_a_cut_too_short_to_be_noticed_only_delays(self) -> None:
        run = Run(Prfaas(), "paper", ["workload.load_fraction=0.4"], [(200.0, 0.0), (202.0, 100e9)])
        run.assert_all_served()
        assert {record.attempts for record in run.records} == {1}

    @pytest.mark.parametrize("turn", [(CUT_S - 1, "pd-d-1", "prefill"), (CUT_S + 30, "pd-p-1", "decode")])
    def test_a_node_may_change_its_role_meanwhile(self, turn: tuple[float, str, Any]) -> None:
        """What the remote site had said to its former machine comes when nobody of that name expects it."""
        run = Run(Turns(turn), "paper", ["workload.load_fraction=0.5", "reload_s=20"], [(CUT_S, 0.0), (BACK_S, 100e9)])
        assert len(run.changes("joined")) == 1
        run.assert_all_served()
        run.assert_everything_free()

    def test_again_and_again(self) -> None:
        steps = [(at_s, 0.0 if i % 2 == 0 else 20e9) for i, at_s in enumerate(range(50, 590, 30))]
        run = Run(Prfaas(), "paper", ["workload.load_fraction=0.4"], [(float(at_s), bps) for at_s, bps in steps])
        run.assert_all_served()
        run.assert_everything_free()


@pytest.fixture(scope="module")
def slow() -> Run:
    phases = (
        "phases=[{name: a, duration_s: 200}, {name: slow, duration_s: 200, link_rate_bps: 50mbit}, "
        "{name: b, duration_s: 600}]"
    )
    sets = ["workload.rate_rps=1.4", "workload.load_fraction=null", "workload.duration_s=1000", phases]
    return Run(Prfaas(), "paper", sets)


class TestSlowLink:
    """So slow that nothing is worth sending: then nothing shows when it is fast again, and it must be tried."""

    def test_no_request_is_lost(self, slow: Run) -> None:
        slow.assert_all_served()
        slow.assert_everything_free()

    def test_meanwhile_hardly_anything_is_sent(self, slow: Run) -> None:
        assert slow.remote_share(230, 400) < 0.03

    def test_afterwards_the_site_is_used_as_before(self, slow: Run) -> None:
        assert slow.remote_share(520, 1000) == pytest.approx(slow.remote_share(0, 200), abs=0.1)


class TestLimits:
    def test_a_deadline_ends_what_waits_and_frees_it(self) -> None:
        sets = ["workload.load_fraction=2", "workload.duration_s=300", "limits.deadline_s=20"]
        run = Run(Static(), "paper", sets)
        late = [record for record in run.records if record.status == "failed"]
        assert {record.error for record in late} == {"deadline"}
        assert all(record.admitted_s - record.arrive_s <= 20 for record in run.records if record.status == "ok")
        assert len(late) + sum(record.status == "ok" for record in run.records) == run.offered
        run.assert_everything_free()

    def test_more_than_may_wait_is_turned_away_and_the_rest_served(self) -> None:
        sets = ["workload.load_fraction=2", "workload.duration_s=300", "limits.waiting_requests=10"]
        run = Run(Static(), "paper", sets)
        assert {record.error for record in run.records if record.status == "failed"} == {"overloaded"}
        assert Counter(record.status for record in run.records)["ok"] > run.offered / 3
        run.assert_everything_free()

    def test_a_policy_whose_look_around_fails_serves_all_the_same(self) -> None:
        run = Run(Fails(), "paper", ["workload.load_fraction=0.3", "workload.duration_s=100"])
        run.assert_all_served()
        assert run.control.policy_errors["tick: RuntimeError"] >= 100

    def test_a_large_fleet(self) -> None:
        fleet = "deployments.prfaas-pd.fleet={n_prfaas: 64, n_p: 24, n_d: 40}"
        run = Run(Prfaas(), "paper", [fleet, "workload.load_fraction=0.6", "workload.duration_s=60"])
        run.assert_all_served()
        run.assert_everything_free()
        assert run.control.policy_errors == {}


# same seed, same bytes
CHANGING = [
    "telemetry_s=1",
    "scheduler.tick_s=1",
    "reload_s=20",
    "cache_bytes=64000000000",
    "deployments.prfaas-pd.policy={name: prfaas, "
    "parameters: {plan_s: 20, role_dwell_s: 60, profile_s: 30, patience_s: 30}}",
    "phases.before.duration_s=300",
    "phases.shift.duration_s=200",
    "phases.after.duration_s=500",
    "phases.after.link_rate_bps=8gbps",
]
RUN = f"""
import sys
from pathlib import Path
from testbed.simulate import simulate, write
write(simulate("mix-shift", sets={CHANGING!r}), Path(sys.argv[1]), "csv")
"""


def test_with_role_changes_and_phases_a_seed_gives_the_same_bytes_under_every_hash_seed(tmp_path: Path) -> None:
    children = []
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        children.append(subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / hash_seed)], env=environment))
    assert [child.wait() for child in children] == [0, 0]
    for file in ("summary.json", "requests.csv", "timeline.csv"):
        assert len({(tmp_path / seed / file).read_bytes() for seed in ("0", "4242")}) == 1, file
    assert "joined" in (tmp_path / "0" / "timeline.csv").read_text()


def test_with_role_changes_and_phases_the_accounts_agree() -> None:
    result = simulate("mix-shift", sets=CHANGING)
    assert result.summary["scheduler"]["role_changes"] > 0
    assert result.summary["littles_law"]["holds"] is True
    assert result.summary["verdict"] == {"status": "valid", "reasons": []}
