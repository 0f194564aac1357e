"""The command `prfaas`.

Every command is thin: it reads options, calls the room that does the work, and prints. Imports are inside the commands,
so that `--help` is quick. Exit codes: 0 pass, 1 failed, 2 usage, 3 invalid measurement, 4 inconclusive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from testbed.load import Outcome, Testbed
    from testbed.points import Runner
    from testbed.scenario import Scenario

app = typer.Typer(
    help="A testbed for Prefill-as-a-Service: one scheduler, solved, simulated, and run on a really shaped wire.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
link_app = typer.Typer(help="The link between the sites of the running testbed.", no_args_is_help=True)
trace_app = typer.Typer(help="Workload traces.", no_args_is_help=True)
app.add_typer(link_app, name="link", rich_help_panel="Parts")
app.add_typer(trace_app, name="trace", rich_help_panel="Parts")

CLOCKS, TESTBED, STUDIES = "Clocks", "Testbed", "Studies"
NAMES = "A shipped scenario's name, or the path of a YAML file."

ScenarioArg = Annotated[str, typer.Argument(metavar="SCENARIO", help=NAMES)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a scenario key, such as workload.load_fraction=0.8; repeatable."
    ),
]
DeploymentOption = Annotated[
    str | None,
    typer.Option("--deployment", metavar="NAME", help="One of the scenario's deployments; the first one unless given."),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", metavar="POLICY", help="Another policy: a name, or package.module:Class.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else there.")]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="The gateway's port on 127.0.0.1.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where results go; results/<time>-<scenario> unless given.")
]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, max=32, help="Locust processes that share the load.")]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Another seed than the scenario's.")]
RequestsOption = Annotated[
    str, typer.Option("--requests", metavar="none|csv|parquet", help="Write a row a request, and as what.")
]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, help="Runs under seeds from the scenario's own, with intervals.")
]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", metavar="N", min=1, help="Processes; one a core (or Ray CPU) unless given.")
]
RayOption = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="Run on this Ray cluster (needs the extra `ray`).")
]
TraceOption = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead of the scenario's workload.")
]
ArrivalsOption = Annotated[
    str | None, typer.Option("--arrivals", metavar="as-is|spread|poisson|gamma|uniform", help="When requests come.")
]
DurationOption = Annotated[
    float | None, typer.Option("--duration-s", metavar="S", help="Length of the load, model seconds.")
]
WarmupOption = Annotated[
    float | None, typer.Option("--warmup-s", metavar="S", help="Left out of the figures, model seconds.")
]
RateOption = Annotated[float | None, typer.Option("--rate-rps", metavar="R", help="Requests a model second.")]
TraceOutOption = Annotated[
    Path | None,
    typer.Option("--trace-out", metavar="FILE", help="Write a Chrome trace (JSON), to be opened at ui.perfetto.dev."),
]
FractionOption = Annotated[
    float | None,
    typer.Option("--load-fraction", metavar="F", help="Rate as a fraction of the deployment's Lambda_max."),
]


def main(arguments: list[str] | None = None) -> None:
    """Entry of the `prfaas` script. A user's error is one message on standard error and exit code 2."""
    from emulator.profile import ProfileError
    from netem.link import LinkError
    from testbed.launch.state import TestbedError
    from testbed.scenario import ScenarioError
    from testbed.scheduler.model import ModelError
    from traces.request import TraceError

    code = 0
    try:
        app(args=arguments, prog_name="prfaas")  # a usage error is its own: exit code 2
    except (ProfileError, LinkError, TestbedError, ScenarioError, ModelError, TraceError) as error:
        _say(f"error: {error}")
        code = 2
    except KeyboardInterrupt:
        _say("interrupted")
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        _say(f"error: a defect of the testbed: {what}; the traceback is in {_keep_traceback()}")
        code = 70
    sys.exit(code)


