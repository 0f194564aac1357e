"""A gate's result as a report: the verdict in a sentence, every objective, and of each scenario what changed where."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

from testbed.explain import Explainer
from testbed.gate.judge import amount
from testbed.gate.report.arm import drawn
from testbed.gate.report.figures import figures_table
from testbed.gate.report.requests import lost_most, worst
from testbed.gate.report.view import Cell, Glyph, Requests, Section, Table, View
from testbed.gate.report.words import (
    GATE_MEANINGS,
    INVARIANTS,
    MEANINGS,
    metric_meaning,
    metric_name,
    metric_root,
    plural,
    value,
)
from testbed.gate.result import GateResult, InvariantResult, ObjectiveResult, ScenarioResult
from testbed.runs import RunError, read_scenario

ORDER: Final = {"worse": 0, "invalid": 1, "better": 2, "inconclusive": 3, "same": 4}
"""Scenarios, the most telling first."""


def view(result: GateResult, folder: Path) -> View:
    """folder: where the gate's results lie. A scenario whose artefacts cannot be read says so and has no charts."""
    ordered = sorted(result.scenarios, key=lambda one: ORDER[one.verdict])
    sections = [_section(result, one, folder, first=i == 0) for i, one in enumerate(ordered)]
    return View(
        title=f"gate {result.suite.name}: {_arms(result)}",
        state=result.verdict,
        sentence=sentence(result),
        reasons=result.reasons,
        notes=result.notes,
        overview=objectives(result) if result.scenarios else None,
        sections=sections,
        facts=_facts(result),
        meanings=[*GATE_MEANINGS, *_measured(result), *MEANINGS],
    )


def _measured(result: GateResult) -> list[tuple[str, str]]:
    """What the suite's metrics are, each once."""
    metrics = [objective.metric for one in result.scenarios for objective in one.objectives]
    found = {metric_root(metric): metric_meaning(metric) for metric in metrics}
    return [(name, meaning) for name, meaning in found.items() if meaning and name not in dict(MEANINGS)]


def _arms(result: GateResult) -> str:
    if result.a_a:
        return f"{result.baseline.given} against itself under other seeds"
    return f"{result.candidate.given} against {result.baseline.given}"


def sentence(result: GateResult) -> str:
    """The verdict in one sentence."""
    candidate, baseline = result.candidate.given, result.baseline.given
    if result.same_policy:
        return f"Same: {candidate} and {baseline} are the same policy in the same code, so nothing was run."
    counts = Counter(objective.verdict for one in result.scenarios for objective in one.objectives)
    of = f"{plural(sum(counts.values()), 'objective')} in {plural(len(result.scenarios), 'scenario')}"
    broken = sum(found.worse for one in result.scenarios for found in one.invariants)
    promises = f" and breaks {plural(broken, 'promise')} that the baseline keeps" if broken else ""
    if result.a_a:
        told = {
            "same": "finds no difference, as it should",
            "worse": "claims a difference: a false alarm",
            "better": "claims a difference: a false alarm",
        }.get(result.verdict, "does not decide")
        return f"{result.verdict.capitalize()}: {baseline} against itself {told}, by {of}."
    match result.verdict:
        case "worse":
            return f"Worse: {candidate} is worse than {baseline} in {counts['worse']} of {of}{promises}."
        case "better":
            return f"Better: {candidate} is better than {baseline} in {counts['better']} of {of}, and worse in none."
        case "same":
            return f"Same: {candidate} is no worse than {baseline} by what counts in any of {of}."
        case "inconclusive":
            return (
                f"Inconclusive: of {of}, {counts['inconclusive']} could not be decided between {candidate} and "
                f"{baseline}; none was shown to be worse."
            )
    return f"Invalid: a meter failed, so nothing can be said of {candidate} against {baseline}."


