"""What the link doctor says of hand-made runs: one thing is wrong with each, or none. And where its words go."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.cli import main
from testbed.report.link_doctor import Diagnosis, diagnose
from testbed.report.link_page import page
from testbed.report.link_words import doctor_line, doctor_lines
from testbed.simulate import simulate, write
from tests.testbed.link_runs import EVENTS, NARROW, WIDE, axis, carrying, link, moved, requests, samples, summary


def kinds(told: Diagnosis) -> list[tuple[str, str]]:
    return [(one.level, one.kind) for one in told.findings]


def text_of(told: Diagnosis, kind: str) -> str:
    (one,) = [finding.text for finding in told.findings if finding.kind == kind]
    return one


class TestWhatLimitedWhat:
    def test_a_link_that_is_full_limits(self) -> None:
        rows = requests(transfer=np.where((np.arange(60) >= 20) & (np.arange(60) < 40), 3.0, 0.0))
        told = diagnose(axis(link=samples(**carrying(0.99, waits_s=0.5)), rows=rows))
        before, drop, _ = told.spans
        assert (drop.start_s, drop.end_s, drop.name, drop.limits) == (20, 40, "drop", ["the link"])
        assert drop.sentence() == (
            "20-40 s (drop): the link: link 2 Gbps; goodput 99% of 0.956 x applied, full 100% of the time; queue delay "
            "up to 0.5 s; threshold raised 4,000 -> 9,000 after 3 s; TTFT P90 4 s"
        )
        assert before.start_s == 0

    def test_a_queue_of_prefills_limits_and_says_where(self) -> None:
        told = diagnose(axis([], samples(**carrying(0.1)), requests(queue=np.where(np.arange(60) % 2, 4.0, 0.0))))
        assert told.spans[0].limits == ["prefill in prfaas"]

    def test_slots_limit(self) -> None:
        assert diagnose(axis([], rows=requests(admission=0.5))).spans[0].limits == ["decode slots"]

    def test_an_outage_limits_and_is_told_with_when_the_link_moved_again(self) -> None:
        stalled = samples(
            rate_asked_bps=lambda t_s: np.where((t_s >= 20) & (t_s < 30), 0.0, WIDE),
            kv_bytes=lambda t_s: np.interp(t_s, [0, 20, 31, 60], [0, 20, 20, 49]) * 1e8,
        )
        told = diagnose(axis([*link(20, WIDE, 0.0, "schedule: down"), *link(30, 0.0, WIDE)], stalled))
        assert told.spans[1].limits == ["an outage"]
        assert (
            text_of(told, "outage")
            == "to_pd: 1 outage, 10 s in all; it moved again within 2 s (0.2 s of wall time) of each end"
        )

    def test_nothing_limits_a_run_in_which_nobody_waits(self) -> None:
        told = diagnose(axis([], samples(**carrying(0.1))))
        assert [span.limits for span in told.spans] == [[], [], []]
        assert "nothing waits" in told.spans[0].sentence()

    def test_a_fault_that_only_the_samples_show_is_told_with_the_journals_word(self) -> None:
        cut = samples(rate_asked_bps=lambda t_s: np.where((t_s >= 20) & (t_s < 30), 0.0, WIDE))
        made = replace(axis([], cut), faults=[(19.6, 29.7, "outage (down)")])
        told = diagnose(made)
        assert [(span.start_s, span.limits) for span in told.spans][1] == (20, ["an outage"])
        assert "link down for 10 s" in told.spans[1].sentence()
        assert text_of(told, "no reaction").startswith("0 -> 8 Gbps at 30 s (outage (down))")

    def test_a_link_that_steps_all_the_time_is_told_by_phase(self) -> None:
        steps = [
            one for i in range(20) for one in link(1.0 + 2 * i, WIDE if i % 2 else NARROW, NARROW if i % 2 else WIDE)
        ]
        told = diagnose(axis(steps, samples(rate_asked_bps=np.nan)))
        assert [span.name for span in told.spans] == ["before", "drop", "after"]
        assert text_of(told, "reaction").startswith("the link stepped 20 times")


class TestWhatIsWrong:
    def test_nothing_with_a_link_that_carries_what_it_can(self) -> None:
        assert diagnose(axis(link=samples(**carrying(0.99, waits_s=9)))).wrong == []

    def test_a_shaper_that_sends_too_little_with_its_queue_full(self) -> None:
        told = diagnose(axis(link=samples(**carrying(0.8, waits_s=9, shaper=True))))
        assert ("wrong", "slow") in kinds(told)
        assert re.search(r"goodput was 8\d\.\d% of 0\.956 x .* the shaper sends less", text_of(told, "slow"))

    def test_not_a_link_on_which_cross_traffic_had_the_rest(self) -> None:
        shared = summary(cross_bytes={"to_pd": 10**7, "to_prfaas": 0})
        told = diagnose(axis(link=samples(**carrying(0.5, waits_s=9)), told=shared))
        assert told.wrong == []
        assert text_of(told, "slow").endswith("cross-traffic had the rest")

    def test_a_tcp_that_does_not_fill_the_link(self) -> None:
        assert "TCP does not fill it" in text_of(diagnose(axis(link=samples(**carrying(0.5, waits_s=9)))), "slow")

    def test_not_a_link_that_carries_little_because_little_waits(self) -> None:
        assert diagnose(axis(link=samples(**carrying(0.5, waits_s=0.2)))).wrong == []

    def test_a_shaper_that_lets_too_much_through(self) -> None:
        told = diagnose(axis([], samples(rate_asked_bps=WIDE, rate_measured_bps=1.2 * WIDE)))
        assert "120.0% of the applied rate crossed" in text_of(told, "fast")

    def test_packets_that_passed_unshaped(self) -> None:
        assert text_of(diagnose(axis(told=summary(direct_packets=3))), "unshaped").startswith("3 packets")

    def test_steps_that_took_hold_late(self) -> None:
        late = [*link(20.2, WIDE, NARROW, late_s=0.2), *link(42.5, NARROW, WIDE, late_s=2.5)]  # ten times as fast
        assert text_of(diagnose(axis(late)), "late") == (
            "2 of 4 steps of the link took hold more than 100 ms of wall time late; the latest at 42.5 s, 250 ms"
        )

    @pytest.mark.parametrize(("count", "level"), [(20, None), (200, "note"), (2000, "wrong")])
    def test_segments_sent_again_without_any_loss_asked_for(self, count: int, level: str | None) -> None:
        told = diagnose(axis(link=samples(retransmits=lambda t_s: np.where(t_s >= 33, count, 0))))  # of 66,050
        assert [one.level for one in told.findings if one.kind == "retransmits"] == ([] if level is None else [level])

    @pytest.mark.parametrize(("count", "level"), [(5, None), (200, "note"), (2000, "wrong")])
    def test_the_other_direction_is_judged_by_what_crossed_there(self, count: int, level: str | None) -> None:
        link = samples()
        back = link["direction"] == "to_prfaas"
        link.loc[back, "kv_bytes"] = link.loc[back, "kv_wire_bytes"] = link.loc[back, "t_s"] * 1_500_000
        link.loc[back, "rate_measured_bps"] = 12e6  # 60 s of it: 59,445 segments
        link.loc[back & (link["t_s"] >= 33), "retransmits"] = count
        told = diagnose(axis(link=link))
        again = [one for one in told.findings if one.kind == "retransmits"]
        assert [one.level for one in again] == ([] if level is None else [level])
        assert all(one.text.startswith("to_prfaas: ") for one in again)

    def test_segments_sent_again_for_what_the_shapers_full_queue_dropped_are_no_fault(self) -> None:
        def after(count: int) -> Any:
            return lambda t_s: np.where(t_s >= 33, count, 0)

        told = diagnose(axis(link=samples(retransmits=after(2000), drops=after(100))))
        assert told.wrong == []
        assert "dropped 100 packets (of up to 45 segments)" in text_of(told, "retransmits")
        assert diagnose(axis(link=samples(retransmits=after(2000), drops=after(2)))).wrong != []

    def test_not_segments_sent_again_where_loss_was_asked_for(self) -> None:
        again = samples(retransmits=lambda t_s: t_s * 50)
        asked = {"nominal_bps": WIDE, "to_pd": {"loss": 0.01}}
        assert diagnose(axis(link=again, told=summary(asked=asked))).wrong == []


class TestHowTheSystemTookIt:
    def test_the_threshold_answers_a_step(self) -> None:
        told = diagnose(axis([*EVENTS, moved(41.5, 9000.0, 4100.0, trigger="link estimate 7 Gbps")]))
        assert [one.text for one in told.findings if one.kind == "reaction"] == [
            "8 -> 2 Gbps at 20 s (phase drop): threshold raised 4,000 -> 9,000 after 3 s (why)",
            "2 -> 8 Gbps at 40 s (phase after): threshold lowered 9,000 -> 4,100 after 1.5 s (link estimate 7 Gbps)",
        ]

    def test_a_threshold_that_does_not_move_is_told_beside_the_best(self) -> None:
        told = diagnose(axis(link(20, WIDE, NARROW), samples(rate_asked_bps=np.nan)))
        assert text_of(told, "no reaction").endswith(
            "the threshold was not raised, 9,000; the best of the phase is 4,000"
        )

    def test_a_policy_without_a_threshold_has_none_to_move(self) -> None:
        without = {**summary(), "scheduler": {"threshold_tokens": None}}
        assert kinds(diagnose(axis([*link(20, WIDE, NARROW)], told=without))) == []

    def test_the_queue_drains_after_a_step_up(self) -> None:
        waits = samples(unsent_bytes=lambda t_s: np.interp(t_s, [20, 40, 46], [0, 5e9, 0]).astype(int))
        told = diagnose(axis([*link(20, WIDE, NARROW), *link(40, NARROW, WIDE)], waits))
        assert "what waited, 4.75 GB, was gone after 6 s" in text_of(told, "drained")


class TestItsWords:
    def test_the_report_has_what_is_wrong_first_and_leads_to_the_page(self) -> None:
        made = axis(told=summary(direct_packets=3))
        lines = doctor_lines({"link_doctor": diagnose(made).to_json()})
        assert lines[0] == "## The link"
        assert "[link.html](link.html)" in lines[2]
        assert lines[4] == "- **wrong**: 3 packets passed the link unshaped"
        assert any(line.startswith("- 20-40 s (drop)") for line in lines)

    def test_one_line_ends_a_run_when_something_is_wrong_and_none_when_not(self) -> None:
        wrong, fine = (diagnose(axis(told=summary(direct_packets=count))).to_json() for count in (3, 0))
        line = doctor_line({"link_doctor": wrong})
        assert line is not None
        assert line.startswith("link doctor: 3 packets passed the link unshaped; see link.html")
        assert doctor_line({"link_doctor": fine}) is None
        assert doctor_line({}) is None  # of a series of runs, or from before there was a doctor
        assert doctor_lines({}) == []


class TestThePage:
    def test_needs_nothing_else_and_holds_the_figures_and_the_reasons(self) -> None:
        made = axis(link=samples(**carrying(0.9, waits_s=1.0)))
        text = page(made, diagnose(made))
        assert not re.search(r"(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)|@import", text)
        data = json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])
        assert data["ways"] == ["to_pd"]
        assert len(data["table"]["to_pd_queue_s"]) == len(made.table)
        assert [one["words"] for one in data["events"] if one["event"] == "threshold"] == [
            "23 s, threshold: 4,000 → 9,000 (why)"
        ]
        assert data["phases"][1] == {"name": "drop", "start_s": 20, "end_s": 40}
        assert "20-40 s (drop): the link" in text
        assert "$" + "DATA" not in text

    def test_what_a_run_is_called_is_text_and_nothing_else(self) -> None:
        named = {**summary(), "scenario": "<script>x</script>", "policy": "</script>"}
        events: list[dict[str, Any]] = [moved(5, 1.0, 2.0, trigger="</script><b>")]
        made = axis(events, told=named)
        text = page(made, diagnose(made))
        assert "<script>x" not in text
        assert text.count("</script>") == 2

    def test_an_infinite_threshold_is_a_gap_and_a_word(self) -> None:
        made = axis([moved(5, 4000.0, float("inf"))])
        data = json.loads(page(made, diagnose(made)).split('id="data">')[1].split("</script>")[0])
        assert data["table"]["threshold_tokens"][10] is None
        assert data["events"][0]["words"] == "5 s, threshold: 4,000 → infinity (why)"


class TestTheCommand:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        sets = ["phases=[]", "workload.duration_s=60", "workload.warmup_s=0", "link.rate_bps=2gbps"]
        write(simulate("link-drop", sets=sets), tmp_path / "run", "csv")
        return tmp_path / "run"

    def command(self, *words: str) -> int:
        with pytest.raises(SystemExit) as exit_:
            main(["report", "link", *words])
        assert isinstance(exit_.value.code, int)
        return exit_.value.code

    def test_makes_the_page_again_and_says_what_limited_the_run(self, run: Path, capsys: Any) -> None:
        first = (run / "link.html").read_text()
        (run / "link.html").unlink()
        (run / "link.csv").unlink()
        assert self.command(str(run)) == 0
        assert "the link" in capsys.readouterr().out
        assert (run / "link.html").read_text()[:2000] == first[:2000]
        assert (run / "link.csv").is_file()

    def test_another_place_leaves_the_run_alone(self, run: Path, tmp_path: Path) -> None:
        before = (run / "link.html").stat().st_mtime_ns
        assert self.command(str(run), "--out", str(tmp_path / "other.html")) == 0
        assert (tmp_path / "other.html").stat().st_size > 20_000
        assert (run / "link.html").stat().st_mtime_ns == before

    def test_text_alone_writes_nothing(self, run: Path, capsys: Any) -> None:
        (run / "link.html").unlink()
        assert self.command(str(run), "--text", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["spans"][0]["limits"][0] == "the link"
        assert not (run / "link.html").exists()
        assert self.command(str(run), "--text", "--out", "x.html") == 2

    def test_no_run_is_a_usage_error(self, tmp_path: Path, capsys: Any) -> None:
        assert self.command(str(tmp_path / "nothing")) == 2
        assert "no such run" in capsys.readouterr().err
