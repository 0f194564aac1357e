"""Policies side by side for people: `testbed.compare`'s result as a table."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from rich.table import Table

from testbed.policies import CAVEAT
from testbed.show import CLOCK, STYLE, out

Form = tuple[float, str]

COUNT: Final[Form] = (1, ",.1f")
RATE: Final[Form] = (1, ",.3f")
SHARE: Final[Form] = (100, ",.1f")
SECONDS: Final[Form] = (1, ",.3f")
GBPS: Final[Form] = (1e-9, ",.2f")

ROWS: Final[tuple[tuple[str, str, Form], ...]] = (
    ("offered, req/s", "offered_rps", RATE),
    ("completed", "completed", COUNT),
    ("failed", "failed", COUNT),
    ("TTFT mean, s", "ttft_mean_s", SECONDS),
    ("TTFT P50, s", "ttft_p50_s", SECONDS),
    ("TTFT P90, s", "ttft_p90_s", SECONDS),
    ("TTFT P99, s", "ttft_p99_s", SECONDS),
    ("  part: client, s", "ttft_client_mean_s", SECONDS),
    ("  part: queue, s", "ttft_queue_mean_s", SECONDS),
    ("  part: prefill, s", "ttft_prefill_mean_s", SECONDS),
    ("  part: transfer, s", "ttft_transfer_mean_s", SECONDS),
    ("  part: admission, s", "ttft_admission_mean_s", SECONDS),
    ("  part: return, s", "ttft_return_mean_s", SECONDS),
    ("throughput, req/s", "throughput_rps", RATE),
    ("goodput, req/s", "goodput_rps", RATE),
    ("offloaded, %", "offload_fraction", SHARE),
    ("egress, Gbps", "egress_bps", GBPS),
    ("egress wait, s", "egress_queue_mean_s", SECONDS),
    ("egress wait P90, s", "egress_queue_p90_s", SECONDS),
    ("threshold changes", "threshold_changes", COUNT),
    ("role changes", "role_changes", COUNT),
)


def show_comparison(comparison: dict[str, Any]) -> None:
    """A column a policy; with a figure, its difference to the first policy's, and its interval over several runs."""
    first, *others = comparison["policies"]
    repeated = any(len(one["seeds"]) > 1 for one in comparison["runs"].values())
    what = f"{comparison['scenario']}: {comparison['deployment']} {CLOCK[comparison['clock']]} (model seconds)"
    beside = f"({'beneath' if repeated else 'behind'} a figure: its difference to {first}'s"
    seeds = comparison["runs"][first]["seeds"]
    over = (
        f", mean and 95 % interval over {len(seeds)} paired runs, seeds {seeds[0]} to {seeds[-1]}" if repeated else ""
    )
    table = Table(title=f"{what}\n{beside}{over})")
    table.add_column("", no_wrap=True)
    for name in comparison["policies"]:
        table.add_column(name, justify="right")
    for title, key, form in ROWS:
        cells = [_number(comparison["figures"][first][key]["mean"], form)]
        for name in others:
            value = _number(comparison["figures"][name][key]["mean"], form)
            change = _change(comparison["differences"][name][key], form)
            cells.append(f"{value}\n{change}" if repeated else f"{value} {change}")
        table.add_row(title, *cells)
    table.add_row("verdict", *(_verdicts(one["verdicts"]) for one in comparison["runs"].values()))
    out.print(table)
    for name, summary in comparison["policies"].items():
        if summary.get("knows_future"):
            out.print(f"{name}: {CAVEAT}", style="yellow", markup=False)
    for name, one in comparison["runs"].items():
        for seed, verdict, reasons in zip(one["seeds"], one["verdicts"], one["reasons"], strict=True):
            if verdict != "valid":
                out.print(f"{name}, seed {seed}: [{STYLE[verdict]}]{verdict}[/], and counted all the same")
            for reason in reasons:
                out.print(f"  {reason}", markup=False)


def _verdicts(verdicts: list[str]) -> str:
    if len(verdicts) == 1:
        return f"[{STYLE[verdicts[0]]}]{verdicts[0]}[/]"
    return ", ".join(f"{count} [{STYLE[verdict]}]{verdict}[/]" for verdict, count in Counter(verdicts).items())


def _number(value: float | None, form: Form, sign: str = "") -> str:
    if value is None:
        return "-"
    scale, digits = form
    text = format(value * scale, sign + digits)
    return text.removesuffix(".0") if form is COUNT else text


def _change(difference: dict[str, float | None], form: Form) -> str:
    if difference["mean"] is None:
        return ""
    if not any(difference.values()):
        return "(=)"
    text = _number(difference["mean"], form, "+")
    if difference["low"] is None:
        return f"({text})"
    return f"{text} ({_number(difference['low'], form, '+')}..{_number(difference['high'], form, '+')})"