def objectives(result: GateResult, only: ScenarioResult | None = None) -> Table:
    """Every objective, or those of one scenario, a row each."""
    rows = [_row(one, objective) for one in result.scenarios if only in (None, one) for objective in one.objectives]
    confidence = result.scenarios[0].objectives[0].confidence
    titles = [("scenario, objective", False), ("baseline", True), ("candidate", True), ("change", True)]
    titles += [(f"interval ({confidence:.2%})".replace("%", " %"), True), ("counts from", True), ("seeds", True)]
    return Table(
        title="Every objective",
        columns=[*titles, ("verdict", False), ("in units of what counts", False)],
        rows=rows,
        note=f"Means over seeds; the change is candidate less baseline, seed by seed. {result.suite.method}.",
    )


def _row(one: ScenarioResult, objective: ObjectiveResult) -> list[Cell]:
    low, high, boot = objective.interval.low, objective.interval.high, objective.bootstrap
    return [
        Cell(f"{one.name}: {metric_name(objective.metric)}", f"{objective.better} is better"),
        Cell(value(objective.baseline_mean, objective.unit)),
        Cell(value(objective.candidate_mean, objective.unit)),
        Cell("-" if objective.effect is None else amount(objective, objective.effect), state=objective.verdict),
        Cell(
            f"{amount(objective, low)} to {amount(objective, high)}",
            f"bootstrap {amount(objective, boot.low)} to {amount(objective, boot.high)}",
        ),
        Cell(amount(objective, objective.minimum, sign=False)),
        Cell(str(len(one.seeds))),
        Cell(objective.verdict, state=objective.verdict),
        Cell("", glyph=_glyph(objective)),
    ]


def _glyph(objective: ObjectiveResult) -> Glyph | None:
    if objective.change is None:
        return None
    sign = 1.0 if objective.better == "higher" else -1.0

    def units(effect: float | None) -> float | None:
        return None if effect is None else sign * effect / objective.minimum

    ends = (units(objective.interval.low), units(objective.interval.high))
    low, high = ends if sign > 0 else ends[::-1]
    return Glyph(low, objective.change, high)


def _section(result: GateResult, one: ScenarioResult, folder: Path, *, first: bool) -> Section:
    arms = [f"baseline {result.baseline.given}", f"candidate {result.candidate.given}"]
    charts: dict[str, Any] = {"load": _load(one), "differences": _differences(one), "slo_s": None, "arms": []}
    requests: list[Requests] = []
    figures: list[Table] = []
    runs = "No runs were kept for this report, so nothing is drawn over time."
    if one.artefact is not None:
        folders = [folder / one.artefact.baseline, folder / one.artefact.candidate]
        try:
            told = [Explainer(path) for path in folders]
            charts["arms"] = [drawn(path, each.requests) for path, each in zip(folders, told, strict=True)]
            charts["slo_s"] = read_scenario(folders[0]).slo.ttft_p90_s
        except (RunError, ValueError) as error:
            runs = f"The runs kept for this report cannot be read: {error}"
        else:
            runs = _seed_words(result, one)
            lost = [] if result.a_a else lost_most(told[1], told[0])
            note = "The very same requests in both runs; what each waited in the baseline stands beside it."
            slowest = worst(told[1], besides=lost)
            requests = [
                Requests("Where the candidate lost most", note, lost),
                Requests("The candidate's slowest requests", "Those that failed come first.", slowest),
            ]
            figures = [figures_table([each.summary for each in told], arms)]
    return Section(
        title=one.name,
        state=one.verdict,
        sentence=_said(one),
        description=f"{one.description} {'On the wire' if one.clock == 'wire' else 'In virtual time'}; {one.stopped}.",
        arms=arms,
        runs=runs,
        charts=charts,
        tables=[*figures, invariants(one)],
        requests=requests,
        open=first and result.verdict != "same",
    )


