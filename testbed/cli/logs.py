"""What the processes of a testbed log: `logs`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from testbed.cli.options import JsonOption

POLL_S = 0.2  # wall seconds between looks at logs that are followed


def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROCESS...]",
            help="gateway, agent, supervisor, prfaas-0, pd-d-1, ...; all of them unless given.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last events.")] = 20,
    request: Annotated[
        str | None,
        typer.Option("--request", "-r", metavar="ID", help="Only the events of this request, wherever it went."),
    ] = None,
    level: Annotated[
        str, typer.Option("--level", metavar="debug|info|warning|error", help="Only events of this level and worse.")
    ] = "debug",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    json: JsonOption = False,
) -> None:
    """What the processes logged, all of them in the order of time."""
    import orjson

    from emulator.log import LEVELS
    from testbed.launch.state import StateDir
    from testbed.logs import Reader, Wanted, find

    if level not in LEVELS:
        raise typer.BadParameter(f"{level!r}: use {', '.join(LEVELS)}", param_hint="--level")
    if json and follow:
        raise typer.BadParameter("--json prints one object, and --follow never ends; leave one of them out")
    reader, wanted = Reader(find(StateDir().logs, names or ())), Wanted(level, request)
    found = [event for event in reader.more(ended=not follow) if wanted(event)][-lines:]
    if json:
        typer.echo(orjson.dumps({"events": [{**one.fields, "more": one.more} for one in found]}).decode())
        return
    while True:
        for event in found:
            typer.echo(event.text())
        if not follow:
            return
        time.sleep(POLL_S)
        found = [event for event in reader.more(ended=False) if wanted(event)]
