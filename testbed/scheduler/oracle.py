"""The upper bound to compare with: a policy that is told the link's future and the true lengths, and estimates nothing.

No scheduler can know this; whatever shows its results says so. It solves (7) for what is really there, and looks as far
ahead as a request's KV would be under way: both the KV's landing and the threshold are those of the link as it will be
then. So nothing more is sent into a link that is about to fall, and one that comes back is used in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from testbed.scheduler import model
from testbed.scheduler.api import PD, PRFAAS, Action, Decision, NodeView, Note, Reject, RequestView, Setup, SystemView
from testbed.scheduler.rules import CostTable, least_loaded_decode, send, solve_threshold

STEP_S: Final = 0.5
"""The grid, model seconds, on which the link's future is looked at."""

FARTHEST_S: Final = 600.0
"""How far ahead it looks, model seconds; what takes longer is taken to land then."""


class _Place(NamedTuple):
    """A node to prefill at: what it has cached of the prompt, tokens, when it would begin, and how long it would
    take."""

    node: NodeView
    cached: int
    waits_s: float
    takes_s: float


class Oracle:
    """Where the first token would come sooner, the times weighed by l / t.

    With both sites equally busy that is the paper's rule at the optimum of (7); a queue, or a link that carries little
    or soon will, counts for the other site. Nothing is fetched: a cached prefix is used where it lies. Its future's
    link_bps is what the link really carries of KV, so the t it gives is one that can be had.
    """

    wants_future = True

    def start(self, setup: Setup) -> None:
        if setup.future is None:
            raise ValueError("it has to be told the future, and nobody here knows it")
        self._setup, self._future = setup, setup.future
        self._cost = {site: CostTable(hardware, setup.lengths.high) for site, hardware in setup.hardware.items()}
        self._solved: dict[tuple[float, int, int, int], float] = {}
        self._clear_s = 0.0  # when the link will have carried all that was sent to it so far
        self.threshold_tokens = self._threshold(0.0, setup.n_prfaas, setup.n_p)

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        away, home, decoders = view.prefill(PRFAAS), view.prefill(PD), view.decode()
        if not decoders or not home or not away:
            return send(view, PRFAAS if away else PD, "nowhere else", self.threshold_tokens)
        now_s, costs = view.now_s, self._cost[PRFAAS]
        here, there = _soonest(home, request, self._cost[PD]), _soonest(away, request, costs)
        begins_s = now_s + there.waits_s
        kv_bits = 8 * costs.kv_bytes(request.input_tokens - there.cached)
        landed_s = self._landed_s(begins_s, there.takes_s, kv_bits)
        t = self._threshold(landed_s, len(away), len(home))
        # landed - now against waits + takes, times l / t; t may be infinite
        if (landed_s - now_s) * t < (here.waits_s + here.takes_s) * (request.input_tokens - here.cached):
            self._clear_s = self._carried_s(max(begins_s, self._clear_s), kv_bits)
            place, reason = there, "sooner at PrfaaS"
        else:
            place, reason = here, "sooner at home"
        return Decision(place.node.name, least_loaded_decode(decoders).name, reason, t, place.cached)

    def tick(self, view: SystemView) -> Sequence[Action]:
        """Put on record how the threshold of the present moves."""
        before = self.threshold_tokens
        t = self._threshold(view.now_s, len(view.prefill(PRFAAS)), len(view.prefill(PD)))
        if t == before:
            return ()
        self.threshold_tokens = t
        return (Note("threshold", before, t, f"the link carries {self._future.link_bps(view.now_s) / 1e9:.3g} Gbps"),)

    def _threshold(self, at_s: float, n_prfaas: int, n_p: int) -> float:
        """The t of (7) at a model second, tokens."""
        link_bps, lengths = self._future.link_bps(at_s), self._future.lengths(at_s)
        key = (link_bps, id(lengths), n_prfaas, n_p)
        t = self._solved.get(key)
        if t is None:
            fleet = model.Fleet(n_prfaas, n_p, self._setup.n_d)
            t = self._solved[key] = solve_threshold(self._setup, fleet, lengths, link_bps)
        return t

    def _landed_s(self, begins_s: float, takes_s: float, bits: float) -> float:
        """When so many bits, which come into being evenly during a prefill, have landed, after all sent before."""
        at_s, ends_s, left = max(begins_s, self._clear_s), begins_s + takes_s, bits
        while at_s < ends_s:
            until_s = min(_next_step_s(at_s), ends_s)
            carried = self._future.link_bps(at_s) * (until_s - at_s)
            left = max(left - carried, bits * (ends_s - until_s) / takes_s)
            at_s = until_s
        return self._carried_s(at_s, left)

    def _carried_s(self, from_s: float, bits: float) -> float:
        """When the link has carried so many bits from a model second on, as far as it looks."""
        at_s = from_s
        while at_s < from_s + FARTHEST_S:
            until_s, rate_bps = _next_step_s(at_s), self._future.link_bps(at_s)
            if rate_bps * (until_s - at_s) >= bits:
                return at_s + (bits / rate_bps if bits else 0.0)
            bits -= rate_bps * (until_s - at_s)
            at_s = until_s
        return at_s


def _next_step_s(at_s: float) -> float:
    """The next point of the grid."""
    return (math.floor(at_s / STEP_S) + 1) * STEP_S


def _soonest(nodes: Sequence[NodeView], request: RequestView, cost: CostTable) -> _Place:
    """The node that would have the prompt prefilled first; ties go to the first."""
    best, least_s = None, math.inf
    for node in nodes:
        cached = request.hits.get(node.name, 0)
        takes_s = cost(request.input_tokens - cached)
        if node.queued_s + takes_s < least_s:
            best, least_s = _Place(node, cached, node.queued_s, takes_s), node.queued_s + takes_s
    assert best is not None
    return best
