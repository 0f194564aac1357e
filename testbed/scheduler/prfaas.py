"""The paper's policy, on two timescales (section 3): selective offloading by a threshold that follows the link, and a
split of the local cluster that follows the load.

*Short term*, `tick` every second: when the link's estimate moves, or queues surge, or the fleet changes, equation (7)
is solved again. *Long term*, every some minutes: the grid search (8) on the profiled window; a better split is
approached one node at a time. Between them stands hysteresis: a dwell after each change, a least change, two verdicts
in a row.

Routing: bandwidth *scarce*, the clusters are judged apart, and no cache crosses; *abundant*, the longer prefix of both
counts, and is brought to where the request computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from testbed.scheduler import model
from testbed.scheduler.api import (
    PD,
    PRFAAS,
    Action,
    Decision,
    NodeView,
    Note,
    Reject,
    RequestView,
    SetRole,
    Setup,
    Site,
    SystemView,
)
from testbed.scheduler.estimators import differ
from testbed.scheduler.flaps import Flaps
from testbed.scheduler.rebalance import Rebalance
from testbed.scheduler.recall import recalls
from testbed.scheduler.rules import CostTable, least_loaded_decode, send, solve_threshold, system_of

ABUNDANT: Final = "abundant"
SCARCE: Final = "scarce"
_NEVER: Final = float("inf")

DEFAULTS: Final[dict[str, float]] = {
    "high_water": 0.9,  # egress utilisation that is pressure
    "scarce_above": 0.7,  # egress utilisation above which bandwidth is scarce
    "abundant_below": 0.5,  # ... and below which it is abundant again
    "surge_s": 10.0,  # prefill work waiting a node, and growing, that calls for a new profile
    "link_step": 0.1,  # relative change of the link's estimate that calls for a new t
    "least_change": 0.07,  # relative change of t that is worth making
    "drain_backlog_s": 60.0,  # in which what waits at the senders is to be gone: so much of the link is taken
    "least_share": 0.82,  # ... but so much of it always is
    "relief_s": 10.0,  # by which the other site has to be done sooner, for a request to go there against t
    "recall_s": 30.0,  # that what waits at the senders may take to cross, before requests are taken back; 0: never
    "surge_dwell_s": 8.0,  # between changes of t that the link calls for, and after a fleet has grown
    "dwell_s": 60.0,  # between all others
    "profile_s": 120.0,  # between two looks at the lengths
    "floor_tokens": 256.0,
    "ceiling_tokens": 0.0,  # 0: the longest length there is
    "ramp_s": 30.0,  # a site that comes back takes its share again over this time
    "plan_s": 120.0,  # between two looks at the split
    "role_dwell_s": 240.0,  # between two conversions
    "least_gain": 0.05,  # relative gain of Lambda_max that is worth a conversion
    "horizon_s": 1800.0,  # over which a conversion has to earn what it costs
    "drain_s": 30.0,  # what a drain is taken to last, beside Setup.reload_s
    "least_load": 0.7,  # of Lambda_max: with less to do, no split is worth a conversion
    "replicate_share": 0.0,  # of the link, for hot prefixes copied to the other site ahead of demand; 0: none are
    "replicate_s": 30.0,  # between two looks at what is hot
    "cache_blind": 0.0,  # 1: route as if nothing were cached anywhere, to compare with
    "patience_s": 900.0,  # a link below its nominal rate for this long is taken to stay so
}
"""The policy's parameters (`policy.parameters` in a scenario); seconds are model seconds."""


