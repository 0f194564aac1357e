"""The phases of a summary as a table for people: the same cells in the terminal and in `report.md`."""

from __future__ import annotations

from typing import Any


def phase_cells(phase: dict[str, Any]) -> dict[str, str]:
    """One phase as a row of a table for people: title -> cell."""
    ttft, egress, best = phase["ttft_s"], phase["egress_queue_s"], phase["closed_form"]
    near, moved = phase["threshold_over_optimum"]["near_fraction"], phase["threshold_tokens"]
    return {
        "phase": phase["name"],
        "from .. to, s": f"{phase['start_s']:g} .. {phase['end_s']:g}",
        "link, Gbps": f"{best['link_bps'] / 1e9:g}",
        "req/s of Lambda_max": f"{_cell(phase['throughput_rps'], '.3f')} of {best['lambda_max_rps']:.3f}",
        "failed": f"{phase['requests']['failed']}",
        "TTFT mean, P90, s": f"{_cell(ttft['mean'], '.2f')}, {_cell(ttft['p90'], '.2f')}",
        "offloaded": _cell(phase["offload_fraction"], ".1%"),
        "egress wait mean, P95, s": f"{_cell(egress['mean'], '.2f')}, {_cell(egress['p95'], '.2f')}",
        "t, tokens": f"{_cell(moved['start'], ',.0f')} .. {_cell(moved['end'], ',.0f')}",
        "best t": _cell(best["threshold_tokens"], ",.0f"),
        "within 15 %": _cell(near, ".0%"),
        "settled after, s": _cell(phase["settle_s"], ".0f"),
        "changes of t, of roles": f"{phase['threshold_changes']}, {phase['role_changes']}",
    }


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
