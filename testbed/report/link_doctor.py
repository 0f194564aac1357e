"""The link doctor: what limited a run when, and what is wrong with its link, in sentences.

    from testbed.report.link_doctor import diagnose
    told = diagnose(axis)
    told.spans       # "300-600 s (drop): the link: 5 Gbps, ..."
    told.findings    # `wrong`: the link or the meter; `note`: how the system took what the link did

Pure; reads `link_axis.Axis` alone, so it says of an old run what it says of a new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from netem.fluid import TCP_EFFICIENCY
from testbed.report.changes import NEAR, is_within
from testbed.report.link_axis import Axis
from testbed.report.link_checks import Finding, wrong_link
from testbed.report.steps import Array

SPANS: Final = 16
"""A run whose link steps more often is told phase by phase, or whole."""

STEP: Final = 0.1
"""A step by less than this share of the rate is not worth a sentence."""

OUTAGE: Final = "an outage"

FULL: Final = 0.9
"""A bin in which this share of what TCP can get crossed was full."""

WAITS: Final = 0.2
"""A part of TTFT from this share on limits."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the run, model seconds. limits: what made requests wait. text: the figures, a sentence."""

    start_s: float
    end_s: float
    name: str
    limits: list[str]
    text: str

    def sentence(self) -> str:
        named = f" ({self.name})" if self.name else ""
        when = f"{round(self.start_s, 1):g}-{round(self.end_s, 1):g} s{named}"
        return f"{when}: {' and '.join(self.limits) or 'nothing waits'}: {self.text}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    spans: list[Span]
    findings: list[Finding]

    @property
    def wrong(self) -> list[Finding]:
        return [one for one in self.findings if one.level == "wrong"]

    def to_json(self) -> dict[str, Any]:
        """As in summary.json's `link_doctor`."""
        return {
            "spans": [{**asdict(span), "sentence": span.sentence()} for span in self.spans],
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose(axis: Axis) -> Diagnosis:
    """What there is to say of a run's link. Never raises for a run whose axis could be made."""
    steps = link_steps(axis)
    return Diagnosis(_spans(axis, steps), [*wrong_link(axis), *_answers(axis, steps)])


# where the link steps
@dataclass(frozen=True, slots=True)
class LinkStep:
    """A change of the rate towards the pd site, or of whether it is there at all (0)."""

    t_s: float
    before_bps: float
    after_bps: float
    trigger: str

    def words(self) -> str:
        return f"{_gbps(self.before_bps)} -> {_gbps(self.after_bps)} Gbps at {self.t_s:.4g} s ({self.trigger})"


def link_steps(axis: Axis) -> list[LinkStep]:
    """The steps worth a sentence."""
    found = []
    for at_s, was, now, trigger in axis.steps:
        if 0 < at_s < axis.end_s and abs(now - was) > STEP * max(was, now):
            found.append(LinkStep(at_s, was, now, trigger or _unsaid(axis, at_s)))
    return found


def _unsaid(axis: Axis, at_s: float) -> str:
    """What brought about a step that only the samples show: a fault that began or ended then, or somebody."""
    near_s = 2 * axis.width_s
    times = [(abs(at_s - edge_s), what) for start_s, end_s, what in axis.faults for edge_s in (start_s, end_s)]
    closest = min(times, default=(math.inf, ""))
    return closest[1] if closest[0] <= near_s else "by hand"


# spans
def _spans(axis: Axis, steps: Sequence[LinkStep]) -> list[Span]:
    phases = [one for one in axis.summary["closed_form"]["optima"] if one["name"] is not None]
    cuts = {one["start_s"] for one in phases} | ({one.t_s for one in steps} if len(steps) < SPANS else set())
    width_s, end_s = axis.width_s, axis.end_s
    kept = [0.0]
    for cut in sorted(cuts):
        if cut - kept[-1] >= width_s and end_s - cut >= width_s:
            kept.append(cut)
    return [_span(axis, a, b, phases) for a, b in zip(kept, [*kept[1:], end_s], strict=True)]


def _span(axis: Axis, start_s: float, end_s: float, phases: Sequence[dict[str, Any]]) -> Span:
    middle = (axis.table["t_s"] + axis.table["end_s"]).to_numpy() / 2
    rows = (middle >= start_s) & (middle < end_s)
    names = [one["name"] for one in phases if one["start_s"] <= start_s < one["end_s"]]
    full = _full(axis, "to_pd")[rows]
    parts = _parts(axis, rows)
    limits = _limits(axis, rows, full, parts)
    down_s = axis.of("to_pd", "outage_s")[rows].sum()
    words = [f"link {_gbps(_mean(axis.of('to_pd', 'applied_bps')[rows]))} Gbps"]
    if OUTAGE in limits:
        words = [f"link down for {down_s:.3g} s"]
    elif (used := _used_share(axis, rows)) is not None:
        words.append(f"goodput {used:.0%} of 0.956 x applied, full {full.mean():.0%} of the time")
    queue_s = axis.of("to_pd", "queue_s")[rows]
    if np.nanmax(np.nan_to_num(queue_s), initial=0) > 0:
        words.append(f"queue delay up to {np.nanmax(queue_s):.3g} s")
    words += _moves(axis, start_s, end_s)
    words += _ttft(axis, start_s, end_s)
    failed = int(axis.table["failed"].to_numpy()[rows].sum())
    if failed:
        words.append(f"{failed} requests failed")
    return Span(start_s, end_s, names[0] if names else "", limits, "; ".join(words))


def _full(axis: Axis, direction: str) -> Array:
    """Whether a bin carried what it could."""
    can = TCP_EFFICIENCY * axis.of(direction, "applied_bps")
    return (can > 0) & (np.nan_to_num(axis.of(direction, "goodput_bps")) >= FULL * can)


def _used_share(axis: Axis, rows: Array) -> float | None:
    goodput, can = axis.of("to_pd", "goodput_bps")[rows], TCP_EFFICIENCY * axis.of("to_pd", "applied_bps")[rows]
    known = ~np.isnan(goodput)
    return float(goodput[known].sum() / can[known].sum()) if can[known].sum() > 0 else None


def _parts(axis: Axis, rows: Array) -> dict[str, float]:
    """The mean parts of TTFT, s, of the requests that came in these bins."""
    came = (axis.table["arrivals"] - axis.table["failed"]).to_numpy(np.float64)[rows]
    parts = ("queue", "prefill", "transfer", "admission")
    values = {part: np.nan_to_num(axis.table[f"ttft_{part}_s"].to_numpy(np.float64)[rows]) for part in parts}
    return {part: float(values[part] @ came / came.sum()) if came.sum() else 0.0 for part in parts}


def _limits(axis: Axis, rows: Array, full: Array, parts: dict[str, float]) -> list[str]:
    """What made requests wait, or kept the link from moving anything."""
    width_s, whole_s = axis.width_s, sum(parts.values())
    limits = []
    if axis.of("to_pd", "outage_s")[rows].sum() >= 0.5 * width_s * rows.sum():
        limits.append(OUTAGE)
    elif full.mean() >= 0.5 or (whole_s and parts["transfer"] >= WAITS * whole_s):
        limits.append("the link")
    if whole_s and parts["queue"] >= WAITS * whole_s:
        sites = {site: axis.table[f"waiting_{site}"].to_numpy()[rows].sum() for site in ("pd", "prfaas")}
        limits.append(f"prefill in {max(sites, key=lambda site: sites[site])}")
    if whole_s and parts["admission"] >= WAITS * whole_s:
        limits.append("decode slots")
    return limits


def _moves(axis: Axis, start_s: float, end_s: float) -> list[str]:
    moves = [one for one in axis.events if one["event"] == "threshold" and start_s <= one["t_s"] < end_s]
    if not moves:
        return []
    first = moves[0]
    more = f", {len(moves) - 1} more, {_tokens(moves[-1]['after'])} in the end" if len(moves) > 1 else ""
    return [
        f"threshold {_raised(first)} {_tokens(first['before'])} -> {_tokens(first['after'])} after "
        f"{first['t_s'] - start_s:.3g} s{more}"
    ]


def _ttft(axis: Axis, start_s: float, end_s: float) -> list[str]:
    if axis.answered is None:
        worst = axis.table.loc[(axis.table["t_s"] >= start_s) & (axis.table["end_s"] <= end_s), "ttft_p90_s"].max()
        return [] if math.isnan(worst) else [f"TTFT P90 {worst:.3g} s in its worst bin"]
    sched_s, ttft_s = axis.answered
    here = ttft_s[(sched_s >= start_s) & (sched_s < end_s)]
    return [f"TTFT P90 {np.percentile(here, 90):.3g} s"] if here.size else []


# how the system took it
def _answers(axis: Axis, steps: Sequence[LinkStep]) -> list[Finding]:
    """After each step: when the threshold answered, and when the queue was gone. Of many steps, in one sentence."""
    if not steps:
        return []
    ends = [*(one.t_s for one in steps[1:]), axis.end_s]
    reactions = [_reaction(axis, step, until_s) for step, until_s in zip(steps, ends, strict=True)]
    drained = [_drained(axis, step, until_s) for step, until_s in zip(steps, ends, strict=True)]
    if len(steps) < SPANS:
        return [one for pair in zip(reactions, drained, strict=True) for one in pair if one is not None]
    moved = sum(1 for one in reactions if one is not None and one.kind == "reaction")
    text = f"the link stepped {len(steps)} times; the threshold answered {moved} of these before the next step"
    return [Finding("note", "reaction", text)] if any(reactions) else []


def _reaction(axis: Axis, step: LinkStep, until_s: float) -> Finding | None:
    """The first change of the threshold the right way after a step; None for a policy that has none."""
    if np.isnan(axis.table["threshold_tokens"].to_numpy(np.float64)).all():
        return None
    way = "raised" if step.after_bps < step.before_bps else "lowered"
    for one in axis.events:
        if one["event"] == "threshold" and step.t_s <= one["t_s"] < until_s and _raised(one) == way:
            moved = f"{_tokens(one['before'])} -> {_tokens(one['after'])}"
            text = f"{step.words()}: threshold {way} {moved} after {one['t_s'] - step.t_s:.3g} s ({one['trigger']})"
            return Finding("note", "reaction", text, step.t_s)
    rows = axis.table[(axis.table["t_s"] >= step.t_s) & (axis.table["t_s"] < until_s)]
    if rows.empty:
        return None
    last, best = float(rows["threshold_tokens"].iloc[-1]), rows["optimum_tokens"].dropna()
    if best.size and is_within(last, float(best.iloc[-1]), NEAR):
        return None  # it was there already
    beside = f"; the best of the phase is {_tokens(float(best.iloc[-1]))}" if best.size else ""
    return Finding(
        "note", "no reaction", f"{step.words()}: the threshold was not {way}, {_tokens(last)}{beside}", step.t_s
    )


def _drained(axis: Axis, step: LinkStep, until_s: float) -> Finding | None:
    """After a step up: how long what waited took to go, down to a tenth."""
    start = axis.table["t_s"].to_numpy()
    waits = np.nan_to_num(axis.of("to_pd", "backlog_bytes")) + np.nan_to_num(axis.of("to_pd", "unsent_bytes"))
    before = waits[(start < step.t_s) & (start >= step.t_s - 2 * axis.width_s)]
    if step.after_bps < step.before_bps or not before.size:
        return None
    peak = float(before.max())
    if peak * 8 / (TCP_EFFICIENCY * max(step.after_bps, 1.0)) < axis.width_s:
        return None  # gone within a bin, whatever happens
    after = np.flatnonzero((start >= step.t_s) & (start < until_s) & (waits < 0.1 * peak))
    took = f"was gone after {start[after[0]] - step.t_s:.3g} s" if after.size else "was not gone before the next step"
    return Finding("note", "drained", f"{step.words()}: what waited, {peak / 1e9:.3g} GB, {took}", step.t_s)


# words
def _raised(move: dict[str, Any]) -> str:
    before, after = (math.inf if move[key] is None else float(move[key]) for key in ("before", "after"))
    return "raised" if after > before else "lowered"


def _tokens(value: float | None) -> str:
    return "infinity" if value is None or math.isinf(value) else f"{value:,.0f}"


def _gbps(rate_bps: float) -> str:
    return f"{rate_bps / 1e9:.4g}"


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan
