"""A load against a running testbed: build its workload, begin it, let Locust replay it, end it, and write its results.

The replay is a child process (`traces/replay.py` under Locust); this module only prepares it, watches it, and joins
what every part noted down.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson
import pandas as pd
import psutil

from netem.link import DIRECTIONS
from testbed import linkctl
from testbed.assemble import build_workload, instances, lengths_to_json, workload_lengths
from testbed.closed_form import closed_form
from testbed.crossing import Crossing
from testbed.fleet import check_link
from testbed.invariants import Run, check, judge
from testbed.launch import client
from testbed.launch.state import StateDir, TestbedError
from testbed.linksteps import LinkSteps
from testbed.policies import load_policy, wants_future
from testbed.report.accounts import Accounts
from testbed.report.link_files import LinkReport
from testbed.report.provenance import provenance
from testbed.report.summary import EXIT_CODES, LinkFigures, Meter, summarise
from testbed.report.tables import request_table
from testbed.report.timeline import timeline_table
from testbed.report.write import write_results, write_summary
from testbed.scenario import Scenario, ScenarioError
from testbed.told import SETUP_FILE, KnownFuture
from traces.client_rows import INCONCLUSIVE, lateness_p99_s, read_rows
from traces.load import Trace, save

LEAD_S: Final = 5.0  # wall seconds from the begin of a load to its t = 0: what Locust needs to start on a busy machine
LEAD_WORKER_S: Final = 4.0  # more, when several processes have to find each other
CPU_PERIOD_S: Final = 1.0
END_S: Final = 600.0  # wall seconds that requests still under way are waited for
LOST_TOTALS: Final[dict[str, Any]] = {
    "policy_errors": {},
    "wire_landed_bytes": {},
    "refused_frames": 0,
    "retransmits": 0,
    "late_p99_s": 0.0,
    "late_max_s": 0.0,
    "gateway_late_p99_s": 0.0,
}
"""What a gateway that is gone can no longer tell."""

GATEWAY_LOST: Final = "the gateway was lost during the load"

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Testbed:
    """A running testbed as a client needs it."""

    state: StateDir
    scenario: Scenario
    port: int

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> dict[str, Any]:
        """One JSON call to the gateway. Raises TestbedError with the gateway's own message."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            payload = None if body is None else orjson.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer: dict[str, Any] = orjson.loads(response.read())
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            raise TestbedError(
                f"the gateway at 127.0.0.1:{self.port} does not answer ({error or type(error).__name__}); "
                "see `prfaas status` and `prfaas logs gateway`"
            ) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise TestbedError(f"the gateway refused: {answer['error']['message']}")
        return answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load came to. folder: the results. requests: the request table. totals: the gateway's at the end."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int
    requests: pd.DataFrame
    totals: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What an experiment does to a load (`testbed.chaos.wire`).

    around(load): a context, entered before t = 0 and left when the replay has ended, before the load is. trace: what is
    offered, at which mean rate, instead of the scenario's workload. leaves: (model second, fraction of the clients that
    close their connection). excused: workers that are late on purpose.
    """

    around: Callable[[dict[str, Any]], contextlib.AbstractContextManager[Any]]
    trace: tuple[Trace, float]
    leaves: Sequence[tuple[float, float]]
    excused: frozenset[str]


class CpuWatch:
    """The machine's CPU use while a load runs, as shares of all cores, a sample a second."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu", daemon=True)

    def __enter__(self) -> CpuWatch:
        psutil.cpu_percent()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(CPU_PERIOD_S):
            self.samples.append(psutil.cpu_percent() / 100)


