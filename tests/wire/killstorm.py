"""`kill -9` of a testbed's processes at random moments, and what is then left of it: `python -m tests.wire.killstorm`.

A storm is rounds of one to three kills: while the testbed starts, stands idle, carries a load, is taken down. Each
round has a state directory of its own and ends with `prfaas down`, after which nothing may be left, and the host's own
network, mounts, settings and files must be what they were. A delay line that dies under a load is to be started again,
and that load has to call itself invalid and say why. A seed names the plan; what it hits depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from testbed.launch.state import ProcessId
from tests.wire import host

REPOSITORY: Final = Path(__file__).parents[2]
MODULES: Final = {
    "testbed.launch.pid1": "supervisor",
    "netem.agent": "agent",
    "netem.delay": "delay line",
    "testbed.gateway": "gateway",
    "emulator.worker": "worker",
}
VICTIMS: Final = (*MODULES.values(), "launcher")  # the launcher: the process outside that holds pid 1
MOMENTS: Final = {
    "up": (2, 0.7, 3.0),  # while `prfaas up` starts it
    "idle": (1, 0.0, 0.5),
    "load": (1, 0.0, 4.0),  # from when `prfaas load` is started
    "run": (2, 0.0, 9.0),  # from when the gateway has begun the load, 5 s before its first request
    "down": (2, 0.1, 0.7),  # while `prfaas down` stops it
}
"""By moment: how often, and from when to when the kills fall, wall seconds."""

KEPT: Final = {
    "logs", "loads", "lock", "scenario.yaml", "link-applied.jsonl", "link-counters.csv",
}  # fmt: skip
PATIENCE_S: Final = 120.0
SCENARIO: Final = """
name: storm
description: A small fleet over a link with a delay, to be killed.
deployments:
  - name: prfaas-pd
    profiles: {prfaas: toy, pd: toy}
    fleet: {n_prfaas: 2, n_p: 1, n_d: 2}
    policy: {name: static, threshold_tokens: 8192}
workload:
  lengths: {kind: mix, values: [1024, 32768], weights: [1, 1]}
  output_tokens: 100
  rate_rps: 1
  duration_s: 20
  warmup_s: 0
link: {rate_bps: 8gbps, delay_s: 0.05}
decode: {stream_interval: 10}
scale: {time_scale: 5, byte_scale: 0.001}
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """Planned: at_s wall seconds after the moment's begin, one of this kind, or if none is there any; `draw` picks."""

    at_s: float
    victim: str
    draw: float


@dataclass(frozen=True, slots=True)
class Plan:
    moment: str
    kills: tuple[Kill, ...]


@dataclass(slots=True)
class Round:
    """What came of one. `wrong`: what should not be, in words; a round without is good."""

    number: int
    moment: str
    killed: list[str] = field(default_factory=list)
    missed: int = 0
    load: str = ""
    down_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def plans(seed: int) -> Iterator[Plan]:
    """Rounds without end."""
    draw = random.Random(seed)
    while True:
        moment = draw.choices(list(MOMENTS), [weight for weight, _, _ in MOMENTS.values()])[0]
        _, first_s, last_s = MOMENTS[moment]
        times = sorted(draw.uniform(first_s, last_s) for _ in range(draw.randint(1, 3)))
        yield Plan(moment, tuple(Kill(at_s, draw.choice(VICTIMS), draw.random()) for at_s in times))


