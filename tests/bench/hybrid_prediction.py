"""What a profile from runs of the `hybrid` scenario predicts of other runs: `python -m tests.bench.hybrid_prediction`.

The model runs on the wire with `--rounds` seeds that a profile is taken from and as many that are predicted, in turns,
as a machine's pace drifts. Then timing emulation on the wire and virtual time take the place of the model, with that
profile, the same requests and everything else as it was. TTFT over all requests of the predicted seeds: the mean and
the 90th percentile, and how far each prediction is off. A run that the machine was too busy for is made once more.

Exit codes: 0 timing emulation is within `--bound` in both, 1 it is not, 2 a run could not be made, 3 it was no
measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from testbed.series import read_ttft_s

TRIES = 2
PREDICTED, PROFILED = 1, 1000
"""The first seeds of both."""


def prfaas(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "testbed.cli", *arguments], stdout=subprocess.DEVNULL).returncode


class Bench:
    def __init__(self, folder: Path, sets: Sequence[str], port: int) -> None:
        self.folder, self.sets, self.port = folder, [one for value in sets for one in ("--set", value)], port

    def wire(self, name: str, seed: int, *sets: str) -> Path:
        """The results of a valid run. Exits where there is none."""
        for attempt in range(TRIES):
            out = self.folder / f"{name}-{seed}-{attempt}"
            more = [one for value in sets for one in ("--set", value)]
            seeded = ["--set", f"seed={seed}", "--port", str(self.port), "--out", str(out)]
            code = prfaas("run", "hybrid", *self.sets, *more, *seeded)
            if code == 0:
                return out
            if code != 3:
                sys.exit(2)
        print(
            f"{name}, seed {seed}: {TRIES} runs were no measurement; try again with nothing else running",
            file=sys.stderr,
        )
        sys.exit(3)

    def virtual(self, seed: int, *sets: str) -> Path:
        out = self.folder / f"virtual-{seed}"
        more = [one for value in sets for one in ("--set", value)]
        if prfaas("simulate", "hybrid", *self.sets, *more, "--requests", "csv", "--seed", str(seed), "--out", str(out)):
            sys.exit(2)
        return out


def ttft_s(folders: Sequence[Path]) -> tuple[float, float, int]:
    """Mean, 90th percentile and number of the requests that count, over all runs."""
    values = np.concatenate([read_ttft_s(folder) for folder in folders])
    return float(values.mean()), float(np.quantile(values, 0.9)), len(values)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hybrid_prediction", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--duration-s", type=float, default=150.0)
    parser.add_argument("--rate-rps", type=float, default=2.2)
    parser.add_argument("--bound", type=float, default=0.1)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out", type=Path, help="a folder that is not there; the runs and the profiles are kept in it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.out is None:
        with tempfile.TemporaryDirectory(prefix="prfaas-prediction-") as folder:
            return predicted(given, Path(folder))
    if given.out.exists():
        parser.error(f"--out {given.out}: is there already; name another folder")
    given.out.mkdir(parents=True)
    return predicted(given, given.out)


def predicted(given: argparse.Namespace, folder: Path) -> int:
    """Make the runs in a folder, and say how far the predictions are off; the exit code."""
    load = [
        "workload.load_fraction=null",
        f"workload.rate_rps={given.rate_rps}",
        f"workload.duration_s={given.duration_s}",
    ]
    bench = Bench(folder, load, given.port)
    profiled, model = [], []
    for i in range(given.rounds):
        profiled.append(bench.wire("model", PROFILED + i))
        model.append(bench.wire("model", PREDICTED + i))
    runs = [one for run in profiled for one in ("--run", str(run))]
    if prfaas("profile", *runs, "--out", str(folder / "hybrid.yaml"), "--force"):
        return 2
    use = []
    for site in ("prfaas", "pd"):
        file = folder / f"hybrid-{site}.yaml"
        if not file.is_file():
            print(
                f"{site}: too few prefills for a profile of its own; take --duration-s or --rounds higher",
                file=sys.stderr,
            )
            return 3
        use.append(f"deployments.0.profiles.{site}={file}")
    seeds = range(PREDICTED, PREDICTED + given.rounds)
    found = {
        "the model": ttft_s(model),
        "timing emulation": ttft_s([bench.wire("timing", seed, *use, "backend=timing") for seed in seeds]),
        "virtual time": ttft_s([bench.virtual(seed, *use) for seed in seeds]),
    }
    mean_s, p90_s, _ = found["the model"]
    table = [
        {
            "by": who,
            "requests": n,
            "mean_s": mean,
            "mean_off": mean / mean_s - 1,
            "p90_s": p90,
            "p90_off": p90 / p90_s - 1,
        }
        for who, (mean, p90, n) in found.items()
    ]
    if given.json:
        print(json.dumps({"profiles": use, "table": table}, indent=2))
    else:
        print(f"seeds {', '.join(map(str, seeds))}; profiles {', '.join(use)}")
        for row in table:
            off = "" if row["by"] == "the model" else f" ({row['mean_off']:+.1%}, {row['p90_off']:+.1%})"
            print(f"{row['by']}: TTFT mean {row['mean_s']:.3f} s, P90 {row['p90_s']:.3f} s of {row['requests']}{off}")
    timing = table[1]
    return 0 if max(abs(float(timing["mean_off"])), abs(float(timing["p90_off"]))) <= given.bound else 1


if __name__ == "__main__":
    sys.exit(main())
