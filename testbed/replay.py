"""`prfaas replay-decisions`: the log of a run on the wire, fed to control once more.

`events.jsonl` has every event that control saw, with its time; `setup.json` what the policy was told. A `Control` with
the same policy that is given them decides the same again, and changes the same: what differs shows that something
decided by more than it was told. With another policy it shows what that one would have decided on the same events.
Nothing here reads a clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from emulator.messages import Prefill
from testbed.assemble import build_workload, control_rules, cost_functions, instances
from testbed.control import (
    CLIENT,
    Arrive,
    Change,
    Control,
    Event,
    Failed,
    NodeSpec,
    PolicySet,
    Record,
    call_policy,
    tick_policy,
)
from testbed.policies import load_policy, start_policy, wants_future
from testbed.report.rows import GATEWAY_COLUMNS, gateway_row
from testbed.runs import RunError, read_scenario
from testbed.scenario import Scenario
from testbed.scheduler.api import Action, Decision, Policy, Reject, RequestView, SystemView
from testbed.scheduler.baselines import Homogeneous
from testbed.session import PolicyQuitError, PolicyTooSlowError
from testbed.told import SETUP_FILE, KnownFuture, Told

EVENTS_FILE: Final = "events.jsonl"
Answer = TypeVar("Answer")

Key = tuple[str, int]
"""A request: its id, and which of that id it is, from 1."""

Late = Mapping[tuple[str, int, int], str]
"""Decisions that the clock took from a policy: the request's key, the attempt, and the words for it."""


class Line(msgspec.Struct, frozen=True):
    """A line of the log."""

    t_s: float
    event: Event


@dataclass(slots=True)
class Replayed:
    """What came of a log.

    decisions: by request and attempt, each a row as `gateway.csv` has it. last_s: of the last event, model seconds.
    swaps: the policies that the run was given on its way. unended: requests that had not ended with the log. cut: what
    is missing of the log.
    """

    decisions: dict[Key, dict[int, dict[str, str]]] = field(default_factory=lambda: defaultdict(dict))
    changes: list[Change] = field(default_factory=list)
    policy_errors: dict[str, int] = field(default_factory=dict)
    events: int = 0
    last_s: float = 0.0
    swaps: list[str] = field(default_factory=list)
    unended: int = 0
    cut: str | None = None


def read_told(folder: Path) -> Told:
    """What the run's policy was told. Raises RunError."""
    for name in (EVENTS_FILE, SETUP_FILE):
        if not (folder / name).is_file():
            raise RunError(
                f"{folder}: no {name} in it: only a run on the wire has one (prfaas run, prfaas load); in virtual time "
                "the same command decides the same again"
            )
    try:
        return msgspec.json.decode((folder / SETUP_FILE).read_bytes(), type=Told)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{folder / SETUP_FILE}: cannot be read ({error})") from None


def replay(folder: Path, *, policy: str | None = None, late: Late | None = None) -> Replayed:
    """Feed a run's log to a control of its own.

    policy: another one than the run's, which then stays in charge throughout. late: decisions that the clock took from
    the run's policy, which no replay could. Raises RunError, ScenarioError and ModelError.
    """
    told, scenario = read_told(folder), read_scenario(folder)
    swapped = policy is not None
    if policy is not None:
        told = _told_instead(scenario, told, policy)
    return _Replay(scenario, told, late or {}, swapped=swapped).run(folder / EVENTS_FILE)


def _told_instead(scenario: Scenario, told: Told, policy: str) -> Told:
    """What another policy would have been told of the same load."""
    own = scenario.only(None, policy)
    deployment = own.deployments[0]
    future = told.future
    if future is None and wants_future(load_policy(policy)):
        future = KnownFuture.of(own, deployment, build_workload(own, deployment)[0]).to_json()
    return Told(policy, deployment.policy.told, told.lengths, future)


class _Replay:
    """One pass over a log. swapped: the policy is not the run's, and stays."""

    def __init__(self, scenario: Scenario, told: Told, late: Late, *, swapped: bool) -> None:
        self._scenario, self._deployment = scenario, scenario.deployments[0]
        self._told, self._late, self._swapped = told, late, swapped
        self._seen: Counter[str] = Counter()  # arrivals by id
        self.out = Replayed()
        profile = scenario.profile(self._deployment, "pd")
        assert profile is not None
        self._control = Control(
            [NodeSpec(n, s, r, profile.decode_slots if s == "pd" else 0) for n, s, r in instances(self._deployment)],
            cost_functions(scenario, self._deployment),
            scenario.link.rate_bps,
            self._started(told),
            Homogeneous(),
            control_rules(scenario, self._deployment),
            ask=self._ask,
            tick=self._tick,
        )

    def run(self, events: Path) -> Replayed:
        out, control = self.out, self._control
        for line in self._lines(events):
            event = line.event
            if isinstance(event, PolicySet):
                out.swaps.append(event.name)
                if self._swapped:
                    continue
                control.set_policy(
                    self._started(msgspec.structs.replace(self._told, policy=event.name, parameters=event.parameters))
                )
            elif isinstance(event, Arrive):
                self._seen[event.request_id] += 1
            out.events, out.last_s = out.events + 1, line.t_s
            for destination, command in control.handle(line.t_s, event):
                if isinstance(command, Prefill):
                    self._keep(control.live[command.request_id])
                elif destination == CLIENT and isinstance(command, Failed):
                    self._keep(command.record)
        out.changes, out.policy_errors, out.unended = control.changes, control.policy_errors, len(control.live)
        return out

    def _keep(self, record: Record) -> None:
        """A decision; of a request that has failed after one, that one stays as it was."""
        key = (record.request_id, self._seen[record.request_id])
        self.out.decisions[key].setdefault(record.attempts, row_of(record))

    def _lines(self, events: Path) -> Iterator[Line]:
        """The log's events. A last line that is not whole is said in `cut`. Raises RunError for any other."""
        decode = msgspec.json.Decoder(Line).decode
        with events.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    yield decode(text)
                except msgspec.MsgspecError as error:
                    if text.endswith(b"\n"):
                        raise RunError(f"{events}, line {number}: no event of control's ({error})") from None
                    self.out.cut = f"the last event, line {number} of {EVENTS_FILE}, is cut off and cannot be replayed"

    def _started(self, told: Told) -> Policy:
        made = load_policy(told.policy)
        start_policy(made, told.policy, told.setup(self._scenario, self._deployment, made))
        return made

    def _ask(self, policy: Policy, request: RequestView, view: SystemView) -> Decision | Reject:
        late = self._late.get((request.request_id, self._seen[request.request_id], request.attempt))
        if late is not None:
            raise PolicyTooSlowError(late)
        return _contained(call_policy, policy, request, view)

    @staticmethod
    def _tick(policy: Policy, view: SystemView) -> list[Action]:
        return list(_contained(tick_policy, policy, view))


def _contained(call: Callable[..., Answer], *args: object) -> Answer:
    """As the gateway calls a policy, but for the clock: one that would end the process only fails."""
    try:
        return call(*args)
    except (SystemExit, asyncio.CancelledError) as error:
        raise PolicyQuitError(f"{type(error).__name__}: {error}") from error


def row_of(record: Record) -> dict[str, str]:
    """A record as `gateway.csv` has it."""
    return {name: str(value) for name, value in zip(GATEWAY_COLUMNS, gateway_row(record), strict=True)}
