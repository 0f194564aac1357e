"""What commands print for people: tables by Rich on standard output, progress on standard error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from testbed.policies import CAVEAT
from testbed.report.invariant_words import invariant_line
from testbed.report.link_words import cross_words, doctor_line
from testbed.report.phase_table import phase_cells

if TYPE_CHECKING:
    from testbed.doctor import Check
    from traces.load import Trace

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)
CLOCK = {"wire": "on the wire", "virtual": "in virtual time"}
STYLE = {"valid": "bold green", "failed": "bold red", "invalid": "bold yellow"}


def show_plan(result: dict[str, Any]) -> None:
    """The deployments side by side; for the paper's scenario, its cell and our relative error beside each figure."""
    deployments = result["deployments"]
    paper = result.get("paper", {})
    form = "mean length into T_prefill (the paper)" if result["form"] == "mean" else "expectations"
    table = Table(title=f"{result['scenario']}: closed form, {form}")
    table.add_column("")
    for one in deployments:
        table.add_column(one["name"], justify="right")
    rows = [
        ("threshold t, tokens", "threshold_tokens", "{:,.0f}"),
        ("N_prfaas", "n_prfaas", "{}"),
        ("N_p", "n_p", "{}"),
        ("N_d", "n_d", "{}"),
        ("offloaded", "offload_fraction", "{:.1%}"),
        ("Theta prfaas, req/s", "theta_prfaas_rps", "{:.3f}"),
        ("Theta pd-p, req/s", "theta_pd_p_rps", "{:.3f}"),
        ("Theta pd-d, req/s", "theta_pd_d_rps", "{:.3f}"),
        ("Lambda_max, req/s", "lambda_max_rps", "{:.3f}"),
        ("bottleneck", "bottleneck", "{}"),
        ("ratio to homogeneous", "ratio", "{:.2f}"),
        ("unloaded TTFT mean, s", "ttft_mean_s", "{:.2f}"),
        ("unloaded TTFT P90, s", "ttft_p90_s", "{:.2f}"),
        ("egress, Gbps", "egress_bps", "{:.2f}"),
    ]
    for title, key, form in rows:
        cells = []
        for one in deployments:
            flat = {**one, "ttft_mean_s": one["ttft_unloaded_s"]["mean"], "ttft_p90_s": one["ttft_unloaded_s"]["p90"]}
            cells.append(_cell(flat[key], form, key, paper.get("deployments", {}).get(one["name"], {}).get(key)))
        table.add_row(title, *cells)
    out.print(table)
    expectation = ", ".join(
        f"{one['name']} {one['lambda_max_rps']:.3f}" for one in result["expectation"]["deployments"]
    )
    out.print(f"Lambda_max with expectations instead of mean lengths: {expectation}")
    extended = {name: share for name, share in result["lengths"]["extended_fraction"].items() if share}
    if extended:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in extended.items())
        out.print(f"lengths below a profile's first point (its first segment extended): {shares}")


def _cell(value: Any, form: str, key: str, paper: dict[str, Any] | None) -> str:
    scale = 1e-9 if key == "egress_bps" else 1
    text = "-" if value is None else form.format(value * scale if scale != 1 else value)
    if not paper or paper.get("paper") is None or paper.get("relative_error") is None:
        return text
    theirs = form.format(paper["paper"] * scale if scale != 1 else paper["paper"])
    return f"{text}  (paper {theirs}, {paper['relative_error']:+.1%})"


