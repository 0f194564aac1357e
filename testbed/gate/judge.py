"""From paired runs to verdicts. Pure: what was measured comes in, what is to be said of it goes out.

An objective is *worse* when its confidence sequence excludes 0 and the effect is at least the minimum; *better*
likewise; the *same* when the sequence excludes every effect of the minimum or more. When no more seeds will come, one
that excludes a regression of that size, but not an improvement, is the same too: it is no worse. All else is
inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from testbed.gate.fingerprints import ALIKE
from testbed.gate.jobs import Measured
from testbed.gate.result import Interval, InvariantResult, ObjectiveResult, Verdict
from testbed.gate.statistics import (
    BOOTSTRAP_CONFIDENCE,
    MOST_FOLD,
    Floats,
    bootstrap_interval,
    log_ratio,
    sequence_interval,
)
from testbed.gate.suite import Objective
from testbed.scenario_data import ScenarioError, did_you_mean


@dataclass(frozen=True, slots=True)
class Pair:
    """One seed's runs."""

    seed: int
    baseline: Measured
    candidate: Measured


def refuse_unlike(baseline: Mapping[str, str], candidate: Mapping[str, str], what: str) -> None:
    """Raises ScenarioError for runs that differ in more than their policy. baseline, candidate: ALIKE of both."""
    for name in ALIKE:
        if baseline[name] != candidate[name]:
            raise ScenarioError(
                f"{what}: the runs are not alike: {name} is {baseline[name][:12]} of the baseline's and "
                f"{candidate[name][:12]} of the candidate's; run both with one testbed on one machine"
            )


def value_of(summary: Mapping[str, Any] | None, metric: str) -> float | None:
    """A figure by its dotted path; a phase goes by its name. None where the run has none, or did not end (None). Raises
    ScenarioError for a path that leads nowhere."""
    if summary is None:
        return None
    at: Any = summary
    for i, step in enumerate(metric.split(".")):
        if isinstance(at, list):
            at = {one.get("name"): one for one in at}
        if not isinstance(at, Mapping) or step not in at:
            known = [str(key) for key in at] if isinstance(at, Mapping) else []
            where = ".".join(metric.split(".")[:i]) or "a run's summary"
            raise ScenarioError(
                f"objective {metric}: {where} has no {step!r}; {did_you_mean(step, known)}it has "
                f"{', '.join(known) or 'nothing below it'}"
            )
        at = at[step]
    if at is None or (isinstance(at, int | float) and not isinstance(at, bool)):
        return None if at is None else float(at)
    raise ScenarioError(f"objective {metric}: is {at!r:.40}, no number; give the path of a number")


def differences(objective: Objective, pairs: Sequence[Pair]) -> list[float | None]:
    """Candidate less baseline of each pair: ln of their ratio if relative, else in the metric's unit.

    A value that only one arm has makes a relative difference as large as one can be: lacking it is bad whichever way is
    better. None where it cannot be told.
    """
    out: list[float | None] = []
    for pair in pairs:
        was, now = (value_of(run["summary"], objective.metric) for run in (pair.baseline, pair.candidate))
        if was is not None and now is not None:
            out.append(log_ratio(was, now) if objective.relative else now - was)
        elif not objective.relative or (was is None and now is None):
            out.append(None)
        else:
            bad = MOST_FOLD if objective.better == "lower" else -MOST_FOLD
            out.append(bad if now is None else -bad)
    return out


@dataclass(frozen=True, slots=True)
class Reading:
    """An objective as it stands, in `differences`' scale. verdict: None while more seeds may decide it."""

    mean: float
    low: float
    high: float
    verdict: Verdict | None


def read(objective: Objective, given: Sequence[float | None], *, alpha: float, planned: int, last: bool) -> Reading:
    """What the differences so far say. planned: the most there will be. last: no more will come."""
    known: Floats = np.array([value for value in given if value is not None])
    if not len(known) or len(known) < len(given):
        return Reading(math.nan, -math.inf, math.inf, "inconclusive" if last else None)
    mean, (low, high) = float(known.mean()), sequence_interval(known, alpha, planned)
    least = math.log1p(objective.least) if objective.relative else objective.least
    harm, floor, ceiling = (mean, low, high) if objective.better == "lower" else (-mean, -high, -low)
    verdict: Verdict | None = None
    if floor > 0 and harm >= least:
        verdict = "worse"
    elif ceiling < 0 and harm <= -least:
        verdict = "better"
    elif ceiling < least and (floor > -least or last):
        verdict = "same"
    elif last:
        verdict = "inconclusive"
    return Reading(mean, low, high, verdict)


def why_stop(objectives: Sequence[Objective], pairs: Sequence[Pair], *, alpha: float, most: int) -> str:
    """Why a scenario needs no more seeds than these; "" where it does. most: the seeds there may be."""
    if any(run["status"] == "invalid" for pair in pairs for run in (pair.baseline, pair.candidate)):
        return "a run was invalid"
    if any(found.worse for found in judge_invariants(pairs)):
        return "the candidate breaks what the scenario promises"
    readings = (read(one, differences(one, pairs), alpha=alpha, planned=most, last=False) for one in objectives)
    if all(reading.verdict for reading in readings):
        return "every objective is decided"
    return f"the most seeds that the suite allows, {most}" if len(pairs) >= most else ""


