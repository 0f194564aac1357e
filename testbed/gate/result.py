"""What a gate says, as data: its `summary.json`, which reports, the pytest plug-in and CI read.

Differences are candidate less baseline, seed by seed. A *relative* objective is compared in ln(candidate / baseline),
and told as the share by which the candidate is larger (0.05: 5 % more); an absolute one in its own unit. Values and
seeds are lists of one length, in the order in which they were run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from testbed.scenario_data import ScenarioError
from traces.client_rows import FAILED, INCONCLUSIVE, INVALID, PASS

Verdict = Literal["better", "same", "worse", "inconclusive", "invalid"]
ArmName = Literal["baseline", "candidate"]

EXIT_CODES: Final[dict[Verdict, int]] = {
    "better": PASS,
    "same": PASS,
    "worse": FAILED,
    "invalid": INVALID,
    "inconclusive": INCONCLUSIVE,
}
"""A gate's, by its verdict."""

SUMMARY_FILE: Final = "summary.json"


class Shown(BaseModel):
    """Base of everything in a result."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Shown):
    """low <= effect <= high with the confidence that is stated where it stands; None on an open side."""

    low: float | None
    high: float | None


class ArmResult(Shown):
    """A policy under comparison.

    given: as on the command line. kind: a shipped policy, somebody's class, or one of a git revision. policy: its name
    as `--policy` takes it. revision, dirty: of a git arm the full revision (never dirty), else those of the checkout
    that the policy's file lies in, None outside one. source_sha256: of the policy's code with all of the scheduler
    that it stands on; equal digests and names are the same policy. knows_future: an oracle, no scheduler.
    """

    given: str
    kind: Literal["shipped", "class", "git"]
    policy: str
    revision: str | None
    dirty: bool | None
    source_sha256: str
    api_version: int
    knows_future: bool


class ObjectiveResult(Shown):
    """One figure in one scenario.

    metric: dotted path in a run's summary (`ttft_s.p90`, `phases.drop.goodput_rps`), or `lambda_max_rps`. minimum: the
    least effect that counts, a share if `relative`, else in `unit`. baseline, candidate: values a seed; None where a
    run has none. differences: as the module says; None where a value is missing. effect: their mean, told as the
    module says. interval: of the effect, valid whenever one looks, with `confidence` (the suite's, shared out over
    its objectives): the one that decides. bootstrap: 95 % interval of the effect by resampling seeds, valid for this
    objective alone had the number of seeds been fixed. change: effect / minimum, positive for better; what to sort
    by. reason: a sentence.
    """

    metric: str
    better: Literal["lower", "higher"]
    unit: str
    relative: bool
    minimum: float
    baseline: list[float | None]
    candidate: list[float | None]
    differences: list[float | None]
    baseline_mean: float | None
    candidate_mean: float | None
    effect: float | None
    interval: Interval
    confidence: float
    bootstrap: Interval
    change: float | None
    verdict: Verdict
    reason: str


class InvariantResult(Shown):
    """What `testbed.invariants` found in the runs of a scenario.

    baseline_broken, candidate_broken: the seeds in which it did not hold. worst, bound: of the candidate's run that was
    furthest from it, else of the baseline's. checked: runs an arm in which it could be checked. promised: a run that
    breaks it has failed, by its nature or because the scenario promises it (`bounds`); what is not promised is only
    shown. worse: whether the gate holds it against the candidate; reason says why or why not.
    """

    name: str
    promised: bool
    checked: int
    baseline_broken: list[int]
    candidate_broken: list[int]
    worst: float | None
    bound: float | None
    worse: bool
    reason: str


class RunRef(Shown):
    """One run. status: valid, failed (the system) or invalid (the meter). cached: it was there from an earlier gate.
    digest: of every request's nodes and stamps; equal ones are the same run."""

    arm: ArmName
    seed: int
    status: Literal["valid", "failed", "invalid"]
    reasons: list[str]
    cached: bool
    wall_s: float
    trace_sha256: str
    digest: str


class Artefact(Shown):
    """The seed in the middle of the first objective's differences, and its results folders (`prfaas report`, `explain`)
    relative to the gate's own; empty when none were asked for."""

    seed: int
    baseline: str
    candidate: str


class LoadCurve(Shown):
    """Latency against load, means over seeds: what `lambda_max_rps` is read from. Lists of one length, by offered
    rate."""

    rates_rps: list[float]
    baseline_ttft_p90_s: list[float | None]
    candidate_ttft_p90_s: list[float | None]
    slo_ttft_p90_s: float


class ScenarioResult(Shown):
    """One scenario of the suite. scenario_sha256: of the resolved scenario, seed and policy left out. stopped: why no
    more seeds were run, a sentence. seeds: those that were run, of both arms; candidate_seeds: the candidate's where
    they differ (--a-a), else the same. load: of a scenario that is run at several rates."""

    name: str
    description: str
    clock: Literal["virtual", "wire"]
    scenario: str
    scenario_sha256: str
    seeds: list[int]
    candidate_seeds: list[int]
    stopped: str
    verdict: Verdict
    objectives: list[ObjectiveResult]
    invariants: list[InvariantResult]
    runs: list[RunRef]
    load: LoadCurve | None
    artefact: Artefact | None


class SuiteResult(Shown):
    """What was asked. alpha: the chance, over all objectives together, that any claim of better or worse is false."""

    name: str
    description: str
    sha256: str
    alpha: float
    objectives: int
    least_seeds: int
    most_seeds: int
    method: str


class Fingerprints(Shown):
    """What runs depend on besides scenario, policy and seed; runs that differ in it are never compared. host: of the
    machine (virtual time: what its arithmetic depends on). code_sha256: of the testbed without the scheduler."""

    host: dict[str, str]
    host_sha256: str
    code_sha256: str


class Totals(Shown):
    """wall_s: of the whole gate. runs, cached: how many, and how many of them were there already. requests: simulated
    now. memory_bytes: at most held by all its processes together (proportional set size), None where unknown."""

    wall_s: float
    runs: int
    cached: int
    requests: int
    memory_bytes: int | None


class GateResult(Shown):
    """The whole of it. reasons: the verdict's, the most telling first, a sentence each. notes: what else a reader has
    to know (a dirty tree, an oracle). a_a: the arms are one policy under disjoint seeds, and any `worse` is a false
    alarm. same_policy: nothing was run, the arms are the same code."""

    format: Literal[1] = 1
    verdict: Verdict
    exit_code: int
    reasons: list[str]
    notes: list[str]
    a_a: bool
    same_policy: bool
    suite: SuiteResult
    baseline: ArmResult
    candidate: ArmResult
    fingerprints: Fingerprints
    scenarios: list[ScenarioResult]
    totals: Totals
    taken_at: str

    def keep(self, folder: Path | None) -> GateResult:
        """Write `summary.json` in the folder, which is made; nothing without one. Itself."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SUMMARY_FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return self


def read(folder: Path) -> GateResult:
    """A gate's result from its folder. Raises ScenarioError where there is none."""
    path = folder / SUMMARY_FILE
    try:
        return GateResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read ({error.strerror}); give the folder of a prfaas gate") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ScenarioError(f"{path}: {where}: {first['msg']}; it is no result of this version's prfaas gate") from None
