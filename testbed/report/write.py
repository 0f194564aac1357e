"""The results folder: every file of a run, and its summary as Markdown for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pandas as pd

from testbed.policies import CAVEAT
from testbed.report.invariant_words import invariant_lines
from testbed.report.link_files import LinkReport
from testbed.report.link_words import cross_words, doctor_lines, verified_lines
from testbed.report.phase_table import phase_cells
from testbed.report.rows import PARTS
from testbed.scenario import Scenario


def write_results(
    out: Path,
    scenario: Scenario,
    summary: dict[str, Any],
    requests: pd.DataFrame,
    timeline: pd.DataFrame,
    facts: dict[str, Any],
    link: LinkReport,
) -> None:
    """Write scenario.yaml, provenance.json, requests.csv, timeline.csv, link.csv, link.html, summary.json and report.md
    into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "scenario.yaml").write_text(scenario.to_yaml())
    (out / "provenance.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    requests.to_csv(out / "requests.csv", index=False, float_format="%.9f")
    timeline.to_csv(out / "timeline.csv", index=False, float_format="%.6f")
    link.write(out)
    write_summary(out, summary)


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write summary.json and report.md into `out`."""
    (out / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
    (out / "report.md").write_text(markdown(summary))


def markdown(summary: dict[str, Any]) -> str:
    """The summary as a short Markdown report, verdict first."""
    on_wire = summary["clock"] == "wire"
    verdict, requests, link = summary["verdict"], summary["requests"], summary["link"]
    expected, threshold = summary["closed_form"], summary["scheduler"]["threshold_tokens"]
    lines = [
        f"# {summary['scenario']}: {summary['deployment']} under `{summary['policy']}`",
        "",
        f"**{verdict['status'].upper()}**"
        + ("" if verdict["reasons"] else ": every request completed, and the measurement can be believed."),
        *(f"- {reason}" for reason in verdict["reasons"]),
        *([f"- `{summary['policy']}`: {CAVEAT}"] if summary.get("knows_future") else ()),
        "",
        "| | mean | p50 | p90 | p99 |",
        "|---|---|---|---|---|",
        _row("TTFT, s", summary["ttft_s"]),
        *(_row(f"… prefilled in {site}, s", values) for site, values in summary["ttft_by_route_s"].items()),
        *(_row(f"… part: {part}, s", summary["ttft_split_s"]["overall"][part]) for part in PARTS),
        _row("TPOT, s", summary["tpot_s"], 5),
        _row("end to end, s", summary["e2e_s"]),
        _row("egress wait (offloaded: prefill end to landed), s", summary["egress_queue_s"]),
        "",
        "| | measured | closed form |",
        "|---|---|---|",
        f"| requests | {requests['scheduled']} scheduled, {requests['completed']} completed, "
        f"{requests['failed']} failed | |",
        f"| offered, requests/s | {_number(summary['offered_rps'])} | {_number(expected['offered_rps'])} |",
        f"| throughput, requests/s | {_number(summary['throughput_rps'])} "
        f"| at most {_number(expected['lambda_max_rps'])} |",
        f"| goodput, requests/s | {_number(summary['goodput_rps'])} | |",
        f"| offloaded | {_percent(summary['offload_fraction'])} | {_percent(expected['offload_fraction'])} |",
        f"| egress, Gbps | {_gbps(summary['egress_bps'])} | {_gbps(expected['egress_bps'])} |",
        f"| threshold, tokens | {_number(threshold, 0)} | {_number(expected['threshold_tokens'], 0)} |",
        "",
        *_phases(summary["phases"]),
        ("Bytes on the wire" if on_wire else "Bytes on the modelled link")
        + f": {link['wan_tx_bytes']:,} for {link['kv_bytes']:,} of KV"
        + (f" ({link['framing']:+.1%})" if link["framing"] is not None else "")
        + f", {link['direct_packets']} packets unshaped, {link['retransmits']} retransmits.",
        "",
        *([f"{words}.", ""] if (words := cross_words(link)) else ()),
        _meter(summary["meter"]) if on_wire else "In virtual time: the link is modelled, and nothing is late.",
        "",
        *verified_lines(link),
        *invariant_lines(summary),
        *doctor_lines(summary),
    ]
    return "\n".join(lines)


def _phases(phases: list[dict[str, Any]]) -> list[str]:
    """The phases as a table, its titles those of the terminal's."""
    if not phases:
        return []
    cells = [phase_cells(phase) for phase in phases]
    titles, *rows = ["| " + " | ".join(row) + " |" for row in (list(cells[0]), *(list(one.values()) for one in cells))]
    return [titles, "|---" * len(cells[0]) + "|", *rows, ""]


def _row(name: str, values: dict[str, float | None], digits: int = 3) -> str:
    return f"| {name} | " + " | ".join(_number(values[key], digits) for key in ("mean", "p50", "p90", "p99")) + " |"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _gbps(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _meter(meter: dict[str, Any]) -> str:
    late = [
        ("client", meter["client_late_p99_s"]),
        ("worker timers", meter["timer_late_p99_s"]),
        ("gateway loop", meter["gateway_late_p99_s"]),
    ]
    words = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in late if value is not None)
    cpu = "" if meter["cpu_mean"] is None else f"; CPU {meter['cpu_mean']:.0%} mean, {meter['cpu_max']:.0%} at most"
    return (
        f"The meter, wall time: lateness p99 of {words} (bound {meter['late_bound_s'] * 1e3:g} ms; one ms of wall "
        f"time is {meter['time_scale'] / 1e3:g} s of model time){cpu}."
    )
