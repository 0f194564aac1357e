"""The paper's steady-state model: equations (1)-(8), solved in closed form.

Read `conditional` (what a threshold does to both kinds of request), then `solve_threshold` (7) and `grid_search` (8).
Two forms: `mean`, the paper's, puts a conditional mean length into T_prefill and S_kv; `expectation` takes the expected
T_prefill and S_kv of the requests above, or below, the threshold. They differ as far as the profiles are not straight.

A threshold t sends every request longer than t to the PrfaaS cluster: ALL_REMOTE is the naive heterogeneous policy,
ALL_LOCAL the homogeneous one. With p = P(L > t) at 0 or 1 one ceiling is vacuous: infinite, not 0/0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
Curve: TypeAlias = Callable[[FloatArray], FloatArray]
Form: TypeAlias = Literal["mean", "expectation"]
Bottleneck: TypeAlias = Literal["prfaas_prefill", "link", "pd_prefill", "decode"]

ALL_REMOTE = 0.0
ALL_LOCAL = math.inf

TIE = 1e-9
"""Two throughputs this close, relatively, are one."""


class ModelError(ValueError):
    """An input that the model cannot be solved for. The message names it, its value and the remedy."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """The distribution of L, uncached input tokens: n lengths `atoms` (ascending, >= 1) with `weights` that sum to 1.

    Without `edges` the atoms are all there is (a trace, a window of requests, a mix of fixed lengths). With them
    (n + 1, ascending) atom i is the mean of a density over edges[i] .. edges[i + 1], and a threshold may fall inside.
    """

    atoms: FloatArray
    weights: FloatArray
    edges: FloatArray | None = None

    @classmethod
    def of_sample(cls, lengths: Iterable[float], weights: Iterable[float] | None = None) -> LengthDistribution:
        """Of lengths, in any order and repeated as they come, of equal or given relative weights (>= 0).

        A length below 1 counts as 1: of a fully cached prompt something is still computed. Raises ModelError when there
        is no length, one is not finite, or the weights do not fit.
        """
        values = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), dtype=np.float64)
        if values.size == 0 or not np.isfinite(values).all():
            raise ModelError(
                f"lengths: {values.size} of them, all finite: {bool(np.isfinite(values).all())}; give some"
            )
        shares = np.ones_like(values) if weights is None else np.asarray(list(weights), dtype=np.float64)
        if shares.shape != values.shape or not (shares >= 0).all() or not 0 < shares.sum() < math.inf:
            raise ModelError(f"weights: {shares.size} for {values.size} lengths; give one a length, >= 0, not all 0")
        atoms, which = np.unique(np.maximum(values[shares > 0], 1.0), return_inverse=True)
        sums = np.bincount(which, weights=shares[shares > 0])
        return cls(atoms, sums / sums.sum())

    @classmethod
    def log_normal(cls, mu: float, sigma: float, low: float, high: float, bins: int = 4096) -> LengthDistribution:
        """Log-normal (ln L ~ N(mu, sigma^2)) truncated to low .. high tokens, in `bins` slices of equal ratio.

        The probability and the mean of each slice are exact (partial expectations by erf). Raises ModelError unless
        sigma > 0, 1 <= low < high and the interval holds a probability above 1e-9.
        """
        if not (sigma > 0 and 1 <= low < high < math.inf and math.isfinite(mu)):
            raise ModelError(f"log-normal mu={mu} sigma={sigma} on {low}..{high}: need sigma > 0 and 1 <= low < high")
        edges = np.geomspace(low, high, bins + 1)
        edges[0], edges[-1] = low, high
        z = (np.log(edges) - mu) / sigma
        mass = np.diff(_normal_cdf(z))
        if mass.sum() < 1e-9:
            raise ModelError(f"log-normal mu={mu} sigma={sigma} has no weight on {low}..{high}: move the interval")
        moment = math.exp(mu + sigma**2 / 2) * np.diff(_normal_cdf(z - sigma))
        middles = np.sqrt(edges[:-1] * edges[1:])
        atoms = np.divide(moment, mass, out=middles, where=mass > 1e-13)
        return cls(np.clip(atoms, edges[:-1], edges[1:]), mass / mass.sum(), edges)

    @property
    def mean(self) -> float:
        """E[L], tokens."""
        return float(self.weights @ self.atoms)

    @property
    def low(self) -> float:
        """The shortest length, tokens."""
        return float(self.atoms[0] if self.edges is None else self.edges[0])

    @property
    def high(self) -> float:
        """The longest length, tokens."""
        return float(self.atoms[-1] if self.edges is None else self.edges[-1])

    def below(self, values: FloatArray, thresholds: FloatArray) -> FloatArray:
        """E[f(L); L <= t] for each threshold t, f given by its `values` at the atoms; of ones: P(L <= t)."""
        return self._at(np.concatenate(([0.0], np.cumsum(self.weights * values))), thresholds)

    def above(self, values: FloatArray, thresholds: FloatArray) -> FloatArray:
        """E[f(L); L > t] for each threshold t, f given by its `values` at the atoms; of ones: P(L > t)."""
        return self._at(np.concatenate((np.cumsum((self.weights * values)[::-1])[::-1], [0.0])), thresholds)

    def _at(self, cumulated: FloatArray, thresholds: FloatArray) -> FloatArray:
        if self.edges is None:
            taken: FloatArray = cumulated[np.searchsorted(self.atoms, thresholds, side="right")]
            return taken
        return np.interp(thresholds, self.edges, cumulated)

    def thresholds(self) -> FloatArray:
        """Every threshold worth trying, ascending: from all requests above it to none.

        Between two neighbouring atoms all thresholds route alike; such a plateau goes by its geometric middle, rounded
        down to a whole token (never below the lower atom).
        """
        if self.edges is not None:
            return self.edges
        middles = np.floor(np.sqrt(self.atoms[:-1] * self.atoms[1:]))
        return np.concatenate(([ALL_REMOTE], np.maximum(middles, self.atoms[:-1]), self.atoms[-1:]))


@dataclass(frozen=True, slots=True)
class Hardware:
    """One instance: bytes of KVCache and seconds of prefill for an array of lengths in tokens (same shape, > 0)."""

    s_kv: Curve
    t_prefill: Curve


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances: `n_prfaas` remote, `n_p` local prefill, `n_d` local decode."""

    n_prfaas: int
    n_p: int
    n_d: int


