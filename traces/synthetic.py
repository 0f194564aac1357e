"""Synthetic workloads: lengths, arrivals and output lengths drawn from stated distributions, repeatable from a seed.

A workload's identity is the sha256 of its parameters. Arrivals, input lengths, output lengths and the turns of
conversations have random streams of their own, so a change of rate or of burstiness leaves the sequence of lengths as
it was. ``arrivals.py`` has the arrival processes, ``sessions.py`` conversations.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import orjson

from traces import arrivals
from traces.arrivals import States
from traces.load import Trace
from traces.request import Request, TraceError
from traces.rows import Floats, Ints
from traces.sessions import Sessions

MOST_REQUESTS = 20_000_000
GENERATOR = "prfaas synthetic 1, numpy PCG64"


class NoArrivalError(TraceError):
    """A synthetic workload without a single request."""


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Log-normal(mu, sigma) conditioned on [low, high] tokens, rounded to whole tokens.

    The defaults are the paper's input lengths (section 4: mean about 27K, P(L > 19,400) = 0.496).
    Raises TraceError for sigma <= 0, a number that is not finite, or bounds other than 1 <= low < high.
    """

    mu: float = 9.90
    sigma: float = 1.00
    low_tokens: int = 128
    high_tokens: int = 131072

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and math.isfinite(self.sigma) and self.sigma > 0):
            raise TraceError(f"lengths: mu = {self.mu}, sigma = {self.sigma}: must be finite, sigma above 0")
        if not 1 <= self.low_tokens < self.high_tokens:
            raise TraceError(
                f"lengths: low_tokens = {self.low_tokens}, high_tokens = {self.high_tokens}: must be 1 <= low < high"
            )
        low, high = self._bounds()
        if high - low < 1e-6:
            raise TraceError(
                f"lengths: only {high - low:.2g} of log-normal({self.mu}, {self.sigma}) lies in "
                f"[{self.low_tokens}, {self.high_tokens}]: widen the bounds or correct mu and sigma"
            )

    def quantile(self, u: Floats) -> Floats:
        """Tokens, not rounded, below which a share u in [0, 1] of the lengths lies: the exact inverse of the
        truncated CDF."""
        low, high = self._bounds()
        inverse = NormalDist(self.mu, self.sigma).inv_cdf
        # The open interval that inv_cdf takes; the clip below makes the ends exact.
        shares = np.clip(low + np.asarray(u) * (high - low), 1e-300, 1 - 1e-16)
        tokens = np.exp([inverse(share) for share in shares.tolist()])
        return np.clip(tokens, self.low_tokens, self.high_tokens)

    @property
    def longest_tokens(self) -> int:
        """The longest that can be drawn."""
        return self.high_tokens

    def sample(self, rng: np.random.Generator, count: int) -> Ints:
        """``count`` lengths in tokens, one uniform draw each."""
        return np.rint(self.quantile(rng.random(count))).astype(np.int64)

    def canonical(self) -> dict[str, Any]:
        """The parameters as they enter the identity."""
        return {
            "lognormal": [float(self.mu), float(self.sigma)],
            "bounds_tokens": [int(self.low_tokens), int(self.high_tokens)],
        }

    def _bounds(self) -> tuple[float, float]:
        normal = NormalDist(self.mu, self.sigma)
        return normal.cdf(math.log(self.low_tokens)), normal.cdf(math.log(self.high_tokens))


