"""The testbed that is up: `up`, `load`, `status`, `down`, `doctor`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from testbed.cli.options import (
    ArrivalsOption,
    DeploymentOption,
    DurationOption,
    FractionOption,
    JsonOption,
    LauncherOption,
    LogLevelOption,
    OutOption,
    PlotOption,
    PoliciesOption,
    PolicyOption,
    PortOption,
    RateOption,
    RepeatsOption,
    ScenarioArg,
    SetOption,
    TraceOption,
    TraceOutOption,
    WarmupOption,
    WorkersOption,
)
from testbed.cli.series import arms_of, offer
from testbed.cli.shared import (
    add_beside,
    bring_up,
    check_plot,
    find_policies_here,
    load_overrides,
    log_sets,
    print_json,
    running_testbed,
)


def up(
    scenario: ScenarioArg = "smoke",
    deployment: DeploymentOption = None,
    policy: PolicyOption = None,
    sets: SetOption = None,
    port: PortOption = 8000,
    launcher: LauncherOption = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="locust,prometheus,grafana", help="Containers beside those of the compose launcher."
        ),
    ] = None,
    log_level: LogLevelOption = None,
    json: JsonOption = False,
) -> None:
    """Start the testbed of a scenario, or find the one that is up."""
    from testbed.scenario import load

    chosen = load(scenario, [*(sets or ()), *log_sets(log_level)]).only(deployment, policy)
    testbed, already = bring_up(chosen, port, launcher)
    pages = add_beside(testbed, beside.split(",")) if beside else {}
    url = f"http://127.0.0.1:{testbed.port}"
    if json:
        print_json(
            {
                "url": url,
                "already": already,
                "scenario": testbed.scenario.name,
                "state_dir": str(testbed.state.root),
                "pages": pages,
            }
        )
    else:
        typer.echo(f"{'already up' if already else 'up'}: {testbed.scenario.name} at {url}")
        typer.echo(f"live page at {url}/dashboard")
        for name, page in pages.items():
            typer.echo(f"{name} at {page}")


def load(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCENARIO]", help="Its workload, on the testbed that is up; that testbed's own unless given."
        ),
    ] = None,
    sets: SetOption = None,
    policy: PoliciesOption = None,
    out: OutOption = None,
    workers: WorkersOption = 1,
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
    """Offer a load to the testbed that is up, and report."""
    from testbed.scenario import load, override

    check_plot(plot)
    find_policies_here()
    testbed = running_testbed()
    running = testbed.scenario.deployments[0]
    load_sets = [*(sets or ()), *load_overrides(trace, arrivals, duration_s, warmup_s, rate_rps, load_fraction)]
    if scenario is None:
        chosen = override(testbed.scenario, load_sets)
    else:
        chosen = load(scenario, load_sets).only(running.name, running.policy.name)
    if chosen.fingerprint(testbed_only=True) != testbed.scenario.fingerprint(testbed_only=True):
        raise typer.BadParameter(
            f"the testbed that is up ({testbed.scenario.name}, {running.name}) is not the one this load is for; a load "
            "may change the workload, the policy (--policy) and the SLO only; for anything else: prfaas down, prfaas up"
        )
    arms = arms_of(chosen, policy, trace_out)
    raise typer.Exit(offer(testbed, arms, repeats, out=out, workers=workers, trace_out=trace_out, plot=plot, json=json))


def status(json: JsonOption = False) -> None:
    """What is up: processes, nodes, queues, the load. Exit code 1 when something of it is dead."""
    from testbed.launch import launchers
    from testbed.launch.state import TestbedError
    from testbed.show import show_status

    result = launchers.status()
    gateway: dict[str, Any] | None = None
    if result.get("up"):
        try:
            gateway = running_testbed().call("GET", "/prfaas/status", timeout_s=5)
        except TestbedError as error:
            result["gateway_error"] = str(error)
    result["gateway"] = gateway
    if json:
        print_json(result)
    else:
        show_status(result)
    processes = (result.get("supervisor") or {}).get("processes", ())
    dead = [one["name"] for one in processes if one["state"] != "running"]
    raise typer.Exit(0 if result.get("up") and not dead else 1)


def down(json: JsonOption = False) -> None:
    """Stop the testbed, and remove whatever is left of one."""
    from testbed.launch import launchers

    removed = launchers.down()
    if json:
        print_json({"removed": removed})
    else:
        typer.echo("\n".join(removed) if removed else "nothing was up")


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
            print_json({"leftovers": found})
        else:
            typer.echo("\n".join(found) if found else "nothing of ours is left")
        raise typer.Exit(1 if found else 0)
    from testbed.doctor import checks
    from testbed.show import show_checks

    results = checks(port)
    missing = any(check.status == "missing" for check in results)
    if json:
        print_json({"ok": not missing, "checks": [asdict(check) for check in results]})
    else:
        show_checks(results)
    raise typer.Exit(1 if missing else 0)
