"""Figures against hand-computed inputs: the tables, the summary, the verdict, the report."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from testbed.control import Record
from testbed.report.rows import GATEWAY_COLUMNS, PARTS, REQUEST_COLUMNS, TIMELINE_COLUMNS, gateway_row
from testbed.report.summary import LinkFigures, Meter, summarise
from testbed.report.tables import request_table
from testbed.report.timeline import timeline_table
from testbed.report.window import stats
from testbed.report.write import markdown
from testbed.scheduler.api import RequestView
from traces.client_rows import ClientRow, write_rows

T0 = 10**15
"""t = 0 on the monotonic clock, ns: a machine that has been up for eleven days."""
SCALE = 4.0
"""Model seconds a wall second."""

GOOD: dict[str, Any] = {
    "status": "ok", "input_tokens": 1024, "output_tokens_asked": 5, "output_tokens": 5, "attempts": 1,
    "prefill_site": "pd", "prefill_node": "pd-p-0", "decode_node": "pd-d-0", "reason": "not longer than t",
    "threshold_tokens": 8192.0, "kv_bytes": 1000,
}  # fmt: skip
LIFE = {"arrive_s": 0.5, "route_s": 0.5, "prefill_start_s": 1.0, "prefill_end_s": 3.0, "landed_s": 3.25,
        "admitted_s": 3.75, "finished_s": 3.85}  # fmt: skip
"""Scheduled at 0.25: client 0.25, queue 0.5, prefill 2, transfer 0.25, admission 0.5; first token at 4: return 0.25."""
CLIENT = {"sched": 0.25, "send": 0.375, "headers": 4.0, "first_token": 4.0, "last_token": 4.125, "done": 4.25}
SPLIT = {"client": 0.25, "queue": 0.5, "prefill": 2.0, "transfer": 0.25, "admission": 0.5, "return": 0.25}

CALM = Meter(0.001, 0.002, 0.003, 0.001, 0.5, 0.8, late_bound_s=0.02, cpu_bound=0.9)
WIRE = LinkFigures({"nominal_bps": 8e9}, None, wan_tx_bytes=1100, kv_bytes=1000, direct_packets=0, retransmits=2)
TOTALS: dict[str, Any] = {"policy_errors": {}, "time_scale": SCALE, "threshold_tokens": 8192.0}
CLOSED_FORM = {
    "form": "mean", "lambda_max_rps": 2.0, "threshold_tokens": 4096.0, "offload_fraction": 0.5, "egress_bps": 1e9,
    "offered_rps": 1.0, "load_fraction": 0.5, "bottleneck": "link", "ttft_unloaded_s": {"mean": 1.0, "p90": 2.0},
    "optima": [{"name": None, "start_s": 0.0, "end_s": 100.0, "threshold_tokens": 4096.0}],
}  # fmt: skip


def gateway_csv(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, GATEWAY_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def client_row(request_id: str, index: int = 0, shift_s: float = 0.0, **changes: Any) -> ClientRow:
    """The client's view of a good life, `shift_s` model seconds later."""
    stamps = {f"t_{name}_ns": T0 + round((at + shift_s) / SCALE * 1e9) for name, at in CLIENT.items()}
    known: dict[str, Any] = {"http_status": 200, "input_tokens": 1024, "output_tokens_asked": 5, "output_tokens": 5}
    return ClientRow(request_id, index, **{**stamps, **known, **changes})


def later(shift_s: float) -> dict[str, float]:
    return {name: at + shift_s for name, at in LIFE.items()}


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., pd.DataFrame]:
    """table(gateway rows, client rows or None): the request table; the window is [0, 100) unless given."""

    def made(
        gateway: list[dict[str, Any]], client: list[ClientRow] | None, warmup_s: float = 0, duration_s: float = 100
    ) -> pd.DataFrame:
        client_path = None
        if client is not None:
            client_path = tmp_path / "client.csv"
            write_rows(client_path, client)
        gateway_path = gateway_csv(tmp_path / "gateway.csv", *gateway)
        return request_table(
            gateway_path, client_path, t0_ns=T0, time_scale=SCALE, warmup_s=warmup_s, duration_s=duration_s
        )

    return made


