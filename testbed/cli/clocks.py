"""The three clocks: `plan`, `simulate`, `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import (
    ArrivalsOption,
    DeploymentOption,
    DurationOption,
    FractionOption,
    JobsOption,
    JsonOption,
    KeptOption,
    LauncherOption,
    LogLevelOption,
    OutOption,
    PlotOption,
    PoliciesOption,
    PortOption,
    RateOption,
    RepeatsOption,
    RequestsOption,
    ScenarioArg,
    SeedOption,
    SetOption,
    TraceOption,
    TraceOutOption,
    WarmupOption,
    WorkersOption,
)
from testbed.cli.series import arms_of, compare_virtual, draw, offer
from testbed.cli.shared import (
    check_plot,
    find_policies_here,
    load_overrides,
    log_sets,
    new_folder,
    print_json,
    prints_aside,
    say,
    wire,
    write_trace,
)


def plan(
    scenario: ScenarioArg,
    sets: SetOption = None,
    json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw Figure 5's two panels (.png, .svg or .pdf).")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--form", metavar="mean|expectation", help="The paper's form (mean length into T_prefill), or expectations."
        ),
    ] = "mean",
) -> None:
    """Solve a scenario in closed form: equations (1)-(8), every deployment side by side."""
    from testbed.assemble import build_plan
    from testbed.scenario import load

    if form not in ("mean", "expectation"):
        raise typer.BadParameter(f"{form!r}: use mean or expectation", param_hint="--form")
    result = build_plan(load(scenario, sets or ()), form)
    if plot is not None:
        from testbed.figures import plot_plan

        try:
            plot_plan(result, plot)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--plot") from None
        say(f"drew {plot}")
    if json:
        print_json(result)
    else:
        from testbed.show import show_plan

        show_plan(result)


def run(
    scenario: ScenarioArg,
    deployment: DeploymentOption = None,
    policy: PoliciesOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    workers: WorkersOption = 1,
    port: PortOption = 8000,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the testbed up afterwards (as `make testbed` does).")
    ] = False,
    launcher: LauncherOption = None,
    log_level: LogLevelOption = None,
    trace: TraceOption = None,
    arrivals: ArrivalsOption = None,
    duration_s: DurationOption = None,
    warmup_s: WarmupOption = None,
    rate_rps: RateOption = None,
    load_fraction: FractionOption = None,
    trace_out: TraceOutOption = None,
    repeats: RepeatsOption = 1,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Run a scenario on the wire: up, verify the link, load, report, down."""
    from testbed.scenario import load

    check_plot(plot)
    load_sets = load_overrides(trace, arrivals, duration_s, warmup_s, rate_rps, load_fraction) + log_sets(log_level)
    chosen = load(scenario, [*(sets or ()), *load_sets]).only(deployment)
    arms = arms_of(chosen, policy, trace_out)
    with wire(chosen if len(arms) > 1 else arms[0], port, keep=keep, launcher=launcher) as testbed:
        code = offer(testbed, arms, repeats, out=out, workers=workers, trace_out=trace_out, plot=plot, json=json)
    if keep:
        say(
            f"the testbed is up at http://127.0.0.1:{port}; another load: make load, or prfaas load; "
            "stop it: make down, or prfaas down"
        )
    raise typer.Exit(code)


def simulate(
    scenario: ScenarioArg,
    deployment: DeploymentOption = None,
    policy: PoliciesOption = None,
    sets: SetOption = None,
    seed: SeedOption = None,
    out: KeptOption = None,
    requests: RequestsOption = "none",
    trace: TraceOption = None,
    arrivals: ArrivalsOption = None,
    duration_s: DurationOption = None,
    warmup_s: WarmupOption = None,
    rate_rps: RateOption = None,
    load_fraction: FractionOption = None,
    trace_out: TraceOutOption = None,
    repeats: RepeatsOption = 1,
    jobs: JobsOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Run a scenario in virtual time: the same policy, control and instances, on a modelled link."""
    from testbed.report.summary import EXIT_CODES
    from testbed.scenario import load
    from testbed.series import completed_ttft_s
    from testbed.simulate import simulate as run_virtual
    from testbed.simulate import write

    if requests not in ("none", "csv", "parquet"):
        raise typer.BadParameter(f"{requests!r}: use none, csv or parquet", param_hint="--requests")
    check_plot(plot)
    find_policies_here()
    load_sets = load_overrides(trace, arrivals, duration_s, warmup_s, rate_rps, load_fraction)
    chosen = load(scenario, [*(sets or ()), *load_sets]).only(deployment)
    if seed is not None:
        chosen = chosen.model_copy(update={"seed": seed})
    arms = arms_of(chosen, policy, trace_out)
    if len(arms) > 1:
        raise typer.Exit(compare_virtual(arms, repeats, jobs=jobs, out=out, requests=requests, plot=plot, json=json))
    with prints_aside():
        result = run_virtual(arms[0])
    folder = None
    if out is not None or requests != "none":
        folder = new_folder(out, result.scenario.name)
        write(result, folder, requests)
    write_trace(trace_out, result.requests)
    if plot is not None:
        summaries = {result.summary["policy"]: {result.scenario.seed: result.summary}}
        draw(summaries, [(result.scenario, completed_ttft_s(result.requests))], plot)
    repeated = None
    if repeats > 1:
        from testbed.compare import save
        from testbed.points import Runner, repeat

        with Runner(jobs=jobs, say=say) as runner:
            repeated = repeat(result.scenario, result.summary, repeats, runner)
        if folder is not None:
            save(folder / "repeats.json", repeated)
    if json:
        more = {} if repeated is None else {"repeats": repeated}
        print_json({**result.summary, **more, "results": str(folder) if folder else None})
    else:
        from testbed.show import show_repeats, show_summary

        show_summary(result.summary)
        if repeated is not None:
            show_repeats(repeated)
        count = len(result.requests)
        speed = count / max(result.wall_s, 1e-9)
        typer.echo(f"{count} requests in {result.wall_s:.2f} s of wall time, {speed:,.0f} a second")
        if folder:
            typer.echo(f"results: {folder}")
    verdicts = [result.summary["verdict"]["status"], *(repeated["verdicts"] if repeated else ())]
    raise typer.Exit(max(EXIT_CODES[verdict] for verdict in verdicts))
