"""What a scenario offers: lengths, arrivals, conversations, and the number types that all of a scenario is made of."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from netem.link import LinkError, parse_rate


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _whole(value: Any) -> Any:
    """64e9 is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rate(value: Any) -> float:
    try:
        return parse_rate(value)
    except LinkError as error:
        raise ValueError(str(error).removeprefix(f"rate: {value!r} ")) from None


Number = Annotated[float, AfterValidator(_finite)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_finite)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
Rate = Annotated[float, BeforeValidator(_rate)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Part(BaseModel):
    """Base of every part of a scenario: unknown keys are refused, values are never coerced from other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LogNormal(Part):
    """Truncated log-normal input lengths: ln l ~ N(mu, sigma), min_tokens <= l <= max_tokens."""

    kind: Literal["lognormal"] = "lognormal"
    mu: Number = 9.90
    sigma: Positive = 1.00
    min_tokens: Count = 128
    max_tokens: Count = 131072

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        if self.min_tokens >= self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must be below max_tokens {self.max_tokens}")
        return self

    @property
    def longest_tokens(self) -> int:
        return self.max_tokens


class Mix(Part):
    """A discrete mix of input lengths."""

    kind: Literal["mix"] = "mix"
    values: Annotated[list[Count], Field(min_length=1)]
    weights: list[Positive]

    @model_validator(mode="after")
    def _paired(self) -> Mix:
        if len(self.values) != len(self.weights):
            raise ValueError(f"{len(self.values)} values but {len(self.weights)} weights; give one weight a value")
        return self

    @property
    def longest_tokens(self) -> int:
        return max(self.values)


def check_one_rate(rate_rps: float | None, load_fraction: float | None) -> None:
    """Raises ValueError when a load is given in both ways."""
    if rate_rps is not None and load_fraction is not None:
        raise ValueError(f"rate_rps = {rate_rps:g} and load_fraction = {load_fraction:g} are both set; remove one")


class RateState(Part):
    """A state of mmpp arrivals: its rate, in the ratio of the others', and how long it lasts, in the mean."""

    multiplier: Annotated[Number, Field(ge=0)]
    sojourn_s: Positive


class Arrivals(Part):
    """When requests come. Traces: as-is or spread. Synthetic workloads: poisson, uniform, gamma (cv > 0), mmpp (the
    rate switches among states) or diurnal (it swings as a sine of period_s by amplitude); see traces/arrivals.py."""

    kind: Literal["poisson", "gamma", "uniform", "mmpp", "diurnal", "as-is", "spread"] = "poisson"
    cv: Positive | None = None
    states: list[RateState] = []
    period_s: Positive | None = None
    amplitude: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _of_its_kind(self) -> Arrivals:
        for key, kind, what in (
            ("cv", "gamma", "the coefficient of variation of the gaps, such as 2; 1 is poisson"),
            ("states", "mmpp", "such as [{multiplier: 1, sojourn_s: 60}, {multiplier: 8, sojourn_s: 5}]"),
            ("period_s", "diurnal", "the length of a day, such as 86400"),
            ("amplitude", "diurnal", "the swing's share of the mean rate, from 0 to 1, such as 0.5"),
        ):
            value = getattr(self, key)
            if self.kind == kind and value in (None, []):
                raise ValueError(f"kind {kind} needs {key}, {what}")
            if self.kind != kind and value not in (None, []):
                shown = f"{key} = {value:g}" if isinstance(value, float) else key
                raise ValueError(f"{shown}: has no meaning for {self.kind} arrivals; leave it out, or use {kind}")
        if self.kind == "mmpp" and (len(self.states) < 2 or not any(state.multiplier for state in self.states)):
            raise ValueError(
                "states: mmpp arrivals need at least two, and one with a multiplier above 0; use poisson for a steady "
                "rate"
            )
        return self


class Sessions(Part):
    """Conversations: the requests are their turns, whose prompts grow and share prefixes; see traces/sessions.py.

    `workload.lengths` is then the new user tokens of every turn, and `workload.arrivals` when conversations begin.
    """

    turns_mean: Annotated[Number, Field(ge=1)]
    think_s: Positive
    turns_max: Count = 64
    system_tokens: Annotated[Whole, Field(ge=0)] = 0
    max_input_tokens: Count = 131072
    block_size: Count = 512


class Workload(Part):
    """What is offered: a trace, or synthetic lengths and arrivals, at a rate or a fraction of Lambda_max."""

    trace: str | None = None
    lengths: Annotated[LogNormal | Mix, Field(discriminator="kind")] = LogNormal()
    output_tokens: Count = 1024
    arrivals: Arrivals = Arrivals()
    sessions: Sessions | None = None
    rate_rps: Positive | None = None
    load_fraction: Annotated[float, Field(gt=0, le=10)] | None = None
    duration_s: Positive = 600.0
    warmup_s: Annotated[Number, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        check_one_rate(self.rate_rps, self.load_fraction)
        if self.rate_rps is None and self.load_fraction is None and self.trace is None:
            raise ValueError("set rate_rps (requests a model second) or load_fraction (of the deployment's Lambda_max)")
        if self.warmup_s >= self.duration_s:
            raise ValueError(f"warmup_s {self.warmup_s:g} must be below duration_s {self.duration_s:g}")
        of_trace = self.arrivals.kind in ("as-is", "spread")
        if of_trace and self.trace is None:
            raise ValueError(
                f"arrivals.kind {self.arrivals.kind} needs a trace; use poisson, gamma, uniform, mmpp or diurnal, or "
                "name a trace"
            )
        if self.trace is not None and not of_trace:
            raise ValueError(
                f"arrivals.kind {self.arrivals.kind} is for synthetic workloads; use as-is or spread with a trace"
            )
        if self.sessions is not None:
            if self.trace is not None:
                raise ValueError("sessions are for synthetic workloads, a trace has its own; remove one of them")
            first = self.sessions.system_tokens + self.lengths.longest_tokens
            if first > self.sessions.max_input_tokens:
                raise ValueError(
                    f"sessions.max_input_tokens = {self.sessions.max_input_tokens}: below the {first} tokens of "
                    "sessions.system_tokens and the longest of lengths, the user's tokens of a turn; shorten those"
                )
        return self

    @property
    def longest_tokens(self) -> int:
        """The longest prompt of a synthetic workload."""
        return self.lengths.longest_tokens if self.sessions is None else self.sessions.max_input_tokens
