"""The scenario `smoke` in namespaces and in containers, beside each other: `python -m tests.docker.agreement`.

Both runs have to be valid, and the mean and the 90th percentile of TTFT within 5 % of each other, as have the bytes
that crossed the WAN. A run that the machine was too busy for is tried again, once. Exit codes: 0 they agree, 1 they do
not, 3 a run was no measurement, 2 a run could not be made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from testbed.launch.launchers import LAUNCHERS

BOUND: Final = 0.05
TRIES: Final = 2
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docker.agreement", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    with tempfile.TemporaryDirectory(prefix="prfaas-agreement-") as name:
        found = {launcher: measured(launcher, Path(name), port) for launcher in LAUNCHERS}
    agree = True
    for what, (group, key, form) in FIGURES.items():
        here, there = (found[launcher][group][key] for launcher in LAUNCHERS)
        apart = there / here - 1
        agree = agree and abs(apart) <= BOUND
        print(f"{what}: {here:{form}} in namespaces, {there:{form}} in containers ({apart:+.1%}, at most {BOUND:.0%})")
    print("they agree" if agree else "they do not agree")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
