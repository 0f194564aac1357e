"""Several runs as one command: policies compared, seeds repeated, on the wire and in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from testbed.cli.shared import (
    find_policies_here,
    new_folder,
    offer_load,
    print_json,
    prints_aside,
    report,
    say,
    write_trace,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from testbed.load import Outcome, Testbed
    from testbed.scenario import Scenario

Summaries = dict[str, dict[int, dict[str, Any]]]
"""Policy -> seed -> summary, in the order of the runs."""


def arms_of(scenario: Scenario, policy: str | None, trace_out: Path | None) -> list[Scenario]:
    """One scenario a policy of `--policy`. scenario: with one deployment. Raises what `testbed.series.arms` does."""
    from testbed.series import arms, policy_names

    names = [] if policy is None else policy_names(policy)
    if len(names) < 2:
        return [scenario.only(None, *names)]
    if trace_out is not None:
        raise typer.BadParameter("a trace is of one policy, and several are given", param_hint="--trace-out")
    find_policies_here()
    with prints_aside():
        return arms(scenario, names)


def offer(
    testbed: Testbed,
    arms: Sequence[Scenario],
    repeats: int,
    *,
    out: Path | None,
    workers: int,
    trace_out: Path | None,
    plot: Path | None,
    json: bool,
) -> int:
    """Offer the load of every arm under every seed to the testbed, one after another, and report; the exit code.

    The worst run's; 4 when interrupted. A run that was interrupted is kept and not counted, unless it was the first.
    """
    from testbed.series import read_ttft_s, runs
    from traces.client_rows import INCONCLUSIVE

    todo = runs(arms, repeats)
    policies, repeated = len(arms) > 1, repeats > 1
    top = new_folder(out, arms[0].name)
    if repeated and arms[0].workload.trace is not None:
        say("a trace is the same under every seed: the intervals tell of this machine's scatter, not of other loads")
    done, interrupted = _offer_each(testbed, todo, top, workers, policies=policies, repeated=repeated)
    if interrupted and len(todo) > 1:
        say(f"interrupted: {len(done)} of {len(todo)} runs are counted")
    write_trace(trace_out, done[0][1].folder)
    summaries = _by_policy((run, outcome.summary) for run, outcome in done)
    if policies or repeated:
        _save(top, summaries, policies)
    if plot is not None:
        draw(summaries, [(run, read_ttft_s(outcome.folder)) for run, outcome in done], plot)
    if policies:
        _report_comparison(summaries, top, json)
    elif repeated:
        _report_repeats(summaries, top, json)
    else:
        report(done[0][1], json)
    return INCONCLUSIVE if interrupted else max(outcome.exit_code for _, outcome in done)


def _offer_each(
    testbed: Testbed, todo: Sequence[Scenario], top: Path, workers: int, *, policies: bool, repeated: bool
) -> tuple[list[tuple[Scenario, Outcome]], bool]:
    """The runs that ended, and whether Ctrl-C kept the others from it.

    Before each next run those so far are kept in one file, whatever becomes of it. Raises KeyboardInterrupt when no run
    has come to anything.
    """
    from testbed.series import place
    from traces.client_rows import INCONCLUSIVE

    done: list[tuple[Scenario, Outcome]] = []
    folder = top
    try:
        for number, run in enumerate(todo, 1):
            if done:
                _save(top, _by_policy((run, outcome.summary) for run, outcome in done), policies)
            if len(todo) > 1:
                say(f"run {number} of {len(todo)}: {run.deployments[0].policy.name}, seed {run.seed}")
            folder = place(top, run, policies=policies, repeats=repeated)
            outcome = offer_load(testbed, run, folder, _swapped(testbed, run), workers)
            if outcome.exit_code == INCONCLUSIVE and done:
                say(f"{folder}: of a part of its load, and not counted")
                return done, True
            done.append((run, outcome))
            if outcome.exit_code == INCONCLUSIVE:
                return done, True
    except KeyboardInterrupt:
        if not done:
            raise
        with contextlib.suppress(OSError):
            folder.rmdir()  # made for results that it did not come to
        return done, True
    return done, False


def compare_virtual(
    arms: Sequence[Scenario],
    repeats: int,
    *,
    jobs: int | None,
    out: Path | None,
    requests: str,
    plot: Path | None,
    json: bool,
) -> int:
    """Run every arm under every seed in virtual time, on all cores, and report; the exit code, the worst run's."""
    from testbed.points import Point, Runner, refuse_repeats
    from testbed.report.summary import EXIT_CODES
    from testbed.series import Observe, runs

    refuse_repeats(arms[0], repeats)
    todo = runs(arms, repeats)
    folder = new_folder(out, arms[0].name) if out is not None or requests != "none" else None
    observe = Observe(folder, requests, with_ttft=plot is not None, repeats=repeats > 1)
    with Runner(measuring=observe, jobs=jobs, say=say) as runner:
        seen = runner.run([Point(run) for run in todo])
    summaries = _by_policy((run, one["summary"]) for run, one in zip(todo, seen, strict=True))
    if folder is not None:
        _save(folder, summaries, policies=True)
    if plot is not None:
        draw(summaries, [(run, one["ttft_s"]) for run, one in zip(todo, seen, strict=True)], plot)
    _report_comparison(summaries, folder, json)
    return max(EXIT_CODES[one["summary"]["verdict"]["status"]] for one in seen)


def draw(summaries: Summaries, ttft_s: Sequence[tuple[Scenario, npt.NDArray[np.float64]]], path: Path) -> None:
    """The figure of one policy or several. ttft_s: of every run, s."""
    import numpy as np

    from testbed.compare import compare
    from testbed.figures.compare import plot_comparison

    of: dict[str, list[npt.NDArray[np.float64]]] = {}
    for run, values in ttft_s:
        of.setdefault(run.deployments[0].policy.name, []).append(values)
    plot_comparison(compare(summaries), {name: np.concatenate(values) for name, values in of.items()}, path)
    say(f"drew {path}")


def _by_policy(summaries: Iterable[tuple[Scenario, dict[str, Any]]]) -> Summaries:
    found: Summaries = {}
    for run, summary in summaries:
        found.setdefault(run.deployments[0].policy.name, {})[run.seed] = summary
    return found


def _swapped(testbed: Testbed, run: Scenario) -> str | None:
    """The policy that a load asks for; None for the testbed's own."""
    name = run.deployments[0].policy.name
    return None if name == testbed.scenario.deployments[0].policy.name else name


def _save(folder: Path, summaries: Summaries, policies: bool) -> None:
    from testbed.compare import compare, repeats, save

    if policies:
        save(folder / "comparison.json", compare(summaries))
    else:
        (by_seed,) = summaries.values()
        save(folder / "repeats.json", repeats(by_seed))


def _report_comparison(summaries: Summaries, folder: Path | None, json: bool) -> None:
    from testbed.compare import compare
    from testbed.show_compare import show_comparison

    comparison = compare(summaries)
    if json:
        print_json({**comparison, "results": str(folder) if folder else None})
        return
    show_comparison(comparison)
    if folder:
        typer.echo(f"results: {folder}")


def _report_repeats(summaries: Summaries, folder: Path, json: bool) -> None:
    """The first run's summary and the repeats, as `prfaas simulate --repeats` has them."""
    from testbed.compare import repeats
    from testbed.show import show_repeats, show_summary

    (by_seed,) = summaries.values()
    first, repeated = next(iter(by_seed.values())), repeats(by_seed)
    if json:
        print_json({**first, "repeats": repeated, "results": str(folder)})
        return
    show_summary(first)
    show_repeats(repeated)
    typer.echo(f"results: {folder}")
