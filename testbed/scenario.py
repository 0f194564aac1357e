"""One YAML file = one experiment, in the real system's units; `scale` says how it is shrunk to this machine.

`load(name_or_path, sets)` reads a shipped scenario by name or any file by path, applies `--set key=value`, and refuses
what it does not know: every error names the file, the key, the value and the remedy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from emulator.decode_step import AffineStep
from emulator.profile import Profile, ProfileError, load_profile
from netem.cross import MOST_SOURCES
from netem.link import LinkError
from netem.schedule import MIN_STEP_S, check, data_of
from netem.token_bucket import TokenBucketSpec
from testbed.phases import Phase, check_phases, total_s
from testbed.policies import unknown as unknown_policy
from testbed.scenario_bounds import Bounds
from testbed.scenario_cross import CrossTraffic, check_cross_traffic
from testbed.scenario_data import ScenarioError as ScenarioError
from testbed.scenario_data import apply_set, read, text_of
from testbed.scenario_errors import explain, message
from testbed.scenario_model import Model, check_model
from testbed.scenario_workload import (
    Arrivals,
    Count,
    LogNormal,
    Mix,
    Name,
    Number,
    Part,
    Positive,
    Rate,
    RateState,
    Sessions,
    Whole,
    Workload,
)

SHIPPED = resources.files("testbed") / "scenarios"


class Profiles(Part):
    """The profile of each site's prefill hardware; decode step and slots are the pd profile's."""

    prfaas: str | None = None
    pd: str


class Fleet(Part):
    """Instances: remote prefill, local prefill, local decode (the paper's N_prfaas, N_p, N_d)."""

    n_prfaas: Annotated[Whole, Field(ge=0, le=64)] = 0
    n_p: Annotated[Whole, Field(ge=0, le=64)] = 0
    n_d: Annotated[Whole, Field(ge=1, le=64)]

    @model_validator(mode="after")
    def _can_prefill(self) -> Fleet:
        if self.n_prfaas + self.n_p < 1:
            raise ValueError("n_prfaas + n_p must be at least 1: somebody has to prefill")
        if self.n_prfaas + self.n_p + self.n_d > 128:
            raise ValueError("more than 128 instances; the sites have 128 ports for them")
        return self


class PolicySpec(Part):
    """A policy by name (prfaas, static, naive, homogeneous, oracle) or `package.module:Class`, and its parameters by
    name."""

    name: str
    threshold_tokens: Positive | None = None
    parameters: dict[str, Number] = Field(default_factory=dict)

    @property
    def told(self) -> dict[str, float]:
        """What the policy is told in `Setup.parameters`: a dict of its own, with threshold_tokens among the others."""
        threshold = {} if self.threshold_tokens is None else {"threshold_tokens": self.threshold_tokens}
        return {**self.parameters, **threshold}

    @model_validator(mode="after")
    def _known(self) -> PolicySpec:
        if why := unknown_policy(self.name):
            raise ValueError(f"name = {self.name!r}: {why}")
        if self.threshold_tokens is not None and not takes_threshold(self.name):
            raise ValueError(
                f"threshold_tokens = {self.threshold_tokens:g}: policy {self.name} would not use it; "
                "leave it out, or use static"
            )
        if "threshold_tokens" in self.parameters:
            raise ValueError(
                f"parameters.threshold_tokens = {self.parameters['threshold_tokens']:g}: a threshold is no free "
                "parameter; set policy.threshold_tokens"
            )
        if self.parameters and self.name in WITHOUT_PARAMETERS:
            raise ValueError(
                f"parameters: policy {self.name} takes none ({', '.join(self.parameters)} would change nothing); "
                "leave them out"
            )
        return self


WITHOUT_PARAMETERS: Final = ("static", "naive", "homogeneous", "oracle")
"""The shipped policies that have no free parameters."""


def takes_threshold(policy: str) -> bool:
    """Whether a policy's threshold can be given: static's, and that of anybody's own."""
    return policy == "static" or ":" in policy


class Deployment(Part):
    """A fleet, what it runs on, and the policy in charge."""

    name: Name
    profiles: Profiles
    fleet: Fleet
    policy: PolicySpec

    @model_validator(mode="after")
    def _remote_has_profile(self) -> Deployment:
        if self.fleet.n_prfaas and self.profiles.prfaas is None:
            raise ValueError(
                f"fleet.n_prfaas is {self.fleet.n_prfaas}, but profiles.prfaas is missing; name that site's profile"
            )
        return self


def _course(given: dict[str, Any]) -> dict[str, Any]:
    """A schedule's data with its defaults; of a recorded one as it is: its file is read when it is needed."""
    try:
        made = check(given)
    except LinkError as error:
        raise ValueError(str(error).removeprefix("schedule.")) from None
    data = given if made is None else data_of(made) if isinstance(made, TokenBucketSpec) else made.to_data()
    return {key: value for key, value in data.items() if key != "seed" or key in given}


Course = Annotated[dict[str, Any], AfterValidator(_course)]


class Link(Part):
    """The link between the sites, each direction. rate_bps: bits/s (or a string such as "16gbps"), nominal where a
    schedule changes it (`netem.schedule`: a kind and its parameters). per_flow_bps: the most one connection gets.
    cross_traffic: what else crosses it.

    delay_s: one-way, model seconds (a round trip takes twice that); jitter_s moves it by up to that much either way,
    without reordering; loss: the fraction of packets that never arrive. What TCP makes of loss does not scale: take
    scale.time_scale = 1 to read anything into it.
    """

    rate_bps: Rate
    schedule: Course | None = None
    per_flow_bps: Rate | None = None
    cross_traffic: Annotated[list[CrossTraffic], Field(max_length=MOST_SOURCES)] = Field(default_factory=list)
    congestion_control: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] = "cubic"
    delay_s: Annotated[Number, Field(ge=0)] = 0.0
    jitter_s: Annotated[Number, Field(ge=0)] = 0.0
    loss: Annotated[Number, Field(ge=0, le=0.5)] = 0.0

    @model_validator(mode="after")
    def _arrives_after_it_left(self) -> Link:
        if self.jitter_s > self.delay_s:
            raise ValueError(
                f"jitter_s = {self.jitter_s:g}: more than delay_s = {self.delay_s:g}, and nothing arrives before it "
                "is sent; lower it, or raise delay_s"
            )
        return self


