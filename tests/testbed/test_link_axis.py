"""The link and the load on one axis: hand-made runs, a bin at a time; and real ones in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from netem.fluid import TCP_EFFICIENCY
from testbed.report import steps
from testbed.report.link_axis import AXIS_COLUMNS, BINS, link_axis
from testbed.report.steps import Steps
from testbed.runs import RunError
from testbed.simulate import Result, simulate, write
from tests.testbed.link_runs import NARROW, WIDE, axis, carrying, link, moved, requests, samples

DROP = ["phases.0.duration_s=60", "phases.1.duration_s=60", "phases.2.duration_s=60", "workload.warmup_s=0"]


class TestStepsInBins:
    EDGES = np.array([0.0, 1.0, 2.0, 3.0])

    def test_a_mean_is_exact_wherever_the_steps_are(self) -> None:
        made = Steps(8.0, [(0.25, 4.0), (2.0, 0.0)]).means(self.EDGES)
        assert made.tolist() == pytest.approx([0.25 * 8 + 0.75 * 4, 4.0, 0.0])

    def test_a_step_holds_from_its_very_time_on(self) -> None:
        assert Steps(1.0, [(2.0, 5.0)]).at(np.array([1.999, 2.0])).tolist() == [1.0, 5.0]

    def test_quantiles_are_numpys_in_each_bin(self) -> None:
        rng = np.random.default_rng(1)
        values, bins = rng.normal(size=500), rng.integers(-1, 7, 500)
        made = steps.quantiles(values, bins, 8, (0.5, 0.9))
        for i in range(7):
            assert [one[i] for one in made] == pytest.approx(np.quantile(values[bins == i], [0.5, 0.9]))
        assert np.isnan(made[0][7])

    def test_what_lies_outside_is_in_no_bin(self) -> None:
        assert steps.bin_of(np.array([-0.1, 0.0, 2.99, 3.0, np.nan]), self.EDGES).tolist() == [-1, 0, 2, -1, -1]


class TestTheLink:
    def test_is_on_even_bins_no_finer_than_its_samples(self) -> None:
        table = axis().table
        assert tuple(table.columns) == AXIS_COLUMNS
        assert set((table["end_s"] - table["t_s"]).round(9)) == {1.0}
        assert table["end_s"].max() == 60  # a request is a second late, and ends within the last bin

    def test_a_late_step_is_asked_when_it_was_due_and_applied_when_the_kernel_had_it(self) -> None:
        made = axis(link(20.5, WIDE, NARROW, late_s=0.5))
        asked, applied = made.of("to_pd", "asked_bps"), made.of("to_pd", "applied_bps")
        assert (asked[19], asked[20]) == (WIDE, NARROW)
        assert (applied[19], applied[20], applied[21]) == (WIDE, (WIDE + NARROW) / 2, NARROW)

    def test_goodput_is_what_crossed_in_the_bin(self) -> None:
        made = axis(link=samples(**carrying(0.5)))
        goodput = made.of("to_pd", "goodput_bps")
        assert (goodput[10], goodput[30]) == pytest.approx((WIDE * TCP_EFFICIENCY / 2, NARROW * TCP_EFFICIENCY / 2))
        assert made.of("to_pd", "wire_bps")[30] == pytest.approx(NARROW / 2)

    def test_the_queue_delay_is_of_all_that_waits_at_the_rate_of_that_moment(self) -> None:
        waits = samples(unsent_bytes=30_000_000, backlog_bytes=10_000_000)
        queue_s = axis(link=waits).of("to_pd", "queue_s")
        assert queue_s[10] == pytest.approx(40e6 * 8 / (WIDE * TCP_EFFICIENCY))
        assert queue_s[30] == pytest.approx(40e6 * 8 / (NARROW * TCP_EFFICIENCY))

    def test_counters_are_told_by_the_bin_they_grew_in(self) -> None:
        made = axis(link=samples(retransmits=lambda t_s: np.where(t_s >= 30, 12, 5)))
        again = made.of("to_pd", "retransmits")
        assert again[30] == 7
        assert again.sum() == 7

    def test_an_outage_is_a_rate_of_nought_and_has_its_place(self) -> None:
        made = axis([*link(20, WIDE, 0.0, "schedule: stall"), *link(22.5, 0.0, WIDE)], samples(rate_asked_bps=WIDE))
        assert made.outages == [(20.0, 22.5, "to_pd"), (20.0, 22.5, "to_prfaas")]
        assert made.of("to_pd", "outage_s")[19:24].tolist() == pytest.approx([0, 1, 1, 0.5, 0])

    def test_what_somebody_sets_by_hand_is_seen_in_the_samples(self) -> None:
        by_hand = samples(rate_asked_bps=lambda t_s: np.where((t_s >= 30) & (t_s < 50), 1e9, WIDE))
        made = axis([], by_hand)
        asked, applied = made.of("to_pd", "asked_bps"), made.of("to_pd", "applied_bps")
        assert applied.tolist() == asked.tolist()
        assert (applied[29], applied[31], applied[51]) == (WIDE, 1e9, WIDE)

    def test_a_sample_beside_a_step_does_not_count(self) -> None:
        stale = samples(rate_asked_bps=lambda t_s: np.where((t_s > 20) & (t_s <= 40), NARROW, WIDE))  # a moment behind
        assert set(axis(link=stale).of("to_pd", "applied_bps")) == {WIDE, NARROW}

    def test_what_was_not_recorded_is_not_nought(self) -> None:
        made = axis(link=samples().drop(columns=["kv_bytes", "unsent_bytes", "retransmits", "drops", "backlog_bytes"]))
        for column in ("goodput_bps", "queue_s", "retransmits", "drops", "line_held"):
            assert np.isnan(made.of("to_pd", column)).all(), column


class TestTheSchedulerAndTheLoad:
    def test_the_threshold_is_the_one_in_force_at_a_bins_end_beside_the_phases_best(self) -> None:
        table = axis([moved(23.5, 4000.0, 9000.0), moved(24.0, 9000.0, 9100.0)]).table
        assert table["threshold_tokens"][22:25].tolist() == [4000, 9000, 9100]
        assert table["optimum_tokens"][[19, 20, 40]].tolist() == [4000, 9000, 4000]

    def test_a_threshold_that_never_moves_is_the_one_in_the_end(self) -> None:
        assert set(axis([]).table["threshold_tokens"]) == {9000.0}

    def test_the_regime_is_the_schedulers_word(self) -> None:
        table = axis([moved(5.5, "abundant", "scarce", "regime")]).table  # type: ignore[arg-type]
        assert table["regime"][4:6].tolist() == ["abundant", "scarce"]

    def test_ttft_is_of_the_requests_that_came_in_the_bin(self) -> None:
        rows = requests(transfer=np.arange(60.0))
        table = axis(rows=rows).table
        assert table["arrivals"][:60].tolist() == [1] * 60
        assert table["ttft_p90_s"][30] == 31
        assert table["ttft_transfer_s"][30] == 30

    def test_a_request_that_failed_is_counted_and_has_no_ttft(self) -> None:
        rows = requests()
        rows.loc[30, "status"] = "failed"
        table = axis(rows=rows).table
        assert (table["arrivals"][30], table["failed"][30]) == (1, 1)
        assert np.isnan(table["ttft_p50_s"][30])

    def test_requests_are_somewhere_until_they_leave(self) -> None:
        table = axis(rows=requests(queue=2.5, prefill=3.0)).table
        assert table["waiting_pd"][20] + table["waiting_prfaas"][20] == 2
        assert table["prefilling"][20] == 3
        assert table["decoding"][40] == 10

    def test_a_load_without_a_request_has_an_axis_too(self) -> None:
        table = axis(rows=requests(0)).table
        assert table["arrivals"].sum() == 0
        assert len(table) == 60


@pytest.fixture(scope="module")
def drop() -> Result:
    """A short link-drop: 100 Gbps, from 60 s on 5, from 120 s on 100 again."""
    return simulate("link-drop", sets=DROP)


class TestOfAResultsFolder:
    def test_is_what_the_run_had(self, drop: Result, tmp_path: Path) -> None:
        write(drop, tmp_path / "run", "csv")
        made, kept = link_axis(tmp_path / "run"), pd.read_csv(tmp_path / "run" / "link.csv")
        assert tuple(kept.columns) == AXIS_COLUMNS
        numbers = [column for column in AXIS_COLUMNS if column != "regime"]
        assert np.allclose(made.table[numbers], kept[numbers], rtol=1e-6, atol=1e-5, equal_nan=True)
        assert made.table["regime"].tolist() == kept["regime"].tolist()
        assert kept["to_pd_retransmits"].isna().all()  # virtual time has none: not 0
        assert len(kept) <= BINS

    def test_of_a_run_without_rows_is_its_own_link_csv(self, drop: Result, tmp_path: Path) -> None:
        write(drop, tmp_path / "run", "none")
        made = link_axis(tmp_path / "run")
        assert made.answered is None
        assert made.table["arrivals"].sum() == len(drop.requests)
        (tmp_path / "run" / "link.csv").unlink()
        with pytest.raises(RunError, match=r"link\.csv: cannot be read .* --requests csv"):
            link_axis(tmp_path / "run")

    def test_without_its_timeline_is_refused(self, drop: Result, tmp_path: Path) -> None:
        write(drop, tmp_path / "run", "csv")
        (tmp_path / "run" / "timeline.csv").unlink()
        with pytest.raises(RunError, match=r"timeline\.csv: is not there"):
            link_axis(tmp_path / "run")

    def test_from_before_there_were_samples_still_has_its_rates_and_ttft(self, drop: Result, tmp_path: Path) -> None:
        write(drop, tmp_path / "run", "csv")
        timeline = pd.read_csv(tmp_path / "run" / "timeline.csv")
        old = [column for column in timeline.columns if column not in ("kv_bytes", "unsent_bytes", "late_s", "outage")]
        timeline.loc[timeline["event"].notna(), old].to_csv(tmp_path / "run" / "timeline.csv", index=False)
        made = link_axis(tmp_path / "run")
        middle = made.table.index[made.table["t_s"] == 90][0]
        assert made.of("to_pd", "applied_bps")[middle] == 5e9
        assert np.isnan(made.of("to_pd", "goodput_bps")).all()
        assert made.table["ttft_p50_s"].notna().any()

    def test_an_experiments_faults_are_read_from_its_journal(self, drop: Result, tmp_path: Path) -> None:
        write(drop, tmp_path / "run", "csv")
        deeds = [("pd-d-0 is killed", 10.0), ("the link falls", 20.0), ("pd-d-0 is killed: healed", 15.5)]
        journal = [f'{{"what": "{what}", "true_s": {at_s}}}' for what, at_s in sorted(deeds, key=lambda deed: deed[1])]
        (tmp_path / "run" / "journal.json").write_text(f'{{"journal": [{", ".join(journal)}]}}')
        found = link_axis(tmp_path / "run").faults
        assert found == [(10.0, 15.5, "pd-d-0 is killed"), (20.0, 20.0, "the link falls")]
