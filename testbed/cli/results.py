"""A run's results, looked into afterwards: `explain`, `replay-decisions`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from testbed.cli.options import JsonOption
from testbed.cli.shared import find_policies_here, new_folder, print_json, prints_aside, say


class OfRuns(TyperGroup):
    """`report RUN...` is `report runs RUN...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["runs", *args]
        return super().parse_args(ctx, args)


report_app = typer.Typer(
    cls=OfRuns, help="Pages of what results say: prfaas report RUN..., or of a gate; report link.", no_args_is_help=True
)

RunArg = Annotated[str, typer.Argument(metavar="RUN", help="A results folder, or its name in results/.")]


def explain(
    run: RunArg,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id, as in requests.csv.")],
    json: JsonOption = False,
) -> None:
    """Tell the life of one request: its stamps, why it went where it went, and what had changed before."""
    from testbed.explain import explain as tell
    from testbed.show_explain import show_explained

    found = tell(run, request)
    if json:
        print_json(found)
    else:
        show_explained(found)


def replay_decisions(
    run: RunArg,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", metavar="POLICY", help="Another policy: what it would have decided on the same events."
        ),
    ] = None,
    differences: Annotated[
        int, typer.Option("--differences", metavar="N", min=0, help="How many of the first differences to show.")
    ] = 10,
    json: JsonOption = False,
) -> None:
    """Feed the event log of a run on the wire to the scheduler once more. Exit code 1 when it decides differently."""
    from testbed.agreement import instead, verify
    from testbed.show_explain import show_instead, show_verified_decisions

    find_policies_here()
    with prints_aside():
        result = verify(run, differences=differences) if policy is None else instead(run, policy)
    if json:
        print_json(result)
    elif policy is None:
        show_verified_decisions(result)
    else:
        show_instead(result)
    raise typer.Exit(0 if result.get("agree", True) else 1)


@report_app.command("runs")
def report_runs(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Results folders, or their names in results/; or that of a gate."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the report goes: results/<time>-report, of one run its own."),
    ] = None,
    unlike: Annotated[
        bool, typer.Option("--unlike", help="Compare runs that differ in more than their policy, and say so.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare runs, the first with all others, or look at one: report.html, and report.md for a comment."""
    from testbed.gate.report.write import PAGE, report

    def folder() -> Path:
        return new_folder(out, "report")

    made, data = report(runs, out, folder, unlike=unlike)
    if json:
        print_json({**data, "report": str(made / PAGE)})
    else:
        typer.echo(f"report: {made / PAGE}")


@report_app.command("link")
def report_link(
    run: RunArg,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where the page goes, instead of the run's link.html and link.csv."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Write nothing: only say it.")] = False,
    json: JsonOption = False,
) -> None:
    """What limited the link when, and what is wrong with it: the link doctor's words, and its page over time."""
    from testbed.report.link_files import LinkReport
    from testbed.report.link_words import PAGE
    from testbed.runs import find_run
    from testbed.show_link import show_diagnosis

    if text and out is not None:
        raise typer.BadParameter("--text writes nothing; leave one of both out", param_hint="--out")
    folder = find_run(run)
    report = LinkReport.of_folder(folder)
    if json:
        print_json({"run": str(folder), **report.told.to_json()})
    else:
        show_diagnosis(report.told)
    if text:
        return
    if out is None:
        report.write(folder)
    else:
        report.write_page(out)
    say(f"page: {out or folder / PAGE}")
