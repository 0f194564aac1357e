"""What several commands do: bring a testbed up, offer it a load, print."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import typer

if TYPE_CHECKING:
    import pandas as pd

    from testbed.load import Outcome, Testbed
    from testbed.points import Runner
    from testbed.scenario import Scenario


LINK_TRIES: Final = 2


def find_policies_here() -> None:
    """What runs a policy looks for `package.module:Class` here too, as any `python -m` does."""
    sys.path.insert(0, str(Path.cwd()))


def bring_up(scenario: Scenario, port: int, launcher: str | None = None) -> tuple[Testbed, bool]:
    """The testbed of a scenario with one deployment, and whether it was up already."""
    from testbed.assemble import lengths_of_workload, max_input_tokens
    from testbed.fleet import launch_spec
    from testbed.launch import launchers
    from testbed.launch.state import StateDir
    from testbed.load import Testbed
    from testbed.policies import load_policy

    find_policies_here()
    deployment = scenario.deployments[0]
    with prints_aside():
        load_policy(deployment.policy.name)
    lengths_of_workload(scenario.workload, max_input_tokens(scenario, deployment))  # a trace that can be read
    state = StateDir(create=True)
    started = time.monotonic()
    say(f"starting {scenario.name} ({deployment.name}) ...")
    from_image = launchers.chosen(state, launcher) == launchers.COMPOSE
    spec = launch_spec(scenario, deployment, port=port, state=state, from_image=from_image)
    result = launchers.up(spec, launcher)
    if not result.already:
        try:
            (state.root / "scenario.yaml").write_text(scenario.to_yaml())
            say(f"up after {time.monotonic() - started:.1f} s")
        except BaseException:  # Ctrl-C: a start that is interrupted leaves nothing
            launchers.down()
            raise
    return Testbed(state, scenario, result.port), result.already


def add_beside(testbed: Testbed, profiles: list[str]) -> dict[str, str]:
    """Start containers beside those of a testbed, and give Locust the testbed's own load; name -> its page."""
    from testbed.assemble import build_workload
    from testbed.launch import compose
    from traces.load import save

    if "locust" in profiles:
        trace, _ = build_workload(testbed.scenario, testbed.scenario.deployments[0])
        save(trace, testbed.state.loads / "locust.jsonl")
    return compose.add(testbed.state, profiles)


def running_testbed() -> Testbed:
    """The testbed that is up. Raises TestbedError without one."""
    import yaml

    from testbed.launch import launchers
    from testbed.launch.client import NOT_UP
    from testbed.launch.state import StateDir, TestbedError
    from testbed.load import Testbed
    from testbed.scenario import parse

    found = launchers.status()
    state = StateDir()
    path = state.root / "scenario.yaml"
    if not found.get("up") or not path.exists():
        raise TestbedError(NOT_UP)
    return Testbed(state, parse(yaml.safe_load(path.read_text()), str(path)), found["port"])