def _keep_traceback() -> str:
    """Write the exception being handled where it can be found for a bug report."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="prfaas-traceback-", suffix=".txt", delete=False) as file:
        file.write(traceback.format_exc())
    return file.name


# clocks
@app.command(rich_help_panel=CLOCKS)
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
        _say(f"drew {plot}")
    if json:
        _print_json(result)
    else:
        from testbed.show import show_plan

        show_plan(result)


@app.command(rich_help_panel=CLOCKS)
def run(
    scenario: ScenarioArg,
    deployment: DeploymentOption = None,
    policy: PolicyOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    workers: WorkersOption = 1,
    port: PortOption = 8000,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the testbed up afterwards (as `make testbed` does).")
    ] = False,
    trace: TraceOption = None,
    arrivals: ArrivalsOption = None,
    duration_s: DurationOption = None,
    warmup_s: WarmupOption = None,
    rate_rps: RateOption = None,
    load_fraction: FractionOption = None,
    trace_out: TraceOutOption = None,
    json: JsonOption = False,
) -> None:
    """Run a scenario on the wire: up, verify the link, load, report, down."""
    from testbed.scenario import load

    load_sets = _load_sets(trace, arrivals, duration_s, warmup_s, rate_rps, load_fraction)
    chosen = load(scenario, [*(sets or ()), *load_sets]).only(deployment, policy)
    outcome = _run_wire(chosen, port, out, workers, keep=keep)
    _write_trace(trace_out, outcome.folder)
    _report(outcome, json)
    if keep:
        _say(
            f"the testbed is up at http://127.0.0.1:{port}; another load: make load, or prfaas load; "
            "stop it: make down, or prfaas down"
        )
    raise typer.Exit(outcome.exit_code)


@app.command(rich_help_panel=CLOCKS)
def simulate(
    scenario: ScenarioArg,
    deployment: DeploymentOption = None,
    policy: PolicyOption = None,
    sets: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
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
    json: JsonOption = False,
) -> None:
    """Run a scenario in virtual time: the same policy, control and instances, on a modelled link."""
    from testbed.report.summary import EXIT_CODES
    from testbed.scenario import load
    from testbed.simulate import simulate as run_virtual
    from testbed.simulate import write

    if requests not in ("none", "csv", "parquet"):
        raise typer.BadParameter(f"{requests!r}: use none, csv or parquet", param_hint="--requests")
    sys.path.insert(0, str(Path.cwd()))
    load_sets = _load_sets(trace, arrivals, duration_s, warmup_s, rate_rps, load_fraction)
    result = run_virtual(load(scenario, [*(sets or ()), *load_sets]), deployment=deployment, policy=policy, seed=seed)
    folder = None
    if out is not None or requests != "none":
        folder = _new_folder(out, result.scenario)
        write(result, folder, requests)
    _write_trace(trace_out, result.requests)
    repeated = None
    if repeats > 1:
        from testbed.points import Runner, repeat

        with Runner(jobs=jobs, say=_say) as runner:
            repeated = repeat(result.scenario, result.summary, repeats, runner)
    if json:
        more = {} if repeated is None else {"repeats": repeated}
        _print_json({**result.summary, **more, "results": str(folder) if folder else None})
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


@app.command(rich_help_panel=STUDIES)
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

    if plot is not None:
        from testbed.figures.draw import check

        try:
            check(plot)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--plot") from None
    sys.path.insert(0, str(Path.cwd()))
    chosen = load(scenario, sets or ())
    if deployment is not None:
        chosen = chosen.only(deployment)
    if seed is not None:
        chosen = chosen.model_copy(update={"seed": seed})
    if policy is not None:
        only = [chosen.only(one.name, policy).deployments[0] for one in chosen.deployments]
        chosen = chosen.model_copy(update={"deployments": only})
    folder = out or Path("results") / f"sweep-{chosen.name}"
    with _runner(folder, jobs, ray) as runner:
        result = find(chosen, runner, repeats=repeats, point_requests=point_requests)
    save(result, folder)
    if plot is not None:
        from testbed.figures.sweep import plot_sweep

        plot_sweep(result, plot)
        _say(f"drew {plot}")
    if json:
        _print_json({**result, "results": str(folder)})
    else:
        from testbed.show import show_sweep

        show_sweep(result)
        typer.echo(f"results: {folder}")


@app.command(rich_help_panel=STUDIES)
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
        with _runner(out, jobs, ray) as runner:
            files = make_open_question(out, form, runner, replications=replications, duration_s=duration_s)  # type: ignore[arg-type]
    if json:
        _print_json({"files": [str(path) for path in files]})
    else:
        typer.echo("\n".join(str(path) for path in files))


@app.command(rich_help_panel=STUDIES)
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

    sets = [*(sets or ()), *_load_sets(None, None, None, None, None, load_fraction)]
    chosen = load(scenario, sets).only(deployment, policy)
    virtual = run_virtual(chosen)
    outcome = _run_wire(chosen, port, out, 1, keep=False)
    comparison = compare(virtual.summary, outcome.summary)
    save(outcome.folder, comparison)
    if json:
        _print_json({**comparison, "results": str(outcome.folder)})
    else:
        show_fidelity(comparison)
        typer.echo(f"results: {outcome.folder}")
    raise typer.Exit(outcome.exit_code)


# testbed
@app.command(rich_help_panel=TESTBED)
def up(
    scenario: ScenarioArg = "smoke",
    deployment: DeploymentOption = None,
    policy: PolicyOption = None,
    sets: SetOption = None,
    port: PortOption = 8000,
    json: JsonOption = False,
) -> None:
    """Start the testbed of a scenario, or find the one that is up."""
    from testbed.scenario import load

    testbed, already = _bring_up(load(scenario, sets or ()).only(deployment, policy), port)
    url = f"http://127.0.0.1:{testbed.port}"
    if json:
        _print_json(
            {"url": url, "already": already, "scenario": testbed.scenario.name, "state_dir": str(testbed.state.root)}
        )
    else:
        typer.echo(f"{'already up' if already else 'up'}: {testbed.scenario.name} at {url}")


@app.command("load", rich_help_panel=TESTBED)
def load_command(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCENARIO]", help="Its workload, on the testbed that is up; that testbed's own unless given."
        ),
    ] = None,
    sets: SetOption = None,
    policy: PolicyOption = None,
    out: OutOption = None,
    workers: WorkersOption = 1,
    trace: TraceOption = None,
    arrivals: ArrivalsOption = None,
    duration_s: DurationOption = None,
    warmup_s: WarmupOption = None,
    rate_rps: RateOption = None,
    load_fraction: FractionOption = None,
    trace_out: TraceOutOption = None,
    json: JsonOption = False,
) -> None:
    """Offer a load to the testbed that is up, and report."""
    from testbed.scenario import load, override

    testbed = _running()
    running = testbed.scenario.deployments[0]
    load_sets = [*(sets or ()), *_load_sets(trace, arrivals, duration_s, warmup_s, rate_rps, load_fraction)]
    if scenario is None:
        chosen = override(testbed.scenario, load_sets)
    else:
        chosen = load(scenario, load_sets).only(running.name, running.policy.name)
    if chosen.fingerprint(testbed_only=True) != testbed.scenario.fingerprint(testbed_only=True):
        raise typer.BadParameter(
            f"the testbed that is up ({testbed.scenario.name}, {running.name}) is not the one this load is for; a load "
            "may change the workload, the policy (--policy) and the SLO only; for anything else: prfaas down, prfaas up"
        )
    outcome = _load(testbed, chosen.only(None, policy), out, policy, workers)
    _write_trace(trace_out, outcome.folder)
    _report(outcome, json)
    raise typer.Exit(outcome.exit_code)


@app.command(rich_help_panel=TESTBED)
def status(json: JsonOption = False) -> None:
    """What is up: processes, nodes, queues, the load. Exit code 1 when something of it is dead."""
    from testbed.launch import namespaces
    from testbed.launch.state import TestbedError
    from testbed.show import show_status

    result = namespaces.status()
    gateway: dict[str, Any] | None = None
    if result.get("up"):
        try:
            gateway = _running().call("GET", "/prfaas/status", timeout_s=5)
        except TestbedError as error:
            result["gateway_error"] = str(error)
    result["gateway"] = gateway
    if json:
        _print_json(result)
    else:
        show_status(result)
    processes = result.get("supervisor", {}).get("processes", ())
    dead = [one["name"] for one in processes if one["state"] != "running"]
    raise typer.Exit(0 if result.get("up") and not dead else 1)


@app.command(rich_help_panel=TESTBED)
def logs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROCESS]", help="gateway, agent, supervisor, prfaas-0, pd-d-1, ...; all of them unless given."
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 20,
) -> None:
    """The last lines of a process's log."""
    from testbed.launch.state import StateDir, TestbedError, tail

    folder = StateDir().logs
    found = sorted(folder.glob("*.log")) if folder.is_dir() else []
    if name is not None:
        found = [path for path in found if path.stem == name]
        if not found:
            known = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) if folder.is_dir() else ""
            raise TestbedError(f"no log of {name!r}; there are: {known or 'none, since no testbed was started'}")
    for path in found:
        if len(found) > 1:
            typer.echo(f"== {path.stem} ({path})")
        typer.echo(tail(path, lines))


