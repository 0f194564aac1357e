"""What is known of the system, from observations only: lengths, arrivals, answers, and above all the link.

Control feeds one `Observed` with what it sees; policies read it through `SystemView.observed`, and it outlives a
change of policy. Nothing here is ever told the shaper's setting. Every figure has an age or can be absent: what
nobody has seen lately is not known.

Read `LinkEstimate` first: how B_out is estimated from what transfers achieve.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from testbed.scheduler.model import LengthDistribution

WINDOW = 1000
"""Requests in the sliding window of lengths. Of fewer the threshold they give is outside 10 % of the true one one
time in eight or more; of more it lags behind a mix that shifts."""


def differ(one: LengthDistribution, other: LengthDistribution, n: float, m: float) -> bool:
    """Whether samples of n and m lengths (infinite: exact) come from different distributions; `one` has no density.

    Kolmogorov-Smirnov, one time in ten thousand wrong (it is asked again and again): the largest distance of their
    distribution functions is over 2.2 sqrt(1 / n + 1 / m).
    """
    if other.edges is None:  # both are steps: what is apart is so at a step of either
        at = np.union1d(one.atoms, other.atoms)
        apart = np.abs(one.below(np.ones_like(one.atoms), at) - other.below(np.ones_like(other.atoms), at)).max()
    else:
        mine, theirs = np.cumsum(one.weights), other.below(np.ones_like(other.atoms), one.atoms)
        apart = max(np.abs(mine - theirs).max(), np.abs(mine - one.weights - theirs).max())
    return bool(apart > 2.2 * math.sqrt(1 / n + 1 / m))


class Lengths:
    """The last `window` requests: l_total, l_pd and l_prfaas in tokens, and when they came (model seconds)."""

    def __init__(self, window: int = WINDOW) -> None:
        self.count = 0  # ever
        self._window = window
        self._total: list[int] = []
        self._pd: list[int] = []
        self._prfaas: list[int] = []
        self._at_s: list[float] = []

    def add(self, now_s: float, total: int, pd: int, prfaas: int) -> None:
        """A request has arrived, of which `pd` and `prfaas` tokens are cached at either site."""
        count = self.count
        if count < self._window:
            self._total.append(total)
            self._pd.append(pd)
            self._prfaas.append(prfaas)
            self._at_s.append(now_s)
        else:
            at = count % self._window
            self._total[at], self._pd[at], self._prfaas[at], self._at_s[at] = total, pd, prfaas, now_s
        self.count = count + 1

    @property
    def held(self) -> int:
        """Requests in the window now."""
        return len(self._total)

    @property
    def enough(self) -> bool:
        """Whether the window is full: before that the operator's word on the lengths is the better one."""
        return self.count >= self._window

    def incremental(self, *, across: bool) -> LengthDistribution:
        """The distribution of uncached lengths: after the local site's prefix, or the longer of both (`across`).

        Raises ModelError when nothing has arrived yet.
        """
        cached = np.asarray(self._pd, dtype=np.float64)
        if across:
            cached = np.maximum(cached, np.asarray(self._prfaas, dtype=np.float64))
        return LengthDistribution.of_sample(np.asarray(self._total, dtype=np.float64) - cached)

    def rate_rps(self, now_s: float) -> float | None:
        """Arrivals a second over the window; None before the second one."""
        if self.count < 2:
            return None
        first_s = self._at_s[self.count % self._window] if self.count >= self._window else self._at_s[0]
        return len(self._at_s) / (now_s - first_s) if now_s > first_s else None


