"""The scenario `smoke` in namespaces and in containers, beside each other: `python -m tests.docker.agreement`.

Both runs have to be valid, and the mean and the 90th percentile of TTFT within 5 % of each other, as have the bytes
that crossed the WAN. Where a pair of runs is farther apart, which the P90 of one run can be by chance, another pair is
made, three at most, and the mean of all pairs counts. A run that the machine was too busy for is tried again, once.
Exit codes: 0 they agree, 1 they do not, 3 a run was no measurement, 2 a run could not be made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from testbed.launch.launchers import LAUNCHERS

BOUND: Final = 0.05
TRIES: Final = 2
PAIRS: Final = 3
FIGURES: Final = {
    "TTFT mean, s": ("ttft_s", "mean", ".3f"),
    "TTFT p90, s": ("ttft_s", "p90", ".3f"),
    "bytes over the WAN": ("link", "wan_tx_bytes", ",.0f"),
}


def measured(launcher: str, folder: Path, port: int) -> dict[str, Any]:
    """The summary of a valid run. Exits where there is none."""
    for attempt in range(TRIES):
        out = folder / f"{launcher}-{attempt}"
        argv = [sys.executable, "-m", "testbed.cli", "run", "smoke", "--launcher", launcher, "--port", str(port)]
        done = subprocess.run([*argv, "--out", str(out)])
        if done.returncode == 0:
            summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
            return summary
        if done.returncode != 3:
            sys.exit(1 if done.returncode == 1 else 2)
    print(f"{launcher}: {TRIES} runs were no measurement; try again with nothing else running", file=sys.stderr)
    sys.exit(3)


def told(pairs: Sequence[dict[str, dict[str, Any]]]) -> bool:
    """Whether the means over the pairs agree."""
    agree = True
    for what, (group, key, form) in FIGURES.items():
        here, there = (fmean(pair[launcher][group][key] for pair in pairs) for launcher in LAUNCHERS)
        apart = there / here - 1
        agree = agree and abs(apart) <= BOUND
        print(f"{what}: {here:{form}} in namespaces, {there:{form}} in containers ({apart:+.1%}, at most {BOUND:.0%})")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docker.agreement", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    found: list[dict[str, dict[str, Any]]] = []
    agree = False
    with tempfile.TemporaryDirectory(prefix="prfaas-agreement-") as name:
        while not agree and len(found) < PAIRS:
            folder = Path(name, str(len(found)))
            found.append({launcher: measured(launcher, folder, port) for launcher in LAUNCHERS})
            agree = told(found)
    print("they agree" if agree else "they do not agree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