@app.command(rich_help_panel=TESTBED)
def down(json: JsonOption = False) -> None:
    """Stop the testbed, and remove whatever is left of one."""
    from testbed.launch import namespaces

    removed = namespaces.down()
    if json:
        _print_json({"removed": removed})
    else:
        typer.echo("\n".join(removed) if removed else "nothing was up")


@app.command(rich_help_panel=TESTBED)
def doctor(
    leftovers: Annotated[
        bool,
        typer.Option("--leftovers", help="Only look for what a testbed left behind; exit code 1 if there is anything."),
    ] = False,
    port: PortOption = 8000,
    json: JsonOption = False,
) -> None:
    """What this machine can carry, what is missing, and how to get it."""
    from dataclasses import asdict

    if leftovers:
        from testbed.launch.processes import leftovers as find

        found = find()
        if json:
            _print_json({"leftovers": found})
        else:
            typer.echo("\n".join(found) if found else "nothing of ours is left")
        raise typer.Exit(1 if found else 0)
    from testbed.doctor import checks
    from testbed.show import show_checks

    results = checks(port)
    missing = any(check.status == "missing" for check in results)
    if json:
        _print_json({"ok": not missing, "checks": [asdict(check) for check in results]})
    else:
        show_checks(results)
    raise typer.Exit(1 if missing else 0)


