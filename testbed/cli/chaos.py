"""`chaos`: experiments with faults, on either clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption, LauncherOption, PortOption, SeedOption
from testbed.cli.shared import find_policies_here, print_json, say


def chaos(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]",
            help="A shipped experiment, or a file; the shipped suite unless given (on the wire, its short part).",
        ),
    ] = None,
    clock: Annotated[str, typer.Option("--clock", metavar="virtual|wire", help="Which clock.")] = "virtual",
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="POLICY[,POLICY...]", help="The first is under test; the others are compared with it."
        ),
    ] = "prfaas",
    seed: SeedOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where journals go; results/<time>-chaos unless given."),
    ] = None,
    port: PortOption = 8000,
    launcher: LauncherOption = None,
    list_them: Annotated[bool, typer.Option("--list", help="Show the shipped experiments.")] = False,
    json: JsonOption = False,
) -> None:
    """Let faults happen, and judge what the system has to hold before, during and after them."""
    from testbed.chaos import experiment as experiments
    from testbed.chaos.suite import run_virtual, run_wire, summary
    from testbed.show_chaos import listed, show_list, show_runs

    if list_them:
        every = [experiments.load(one) for one in experiments.shipped()]
        print_json(listed(every)) if json else show_list(every)
        return
    if clock not in experiments.CLOCKS:
        raise typer.BadParameter(f"{clock!r}: use virtual or wire", param_hint="--clock")
    policies = [one.strip() for one in policy.split(",")]
    if len(set(policies)) != len(policies) or "" in policies:
        raise typer.BadParameter(f"{policy!r}: names, each once, with commas between them", param_hint="--policy")
    find_policies_here()
    chosen = [experiments.load(name)] if name else experiments.suite(clock)
    folder = out or Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-chaos"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"--out {folder}: is there already; name another, nothing is overwritten")
    if clock == "virtual":
        journals = run_virtual(chosen, policies, seed=seed, folder=folder, say=say)
    else:
        journals = run_wire(chosen, policies, seed=seed, folder=folder, port=port, launcher=launcher, say=say)
    result = summary(journals, policies)
    if json:
        print_json({**result, "results": str(folder)})
    else:
        if name:
            for journal in journals:
                typer.echo("\n".join([*journal.lines(), ""]))
        show_runs(journals, policies)
        typer.echo(f"results: {folder}")
    raise typer.Exit(result["exit_code"])
