"""The gate itself: rounds of paired runs in every scenario until each is decided, and what comes of them.

What is run depends on results alone, never on how fast they come, so the same arms get the same verdict on any number
of processes. Both arms of a seed are run in the same round: what drifts, drifts for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from testbed.gate.arms import Arm
from testbed.gate.cache import Cache
from testbed.gate.fingerprints import scenario_sha256
from testbed.gate.jobs import Job, Measured
from testbed.gate.judge import Pair, judge_invariants, refuse_unlike, tell, together, why_stop
from testbed.gate.pool import Died, Pool, WorkerError
from testbed.gate.result import ArmName, LoadCurve, RunRef, ScenarioResult, Verdict
from testbed.gate.suite import Compared, Suite, resolve
from testbed.scenario import Scenario, ScenarioError

APART: Final = 1_000_000
"""Seeds of the candidate are so far from the baseline's in an A/A comparison."""

ARMS: Final[tuple[ArmName, ...]] = ("baseline", "candidate")


@dataclass(frozen=True, slots=True)
class Done:
    """A run that has ended. cached: it was there."""

    measured: Measured
    cached: bool


@dataclass(slots=True)
class Course:
    """A scenario of the suite on its way. runs: by arm, in the order of its seeds. stopped: why it ended."""

    compared: Compared
    scenario: Scenario
    rates_rps: tuple[float, ...]
    least: int
    most: int
    runs: dict[ArmName, list[Done]] = field(default_factory=lambda: {"baseline": [], "candidate": []})
    stopped: str = ""

    @classmethod
    def of(cls, suite: Suite, compared: Compared) -> Course:
        """Raises ScenarioError, TraceError and ModelError for a scenario that cannot be run."""
        scenario = resolve(suite, compared)
        rates: tuple[float, ...] = ()
        if compared.load_fractions is not None:
            from testbed.sweep import capacity  # it simulates, and most gates' own process need not

            most_rps = capacity(scenario, scenario.deployments[0]).expectation.lambda_max
            rates = tuple(round(fraction * most_rps, 6) for fraction in compared.load_fractions)
        return cls(compared, scenario, rates, suite.least_of(compared), suite.most_of(compared))

    @property
    def sha256(self) -> str:
        """Of what is run, but for policy and seed."""
        return scenario_sha256(self.scenario, self.rates_rps)


@dataclass(frozen=True, slots=True)
class Step:
    """A run to come: of which course, arm and seed."""

    course: Course
    arm: ArmName
    seed: int
    job: Job