@dataclass(frozen=True, slots=True)
class System:
    """All of a deployment but its fleet. `remote` is None when there is no PrfaaS cluster.

    link_bps: B_out, bits/s from the PrfaaS cluster to the PD cluster; decode_step_s and decode_slots: T_decode and
    BS_max of one instance; output_tokens: mean L_out.
    """

    local: Hardware
    remote: Hardware | None
    link_bps: float
    decode_step_s: float
    decode_slots: int
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Conditional:
    """What each of an array of thresholds makes of the two kinds of request; all fields have that shape.

    p, q: P(L > t) and P(L <= t); l_long, l_short: conditional mean lengths, tokens; prefill_long_s, kv_long_bytes:
    T_prefill and S_kv of a request above t, remote hardware; prefill_short_s: T_prefill of one below, local hardware.
    """

    p: FloatArray
    q: FloatArray
    l_long: FloatArray
    l_short: FloatArray
    prefill_long_s: FloatArray
    kv_long_bytes: FloatArray
    prefill_short_s: FloatArray


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The terms of equation (6) for each of an array of thresholds: the arrivals, req/s, each stage could sustain."""

    compute: FloatArray
    link: FloatArray
    local: FloatArray
    decode: FloatArray

    @property
    def remote(self) -> FloatArray:
        """Theta_prfaas / p."""
        return np.minimum(self.compute, self.link)

    @property
    def prefill(self) -> FloatArray:
        """The lower of the two prefill ceilings, which equation (7) makes equal."""
        return np.minimum(self.remote, self.local)

    @property
    def lambda_max(self) -> FloatArray:
        """Equation (6)."""
        return np.minimum(self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A fleet at a threshold. Rates in req/s; a throughput that nothing asks for (p at 0 or 1) is infinite.

    l_long, l_short: conditional mean lengths, tokens; of requests that do not exist, the longest (shortest) length.
    bottleneck: the lowest term of (6); at an optimum in t two of them are equal, and either may be named.
    egress_bps: what crosses the link at lambda_max.
    """

    form: Form
    threshold_tokens: float
    fleet: Fleet
    p: float
    l_long: float
    l_short: float
    theta_prfaas: float
    theta_pd_p: float
    theta_pd_d: float
    lambda_max: float
    egress_bps: float
    bottleneck: Bottleneck