def summary_of(requests: pd.DataFrame, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "scheduled": len(requests), "warmup_s": 0, "duration_s": 100, "slo_ttft_s": 6, "slo_tpot_s": 0.025,
        "meter": CALM, "link": WIRE, "totals": TOTALS, "expected": CLOSED_FORM,
    }  # fmt: skip
    return summarise(requests, **{**given, **changes})


Table = Callable[..., pd.DataFrame]


class TestTheRequestTable:
    def test_joins_the_client_and_the_gateway_by_the_requests_id(self, table: Table) -> None:
        made = table(
            [{"request_id": "b", **GOOD, **later(1)}, {"request_id": "a", **GOOD, **LIFE}],
            [client_row("a"), client_row("b", 1, 1.0)],
        )
        assert tuple(made.columns) == REQUEST_COLUMNS
        assert made["request_id"].tolist() == ["a", "b"]  # in the order of their schedule
        assert made["arrive_s"].tolist() == [0.5, 1.5]

    def test_times_are_model_seconds_since_t_0(self, table: Table) -> None:
        row = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a")]).iloc[0]
        for name, at in CLIENT.items():
            assert row[f"{name}_s"] == pytest.approx(at, abs=1e-9)
        assert row["late_s"] == pytest.approx(0.125)

    def test_ttft_and_e2e_begin_at_the_schedule(self, table: Table) -> None:
        row = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a")]).iloc[0]
        assert row["ttft_s"] == pytest.approx(3.75)
        assert row["e2e_s"] == pytest.approx(4.0)

    def test_tpot_is_over_the_tokens_after_the_first(self, table: Table) -> None:
        row = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a")]).iloc[0]
        assert row["tpot_s"] == pytest.approx(0.125 / 4)

    def test_tpot_of_one_token_there_is_none(self, table: Table) -> None:
        made = table([{"request_id": "a", **{**GOOD, "output_tokens": 1}, **LIFE}], [client_row("a")])
        assert math.isnan(made["tpot_s"][0])

    def test_the_parts_are_the_ttft_exactly(self, table: Table) -> None:
        row = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a")]).iloc[0]
        assert {part: row[f"ttft_{part}_s"] for part in PARTS} == pytest.approx(SPLIT, abs=1e-9)
        assert sum(row[f"ttft_{part}_s"] for part in PARTS) == pytest.approx(row["ttft_s"], abs=1e-12)

    def test_the_parts_are_the_ttft_exactly_for_any_stamps(self, table: Table) -> None:
        rng = np.random.default_rng(1)
        gateway, client = [], []
        for i in range(50):
            at = np.sort(rng.uniform(0, 90, 7))
            inner = dict(zip(LIFE, [at[1], at[1], *at[2:6], at[6] + 1], strict=True))
            gateway.append({"request_id": f"r{i}", **GOOD, **inner})
            first = T0 + round(at[6] / SCALE * 1e9)
            stamp = {"t_sched_ns": T0 + round(at[0] / SCALE * 1e9), "t_first_token_ns": first, "t_last_token_ns": first}
            client.append(client_row(f"r{i}", i, **stamp))
        made = table(gateway, client)
        assert np.allclose(made[[f"ttft_{part}_s" for part in PARTS]].sum(axis=1), made["ttft_s"], rtol=0, atol=1e-9)

    def test_the_window_is_by_schedule_from_warm_up_up_to_duration(self, table: Table) -> None:
        shifts = [9.5, 9.75, 19.5, 19.75]  # + 0.25: scheduled at 9.75, 10, 19.75, 20
        gateway = [{"request_id": f"r{i}", **GOOD, **later(shift)} for i, shift in enumerate(shifts)]
        client = [client_row(f"r{i}", i, shift) for i, shift in enumerate(shifts)]
        made = table(gateway, client, warmup_s=10, duration_s=20)
        assert made["in_window"].tolist() == [False, True, True, False]

    def test_a_request_the_gateway_never_saw_has_a_row(self, table: Table) -> None:
        lost = client_row("lost", 1, t_headers_ns=None, t_first_token_ns=None, t_last_token_ns=None, error="connect")
        made = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a"), lost])
        row = made[made["request_id"] == "lost"].iloc[0]
        assert (row["status"], row["error"], row["client_error"]) == ("failed", "", "connect")
        assert (row["input_tokens"], row["output_tokens_asked"]) == (1024, 5)
        assert math.isnan(row["ttft_s"])
        assert row["prefill_site"] == ""

    def test_a_gateway_that_saw_nothing_leaves_a_whole_table(self, table: Table) -> None:
        made = table([], [client_row("a", error="connect"), client_row("b", 1, error="connect")])
        assert made["status"].tolist() == ["failed", "failed"]
        assert summary_of(made)["requests"]["by_error"] == {"connect": 2}

    def test_other_clients_requests_are_left_out(self, table: Table) -> None:
        gateway = [{"request_id": name, **GOOD, **LIFE} for name in ("a", "somebody else's")]
        assert table(gateway, [client_row("a")])["request_id"].tolist() == ["a"]

    @pytest.mark.parametrize("name", ["NA", "nan", "null", "007", "1e5", "a,b", 'say "hi"'])
    def test_an_id_is_a_text_whatever_it_looks_like(self, table: Table, name: str) -> None:
        made = table([{"request_id": name, **GOOD, **LIFE}], None)
        assert made["request_id"].tolist() == [name]

    def test_without_a_client_the_schedule_is_the_arrival(self, table: Table) -> None:
        row = table([{"request_id": "a", **GOOD, **LIFE}], None).iloc[0]
        assert (row["sched_s"], row["first_token_s"], row["done_s"]) == (0.5, 3.75, 3.85)
        assert row["ttft_s"] == 3.25
        assert (row["ttft_client_s"], row["ttft_return_s"]) == (0, 0)
        assert row["tpot_s"] == pytest.approx(0.1 / 4)

    def test_a_stamp_is_exact_however_long_the_machine_is_up(self, tmp_path: Path) -> None:
        t0 = 2**53 + 1  # beyond what a float counts
        row = ClientRow("a", 0, t_sched_ns=t0, t_send_ns=t0 + 1, t_done_ns=None)
        write_rows(tmp_path / "client.csv", [row])
        gateway = gateway_csv(tmp_path / "gateway.csv", {"request_id": "a", **GOOD, **LIFE})
        made = request_table(gateway, tmp_path / "client.csv", t0_ns=t0, time_scale=1, warmup_s=0, duration_s=1)
        assert made["late_s"][0] == pytest.approx(1e-9, rel=1e-9)

    def test_reads_what_the_gateway_writes(self, tmp_path: Path) -> None:
        record = Record.of(RequestView("a", 1.5, 1024), 5)
        record.status, record.error, record.error_message = "failed", "node_lost", 'lost, "again"\nand again'
        with (tmp_path / "gateway.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([GATEWAY_COLUMNS, gateway_row(record)])
        made = request_table(tmp_path / "gateway.csv", None, t0_ns=T0, time_scale=1, warmup_s=0, duration_s=10)
        assert made["error_message"][0] == 'lost, "again"\nand again'
        assert made["arrive_s"][0] == 1.5
        assert math.isnan(made["landed_s"][0])


class TestStats:
    def test_are_mean_and_interpolated_percentiles(self) -> None:
        found = stats(pd.Series(range(1, 102), dtype=float))
        assert found == {"mean": 51, "p50": 51, "p90": 91, "p95": 96, "p99": 100}

    def test_leave_out_what_there_is_not(self) -> None:
        assert stats(pd.Series([1.0, math.nan, 3.0]))["mean"] == 2
        assert stats(pd.Series([math.nan])) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))