class Transport(Part):
    """How KV moves: connections a (sender, receiver) pair, pieces a transfer, buffers at both ends (model bytes)."""

    connections: Annotated[Whole, Field(ge=1, le=64)] = 4
    pieces: Annotated[Whole, Field(ge=1, le=1024)] | None = None
    outbox_bytes: Count = 32 * 2**30
    landing_bytes: Count = 64 * 2**30


class DecodeStep(Part):
    """A decode step that depends on its batch: base_s + per_request_s x requests + per_kv_token_s x their KV tokens."""

    base_s: Positive
    per_request_s: Annotated[Number, Field(ge=0)] = 0.0
    per_kv_token_s: Annotated[Number, Field(ge=0)] = 0.0


class Decode(Part):
    """Overrides of the pd profile's decode step and slots, and how many tokens a streamed event carries.

    step_s alone is a constant step; with `step`, it is what the closed form and policies reckon with.
    """

    step_s: Positive | None = None
    step: DecodeStep | None = None
    slots: Annotated[Whole, Field(ge=1, le=4096)] | None = None
    stream_interval: Annotated[Whole, Field(ge=1, le=4096)] = 1


class Scale(Part):
    """time_scale: model seconds a wall second. byte_scale: wall bytes a model byte."""

    time_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    byte_scale: Annotated[float, Field(gt=0, le=1)] = 1.0

    def wall_bps(self, model_bps: float) -> float:
        """A model rate as this machine's wire carries it: x byte_scale x time_scale."""
        return model_bps * self.byte_scale * self.time_scale

    def model_bps(self, wall_bps: float) -> float:
        """The inverse."""
        return wall_bps / (self.byte_scale * self.time_scale)

    def wall_s(self, model_s: float) -> float:
        """A model time as it passes on this machine: / time_scale."""
        return model_s / self.time_scale


class Slo(Part):
    """What users were promised, model seconds."""

    ttft_p90_s: Positive = 6.0
    tpot_s: Positive = 0.025


class Meter(Part):
    """When a run is no measurement: p99 lateness (wall seconds) of client, workers' timers or gateway, and CPU use."""

    late_p99_s: Positive = 0.020
    cpu_fraction: Annotated[float, Field(gt=0, le=1)] = 0.90


class Limits(Part):
    """What may wait; null for no bound. deadline_s: model seconds from a request's arrival to its first token.
    waiting_requests: requests before their first token, wherever they wait."""

    deadline_s: Positive | None = None
    waiting_requests: Count | None = None


class Scheduler(Part):
    """tick_s: model seconds between two looks that a policy takes at the system, besides those at every request."""

    tick_s: Positive = 1.0


class Cache(Part):
    """The prefix cache's blocks: tokens a block. `cache_bytes` is its room, on each node that prefills."""

    block_tokens: Count = 512