def _seed_words(result: GateResult, one: ScenarioResult) -> str:
    assert one.artefact is not None
    middle = metric_name(one.objectives[0].metric)
    if result.a_a:
        return "Drawn is one run an arm, under disjoint seeds."
    at = "" if one.load is None else f", at {one.load.rates_rps[-1]:.3g} requests/s, the highest of its rates"
    return (
        f"Drawn is one run an arm, of seed {one.artefact.seed}{at}: the seed in the middle of the differences in "
        f"{middle}. The verdict is over all seeds."
    )


def _said(one: ScenarioResult) -> str:
    held = [found.reason for found in one.invariants if found.worse]
    telling = [objective.reason for objective in one.objectives if objective.verdict == one.verdict]
    return "; ".join([*held, *telling]) or one.verdict


def _load(one: ScenarioResult) -> dict[str, Any] | None:
    return None if one.load is None else one.load.model_dump()


def _differences(one: ScenarioResult) -> list[dict[str, Any]]:
    """Each objective's change seed by seed, in units of the least effect that counts, positive for better."""
    out = []
    for objective in one.objectives:
        sign = 1.0 if objective.better == "higher" else -1.0
        pairs = zip(objective.baseline, objective.candidate, strict=True)
        changes = [
            None if was is None or now is None or (objective.relative and was == 0)
            else sign * ((now / was - 1) if objective.relative else now - was) / objective.minimum
            for was, now in pairs
        ]  # fmt: skip
        out.append({"name": metric_name(objective.metric), "seeds": one.seeds, "changes": changes})
    return out


def invariants(one: ScenarioResult) -> Table:
    """What became of every invariant in the scenario's runs."""
    ordered = sorted(one.invariants, key=lambda found: (not found.worse, not found.candidate_broken, not found.checked))
    return Table(
        title="Invariants",
        columns=[("invariant", False), ("outcome", False), ("worst", True), ("bound", True), ("what was found", False)],
        rows=[_invariant(found) for found in ordered],
        note="What has to hold in every run; what the scenario does not promise is only shown. The worst is the "
        "candidate's, else the baseline's.",
        folded=not any(found.candidate_broken for found in one.invariants),
    )


def _invariant(found: InvariantResult) -> list[Cell]:
    state = "broken" if found.worse else "noted" if found.candidate_broken or found.baseline_broken else "held"
    words = {"broken": "broken", "noted": "broken, not held against it", "held": "held"}[state]
    unit = INVARIANTS.get(found.name, ("", ""))[1]
    if not found.checked:
        state = words = "not checked"
    return [
        Cell(found.name.replace("_", " "), INVARIANTS.get(found.name, ("", ""))[0]),
        Cell(words, state=state),
        Cell(value(found.worst, unit)),
        Cell(value(found.bound, unit)),
        Cell(found.reason.removeprefix(f"{found.name}: ")),
    ]


def _facts(result: GateResult) -> list[tuple[str, str]]:
    totals = result.totals
    memory = "" if totals.memory_bytes is None else f", at most {totals.memory_bytes / 1e6:,.0f} MB"
    facts = [
        ("suite", f"{result.suite.name}: {result.suite.description}"),
        ("false claims", f"at most {result.suite.alpha:.0%} over all {plural(result.suite.objectives, 'objective')}"),
        ("runs", f"{totals.runs:,}, {totals.cached:,} of them kept from before; {totals.wall_s:.1f} s{memory}"),
        ("taken", result.taken_at),
    ]
    for name, arm in (("baseline", result.baseline), ("candidate", result.candidate)):
        at = f", revision {arm.revision[:12]}" if arm.revision else ""
        dirty = " with changes that are not committed" if arm.dirty else ""
        facts.append((name, f"{arm.given} ({arm.kind}: {arm.policy}{at}{dirty}; code {arm.source_sha256[:12]})"))
    prints = result.fingerprints
    facts.append(("testbed", f"code {prints.code_sha256[:12]}, host {prints.host_sha256[:12]}"))
    facts.append(("host", ", ".join(f"{key} {what}" for key, what in prints.host.items())))
    return facts
