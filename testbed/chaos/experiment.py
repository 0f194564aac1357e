"""An experiment: a scenario, a steady-state hypothesis, and a method (faults in time). One YAML file is one experiment.

`load(name_or_path)` reads a shipped one by name or any file by path; every error names the file, the key, the value and
the remedy. The rollback is not written down: it is that every fault heals, whatever happens, and that this is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from testbed import scenario as scenarios
from testbed.assemble import instances
from testbed.chaos import faults
from testbed.chaos.faults import Fault
from testbed.link_schedule import bucket_of
from testbed.scenario import Scenario, ScenarioError
from testbed.scenario_data import read, text_of
from testbed.scenario_errors import explain
from testbed.scenario_workload import Count, Name, Part, Positive

SHIPPED = resources.files("testbed") / "chaos" / "suite"
Clock = Literal["virtual", "wire"]
CLOCKS: tuple[Clock, ...] = ("virtual", "wire")


class Bounds(Part):
    """What has to hold of the requests that are due in a window of time. A bound that is not given is none.

    goodput: least share of them that is answered within the scenario's SLO. errors: largest share that is not answered
    at all, clients that left by themselves left out. ttft_*_s: largest percentile of those answered, model seconds.
    queue: most requests without a first token, at any time of the window.
    """

    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    errors: Annotated[float, Field(ge=0, le=1)] | None = None
    ttft_p50_s: Positive | None = None
    ttft_p90_s: Positive | None = None
    ttft_p99_s: Positive | None = None
    queue: Count | None = None

    @property
    def given(self) -> dict[str, float]:
        """The bounds that are, by name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class Hypothesis(Part):
    """The steady state. before: of requests that are over when the first fault begins. during: of those under way then,
    or due until recovery_s (model seconds) after the last healing. after: of those due from then to the load's end."""

    before: Bounds
    during: Bounds = Bounds()
    after: Bounds
    recovery_s: Positive

    @model_validator(mode="after")
    def _says_something(self) -> Hypothesis:
        for name in ("before", "after"):
            if not getattr(self, name).given:
                raise ValueError(f"{name}: no bound, so that nothing could break it; give one")
        return self


