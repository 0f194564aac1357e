"""The policy decides by what it is told and by nothing else: told the same again, it decides the same.

On the wire the log of a run is replayed (`testbed.agreement`). In virtual time, where no log is kept, a `Twin` asks a
second object of the policy about every decision: for as long as it is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from testbed.agreement import verify
from testbed.invariants.finding import Finding, Run, held, not_checked
from testbed.replay import EVENTS_FILE
from testbed.runs import RunError
from testbed.scheduler.api import Action, Decision, Policy, Reject, RequestView, SystemView

MOST: Final = 2000
"""Decisions of a run that are asked twice: enough for chance and clocks to show, and no cost for a long run."""


class Twin:
    """The calls of a policy (`Control`'s `ask` and `tick`), each made of a second object of it as well.

    decisions: how many. difference: the first that was not the same, empty for none.
    """

    def __init__(self, other: Policy, most: int = MOST) -> None:
        self._other, self._left = other, most
        self.decisions = 0
        self.difference = ""

    @property
    def told(self) -> tuple[int, str]:
        """As `Run.twin`."""
        return self.decisions, self.difference

    def ask(self, policy: Policy, request: RequestView, view: SystemView) -> Decision | Reject:
        """As `control.call_policy`."""
        if not self._left:
            return policy.route(request, view)
        self._left -= 1
        self.decisions += 1
        what = f"request {request.request_id}, attempt {request.attempt}"
        decision: Decision | Reject = self._both(policy, lambda one: one.route(request, view), what)
        return decision

    def tick(self, policy: Policy, view: SystemView) -> Sequence[Action]:
        """As `control.tick_policy`."""
        if getattr(policy, "tick", None) is None:
            return ()
        if not self._left:
            actions: Sequence[Action] = policy.tick(view)  # type: ignore[attr-defined]
            return actions
        # An iterator is asked for its actions once: control and the comparison both read them.
        found: Sequence[Action] = self._both(
            policy, lambda one: list(one.tick(view)), f"the tick at {view.now_s:.6g} s"
        )
        return found

    def _both(self, policy: Policy, call: Callable[[Any], Any], what: str) -> Any:
        raised: Exception | None = None
        mine: Any = None
        try:
            mine = call(policy)
        except Exception as error:
            raised, mine = error, f"{type(error).__name__}: {error}"
        try:
            other = call(self._other)
        except Exception as error:
            other = f"{type(error).__name__}: {error}"
        if other != mine and repr(other) != repr(mine) and not self.difference:
            self.difference = f"{what}: {mine}, and a second time {other}"
            self._left = 0
        if raised is not None:
            raise raised
        return mine


def deterministic(run: Run) -> Finding:
    """Told the same events, the policy decides the same.

    In virtual time: a second object of it does, on the first 2,000 requests and all that goes with them. On the wire:
    the log, replayed, gives every decision and change of the run. value: those that differ; bound: 0.
    """
    name = "deterministic"
    if run.twin is not None:
        count, difference = run.twin
        if difference:
            return Finding(
                name, "broken", 1, 0, f"the policy decides otherwise when asked again: {difference}", "failed"
            )
        return held(name, f"a second object of the policy made the same {count} decisions", 0, 0)
    if run.folder is None or not (run.folder / EVENTS_FILE).is_file():
        return not_checked(name, "this run kept no log to be replayed")
    try:
        found = verify(str(run.folder), differences=1)
    except (RunError, ValueError) as error:
        return not_checked(name, f"the log cannot be replayed: {error}")
    kinds = (found["decisions"], found["changes"])
    compared, agree = (sum(one[key] for one in kinds) for key in ("compared", "agree"))
    if found["agree"]:
        return held(name, f"a replay of the log gave the same {compared} decisions and changes", 0, 0)
    if found["notes"]:
        return not_checked(name, f"a replay differs, but {found['notes'][0]}")
    words = f"a replay of the log gave {compared - agree} of {compared} decisions and changes otherwise"
    return Finding(name, "broken", compared - agree, 0, f"{words}, such as {found['differences'][0]}", "failed")
