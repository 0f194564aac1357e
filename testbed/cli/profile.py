"""`prfaas profile`: measure a model that computes here, and write what plan, simulate and timing emulation need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption
from testbed.cli.shared import print_json, say

MOST_SPREAD = 0.1


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
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="How often everything is measured.")] = 7,
    force: Annotated[
        bool, typer.Option("--force", help="Write it though the times vary too much, and replace a file.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure S_kv, T_prefill and the decode step of a real model on this machine, and write a profile.

    Exit code 3 when the machine was too busy: half of the times of one thing must lie within 10 % of their median.
    """
    from testbed.profiling import measure_alone

    if backend != "hybrid":
        raise typer.BadParameter(f"{backend!r}: only hybrid computes; use hybrid", param_hint="--backend")
    if out.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"{str(out)!r}: a profile's name ends in .yaml", param_hint="--out")
    if out.exists() and not force:
        raise typer.BadParameter(f"{str(out)!r} exists; name another file, or replace it with --force")
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
    if found.spread > MOST_SPREAD and not force:
        say(
            f"invalid: half of the times of one thing are {found.spread:.0%} apart (at most {MOST_SPREAD:.0%}): this "
            "machine is doing something else; measure again when it is not, or write it all the same with --force"
        )
        sys.exit(3)
    out.write_text(found.text, encoding="utf-8")
    say(f"wrote {out}")
    if json:
        print_json(found.summary | {"file": str(out)})
    else:
        from testbed.show_profile import show_profile

        show_profile(found.summary)
