"""How far the three clocks are apart: one scenario and seed in closed form, in virtual time, and on the wire.

The same requests (same seed, same arrivals) go through both clocks; the closed form knows no queue, so it speaks of
unloaded TTFT, throughput, offload and egress only. Relative errors are against the wire.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson

from testbed.report.rows import PARTS

STATISTICS: Final = ("mean", "p50", "p90", "p99")


def compare(virtual: dict[str, Any], wire: dict[str, Any]) -> dict[str, Any]:
    """The table of the three clocks from two summaries of one scenario: figure -> {closed, virtual, wire, error}.

    error: virtual / wire - 1; None where the wire's figure is 0 or missing. Figures in model units.
    """
    closed = wire["closed_form"]
    figures: dict[str, dict[str, float | None]] = {}

    def add(name: str, closed_value: float | None, virtual_value: float | None, wire_value: float | None) -> None:
        usable = virtual_value is not None and wire_value
        error = virtual_value / wire_value - 1 if usable and virtual_value is not None and wire_value else None
        figures[name] = {"closed": closed_value, "virtual": virtual_value, "wire": wire_value, "error": error}

    for key in STATISTICS:
        add(f"ttft_s.{key}", closed["ttft_unloaded_s"].get(key), virtual["ttft_s"][key], wire["ttft_s"][key])
    for part in PARTS:
        for key in ("mean", "p90"):
            add(
                f"ttft_split_s.{part}.{key}",
                None,
                virtual["ttft_split_s"]["overall"][part][key],
                wire["ttft_split_s"]["overall"][part][key],
            )
    for key in ("mean", "p90"):
        add(f"egress_queue_s.{key}", None, virtual["egress_queue_s"][key], wire["egress_queue_s"][key])
        add(f"e2e_s.{key}", None, virtual["e2e_s"][key], wire["e2e_s"][key])
    add("tpot_s.mean", None, virtual["tpot_s"]["mean"], wire["tpot_s"]["mean"])
    offered = min(closed["offered_rps"], closed["lambda_max_rps"])
    add("throughput_rps", offered, virtual["throughput_rps"], wire["throughput_rps"])
    add("offload_fraction", closed["offload_fraction"], virtual["offload_fraction"], wire["offload_fraction"])
    add("egress_bps", closed["egress_bps"], virtual["egress_bps"], wire["egress_bps"])
    return {
        "scenario": wire["scenario"],
        "deployment": wire["deployment"],
        "policy": wire["policy"],
        "knows_future": wire["knows_future"],
        "load_fraction": closed["load_fraction"],
        "verdict": {"wire": wire["verdict"], "virtual": virtual["verdict"]},
        "figures": figures,
    }


def save(out: Path, comparison: dict[str, Any]) -> Path:
    """Write fidelity.json into the wire run's results folder."""
    path = out / "fidelity.json"
    path.write_bytes(orjson.dumps(comparison, option=orjson.OPT_INDENT_2))
    return path