class LoadProgress:
    """A bar over a load's requests, on standard error; plain lines every few seconds where that is no terminal."""

    LINE_S = 10.0

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(
                "{task.completed:.0f}/{task.total:.0f} requests, {task.fields[failed]} failed, {task.fields[left]}"
            ),
            console=err,
            disable=not err.is_terminal,
        )
        self._task: TaskID | None = None
        self._until = self._said = 0.0

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def start(self, trace: Trace, rate_rps: float, expected_s: float) -> None:
        total = len(trace.requests)
        self._until = time.monotonic() + expected_s
        for note in trace.notes:
            err.print(f"workload: {note}")
        for reason, count in trace.dropped.items():
            err.print(f"workload: {count} rows left out: {reason}")
        err.print(
            f"load: {total} requests at {rate_rps:.3f} a model second; about {expected_s:.0f} s of wall time "
            "and what is then still under way"
        )
        self._task = self._bar.add_task("load", total=total, failed=0, left="")

    def update(self, progress: dict[str, Any]) -> None:
        if self._task is None or not progress:
            return
        now = time.monotonic()
        left = f"{max(0.0, self._until - now):.0f} s left"
        self._bar.update(self._task, completed=progress["done"], failed=progress["failed"], left=left)
        if not err.is_terminal and now - self._said >= self.LINE_S:
            self._said = now
            err.print(
                f"load: {progress['done']}/{progress['total']} requests done, {progress['failed']} failed, {left}"
            )