class Scenario(Part):
    """An experiment, in the real system's units.

    backend: `timing` emulates GPUs by their profiles, `hybrid` computes with a small real model, `model`, and the
    profiles are what was measured of it. cache_bytes: of the prefix cache on each node that prefills; 0 for none.
    reload_s: how long an instance takes to change its role, once it is drained. telemetry_s: between a worker's
    accounts of itself. log_level: from which on the processes of a testbed log.
    """

    name: Name
    description: str = ""
    backend: Literal["timing", "hybrid"] = "timing"
    model: Model = Model()
    deployments: Annotated[list[Deployment], Field(min_length=1)]
    cache_bytes: Annotated[Whole, Field(ge=0)] = 0
    cache: Cache = Cache()
    workload: Workload
    phases: list[Phase] = Field(default_factory=list)
    link: Link
    transport: Transport = Transport()
    decode: Decode = Decode()
    scale: Scale = Scale()
    slo: Slo = Slo()
    meter: Meter = Meter()
    seed: Annotated[Whole, Field(ge=0)] = 1
    telemetry_s: Positive = 1.0
    max_attempts: Annotated[Whole, Field(ge=1, le=20)] = 3
    limits: Limits = Limits()
    scheduler: Scheduler = Scheduler()
    bounds: Bounds = Bounds()
    reload_s: Positive = 60.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _as_long_as_its_phases(cls, data: Any) -> Any:
        """workload.duration_s follows from the phases."""
        lasts_s = total_s(data.get("phases")) if isinstance(data, dict) else None
        workload = data.get("workload") if lasts_s is not None else None
        if not isinstance(workload, dict) or "duration_s" in workload:
            return data
        return {**data, "workload": {**workload, "duration_s": lasts_s}}

    @model_validator(mode="after")
    def _whole(self) -> Scenario:
        names = [d.name for d in self.deployments]
        if len(set(names)) != len(names):
            raise ValueError(f"deployments: names must differ, and {', '.join(names)} do not; rename one")
        check_phases(self.phases, self.workload)
        if self.backend == "hybrid":
            check_model(self)
        check_cross_traffic(self.link.cross_traffic, self.link.rate_bps, MIN_STEP_S * self.scale.time_scale)
        for phase in self.phases if self.link.schedule is not None else ():
            if phase.link_rate_bps is not None:
                raise ValueError(
                    f"phases.{phase.name}.link_rate_bps = {phase.link_rate_bps:g}: link.schedule says already what the "
                    "link does; leave one of them out"
                )
        for d in self.deployments:
            for site in ("prfaas", "pd"):
                if getattr(d.profiles, site) is not None:
                    self._check_profile(d, site)
        return self

    def _check_profile(self, deployment: Deployment, site: str) -> None:
        where = f"deployments.{deployment.name}.profiles.{site}"
        profile = _timing(getattr(deployment.profiles, site), where)
        for key in ("outbox_bytes", "landing_bytes"):
            largest = profile.s_kv(profile.last_tokens)
            if getattr(self.transport, key) < largest:
                raise ValueError(
                    f"transport.{key} = {getattr(self.transport, key)}: below the largest transfer of profile "
                    f"{profile.name}, {largest:.0f} bytes, which could then never be sent; raise it"
                )
        if self.workload.trace is not None:
            return
        key = "lengths" if self.workload.sessions is None else "sessions.max_input_tokens"
        longest = [(f"workload.{key}", self.workload.longest_tokens)]
        longest += [(f"phases.{p.name}.lengths", p.lengths.longest_tokens) for p in self.phases if p.lengths]
        for of, tokens in longest:
            if tokens > profile.last_tokens:
                raise ValueError(
                    f"{of}: up to {tokens} tokens, but {where} = {profile.name} ends at {profile.last_tokens}; shorten "
                    "the lengths, or take a profile that knows them"
                )

    def deployment(self, name: str | None = None) -> Deployment:
        """A deployment by name; the first one without a name. Raises ScenarioError for a name there is not."""
        if name is None:
            return self.deployments[0]
        for deployment in self.deployments:
            if deployment.name == name:
                return deployment
        known = ", ".join(d.name for d in self.deployments)
        raise ScenarioError(f"scenario {self.name}: no deployment {name!r}; it has {known}")

    def only(self, name: str | None, policy: str | None = None) -> Scenario:
        """This scenario with that one deployment, and, when given, another policy for it.

        Another policy takes over the threshold if it takes one; free parameters are the old one's and go with it.
        """
        deployment = self.deployment(name)
        if policy is not None and policy != deployment.policy.name:
            threshold = deployment.policy.threshold_tokens if takes_threshold(policy) else None
            try:
                spec = PolicySpec(name=policy, threshold_tokens=threshold)
            except ValidationError as error:
                raise ScenarioError(f"--policy {policy!r}: {message(error.errors()[0])}") from None
            deployment = deployment.model_copy(update={"policy": spec})
        return self.model_copy(update={"deployments": [deployment]})

    def profile(self, deployment: Deployment, site: Literal["prfaas", "pd"]) -> Profile | None:
        """The profile of a site, with the scenario's overrides of decode and pieces; None when the site has none."""
        name = getattr(deployment.profiles, site)
        if name is None:
            return None
        profile = _timing(name, f"deployments.{deployment.name}.profiles.{site}")
        given = self.decode.step
        step = AffineStep(given.base_s, given.per_request_s, given.per_kv_token_s) if given else None
        return profile.with_decode(step_s=self.decode.step_s, slots=self.decode.slots, step=step)

    def pieces(self, deployment: Deployment, site: Literal["prfaas", "pd"]) -> int:
        """Pieces a transfer: the scenario's, else the profile's."""
        if self.transport.pieces is not None:
            return self.transport.pieces
        profile = self.profile(deployment, site)
        assert profile is not None
        return profile.pieces

    def fingerprint(self, *, testbed_only: bool = False) -> str:
        """The same for equal scenarios, whatever file they are from. testbed_only: without what only a load needs."""
        data = self.model_dump(mode="json", exclude={"log_level"})
        if testbed_only:
            for of_the_load in ("workload", "phases", "slo", "meter", "bounds", "seed", "description"):
                del data[of_the_load]
            del data["link"]["schedule"]
            data["link"]["cross_traffic"] = bool(data["link"]["cross_traffic"])  # whether there are processes for it
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def data(self) -> dict[str, Any]:
        """The resolved scenario as plain data; its duration is said once, by the phases where there are some."""
        data = self.model_dump(mode="json")
        if self.phases:
            del data["workload"]["duration_s"]
        return data

    def to_yaml(self) -> str:
        """The resolved scenario, as the results folder keeps it."""
        return yaml.safe_dump(self.data(), sort_keys=False)


