"""`prfaas profile`: measure a model that computes here, and write what plan, simulate and timing emulation need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption, PortOption, SetOption
from testbed.cli.shared import print_json, say

MOST_UNCERTAIN = 0.05


def _ran(scenario: str | None, sets: list[str] | None, seed: int, port: int) -> Path:
    """Results of the scenario on the wire, with another seed; exits as such a run does when it is not valid."""
    from testbed.cli.shared import run_wire
    from testbed.scenario import load

    chosen = load(scenario or "", sets or ())
    if chosen.seed == seed:
        raise typer.BadParameter(f"{seed} is the scenario's own; a profile is of other requests than those it predicts")
    chosen = chosen.only(None).model_copy(update={"seed": seed})
    outcome = run_wire(chosen, port, None, 1, keep=False)
    say(f"ran {chosen.name} with seed {seed}: {outcome.folder}")
    if outcome.exit_code:
        sys.exit(outcome.exit_code)
    return outcome.folder


def _from_runs(out: Path, folders: list[Path], json: bool) -> None:
    from testbed.calibrate import profiles_of_runs

    files = {}
    for site, text in profiles_of_runs(folders).items():
        files[site] = str(out.with_stem(f"{out.stem}-{site}"))
        Path(files[site]).write_text(text, encoding="utf-8")
    if json:
        print_json({"files": files, "runs": [str(folder) for folder in folders]})
    else:
        say("".join(f"wrote {file}\n" for file in files.values()).rstrip())


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give whole numbers, such as 1024,4096", param_hint=option) from None


def profile(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The profile, a .yaml.")],
    backend: Annotated[str, typer.Option("--backend", metavar="hybrid", help="What computes.")] = "hybrid",
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="Where it computes.")] = "cpu",
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="The model: tiny or small.")] = "tiny",
    pattern: Annotated[
        str | None, typer.Option("--pattern", metavar="LETTERS", help="Its layers: L linear, F full, S sliding (LLLF).")
    ] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="L,...", help="Tokens of the prompts.")
    ] = "256,512,1024,2048,4096,8192",
    batches: Annotated[str, typer.Option("--batches", metavar="B,...", help="Requests of a decode step.")] = "1,2,4,8",
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="Of a model that computes on the CPU, each kept to a core.")
    ] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="How often everything is measured.")] = 15,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--run", metavar="DIR", help="Measure nothing: take the times from the results of a hybrid run; repeatable."
        ),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="NAME", help="Run it first, with --seed, and take the times from that."),
    ] = None,
    sets: SetOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of that run; another than the scenario's own.")] = 1000,
    port: PortOption = 8000,
    force: Annotated[
        bool, typer.Option("--force", help="Write it though the times vary too much, and replace a file.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure S_kv, T_prefill and the decode step of a real model on this machine, and write a profile.

    By itself on an idle machine; or, with --scenario or --run, in a testbed under its load, beside all that runs there
    on the same cores: then a file for each site, FILE-prfaas and FILE-pd.

    Exit code 3 when the machine was too busy: the standard error of a median must be at most 5 % of it.
    """
    if backend != "hybrid":
        raise typer.BadParameter(f"{backend!r}: only hybrid computes; use hybrid", param_hint="--backend")
    if out.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"{str(out)!r}: a profile's name ends in .yaml", param_hint="--out")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{str(out)!r}: there is no folder {str(out.parent)!r}; make it", param_hint="--out")
    in_testbed = bool(runs) or scenario is not None
    for file in (out.with_stem(f"{out.stem}-{site}") for site in ("prfaas", "pd")) if in_testbed else (out,):
        if file.exists() and not force:
            raise typer.BadParameter(f"{str(file)!r} exists; name another file, or replace it with --force")
    if in_testbed:
        if runs and scenario is not None:
            raise typer.BadParameter("--run and --scenario are both given; give one")
        _from_runs(out, runs or [_ran(scenario, sets, seed, port)], json)
        return
    from testbed.profiling import measure_alone

    found = measure_alone(
        out.stem,
        preset,
        {} if pattern is None else {"pattern": pattern},
        device=device,
        lengths=_numbers(lengths, "--lengths"),
        batches=_numbers(batches, "--batches"),
        threads=threads,
        rounds=rounds,
        tell=say,
    )
    if found.uncertain > MOST_UNCERTAIN and not force:
        say(
            f"invalid: the times vary so much that a median is {found.uncertain:.0%} uncertain (at most "
            f"{MOST_UNCERTAIN:.0%}): this machine is doing something else; measure again when it is not, take more "
            "--rounds, or write it all the same with --force"
        )
        sys.exit(3)
    out.write_text(found.text, encoding="utf-8")
    say(f"wrote {out}")
    if json:
        print_json(found.summary | {"file": str(out)})
    else:
        from testbed.show_profile import show_profile

        show_profile(found.summary)
