"""What a scheduler changed, against the optimum, and the figures of each phase: against hand-computed inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from testbed.report.changes import Target, changes_of, count, mean_ratio, near_fraction, settle_s, thresholds
from testbed.report.phase_table import phase_cells
from testbed.report.phases import phase_figures, scheduler_figures
from testbed.report.rows import PARTS, REQUEST_COLUMNS
from testbed.report.window import Targets

SLO = Targets(6.0, 0.025)


def moved(*steps: tuple[float, float | None, float | None]) -> list[dict[str, Any]]:
    """Changes of the threshold: (t_s, before, after)."""
    words = {"kind": "threshold", "node": "", "trigger": "because"}
    return [{"t_s": at_s, **words, "before": before, "after": after} for at_s, before, after in steps]


def role(at_s: float) -> dict[str, Any]:
    return {"t_s": at_s, "kind": "role", "node": "pd-d-0", "before": "decode", "after": "prefill", "trigger": "because"}


def optimum(name: str | None, start_s: float, end_s: float, tokens: float | None) -> dict[str, Any]:
    return {
        "name": name, "start_s": start_s, "end_s": end_s, "link_bps": 8e9, "offered_rps": 1.0,
        "threshold_tokens": tokens, "lambda_max_rps": 2.0, "bottleneck": "link", "best": {},
    }  # fmt: skip


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    """Requests that were scheduled at sched_s and had their first token ttft_s later."""
    made = []
    for row in rows:
        life = {"sched_s": 0.0, "ttft_s": 1.0, "done_s": row["sched_s"] + 2, "prefill_site": "pd", "status": "ok"}
        more = {"client_error": "", "kv_bytes": 1000, "tpot_s": 0.025, "e2e_s": 2.0, "route_s": row["sched_s"]}
        parts = dict.fromkeys((f"ttft_{part}_s" for part in PARTS), 0.0)
        made.append({**life, **more, **parts, "prefill_end_s": row["sched_s"], "landed_s": row["sched_s"] + 0.5, **row})
    return pd.DataFrame(made, columns=list(REQUEST_COLUMNS))


class TestAThresholdOverTime:
    def test_is_what_it_was_before_each_change(self) -> None:
        over_time = thresholds(moved((10, 100, 200), (20, 200, 50)), 50)
        assert over_time is not None
        assert [over_time.at(at_s) for at_s in (-5, 9.9, 10, 19, 20, 1e9)] == [100, 100, 200, 200, 50, 50]
        assert over_time.pieces(5, 15) == [(5, 10, 100), (10, 15, 200)]

    def test_that_never_changed_is_the_last_one(self) -> None:
        over_time = thresholds([role(3)], 70)
        assert over_time is not None
        assert over_time.pieces(0, 9) == [(0, 9, 70)]

    def test_of_a_policy_without_one_is_none(self) -> None:
        assert thresholds([], None) is None

    def test_that_json_has_no_word_for_is_infinite(self) -> None:
        over_time = thresholds(moved((10, None, 200)), 200)
        assert over_time is not None
        assert over_time.at(0) == math.inf

    def test_is_read_from_the_rows_where_nobody_kept_account(self) -> None:
        rows = table(*({"sched_s": at_s, "threshold_tokens": t} for at_s, t in ((0, 5), (2, 7), (1, 5), (3, 7))))
        (change,) = changes_of({}, rows)
        assert (change["t_s"], change["before"], change["after"]) == (2, 5, 7)
        assert changes_of({"changes": []}, rows) == []


class TestSettling:
    TARGET = Target(0, 100, 100.0)

    @pytest.mark.parametrize(
        ("changes", "settled_s"),
        [
            (moved((5, 90, 110)), 0),  # both within 10 %
            (moved((30, 111, 109)), 30),
            (moved((30, 100, 50), (40, 50, 100), (60, 100, 105)), 40),  # it left, and came back
            (moved((30, 100, 50)), None),  # it left for good
            (moved((100, 50, 100)), None),  # it came when all was over
            (moved((30, None, 100)), 30),
        ],
    )
    def test_is_from_the_start_to_when_it_stays_within_a_tenth(
        self, changes: list[dict[str, Any]], settled_s: float | None
    ) -> None:
        assert settle_s(thresholds(changes, None), [self.TARGET]) == settled_s

    def test_counts_from_the_phases_start(self) -> None:
        assert settle_s(thresholds(moved((130, 50, 100)), None), [Target(100, 200, 100.0)]) == 30

    def test_is_to_each_target_in_its_time(self) -> None:
        targets = [Target(0, 50, 100.0), Target(50, 100, 200.0)]
        assert settle_s(thresholds(moved((50, 100, 200)), None), targets) == 0
        assert settle_s(thresholds(moved((70, 100, 200)), None), targets) == 70

    @pytest.mark.parametrize("tokens", [None, 0.0])
    def test_is_none_where_there_is_no_choice(self, tokens: float | None) -> None:
        assert settle_s(thresholds([], 100), [Target(0, 100, tokens)]) is None

    def test_of_a_policy_without_a_threshold_is_none(self) -> None:
        assert settle_s(None, [self.TARGET]) is None


class TestNearness:
    def test_is_the_share_of_the_time_within_15_percent(self) -> None:
        over_time = thresholds(moved((25, 50, 115), (75, 115, 116)), None)
        assert near_fraction(over_time, Target(0, 100, 100.0)) == 0.5

    def test_of_no_time_is_none(self) -> None:
        assert near_fraction(thresholds([], 100), Target(10, 10, 100.0)) is None

    def test_the_mean_ratio_is_over_time_and_none_for_an_infinite_threshold(self) -> None:
        assert mean_ratio(thresholds(moved((25, 100, 200)), None), Target(0, 100, 100.0)) == pytest.approx(1.75)
        assert mean_ratio(thresholds(moved((25, None, 200)), None), Target(0, 100, 100.0)) is None


class TestTheSchedulersFigures:
    CHANGES = (*moved((30, 50, 95)), role(40), *moved((70, 95, 100), (85, 100, 105), (200, 105, 100)))

    def test_count_what_it_changed(self) -> None:
        found = scheduler_figures(self.CHANGES, 100.0, [optimum(None, 0, 120, 100.0)])
        assert (found["threshold_changes"], found["role_changes"]) == (4, 1)

    def test_say_how_soon_it_settled_and_how_calm_it_was_then(self) -> None:
        found = scheduler_figures(self.CHANGES, 100.0, [optimum(None, 0, 120, 100.0)])
        assert found["settle_s"] == 30
        assert found["changes_per_minute"] == 3 / 1.5  # those at 30, 70 and 85, in the 90 s up to 120
        assert found["threshold_over_optimum"] == 1

    def test_of_one_that_never_settled_have_no_pace(self) -> None:
        found = scheduler_figures([], 50.0, [optimum(None, 0, 120, 100.0)])
        assert (found["settle_s"], found["changes_per_minute"], found["threshold_over_optimum"]) == (None, None, 0.5)

    @pytest.mark.parametrize("present", [None, math.inf])
    def test_of_no_threshold_are_no_numbers(self, present: float | None) -> None:
        found = scheduler_figures([], present, [optimum(None, 0, 120, 100.0)])
        assert (found["settle_s"], found["threshold_over_optimum"]) == (None, None)

    def test_count_changes_of_a_kind_within_a_span(self) -> None:
        assert count(self.CHANGES, "threshold", 30, 85) == 2


class TestAPhasesFigures:
    OPTIMA = (optimum("a", 0, 10, 100.0), optimum("b", 10, 30, 200.0))

    @pytest.fixture
    def requests(self) -> pd.DataFrame:
        """Scheduled at 1, 9, 11 and 29: local, remote, remote (landed 4 s after its prefill), failed."""
        return table(
            {"sched_s": 1.0},
            {"sched_s": 9.0, "prefill_site": "prfaas", "ttft_s": 3.0, "done_s": 12.0, "landed_s": 9.5},
            {"sched_s": 11.0, "prefill_site": "prfaas", "prefill_end_s": 12.0, "landed_s": 16.0, "kv_bytes": 5000},
            {"sched_s": 29.0, "status": "failed", "ttft_s": np.nan, "done_s": np.nan},
        )

    def figures(self, requests: pd.DataFrame, *changes: dict[str, Any], warmup_s: float = 0) -> list[dict[str, Any]]:
        return phase_figures(requests, changes, 200.0, self.OPTIMA, warmup_s=warmup_s, slo=SLO)

    def test_are_of_the_requests_that_were_scheduled_in_it(self, requests: pd.DataFrame) -> None:
        a, b = self.figures(requests)
        assert (a["name"], a["start_s"], a["end_s"]) == ("a", 0, 10)
        assert a["requests"] == {"scheduled": 2, "completed": 2, "failed": 0}
        assert b["requests"] == {"scheduled": 2, "completed": 1, "failed": 1}
        assert (a["ttft_s"]["mean"], b["ttft_s"]["mean"]) == (2.0, 1.0)
        assert (a["offload_fraction"], b["offload_fraction"]) == (0.5, 0.5)
        assert (a["offered_rps"], b["offered_rps"]) == (2 / 10, 2 / 20)

    def test_but_throughput_and_egress_are_of_what_came_to_pass_in_it(self, requests: pd.DataFrame) -> None:
        a, b = self.figures(requests)
        assert (a["throughput_rps"], b["throughput_rps"]) == (1 / 10, 2 / 20)
        assert (a["egress_bps"], b["egress_bps"]) == (1000 * 8 / 10, 5000 * 8 / 20)

    def test_what_local_prefills_fetched_from_the_remote_site_is_egress_too(self) -> None:
        fetched = {"fetched_bytes": 700, "prefill_start_s": 3.0}
        requests = table(
            {"sched_s": 1.0, "prefill_site": "pd", "cache_site": "prfaas", **fetched},
            {"sched_s": 1.0, "prefill_site": "pd", "cache_site": "pd", **fetched},
            {"sched_s": 1.0, "prefill_site": "prfaas", "cache_site": "pd", "landed_s": 4.0, **fetched},
            {"sched_s": 1.0, "prefill_site": "pd", "cache_site": "prfaas", **fetched, "prefill_start_s": 12.0},
        )
        a, b = self.figures(requests)
        assert (a["egress_bps"], b["egress_bps"]) == ((1000 + 700) * 8 / 10, 700 * 8 / 20)

    def test_have_the_egress_wait_and_the_parts_by_route(self, requests: pd.DataFrame) -> None:
        _, b = self.figures(requests)
        assert b["egress_queue_s"]["p95"] == 4
        assert set(b["ttft_split_s"]) == {"overall", "prfaas", "pd"}
        assert b["ttft_split_s"]["pd"]["queue"]["mean"] is None  # the only local one failed

    def test_leave_out_the_warm_up(self, requests: pd.DataFrame) -> None:
        a, _ = self.figures(requests, warmup_s=5)
        assert a["requests"]["scheduled"] == 1
        assert a["offered_rps"] == 1 / 5

    def test_of_a_phase_within_the_warm_up_are_none(self, requests: pd.DataFrame) -> None:
        a, _ = self.figures(requests, warmup_s=15)
        assert (a["requests"]["scheduled"], a["offered_rps"], a["ttft_s"]["mean"]) == (0, None, None)

    def test_judge_its_threshold_by_its_own_optimum_in_its_own_time(self, requests: pd.DataFrame) -> None:
        a, b = self.figures(requests, *moved((14, 100, 190)), role(14))
        assert (a["threshold_tokens"], b["threshold_tokens"]) == (
            {"start": 100, "end": 100},
            {"start": 100, "end": 190},
        )
        assert (a["settle_s"], b["settle_s"]) == (0, 4)
        assert (a["threshold_changes"], b["threshold_changes"]) == (0, 1)
        assert (a["role_changes"], b["role_changes"]) == (0, 1)
        assert b["threshold_over_optimum"] == {
            "mean": pytest.approx((4 * 0.5 + 16 * 0.95) / 20),
            "end": 0.95,
            "near_fraction": 0.8,
            "near_fraction_later": None,  # it lasts no longer than the 20 s after which one could know
        }

    def test_have_the_nearness_after_the_first_20_s_beside(self, requests: pd.DataFrame) -> None:
        optima = [optimum("a", 0, 60, 100.0)]
        changes = moved((30, 50, 100))
        (a,) = phase_figures(requests, changes, 100.0, optima, warmup_s=0, slo=SLO)
        assert a["threshold_over_optimum"]["near_fraction"] == 0.5
        assert a["threshold_over_optimum"]["near_fraction_later"] == 0.75

    def test_have_the_closed_forms_beside_them(self, requests: pd.DataFrame) -> None:
        a, _ = self.figures(requests)
        assert (a["closed_form"]["threshold_tokens"], a["closed_form"]["lambda_max_rps"]) == (100, 2)

    def test_without_phases_there_are_none(self, requests: pd.DataFrame) -> None:
        whole = [optimum(None, 0, 30, 100.0)]
        assert phase_figures(requests, [], 100.0, whole, warmup_s=0, slo=SLO) == []

    def test_are_shown_with_a_dash_for_what_there_is_not(self, requests: pd.DataFrame) -> None:
        a, b = (phase_cells(one) for one in self.figures(requests, warmup_s=15))
        assert a["TTFT mean, P90, s"] == "-, -"
        assert (b["phase"], b["from .. to, s"], b["link, Gbps"], b["best t"]) == ("b", "10 .. 30", "8", "200")
