"""What the log at `info` costs the gateway, as a share of the CPU that it spends on a request.

    python -m tests.bench.logs --json

Two testbeds on loopback serve the requests of `tests.bench.gateway` in turns, one logging at `info`, one at `warning`:
the difference of their gateways' CPU a request is what the log costs, with an interval over the pairs of turns. Beside
it the same by reckoning, which no other load of the machine blurs: lines a request times the CPU of a line. Exit code 1
when what was reckoned is not below `--bar`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from emulator.log import Log, Logfmt
from testbed.launch.state import StateDir
from testbed.load import Testbed
from testbed.logs import Reader, find
from tests.bench import gateway
from tests.wire.loopback import Loopback

LEVELS = ("info", "warning")


def cpu_s(fleet: Loopback) -> float:
    """What the gateway's main thread, which does all but numpy's sums, has had of a core so far."""
    return int(Path(f"/proc/{fleet.processes['gateway'].pid}/schedstat").read_text().split()[0]) * 1e-9


def take_turns(turns: int, requests: int, folder: Path) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of CPU a request in every turn, by level; lines of the gateway's log a request at info."""
    spent: dict[str, list[float]] = {level: [] for level in LEVELS}
    chosen = gateway.scenario(folder)
    with contextlib.ExitStack() as stack:
        fleets = {
            level: stack.enter_context(Loopback(chosen.model_copy(update={"log_level": level}))) for level in LEVELS
        }
        for turn in range(turns + 1):
            for level in LEVELS[:: 1 if turn % 2 else -1]:
                fleet = fleets[level]
                testbed = Testbed(StateDir(fleet.root / "state"), chosen, fleet.port)
                before_s = cpu_s(fleet)
                gateway.measure(testbed, requests, folder)
                if turn:  # the first one warms up
                    spent[level].append((cpu_s(fleet) - before_s) * 1e3 / (requests + gateway.WARM_UP))
        events = Reader(find(fleets["info"].root / "state" / "logs", ["gateway"])).more()
        of_requests = sum("request_id" in event.fields for event in events)
    return spent, of_requests / ((turns + 1) * (requests + gateway.WARM_UP))


def line_us(lines: int = 20_000) -> float:
    """CPU of one line of the log, microseconds: of the longer kind that the gateway writes, into a file."""
    with tempfile.TemporaryFile("w") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(Logfmt("gateway"))
        logger = logging.getLogger("prfaas.bench")
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
        log = Log("bench")
        begun_s = time.process_time()
        for i in range(lines):
            log.info(
                "routed",
                request_id=f"bench-{i}",
                attempt=1,
                t_s=12.345678 + i,
                prefill="prfaas-0",
                decode="pd-d-1",
                reason="longer than t",
                input_tokens=gateway.INPUT_TOKENS,
                cached_tokens=None,
                policy_error=None,
            )
        return (time.process_time() - begun_s) / lines * 1e6


def interval(values: Any) -> list[float]:
    """Of the mean, 95 %, by bootstrap over the pairs."""
    drawn = np.random.default_rng(1).choice(values, (4000, len(values)))
    return [round(float(bound), 4) for bound in np.percentile(drawn.mean(axis=1), [2.5, 97.5])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.logs", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--turns", type=int, default=12, help="of each level")
    parser.add_argument("--requests", type=int, default=60, help="a turn")
    parser.add_argument(
        "--bar", type=float, default=0.02, help="share of the gateway's CPU that the log must stay below"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prf") as folder:
        spent, lines = take_turns(options.turns, options.requests, Path(folder))
    info, warning = (np.array(spent[level]) for level in LEVELS)
    per_line_us = line_us()
    found: dict[str, Any] = {
        "cpu_ms_per_request": {level: round(float(np.mean(spent[level])), 3) for level in LEVELS},
        "measured_share": round(float(np.mean(info / warning - 1)), 4),
        "measured_interval": interval(info / warning - 1),
        "lines_per_request": round(lines, 2),
        "line_us": round(per_line_us, 1),
        "reckoned_share": round(lines * per_line_us * 1e-3 / float(np.mean(warning)), 4),
    }
    passed = found["reckoned_share"] < options.bar
    if options.json:
        settings = {"bar": options.bar, "turns": options.turns, "requests": options.requests}
        print(json.dumps({"bench": "logs", "passed": passed, **settings, **found}, indent=1))
    else:
        low, high = found["measured_interval"]
        print(
            f"the log at info: {found['lines_per_request']:g} lines of {found['line_us']:g} us a request, "
            f"{found['reckoned_share']:.2%} of the gateway's {found['cpu_ms_per_request']['warning']:g} ms; "
            f"measured beside `warning`: {found['measured_share']:+.2%} ({low:+.2%} to {high:+.2%})"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
