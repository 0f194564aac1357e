"""What the live page reads: lines as they are added, the link's samples and steps, requests of late."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from netem.agent import COUNTER_COLUMNS
from testbed.live.link_log import LinkLog
from testbed.live.recent import First, Recent, figures, reasons
from testbed.live.tail import Tail
from testbed.report.rows import GATEWAY_COLUMNS
from testbed.scenario import Scale
from tests.testbed.live_session import played

SCALE = Scale(time_scale=10, byte_scale=0.001)
S = 1_000_000_000
STATE = {"rate_bps": 160e6, "delay_s": 0.0, "jitter_s": 0.0, "loss": 0.0, "outage": None, "per_flow_bps": None}


class TestTail:
    def test_lines_come_once_and_only_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("old\n")
        tail = Tail(path)
        assert tail.lines() == []
        with path.open("a") as file:
            file.write("one\ntw")
        assert tail.lines() == ["one"]
        with path.open("a") as file:
            file.write("o\nthree\n")
        assert tail.lines() == ["two", "three"]
        assert tail.lines() == []

    def test_some_of_what_is_there_is_read_from_a_lines_beginning_on(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("first\nsecond\nthird\n")
        assert Tail(path, back_bytes=9).lines() == ["third"]
        assert Tail(path, back_bytes=13).lines() == ["second", "third"]
        assert Tail(path, back_bytes=1000).lines() == ["first", "second", "third"]

    def test_a_file_that_comes_later_is_read_whole(self, tmp_path: Path) -> None:
        tail = Tail(tmp_path / "log")
        assert tail.lines() == []
        (tmp_path / "log").write_text("one\n")
        assert tail.lines() == ["one"]

    @pytest.mark.parametrize("how", ["cut", "replaced"])
    def test_a_file_that_begins_anew_is_read_from_its_beginning(self, tmp_path: Path, how: str) -> None:
        path = tmp_path / "log"
        path.write_text("a long line of before\n")
        tail = Tail(path)
        if how == "replaced":
            (tmp_path / "other").write_text("new and even longer than the line before was\n")
            (tmp_path / "other").rename(path)
            assert tail.lines() == ["new and even longer than the line before was"]
        else:
            path.write_text("new\n")
            assert tail.lines() == ["new"]


class TestTheLink:
    def counted(self, folder: Path, *rows: tuple[float, str, int, Any]) -> None:
        """Rows of (second, direction, KV bytes, rate)."""
        with (folder / "link-counters.csv").open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not file.tell():
                writer.writerow(COUNTER_COLUMNS)
            for at_s, direction, sent, rate_bps in rows:
                writer.writerow((round(at_s * S), direction, sent, 0, 3, 500, rate_bps, 0, None, *[None] * 4))

    def stepped(self, folder: Path, at_s: float, direction: str, layer: str | None, **state: Any) -> None:
        row = {"layer": layer, "direction": direction, "t_applied_ns": round(at_s * S), "state": {**STATE, **state}}
        with (folder / "link-applied.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def test_a_sample_has_what_was_sent_since_the_one_before_in_model_units(self, tmp_path: Path) -> None:
        self.counted(tmp_path, (1.0, "to_pd", 1000, 160e6))
        log = LinkLog(tmp_path, SCALE, since_ns=0)
        self.counted(tmp_path, (1.25, "to_pd", 626_000, 40e6))
        first, second = log.samples()
        assert (first.measured_bps, first.set_bps) == (None, pytest.approx(16e9))
        assert second.set_bps == pytest.approx(4e9)
        assert second.measured_bps == pytest.approx(625_000 * 8 / 0.25 / 0.01)

    def test_counters_that_begin_anew_measure_nothing(self, tmp_path: Path) -> None:
        self.counted(tmp_path, (1.0, "to_pd", 1000, 160e6), (1.25, "to_pd", 10, 160e6))
        assert [one.measured_bps for one in LinkLog(tmp_path, SCALE, 0).samples()] == [None, None]

    def test_only_what_came_later_is_told_but_measured_against_what_was_before(self, tmp_path: Path) -> None:
        self.counted(tmp_path, (1.0, "to_pd", 0, 160e6), (2.0, "to_pd", 1_250_000, 160e6))
        (only,) = LinkLog(tmp_path, SCALE, since_ns=round(1.5 * S)).samples()
        assert only.measured_bps == pytest.approx(1e9)

    def test_both_directions_of_one_cause_are_one_step(self, tmp_path: Path) -> None:
        for direction in ("to_pd", "to_prfaas"):
            self.stepped(tmp_path, 1.0, direction, None)
        log = LinkLog(tmp_path, SCALE, since_ns=round(1.5 * S))
        assert log.steps() == []
        assert log.states["to_pd"]["rate_bps"] == pytest.approx(16e9)
        self.stepped(tmp_path, 2.0, "to_pd", "page-1", rate_bps=40e6, delay_s=0.05)
        self.stepped(tmp_path, 2.01, "to_prfaas", "page-1", rate_bps=40e6, delay_s=0.05)
        self.stepped(tmp_path, 3.0, "to_pd", None, rate_bps=40e6)
        both, one = log.steps()
        assert both.directions == ("to_pd", "to_prfaas")
        assert both.before is not None
        assert both.before["rate_bps"] == pytest.approx(16e9)
        assert (both.after["rate_bps"], both.after["delay_s"]) == (pytest.approx(4e9), pytest.approx(0.5))
        assert (one.directions, one.layer) == (("to_pd",), None)

    def test_without_an_agent_nothing_is_known(self, tmp_path: Path) -> None:
        log = LinkLog(tmp_path, SCALE, 0)
        assert (log.samples(), log.steps(), log.states) == ([], [], {})


class TestRequestsOfLate:
    async def test_one_counts_once_while_it_is_under_way_and_when_it_has_ended(self, tmp_path: Path) -> None:
        async with played(tmp_path) as fleet:
            session = fleet.session
            recent = Recent(session.rows_path, 1e6, back_bytes=1 << 20)
            fleet.first_token("a", 5000, ttft_s=4.0)
            recent.look(session.control)
            recent.look(session.control)
            fleet.finish("a")
            session._write()
            recent.read()
            recent.look(session.control)
            (only,) = recent.within(-1e9, 1e9)
            assert (only.site, only.reason, only.input_tokens) == ("prfaas", "long", 5000)
            assert only.ttft_s == pytest.approx(4.0)

    async def test_one_that_came_and_went_between_two_looks_is_in_the_rows(self, tmp_path: Path) -> None:
        async with played(tmp_path) as fleet:
            recent = Recent(fleet.session.rows_path, 1e6, back_bytes=1 << 20)
            fleet.first_token("a", 500, ttft_s=2.0)
            fleet.finish("a")
            fleet.session._write()
            recent.read()
            assert [one.reason for one in recent.within(-1e9, 1e9)] == ["short"]

    async def test_an_id_that_is_used_again_is_another_request(self, tmp_path: Path) -> None:
        async with played(tmp_path) as fleet:
            recent = Recent(fleet.session.rows_path, 1e6, back_bytes=1 << 20)
            for ttft_s in (1.0, 2.0):
                fleet.first_token("a", 500, ttft_s=ttft_s)
                recent.look(fleet.session.control)
                fleet.finish("a")
                fleet.session._write()
                recent.read()
            assert [one.ttft_s for one in recent.within(-1e9, 1e9)] == [pytest.approx(1.0), pytest.approx(2.0)]

    def test_failures_are_counted_by_kind(self, tmp_path: Path) -> None:
        path = tmp_path / "gateway.csv"
        row = dict.fromkeys(GATEWAY_COLUMNS, "") | {"request_id": "a", "status": "failed", "error": "node_lost"}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, GATEWAY_COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerow(row | {"error_message": "two\nlines, and a comma"})
        recent = Recent(path, 1e6, back_bytes=1 << 20)
        recent.read()
        assert recent.errors == {"node_lost": 1}

    def test_their_figures(self) -> None:
        of = [First(float(i), float(i), "prfaas" if i > 6 else "pd", "r", 100, 25) for i in range(1, 11)]
        told = figures(of)
        assert told == {
            "requests": 10,
            "ttft_p50_s": pytest.approx(5.5),
            "ttft_p90_s": pytest.approx(9.1),
            "offloaded": pytest.approx(0.4),
            "cached": pytest.approx(0.25),
        }
        assert figures([])["offloaded"] is None
        assert reasons(of) == [
            {"reason": "r", "site": "pd", "requests": 6},
            {"reason": "r", "site": "prfaas", "requests": 4},
        ]