def _timing(name: str, where: str) -> Profile:
    try:
        return load_profile(name)
    except ProfileError as error:
        raise ValueError(f"{where}: {error}") from None


def shipped() -> list[str]:
    """The names of the scenarios that come with the testbed."""
    return sorted(entry.name.removesuffix(".yaml") for entry in SHIPPED.iterdir() if entry.name.endswith(".yaml"))


def load(name_or_path: str, sets: Sequence[str] = ()) -> Scenario:
    """Read a scenario by shipped name or by path, with `key=value` overrides.

    Keys are dotted, values YAML; list items go by their names or their indices.

    Raises ScenarioError, naming file, key, value and remedy.
    """
    text, source = text_of(name_or_path, "scenario", shipped(), SHIPPED)
    data = read(text, source)
    for item in sets:
        apply_set(data, item)
    return parse(data, source, overridden=bool(sets))


def override(scenario: Scenario, sets: Sequence[str]) -> Scenario:
    """A resolved scenario with `key=value` overrides. Raises ScenarioError."""
    data = scenario.data()
    for item in sets:
        apply_set(data, item)
    return parse(data, scenario.name, overridden=bool(sets))


def parse(data: dict[str, Any], source: str, *, overridden: bool = False) -> Scenario:
    """Validate a scenario's data. `source` is what errors call it."""
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        where = f"{source} with --set" if overridden else source
        lines = [f"{where}: {explain(one, data, _known_keys)}" for one in error.errors()]
        raise ScenarioError("\n".join(dict.fromkeys(lines))) from None


def _known_keys(loc: list[str]) -> list[str]:
    parts: dict[str, type[Part]] = {
        "deployments": Deployment, "profiles": Profiles, "fleet": Fleet, "policy": PolicySpec, "workload": Workload,
        "phases": Phase, "arrivals": Arrivals, "states": RateState, "sessions": Sessions,
        "link": Link, "cross_traffic": CrossTraffic, "transport": Transport, "decode": Decode, "step": DecodeStep,
        "scale": Scale, "slo": Slo, "meter": Meter, "limits": Limits, "scheduler": Scheduler, "cache": Cache,
        "model": Model,
        "bounds": Bounds,
    }  # fmt: skip
    names = [step for step in loc if not step.isdigit()]
    if names and names[-1] == "lengths":
        return sorted({*LogNormal.model_fields, *Mix.model_fields})
    return sorted((parts[names[-1]] if names and names[-1] in parts else Scenario).model_fields)
