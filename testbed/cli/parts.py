"""The parts by themselves: `link` and `trace`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli.options import JsonOption
from testbed.cli.shared import check_plot, print_json, running_testbed, say

if TYPE_CHECKING:
    from traces.fetch import Public

link_app = typer.Typer(
    help="The link between the sites: of the running testbed, and as a schedule.", no_args_is_help=True
)
trace_app = typer.Typer(help="Workload traces.", no_args_is_help=True)


@link_app.command("show")
def link_show(json: JsonOption = False) -> None:
    """Rates asked and kept, and the counters, both directions."""
    from testbed import linkctl
    from testbed.show_link import show_link

    testbed = running_testbed()
    result = linkctl.show(testbed.scenario, testbed.state)
    if json:
        print_json(result)
    else:
        show_link(result)


@link_app.command("set")
def link_set(
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="RATE", help="The real system's rate, such as 8gbps: bits per model second."),
    ] = None,
    delay_s: Annotated[
        float | None, typer.Option("--delay-s", metavar="S", help="One way, model seconds: 0.015 is 15 ms.")
    ] = None,
    jitter_s: Annotated[
        float | None, typer.Option("--jitter-s", metavar="S", help="Moves the delay by up to this, either way.")
    ] = None,
    loss: Annotated[
        float | None, typer.Option("--loss", metavar="FRACTION", help="Packets that never arrive: 0.01 is 1 %.")
    ] = None,
    outage: Annotated[
        str | None,
        typer.Option("--outage", metavar="stall|blackhole|down|none", help="Cut it: packets wait, are lost, no link."),
    ] = None,
    direction: Annotated[
        str | None, typer.Option("--direction", metavar="to_pd|to_prfaas", help="One direction; both unless given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Change the link now, while traffic flows."""
    from netem.link import DIRECTIONS, OUTAGES, parse_rate
    from testbed import linkctl
    from testbed.show_link import show_link

    if direction not in (None, *DIRECTIONS):
        raise typer.BadParameter(f"{direction!r}: use to_pd or to_prfaas", param_hint="--direction")
    if outage not in (None, "none", *OUTAGES):
        raise typer.BadParameter(f"{outage!r}: use {', '.join(OUTAGES)} or none", param_hint="--outage")
    if rate is None and delay_s is None and jitter_s is None and loss is None and outage is None:
        raise typer.BadParameter("nothing to change; give --rate, --delay-s, --jitter-s, --loss or --outage")
    testbed = running_testbed()
    rate_bps = None if rate is None else parse_rate(rate)
    asked: dict[str, Any] = {"rate_bps": rate_bps, "delay_s": delay_s, "jitter_s": jitter_s, "loss": loss}
    asked["outage"] = outage
    result = linkctl.change(testbed.scenario, testbed.state, direction, **asked)
    if json:
        print_json(result)
    else:
        show_link(result)


