"""`prfaas gate`: a verdict on a changed policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JobsOption, JsonOption, PortOption
from testbed.cli.shared import find_policies_here, new_folder, print_json, prints_aside, say, wire

POLICY = "A shipped name, package.module:Class, or git:REV (prfaas as it was there; git:REV:POLICY for another)."


def gate(
    baseline: Annotated[str, typer.Option("--baseline", metavar="POLICY", help=POLICY)] = "prfaas",
    candidate: Annotated[
        str | None, typer.Option("--candidate", metavar="POLICY", help="The policy to be judged; likewise.")
    ] = None,
    suite: Annotated[
        str, typer.Option("--suite", metavar="quick|full|wire|FILE", help="What is compared: a name, or a YAML file.")
    ] = "quick",
    a_a: Annotated[
        bool, typer.Option("--a-a", help="The baseline against itself under other seeds: is it a false alarm?")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the gate itself: false alarms, and what it finds. Minutes.")
    ] = False,
    jobs: JobsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the result goes; results/<time>-gate-<suite> unless given."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="The first seed, instead of the suite's own.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run everything, and keep nothing of it.")] = False,
    port: PortOption = 8000,
    json: JsonOption = False,
) -> None:
    """Is a changed policy better, the same or worse? Exit code 0: better or the same, 1: worse, 4: not known."""
    from testbed.gate import suite as suites
    from testbed.gate.cache import default_folder
    from testbed.gate.show import GateProgress, show_calibration, show_gate
    from testbed.gate.whole import gate as compare

    find_policies_here()
    if a_a + calibrate + (candidate is not None) != 1:
        raise typer.BadParameter("give one of --candidate POLICY, --a-a and --calibrate")
    if calibrate and seed is not None:
        raise typer.BadParameter("--calibrate records the suite's own seeds; leave --seed out")
    chosen = suites.load(suite)
    cache = None if no_cache else default_folder()
    folder = new_folder(out, "calibration" if calibrate else f"gate-{chosen.name}")
    with GateProgress() as progress, prints_aside():
        try:
            if calibrate:
                from testbed.gate.calibrate import calibrate as measure_itself

                calibration = measure_itself(
                    chosen, baseline, cache=cache, jobs=jobs, out=folder, on_run=progress.update
                )
            else:
                result = compare(
                    chosen,
                    baseline,
                    baseline if candidate is None else candidate,
                    cache=cache,
                    out=folder,
                    jobs=jobs,
                    a_a=a_a,
                    seed=seed,
                    bring_up=lambda scenario: wire(scenario, port, keep=False),
                    on_run=progress.update,
                )
        except KeyboardInterrupt:
            if cache is not None:
                say(f"what was run is kept in {cache}: the same command goes on from it")
            raise
    if calibrate:
        show_calibration(calibration) if not json else print_json(calibration.model_dump())
        raise typer.Exit(0 if calibration.holds else 1)
    if json:
        print_json({**result.model_dump(), "results": str(folder)})
    else:
        show_gate(result)
        typer.echo(f"results: {folder}")
    raise typer.Exit(result.exit_code)