def load_overrides(
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
    if arrivals in ("gamma", "mmpp", "diurnal"):
        sets.append(f"workload.arrivals.kind={arrivals}")  # and what the scenario has for it, such as cv
    elif arrivals is not None:
        sets.append(f"workload.arrivals={{kind: {_quoted(arrivals)}}}")
    if duration_s is not None and warmup_s is None:
        warmup_s = min(50.0, duration_s / 10)
    named = {"duration_s": duration_s, "warmup_s": warmup_s, "rate_rps": rate_rps, "load_fraction": load_fraction}
    return sets + [f"workload.{key}={value}" for key, value in named.items() if value is not None]


def log_sets(level: str | None) -> list[str]:
    """The option --log-level as --set items."""
    return [] if level is None else [f"log_level={_quoted(level)}"]


def _quoted(text: str) -> str:
    """A text as YAML that means it, whatever is in it."""
    import orjson

    return orjson.dumps(text).decode()


def run_wire(scenario: Scenario, port: int, out: Path | None, workers: int, *, keep: bool) -> Outcome:
    """Up, verify the link, load; down again, as `wire` has it."""
    with wire(scenario, port, keep=keep) as testbed:
        return offer_load(testbed, scenario, out, None, workers)


@contextlib.contextmanager
def wire(scenario: Scenario, port: int, *, keep: bool, launcher: str | None = None) -> Iterator[Testbed]:
    """The scenario's testbed with its link verified; down again unless `keep` or it was up before.

    Exits with 3 when the link is not what was asked for, measured twice: a machine may have been busy for a moment.
    """
    from testbed import linkctl
    from testbed.launch import launchers

    ours = not launchers.status()["up"]
    try:
        try:
            try:
                testbed, already = bring_up(scenario, port, launcher)
                ours = ours and not already
            except Exception:
                ours = False  # a start that fails leaves nothing; what is up is another's
                raise
            for _ in range(LINK_TRIES):
                verified = linkctl.verify(scenario, testbed.state)
                _say_verified(verified)
                if verified["ok"]:
                    break
            else:
                wrong = {name: ", ".join(one["wrong"]) for name, one in verified["directions"].items() if not one["ok"]}
                named = "; ".join(f"{name}: {what}" for name, what in wrong.items())
                say(f"the link is not what was asked for ({named}): the run would be no measurement")
                raise typer.Exit(3)
            yield testbed
        finally:
            if ours and not keep:
                launchers.down()
    except KeyboardInterrupt:
        if ours and not keep:
            launchers.down()  # it may have come just before the other
        raise


def offer_load(testbed: Testbed, scenario: Scenario, out: Path | None, policy: str | None, workers: int) -> Outcome:
    from testbed.load import run_load
    from testbed.show import LoadProgress

    folder = new_folder(out, scenario.name)
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


@contextlib.contextmanager
def point_runner(folder: Path, jobs: int | None, ray: str | None) -> Iterator[Runner]:
    """What a study runs its points with; interrupted, it says how to go on."""
    from testbed.points import Runner

    with Runner(jobs=jobs, ray=ray, folder=folder / "points", say=say) as runner:
        try:
            yield runner
        except KeyboardInterrupt:
            say(f"the points that were run are kept in {folder / 'points'}: the same command goes on from them")
            raise


def new_folder(out: Path | None, name: str) -> Path:
    """Where results go, made now, so that a load is not in vain; never a folder that holds something."""
    folder = out or Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"--out {folder}: is there already; name another, nothing is overwritten")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out {folder}: cannot be made ({error.strerror}); name another") from None
    return folder


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """A figure that could not be drawn is refused before anything runs for it. option: that names it."""
    if path is None:
        return
    from testbed.figures.draw import check

    try:
        check(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}; make it", param_hint=option)


def write_trace(path: Path | None, source: pd.DataFrame | Path) -> None:
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
    say(f"trace: {path}; open it at ui.perfetto.dev")


def report(outcome: Outcome, json: bool) -> None:
    if json:
        print_json({**outcome.summary, "results": str(outcome.folder)})
    else:
        from testbed.show import show_summary

        show_summary(outcome.summary)
        typer.echo(f"results: {outcome.folder}")


def _say_verified(result: dict[str, Any]) -> None:
    for direction, one in result["directions"].items():
        say(
            f"link {direction}: asked {one['asked_bps'] / 1e9:g} Gbps, carries {one['measured_bps'] / 1e9:.2f} of the "
            f"{one['expected_bps'] / 1e9:.2f} Gbps that TCP can get of it ({one['error']:+.1%})"
        )


def print_json(value: Any) -> None:
    import orjson

    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())


def prints_aside() -> contextlib.redirect_stdout[TextIO]:
    """Standard output is for results: what a policy prints goes to standard error."""
    return contextlib.redirect_stdout(sys.stderr)


def say(text: str) -> None:
    typer.echo(text, err=True)
