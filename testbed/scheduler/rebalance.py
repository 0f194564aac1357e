"""Hot prefixes brought to the other site ahead of demand, while bandwidth is abundant (the paper's section 3: the
global KVCache manager "rebalances hot prefixes").

Without it a prefix comes to a site when the first request there fetches it, or, while bandwidth is scarce, computes it
again. A copy takes that off this one request, and costs its bytes; so it waits for room that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from testbed.scheduler.api import COPIES, PD, PRFAAS, NodeView, Replicate, RequestView, Site, SystemView
from testbed.scheduler.heat import Heat, Hot

WINDOW_S: Final = 300.0
"""Over which hits are counted."""
LEAST_HITS: Final = 3
"""Of a prefix in a window, before it is hot: two may be one conversation."""
LOW_WATER: Final = 0.5
"""Egress utilisation above which nothing is copied: the bandwidth is not idle. As for an end of scarcity."""


class Rebalance:
    """Asked every `period_s`, it copies the hottest prefixes that only one site holds.

    share: of what the link carries in a period, at most, for copies. kv_bytes: S_kv of a prefix, by site. block_tokens:
    as in `Setup`. Times: model seconds.
    """

    def __init__(
        self, share: float, period_s: float, block_tokens: int, kv_bytes: dict[Site, Callable[[int], float]]
    ) -> None:
        self._share = share
        self._period_s = period_s
        self._block_tokens = block_tokens
        self._kv_bytes = kv_bytes
        self._heat = Heat(WINDOW_S)
        self._due_s = period_s

    def note(self, request: RequestView, now_s: float) -> None:
        """A request has come, of which something is cached."""
        if request.attempt == 1:
            block_tokens = self._block_tokens
            self._heat.note(now_s, request.block_ids, [tokens // block_tokens for tokens in request.hits.values()])

    def propose(self, view: SystemView, *, abundant: bool) -> list[Replicate]:
        """What to copy now: nothing unless the link has room and every node is heard of."""
        now_s, link = view.now_s, view.observed.link
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._period_s
        room = LOW_WATER - link.utilisation
        if not abundant or link.backlogged or room <= 0 or view.copying:
            return []
        if any(not node.alive or node.silent for node in view.nodes.values()):
            return []
        budget = min(self._share, room) * link.bps * self._period_s / 8
        copies: list[Replicate] = []
        for hot in self._heat.hottest(now_s, LEAST_HITS):
            if len(copies) >= COPIES:
                break
            found = self._between(hot, view)
            if found is None:
                continue
            holder, receiver = found
            cost = self._kv_bytes[holder.site](hot.blocks * self._block_tokens)
            if cost > budget:
                continue
            budget -= cost
            trigger = f"{hot.hits} hits in {WINDOW_S:g} s, only at {holder.site}; egress at {link.utilisation:.0%}"
            copies.append(Replicate(hot.ids[: hot.blocks], holder.name, receiver.name, trigger))
        return copies

    @staticmethod
    def _between(hot: Hot, view: SystemView) -> tuple[NodeView, NodeView] | None:
        """Who holds it, and the least loaded node of the site where nobody does; None when there is no such pair."""
        names = view.holders(hot.block_id)
        sites = {view.nodes[name].site for name in names}
        if len(sites) != 1:
            return None
        [here] = sites
        holders = [node for node in view.prefill(here) if node.name in names]
        takers = view.prefill(PD if here == PRFAAS else PRFAAS)
        return (_idlest(holders), _idlest(takers)) if holders and takers else None


def _idlest(nodes: Sequence[NodeView]) -> NodeView:
    return min(nodes, key=lambda node: node.queued_s)