class TestTheSummary:
    @pytest.fixture
    def requests(self, table: Table) -> pd.DataFrame:
        """Ten from 0.25 on, a second apart, odd ones remote; TTFT 3.75, but r8's 7.75; r9 failed. Window: [2, 10)."""
        gateway, client = [], []
        for i in range(10):
            row = {"request_id": f"r{i}", **GOOD, **later(i), "prefill_site": "prfaas" if i % 2 else "pd"}
            more: dict[str, Any] = {}
            if i == 8:
                more = {f"t_{name}_ns": T0 + round((CLIENT[name] + 8 + 4) / SCALE * 1e9)
                        for name in ("first_token", "last_token", "done")}  # fmt: skip
            if i == 9:
                row |= {"status": "failed", "error": "node_lost"}
                more = {"error": "stream_error"}
            gateway.append(row)
            client.append(client_row(f"r{i}", i, i, **more))
        made: pd.DataFrame = table(gateway, client, warmup_s=2, duration_s=10)
        return made

    @pytest.fixture
    def summary(self, requests: pd.DataFrame) -> dict[str, Any]:
        return summary_of(requests, warmup_s=2, duration_s=10, slo_tpot_s=0.04)

    def test_counts_requests_and_failures_by_kind(self, summary: dict[str, Any]) -> None:
        counted = summary["requests"]
        assert (counted["scheduled"], counted["completed"], counted["failed"]) == (10, 9, 1)
        assert counted["by_error"] == {"node_lost": 1}
        assert counted["in_window"] == 8  # r2 to r9
        assert summary["window_s"] == [2, 10]

    def test_offered_is_what_was_scheduled_inside_by_the_windows_length(self, summary: dict[str, Any]) -> None:
        assert summary["offered_rps"] == 8 / 8

    def test_throughput_is_what_completed_inside_whenever_it_was_scheduled(self, summary: dict[str, Any]) -> None:
        # done at i + 4.25: r0 to r5 within [2, 10); of them r0 and r1 were scheduled before it
        assert summary["throughput_rps"] == 6 / 8

    def test_latencies_are_of_what_was_scheduled_inside_and_completed_whenever(self, summary: dict[str, Any]) -> None:
        assert summary["ttft_s"]["mean"] == pytest.approx((6 * 3.75 + 7.75) / 7)  # r2 to r8
        assert summary["ttft_s"]["p50"] == pytest.approx(3.75)
        assert summary["ttft_s"]["p90"] == pytest.approx(3.75 + 0.4 * 4)  # at 5.4 of 0 .. 6
        assert summary["e2e_s"]["mean"] == pytest.approx((6 * 4 + 8) / 7)

    def test_goodput_counts_what_met_every_slo_out_of_all_that_was_scheduled(self, summary: dict[str, Any]) -> None:
        assert summary["goodput_rps"] == 6 / 8  # not r8, which was late, nor r9, which failed
        assert summary["slo"]["met_fraction"] == 6 / 8
        assert summary["slo"]["ttft_p90_met"] is True  # 5.35 <= 6

    def test_a_slow_decode_misses_the_slo_beyond_a_percent(self, requests: pd.DataFrame) -> None:
        tpot = 0.125 / 4
        inside = summary_of(requests, warmup_s=2, duration_s=10, slo_tpot_s=tpot / 1.009)
        beyond = summary_of(requests, warmup_s=2, duration_s=10, slo_tpot_s=tpot / 1.011)
        assert inside["goodput_rps"] == 6 / 8
        assert beyond["goodput_rps"] == 0

    def test_the_split_adds_up_overall_and_by_route(self, summary: dict[str, Any]) -> None:
        for name, whole in (("overall", summary["ttft_s"]), *summary["ttft_by_route_s"].items()):
            parts = summary["ttft_split_s"][name]
            assert set(parts) == set(PARTS)
            assert sum(parts[part]["mean"] for part in PARTS) == pytest.approx(whole["mean"])

    def test_offload_and_egress_are_of_the_window(self, summary: dict[str, Any]) -> None:
        assert summary["offload_fraction"] == 4 / 8  # r3, r5, r7, r9
        assert summary["egress_bps"] == pytest.approx(3 * 1000 * 8 / 8)  # landed at i + 3.25: r1, r3 and r5
        assert summary["egress_queue_s"]["mean"] == pytest.approx(0.25)

    def test_the_threshold_is_compared_with_the_closed_forms(self, summary: dict[str, Any]) -> None:
        scheduler = summary["scheduler"]
        assert (scheduler["threshold_tokens"], scheduler["threshold_over_optimum"]) == (8192, 2)
        assert scheduler["threshold_changes"] == 0

    def test_threshold_changes_are_counted_in_the_order_of_routing(self, requests: pd.DataFrame) -> None:
        requests.loc[requests["route_s"] > 4, "threshold_tokens"] = 9000
        assert summary_of(requests)["scheduler"]["threshold_changes"] == 1

    def test_the_links_framing_is_what_it_carried_beyond_the_kv(self, summary: dict[str, Any]) -> None:
        assert summary["link"]["framing"] == pytest.approx(0.1)

    def test_without_a_request_has_figures_all_the_same(self, table: Table) -> None:
        empty = summary_of(table([], None))
        assert empty["throughput_rps"] == 0
        assert empty["ttft_s"]["p90"] is None
        assert empty["slo"]["met_fraction"] is None
        assert empty["offload_fraction"] is None

    def test_retries_are_counted(self, table: Table) -> None:
        made = table([{"request_id": "a", **{**GOOD, "attempts": 2}, **LIFE}], [client_row("a")])
        assert summary_of(made)["requests"]["retried"] == 1

    def test_what_the_client_alone_saw_fail_failed(self, table: Table) -> None:
        made = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a", error="no_done")])
        assert summary_of(made)["requests"]["by_error"] == {"no_done": 1}
        assert summary_of(made)["throughput_rps"] == 0

    def test_renders(self, summary: dict[str, Any]) -> None:
        named = {"scenario": "toy", "deployment": "prfaas-pd", "policy": "static", "clock": "wire", **summary}
        text = markdown(named)
        assert text.startswith("# toy: prfaas-pd under `static`\n\n**FAILED**")
        assert "- 1 of 10 requests did not complete: node_lost 1" in text
        assert "| throughput, requests/s | 0.750 | at most 2.000 |" in text
        assert "1,100 for 1,000 of KV (+10.0%)" in text
        assert "nan" not in text

    def test_of_nothing_renders(self, table: Table) -> None:
        named = {"scenario": "toy", "deployment": "naive", "policy": "naive", "clock": "wire"}
        link = LinkFigures({}, None, 0, 0, 0, 0)
        text = markdown({**named, **summary_of(table([], None), link=link)})
        assert "**VALID**" in text
        assert "| TTFT, s | - | - | - | - |" in text