@link_app.command("verify")
def link_verify(
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0.5, max=60, help="Wall seconds a direction: 2, of a cell of the matrix 4."),
    ] = None,
    connections: Annotated[
        int | None, typer.Option("--connections", min=1, max=64, help="TCP connections; the scenario's unless given.")
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Everything the link must hold, on one of its own: no testbed need be up.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Of the matrix, one cell of each kind.")] = False,
    in_uml: Annotated[
        bool, typer.Option("--in-uml", help="The matrix in User-Mode Linux too, by netem, and how the two agree.")
    ] = False,
    cells: Annotated[
        str | None, typer.Option("--cells", metavar="KIND,...", help="Of the matrix; bdp only when it is named here.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="TEXT", help="Cells with this in their name.")] = None,
    schedule_s: Annotated[
        float | None, typer.Option("--schedule-s", min=3, max=600, help="Wall seconds of the matrix's schedule: 60.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of the matrix's schedule: 1.")] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Of the matrix: write it as Markdown too.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure what the link really carries, both ways, against what was asked. Exit code 3 when it is not that; of the
    matrix 1, and 3 when this machine was too busy to say."""
    if not matrix:
        given: dict[str, object] = {"--quick": quick or None, "--in-uml": in_uml or None, "--cells": cells}
        given |= {"--only": only, "--page": page, "--schedule-s": schedule_s, "--seed": seed}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(f"{', '.join(wrong)}: of the matrix; give --matrix too")
        _verify_running(2.0 if seconds is None else seconds, connections, json)
        return
    from netem.cells import KINDS, Settings
    from testbed.linkmatrix import matrix as measured
    from testbed.show_matrix import markdown, show_matrix

    if connections is not None:
        raise typer.BadParameter("the matrix has its own; leave it out", param_hint="--connections")
    kinds = None if cells is None else [kind.strip() for kind in cells.split(",")]
    if kinds is not None and not set(kinds) <= set(KINDS):
        raise typer.BadParameter(f"{cells!r}: use some of {', '.join(KINDS)}", param_hint="--cells")
    asked: dict[str, Any] = {"seconds": seconds, "schedule_s": schedule_s, "seed": seed}
    settings = Settings(**{name: value for name, value in asked.items() if value is not None})
    if page is not None and not page.parent.is_dir():
        raise typer.BadParameter(f"{page}: there is no folder {page.parent}; make it", param_hint="--page")
    result = measured(settings, kinds=kinds, short=quick, in_uml=in_uml, only=only, say=say)
    if page is not None:
        page.write_text(markdown(result, " ".join(["prfaas", *sys.argv[1:]])))
    if json:
        print_json(result)
    else:
        show_matrix(result)
    raise typer.Exit({"pass": 0, "fail": 1, "invalid": 3}[result["status"]])


def _verify_running(seconds: float, connections: int | None, json: bool) -> None:
    from testbed import linkctl
    from testbed.show_link import show_verified

    testbed = running_testbed()
    result = linkctl.verify(testbed.scenario, testbed.state, seconds=seconds, connections=connections)
    if json:
        print_json(result)
    else:
        show_verified(result)
    raise typer.Exit(0 if result["ok"] else 3)


@link_app.command("plot")
def link_plot(
    schedule: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE",
            help="A mapping such as '{kind: square, high_bps: 8gbps, low_bps: 1gbps, period_s: 60}', a YAML or JSON "
            "file with one, a recording (CSV with t_s,rate_bps, or mahimahi), or a scenario.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Draw it (.png, .svg or .pdf).")] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", metavar="S", help="How much of it, model seconds from t = 0.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For a model that draws and has no seed of its own.")] = 1,
    json: JsonOption = False,
) -> None:
    """Show what a link that varies does: its figures, drawn with --out, its steps with --json."""
    from testbed.link_schedule import describe, find

    check_plot(out, "--out")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise typer.BadParameter(f"{duration_s:g}: must be seconds, more than 0", param_hint="--duration-s")
    result = describe(find(schedule, seed), duration_s)
    if out is not None:
        from testbed.figures.schedule import plot_schedule

        plot_schedule(result, out)
        say(f"drew {out}")
    if not json:
        result = {key: value for key, value in result.items() if key != "steps" and value != {}}
        for told in result.get("cross", {}).values():
            del told["steps"]
    _show(result, json)


@link_app.command("capabilities")
def link_capabilities(json: JsonOption = False) -> None:
    """What a link can be asked for here, what does it, and what is missing. Exit code 1 when something is."""
    from netem.capabilities import probe
    from testbed.launch.namespaces import unshare_argv
    from testbed.show_link import show_capabilities

    found = probe(unshare_argv())
    ok = all(one.backend for one in found if one.name != "sch_netem")
    if json:
        print_json({"ok": ok, "capabilities": [asdict(one) for one in found]})
    else:
        show_capabilities(found)
    raise typer.Exit(0 if ok else 1)


TraceFileArg = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Mooncake or Qwen-Bailian JSONL, Azure or BurstGPT CSV, our own, or any CSV with --map."
    ),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=COLUMN",
        help="For any CSV: arrival_s (or arrival_ms, arrival_time), input_tokens, output_tokens; repeatable.",
    ),
]
CheckUnitsOption = Annotated[
    bool, typer.Option("--check-units/--no-check-units", help="Refuse stamps whose unit nobody can have meant.")
]


@trace_app.command("info")
def trace_info(
    file: TraceFileArg, columns: MapOption = None, check_units: CheckUnitsOption = True, json: JsonOption = False
) -> None:
    """What a trace holds: rows kept and dropped, rate, dispersion, lengths, ideal prefix hit."""
    from traces.info import describe
    from traces.load import load

    _show(describe(load(file, _mapping(columns), check_units=check_units)), json)


@trace_app.command("convert")
def trace_convert(
    file: TraceFileArg,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Its ending says the format: .jsonl (ours), .mooncake.jsonl, .csv; .gz may follow."
        ),
    ],
    start_s: Annotated[float, typer.Option("--start-s", metavar="S", help="Leave out what comes before.")] = 0.0,
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", metavar="S", help="Length of the slice; to the end unless given.")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option("--time-scale", metavar="F", help="Stretch the clock: 2 lasts twice as long.")
    ] = None,
    rate_rps: Annotated[
        float | None, typer.Option("--rate-rps", metavar="R", help="Stretch the clock to this mean rate.")
    ] = None,
    columns: MapOption = None,
    check_units: CheckUnitsOption = True,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a trace in another format: a slice of it first, if asked for, then stretched in time."""
    from traces.load import CSV_ENDING, OWN_ENDING, check_target, load, save
    from traces.tools import scale_rate, scale_time, slice_time

    if not out.name.removesuffix(".gz").endswith((CSV_ENDING, OWN_ENDING)):
        raise typer.BadParameter(
            f"{str(out)!r}: the ending says the format: .jsonl, .mooncake.jsonl or .csv, or one of them with .gz",
            param_hint="OUT",
        )
    if time_scale is not None and rate_rps is not None:
        raise typer.BadParameter("--time-scale and --rate-rps both stretch the clock; give one")
    check_target(out, "name another file, or replace it with --force", replace=force)
    trace = load(file, _mapping(columns), check_units=check_units)
    if start_s or duration_s is not None:
        rest_s = trace.requests[-1].arrival_s - start_s
        trace = slice_time(trace, start_s, max(1.0, rest_s + 1.0) if duration_s is None else duration_s)
    if time_scale is not None:
        trace = scale_time(trace, time_scale)
    if rate_rps is not None:
        trace = scale_rate(trace, rate_rps)
    lost = save(trace, out)
    result = {
        "out": str(out),
        "rows_read": trace.rows_read,
        "kept": len(trace.requests),
        "dropped": trace.dropped,
        "rows_sha256": trace.rows_sha256,
        "notes": [*trace.notes, *lost],
    }
    _show(result, json)


@trace_app.command("fetch")
def trace_fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A public trace's name; without one, they are listed.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to; its own name, here, unless given.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Another place that has it.")] = None,
    sha256: Annotated[
        str | None, typer.Option("--sha256", metavar="HEX", help="What its sum must be; the known one unless given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Download a public trace, and keep it if its sha256 is the expected one."""
    from traces.fetch import PUBLIC, expected_sum, fetch, find

    if name is None:
        _show({"traces": [asdict(known) for known in PUBLIC.values()]} if json else _listed(PUBLIC.values()), json)
        return
    trace = find(name)
    sha256 = expected_sum(trace, sha256)
    url, out = url or trace.url, out or Path(trace.file_name)
    say(f"fetching {url} ({trace.source}; licence {trace.licence}) ...")
    size = fetch(url, sha256, out)
    _show({"file": str(out), "bytes": size, "sha256": sha256, "url": url, "licence": trace.licence}, json)


def _listed(traces: Iterable[Public]) -> dict[str, str]:
    return {trace.name: f"{trace.source}; {trace.licence}; sha256 {trace.sum_from}" for trace in traces}


def _mapping(columns: list[str] | None) -> dict[str, str] | None:
    mapping = {}
    for item in columns or ():
        field, equals, column = item.partition("=")
        if not (field and equals and column):
            raise typer.BadParameter(f"{item!r}: must be FIELD=COLUMN, such as arrival_s=Timestamp", param_hint="--map")
        mapping[field] = column
    return mapping or None


def _show(result: dict[str, Any], json: bool) -> None:
    from testbed.show import show_trace

    if json:
        print_json(result)
    else:
        show_trace(result)