# parts
@link_app.command("show")
def link_show(json: JsonOption = False) -> None:
    """Rates asked and kept, and the counters, both directions."""
    from testbed import linkctl
    from testbed.show import show_link

    testbed = _running()
    result = linkctl.show(testbed.scenario, testbed.state)
    if json:
        _print_json(result)
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
    testbed = _running()
    result = linkctl.set_rate(testbed.scenario, testbed.state, parse_rate(rate), direction)
    if json:
        _print_json(result)
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

    testbed = _running()
    result = linkctl.verify(testbed.scenario, testbed.state, seconds=seconds, connections=connections)
    if json:
        _print_json(result)
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
        _print_json(result)
    else:
        show_trace(result)


# what several commands share
def _bring_up(scenario: Scenario, port: int) -> tuple[Testbed, bool]:
    """The testbed of a scenario with one deployment, and whether it was up already."""
    from testbed.assemble import lengths_of_workload, max_input_tokens
    from testbed.fleet import launch_spec
    from testbed.launch import namespaces
    from testbed.launch.state import StateDir
    from testbed.load import Testbed
    from testbed.policies import load_policy

    sys.path.insert(0, str(Path.cwd()))
    deployment = scenario.deployments[0]
    load_policy(deployment.policy.name)
    lengths_of_workload(scenario.workload, max_input_tokens(scenario, deployment))  # a trace that can be read
    state = StateDir(create=True)
    started = time.monotonic()
    _say(f"starting {scenario.name} ({deployment.name}) ...")
    result = namespaces.up(launch_spec(scenario, deployment, port=port, state=state))
    if not result.already:
        (state.root / "scenario.yaml").write_text(scenario.to_yaml())
        _say(f"up after {time.monotonic() - started:.1f} s")
    return Testbed(state, scenario, result.port), result.already


def _running() -> Testbed:
    """The testbed that is up. Raises TestbedError without one."""
    import yaml

    from testbed.launch import namespaces
    from testbed.launch.client import NOT_UP
    from testbed.launch.state import StateDir, TestbedError
    from testbed.load import Testbed
    from testbed.scenario import parse

    found = namespaces.status()
    state = StateDir()
    path = state.root / "scenario.yaml"
    if not found.get("up") or not path.exists():
        raise TestbedError(NOT_UP)
    return Testbed(state, parse(yaml.safe_load(path.read_text()), str(path)), found["port"])


