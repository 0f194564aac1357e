"""Faults in equations (7) and (8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from testbed.scheduler import model
from testbed.scheduler.api import PD, PRFAAS, Action, Decision, Reject, RequestView, SetRole, Setup, SystemView
from testbed.scheduler.prfaas import Prfaas
from testbed.scheduler.rules import solve_threshold


class WrongSign(Prfaas):
    """The difference of the two sides of (7) has the wrong sign: t rises where it should fall, by as much."""

    hurts_in = "steady"

    def _solve(self, n_d: int, link_bps: float) -> float:
        t = super()._solve(n_d, link_bps)
        middle = self._setup.lengths.mean
        return middle * middle / t if t else self._ceiling


class KilotokensForTokens(Prfaas):
    """A threshold in K tokens is compared with lengths in tokens."""

    hurts_in = "scarce"

    def _solve(self, n_d: int, link_bps: float) -> float:
        return super()._solve(n_d, link_bps) / 1024


class MillisecondsForSeconds(Prfaas):
    """The remote site's prefill times are read as milliseconds: it seems to compute a thousand times as fast."""

    hurts_in = "steady"

    def start(self, setup: Setup) -> None:
        super().start(setup)
        remote = setup.hardware.get(PRFAAS)
        if remote is not None:
            fast = model.Hardware(remote.s_kv, lambda tokens: remote.t_prefill(tokens) / 1000)
            self._setup = replace(setup, hardware={**setup.hardware, PRFAAS: fast})
            self.threshold_tokens = self._bounded(self._solve(setup.n_d, setup.link_nominal_bps))


class P90ForMean(Prfaas):
    """(7) is solved for the P90 of the lengths above and below t instead of their means."""

    hurts_in = "steady"

    def _solve(self, n_d: int, link_bps: float) -> float:
        lengths, setup = self._lengths, self._setup
        tried = np.geomspace(lengths.low, lengths.high, 200)[1:-1]
        cumulated = np.cumsum(lengths.weights)
        at = np.searchsorted(lengths.atoms, tried, "right")
        q = cumulated[at - 1]
        short = lengths.atoms[np.searchsorted(cumulated, 0.9 * q)]
        long = lengths.atoms[np.minimum(np.searchsorted(cumulated, q + 0.9 * (1 - q)), len(lengths.atoms) - 1)]
        remote, (n_prfaas, n_p) = setup.hardware[PRFAAS], self._served
        away = model.theta_prfaas(n_prfaas, link_bps, remote.t_prefill(long), remote.s_kv(long)) / (1 - q)
        here = model.theta_pd_p(n_p, setup.hardware[PD].t_prefill(short)) / q
        return float(tried[int(np.argmax(np.minimum(away, here)))])


class ClippedToTheWrongSide(Prfaas):
    """max and min changed places where t is kept between floor and ceiling: it is always the ceiling."""

    hurts_in = "steady"

    def _bounded(self, t: float) -> float:
        return max(min(t, self._p["floor_tokens"]), self._ceiling) if self._setup.n_prfaas else t


class TenLengths(Prfaas):
    """The lengths are those of the last ten requests, not of a thousand, and every tick t follows them."""

    hurts_in = "steady"

    def start(self, setup: Setup) -> None:
        self._last: deque[int] = deque(maxlen=10)
        super().start(setup)

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        self._last.append(request.input_tokens)
        return super().route(request, view)

    def tick(self, view: SystemView) -> Sequence[Action]:
        actions = list(super().tick(view))
        if len(self._last) == 10:
            self._lengths = model.LengthDistribution.of_sample(self._last)
            self._take(view, actions, "lengths of the last 10 requests")
        return actions


class BelowOneDecodeWorker(Prfaas):
    """(8) without its decode term: every split with more prefill is better, until no decode worker is left to give."""

    hurts_in = "decode-short"

    def _plan(self, view: SystemView, actions: list[Action]) -> None:
        decoders = view.decode()
        if decoders and not any(node.draining or not node.alive for node in view.nodes.values()):
            actions.append(SetRole(min(decoders, key=lambda n: n.assigned_requests).name, "prefill", "more prefill"))


class ForgetsPrefillNodes(Prfaas):
    """The local cluster is reckoned with as if one node prefilled there, however many do."""

    hurts_in = "steady"

    def _solve(self, n_d: int, link_bps: float) -> float:
        return solve_threshold(self._setup, model.Fleet(self._served[0], 1, n_d), self._lengths, link_bps)
