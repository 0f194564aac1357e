"""An experiment on the wire: a load on the testbed that is up, with real signals to real processes and layers over the
really shaped link.

The faults run beside the load, in a thread with the load's own clock. However the load ends, and whatever of a fault
could not be done, the rollback comes before the load's end: layers closed, stopped workers going on, dead ones started
again, and all of it looked at.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pandas as pd

from netem.link import DIRECTIONS
from testbed.assemble import build_workload, instances
from testbed.chaos import faults
from testbed.chaos.experiment import Experiment
from testbed.chaos.journal import Check, Journal
from testbed.chaos.load import stalled
from testbed.chaos.orders import hinder, wall_steps
from testbed.launch import client
from testbed.launch.state import TestbedError
from testbed.linksteps import LinkLayer
from testbed.load import Disturbance, Outcome, Testbed, run_load
from testbed.scenario import Scenario
from traces.client_rows import INCONCLUSIVE, LEFT

RESTART_S: Final = 40.0
"""Wall seconds in which a worker that was started again is ready."""
SETTLE_S: Final = 8.0
"""Wall seconds in which the system is whole again once every fault is undone."""
POLL_S: Final = 0.1
LONG_S: Final = 0.2
"""Wall seconds that a fault may take to be brought about, without the journal saying so."""


def run(
    testbed: Testbed, experiment: Experiment, scenario: Scenario, policy: str, journal: Journal, out: Path
) -> pd.DataFrame | None:
    """Run it under a policy; the request table, with ended_s, or None where there is nothing to judge.

    scenario: `experiment.resolved`, whose testbed is up. out: the results, as of any load. A load that is no
    measurement, or was interrupted, has its verdict in the journal already.
    """
    trace, rate_rps = build_workload(scenario, scenario.deployments[0])
    troubles = Troubles(testbed, scenario, experiment, journal)
    disturbance = Disturbance(
        around=troubles.around,
        trace=(stalled(trace, experiment), rate_rps),
        leaves=[(one.at_s, one.fraction) for one in experiment.method if isinstance(one, faults.ClientsLeave)],
        excused=troubles.excused,
    )
    outcome = run_load(testbed, scenario, out, policy=policy, disturbance=disturbance)
    journal.checks(account_checks(outcome.totals))
    requests = outcome.requests.copy()
    requests["ended_s"] = requests["done_s"]
    _note_clients(journal, experiment, requests)
    _note_verdict(journal, outcome, troubles.failed)
    return None if outcome.exit_code == INCONCLUSIVE else requests


def _note_verdict(journal: Journal, outcome: Outcome, failed: Sequence[str]) -> None:
    if failed:
        journal.unsound += [f"a fault was not what was asked for: {one}" for one in failed]
    if outcome.summary["verdict"]["status"] == "invalid":
        journal.unsound += outcome.summary["verdict"]["reasons"]


def _note_clients(journal: Journal, experiment: Experiment, requests: pd.DataFrame) -> None:
    """When clients left, and when held requests came: of that the client's own rows know."""
    left = requests[requests["client_error"] == LEFT]
    for fault in experiment.method:
        what = faults.describe(fault)
        if isinstance(fault, faults.ClientsLeave):
            gone = left.loc[left["done_s"] >= fault.at_s, "done_s"]
            true_s = float(gone.min()) if len(gone) else fault.at_s
            journal.did(what, asked_s=fault.at_s, true_s=true_s, detail=f"{len(gone)}")
        elif isinstance(fault, faults.LoadStalls):
            sent = requests.loc[requests["sched_s"] == fault.healed_s, "send_s"]
            true_s = float(sent.min()) if len(sent) else fault.healed_s
            journal.did(f"{what}: healed", asked_s=fault.healed_s, true_s=true_s, detail=f"{len(sent)} requests")