def _load_sets(
    trace: str | None,
    arrivals: str | None,
    duration_s: float | None,
    warmup_s: float | None,
    rate_rps: float | None,
    load_fraction: float | None,
) -> list[str]:
    """The load's own options as --set items."""
    if rate_rps is not None and load_fraction is not None:
        raise typer.BadParameter("--rate-rps and --load-fraction are both given; give one")
    sets = []
    if trace is not None:
        sets.append(f"workload.trace={_quoted(trace)}")
        arrivals = arrivals or "as-is"
    if arrivals == "gamma":
        sets.append("workload.arrivals.kind=gamma")  # and the scenario's cv
    elif arrivals is not None:
        sets.append(f"workload.arrivals={{kind: {_quoted(arrivals)}}}")
    if duration_s is not None and warmup_s is None:
        warmup_s = min(50.0, duration_s / 10)
    named = {"duration_s": duration_s, "warmup_s": warmup_s, "rate_rps": rate_rps, "load_fraction": load_fraction}
    return sets + [f"workload.{key}={value}" for key, value in named.items() if value is not None]


def _quoted(text: str) -> str:
    """A text as YAML that means it, whatever is in it."""
    import orjson

    return orjson.dumps(text).decode()


def _run_wire(scenario: Scenario, port: int, out: Path | None, workers: int, *, keep: bool) -> Outcome:
    """Up, verify the link, load; down again unless `keep` or it was up before.

    Exits with 3 when the link is not what was asked for.
    """
    from testbed import linkctl
    from testbed.launch import namespaces

    was_up = False
    try:
        testbed, was_up = _bring_up(scenario, port)
        verified = linkctl.verify(scenario, testbed.state)
        _say_verified(verified)
        if not verified["ok"]:
            _say("the link does not carry what was asked for: the run would be no measurement")
            raise typer.Exit(3)
        return _load(testbed, scenario, out, None, workers)
    finally:
        if not keep and not was_up:
            namespaces.down()


def _load(testbed: Testbed, scenario: Scenario, out: Path | None, policy: str | None, workers: int) -> Outcome:
    from testbed.load import run_load
    from testbed.show import LoadProgress

    folder = _new_folder(out, scenario)
    with LoadProgress() as progress:
        return run_load(
            testbed,
            scenario,
            folder,
            policy=policy,
            workers=workers,
            on_progress=progress.update,
            on_start=progress.start,
        )


@contextmanager
def _runner(folder: Path, jobs: int | None, ray: str | None) -> Iterator[Runner]:
    """What a study runs its points with; interrupted, it says how to go on."""
    from testbed.points import Runner

    with Runner(jobs=jobs, ray=ray, folder=folder / "points", say=_say) as runner:
        try:
            yield runner
        except KeyboardInterrupt:
            _say(f"the points that were run are kept in {folder / 'points'}: the same command goes on from them")
            raise


def _new_folder(out: Path | None, scenario: Scenario) -> Path:
    """Where results go; never a folder that holds something."""
    folder = out or Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-{scenario.name}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"--out {folder}: is there already; name another, nothing is overwritten")
    return folder


def _write_trace(path: Path | None, source: pd.DataFrame | Path) -> None:
    """The Chrome trace of a request table, or of a results folder's. Nothing without a path."""
    if path is None:
        return
    import pandas as pd

    from testbed.perfetto import write_trace

    requests = pd.read_csv(source / "requests.csv", dtype={"request_id": str}) if isinstance(source, Path) else source
    try:
        write_trace(path, requests)
    except OSError as error:
        raise typer.BadParameter(f"{path}: cannot be written ({error.strerror})", param_hint="--trace-out") from None
    _say(f"trace: {path}; open it at ui.perfetto.dev")


def _report(outcome: Outcome, json: bool) -> None:
    if json:
        _print_json({**outcome.summary, "results": str(outcome.folder)})
    else:
        from testbed.show import show_summary

        show_summary(outcome.summary)
        typer.echo(f"results: {outcome.folder}")


def _say_verified(result: dict[str, Any]) -> None:
    for direction, one in result["directions"].items():
        _say(
            f"link {direction}: asked {one['asked_bps'] / 1e9:g} Gbps, carries {one['measured_bps'] / 1e9:.2f} of the "
            f"{one['expected_bps'] / 1e9:.2f} Gbps that TCP can get of it ({one['error']:+.1%})"
        )


def _print_json(value: Any) -> None:
    import orjson

    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())


def _say(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    main()
