"""How long a person waits before virtual time begins: `prfaas simulate smoke --help`, and a run of 100 requests.

    python -m tests.bench.startup --json

Wall seconds of fresh processes, the median and the least of the runs; the least is the machine's, what is above it is
what else runs there. Exit code 1 when a least is not below `--bar-s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "help": ["simulate", "smoke", "--help"],
    "run": ["simulate", "smoke", "--rate-rps", "2", "--duration-s", "50", "--warmup-s", "5", "--json"],
}


def seconds(arguments: list[str]) -> float:
    """One fresh process of the command, start to end."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "testbed.cli", *arguments], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"prfaas {' '.join(arguments)} ended with {done.returncode}")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.startup", description="What a start costs.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bar-s", type=float, default=1.5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, arguments in COMMANDS.items():
        taken = [seconds(arguments) for _ in range(asked.runs)]
        found[name] = {"median_s": statistics.median(taken), "least_s": min(taken)}
    ok = all(one["least_s"] < asked.bar_s for one in found.values())
    if asked.json:
        print(json.dumps({"ok": ok, "bar_s": asked.bar_s, **found}, indent=2))
    else:
        for name, one in found.items():
            print(f"{name}: median {one['median_s']:.2f} s, least {one['least_s']:.2f} s (bar {asked.bar_s:g} s)")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