def phi_kv_bps(hardware: Hardware, tokens: FloatArray) -> FloatArray:
    """Equation (1): an instance's KV throughput, bits/s, at each length."""
    return 8 * hardware.s_kv(tokens) / hardware.t_prefill(tokens)


def cluster_egress_bps(instances: int, instance_bps: float) -> float:
    """Equation (2): bits/s out of a cluster of `instances`, each at Phi_kv of the average length."""
    return instances * instance_bps


def theta_prfaas(n_prfaas: int, link_bps: float, prefill_long_s: Any, kv_long_bytes: Any) -> Any:
    """Equation (3), req/s: the lower of what the cluster computes and what the link carries."""
    return np.minimum(n_prfaas / prefill_long_s, link_bps / (8 * kv_long_bytes))


def theta_pd_p(n_p: int, prefill_short_s: Any) -> Any:
    """Equation (4), req/s."""
    return n_p / prefill_short_s


def theta_pd_d(n_d: int, slots: int, step_s: float, output_tokens: float) -> float:
    """Equation (5), req/s."""
    return n_d * slots / (step_s * output_tokens)


def conditional(system: System, lengths: LengthDistribution, thresholds: FloatArray, form: Form) -> Conditional:
    """p, l_long, l_short and the costs of a long and a short request, for each threshold (shape (n,)).

    Where one kind of request does not exist its fields are those of the longest (shortest) length, and weigh nothing.
    """
    remote, atoms, ones = system.remote or system.local, lengths.atoms, np.ones_like(lengths.atoms)
    p, q = lengths.above(ones, thresholds), lengths.below(ones, thresholds)
    p, q = np.where(q == 0, 1.0, p), np.where(p == 0, 1.0, q)

    def given_long(values: FloatArray, otherwise: float) -> FloatArray:
        return np.divide(lengths.above(values, thresholds), p, out=np.full_like(p, otherwise), where=p > 0)

    def given_short(values: FloatArray, otherwise: float) -> FloatArray:
        return np.divide(lengths.below(values, thresholds), q, out=np.full_like(q, otherwise), where=q > 0)

    l_long = np.clip(given_long(atoms, lengths.high), lengths.low, lengths.high)
    l_short = np.clip(given_short(atoms, lengths.low), lengths.low, lengths.high)
    if form == "mean":
        costs = remote.t_prefill(l_long), remote.s_kv(l_long), system.local.t_prefill(l_short)
    else:
        t_long, s_long, t_short = remote.t_prefill(atoms), remote.s_kv(atoms), system.local.t_prefill(atoms)
        costs = given_long(t_long, t_long[-1]), given_long(s_long, s_long[-1]), given_short(t_short, t_short[0])
    return Conditional(p, q, l_long, l_short, *costs)


def ceilings(system: System, fleet: Fleet, given: Conditional) -> Ceilings:
    """The terms of equation (6), each divided by the share of requests that asks for it; infinite where none does."""

    def over(theta: FloatArray, share: FloatArray) -> FloatArray:
        return np.divide(theta, share, out=np.full_like(share, math.inf), where=share > 0)

    return Ceilings(
        compute=over(fleet.n_prfaas / given.prefill_long_s, given.p),
        link=over(system.link_bps / (8 * given.kv_long_bytes), given.p),
        local=over(theta_pd_p(fleet.n_p, given.prefill_short_s), given.q),
        decode=np.full_like(given.p, _decode(system, fleet)),
    )