class TestTheVerdict:
    @pytest.fixture
    def good(self, table: Table) -> pd.DataFrame:
        made: pd.DataFrame = table([{"request_id": "a", **GOOD, **LIFE}], [client_row("a")])
        return made

    @pytest.fixture
    def bad(self, table: Table) -> pd.DataFrame:
        failed = {**GOOD, **LIFE, "status": "failed", "error": "node_lost"}
        made: pd.DataFrame = table([{"request_id": "a", **failed}], [client_row("a", error="stream_error")])
        return made

    def test_is_valid_when_meter_and_system_are_well(self, good: pd.DataFrame) -> None:
        assert summary_of(good)["verdict"] == {"status": "valid", "reasons": []}

    def test_is_failed_when_a_request_did_not_complete(self, bad: pd.DataFrame) -> None:
        verdict = summary_of(bad)["verdict"]
        assert verdict == {"status": "failed", "reasons": ["1 of 1 requests did not complete: node_lost 1"]}

    def test_is_failed_when_a_client_left(self, table: Table) -> None:
        gone = {**GOOD, **LIFE, "status": "aborted", "error": "client_gone"}
        made = table([{"request_id": "a", **gone}], [client_row("a", error="timeout")])
        assert summary_of(made)["verdict"]["status"] == "failed"

    @pytest.mark.parametrize(
        ("meter", "reason"),
        [
            ({"client_late_p99_s": 0.021}, "requests were sent late: p99 of t_send - t_sched is 21.0 ms"),
            ({"timer_late_p99_s": 0.5}, "workers' timers fired late: p99 is 500.0 ms"),
            ({"gateway_late_p99_s": 0.03}, "the gateway's event loop lagged: p99 is 30.0 ms"),
            ({"cpu_mean": 0.95}, "the machine was 95% busy, the bound is 90%"),
            ({"faults": ["the replay ended with exit code 7; see locust.log"]}, "exit code 7"),
        ],
    )
    def test_is_invalid_when_the_meter_failed(self, good: pd.DataFrame, meter: dict[str, Any], reason: str) -> None:
        given = {name: getattr(CALM, name) for name in CALM.__slots__} | meter
        verdict = summary_of(good, meter=Meter(**given))["verdict"]
        assert verdict["status"] == "invalid"
        assert [line for line in verdict["reasons"] if reason in line]

    def test_a_lateness_at_its_bound_is_within_it(self, good: pd.DataFrame) -> None:
        meter = Meter(0.02, 0.02, 1.0, 0.02, 0.9, 1.0, late_bound_s=0.02, cpu_bound=0.9)
        assert summary_of(good, meter=meter)["verdict"]["status"] == "valid"

    @pytest.mark.parametrize(
        ("link", "reason"),
        [
            ({"direct_packets": 3}, "3 packets passed the link unshaped"),
            ({"wan_tx_bytes": 999}, "1000 bytes of KV landed, but only 999 bytes crossed the link"),
        ],
    )
    def test_is_invalid_when_bytes_went_another_way(
        self, good: pd.DataFrame, link: dict[str, Any], reason: str
    ) -> None:
        given = {name: getattr(WIRE, name) for name in WIRE.__slots__} | link
        assert summary_of(good, link=LinkFigures(**given))["verdict"] == {"status": "invalid", "reasons": [reason]}

    def test_is_invalid_when_requests_are_unaccounted_for(self, good: pd.DataFrame) -> None:
        verdict = summary_of(good, scheduled=2)["verdict"]
        assert verdict == {"status": "invalid", "reasons": ["2 requests were scheduled, but there are rows for 1"]}

    def test_invalid_beats_failed_and_both_are_told(self, bad: pd.DataFrame) -> None:
        verdict = summary_of(bad, scheduled=2)["verdict"]
        assert verdict["status"] == "invalid"
        assert len(verdict["reasons"]) == 2


