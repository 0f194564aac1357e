"""Faults in which site and which node a request goes to."""

from __future__ import annotations

from testbed.scheduler.api import (
    Action,
    Decision,
    NodeView,
    Reject,
    RequestView,
    Setup,
    Site,
    SystemView,
)
from testbed.scheduler.prfaas import ABUNDANT, SCARCE, Prfaas


class MostLoaded(Prfaas):
    """The comparison in the search for the least loaded prefill node is the wrong way round."""

    hurts_in = "steady"

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        decision = super().route(request, view)
        if isinstance(decision, Reject) or request.hits:
            return decision
        nodes = view.prefill(view.nodes[decision.prefill_node].site)
        return decision._replace(prefill_node=max(nodes, key=lambda node: node.queued_s).name)


class FirstDecodeNode(Prfaas):
    """The first decode node takes whatever comes."""

    hurts_in = "decode-short"

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        decision = super().route(request, view)
        return decision if isinstance(decision, Reject) else decision._replace(decode_node=view.decode()[0].name)


class IgnoresReservations(Prfaas):
    """A decode node is chosen by the slots that are taken now: the requests that are on their way to it do not count,
    so whoever has a free slot gets all of them."""

    hurts_in = "decode-short"

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        decision = super().route(request, view)
        if isinstance(decision, Reject):
            return decision
        with_room = [node for node in view.decode() if node.decoding_requests < node.slots]
        node = (with_room or view.decode())[0]
        return decision._replace(decode_node=node.name)


class StaleQueues(Prfaas):
    """The queues are looked at every fifteen seconds: until then the node that was idle gets everything."""

    hurts_in = "steady"

    def start(self, setup: Setup) -> None:
        self._seen_s, self._idlest = -1e9, dict[str, str]()
        super().start(setup)

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        decision = super().route(request, view)
        if isinstance(decision, Reject) or request.hits:
            return decision
        if view.now_s - self._seen_s >= 15:
            self._seen_s, self._idlest = view.now_s, {}
        site = view.nodes[decision.prefill_node].site
        name = self._idlest.setdefault(site, decision.prefill_node)
        return decision._replace(prefill_node=name) if any(n.name == name for n in view.prefill(site)) else decision


class DeadNodes(Prfaas):
    """The fleet is as it was when the load began: who is silent, lost or draining is chosen all the same."""

    hurts_in = "outage"

    def start(self, setup: Setup) -> None:
        self._fleet: dict[Site, list[NodeView]] = {}
        super().start(setup)

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        if not self._fleet:
            self._fleet = {"prfaas": list(view.prefill("prfaas")), "pd": list(view.prefill("pd"))}
        decision = super().route(request, view)
        if isinstance(decision, Reject) or request.hits:
            return decision
        site: Site = "prfaas" if request.input_tokens > self.threshold_tokens else "pd"
        return decision._replace(prefill_node=min(self._fleet[site], key=lambda node: node.queued_s).name)


class TotalForIncremental(Prfaas):
    """The whole length is compared with t, not the part of it that is not cached."""

    hurts_in = "conversations"

    def _route_cached(self, request: RequestView, view: SystemView, t: float) -> Decision | Reject:
        blind = request._replace(l_pd=0, l_prfaas=0)
        return super()._route_cached(blind, view, t)


class HitCountedTwice(Prfaas):
    """The cached prefix is taken off the length twice, before t is looked at."""

    hurts_in = "conversations"

    def _route_cached(self, request: RequestView, view: SystemView, t: float) -> Decision | Reject:
        twice = request._replace(l_pd=2 * request.l_pd, l_prfaas=2 * request.l_prfaas)
        return super()._route_cached(twice, view, t)


class ScarceRuleWhenAbundant(Prfaas):
    """The rule for scarce bandwidth is used however much of it there is: no cache ever crosses."""

    hurts_in = "conversations"

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        regime, self.regime = self.regime, SCARCE
        try:
            return super().route(request, view)
        finally:
            self.regime = regime


class FetchesAreFree(Prfaas):
    """What a prefix weighs on its way across the link is left out, and bandwidth is never scarce: whatever is cached
    anywhere is fetched."""

    hurts_in = "conversations"

    def _fetch_s(self, tokens: int, holder: NodeView, site: Site, view: SystemView) -> float:
        return 0.0

    def _judge_bandwidth(self, view: SystemView, actions: list[Action]) -> None:
        self.regime = ABUNDANT
