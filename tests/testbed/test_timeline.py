"""The samples of the link in `timeline.csv`: what workers told of their sockets, and virtual time's history."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from netem.fluid import TCP_EFFICIENCY
from testbed.report.accounts import Accounts
from testbed.report.rows import TIMELINE_COLUMNS
from testbed.report.timeline import SAMPLES, timeline_table, virtual_timeline
from testbed.simulate import simulate

SITES = {"prfaas-0": "prfaas", "prfaas-1": "prfaas", "pd-p-0": "pd", "pd-d-0": "pd", "pd-d-1": "pd"}
T0 = 10**15
STEP = {"t_s": 2.0, "direction": "to_pd", "kind": "link", "node": "", "before": 8e9, "after": 1e9, "trigger": "phase"}


def path(peer: str, retransmits: int, unsent_bytes: int = 0, rtt_s: float = 0.0) -> dict[str, Any]:
    return {"peer": peer, "retransmits": retransmits, "unsent_bytes": unsent_bytes, "rtt_s": rtt_s}


def told(t_s: float, node: str, *paths: dict[str, Any], landed: dict[str, int] | None = None) -> dict[str, Any]:
    event = {"type": "Telemetry", "node": node, "t_s": t_s, "paths": list(paths), "kv_landed_bytes": landed or {}}
    return {"t_s": t_s + 0.01, "event": event}


def lost(t_s: float, node: str) -> dict[str, Any]:
    return {"t_s": t_s, "event": {"type": "NodeLost", "node": node, "reason": "gone"}}


@pytest.fixture
def accounts(tmp_path: Path) -> Any:
    """accounts(*log lines): of a log that has other events too."""

    def made(*lines: dict[str, Any]) -> Accounts:
        log = tmp_path / "events.jsonl"
        others = [{"t_s": 0.0, "event": {"type": "Tick"}}, {"t_s": 0.1, "event": {"type": "NodeUp", "node": "pd-d-0"}}]
        log.write_text("".join(json.dumps(line) + "\n" for line in (*others, *lines)))
        return Accounts(log, SITES)

    return made


def column(accounts: Accounts, name: str, *times_s: float, direction: str = "to_pd") -> list[float]:
    return [float(value) for value in accounts.at(direction, np.array(times_s))[name]]


class TestWhatTheWorkersTold:
    def test_retransmissions_count_from_a_nodes_first_account_and_all_senders_together(self, accounts: Any) -> None:
        made = accounts(
            told(1, "prfaas-0", path("pd-d-0", 100)), told(1.2, "prfaas-1", path("pd-d-0", 7)),
            told(2, "prfaas-0", path("pd-d-0", 103)), told(2.2, "prfaas-1", path("pd-d-0", 9)),
        )  # fmt: skip
        assert column(made, "retransmits", 1.5, 2.1, 2.5) == [0, 3, 5]

    def test_what_lands_does_so_from_t_zero_on_however_late_it_is_first_told(self, accounts: Any) -> None:
        made = accounts(told(-2, "prfaas-0"), told(-2, "pd-d-0"), told(4, "pd-d-0", landed={"prfaas-0": 800}))
        assert column(made, "kv_bytes", -0.5, 0, 1, 4) == [0, 0, 200, 800]

    def test_a_connection_that_is_made_again_counts_from_nought(self, accounts: Any) -> None:
        made = accounts(
            told(1, "prfaas-0", path("pd-d-0", 50)),
            told(2, "prfaas-0", path("pd-d-0", 4)),
            told(3, "prfaas-0", path("pd-d-0", 4), path("pd-d-1", 2)),  # and one that was not there before
        )
        assert column(made, "retransmits", 1, 2, 3) == [0, 4, 6]

    def test_what_waits_is_the_sum_of_what_each_sender_said_last(self, accounts: Any) -> None:
        made = accounts(
            told(1, "prfaas-0", path("pd-d-0", 0, 1000)), told(1.5, "prfaas-1", path("pd-d-0", 0, 200)),
            lost(2, "prfaas-0"),
        )  # fmt: skip
        assert column(made, "unsent_bytes", 1.2, 1.6, 2.5) == [1000, 1200, 200]

    def test_kv_inside_a_site_does_not_cross_the_link(self, accounts: Any) -> None:
        made = accounts(
            told(0, "pd-d-0"),
            told(1, "pd-p-0", path("pd-d-0", 9, 500)),
            told(2, "pd-d-0", landed={"prfaas-0": 800, "pd-p-0": 3000}),
        )
        assert column(made, "kv_bytes", 0, 1, 2) == [0, 400, 800]
        assert column(made, "unsent_bytes", 2, direction="to_prfaas") == [0]

    def test_a_node_that_begins_anew_adds_to_what_has_landed(self, accounts: Any) -> None:
        made = accounts(*(told(t, "pd-d-0", landed={"prfaas-0": n}) for t, n in ((1, 500), (2, 900), (3, 100))))
        assert column(made, "kv_bytes", 1, 2, 3) == [500, 900, 1000]

    def test_each_direction_has_its_own(self, accounts: Any) -> None:
        made = accounts(told(1, "pd-p-0", path("prfaas-0", 0, 70, 0.2)), told(1, "prfaas-0", path("pd-d-0", 0, 5, 0.1)))
        assert column(made, "unsent_bytes", 1) == [5]
        assert column(made, "unsent_bytes", 1, direction="to_prfaas") == [70]
        assert column(made, "rtt_s", 1, direction="to_prfaas") == [0.2]

    def test_before_the_first_account_nothing_is_known(self, accounts: Any) -> None:
        made = accounts(told(1, "prfaas-0", path("pd-d-0", 3, 10)))
        assert all(np.isnan(column(made, name, 0.5)[0]) for name in ("kv_bytes", "unsent_bytes", "retransmits"))

    def test_are_joined_to_the_agents_samples(self, accounts: Any, tmp_path: Path) -> None:
        counters = tmp_path / "counters.csv"
        head = "t_ns,direction,kv_bytes,control_bytes,drops,backlog_bytes,rate_bps,direct_packets"
        rows = [f"{T0 + i * 10**9},to_pd,{i * 1000},0,0,0,1e8,0" for i in range(3)]
        counters.write_text("\n".join([head, *rows]) + "\n")
        made = accounts(told(0, "prfaas-0", path("pd-d-0", 5, 10)), told(9, "prfaas-0", path("pd-d-0", 6, 30)))
        table = timeline_table(
            [], counters, t0_ns=T0, end_ns=T0 + 2 * 10**9, time_scale=10, byte_scale=0.001, accounts=made
        )
        assert table["unsent_bytes"].tolist() == [10, 30, 30]
        assert table["retransmits"].tolist() == [0, 1, 1]


class TestVirtualTime:
    def test_has_rates_and_what_waits_and_no_figure_of_what_there_is_not(self) -> None:
        history = array("d", [1, 500, 0, 0, 0, 3, 1500, 250, 0, 0])
        made = virtual_timeline([STEP], history, 8e9)
        assert tuple(made.columns) == TIMELINE_COLUMNS
        samples = made[made["event"].isna()]
        assert samples["rate_asked_bps"].tolist() == [8e9, 1e9]
        assert samples["rate_measured_bps"].tolist() == pytest.approx([4000 / TCP_EFFICIENCY] * 2)
        assert samples["unsent_bytes"].tolist() == [0, 250]
        nothing = samples[["backlog_bytes", "drops", "kv_wire_bytes", "retransmits", "rtt_s", "line_held"]]
        assert nothing.isna().all(axis=None)

    def test_a_direction_that_nothing_ever_took_has_no_samples(self) -> None:
        made = virtual_timeline([], array("d", [1, 500, 0, 0, 0]), 8e9)
        assert made["direction"].tolist() == ["to_pd"]

    def test_a_long_run_is_thinned_and_loses_no_byte(self) -> None:
        count = 3 * SAMPLES + 1
        history = array("d", [x for i in range(1, count + 1) for x in (i, 10.0 * i, 0, 0, 0)])
        made = virtual_timeline([], history, 8e9)
        assert 0.7 * SAMPLES < len(made) <= SAMPLES
        assert np.allclose(made["rate_measured_bps"].astype(float), 80 / TCP_EFFICIENCY)

    def test_the_history_is_what_the_run_sent(self) -> None:
        result = simulate("paper", sets=["workload.duration_s=100", "workload.warmup_s=0"])
        samples = result.timeline[result.timeline["direction"] == "to_pd"]
        last = float(samples["kv_bytes"].iloc[-1])
        landed: pd.Series = result.requests.loc[result.requests["landed_s"] <= samples["t_s"].iloc[-1]]
        crossed = landed.loc[landed["prefill_site"] == "prfaas", "kv_bytes"].sum()
        total = result.requests.loc[result.requests["prefill_site"] == "prfaas", "kv_bytes"].sum()
        assert crossed <= last <= total
        assert samples["rate_measured_bps"].max() <= 1.01 * result.scenario.link.rate_bps
