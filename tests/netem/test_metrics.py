"""The link's metrics as text; scraped from a real agent: tests/wire."""

from __future__ import annotations

from typing import Any

from netem.link import LinkState
from netem.metrics import exposition
from netem.tc import ClassCounters, Counters

WAY = '{direction="to_pd"}'
COUNTERS = Counters(123, ClassCounters(1000, 2, 3, 4, 1), ClassCounters(50, 1, 0, 0, 0), 7)
LINE = {"down": False, "deaths": 1, "held": 3, "late_p99_s": 0.25, "lost": 5, "overflowed": 6}


def told(line: dict[str, Any] | None) -> dict[str, float]:
    text = exposition({"to_pd": LinkState(1e8, delay_s=0.01)}, {"to_pd": COUNTERS}, {"to_pd": line}).decode()
    rows = (row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
    return {name: float(value) for name, value in rows}


def test_state_and_counters_are_told() -> None:
    found = told(None)
    assert found[f"prfaas_link_rate_bits_per_second{WAY}"] == 1e8
    assert found['prfaas_link_sent_bytes_total{class="kv",direction="to_pd"}'] == 1000
    assert found['prfaas_link_sent_packets_total{class="control",direction="to_pd"}'] == 1
    assert found['prfaas_link_drops_total{class="kv",direction="to_pd"}'] == 3
    assert found['prfaas_link_backlog_bytes{class="kv",direction="to_pd"}'] == 4
    assert found[f"prfaas_link_unshaped_packets_total{WAY}"] == 7
    assert not any(name.startswith("prfaas_delay_line") for name in found)


def test_a_delay_line_tells_its_figures() -> None:
    found = told(LINE)
    assert found[f"prfaas_delay_line_held_packets{WAY}"] == 3
    assert found[f"prfaas_delay_line_late_p99_seconds{WAY}"] == 0.25
    assert found[f"prfaas_delay_line_lost_packets_total{WAY}"] == 5
    assert found[f"prfaas_delay_line_down{WAY}"] == 0


def test_of_a_dead_delay_line_it_is_told_that_it_is_dead() -> None:
    """As `Keeper.describe` has it then: it cannot be asked for more."""
    found = told({"mechanism": "nft_queue", "down": True, "deaths": 2, "outage_s": 0.0})
    assert found[f"prfaas_delay_line_down{WAY}"] == 1
    assert found[f"prfaas_delay_line_deaths_total{WAY}"] == 2
    assert f"prfaas_delay_line_late_p99_seconds{WAY}" not in found
