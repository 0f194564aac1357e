"""Policies that are worse by a known amount: what the gate is calibrated with. `prfaas`, but a share of the requests
goes to the most loaded prefill node of the chosen site instead of the one that the policy chose.

Which requests is a hash of their names, so a run repeats. How much worse a share makes a scenario is measured over the
pool of runs (`calibrate.py`), never taken from here.
"""

from __future__ import annotations

import zlib

from testbed.scheduler.api import Decision, Reject, RequestView, SystemView
from testbed.scheduler.prfaas import Prfaas


class Handicap(Prfaas):
    """misrouted: the share (0 .. 1) of requests that go to the longest queue."""

    misrouted = 0.0

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        decision = super().route(request, view)
        if isinstance(decision, Reject) or zlib.crc32(request.request_id.encode()) >= self.misrouted * 2**32:
            return decision
        site = view.nodes[decision.prefill_node].site
        worst = max(view.prefill(site), key=lambda node: node.queued_s)
        if worst.name == decision.prefill_node:
            return decision
        return decision._replace(prefill_node=worst.name, cached_tokens=request.hits.get(worst.name, 0), cache_node="")


class Lighter(Handicap):
    """About 2 % more P90 TTFT in the suites' scenario `steady`."""

    misrouted = 0.0265


class Heavier(Handicap):
    """About 5 %, likewise."""

    misrouted = 0.061
