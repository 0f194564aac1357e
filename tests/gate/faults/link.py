"""Faults in what is believed of the link."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from testbed.scheduler.api import Action, Setup, SystemView
from testbed.scheduler.prfaas import Prfaas


class BytesForBits(Prfaas):
    """The link's bits a second are put into (7) as if they were bytes: it seems eight times as fast."""

    hurts_in = "scarce"

    def _solve(self, n_d: int, link_bps: float) -> float:
        return super()._solve(n_d, 8 * link_bps)


class StaleEstimate(Prfaas):
    """What was known of the link two minutes ago is trusted as if it were from now."""

    hurts_in = "link-drop"

    def start(self, setup: Setup) -> None:
        self._known: deque[tuple[float, float]] = deque([(0.0, setup.link_nominal_bps)])
        super().start(setup)

    def _available_bps(self, view: SystemView) -> float:
        known, now_s = self._known, view.now_s
        known.append((now_s, view.observed.link.bps))
        while len(known) > 1 and known[1][0] <= now_s - 120:
            known.popleft()
        return known[0][1]


class NeverDecays(Prfaas):
    """The estimate goes up and never down: the fastest that was seen in a minute or ever is what the link carries."""

    hurts_in = "link-drop"

    def start(self, setup: Setup) -> None:
        self._fastest_bps = setup.link_nominal_bps
        super().start(setup)

    def _available_bps(self, view: SystemView) -> float:
        self._fastest_bps = max(self._fastest_bps, view.observed.link.bps)
        return self._fastest_bps


class EgressForCapacity(Prfaas):
    """What crosses of late is taken for what could cross: an idle link is a slow one, so less is sent, so less crosses,
    down to a hundredth of its nominal rate."""

    hurts_in = "steady"

    def _available_bps(self, view: SystemView) -> float:
        link = view.observed.link
        return max(link.egress.mean or link.nominal_bps, 0.01 * link.nominal_bps)


class TrustsNominal(Prfaas):
    """The link is what the operator said it was, whatever is observed."""

    hurts_in = "link-drop"

    def _available_bps(self, view: SystemView) -> float:
        return view.link_nominal_bps

    def tick(self, view: SystemView) -> Sequence[Action]:
        self._p["recall_s"] = 0.0
        return super().tick(view)


class IgnoresBacklog(Prfaas):
    """What waits at the senders has no claim on the link, and the estimate is used up to its last bit and a half more:
    no queue there ever drains."""

    hurts_in = "link-drop"

    def _available_bps(self, view: SystemView) -> float:
        return 1.5 * view.observed.link.bps


class ForgetsTheReturn(Prfaas):
    """The estimate is the lowest that was ever seen: a link that comes back stays slow."""

    hurts_in = "link-drop"

    def start(self, setup: Setup) -> None:
        self._slowest_bps = setup.link_nominal_bps
        super().start(setup)

    def _available_bps(self, view: SystemView) -> float:
        self._slowest_bps = min(self._slowest_bps, super()._available_bps(view))
        return self._slowest_bps
