"""Faults in when something is changed."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.scheduler.api import Action, Recall, Setup, SystemView
from testbed.scheduler.prfaas import Prfaas


class NoHysteresis(Prfaas):
    """No dwell, no least change: t follows every tick's estimate."""

    hurts_in = "its bounds"

    def start(self, setup: Setup) -> None:
        super().start(setup)
        self._p |= dict.fromkeys(("link_step", "least_change", "surge_dwell_s", "dwell_s", "profile_s"), 0.0)


class RecallsEverything(Prfaas):
    """As soon as anything waits at the senders, whatever is under way is taken back."""

    hurts_in = "link-drop"

    def tick(self, view: SystemView) -> Sequence[Action]:
        actions = list(super().tick(view))
        if view.observed.link.backlogged:
            told = {action.request_id for action in actions if isinstance(action, Recall)}
            actions += [Recall(one.request_id, "it waits") for one in view.away() if one.request_id not in told]
        return actions
