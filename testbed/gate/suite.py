"""A suite: the scenarios in which two policies are compared, and what has to be no worse in each. One YAML file.

`load(name_or_path)` reads a shipped one by name or any file by path; every error names the file, the key, the value and
the remedy. `resolve` makes the scenarios that are run of it.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from testbed import scenario as scenarios
from testbed.assemble import at_fixed_rates
from testbed.scenario import Scenario, ScenarioError
from testbed.scenario_data import did_you_mean, read, text_of
from testbed.scenario_errors import explain
from testbed.scenario_workload import Count, Name, Part, Whole

SHIPPED = resources.files("testbed") / "suites"

LAMBDA_MAX: Final = "lambda_max_rps"
"""The metric of a scenario with `load_fractions`: the rate at which its P90 TTFT reaches the SLO."""

UNITS: Final = {"s": "s", "rps": "req/s", "bps": "bit/s", "bytes": "bytes", "tokens": "tokens", "fraction": "share"}
ROOTS: Final = (
    "ttft_s", "tpot_s", "e2e_s", "ttft_split_s", "ttft_by_route_s", "offered_rps", "throughput_rps", "goodput_rps",
    "slo", "offload_fraction", "egress_bps", "egress_queue_s", "requests", "scheduler", "phases", LAMBDA_MAX,
)  # fmt: skip


class Objective(Part):
    """A figure of a run's summary, which way is better, and the least change that counts.

    metric: its dotted path there (a phase goes by its name: `phases.drop.ttft_s.p90`), or `lambda_max_rps`. minimum:
    `2%` of the baseline's value, or a number in the metric's own unit.
    """

    metric: str
    better: Literal["lower", "higher"]
    minimum: Annotated[float, Field(gt=0)] | str

    @field_validator("metric")
    @classmethod
    def _of_a_summary(cls, metric: str) -> str:
        root = metric.partition(".")[0]
        if root not in ROOTS:
            raise ValueError(
                f"{did_you_mean(root, ROOTS)}a path in a run's summary.json begins with {', '.join(ROOTS)}"
            )
        return metric

    @field_validator("minimum")
    @classmethod
    def _some(cls, minimum: float | str) -> float | str:
        if isinstance(minimum, str) and not re.fullmatch(r"(?!0+(\.0+)?%)\d+(\.\d+)?%", minimum):
            raise ValueError("must be a share such as 2%, or a number in the metric's unit, above 0")
        return minimum

    @property
    def relative(self) -> bool:
        """Whether arms are compared by their ratio."""
        return isinstance(self.minimum, str)

    @property
    def least(self) -> float:
        """The minimum: a share if relative, else in the metric's unit."""
        return float(self.minimum[:-1]) / 100 if isinstance(self.minimum, str) else self.minimum

    @property
    def unit(self) -> str:
        """Of the metric's values."""
        for part in reversed(self.metric.split(".")):
            if (unit := UNITS.get(part.rpartition("_")[2])) is not None:
                return unit
        return ""