def run_load(
    testbed: Testbed,
    scenario: Scenario,
    out: Path,
    *,
    policy: str | None = None,
    workers: int = 1,
    on_progress: Progress = lambda progress: None,
    on_start: Callable[[Trace, float, float], None] = lambda trace, rate, expected_s: None,
    disturbance: Disturbance | None = None,
) -> Outcome:
    """Offer `scenario`'s workload to the testbed and write `out/`. scenario: one deployment, the one that is up.

    policy: another policy for this load only. workers: Locust processes. on_start(trace, model rate, expected wall
    seconds). Raises TraceError, ScenarioError, LinkError and TestbedError before anything is sent; an interrupted load
    still has its results.
    """
    check_link(scenario)
    deployment = scenario.deployments[0]
    trace, rate_rps = build_workload(scenario, deployment) if disturbance is None else disturbance.trace
    expected = closed_form(scenario, deployment, trace, rate_rps)
    lead_s = LEAD_S + (LEAD_WORKER_S if workers > 1 else 0.0)
    body = {
        "lead_s": lead_s,
        "lengths": lengths_to_json(workload_lengths(scenario, trace)),
        "policy": policy,
        "rate_rps": rate_rps,
    }
    knows_future = _knows_future(policy or deployment.policy.name)
    if knows_future:
        body["future"] = KnownFuture.of(scenario, deployment, trace).to_json()
    with tempfile.TemporaryDirectory(prefix="prfaas-load-") as folder:
        work = Path(folder)
        save(trace, work / "trace.jsonl")
        _warm_locust()
        before = client.agent(testbed.state).get("/counters")
        load = testbed.call("POST", "/prfaas/loads", body)
        on_start(trace, rate_rps, lead_s + scenario.workload.duration_s / scenario.scale.time_scale)
        broken = []
        with (
            _given_up(testbed, load),
            _terminable(),
            LinkSteps(scenario, testbed.state, load["t0_ns"]) as link_steps,
            Crossing(scenario, testbed.state, load["t0_ns"]) as crossing,
        ):
            with contextlib.nullcontext() if disturbance is None else disturbance.around(load):
                leaves = () if disturbance is None else disturbance.leaves
                replay = _replay(testbed, scenario, load, work, workers, on_progress, leaves)
            try:
                totals = testbed.call("POST", f"/prfaas/loads/{load['id']}/end", timeout_s=END_S)
            except TestbedError as error:
                totals = {**load, **LOST_TOTALS}
                broken.append(f"{GATEWAY_LOST}: {error}")
        if disturbance is not None:
            totals |= _without(disturbance.excused, totals.get("accounts", {}))
        faults = [*replay.faults, *link_steps.faults, *crossing.faults]
        end_ns = time.monotonic_ns()
        try:
            after = client.agent(testbed.state).get("/counters")
            faults += delay_line_faults(before, after, scenario.meter.late_p99_s)
            link = _link_figures(testbed, scenario, before, after, totals, crossing.wire_bytes)
        except TestbedError as error:
            link = LinkFigures({}, None, 0, 0, 0, 0)
            faults.append(f"the link's agent was lost during the load, nobody counted its bytes: {error}")
        out.mkdir(parents=True, exist_ok=True)
        for source, name in (
            (work / "client.csv", "client.csv"),
            (testbed.state.loads / load["rows"], "gateway.csv"),
            (testbed.state.loads / load["events"], "events.jsonl"),
            (testbed.state.loads / load["setup"], SETUP_FILE),
            (work / "locust.log", "locust.log"),
        ):
            shutil.copy(source, out / name)
    window: dict[str, Any] = {"warmup_s": scenario.workload.warmup_s, "duration_s": scenario.workload.duration_s}
    scales: dict[str, Any] = {"t0_ns": load["t0_ns"], "time_scale": scenario.scale.time_scale}
    requests = request_table(out / "gateway.csv", out / "client.csv", **scales, **window)
    timeline = timeline_table(
        [*totals.get("changes", ()), *link_steps.events, *crossing.events],
        testbed.state.root / "link-counters.csv",
        end_ns=end_ns,
        byte_scale=scenario.scale.byte_scale,
        accounts=Accounts(out / "events.jsonl", {name: site for name, site, _ in instances(deployment)}),
        **scales,
    )
    client_rows = read_rows(out / "client.csv")
    if replay.interrupted:
        faults.append(f"interrupted after {len(client_rows)} of {len(trace.requests)} requests")
    busy = replay.cpu[int(lead_s) :] or replay.cpu
    meter = Meter(
        client_late_p99_s=lateness_p99_s(client_rows),
        timer_late_p99_s=totals["late_p99_s"],
        timer_late_max_s=totals["late_max_s"],
        gateway_late_p99_s=totals["gateway_late_p99_s"],
        cpu_mean=sum(busy) / len(busy) if busy else None,
        cpu_max=max(busy, default=None),
        late_bound_s=scenario.meter.late_p99_s,
        cpu_bound=scenario.meter.cpu_fraction,
        faults=faults,
    )
    figures = summarise(
        requests,
        scheduled=len(client_rows) if replay.interrupted else len(trace.requests),
        **window,
        slo_ttft_s=scenario.slo.ttft_p90_s,
        slo_tpot_s=scenario.slo.tpot_s,
        meter=meter,
        link=link,
        totals=totals,
        expected=expected,
        broken=broken,
    )
    summary = {
        "scenario": scenario.name,
        "deployment": deployment.name,
        "policy": policy or deployment.policy.name,
        "knows_future": knows_future,
        "clock": "wire",
        "seed": scenario.seed,
        "load_id": load["id"],
        **figures,
    }
    link_report = LinkReport.of_run(timeline, requests, summary)
    summary["link_doctor"] = link_report.told.to_json()
    write_results(out, scenario, summary, requests, timeline, provenance(scenario, trace, testbed.state), link_report)
    run = Run(requests, timeline, summary, scenario, folder=out, disturbed=disturbance is not None)
    judge(summary, check(run))  # its log is replayed, from the folder
    write_summary(out, summary)
    exit_code = INCONCLUSIVE if replay.interrupted else EXIT_CODES[summary["verdict"]["status"]]
    return Outcome(out, summary, exit_code, requests, totals)