def evaluate(
    system: System, fleet: Fleet, lengths: LengthDistribution, threshold_tokens: float, form: Form = "mean"
) -> OperatingPoint:
    """Equations (3)-(6) for a fleet at a threshold (>= 0, ALL_LOCAL for no offloading)."""
    given = conditional(system, lengths, np.array([threshold_tokens]), form)
    terms = ceilings(system, fleet, given)
    rates = {
        "prfaas_prefill": terms.compute,
        "link": terms.link,
        "pd_prefill": terms.local,
        "decode": terms.decode,
    }
    bottleneck: Any = min(rates, key=lambda name: rates[name][0])
    p, best = float(given.p[0]), float(terms.lambda_max[0])
    prfaas = theta_prfaas(fleet.n_prfaas, system.link_bps, given.prefill_long_s, given.kv_long_bytes)
    return OperatingPoint(
        form=form,
        threshold_tokens=threshold_tokens,
        fleet=fleet,
        p=p,
        l_long=float(given.l_long[0]),
        l_short=float(given.l_short[0]),
        theta_prfaas=float(prfaas[0]) if p > 0 else math.inf,
        theta_pd_p=float(theta_pd_p(fleet.n_p, given.prefill_short_s)[0]) if p < 1 else math.inf,
        theta_pd_d=_decode(system, fleet),
        lambda_max=best,
        egress_bps=best * p * 8 * float(given.kv_long_bytes[0]),
        bottleneck=bottleneck,
    )


def solve_threshold(system: System, fleet: Fleet, lengths: LengthDistribution, form: Form = "mean") -> OperatingPoint:
    """Equation (7): the threshold at which the two prefill ceilings cross, a whole token; the smallest of equals.

    It is where the lower of Theta_prfaas / p and Theta_pd-p / (1 - p) is highest, found by trying every threshold of
    `lengths.thresholds()`; a continuous distribution is tried again, finer, around the best. A discrete one is crossed
    between two plateaus and the better is taken. Decode plays no part: where it is the bottleneck, t still balances.
    """
    tried = lengths.thresholds()
    i = _first_best(ceilings(system, fleet, conditional(system, lengths, tried, form)).prefill)
    if lengths.edges is not None:
        tried = np.linspace(tried[max(i - 1, 0)], tried[min(i + 1, tried.size - 1)], 257)
        i = _first_best(ceilings(system, fleet, conditional(system, lengths, tried, form)).prefill)
        return evaluate(system, fleet, lengths, float(round(tried[i])), form)
    return evaluate(system, fleet, lengths, float(tried[i]), form)


def grid_search(
    system: System,
    n_prfaas: int,
    n_local: int,
    lengths: LengthDistribution,
    form: Form = "mean",
    threshold_tokens: float | None = None,
) -> list[OperatingPoint]:
    """Every split N_p + N_d = `n_local`, N_p ascending from 0, each at its own best threshold or at the one given."""
    fleets = [Fleet(n_prfaas, n_p, n_local - n_p) for n_p in range(n_local + 1)]
    if threshold_tokens is None:
        return [solve_threshold(system, fleet, lengths, form) for fleet in fleets]
    return [evaluate(system, fleet, lengths, threshold_tokens, form) for fleet in fleets]


def optimum(points: Sequence[OperatingPoint]) -> OperatingPoint:
    """Equations (7) and (8) over a grid: the highest lambda_max, the fewest local prefill instances of equals."""
    best = max(point.lambda_max for point in points)
    return min((q for q in points if q.lambda_max >= best * (1 - TIE)), key=lambda point: point.fleet.n_p)


def unloaded_ttft_s(
    system: System, lengths: LengthDistribution, threshold_tokens: float, quantile: float = 0.9
) -> tuple[float, float]:
    """Mean and `quantile` (0 .. 1) of the unloaded prefill time under a threshold, seconds: no queueing, no transfer.

    So the paper's TTFT figures are reached (inferred, `h20-1t` says how); no equation of the paper gives them.
    """
    remote = system.remote or system.local
    seconds = np.where(
        lengths.atoms > threshold_tokens, remote.t_prefill(lengths.atoms), system.local.t_prefill(lengths.atoms)
    )
    order = np.argsort(seconds, kind="stable")
    reached = np.searchsorted(np.cumsum(lengths.weights[order]), quantile * (1 - TIE))
    return float(lengths.weights @ seconds), float(seconds[order][min(int(reached), seconds.size - 1)])


def _decode(system: System, fleet: Fleet) -> float:
    return theta_pd_d(fleet.n_d, system.decode_slots, system.decode_step_s, system.output_tokens)


def _first_best(rates: FloatArray) -> int:
    return int(np.argmax(rates >= rates.max() * (1 - TIE)))


def _normal_cdf(z: FloatArray) -> FloatArray:
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z])
