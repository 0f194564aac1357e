"""What `prfaas link` prints for people: what was asked and kept, what was measured, what this machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from testbed.show import out

if TYPE_CHECKING:
    from netem.capabilities import Capability
    from testbed.report.link_doctor import Diagnosis


def show_link(result: dict[str, Any]) -> None:
    """Both directions of the link."""
    for direction, one in result.items():
        counters = one["counters"]
        out.print(
            f"{direction}: {one['rate_bps'] / 1e9:g} Gbps ({one['wall']['rate_bps'] / 1e6:g} Mbit/s on the wire, "
            f"TCP gets {one['wall']['expected_goodput_bps'] / 1e6:.1f}), {_impaired(one)}{_capped(one)}{_cut(one)}; "
            f"sent {counters['kv']['sent_bytes']:,} bytes, "
            f"{counters['kv']['drops']} drops, {counters['kv']['backlog_bytes']:,} bytes waiting, "
            f"{counters['direct_packets']} packets unshaped"
        )
        if line := counters.get("delay_line"):
            out.print(f"  {_told_of_line(line)}")
        if one["layers"]:
            out.print(f"  laid over it: {', '.join(one['layers'])}", markup=False)


def _cut(one: dict[str, Any]) -> str:
    asked, kept = one["outage"], one["outage_kept"]
    return f", OUTAGE: {asked or 'none'}{f' (the kernel has {kept})' if kept != asked else ''}" if asked or kept else ""


def show_diagnosis(told: Diagnosis) -> None:
    """What the link doctor says of a run: what is wrong, what limited it when, how the system took that."""
    for one in told.wrong:
        out.print(f"wrong: {one.text}", style="bold red", markup=False)
    for span in told.spans:
        out.print(span.sentence(), markup=False)
    for one in told.findings:
        if one.level == "note":
            out.print(one.text, markup=False)


def _capped(one: dict[str, Any]) -> str:
    return f", {one['per_flow_bps'] / 1e9:g} Gbps a connection" if one["per_flow_bps"] else ""


def _impaired(one: dict[str, Any]) -> str:
    if not (one["delay_s"] or one["loss"]):
        return "no delay"
    by = {"netem": " (netem)", "nfqueue": " (delay line)"}.get(one["delay_by"]["delay"], "")
    jitter = f" +- {one['jitter_s'] * 1e3:g}" if one["jitter_s"] else ""
    return f"delay {one['delay_s'] * 1e3:g}{jitter} ms one way, loss {one['loss']:.3g}{by}"


def _told_of_line(line: dict[str, Any]) -> str:
    died = f"it died {line['deaths']} times (the link was down for {line['outage_s']:.2f} s)" if line["deaths"] else ""
    if line["down"]:
        return f"delay line: DOWN; {died}"
    return "; ".join(
        part
        for part in (
            f"delay line: {line['passed']:,} packets passed, {line['held']} held, {line['lost']} lost on purpose, "
            f"{line['overflowed']} overflowed",
            f"late p50 {line['late_p50_s'] * 1e6:.0f} us, p99 {line['late_p99_s'] * 1e6:.0f} us",
            died,
        )
        if part
    )


def show_capabilities(found: Sequence[Capability]) -> None:
    """What a link can be asked for, and what does it."""
    table = Table()
    for column in ("of a link", "by", "why", "remedy"):
        table.add_column(column)
    for one in found:
        table.add_row(one.name, one.backend or "nothing", one.why, one.remedy)
    out.print(table)


def show_verified(result: dict[str, Any]) -> None:
    """Asked, expected and measured, both ways."""
    table = Table()
    columns = ("direction", "asked", "TCP can get", "measured", "error", "first second", "RTT asked", "RTT p50")
    for column in (*columns, "jitter", "lost"):
        table.add_column(column, justify="right" if column != "direction" else "left")
    for direction, one in result["directions"].items():
        table.add_row(
            direction,
            *(f"{one[key] / 1e9:.3f} Gbps" for key in ("asked_bps", "expected_bps", "measured_bps")),
            f"{one['error']:+.2%}",
            f"{one['first_second_bps'] / 1e9:.3f} of {one['first_second_bound_bps'] / 1e9:.3f} Gbps",
            *(f"{one[key] * 1e3:.2f} ms" for key in ("asked_rtt_s", "rtt_p50_s", "rtt_jitter_s")),
            f"{one['train']['lost']} of {one['train']['sent']}",
            style=None if one["ok"] else "red",
        )
    out.print(table)
    wrong = [
        f"{direction} ({', '.join(one['wrong'])})" for direction, one in result["directions"].items() if not one["ok"]
    ]
    out.print(
        f"the link does NOT carry what was asked: {'; '.join(wrong)} (tolerance of goodput {result['tolerance']:.0%})"
        if wrong
        else "the link carries what was asked"
    )