def _without(excused: frozenset[str], accounts: dict[str, Any]) -> dict[str, float]:
    """How late the workers' timers were, but for those that are excused; wall seconds."""
    told = [account for node, account in accounts.items() if node not in excused]
    return {key: max((account[key] for account in told), default=0.0) for key in ("late_p99_s", "late_max_s")}


def _knows_future(policy: str) -> bool:
    """Whether it has to be told what is to come. Of one that cannot be made here, the gateway has the last word."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever a policy prints
            return wants_future(load_policy(policy))
    except ScenarioError:
        return False


@dataclass(frozen=True, slots=True)
class _Replay:
    """How the replay went. cpu: the machine's use, shares of all cores, a sample a second."""

    interrupted: bool
    faults: list[str]
    cpu: list[float]


def _replay(
    testbed: Testbed,
    scenario: Scenario,
    load: dict[str, Any],
    work: Path,
    workers: int,
    on_progress: Progress,
    leaves: Sequence[tuple[float, float]],
) -> _Replay:
    """Let Locust replay work/trace.jsonl; its rows are then work/client.csv, also when Ctrl-C or SIGTERM ends it."""
    rows, progress, log_path = work / "client.csv", work / "progress.json", work / "locust.log"
    command = [
        sys.executable, "-m", "locust", "-f", str(_replay_file()), "--headless", "--only-summary",
        "--loglevel", "WARNING",
        "--host", f"http://127.0.0.1:{testbed.port}", "--trace", str(work / "trace.jsonl"), "--rows", str(rows),
        "--progress", str(progress), "--t0-ns", str(load["t0_ns"]), "--time-scale", repr(scenario.scale.time_scale),
        "--late-bound-ms", repr(scenario.meter.late_p99_s * 1e3), "--model", load["model"],
    ]  # fmt: skip
    if workers > 1:
        port = str(_free_port())  # Locust's own is one for all, on every address of the host
        command += ["--processes", str(workers), "--master-bind-host", "127.0.0.1"]
        command += ["--master-bind-port", port, "--master-port", port]
    if scenario.backend == "hybrid":
        command += ["--text-seed", str(scenario.seed)]
    if leaves:
        command += ["--leave-seed", str(scenario.seed)]
        command += [f"--leave={at_s!r}:{fraction!r}" for at_s, fraction in leaves]
    interrupted = False
    with CpuWatch() as cpu, log_path.open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            with _terminable():
                while child.poll() is None:
                    time.sleep(0.25)
                    on_progress(_read_progress(progress))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _end(child)
    last_lines = "\n".join(log_path.read_text(errors="replace").strip().splitlines()[-8:])
    if not rows.exists():
        raise TestbedError(f"the replay ended without rows; its last lines:\n{last_lines}")
    faults = []
    if not interrupted and child.returncode not in (0, 1, 3):
        faults.append(f"the replay ended with exit code {child.returncode}; see locust.log")
    return _Replay(interrupted, faults, cpu.samples)