def tell(objective: Objective, pairs: Sequence[Pair], *, alpha: float, planned: int) -> ObjectiveResult:
    """An objective at its end."""
    given = differences(objective, pairs)
    reading = read(objective, given, alpha=alpha, planned=planned, last=True)
    whole = not math.isnan(reading.mean)
    boot = bootstrap_interval(np.array(given, dtype=np.float64)) if whole else (-math.inf, math.inf)

    def shown(difference: float) -> float | None:
        value = math.expm1(min(difference, 700.0)) if objective.relative else difference
        return value if math.isfinite(value) else None

    effect = shown(reading.mean) if whole else None
    was, now = ([value_of(run["summary"], objective.metric) for run in arm] for arm in _arms(pairs))
    sign = -1.0 if objective.better == "lower" else 1.0
    interval = Interval(low=shown(reading.low), high=shown(reading.high))
    assert reading.verdict is not None
    return ObjectiveResult(
        metric=objective.metric,
        better=objective.better,
        unit=objective.unit,
        relative=objective.relative,
        minimum=objective.least,
        baseline=was,
        candidate=now,
        differences=given,
        baseline_mean=_mean(was),
        candidate_mean=_mean(now),
        effect=effect,
        interval=interval,
        confidence=1.0 - alpha,
        bootstrap=Interval(low=shown(boot[0]), high=shown(boot[1])),
        change=None if effect is None else sign * effect / objective.least,
        verdict=reading.verdict,
        reason=_sentence(objective, reading.verdict, effect, interval, len(pairs)),
    )


def _arms(pairs: Sequence[Pair]) -> tuple[list[Measured], list[Measured]]:
    return [pair.baseline for pair in pairs], [pair.candidate for pair in pairs]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def amount(objective: Objective | ObjectiveResult, effect: float | None, *, sign: bool = True) -> str:
    """An effect for people: `+5.2 %`, `+0.013 s`, of a share `-0.3 points`; `open` where it has no end."""
    if effect is None:
        return "open"
    form = "+" if sign else ""
    if objective.relative:
        return f"{effect * 100:{form}.2g} %" if abs(effect) < 1 else f"{effect * 100:{form}.0f} %"
    if objective.unit == "share":
        return f"{effect * 100:{form}.2g} points"
    return f"{effect:{form}.3g} {objective.unit}".rstrip()


def _sentence(objective: Objective, verdict: Verdict, effect: float | None, interval: Interval, n: int) -> str:
    if effect is None:
        return f"{objective.metric}: has no value in some of {n} runs, so nothing can be said"
    between = f"{amount(objective, interval.low)} to {amount(objective, interval.high)}, {n} seeds"
    least = amount(objective, objective.least, sign=False)
    said = f"{objective.metric}: {amount(objective, effect)} ({between})"
    match verdict:
        case "worse" | "better":
            return f"{said}: {verdict}, beyond the {least} that count"
        case "same":
            return f"{said}: no regression of {least} or more"
    return f"{said}: neither a change of {least} nor its absence is shown"


def judge_invariants(pairs: Sequence[Pair]) -> list[InvariantResult]:
    """Every invariant over the runs of a scenario.

    A promise that the candidate breaks in any run, and the baseline in none, is held against it. One that the baseline
    breaks too is no promise of this scenario's: it is shown.
    """
    out = []
    for name in dict.fromkeys(one["name"] for pair in pairs for one in pair.candidate["findings"]):
        rows = [(pair.seed, _find(pair.baseline, name), _find(pair.candidate, name)) for pair in pairs]
        was = [seed for seed, before, _ in rows if before is not None and before["status"] == "broken"]
        now = [seed for seed, _, after in rows if after is not None and after["status"] == "broken"]
        broken = [one for _, before, after in rows for one in (after, before) if one and one["status"] == "broken"]
        promised = any(one["promised"] for one in broken)
        worse = promised and bool(now) and not was
        checked = sum(after is not None and after["status"] != "not_checked" for *_, after in rows)
        furthest = max(
            (one for _, before, after in rows for one in ((after,) if now or not was else (before,)) if one),
            key=lambda one: -math.inf if one["value"] is None else one["value"],
        )
        shown = next((one for _, _, one in rows if one and one["status"] == "broken"), furthest)
        out.append(
            InvariantResult(
                name=name,
                promised=promised,
                checked=checked,
                baseline_broken=was,
                candidate_broken=now,
                worst=furthest["value"],
                bound=furthest["bound"],
                worse=worse,
                reason=_why(name, was, now, checked, promised, shown["sentence"]),
            )
        )
    return out


def _find(run: Measured, name: str) -> dict[str, Any] | None:
    return next((one for one in run["findings"] if one["name"] == name), None)


def _why(name: str, was: list[int], now: list[int], checked: int, promised: bool, sentence: str) -> str:
    if not was and not now:
        return f"{name}: holds in all of {checked} runs" if checked else f"{name}: not checked; {sentence}"
    counts = f"broken in {len(now)} runs of the candidate and {len(was)} of the baseline"
    if not now:
        return f"{name}: {counts}"
    if was:
        return f"{name}: {counts}: not the candidate's alone; such as seed {now[0]}: {sentence}"
    note = "" if promised else ", which the scenario does not promise"
    return f"{name}: {counts}{note}; such as seed {now[0]}: {sentence}"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several: one worse makes it worse, whatever else; then invalid, inconclusive, better, and else the same."""
    for verdict in ("worse", "invalid", "inconclusive", "better"):
        if verdict in verdicts:
            return verdict
    return "same"


METHOD: Final = (
    "differences paired by seed; anytime-valid t confidence sequences (Wang and Ramdas, arXiv:2310.03722), alpha "
    f"shared out over the objectives (Bonferroni); beside them a {BOOTSTRAP_CONFIDENCE:.0%} bootstrap over runs (BCa)"
)
