"""Synthetic workloads: lengths, arrivals and output lengths drawn from stated distributions, repeatable from a seed.

A workload's identity is the sha256 of its parameters. Arrivals, input lengths and output lengths have random streams
of their own, so a change of rate or of burstiness leaves the sequence of lengths as it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from traces.load import Trace
from traces.request import Request, TraceError
from traces.rows import Floats, Ints

MOST_REQUESTS = 20_000_000
ARRIVALS = ("poisson", "gamma", "uniform")
GENERATOR = "prfaas synthetic 1, numpy PCG64"


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
        bursty, below 1 regular); ``uniform``, one every 1/rate_rps s from 0 on.
    cv: > 0, for gamma only. seed: >= 0.
    Raises TraceError for anything else, and for more than MOST_REQUESTS requests.
    """

    rate_rps: float
    duration_s: float
    lengths: LogNormalLengths | DiscreteLengths = field(default_factory=LogNormalLengths)
    output_tokens: int | tuple[int, int] = 1024
    arrivals: Literal["poisson", "gamma", "uniform"] = "poisson"
    cv: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate_rps", "duration_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TraceError(f"synthetic: {name} = {value}: must be a finite number above 0")
        if self.rate_rps * self.duration_s > MOST_REQUESTS:
            raise TraceError(
                f"synthetic: {self.rate_rps:g} requests/s for {self.duration_s:g} s is more than {MOST_REQUESTS:,} "
                "requests; lower rate_rps or duration_s"
            )
        if self.arrivals not in ARRIVALS:
            raise TraceError(f"synthetic: arrivals = {self.arrivals!r}: must be one of {', '.join(ARRIVALS)}")
        if self.arrivals == "gamma":
            if self.cv is None or not (math.isfinite(self.cv) and self.cv > 0):
                raise TraceError(
                    f"synthetic: cv = {self.cv}: gamma arrivals need a finite cv above 0; for 0 use uniform"
                )
        elif self.cv is not None:
            raise TraceError(f"synthetic: cv = {self.cv} with {self.arrivals} arrivals: leave it out, or use gamma")
        low, high = self._output_range()
        if not 1 <= low <= high:
            raise TraceError(f"synthetic: output_tokens = {self.output_tokens}: must be at least 1 token, low <= high")
        if self.seed < 0:
            raise TraceError(f"synthetic: seed = {self.seed}: must be 0 or more")

    def identity(self) -> str:
        """sha256 of the canonical parameters (sorted keys, numbers as floats), seed included: the trace's identity."""
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
                },
                option=orjson.OPT_SORT_KEYS,
            )
        ).hexdigest()

    def generate(self) -> Trace:
        """The workload as a Trace of format ``synthetic``, equal for equal parameters (on one version of numpy).

        Raises TraceError when no arrival falls inside the duration.
        """
        for_arrivals, for_inputs, for_outputs = (
            np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(self.seed).spawn(3)
        )
        arrivals = self._arrivals(for_arrivals)
        if not len(arrivals):
            raise TraceError(
                f"synthetic: no arrival in {self.duration_s:g} s at {self.rate_rps:g} requests/s; "
                "raise duration_s or rate_rps"
            )
        low, high = self._output_range()
        inputs = self.lengths.sample(for_inputs, len(arrivals))
        outputs = for_outputs.integers(low, high, size=len(arrivals), endpoint=True)
        requests = [Request(*row) for row in zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), strict=True)]
        return Trace(requests, len(requests), {}, [], "synthetic", self.identity(), "synthetic")

    def _output_range(self) -> tuple[int, int]:
        return self.output_tokens if isinstance(self.output_tokens, tuple) else (self.output_tokens, self.output_tokens)

    def _arrivals(self, rng: np.random.Generator) -> Floats:
        """Arrival times in [0, duration_s). The first gap is a whole one: the process starts as if a request had come
        at 0."""
        if self.arrivals == "uniform":
            times = np.arange(math.ceil(self.rate_rps * self.duration_s) + 1) / self.rate_rps
            return np.asarray(times[times < self.duration_s], dtype=np.float64)
        chunks: list[npt.NDArray[np.float64]] = []
        now_s = 0.0
        for gaps in self._gaps(rng):
            times = now_s + np.cumsum(gaps)
            chunks.append(times)
            now_s = float(times[-1])
            if now_s >= self.duration_s:
                break
        times = np.concatenate(chunks)
        return np.asarray(times[times < self.duration_s], dtype=np.float64)

    def _gaps(self, rng: np.random.Generator) -> Iterator[Floats]:
        count = math.ceil(self.rate_rps * self.duration_s) + 64
        while True:
            if self.arrivals == "poisson":
                yield rng.exponential(1 / self.rate_rps, count)
            else:
                assert self.cv is not None
                yield rng.gamma(1 / self.cv**2, self.cv**2 / self.rate_rps, count)
