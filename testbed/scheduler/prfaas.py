"""The paper's policy: selective offloading by a length threshold that balances the two clusters.

The threshold is solved once, when a load begins, by equation (7) for the load's length distribution and the nominal
link.
"""

from __future__ import annotations

from testbed.scheduler.api import Decision, Reject, RequestView, Setup, SystemView
from testbed.scheduler.rules import by_threshold, solve_threshold


class Prfaas:
    """l > t goes to PrfaaS, l <= t stays local, with t where Theta_prfaas / p = Theta_pd-p / (1 - p)."""

    def start(self, setup: Setup) -> None:
        self.threshold_tokens = solve_threshold(setup)

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        return by_threshold(request, view, self.threshold_tokens)
