"""The policies to compare with: everything remote, everything local, and a threshold that never moves.

All of them, and `prfaas`, choose the node inside a cluster the same way (`rules.py`), so that a comparison shows the
routing rule and nothing else.
"""

from __future__ import annotations

from testbed.scheduler.api import PD, PRFAAS, Decision, Reject, RequestView, Setup, SystemView
from testbed.scheduler.rules import by_threshold, send, solve_threshold


class Naive:
    """Every prefill remote: the paper's naive heterogeneous deployment (Table 6)."""

    def start(self, setup: Setup) -> None:
        pass

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        return send(view, PRFAAS, "all remote", 0.0)


class Homogeneous:
    """Every prefill local: the paper's homogeneous PD deployment (Table 6), or any fleet, its remote site unused."""

    def start(self, setup: Setup) -> None:
        pass

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        return send(view, PD, "all local")


class Static:
    """A fixed threshold: l > t is prefilled remotely, l <= t locally.

    Parameter `threshold_tokens`; without it, the optimum by equation (7) for the load's lengths and the nominal link,
    never changed.
    """

    def start(self, setup: Setup) -> None:
        given = setup.parameters.get("threshold_tokens")
        self.threshold_tokens = solve_threshold(setup) if given is None else given

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        return by_threshold(request, view, self.threshold_tokens)