@cache
def _warm_locust() -> None:
    """In a fresh installation Locust's first import takes seconds longer than its later ones: not after t = 0."""
    subprocess.run([sys.executable, "-m", "locust", "--version"], capture_output=True, check=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _replay_file() -> Path:
    """Found without importing it: importing it imports Locust, which patches the process for gevent."""
    import traces

    return Path(traces.__path__[0]) / "replay.py"


def _link_figures(
    testbed: Testbed,
    scenario: Scenario,
    before: dict[str, Any],
    after: dict[str, Any],
    totals: dict[str, Any],
    cross_bytes: dict[str, int] | None,
) -> LinkFigures:
    sent_bytes = after["to_pd"]["kv"]["sent_bytes"] - before["to_pd"]["kv"]["sent_bytes"]
    asked = client.agent(testbed.state).get("/link")
    return LinkFigures(
        asked={
            "nominal_bps": scenario.link.rate_bps,
            "nominal_wall_bps": scenario.scale.wall_bps(scenario.link.rate_bps),
            **{direction: _asked(asked[direction]["asked"]) for direction in DIRECTIONS},
            "congestion_control": scenario.link.congestion_control,
        },
        measured=linkctl.last_verified(testbed.state),
        wan_tx_bytes=sent_bytes - (cross_bytes or {}).get("to_pd", 0),
        kv_bytes=totals["wire_landed_bytes"].get("prfaas", 0),
        direct_packets=sum(after[direction]["direct_packets"] for direction in DIRECTIONS),
        retransmits=totals["retransmits"],
        cross_bytes=cross_bytes,
    )


def _asked(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "wall_bps": state["rate_bps"],
        "wall_delay_s": state["delay_s"],
        "wall_jitter_s": state["jitter_s"],
        "loss": state["loss"],
    }


def delay_line_faults(before: dict[str, Any], after: dict[str, Any], late_bound_s: float) -> list[str]:
    """Why the delay line makes this load no measurement: it died, lost what it was not to lose, or was late."""
    faults = []
    for direction in DIRECTIONS:
        line, was = after[direction].get("delay_line"), before[direction].get("delay_line") or {}
        if line is None:
            continue
        if line["down"] or line["deaths"] > was.get("deaths", 0):
            return [f"the delay line died, the link was down until it served again ({line['outage_s']:.2f} s in all)"]
        if overflowed := line["overflowed"] - was.get("overflowed", 0):
            faults.append(f"{direction}: the delay line lost {overflowed} packets that it had no room for")
        if line["late_p99_s"] > late_bound_s:
            faults.append(
                f"{direction}: the delay line let packets go {line['late_p99_s'] * 1e3:.1f} ms late (p99), the bound "
                f"is {late_bound_s * 1e3:g} ms"
            )
    return faults


def _read_progress(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
        return found
    except (OSError, orjson.JSONDecodeError):
        return {}


@contextlib.contextmanager
def _given_up(testbed: Testbed, load: dict[str, Any]) -> Iterator[None]:
    """A load that cannot be (its link refuses a step) is ended at the gateway too: the next one may begin."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(TestbedError):
            testbed.call("POST", f"/prfaas/loads/{load['id']}/end")
        raise


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is Ctrl-C inside."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stop the replay, which keeps its rows; kill it when it does not stop."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