class Gate:
    """Two arms under a suite. a_a: the candidate is the baseline under other seeds. on_run: told of every run that
    ended, with how many of those that are begun have. seed: the first one, instead of the suite's."""

    def __init__(
        self,
        suite: Suite,
        baseline: Arm,
        candidate: Arm,
        cache: Cache,
        *,
        a_a: bool = False,
        seed: int | None = None,
        on_run: Callable[[str, int, int], None] = lambda name, done, of: None,
    ) -> None:
        self.suite, self.cache = suite, cache
        self.arms: dict[ArmName, Arm] = {"baseline": baseline, "candidate": candidate}
        self.first = suite.seeds.first if seed is None else seed
        self.apart = APART if a_a else 0
        self.courses = [Course.of(suite, one) for one in suite.scenarios]
        self.done = 0
        self._on_run = on_run

    def run(self, pool: Pool) -> None:
        """Rounds until every scenario in virtual time is decided, or has had its seeds. Raises ScenarioError."""
        courses = [course for course in self.courses if course.compared.clock == "virtual"]
        while steps := [step for course in courses for step in self._next(course)]:
            for step, done in self._round(steps, pool):
                step.course.runs[step.arm].append(done)
            for course in courses:
                if not course.stopped:
                    self.look(course)

    def pool_of(self, arm: ArmName, count: int, pool: Pool) -> list[list[Measured]]:
        """`count` runs of an arm in every scenario, in the order of their seeds, whatever comes of them."""
        for course in self.courses:
            steps = [self.step(course, arm, i) for i in range(count)]
            course.runs[arm] = [done for _, done in self._round(steps, pool)]
        return [[done.measured for done in course.runs[arm]] for course in self.courses]

    def step(self, course: Course, arm: ArmName, i: int) -> Step:
        seed = self.first + i + (self.apart if arm == "candidate" else 0)
        scenario = course.scenario.only(None, self.arms[arm].policy).model_copy(update={"seed": seed})
        return Step(course, arm, seed, Job(scenario, course.rates_rps))

    def _next(self, course: Course) -> Iterator[Step]:
        """The steps of a course's next round."""
        had = len(course.runs["baseline"])
        for i in range(had, had + self.count(course)):
            yield from (self.step(course, arm, i) for arm in ARMS)

    def count(self, course: Course) -> int:
        """Seeds until the next look: as many as there have to be before the first one, then a few at a time."""
        had = len(course.runs["baseline"])
        if course.stopped:
            return 0
        return course.least if had == 0 else min(self.suite.seeds.a_round, course.most - had)

    def _round(self, steps: Sequence[Step], pool: Pool) -> list[tuple[Step, Done]]:
        """All steps, in their order: what is kept from the cache, the rest run."""
        found: dict[int, Done] = {}
        keys = [self.cache.key(self.arms[step.arm].identity, step.job) for step in steps]
        for i, key in enumerate(keys):
            if (kept := self.cache.get(key)) is not None:
                found[i] = Done(kept, cached=True)
        todo = sorted((i for i in range(len(steps)) if i not in found), key=lambda i: -_size(steps[i].job))
        self.tell(len(steps), len(found))
        jobs = [(self.arms[steps[i].arm].environment, steps[i].job) for i in todo]
        try:
            for place, outcome in pool.run(jobs):
                i = todo[place]
                if isinstance(outcome, Died):
                    found[i] = Done(_died(steps[i], outcome), cached=False)
                else:
                    found[i] = Done(outcome, cached=False)
                    self.cache.put(keys[i], outcome)
                self.tell(len(steps), len(found))
        except WorkerError as error:
            raise ScenarioError(str(error)) from None
        self.done += len(steps)
        return [(step, found[i]) for i, step in enumerate(steps)]

    def tell(self, of: int, ended: int) -> None:
        """Say how far the runs are: `ended` of the `of` that are under way."""
        names = ", ".join(course.compared.name for course in self.courses if not course.stopped)
        self._on_run(names, self.done + ended, self.done + of)

    def look(self, course: Course) -> None:
        """Stop a scenario that is decided."""
        course.stopped = why_stop(
            course.compared.objectives, self.pairs(course), alpha=self.suite.share, most=course.most
        )

    def pairs(self, course: Course) -> list[Pair]:
        """The pairs of runs so far. Raises ScenarioError for unlike ones."""
        out = []
        for i, (was, now) in enumerate(zip(course.runs["baseline"], course.runs["candidate"], strict=True)):
            if not self.apart and was.measured["like"] is not None and now.measured["like"] is not None:
                refuse_unlike(was.measured["like"], now.measured["like"], f"scenario {course.compared.name}")
            out.append(Pair(self.first + i, was.measured, now.measured))
        return out

    def result(self, course: Course) -> ScenarioResult:
        """What is to be said of a scenario that has ended."""
        pairs = self.pairs(course)
        objectives = [
            tell(objective, pairs, alpha=self.suite.share, planned=course.most)
            for objective in course.compared.objectives
        ]
        invariants = judge_invariants(pairs)
        verdicts: list[Verdict] = [objective.verdict for objective in objectives]
        verdicts += ["worse" for one in invariants if one.worse]
        verdicts += [
            "invalid" for pair in pairs for run in (pair.baseline, pair.candidate) if run["status"] == "invalid"
        ]
        seeds = [self.first + i for i in range(len(pairs))]
        compared = course.compared
        return ScenarioResult(
            name=compared.name,
            description=compared.description,
            clock=compared.clock,
            scenario=compared.scenario,
            scenario_sha256=course.sha256,
            seeds=seeds,
            candidate_seeds=[seed + self.apart for seed in seeds],
            stopped=course.stopped,
            verdict=together(verdicts),
            objectives=objectives,
            invariants=invariants,
            runs=[
                _ref(arm, seed + (self.apart if arm == "candidate" else 0), course.runs[arm][i])
                for i, seed in enumerate(seeds)
                for arm in ARMS
            ],
            load=_curve(course),
            artefact=None,
        )


def _died(step: Step, died: Died) -> Measured:
    """What is known of a run that never ended: nothing but that. It condemns a candidate; with such a baseline there is
    nothing to compare."""
    sentence = f"seed {step.seed}: the run did not end: {died.why}"
    ends = {
        "name": "run ends",
        "status": "broken",
        "value": None,
        "bound": None,
        "sentence": sentence,
        "promised": True,
    }
    status = "failed" if step.arm == "candidate" else "invalid"
    known = {"status": status, "reasons": [sentence], "summary": None, "findings": [ends]}
    return {**known, "like": None, "digest": "", "requests": 0, "wall_s": 0.0}


def _size(job: Job) -> float:
    return (job.scenario.workload.rate_rps or 1.0) * job.scenario.workload.duration_s * max(1, len(job.rates_rps))


def _ref(arm: ArmName, seed: int, done: Done) -> RunRef:
    measured = done.measured
    return RunRef(
        arm=arm,
        seed=seed,
        status=measured["status"],
        reasons=measured["reasons"],
        cached=done.cached,
        wall_s=0.0 if done.cached else measured["wall_s"],
        trace_sha256="" if measured["like"] is None else measured["like"]["trace_sha256"],
        digest=measured["digest"],
    )


def _curve(course: Course) -> LoadCurve | None:
    if not course.rates_rps:
        return None

    def mean(arm: ArmName) -> list[float | None]:
        rows = [done.measured["load"]["ttft_p90_s"] for done in course.runs[arm] if "load" in done.measured]
        columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        return [sum(column) / len(column) if column else None for column in columns]

    return LoadCurve(
        rates_rps=list(course.rates_rps),
        baseline_ttft_p90_s=mean("baseline"),
        candidate_ttft_p90_s=mean("candidate"),
        slo_ttft_p90_s=course.scenario.slo.ttft_p90_s,
    )