class Storm:
    """One round: a testbed of its own in `folder`, and what is done to it."""

    def __init__(self, folder: Path, number: int, what: Plan) -> None:
        self.folder, self.plan = folder, what
        self.state = folder / "state"
        self.round = Round(number, what.moment)
        self.seen: set[str] = set()  # network namespaces of the testbed
        self.under_load: set[str] = set()  # the kinds that were killed while a load was under way
        (folder / "tmp").mkdir()
        (folder / "storm.yaml").write_text(SCENARIO)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    def run(self) -> Round:
        moment, found = self.plan.moment, self.round
        try:
            up = self._prfaas("up", "storm.yaml", "--port", str(self.port), kills=moment == "up")
            if moment != "up" and up.returncode:
                found.wrong.append(f"up: exit {up.returncode}: {up.stderr}")
            elif moment == "idle":
                self._kill()
            elif moment in ("load", "run"):
                self._load()
            if moment == "down":
                self._prfaas("down", kills=True)
            self._look()
            if moment in ("up", "idle") and not found.wrong:  # what is half dead is no obstacle to the next
                self._after("up", self._prfaas("down"))
                self._after("up", self._prfaas("up", "storm.yaml", "--port", str(self.port)))
        finally:
            began_s = time.monotonic()
            self._after("down", self._prfaas("down"))
            found.down_s = time.monotonic() - began_s
            self._nothing_left()
        return found

    # what is done to it
    def _prfaas(self, *words: str, kills: bool = False) -> subprocess.CompletedProcess[str]:
        """One command, with the plan's kills beside it; what it says is looked through."""
        command = [sys.executable, "-m", "testbed.cli", *words]
        environment = {
            **os.environ,
            "PRFAAS_STATE": str(self.state),
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.folder / "tmp"),
        }
        killer = threading.Thread(target=self._kill)
        with subprocess.Popen(
            command, env=environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as child:  # fmt: skip
            if kills:
                killer.start()
            try:
                out, told = child.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, told = child.communicate()
                self.round.wrong.append(f"{' '.join(words)}: still not done after {PATIENCE_S:g} s")
        if kills:
            killer.join()
        if "Traceback" in told:
            self.round.wrong.append(f"{' '.join(words)}: a traceback: {told}")
        return subprocess.CompletedProcess(command, child.returncode, out, told)

    def _kill(self) -> None:
        began_s = time.monotonic()
        if self.plan.moment == "run":
            while not self._load_is_under_way() and time.monotonic() < began_s + PATIENCE_S:
                time.sleep(0.02)
            began_s = time.monotonic()
        for kill in self.plan.kills:
            while (left_s := began_s + kill.at_s - time.monotonic()) > 0:
                time.sleep(min(left_s, 0.05))
                self._note_namespaces()
            found = list(processes(self.state))
            there = [one for one in found if one.kind == kill.victim] or found
            victim = there[int(kill.draw * len(there))] if there else None
            under_load = self._load_is_under_way()
            if victim is None or not victim.id.signal(signal.SIGKILL):
                self.round.missed += 1
                continue
            self.round.killed.append(f"{victim.name} {time.monotonic() - began_s:.2f}")
            if under_load and self._load_is_under_way():
                self.under_load.add(victim.kind)

    def _load_is_under_way(self) -> bool:
        begun = any(not path.name.startswith("adhoc-") for path in (self.state / "loads").glob("*"))
        return begun and not (self.folder / "results" / "client.csv").exists()

    def _load(self) -> None:
        done = self._prfaas("load", "--out", "results", "--json", kills=True)
        if done.returncode not in (0, 1, 2, 3):
            self.round.wrong.append(f"load: exit {done.returncode}: {done.stderr}")
        if done.returncode == 2:
            self.round.load = "refused"
            return
        verdict = json.loads(done.stdout)["verdict"]
        self.round.load = f"{verdict['status']}: {'; '.join(verdict['reasons'])}" if verdict["reasons"] else "valid"
        killed = {one.rsplit(" ", 1)[0] for one in self.round.killed}
        if "delay line" in self.under_load and not killed & {"agent", "supervisor", "launcher"}:
            if verdict["status"] != "invalid" or not any("delay line died" in why for why in verdict["reasons"]):
                self.round.wrong.append(f"the delay line was killed under the load, which says {self.round.load}")
            if not any(one.kind == "delay line" for one in processes(self.state)):
                self.round.wrong.append("the delay line was not started again")

    # what is found
    def _look(self) -> None:
        """`prfaas status` has an answer whatever is dead."""
        self._note_namespaces()
        told = self._prfaas("status", "--json")
        if told.returncode not in (0, 1):
            self.round.wrong.append(f"status: exit {told.returncode}: {told.stderr}")

    def _note_namespaces(self) -> None:
        self.seen |= host.namespaces(one.id.pid for one in processes(self.state))

    def _after(self, what: str, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode:
            self.round.wrong.append(f"{what} afterwards: exit {done.returncode}: {done.stderr}")

    def _nothing_left(self) -> None:
        wrong = self.round.wrong
        wrong += [f"left: process {one}" for one in host.marked(self.state)]
        wrong += [f"left: {one}" for one in host.holders(self.seen)]
        if self.state.is_dir():
            wrong += [f"left: {path}" for path in self.state.iterdir() if path.name not in KEPT]
        wrong += [f"left: {path}" for path in (self.folder / "tmp").iterdir()]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as taken:
                wrong.append(f"left: port {self.port}: {taken.strerror}")


@dataclass(frozen=True, slots=True)
class Process:
    """One of a testbed's. name: as its log is named, where it has one."""

    id: ProcessId
    kind: str
    name: str


def processes(state: Path) -> Iterator[Process]:
    """Those of the testbed of this state directory that can be killed."""
    for line in host.marked(state):
        pid = int(line.split(" ", 1)[0])
        words = line.split()[1:]
        module = next((name for flag, name in pairwise(words) if flag == "-m" and name in MODULES), None)
        identity = ProcessId.of(pid)
        if identity is None or module is None:
            continue
        if Path(words[0]).name == "unshare":
            yield Process(identity, "launcher", "launcher")
        elif Path(words[0]).name.startswith("python"):
            kind = MODULES[module]
            yield Process(identity, kind, Path(words[-1]).stem if kind == "worker" else kind)


def storm(kills: int, seed: int, say: Any = print) -> dict[str, Any]:
    """The whole of it; `ok` is whether nothing was wrong."""
    before = host.snapshot()
    rounds: list[Round] = []
    for number, what in enumerate(plans(seed), start=1):
        if sum(len(found.killed) for found in rounds) >= kills or number > 3 * kills:
            break
        folder = Path(tempfile.mkdtemp(prefix="prf"))
        try:
            found = Storm(folder, number, what).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found.wrong += [f"the host: {one}" for one in host.differences(before, host.snapshot())]
        rounds.append(found)
        say(row(found))
        for one in found.wrong:
            say(f"      WRONG {one}")
    killed = Counter(one.rsplit(" ", 1)[0] for found in rounds for one in found.killed)
    return {
        "seed": seed,
        "asked": kills,
        "killed": sum(killed.values()),
        "nobody_there": sum(found.missed for found in rounds),
        "victims": dict(sorted(killed.items())),
        "ok": sum(killed.values()) >= kills and not any(found.wrong for found in rounds),
        "rounds": [asdict(found) for found in rounds],
    }


def row(found: Round) -> str:
    killed = ", ".join(found.killed) + (f" ({found.missed} not there)" if found.missed else "")
    state = "WRONG" if found.wrong else "ok"
    return f"{found.number:>5}  {found.moment:5} {state:6} {found.down_s:6.2f}  {killed or 'nobody':50} {found.load}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was left and nothing touched, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.wire.killstorm", description=__doc__)
    parser.add_argument("--n", type=int, default=50, help="kills (default 50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output; rows go to stderr")
    asked = parser.parse_args(arguments)
    out = sys.stderr if asked.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    say(f"round  when  found  down s  killed (s after its begin){'':24} the load's verdict")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is up is taken down
    found = storm(asked.n, asked.seed, say)
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        victims = ", ".join(f"{name} {count}" for name, count in found["victims"].items())
        print(f"{found['killed']} killed ({victims}); {'nothing left' if found['ok'] else 'something is WRONG'}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