def show_summary(summary: dict[str, Any]) -> None:
    """A load's report, as `make testbed` ends with it."""
    what = f"{summary['scenario']}: {summary['deployment']} under {summary['policy']}"
    table = Table(title=f"{what}, {CLOCK[summary['clock']]} (model seconds)")
    for column in ("", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    split, by_route = summary["ttft_split_s"], summary["ttft_by_route_s"]
    table.add_row("TTFT, s", *_stats(summary["ttft_s"]), style="bold")
    for site, name in (("pd", "prefilled locally"), ("prfaas", "prefilled in PrfaaS")):
        if by_route[site]["mean"] is not None:
            table.add_row(f"  {name}", *_stats(by_route[site]))
    for part, values in split["overall"].items():
        table.add_row(f"  part: {part}", *_stats(values))
    table.add_row("TPOT, s", *_stats(summary["tpot_s"], 4))
    table.add_row("end to end, s", *_stats(summary["e2e_s"]))
    table.add_row("egress wait, s", *_stats(summary["egress_queue_s"]))
    out.print(table)
    expected, link, requests, meter = summary["closed_form"], summary["link"], summary["requests"], summary["meter"]
    out.print(
        f"throughput {summary['throughput_rps']:.3f} req/s of {summary['offered_rps']:.3f} offered (asked for: "
        f"{expected['load_fraction']:.0%} of Lambda_max {expected['lambda_max_rps']:.3f}), "
        f"within the SLO {summary['goodput_rps']:.3f} req/s"
    )
    out.print(
        f"egress {summary['egress_bps'] / 1e9:.2f} Gbps (closed form {expected['egress_bps'] / 1e9:.2f}), offloaded "
        f"{_or_dash(summary['offload_fraction'], '{:.1%}')} (closed form {expected['offload_fraction']:.1%}), "
        f"threshold {_or_dash(summary['scheduler']['threshold_tokens'], '{:,.0f}')} tokens"
    )
    if summary.get("knows_future"):
        out.print(f"{summary['policy']}: {CAVEAT}", style="yellow", markup=False)
    _show_phases(summary["phases"])
    if summary["clock"] == "wire":
        _show_wire(link, meter)
    if doctor := doctor_line(summary):
        out.print(doctor, style="yellow", markup=False)
    if invariants := invariant_line(summary):
        out.print(invariants, style="yellow" if "broken" in invariants else None, markup=False)
    for kind, count in summary["policy_errors"].items():
        out.print(f"the policy failed {count} times: {kind} (contained: a fallback decided)", style="yellow")
    if summary["policy_error"]:
        out.print(f"  first: {summary['policy_error']}", markup=False)
    verdict = summary["verdict"]
    out.print(
        f"verdict: [{STYLE[verdict['status']]}]{verdict['status']}[/] "
        f"({requests['completed']} of {requests['scheduled']} requests completed)"
    )
    for reason in verdict["reasons"]:
        out.print(f"  {reason}", markup=False)


def _show_phases(phases: Sequence[dict[str, Any]]) -> None:
    """A column a phase: what happened in each, beside the closed form's best."""
    if not phases:
        return
    columns = [phase_cells(phase) for phase in phases]
    title, *rest = columns[0]
    table = Table(title="phases")
    for name in (title, *(column[title] for column in columns)):
        table.add_column("" if name == title else name, justify="left" if name == title else "right")
    for key in rest:
        table.add_row(key, *(column[key] for column in columns))
    out.print(table)


def _show_wire(link: dict[str, Any], meter: dict[str, Any]) -> None:
    framing = "" if link["framing"] is None else f" ({link['framing']:+.1%})"
    out.print(
        f"on the wire: {link['wan_tx_bytes']:,} bytes for {link['kv_bytes']:,} of KV{framing}, "
        f"{link['direct_packets']} packets unshaped, {link['retransmits']} retransmits"
    )
    if words := cross_words(link):
        out.print(words)
    cpu = "" if meter["cpu_mean"] is None else f"; CPU {meter['cpu_mean']:.0%} mean, {meter['cpu_max']:.0%} at most"
    late = [
        ("client", meter["client_late_p99_s"]),
        ("workers", meter["timer_late_p99_s"]),
        ("gateway", meter["gateway_late_p99_s"]),
    ]
    out.print(
        "lateness p99, wall ms: "
        + ", ".join(f"{name} {value * 1e3:.1f}" for name, value in late if value is not None)
        + cpu
    )


def show_fidelity(comparison: dict[str, Any]) -> None:
    """The three clocks beside each other."""
    what = f"{comparison['scenario']}: {comparison['deployment']} under {comparison['policy']}"
    table = Table(title=f"{what} at {comparison['load_fraction']:.0%} of Lambda_max")
    for column in ("", "closed form", "virtual time", "wire", "virtual / wire - 1"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in comparison["figures"].items():
        scale, form = (1e-9, "{:.2f}") if name.endswith("_bps") else (1, "{:.4f}")
        cells = ["-" if row[key] is None else form.format(row[key] * scale) for key in ("closed", "virtual", "wire")]
        table.add_row(name.replace("_bps", ", Gbps"), *cells, _or_dash(row["error"], "{:+.1%}"))
    out.print(table)
    out.print("closed form: unloaded TTFT, no queue and no transfer")
    if comparison["knows_future"]:
        out.print(f"{comparison['policy']}: {CAVEAT}", style="yellow", markup=False)
    for clock, verdict in comparison["verdict"].items():
        out.print(f"{clock}: [{STYLE[verdict['status']]}]{verdict['status']}[/]")
        for reason in verdict["reasons"]:
            out.print(f"  {reason}", markup=False)


def show_repeats(repeated: dict[str, Any]) -> None:
    """The main figures over several runs: mean and 95 % interval."""
    table = Table(title=f"over {repeated['n']} runs, seeds {repeated['seeds'][0]} to {repeated['seeds'][-1]}")
    for column in ("", "mean", "95 % interval"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in repeated["figures"].items():
        scale, form = (1e-9, "{:.3f}") if name.endswith("_bps") else (1, "{:.4f}")
        low, mean, high = (None if one[key] is None else one[key] * scale for key in ("low", "mean", "high"))
        spread = "-" if low is None else f"{form.format(low)} .. {form.format(high)}"
        table.add_row(name.replace("_bps", ", Gbps"), _or_dash(mean, form), spread)
    out.print(table)
    for seed, verdict in zip(repeated["seeds"], repeated["verdicts"], strict=True):
        if verdict != "valid":
            out.print(f"seed {seed}: [{STYLE[verdict]}]{verdict}[/], and counted all the same")


def show_sweep(result: dict[str, Any]) -> None:
    """Lambda_max of each deployment: both closed forms, and what was found in virtual time."""
    slo = result["slo"]
    table = Table(title=f"{result['scenario']}: Lambda_max, req/s; the SLO is a P90 TTFT of {slo['ttft_p90_s']:g} s")
    for column in ("", "closed form", "expectations", "simulated,\nat the SLO", "simulated,\nqueues only"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for one in result["deployments"]:
        limit, spread = one["lambda_max_rps"], one["intervals"] or {}
        table.add_row(
            one["name"] if one["name"] == one["policy"] else f"{one['name']} ({one['policy']})",
            f"{limit['closed']:.3f}",
            f"{limit['expectation']:.3f}",
            _with_interval(limit["simulated"], spread.get("simulated")),
            _with_interval(one["saturated_rps"], spread.get("saturated")),
        )
    out.print(table)
    out.print(
        "closed form: the paper's, mean lengths, nominal link; expectations: at 0.956 of the link. At the SLO: the "
        f"highest rate whose run meets it while no queue grows by over {result['growing_above']:.0%} of the arrivals; "
        f"{result['point_requests']:,} requests a point, found to {result['tolerance']:.0%}"
    )
    for one in result["deployments"]:
        if one["knows_future"]:
            out.print(f"{one['name']}: {one['policy']} {CAVEAT}", style="yellow", markup=False)
        if one["note"]:
            out.print(f"{one['name']}: {one['note']}", style="yellow")


def _with_interval(value: float, found: dict[str, Any] | None) -> str:
    if not found or found["low"] is None:
        return f"{value:.3f}"
    return f"{value:.3f}\n{found['low']:.3f} .. {found['high']:.3f}"


def _stats(values: dict[str, float | None], digits: int = 3) -> list[str]:
    return [_or_dash(values[key], f"{{:.{digits}f}}") for key in ("mean", "p50", "p90", "p99")]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def show_status(result: dict[str, Any]) -> None:
    """Processes and, from the gateway, nodes and the present session."""
    if not result.get("up"):
        out.print(
            "no testbed is up"
            + ("; what is left of one: prfaas down removes it" if result.get("stale") else "; start one: prfaas up")
        )
        return
    gateway = result.get("gateway")
    out.print(
        f"{result.get('scenario', '?')} at http://127.0.0.1:{result['port']}, up since {result.get('started_at', '?')}"
    )
    nodes = {one["name"]: one for one in gateway["nodes"]} if gateway else {}
    table = Table()
    for column in ("process", "site", "pid", "state", "role", "queued", "decoding", "told, s ago"):
        table.add_column(column)
    for one in (result.get("supervisor") or {}).get("processes", ()):
        node = nodes.get(one["name"], {})
        state = (
            one["state"]
            if one["state"] == "running"
            else f"dead ({one.get('signal') or 'exit ' + str(one.get('exit_code'))})"
        )
        told = node.get("told_age_s")
        table.add_row(
            one["name"], one["site"] or "", str(one.get("host_pid", one["pid"])), state,
            node.get("role", one.get("role", "")), str(node.get("queued_requests", "")),
            str(node.get("decoding_requests", "")), "" if told is None else f"{told:.1f}",
            style=None if one["state"] == "running" else "red",
        )  # fmt: skip
    out.print(table)
    if gateway is None:
        out.print(f"the gateway gives no answer: {result.get('gateway_error', '')}", style="red", markup=False)
        return
    refused = {one["name"]: sum(one["refused_connections"].values()) for one in gateway["nodes"]}
    if any(refused.values()):
        told = ", ".join(f"{count} by {name}" for name, count in refused.items() if count)
        out.print(f"connections of strangers refused: {told}", style="yellow", markup=False)
    session = gateway["session"]
    ended = ", ".join(f"{count} {status}" for status, count in session["ended"].items()) or "none ended"
    out.print(
        f"policy {gateway['policy']}, session {session['id']}: {session['arrived']} requests, "
        f"{session['in_flight']} under way, {ended}"
    )


def show_checks(checks: Sequence[Check]) -> None:
    """The doctor's findings."""
    table = Table()
    for column in ("check", "", "found", "remedy"):
        table.add_column(column)
    style = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    for check in checks:
        table.add_row(check.name, f"[{style[check.status]}]{check.status}[/]", check.detail, check.remedy)
    out.print(table)


def show_trace(result: dict[str, Any]) -> None:
    """A trace's description, one figure a line."""
    table = Table(show_header=False)
    for key, value in _flat(result):
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    out.print(table)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list):
        return [(prefix, item) for item in value] or [(prefix, "none")]
    return [(prefix, value)]