class Compared(Part):
    """A scenario of the suite. scenario: a shipped one's name, or a file's path. set: its overrides, `key=value` as
    `--set` takes them; `bounds` among them are promises. load_fractions: rates to run it at, one after another, as
    shares of its own Lambda_max; for the metric `lambda_max_rps`. least_seeds, most_seeds: other than the suite's.
    """

    name: Name
    description: str
    scenario: str
    deployment: str | None = None
    set: list[str] = Field(default_factory=list)
    clock: Literal["virtual", "wire"] = "virtual"
    load_fractions: Annotated[list[Annotated[float, Field(gt=0, le=2)]], Field(min_length=3)] | None = None
    least_seeds: Count | None = None
    most_seeds: Count | None = None
    objectives: Annotated[list[Objective], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Compared:
        metrics = [objective.metric for objective in self.objectives]
        if twice := {metric for metric in metrics if metrics.count(metric) > 1}:
            raise ValueError(f"objectives: {sorted(twice)[0]} is there twice; leave one out")
        loads = self.load_fractions
        if (loads is not None) != (metrics == [LAMBDA_MAX]):
            raise ValueError(
                f"objectives: {LAMBDA_MAX} is of a scenario with load_fractions, and its only objective; add or remove "
                "load_fractions"
            )
        if loads is not None and (loads != sorted(set(loads)) or self.clock == "wire"):
            raise ValueError("load_fractions: must rise, and are for virtual time")
        return self


class Seeds(Part):
    """Runs an arm. first: the first seed. least: before anything is decided. most: then it ends. a_round: between two
    looks."""

    first: Annotated[Whole, Field(ge=0)] = 1000
    least: Annotated[Whole, Field(ge=2)]
    most: Annotated[Whole, Field(ge=2)]
    a_round: Count = 4

    @model_validator(mode="after")
    def _ordered(self) -> Seeds:
        if self.least > self.most:
            raise ValueError(f"least = {self.least}: more than most = {self.most}; lower it")
        return self


class Suite(Part):
    """alpha: the chance, over all objectives of the suite, that a claim of better or worse is false. set: overrides of
    every scenario, before its own."""

    name: Name
    description: str
    set: list[str] = Field(default_factory=list)
    alpha: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    seeds: Seeds
    scenarios: Annotated[list[Compared], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole(self) -> Suite:
        names = [one.name for one in self.scenarios]
        if len(set(names)) != len(names):
            raise ValueError(f"scenarios: names must differ, and {', '.join(names)} do not; rename one")
        for one in self.scenarios:
            if self.least_of(one) > self.most_of(one):
                raise ValueError(f"scenarios.{one.name}: least_seeds is more than most_seeds; lower it")
        return self

    @property
    def objectives(self) -> int:
        """How many there are: each gets its share of alpha."""
        return sum(len(one.objectives) for one in self.scenarios)

    @property
    def share(self) -> float:
        """Bonferroni's: the alpha of one objective."""
        return self.alpha / self.objectives

    def least_of(self, one: Compared) -> int:
        return one.least_seeds or self.seeds.least

    def most_of(self, one: Compared) -> int:
        return one.most_seeds or self.seeds.most

    def sha256(self) -> str:
        """The same for equal suites, whatever file they are from."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def shipped() -> list[str]:
    """Names of the shipped suites."""
    return sorted(entry.name[: -len(".yaml")] for entry in SHIPPED.iterdir() if entry.name.endswith(".yaml"))


def load(name_or_path: str) -> Suite:
    """A suite by its shipped name or by path. Raises ScenarioError."""
    text, source = text_of(name_or_path, "suite", shipped(), SHIPPED)
    data = read(text, source)
    try:
        return Suite.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {explain(one, data, _known_keys)}" for one in _without_types(error.errors())]
        raise ScenarioError("\n".join(dict.fromkeys(lines))) from None


def _without_types(errors: list[Any]) -> list[Any]:
    """Which type of a minimum was tried is not part of its place."""
    tried = ("float", "str", "constrained-str", "constrained-float")
    return [{**one, "loc": tuple(step for step in one["loc"] if step not in tried)} for one in errors]


def _known_keys(loc: list[str]) -> list[str]:
    parts: dict[str, type[Part]] = {"seeds": Seeds, "scenarios": Compared, "objectives": Objective}
    names = [step for step in loc if step in parts]
    return sorted((parts[names[-1]] if names else Suite).model_fields)


def resolve(suite: Suite, one: Compared) -> Scenario:
    """Its scenario with one deployment, every load as the rate that it is under that deployment's own policy, and what
    only the gate sets left as it is there (policy and seed). Raises ScenarioError, TraceError and ModelError."""
    made = scenarios.load(one.scenario, [*suite.set, *one.set]).only(one.deployment)
    for objective in one.objectives:
        name = objective.metric.split(".")[1] if objective.metric.startswith("phases.") else None
        known = [phase.name for phase in made.phases]
        if name is not None and name not in known:
            where = f"suite {suite.name}: scenarios.{one.name}: objective {objective.metric}"
            raise ScenarioError(f"{where}: {one.scenario} has no phase {name!r}; it has {', '.join(known) or 'none'}")
    return at_fixed_rates(made)
