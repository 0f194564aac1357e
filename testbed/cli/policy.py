"""The policy by itself: `policy list`, `policy new`, `policy check`, `policy set`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption
from testbed.cli.shared import find_policies_here, print_json, prints_aside, running_testbed

policy_app = typer.Typer(help="The policies there are, and the one in charge.", no_args_is_help=True)


@policy_app.command("list")
def policy_list(json: JsonOption = False) -> None:
    """The shipped policies, and which is in charge of the testbed that is up."""
    from testbed.launch.state import TestbedError
    from testbed.policies import CAVEAT, SHIPPED, wants_future

    try:
        in_charge = running_testbed().call("GET", "/prfaas/status", timeout_s=5)["policy"]
    except TestbedError:
        in_charge = None
    policies = [
        {
            "name": name,
            "class": f"{made.__module__}:{made.__qualname__}",
            "what": (inspect.getdoc(made) or "").splitlines()[0] + (f" ({CAVEAT})" if wants_future(made()) else ""),
        }
        for name, made in SHIPPED.items()
    ]
    if json:
        print_json({"policies": policies, "in_charge": in_charge})
        return
    for one in policies:
        typer.echo(f"{one['name']:<13}{one['what']}")
    typer.echo("or your own, as package.module:Class")
    if in_charge is not None:
        typer.echo(f"in charge of the testbed that is up: {in_charge}")


@policy_app.command("new")
def policy_new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Small letters and underscores, such as my_policy.")],
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where the module is written.")] = Path(),
) -> None:
    """Write the skeleton of a policy of your own; it runs as it is."""
    from testbed.policy_new import new_policy

    path, policy = new_policy(name, folder)
    typer.echo(f"wrote {path}; next: prfaas policy check {policy}")


@policy_app.command("check")
def policy_check(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A name, or package.module:Class.")],
    json: JsonOption = False,
) -> None:
    """Check a policy's contract: pure, deterministic, fast, told nothing but what it may see; else exit code 1."""
    from testbed.policy_check import MOST_US, check_policy
    from traces.client_rows import FAILED

    find_policies_here()
    with prints_aside():
        checked = check_policy(policy)
    if json:
        print_json(checked.to_json())
    else:
        for one in checked.violations:
            typer.echo(f"{one.where}: {one.rule}: {one.what}\n    {one.remedy}")
        speed = ", ".join(
            f"{took_us:.1f} us at {count} instances (at most {MOST_US[count]:g})"
            for count, took_us in checked.route_us.items()
        )
        if checked.violations:
            typer.echo(f"{policy} breaks its contract in {len(checked.violations)} places")
        else:
            typer.echo(f"{policy} keeps its contract: {checked.decisions} decisions alike in every process; {speed}")
    raise typer.Exit(FAILED if checked.violations else 0)


@policy_app.command("set")
def policy_set(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A name, or package.module:Class.")],
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", metavar="NAME=NUMBER", help="One of its parameters; repeatable."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Put another policy in charge of the testbed that is up, now, until a load begins or ends; observations stay."""
    body = {"policy": policy, "parameters": dict(_parameter(item) for item in parameters or ())}
    answer = running_testbed().call("POST", "/prfaas/policy", body)
    if json:
        print_json(answer)
        return
    t = answer["threshold_tokens"]
    typer.echo(
        f"{answer['policy']} is in charge of session {answer['session']} until a load begins or ends"
        + ("" if t is None else f"; t = {t:,.0f} tokens")
    )


def _parameter(item: str) -> tuple[str, float]:
    name, _, value = item.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{item!r}: must be NAME=NUMBER, such as threshold_tokens=20000", param_hint="--parameter"
        ) from None