class Experiment(Part):
    """scenario: a shipped one's name, or a file's path. set: its overrides, `key=value` as `--set` takes them. clocks:
    where it makes sense. short: whether it is part of the short suite on the wire."""

    name: Name
    description: str
    scenario: str
    set: list[str] = Field(default_factory=list)
    clocks: list[Clock] = Field(default_factory=lambda: list(CLOCKS), min_length=1)
    short: bool = False
    hypothesis: Hypothesis
    method: Annotated[list[Fault], Field(min_length=1)]

    @property
    def begins_s(self) -> float:
        """When the first fault begins, model seconds."""
        return min(fault.at_s for fault in self.method)

    @property
    def healed_s(self) -> float:
        """When the last fault has healed, model seconds."""
        return max(fault.healed_s for fault in self.method)

    def windows(self, scenario: Scenario) -> dict[str, tuple[float, float]]:
        """Its windows of time, model seconds."""
        begins_s, recovered_s = self.begins_s, self.healed_s + self.hypothesis.recovery_s
        return {
            "before": (scenario.workload.warmup_s, begins_s),
            "during": (begins_s, recovered_s),
            "after": (recovered_s, scenario.workload.duration_s),
        }

    def resolved(self, seed: int | None = None) -> Scenario:
        """Its scenario, with one deployment. Raises ScenarioError for one that does not go with the faults."""
        made = scenarios.load(self.scenario, self.set).only(None)
        if seed is not None:
            made = made.model_copy(update={"seed": seed})
        self._check(made)
        return made

    def _check(self, scenario: Scenario) -> None:
        for name, (start_s, end_s) in self.windows(scenario).items():
            if end_s <= start_s:
                raise ScenarioError(
                    f"experiment {self.name}: the window {name} would be from {start_s:g} to {end_s:g} s: "
                    f"workload.warmup_s = {scenario.workload.warmup_s:g}, the faults from {self.begins_s:g} to "
                    f"{self.healed_s:g} s, hypothesis.recovery_s = {self.hypothesis.recovery_s:g} and "
                    f"workload.duration_s = {scenario.workload.duration_s:g} leave it nothing; move them apart"
                )
        known = {name: role for name, _, role in instances(scenario.deployments[0])}
        taken: dict[str, list[Any]] = {}
        for index, fault in enumerate(self.method):
            where = f"experiment {self.name}: method.{index} ({fault.kind})"
            for node in fault.nodes:
                if node not in known:
                    raise ScenarioError(f"{where}: node = {node!r}: no such worker; there are {', '.join(known)}")
                if isinstance(fault, faults.LandingFull) and known[node] != "decode":
                    raise ScenarioError(f"{where}: node = {node!r}: a {known[node]} node has no landing room")
            if isinstance(fault, faults.LINK) and bucket_of(scenario) is not None:
                raise ScenarioError(f"{where}: the link of {scenario.name} follows a token bucket; take another kind")
            for node in self._away(fault, known):
                for other in taken.setdefault(node, []):
                    if fault.at_s <= other.healed_s and other.at_s <= fault.healed_s:
                        raise ScenarioError(
                            f"{where}: {node} is {other.kind} from {other.at_s:g} to {other.healed_s:g} s already; "
                            "move one of them"
                        )
                taken[node].append(fault)

    @staticmethod
    def _away(fault: Any, known: Mapping[str, str]) -> tuple[str, ...]:
        if isinstance(fault, faults.LostSite):
            return tuple(name for name in known if name.startswith("prfaas-"))
        return fault.nodes if isinstance(fault, faults.PROCESS) else ()

    def check_clock(self, clock: Clock) -> None:
        """Raises ScenarioError for a clock on which it makes no sense."""
        if clock not in self.clocks:
            raise ScenarioError(
                f"experiment {self.name}: clocks = {', '.join(self.clocks)}: it makes no sense "
                f"{'in virtual time' if clock == 'virtual' else 'on the wire'}; take --clock {self.clocks[0]}"
            )
        for index, fault in enumerate(self.method if clock == "virtual" else ()):
            lossy = isinstance(fault, faults.LossBurst)
            if lossy or (isinstance(fault, faults.DelaySpike) and fault.jitter_s):
                what = "loses nothing: what TCP makes of loss does not scale" if lossy else "has no jitter"
                raise ScenarioError(
                    f"experiment {self.name}: method.{index} ({fault.kind}): virtual time's link {what}; "
                    "take --clock wire"
                )


def shipped() -> list[str]:
    """The names of the experiments that come with the testbed."""
    return sorted(entry.name.removesuffix(".yaml") for entry in SHIPPED.iterdir() if entry.name.endswith(".yaml"))


def suite(clock: Clock) -> list[Experiment]:
    """The shipped suite: what makes sense in virtual time; on the wire, the short part of it."""
    every = [load(name) for name in shipped()]
    return [one for one in every if clock in one.clocks and (one.short or clock == "virtual")]


def load(name_or_path: str) -> Experiment:
    """An experiment by its shipped name or by path. Raises ScenarioError."""
    text, source = text_of(name_or_path, "experiment", shipped(), SHIPPED)
    return parse(read(text, source), source)


def parse(data: dict[str, Any], source: str) -> Experiment:
    """Validate an experiment's data. `source` is what errors call it. Raises ScenarioError."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {explain(one, data, _known_keys)}" for one in _without_tags(error.errors())]
        raise ScenarioError("\n".join(lines)) from None


def _without_tags(errors: Sequence[Any]) -> list[Any]:
    """A fault's kind is not part of its place."""
    kinds = set(_kinds())
    return [{**one, "loc": tuple(step for step in one["loc"] if step not in kinds)} for one in errors]


def _kinds() -> dict[str, type[Part]]:
    classes = (
        faults.LinkSteps, faults.Outage, faults.LossBurst, faults.DelaySpike, faults.SlowWorker, faults.KilledWorker,
        faults.FrozenWorker, faults.LostSite, faults.LandingFull, faults.ClientsLeave, faults.LoadStalls,
    )  # fmt: skip
    return {one.model_fields["kind"].default: one for one in classes}


def _known_keys(loc: list[str]) -> list[str]:
    names = [step for step in loc if not step.isdigit()]
    last = names[-1] if names else ""
    if last == "method":
        return sorted({key for one in _kinds().values() for key in one.model_fields})
    part: type[Part] = Experiment
    if last == "hypothesis":
        part = Hypothesis
    elif last in ("before", "during", "after"):
        part = Bounds
    return sorted(part.model_fields)