@dataclass(frozen=True, slots=True)
class DiscreteLengths:
    """A mix of a few lengths, as in the walk-through's toy: (1024, 32768), half each.

    values_tokens: >= 1. weights: one a value, >= 0, not all 0; only their ratios count. Raises TraceError otherwise.
    """

    values_tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values_tokens or any(value < 1 for value in self.values_tokens):
            raise TraceError(
                f"lengths: values = {list(self.values_tokens)}: must be one or more, each at least 1 token"
            )
        if len(self.weights) != len(self.values_tokens):
            raise TraceError(
                f"lengths: {len(self.weights)} weights for {len(self.values_tokens)} values: must be one each"
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or sum(self.weights) <= 0:
            raise TraceError(f"lengths: weights = {list(self.weights)}: must be 0 or more, and not all 0")

    @property
    def longest_tokens(self) -> int:
        """The longest that can be drawn."""
        return max(self.values_tokens)

    def sample(self, rng: np.random.Generator, count: int) -> Ints:
        """``count`` lengths in tokens."""
        return rng.choice(np.array(self.values_tokens, dtype=np.int64), size=count, p=self._shares())

    def canonical(self) -> dict[str, Any]:
        """The parameters as they enter the identity: weights as shares."""
        return {"values_tokens": [int(value) for value in self.values_tokens], "shares": self._shares().tolist()}

    def _shares(self) -> Floats:
        weights = np.array(self.weights, dtype=np.float64)
        return np.asarray(weights / weights.sum(), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """The parameters of a synthetic workload.

    rate_rps: mean arrivals a second, > 0. duration_s: arrivals lie in [0, duration_s), > 0.
    lengths: of the inputs. output_tokens: one count, or (low, high), both included and equally likely.
    arrivals: ``poisson``; ``gamma``, a renewal process whose gaps have coefficient of variation ``cv`` (above 1
        bursty, below 1 regular); ``uniform``, one every 1/rate_rps s from 0 on; ``mmpp``, a Poisson process whose rate
        a Markov chain switches among ``states``; ``diurnal``, a Poisson process whose rate swings as a sine of
        ``period_s`` by ``amplitude`` around the mean, rising at 0. See ``traces.arrivals``.
    cv: > 0, for gamma only. seed: >= 0.
    states: for mmpp only: two or more (rate multiplier, mean sojourn in s); only the multipliers' ratios count.
    period_s: > 0, s; amplitude: 0 to 1. For diurnal only; rate_rps is then the mean over whole periods.
    sessions: the requests are turns of conversations. ``arrivals`` is then when conversations begin, at rate_rps /
        turns of a conversation, so that requests come at rate_rps; ``lengths`` is the new user tokens of every turn. At
        0, conversations that began earlier are under way.
    Raises TraceError for anything else, and for more than MOST_REQUESTS requests.
    """

    rate_rps: float
    duration_s: float
    lengths: LogNormalLengths | DiscreteLengths = field(default_factory=LogNormalLengths)
    output_tokens: int | tuple[int, int] = 1024
    arrivals: Literal["poisson", "gamma", "uniform", "mmpp", "diurnal"] = "poisson"
    cv: float | None = None
    seed: int = 0
    states: States = ()
    period_s: float | None = None
    amplitude: float | None = None
    sessions: Sessions | None = None

    def __post_init__(self) -> None:
        for name in ("rate_rps", "duration_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TraceError(f"synthetic: {name} = {value}: must be a finite number above 0")
        self._check_arrivals()
        low, high = self._output_range()
        if not 1 <= low <= high:
            raise TraceError(f"synthetic: output_tokens = {self.output_tokens}: must be at least 1 token, low <= high")
        if self.seed < 0:
            raise TraceError(f"synthetic: seed = {self.seed}: must be 0 or more")
        if self.sessions is not None:
            self.sessions.check_longest(self.lengths.longest_tokens)
        if self.rate_rps * (self.duration_s + self._lead_s()) > MOST_REQUESTS:
            before = f" (and {self._lead_s():g} s of conversations before it)" if self.sessions else ""
            raise TraceError(
                f"synthetic: {self.rate_rps:g} requests/s for {self.duration_s:g} s{before} is more than "
                f"{MOST_REQUESTS:,} requests; lower rate_rps or duration_s"
            )

    def _check_arrivals(self) -> None:
        if self.arrivals not in arrivals.KINDS:
            raise TraceError(f"synthetic: arrivals = {self.arrivals!r}: must be one of {', '.join(arrivals.KINDS)}")
        for name, kind in (("cv", "gamma"), ("states", "mmpp"), ("period_s", "diurnal"), ("amplitude", "diurnal")):
            value = getattr(self, name)
            if self.arrivals != kind and value not in (None, ()):
                raise TraceError(
                    f"synthetic: {name} = {value} with {self.arrivals} arrivals: leave it out, or use {kind}"
                )
        if self.arrivals == "gamma" and (self.cv is None or not (math.isfinite(self.cv) and self.cv > 0)):
            raise TraceError(f"synthetic: cv = {self.cv}: gamma arrivals need a finite cv above 0; for 0 use uniform")
        if self.arrivals == "mmpp":
            arrivals.check_states(self.states)
            round_s = sum(sojourn_s for _, sojourn_s in self.states)
            if self.duration_s / round_s * len(self.states) > MOST_REQUESTS:
                raise TraceError(
                    f"synthetic: states last {round_s:g} s in all: the mmpp would switch more than {MOST_REQUESTS:,} "
                    f"times in {self.duration_s:g} s; lengthen the sojourns"
                )
        if self.arrivals == "diurnal":
            arrivals.check_wave(self.period_s, self.amplitude)

    def identity(self) -> str:
        """sha256 of the canonical parameters (sorted keys, numbers as floats), seed included: the trace's identity.

        What only mmpp, diurnal and sessions have enters where it is used.
        """
        own: dict[str, Any] = {}
        if self.arrivals == "mmpp":
            own["states"] = [[float(multiplier), float(sojourn_s)] for multiplier, sojourn_s in self.states]
        if self.period_s is not None and self.amplitude is not None:
            own |= {"period_s": float(self.period_s), "amplitude": float(self.amplitude)}
        if self.sessions is not None:
            own["sessions"] = self.sessions.canonical()
        return hashlib.sha256(
            orjson.dumps(
                {
                    "generator": GENERATOR,
                    "rate_rps": float(self.rate_rps),
                    "duration_s": float(self.duration_s),
                    "lengths": self.lengths.canonical(),
                    "output_tokens": [int(tokens) for tokens in self._output_range()],
                    "arrivals": self.arrivals,
                    "cv": None if self.cv is None else float(self.cv),
                    "seed": int(self.seed),
                    **own,
                },
                option=orjson.OPT_SORT_KEYS,
            )
        ).hexdigest()

    def generate(self) -> Trace:
        """The workload as a Trace of format ``synthetic``, equal for equal parameters (on one version of numpy).

        Raises NoArrivalError when no arrival falls inside the duration.
        """
        for_arrivals, for_inputs, for_outputs, for_turns = (
            np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(self.seed).spawn(4)
        )
        times = self._arrivals(for_arrivals)
        low, high = self._output_range()
        notes: list[str] = []
        if self.sessions is None:
            inputs = self.lengths.sample(for_inputs, len(times))
            outputs = for_outputs.integers(low, high, size=len(times), endpoint=True)
            requests = [Request(*row) for row in zip(times.tolist(), inputs.tolist(), outputs.tolist(), strict=True)]
        else:
            rngs = for_turns, for_inputs, for_outputs
            requests = self.sessions.requests(times, self.duration_s, self.lengths, (low, high), rngs)
            begun = len({request.session for request in requests})
            notes.append(f"sessions: turns of {begun} conversations; those that began before 0 are under way")
        if not requests:
            raise NoArrivalError(
                f"synthetic: no arrival in {self.duration_s:g} s at {self.rate_rps:g} requests/s; "
                "raise duration_s or rate_rps"
            )
        return Trace(requests, len(requests), {}, notes, "synthetic", self.identity(), "synthetic")

    def _output_range(self) -> tuple[int, int]:
        return self.output_tokens if isinstance(self.output_tokens, tuple) else (self.output_tokens, self.output_tokens)

    def _lead_s(self) -> float:
        return self.sessions.lead_s if self.sessions is not None else 0.0

    def _arrivals(self, rng: np.random.Generator) -> Floats:
        """When requests come, in [0, duration_s); of sessions, when they begin, in [-lead_s, duration_s)."""
        lead_s = self._lead_s()
        length_s = lead_s + self.duration_s
        rate_rps = self.rate_rps / (self.sessions.mean_turns if self.sessions is not None else 1)
        match self.arrivals:
            case "uniform":
                times = arrivals.uniform(rate_rps, length_s)
            case "poisson":
                times = arrivals.poisson(rng, rate_rps, length_s)
            case "gamma":
                assert self.cv is not None
                times = arrivals.gamma(rng, rate_rps, length_s, self.cv)
            case "mmpp":
                times = arrivals.mmpp(rng, rate_rps, length_s, self.states)
            case "diurnal":
                assert self.period_s is not None
                assert self.amplitude is not None
                times = arrivals.diurnal(rng, rate_rps, length_s, self.period_s, self.amplitude, start_s=-lead_s)
        return times - lead_s