DROP = {"t_s": 5.0, "direction": "to_pd", "kind": "link", "node": "", "before": 8e9, "after": 1e9,
        "trigger": "phase drop"}  # fmt: skip
HIGHER = {"t_s": 5.1, "kind": "threshold", "node": "", "before": 4096.0, "after": 8192.0, "trigger": "the link fell"}


class TestTheTimeline:
    @pytest.fixture
    def counters(self, tmp_path: Path) -> Path:
        """Both directions four times a wall second; to_pd sends 1000 bytes a sample from t = 0 on, at 160 Mbit/s."""
        lines = ["t_ns,direction,rate_bps,kv_bytes,control_bytes,backlog_bytes,drops,direct_packets"]
        for i in range(-8, 9):
            sent = 5000 + 1000 * max(0, i)
            lines.append(f"{T0 + i * 250_000_000},to_pd,160000000,{sent},0,30,{i > 4:d},0")
            lines.append(f"{T0 + i * 250_000_000},to_prfaas,160000000,0,0,0,0,0")
        path = tmp_path / "counters.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    @pytest.fixture
    def timeline(self, counters: Path) -> pd.DataFrame:
        return timeline_table([], counters, t0_ns=T0, end_ns=T0 + 10**9, time_scale=10, byte_scale=0.001)

    def test_has_the_contracts_columns_and_both_directions(self, timeline: pd.DataFrame) -> None:
        assert tuple(timeline.columns) == TIMELINE_COLUMNS
        assert set(timeline["direction"]) == {"to_pd", "to_prfaas"}

    def test_is_about_the_load_a_second_more_at_both_ends(self, timeline: pd.DataFrame) -> None:
        assert (timeline["t_s"].min(), timeline["t_s"].max()) == (-10, 20)  # model seconds

    def test_rates_are_model_rates(self, timeline: pd.DataFrame) -> None:
        to_pd = timeline[timeline["direction"] == "to_pd"]
        assert set(to_pd["rate_asked_bps"]) == {16e9}
        busy = to_pd[to_pd["t_s"] > 0]
        assert np.allclose(busy["rate_measured_bps"], 1000 * 8 / 0.25 * 100)  # 32 kbit/s of wall, 3.2 Mbit/s of model

    def test_backlog_is_in_model_bytes_and_what_was_sent_in_wall_bytes(self, timeline: pd.DataFrame) -> None:
        to_pd = timeline[timeline["direction"] == "to_pd"]
        assert set(to_pd["backlog_bytes"]) == {30_000}
        assert to_pd["kv_wire_bytes"].iloc[0] == 0
        assert to_pd.loc[to_pd["t_s"] == 10, "kv_wire_bytes"].item() == 4000

    def test_of_no_samples_is_empty(self, counters: Path) -> None:
        made = timeline_table([], counters, t0_ns=T0 + 10**12, end_ns=T0 + 10**12, time_scale=1, byte_scale=1)
        assert tuple(made.columns) == TIMELINE_COLUMNS
        assert made.empty

    def test_has_events_between_the_samples_in_the_order_of_time(self, counters: Path, tmp_path: Path) -> None:
        scales = {"t0_ns": T0, "end_ns": T0 + 10**9, "time_scale": 10, "byte_scale": 0.001}
        made = timeline_table([DROP, HIGHER], counters, **scales)  # type: ignore[arg-type]
        assert made["t_s"].is_monotonic_increasing
        events = made[made["event"].notna()]
        assert events["event"].tolist() == ["link", "threshold"]
        assert (events["before"].tolist(), events["after"].tolist()) == ([8e9, 4096.0], [1e9, 8192.0])
        assert events["trigger"].tolist() == ["phase drop", "the link fell"]
        assert events["backlog_bytes"].isna().all()
        assert made["rate_asked_bps"].notna().sum() == len(made) - 2

    def test_keeps_counts_whole_in_the_file(self, counters: Path, tmp_path: Path) -> None:
        scales = {"t0_ns": T0, "end_ns": T0 + 10**9, "time_scale": 10, "byte_scale": 0.001}
        made = timeline_table([HIGHER], counters, **scales)  # type: ignore[arg-type]
        made.to_csv(tmp_path / "timeline.csv", index=False, float_format="%.6f")
        with (tmp_path / "timeline.csv").open() as file:
            rows = list(csv.DictReader(file))
        (event,) = (row for row in rows if row["event"])
        assert {row["backlog_bytes"] for row in rows if not row["event"]} == {"30000", "0"}
        filled = {key: value for key, value in event.items() if value}
        assert filled == {
            "t_s": "5.100000", "event": "threshold", "before": "4096.0", "after": "8192.0", "trigger": "the link fell",
        }  # fmt: skip

    def test_without_a_wire_has_the_events_alone(self) -> None:
        made = timeline_table([HIGHER])
        assert tuple(made.columns) == TIMELINE_COLUMNS
        assert made["event"].tolist() == ["threshold"]
        assert timeline_table([]).empty
