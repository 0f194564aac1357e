"""Studies of many runs: `sweep`, `figure`, `fidelity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import (
    DeploymentOption,
    FractionOption,
    JobsOption,
    JsonOption,
    OutOption,
    PolicyOption,
    PortOption,
    RayOption,
    RepeatsOption,
    ScenarioArg,
    SeedOption,
    SetOption,
)
from testbed.cli.shared import (
    check_plot,
    find_policies_here,
    load_overrides,
    point_runner,
    print_json,
    prints_aside,
    run_wire,
    say,
)


def sweep(
    scenario: ScenarioArg,
    deployment: Annotated[
        str | None, typer.Option("--deployment", metavar="NAME", help="Only this one; all of them unless given.")
    ] = None,
    policy: PolicyOption = None,
    sets: SetOption = None,
    seed: SeedOption = None,
    repeats: RepeatsOption = 1,
    jobs: JobsOption = None,
    ray: RayOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keeps what was run; results/sweep-<scenario> unless given."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw TTFT against load (.png, .svg or .pdf).")
    ] = None,
    point_requests: Annotated[
        int, typer.Option("--point-requests", metavar="N", min=100, help="Arrivals in a point's window.")
    ] = 20_000,
    json: JsonOption = False,
) -> None:
    """Find Lambda_max at the SLO for each deployment in virtual time, beside the closed form."""
    from testbed.scenario import load
    from testbed.sweep import save
    from testbed.sweep import sweep as find

    check_plot(plot)
    find_policies_here()
    chosen = load(scenario, sets or ())
    if deployment is not None:
        chosen = chosen.only(deployment)
    if seed is not None:
        chosen = chosen.model_copy(update={"seed": seed})
    if policy is not None:
        only = [chosen.only(one.name, policy).deployments[0] for one in chosen.deployments]
        chosen = chosen.model_copy(update={"deployments": only})
    folder = out or Path("results") / f"sweep-{chosen.name}"
    with point_runner(folder, jobs, ray) as runner:
        result = find(chosen, runner, repeats=repeats, point_requests=point_requests)
    save(result, folder)
    if plot is not None:
        from testbed.figures.sweep import plot_sweep

        plot_sweep(result, plot)
        say(f"drew {plot}")
    if json:
        print_json({**result, "results": str(folder)})
    else:
        from testbed.show import show_sweep

        show_sweep(result)
        typer.echo(f"results: {folder}")


def figure(
    name: Annotated[str, typer.Argument(metavar="table6|figure5|open-question", help="Which one.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where it goes; what was run for it is kept there too.")
    ] = Path("results/figures"),
    form: Annotated[str, typer.Option("--format", metavar="svg|pdf", help="Of the figures; tables are CSV.")] = "svg",
    jobs: JobsOption = None,
    ray: RayOption = None,
    replications: Annotated[
        int | None, typer.Option("--replications", metavar="N", min=1, help="Of each cell; 20 unless given.")
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", metavar="S", min=1, help="Of each run; a model-hour unless given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a figure of the project anew, with the table behind it."""
    from testbed.figures.make import NAMES, SOLVED, make_open_question

    if name not in NAMES:
        raise typer.BadParameter(f"{name!r}: use one of {', '.join(NAMES)}", param_hint="NAME")
    if form not in ("svg", "pdf"):
        raise typer.BadParameter(f"{form!r}: use svg or pdf", param_hint="--format")
    out.mkdir(parents=True, exist_ok=True)
    if name in SOLVED:
        files = SOLVED[name](out, form)  # type: ignore[arg-type]
    else:
        with point_runner(out, jobs, ray) as runner:
            files = make_open_question(out, form, runner, replications=replications, duration_s=duration_s)  # type: ignore[arg-type]
    if json:
        print_json({"files": [str(path) for path in files]})
    else:
        typer.echo("\n".join(str(path) for path in files))


def fidelity(
    scenario: ScenarioArg,
    deployment: DeploymentOption = None,
    policy: PolicyOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    port: PortOption = 8000,
    load_fraction: FractionOption = None,
    json: JsonOption = False,
) -> None:
    """Run one scenario and seed in closed form, in virtual time and on the wire, and say how far they are apart."""
    from testbed.fidelity import compare, save
    from testbed.scenario import load
    from testbed.show import show_fidelity
    from testbed.simulate import simulate as run_virtual

    sets = [*(sets or ()), *load_overrides(None, None, None, None, None, load_fraction)]
    chosen = load(scenario, sets).only(deployment, policy)
    find_policies_here()
    with prints_aside():
        virtual = run_virtual(chosen)
    outcome = run_wire(chosen, port, out, 1, keep=False)
    comparison = compare(virtual.summary, outcome.summary)
    save(outcome.folder, comparison)
    if json:
        print_json({**comparison, "results": str(outcome.folder)})
    else:
        show_fidelity(comparison)
        typer.echo(f"results: {outcome.folder}")
    raise typer.Exit(outcome.exit_code)
