"""The parts by themselves: `link` and `trace`."""

from __future__ import annotations

from typing import Annotated

import typer

from testbed.cli.options import JsonOption
from testbed.cli.shared import print_json, running_testbed

link_app = typer.Typer(help="The link between the sites of the running testbed.", no_args_is_help=True)
trace_app = typer.Typer(help="Workload traces.", no_args_is_help=True)


@link_app.command("show")
def link_show(json: JsonOption = False) -> None:
    """Rates asked and kept, and the counters, both directions."""
    from testbed import linkctl
    from testbed.show import show_link

    testbed = running_testbed()
    result = linkctl.show(testbed.scenario, testbed.state)
    if json:
        print_json(result)
    else:
        show_link(result)


@link_app.command("set")
def link_set(
    rate: Annotated[
        str,
        typer.Option("--rate", metavar="RATE", help="The real system's rate, such as 8gbps: bits per model second."),
    ],
    direction: Annotated[
        str | None, typer.Option("--direction", metavar="to_pd|to_prfaas", help="One direction; both unless given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Change the link's rate now, while traffic flows."""
    from netem.link import DIRECTIONS, parse_rate
    from testbed import linkctl
    from testbed.show import show_link

    if direction not in (None, *DIRECTIONS):
        raise typer.BadParameter(f"{direction!r}: use to_pd or to_prfaas", param_hint="--direction")
    testbed = running_testbed()
    result = linkctl.set_rate(testbed.scenario, testbed.state, parse_rate(rate), direction)
    if json:
        print_json(result)
    else:
        show_link(result)


@link_app.command("verify")
def link_verify(
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, max=60, help="Wall seconds a direction.")] = 2.0,
    connections: Annotated[
        int | None, typer.Option("--connections", min=1, max=64, help="TCP connections; the scenario's unless given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure what the link really carries, both ways, against what was asked. Exit code 3 when it is not that."""
    from testbed import linkctl
    from testbed.show import show_verified

    testbed = running_testbed()
    result = linkctl.verify(testbed.scenario, testbed.state, seconds=seconds, connections=connections)
    if json:
        print_json(result)
    else:
        show_verified(result)
    raise typer.Exit(0 if result["ok"] else 3)


@trace_app.command("info")
def trace_info(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Mooncake JSONL, Azure CSV, our own, or any CSV with --map.")
    ],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="FIELD=COLUMN",
            help="For any CSV: arrival_s (or arrival_ms, arrival_time), input_tokens, output_tokens; repeatable.",
        ),
    ] = None,
    check_units: Annotated[
        bool, typer.Option("--check-units/--no-check-units", help="Refuse stamps whose unit nobody can have meant.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """What a trace holds: rows kept and dropped, rate, dispersion, lengths, ideal prefix hit."""
    from testbed.show import show_trace
    from traces.info import describe
    from traces.load import load

    mapping = {}
    for item in columns or ():
        field, equals, column = item.partition("=")
        if not (field and equals and column):
            raise typer.BadParameter(f"{item!r}: must be FIELD=COLUMN, such as arrival_s=Timestamp", param_hint="--map")
        mapping[field] = column
    result = describe(load(file, mapping or None, check_units=check_units))
    if json:
        print_json(result)
    else:
        show_trace(result)