class Prfaas:
    """l > t goes to PrfaaS, l <= t stays local, with t where Theta_prfaas / p = Theta_pd-p / (1 - p)."""

    def start(self, setup: Setup) -> None:
        unknown = sorted(set(setup.parameters) - set(DEFAULTS))
        if unknown:
            raise ValueError(f"parameters: {', '.join(unknown)} unknown; known are {', '.join(DEFAULTS)}")
        self._p = {**DEFAULTS, **setup.parameters}
        self._setup = setup
        self._lengths, self._sample = setup.lengths, math.inf  # of how many requests; the operator's word is exact
        self._reach(setup.lengths.high)
        self._served = setup.n_prfaas, setup.n_p  # prefill nodes of either site that the present t reckons with
        self.threshold_tokens = self._bounded(self._solve(setup.n_d, setup.link_nominal_bps))
        self.regime = ABUNDANT
        self._blind = bool(self._p["cache_blind"])
        self._fleet_version: int | None = None
        self._fleet_s = 0.0  # when it last changed
        self._grown = False  # there are more by now
        self._counted_s = -math.inf  # when what had come was last reckoned with
        self._stay_s = self._p["surge_dwell_s"]  # how long it has to have stayed before that
        self._solved_bps = setup.link_nominal_bps
        self._changed_s = -self._p["dwell_s"]
        self._profiled_s = -self._p["profile_s"]
        self._ramp_s: float | None = None  # since when the remote site is back
        self._calm_s = 0.0  # since when the link is not backlogged
        self._nominal_s = 0.0  # when the link was last seen at its nominal rate
        self._plan_due_s = self._p["plan_s"]
        self._role_s = -self._p["role_dwell_s"]
        self._searched: tuple[Any, Any, Any, list[model.OperatingPoint]] | None = None  # what for, and what was found
        self._flaps = Flaps()
        self._leaning = 0  # which way the last look at the split pointed
        self._rebalance: Rebalance | None = None
        if self._p["replicate_share"] and setup.block_tokens and setup.n_prfaas:
            share, period_s = self._p["replicate_share"], self._p["replicate_s"]
            kv_bytes: dict[Site, Any] = {site: cost.kv_bytes for site, cost in self._cost.items()}
            self._rebalance = Rebalance(share, period_s, setup.block_tokens, kv_bytes)

    def _reach(self, longest_tokens: float) -> None:
        """Requests are up to this long."""
        self._longest = longest_tokens
        self._cost = {site: CostTable(hardware, longest_tokens) for site, hardware in self._setup.hardware.items()}
        self._ceiling = self._p["ceiling_tokens"] or longest_tokens

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        t = self.threshold_tokens if self._ramp_s is None else self._ramped(view.now_s)
        if request.attempt > 1 and view.prefill(PD):  # nothing of it depends on the other site, or the link, again
            return send(view, PD, "tried before", t, self.regime)
        if request.hits and not self._blind:
            if self._rebalance is not None:
                self._rebalance.note(request, view.now_s)
            return self._route_cached(request, view, t)
        if request.input_tokens > t:
            site: Site = self._relieved(PRFAAS, request, view)
            reason = "longer than t" if site == PRFAAS else "longer than t, but PrfaaS is far behind"
        else:
            site = self._relieved(PD, request, view)
            reason = "not longer than t" if site == PD else "not longer than t, but the local site is far behind"
        return send(view, site, reason, t, self.regime)

    def _relieved(self, site: Site, request: RequestView, view: SystemView) -> Site:
        """The site that t says; the other one when it would be done sooner by `relief_s`.

        t balances rates, and knows nothing of queues: what an outage has piled up at one site, while the other was out
        of reach or its link down, would stay there for as long as t splits the load evenly. Ours, not the paper's; over
        a link that is scarce there is none, for a queue at its senders is what t is to prevent.
        """
        relief_s = self._p["relief_s"]
        for node in view.prefill(site):
            if node.queued_s < relief_s:
                return site
        other: Site = PD if site == PRFAAS else PRFAAS
        if other == PRFAAS and self.regime == SCARCE:
            return site
        gain_s = self._done_s(site, request, view) - self._done_s(other, request, view)
        return other if relief_s < gain_s < _NEVER else site

    def _done_s(self, site: Site, request: RequestView, view: SystemView) -> float:
        """Until a request's KV would be where it is decoded, s; infinite where nobody prefills. Over the link, what
        waits at the senders goes first, and its own last piece leaves when its computation is over."""
        nodes = view.prefill(site)
        if not nodes:
            return _NEVER
        cost = self._cost[site]
        cached = request.l_pd if site == PD else request.l_prfaas
        tokens = request.input_tokens - (0 if self._blind else cached)
        done_s = min([node.queued_s for node in nodes]) + cost(tokens)
        if site == PRFAAS:
            link = view.observed.link
            own_bytes = cost.kv_bytes(tokens) / self._setup.pieces
            done_s += 8 * (link.unsent_bytes + own_bytes) / max(link.bps, 1.0)
        return done_s

    def _route_cached(self, request: RequestView, view: SystemView, t: float) -> Decision | Reject:
        """The two rules of the paper, then the node that would have it prefilled first."""
        scarce = self.regime == SCARCE
        prefix = request.l_pd if scarce else max(request.l_pd, request.l_prfaas)
        if request.input_tokens - prefix > t:
            site: Site = PRFAAS
            reason = "uncached part longer than t"
        else:
            site = PD
            reason = "uncached part not longer than t"
        relieved = self._relieved(site, request, view)
        if relieved != site:
            site, reason = relieved, f"{reason}, but the other site is far behind"
        nodes, decoders = view.prefill(site), view.decode()
        if not nodes or not decoders:
            return send(view, site, reason, t, self.regime)
        decode = least_loaded_decode(decoders)
        holder, held = self._best_holder(request, view, site, across=not scarce)
        cost, hits, length = self._cost[site], request.hits, request.input_tokens
        afresh_s = cost(length)
        fetched_s = _NEVER if holder is None else cost(length - held) + self._fetch_s(held, holder, site, view)
        best, least_s, use, source = nodes[0], _NEVER, 0, ""
        for node in nodes:
            own = hits.get(node.name, 0)
            work_s = cost(length - own) if own else afresh_s
            if held > own and fetched_s < work_s and holder is not None:
                if node.queued_s + fetched_s < least_s:
                    best, least_s, use, source = node, node.queued_s + fetched_s, held, holder.name
            elif node.queued_s + work_s < least_s:
                best, least_s, use, source = node, node.queued_s + work_s, own, ""
        return Decision(best.name, decode.name, reason, t, use, source, self.regime)

    @staticmethod
    def _best_holder(
        request: RequestView, view: SystemView, site: Site, *, across: bool
    ) -> tuple[NodeView | None, int]:
        """Who to fetch a prefix from: the longest there is, at home if it is as long; at the other site if `across`."""
        best: NodeView | None = None
        longest = 0
        for name, tokens in request.hits.items():
            if tokens < longest:
                continue
            node = view.nodes[name]
            if not node.alive or node.silent or node.draining or (node.site != site and not across):
                continue
            if tokens > longest or (tokens == longest and best is not None and best.site != site):
                best, longest = node, tokens
        return best, longest

    def _fetch_s(self, tokens: int, holder: NodeView, site: Site, view: SystemView) -> float:
        """What bringing a prefix of `tokens` takes, unloaded: over the link at what is left of it, or inside the
        site."""
        kv_bits = 8 * self._cost[holder.site].kv_bytes(tokens)
        if holder.site == site:
            return kv_bits / self._setup.intra_bps
        link = view.observed.link
        return kv_bits / max(link.bps * (1 - link.utilisation), 0.05 * link.bps, 1.0)

    # short term
    def tick(self, view: SystemView) -> Sequence[Action]:
        """What to change now: the regime, t, a node's role."""
        actions: list[Action] = []
        now_s, link = view.now_s, view.observed.link
        self._flaps.see(now_s, link.bps)
        if link.backlogged:
            self._calm_s = now_s
        if link.bps >= 0.9 * link.nominal_bps:
            self._nominal_s = now_s
        self._judge_bandwidth(view, actions)
        self._follow(view, actions)
        if self._p["recall_s"] and self._setup.n_prfaas:
            actions += recalls(view, self._cost[PD], self._cost[PRFAAS], self._p["recall_s"])
        if self._rebalance is not None:
            actions += self._rebalance.propose(view, abundant=self.regime == ABUNDANT)
        if now_s >= self._plan_due_s:
            self._plan_due_s = now_s + self._p["plan_s"]
            self._plan(view, actions)
        return actions

    def _judge_bandwidth(self, view: SystemView, actions: list[Action]) -> None:
        link, before = view.observed.link, self.regime
        used = link.utilisation
        if before == ABUNDANT and (link.backlogged or used > self._p["scarce_above"]):
            self.regime = SCARCE
        elif before == SCARCE and used < self._p["abundant_below"] and view.now_s - self._calm_s >= 10:
            self.regime = ABUNDANT
        if self.regime != before:
            backlog = ", backlogged" if link.backlogged else ""
            actions.append(Note("regime", before, self.regime, f"egress at {used:.0%} of the estimate{backlog}"))

    def _follow(self, view: SystemView, actions: list[Action]) -> None:
        """Solve (7) again when there is a reason to; take its t when that is worth it."""
        now_s, observed = view.now_s, view.observed
        link, waited_s = observed.link, now_s - self._changed_s
        pressed = link.backlogged or link.utilisation > self._p["high_water"]
        if view.fleet_version != self._fleet_version:
            self._fleet_changed(view, actions)
        elif self._grown and now_s - self._fleet_s >= self._stay_s:
            self._counted_s = now_s
            self._reckon(view, actions)
        elif abs(self._available_bps(view) - self._solved_bps) > self._p["link_step"] * self._solved_bps:
            if waited_s >= self._p["surge_dwell_s"]:
                told = f"link estimate {link.bps / 1e9:.3g} Gbps, {link.unsent_bytes / 1e9:.3g} GB waiting"
                self._take(view, actions, told)
        elif (
            observed.lengths.enough
            and not pressed
            and waited_s >= self._p["dwell_s"]
            and now_s - self._profiled_s >= self._p["profile_s"]
        ):
            if self._profile(view):
                self._take(view, actions, f"lengths of the last {observed.lengths.held} requests")
        elif observed.lengths.enough and waited_s >= self._p["dwell_s"] and self._surging(view):
            self._profile(view)
            self._take(view, actions, "queues surge")

    def _fleet_changed(self, view: SystemView, actions: list[Action]) -> None:
        """What is gone counts at once; what has come, when it has stayed, and the longer the sooner it left again the
        last time: t does not follow nodes that come and go."""
        now_s, first = view.now_s, self._fleet_version is None
        self._fleet_version, self._fleet_s = view.fleet_version, now_s
        served = len(view.prefill(PRFAAS)), len(view.prefill(PD))
        if first or any(now < before for now, before in zip(served, self._served, strict=True)):
            again = now_s - self._counted_s < self._p["plan_s"]
            self._stay_s = min(2 * self._stay_s, self._p["dwell_s"]) if again else self._p["surge_dwell_s"]
            self._reckon(view, actions, first=first)
        else:
            self._grown = served != self._served

    def _reckon(self, view: SystemView, actions: list[Action], *, first: bool = False) -> None:
        """Solve t for the prefill nodes that there are now."""
        before, remote = self._served[0], len(view.prefill(PRFAAS))
        if remote and not before:
            self._ramp_s = view.now_s
        self._served, self._grown = (remote, len(view.prefill(PD))), False
        trigger = "the fleet changed" if first or remote != before else "roles changed"
        self._take(view, actions, trigger, at_once=not first)

    def _available_bps(self, view: SystemView) -> float:
        """B_out as far as it is for new KV: what waits at the senders has a claim on it."""
        link_bps = self._flaps.lasting_bps(view.now_s)
        claimed_bps = 8 * view.observed.link.unsent_bytes / self._p["drain_backlog_s"]
        return max(self._p["least_share"] * link_bps, link_bps - claimed_bps)

    def _surging(self, view: SystemView) -> bool:
        for series in view.observed.queue_s.values():
            if (series.latest or 0.0) > self._p["surge_s"] and series.slope > 0:
                return True
        return False

    def _profile(self, view: SystemView) -> bool:
        """Take the window's lengths, if they are others than those in use; whether they are.

        A threshold of 1,000 lengths is off by 6 %, so what chance alone explains changes nothing.
        """
        self._profiled_s = view.now_s
        lengths = view.observed.lengths.incremental(across=self.regime == ABUNDANT)
        if not differ(lengths, self._lengths, view.observed.lengths.held, self._sample):
            return False
        self._lengths, self._sample = lengths, float(view.observed.lengths.held)
        if lengths.high > self._longest:
            self._reach(lengths.high)
        return True

    def _take(self, view: SystemView, actions: list[Action], trigger: str, *, at_once: bool = False) -> None:
        """The t of (7) for what is known now, if it differs enough."""
        link_bps = self._solved_bps = self._available_bps(view)
        before = self.threshold_tokens
        t = self._bounded(self._solve(len(view.decode()), link_bps))
        if t == before or (not at_once and abs(t - before) < self._p["least_change"] * before):
            return
        self.threshold_tokens, self._changed_s = t, view.now_s
        actions.append(Note("threshold", before, t, trigger))

    def _solve(self, n_d: int, link_bps: float) -> float:
        """The t of (7) for the lengths and the prefill nodes that are reckoned with."""
        return solve_threshold(self._setup, model.Fleet(*self._served, n_d), self._lengths, link_bps)

    def _bounded(self, t: float) -> float:
        return min(max(t, self._p["floor_tokens"]), self._ceiling) if self._setup.n_prfaas else t

    def _ramped(self, now_s: float) -> float:
        """t after the remote site came back: from everything local down to the solved one, so that nobody stampedes."""
        assert self._ramp_s is not None
        left = 1 - (now_s - self._ramp_s) / self._p["ramp_s"]
        if left <= 0:
            self._ramp_s = None
            return self.threshold_tokens
        return self.threshold_tokens + left * max(0.0, self._ceiling - self.threshold_tokens)

    # long term
    def _plan(self, view: SystemView, actions: list[Action]) -> None:
        """One step towards the best split of (8), when that pays and has been so twice."""
        now_s, observed, link = view.now_s, view.observed, view.observed.link
        output_tokens = observed.output_tokens
        if not observed.lengths.enough or output_tokens is None or not self._settled(view):
            self._leaning = 0
            return
        if now_s - self._role_s < self._p["role_dwell_s"]:
            return
        if now_s - self._profiled_s >= self._p["profile_s"]:
            self._profile(view)
        n_prfaas, n_p, n_d = len(view.prefill(PRFAAS)), len(view.prefill(PD)), len(view.decode())
        system = system_of(self._setup, link.bps, output_tokens)
        points = self._grid(system, n_prfaas, n_p + n_d)
        best, here = model.optimum(points), points[n_p]
        step = (best.fleet.n_p > n_p) - (best.fleet.n_p < n_p)
        leaning, self._leaning = self._leaning, step
        offered_rps = observed.lengths.rate_rps(now_s) or 0.0
        if offered_rps < self._p["least_load"] * here.lambda_max:
            return
        if not step or step != leaning or best.lambda_max < here.lambda_max * (1 + self._p["least_gain"]):
            return
        there = points[n_p + step]
        if not (there.fleet.n_p >= 1 and there.fleet.n_d >= 1):
            return
        missing = model.Fleet(n_prfaas, n_p - (step < 0), n_d - (step > 0))
        during = model.evaluate(system, missing, self._lengths, here.threshold_tokens).lambda_max
        costs = (here.lambda_max - during) * (self._setup.reload_s + self._p["drain_s"])
        earns = (there.lambda_max - here.lambda_max) * self._p["horizon_s"]
        if earns <= costs:
            return
        trigger = (
            f"Lambda_max {here.lambda_max:.3g} at ({n_p}, {n_d}), {there.lambda_max:.3g} at "
            f"({there.fleet.n_p}, {there.fleet.n_d}), best {best.lambda_max:.3g} req/s"
        )
        self._role_s, self._leaning = now_s, 0
        if step > 0:
            actions.append(SetRole(min(view.decode(), key=lambda n: n.assigned_requests).name, "prefill", trigger))
        else:
            actions.append(SetRole(min(view.prefill(PD), key=lambda n: n.queued_s).name, "decode", trigger))

    def _grid(self, system: model.System, n_prfaas: int, n_local: int) -> list[model.OperatingPoint]:
        """The grid search, unless nothing that it depends on has changed by more than a fiftieth."""
        fleet, given = (n_prfaas, n_local), (system.link_bps, system.output_tokens)
        if self._searched is not None:
            lengths, before_fleet, before, points = self._searched
            near = all(abs(a - b) <= 0.02 * b for a, b in zip(given, before, strict=True))
            if lengths is self._lengths and fleet == before_fleet and near:
                return points
        points = model.grid_search(system, n_prfaas, n_local, self._lengths)
        self._searched = (self._lengths, fleet, given, points)
        return points

    def _settled(self, view: SystemView) -> bool:
        """Whether this is a time to judge the split by: nobody silent or on its way, a node that was lost given up,
        its site not, the link as it usually is."""
        link = view.observed.link
        if link.backlogged or view.now_s - self._calm_s < self._p["plan_s"] / 2:
            return False
        if link.bps < 0.9 * link.nominal_bps and view.now_s - self._nominal_s < self._p["patience_s"]:
            return False
        nodes = view.nodes.values()
        if any(node.draining or (node.alive and node.silent) for node in nodes):
            return False
        if self._setup.n_prfaas and not view.prefill(PRFAAS):
            return False
        return all(n.alive for n in nodes) or view.now_s - self._fleet_s >= self._p["patience_s"]