class Series:
    """A figure over the last `keep_s` seconds: its level and its slope a second."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at_s: float, value: float) -> None:
        points = self._points
        points.append((at_s, value))
        while points[0][0] < at_s - self._keep_s:
            points.popleft()

    @property
    def latest(self) -> float | None:
        return self._points[-1][1] if self._points else None

    @property
    def mean(self) -> float | None:
        return math.fsum(value for _, value in self._points) / len(self._points) if self._points else None

    @property
    def slope(self) -> float:
        """Least squares, a second; 0 with fewer than two points."""
        count = len(self._points)
        if count < 2:
            return 0.0
        mid_s = math.fsum(at_s for at_s, _ in self._points) / count
        spread = math.fsum((at_s - mid_s) ** 2 for at_s, _ in self._points)
        if not spread:
            return 0.0
        return math.fsum((at_s - mid_s) * value for at_s, value in self._points) / spread

    def age_s(self, now_s: float) -> float:
        """Seconds since the last point; infinite without one."""
        return now_s - self._points[-1][0] if self._points else math.inf


class LinkEstimate:
    """B_out, bits/s of KV, from what transfers achieve; the operator's nominal figure until there is better.

    Three kinds of evidence. *Backlogged*: between two accounts of the nodes the senders had more bytes waiting than
    landed in between, so the link was never idle: what landed is its rate, and the estimate follows. The nodes'
    accounts are not of one instant, so what landed is taken over as many such accounts in a row as there are, up to
    OVER_S. *More*: more landed, over two accounts, than the estimate says. *Drained*: a transfer's last piece (its
    computation had ended, so it waited for nothing but the link) took less time than the estimate allows: then the
    link is faster than believed, and the estimate doubles, up to nominal, for every such transfer. A link that nobody
    fills shows nothing else.

    Where nothing crosses there is no evidence, and an estimate that keeps everything local would confirm itself for
    ever: one that nothing has told of for TRUSTED_S doubles as well, until the link is used and speaks for itself.

    nominal_bps: the operator's figure, model bits/s. pieces: a transfer's.
    """

    FOLLOW = 0.3  # share of a new backlogged sample, when it is near
    NEAR = 0.25  # relative: what is farther away is taken as it is
    OVER_S = 8.0  # the longest stretch that a rate is taken over
    FASTER = 2.0  # a drained transfer counts when it was this much faster than the estimate
    IN_A_ROW = 3  # and only so many: one may have found the shaper's bucket full
    TRUSTED_S = 30.0  # without evidence: then the link is tried with more
    TRIED = 0.01  # of nominal: the least that it is tried with

    def __init__(self, nominal_bps: float, pieces: int) -> None:
        self.nominal_bps = nominal_bps
        self.bps = nominal_bps
        self.told_s = -math.inf  # when evidence last came
        self.backlogged = False  # at the last account
        self.unsent_bytes = 0.0
        self.egress = Series(10.0)  # bits/s landed, an account a point
        self.delay_s = Series(30.0)  # from prefill end to landed, a transfer a point
        self._pieces = pieces
        self._at_s = -math.inf
        self._landed = 0.0
        self._faster = 0
        self._full = 0  # accounts in a row between which the link was never idle
        self._stood = False  # nothing landed before the last account
        self._accounts: deque[tuple[float, float]] = deque()  # of late: when, and all that had landed

    @property
    def utilisation(self) -> float:
        """Egress over B_out, of late."""
        egress = self.egress.mean
        return egress / self.bps if egress is not None and self.bps > 0 else 0.0

    def account(self, now_s: float, landed_bytes: float, unsent_bytes: float) -> None:
        """All that has landed by now, cumulative, and what waits at the senders: the sums of the nodes' latest
        words."""
        before, elapsed_s = self.unsent_bytes, now_s - self._at_s
        gained = max(0.0, landed_bytes - self._landed)
        self._at_s, self._landed, self.unsent_bytes = now_s, landed_bytes, unsent_bytes
        if elapsed_s <= 0:
            return
        if elapsed_s == math.inf:
            self._accounts.append((now_s, landed_bytes))
            return
        self.egress.add(now_s, gained * 8 / elapsed_s)
        accounts = self._accounts
        accounts.append((now_s, landed_bytes))
        while len(accounts) > 2 and accounts[0][0] < now_s - self.OVER_S:
            accounts.popleft()
        self._full = self._full + 1 if before > 0 and unsent_bytes > 0 and before >= gained else 0
        self.backlogged = self._full >= 2  # one account alone may put together what was not at the same time
        stood, self._stood = self._stood, gained <= 0
        if self.backlogged and (gained > 0 or stood):  # nothing at all, once, may be an outage: the senders say more
            self._faster = 0
            long_bps, short_bps = self._rate_bps(self._full), self._rate_bps(2)
            self._learn(now_s, short_bps if short_bps < long_bps / 2 else long_bps)
        elif (rate_bps := self._rate_bps(2)) > self.bps * (1 + self.NEAR):
            self.bps, self.told_s = min(self.nominal_bps, rate_bps), now_s
        elif self.bps < self.nominal_bps and now_s - self.told_s > self.TRUSTED_S:
            self._try_more(now_s)

    def rebase(self, now_s: float, landed_bytes: float, unsent_bytes: float) -> None:
        """As `account`, when others tell than before: what the sum gained since then says nothing of the link."""
        self._at_s, self._landed, self.unsent_bytes = now_s, landed_bytes, unsent_bytes
        self._full, self._stood = 0, False
        self._accounts.clear()
        self._accounts.append((now_s, landed_bytes))

    def _rate_bps(self, intervals: int) -> float:
        """What landed over the last so many intervals between accounts, or as many as are kept; bits/s."""
        accounts = self._accounts
        then_s, then = accounts[max(0, len(accounts) - 1 - intervals)]
        now_s, now = accounts[-1]
        return max(0.0, now - then) * 8 / (now_s - then_s) if now_s > then_s else 0.0

    def transfer(self, prefill_end_s: float, landed_s: float, kv_bytes: int) -> None:
        """A transfer from the remote site has landed."""
        waited_s = landed_s - prefill_end_s
        self.delay_s.add(landed_s, waited_s)
        if self.bps >= self.nominal_bps or landed_s < self.told_s:  # what it tells is older than what is known
            return
        if kv_bytes / self._pieces * 8 > self.FASTER * self.bps * waited_s:
            self._faster += 1
            if self._faster >= self.IN_A_ROW:
                self._try_more(landed_s)
        else:
            self._faster, self.told_s = 0, landed_s

    def _try_more(self, now_s: float) -> None:
        self.bps = min(self.nominal_bps, max(2 * self.bps, self.TRIED * self.nominal_bps))
        self.told_s = now_s

    def _learn(self, now_s: float, rate_bps: float) -> None:
        self.told_s = now_s
        if abs(rate_bps - self.bps) > self.NEAR * self.bps:
            self.bps = min(self.nominal_bps, rate_bps)
        else:
            self.bps = min(self.nominal_bps, self.bps + self.FOLLOW * (rate_bps - self.bps))


class Observed:
    """All that has been observed, for any policy. Times: model seconds.

    link_nominal_bps: the operator's figure. pieces: of a transfer from the remote site.
    """

    def __init__(self, link_nominal_bps: float, pieces: int = 1) -> None:
        self.lengths = Lengths()
        self.link = LinkEstimate(link_nominal_bps, pieces)
        self.queue_s = {"prfaas": Series(30.0), "pd": Series(30.0)}  # prefill work waiting a node, mean over a site
        self.decode_load = Series(30.0)  # requests a slot, those on their way included
        self.retransmits = Series(30.0)  # at the remote senders, cumulative
        self.rtt_s = Series(30.0)
        self.least_rtt_s = math.inf
        self._outputs: deque[int] = deque(maxlen=WINDOW)
        self._output_sum = 0

    def answered(self, output_tokens: int) -> None:
        """An answer has ended, of that many tokens."""
        outputs = self._outputs
        if len(outputs) == WINDOW:
            self._output_sum -= outputs[0]
        outputs.append(output_tokens)
        self._output_sum += output_tokens

    @property
    def output_tokens(self) -> float | None:
        """Mean L_out of the answers that have ended lately, tokens; None before the first."""
        return self._output_sum / len(self._outputs) if self._outputs else None

    def path(self, now_s: float, rtt_s: float, retransmits: int) -> None:
        """What TCP says at the remote senders: the longest smoothed round trip (0: unknown), all retransmissions."""
        self.retransmits.add(now_s, retransmits)
        if rtt_s > 0:
            self.rtt_s.add(now_s, rtt_s)
            self.least_rtt_s = min(self.least_rtt_s, rtt_s)

    @property
    def rtt_inflation(self) -> float:
        """The round trip of late over the least one seen; 1 when unknown."""
        mean_s = self.rtt_s.mean
        return mean_s / self.least_rtt_s if mean_s is not None else 1.0