class Troubles:
    """The faults of an experiment on a testbed. failed: what could not be done, a sentence each."""

    def __init__(self, testbed: Testbed, scenario: Scenario, experiment: Experiment, journal: Journal) -> None:
        self.failed: list[str] = []
        self._testbed, self._scenario, self._journal = testbed, scenario, journal
        self._method = experiment.method
        self._supervisor = client.supervisor(testbed.state, RESTART_S)
        self._nodes = [name for name, _, _ in instances(scenario.deployments[0])]
        self._hinders: dict[str, list[Any]] = {}
        self._stopped: set[str] = set()
        self._stop = threading.Event()
        self._t0_ns = 0

    @property
    def excused(self) -> frozenset[str]:
        """Workers whose timers are late because they were stopped."""
        frozen: set[str] = set()
        for fault in self._method:
            if isinstance(fault, faults.FrozenWorker):
                frozen.add(fault.node)
            elif isinstance(fault, faults.LostSite) and fault.how == "frozen":
                frozen.update(self._site())
        return frozenset(frozen)

    @contextlib.contextmanager
    def around(self, load: dict[str, Any]) -> Iterator[None]:
        """Faults happen while it is open; on leaving, all are undone, and that is looked at."""
        self._t0_ns = load["t0_ns"]
        agent = client.agent(self._testbed.state)
        before = agent.get("/link")
        layers = [
            LinkLayer(self._testbed.state, f"chaos-{i}", self._t0_ns, wall_steps(fault, self._scenario.scale))
            for i, fault in enumerate(self._method)
            if isinstance(fault, faults.LINK)
        ]
        thread = threading.Thread(target=self._follow, name="chaos", daemon=True)
        with contextlib.ExitStack() as opened:
            try:
                for layer in layers:
                    opened.enter_context(layer)
                thread.start()
                yield
            finally:
                with _undisturbed():
                    self._stop.set()
                    if thread.ident is not None:
                        thread.join(RESTART_S + client.TIMEOUT_S)
                    self._undo()
                    opened.close()
                    self._note_layers(layers)
                    self._journal.checks([*self._link_checks(before), *self._worker_checks()])

    # in time
    def _follow(self) -> None:
        moments: list[tuple[float, str, Callable[[], None]]] = []
        for fault in self._method:
            actions = self._actions(fault)
            if actions is not None:
                what = faults.describe(fault)
                moments += [(fault.at_s, what, actions[0]), (fault.healed_s, f"{what}: healed", actions[1])]
        with ThreadPoolExecutor(max(1, len(moments))) as pool:  # a worker that starts again takes its time
            for at_s, what, act in sorted(moments, key=lambda moment: moment[0]):
                due_ns = self._t0_ns + round(self._scenario.scale.wall_s(at_s) * 1e9)
                if self._stop.wait(max(0.0, (due_ns - time.monotonic_ns()) * 1e-9)):
                    return
                pool.submit(self._do, at_s, what, act)

    def _do(self, at_s: float, what: str, act: Callable[[], None]) -> None:
        detail = ""
        begun_s = self._now_s()
        try:
            act()
        except TestbedError as error:
            self.failed.append(f"{what}: {error}")
            detail = f"failed: {error}"
        took_s = self._now_s() - begun_s
        if not detail and took_s > LONG_S * self._scenario.scale.time_scale:
            detail = f"it took {took_s:.1f} s"
        self._journal.did(what, asked_s=at_s, true_s=begun_s, detail=detail)

    def _now_s(self) -> float:
        return (time.monotonic_ns() - self._t0_ns) * 1e-9 * self._scenario.scale.time_scale

    def _actions(self, fault: Any) -> tuple[Callable[[], None], Callable[[], None]] | None:
        match fault:
            case faults.SlowWorker() | faults.LandingFull():
                return lambda: self._hinder(fault, True), lambda: self._hinder(fault, False)
            case faults.KilledWorker(node=node):
                return lambda: self._signal([node], "KILL"), lambda: self._restart([node])
            case faults.FrozenWorker(node=node):
                return lambda: self._signal([node], "STOP"), lambda: self._signal([node], "CONT")
            case faults.LostSite(how="killed"):
                return lambda: self._signal(self._site(), "KILL"), lambda: self._restart(self._site())
            case faults.LostSite():
                return lambda: self._signal(self._site(), "STOP"), lambda: self._signal(self._site(), "CONT")
        return None  # of the link or of the load, which have clocks of their own

    def _site(self) -> list[str]:
        return [name for name in self._nodes if name.startswith("prfaas-")]

    def _signal(self, nodes: list[str], name: str) -> None:
        for node in nodes:
            self._supervisor.post("/signal", {"name": node, "signal": name})
            if name == "STOP":
                self._stopped.add(node)
            elif name == "CONT":
                self._stopped.discard(node)

    def _restart(self, nodes: list[str]) -> None:
        with ThreadPoolExecutor(len(nodes)) as pool:  # a prefill worker is ready when it has reached the others
            for started in [pool.submit(self._supervisor.post, "/restart", {"name": node}) for node in nodes]:
                started.result()

    def _hinder(self, fault: Any, begins: bool) -> None:
        held = self._hinders.setdefault(fault.node, [])
        if begins:
            held.append(fault)
        elif fault in held:
            held.remove(fault)
        order = hinder(held, self._scenario)
        body = {"slowdown": order.slowdown, "held_bytes": order.held_bytes}
        self._testbed.call("POST", f"/prfaas/nodes/{fault.node}/hinder", body)

    # rollback
    def _undo(self) -> None:
        """Heal whatever is not; what cannot be healed shows in the checks that follow."""
        for node in sorted(self._stopped):
            with contextlib.suppress(TestbedError):  # it may have died meanwhile
                self._signal([node], "CONT")
        with contextlib.suppress(TestbedError):
            dead = [one["name"] for one in self._processes() if one["state"] == "dead" and one["name"] in self._nodes]
            if dead:
                self._restart(dead)
        for held in self._hinders.values():
            for fault in list(held):
                with contextlib.suppress(TestbedError):
                    self._hinder(fault, False)

    def _processes(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self._supervisor.get("/status")["processes"]
        return told

    def _note_layers(self, layers: list[LinkLayer]) -> None:
        scale = self._scenario.scale
        by_name = {f"chaos-{i}": fault for i, fault in enumerate(self._method)}
        for layer in layers:
            fault = by_name[layer.name]
            for row in layer.events:
                over = scale.time_scale * row["at_s"] >= fault.healed_s - 1e-6
                what = f"{faults.describe(fault)}{': healed' if over else ''}, {row['direction']}"
                true_s = (row["t_applied_ns"] - self._t0_ns) * 1e-9 * scale.time_scale
                self._journal.did(what, asked_s=row["at_s"] * scale.time_scale, true_s=true_s)
            self.failed += layer.faults

    def _link_checks(self, before: dict[str, Any]) -> list[Check]:
        """The link as it was, read back; without a layer of ours, whatever the scenario's own schedule does."""
        try:
            now = client.agent(self._testbed.state).get("/link")
        except TestbedError as error:
            return [Check("link: read back", False, str(error))]
        out = []
        for direction in DIRECTIONS:
            one, was = now[direction], before[direction]
            mine = [name for name in one["layers"] if name.startswith("chaos-")]
            out.append(Check(f"link {direction}: no fault over it", not mine, ", ".join(mine)))
            same = one["base"] == was["base"] and (bool(one["layers"]) or one["asked"] == was["asked"])
            out.append(Check(f"link {direction}: as it was before", same, one["asked"]))
        return out

    def _worker_checks(self) -> list[Check]:
        """Every worker runs, is not stopped, and control knows it; they get a while for it."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            wrong = self._wrong_workers()
            if not wrong or time.monotonic() > deadline_s:
                return [Check("every worker runs and is known to control", not wrong, "; ".join(wrong))]
            time.sleep(POLL_S)

    def _wrong_workers(self) -> list[str]:
        try:
            told = {one["name"]: one for one in self._processes()}
            known = {one["name"]: one["alive"] for one in self._testbed.call("GET", "/prfaas/status")["nodes"]}
        except TestbedError as error:
            return [str(error)]
        wrong = []
        for node in self._nodes:
            if told[node]["state"] != "running":
                wrong.append(f"{node} is {told[node]['state']}")
            elif told[node]["frozen"]:
                wrong.append(f"{node} is stopped")
            elif not known.get(node):
                wrong.append(f"{node} is not known to control")
        return wrong


def account_checks(totals: dict[str, Any]) -> list[Check]:
    """What the workers still held when every request had ended, by their own last account."""
    accounts = totals.get("accounts")
    if accounts is None:
        return [Check("the workers' last accounts", False, "the gateway was lost")]
    out = [Check("control: requests under way", not totals["in_flight"], totals["in_flight"])]
    keys = (
        "queued_requests", "queued_tokens", "running_requests", "outbox_bytes", "landing_bytes", "waiting_grants",
        "held_blocks", "open_transfers",
    )  # fmt: skip
    for node, account in accounts.items():
        left = {key: account[key] for key in keys if account[key]}
        if account["slowdown"] != 1:
            left["slowdown"] = account["slowdown"]
        text = ", ".join(f"{key} {value}" for key, value in left.items())
        out.append(Check(f"{node}: reservations, slots and queue are empty", not left, text))
    return out


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not keep a rollback from being done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
