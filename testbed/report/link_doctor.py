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
from typing import Any, Final, Literal

import numpy as np

from netem.fluid import TCP_EFFICIENCY
from testbed.report.link_axis import Axis
from testbed.report.steps import Array

SPANS: Final = 16
"""A run whose link steps more often is told phase by phase, or whole."""

STEP: Final = 0.1
"""A step by less than this share of the rate is not worth a sentence."""

FULL: Final = 0.9
"""A bin in which this share of what TCP can get crossed was full."""

LEAST: Final = 0.95
"""What has to cross of what TCP can get while there is always more than enough to send."""

MOST: Final = 1.05
"""What may cross, of the rate, over a few bins."""

LATE_WALL_S: Final = 0.1
"""A step that the kernel has later than this is late: what a netlink call on a loaded machine may take."""

AGAIN: Final = (0.001, 0.01)
"""Segments sent again, of all, without any loss asked for: worth a note; wrong."""

GSO: Final = 45
"""Segments in the largest packet that the shaper sees: TCP hands it 64 kB at once."""

WAITS: Final = 0.2
"""A part of TTFT from this share on limits."""

Level = Literal["wrong", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """level: `wrong`, of the link or the meter, or `note`. kind: a short name for it. t_s: where, if at one place."""

    level: Level
    kind: str
    text: str
    t_s: float | None = None


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
        return f"{self.start_s:g}-{self.end_s:g} s{named}: {' and '.join(self.limits) or 'nothing waits'}: {self.text}"


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
    return Diagnosis(_spans(axis, steps), [*_wrong_link(axis, steps), *_answers(axis, steps)])


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
    for one in axis.events:
        if one["event"] == "link" and one["direction"] == "to_pd" and one["t_s"] < _end_s(axis):
            was, now = float(one["before"]), float(one["after"])
            if abs(now - was) > STEP * max(was, now):
                found.append(LinkStep(one["t_s"], was, now, one["trigger"] or "by hand"))
    return found


def _end_s(axis: Axis) -> float:
    return float(axis.table["end_s"].iloc[-1])


# spans
def _spans(axis: Axis, steps: Sequence[LinkStep]) -> list[Span]:
    phases = [one for one in axis.summary["closed_form"]["optima"] if one["name"] is not None]
    cuts = {one["start_s"] for one in phases} | ({one.t_s for one in steps} if len(steps) < SPANS else set())
    width_s, end_s = _width_s(axis), _end_s(axis)
    kept = [0.0]
    for cut in sorted(cuts):
        if cut - kept[-1] >= width_s and end_s - cut >= width_s:
            kept.append(cut)
    return [_span(axis, a, b, phases) for a, b in zip(kept, [*kept[1:], end_s], strict=True)]


def _width_s(axis: Axis) -> float:
    return float(axis.table["end_s"].iloc[0] - axis.table["t_s"].iloc[0])


def _span(axis: Axis, start_s: float, end_s: float, phases: Sequence[dict[str, Any]]) -> Span:
    middle = (axis.table["t_s"] + axis.table["end_s"]).to_numpy() / 2
    rows = (middle >= start_s) & (middle < end_s)
    names = [one["name"] for one in phases if one["start_s"] <= start_s < one["end_s"]]
    full = _full(axis, "to_pd")[rows]
    parts = _parts(axis, rows)
    words = [f"link {_gbps(_mean(axis.of('to_pd', 'applied_bps')[rows]))} Gbps"]
    if (used := _used_share(axis, rows)) is not None:
        words.append(f"goodput {used:.0%} of 0.956 x applied, full {full.mean():.0%} of the time")
    queue_s = axis.of("to_pd", "queue_s")[rows]
    if np.nanmax(np.nan_to_num(queue_s), initial=0) > 0:
        words.append(f"queue delay up to {np.nanmax(queue_s):.3g} s")
    words += _moves(axis, start_s, end_s)
    words += _ttft(axis, start_s, end_s)
    failed = int(axis.table["failed"].to_numpy()[rows].sum())
    if failed:
        words.append(f"{failed} requests failed")
    return Span(start_s, end_s, names[0] if names else "", _limits(axis, rows, full, parts), "; ".join(words))


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
    width_s, whole_s = _width_s(axis), sum(parts.values())
    limits = []
    if axis.of("to_pd", "outage_s")[rows].sum() >= 0.5 * width_s * rows.sum():
        limits.append("an outage")
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


# what is wrong with the link or its meter
def _wrong_link(axis: Axis, steps: Sequence[LinkStep]) -> list[Finding]:
    found = []
    if unshaped := axis.summary["link"]["direct_packets"]:
        found.append(Finding("wrong", "unshaped", f"{unshaped} packets passed the link unshaped"))
    for direction in axis.used:
        found += [*_too_slow(axis, direction), *_too_fast(axis, direction), *_again(axis, direction)]
    return [*found, *_late(axis), *_resumed(axis)]


def _steady(axis: Axis, direction: str) -> Array:
    """Bins whose rate stands still, as in the bins beside them: samples may lie astride an edge."""
    asked, applied = axis.of(direction, "asked_bps"), axis.of(direction, "applied_bps")
    same = np.isclose(asked, applied, rtol=1e-6) & (applied > 0) & (axis.of(direction, "outage_s") == 0)
    padded = np.concatenate([[np.nan], applied, [np.nan]])
    steady: Array = same & np.isclose(applied, padded[:-2], rtol=1e-6) & np.isclose(applied, padded[2:], rtol=1e-6)
    return steady


def _too_slow(axis: Axis, direction: str) -> list[Finding]:
    """Less crosses than could, while there is always something to send: what waited in the bin before was more than two
    bins of sending."""
    before_s = np.nan_to_num(np.concatenate([[0.0], axis.of(direction, "queue_s")[:-1]]))
    goodput = axis.of(direction, "goodput_bps")
    rows = _steady(axis, direction) & (before_s >= 2 * _width_s(axis)) & ~np.isnan(goodput)
    can = TCP_EFFICIENCY * axis.of(direction, "applied_bps")[rows]
    if rows.sum() < 3 or (share := float(goodput[rows].sum() / can.sum())) >= LEAST:
        return []
    backlog = axis.of(direction, "backlog_bytes")[rows]
    if np.isnan(backlog).all():
        why = "a cap a flow, or what competes on the link"
    elif np.nanmedian(backlog) > 0:
        why = "its queue was full all the while: the shaper sends less than it was asked to, or again what is lost"
    else:
        why = "the shaper's queue was empty: TCP does not fill it (windows, losses, a cap a flow)"
    text = f"{direction}: goodput was {share:.1%} of 0.956 x the applied rate in {rows.sum()} bins with enough to send"
    first_s = float(axis.table["t_s"].to_numpy()[rows][0])
    return [Finding("wrong" if _on_wire(axis) else "note", "slow", f"{text}; {why}", first_s)]


def _too_fast(axis: Axis, direction: str) -> list[Finding]:
    """More crossed than the rate, over four bins in a row."""
    wire, applied = np.nan_to_num(axis.of(direction, "wire_bps")), axis.of(direction, "applied_bps")
    still = _steady(axis, direction)
    four = np.ones(4)
    if len(wire) < 4 or not _on_wire(axis):
        return []
    rows = np.convolve(still, four, "valid") == 4
    sums = np.convolve(wire, four, "valid"), np.convolve(applied, four, "valid")
    over = np.divide(*sums, out=np.zeros(len(rows)), where=rows)
    at = int(over.argmax())
    if over[at] <= MOST:
        return []
    start_s = float(axis.table["t_s"].iloc[at])
    text = f"{direction}: {over[at]:.1%} of the applied rate crossed for {4 * _width_s(axis):.3g} s from {start_s:g} s"
    return [Finding("wrong", "fast", f"{text}: the shaper lets too much through", start_s)]


def _again(axis: Axis, direction: str) -> list[Finding]:
    """Segments sent again although no loss was asked for, and packets that the shaper's queue had no room for: where
    TCP fills a queue, the one is what comes of the other, and no fault."""
    dropped, again = axis.of(direction, "drops"), axis.of(direction, "retransmits")
    drops, total = np.nansum(dropped), np.nansum(again)
    asked = axis.summary["link"]["asked"].get(direction, {})
    lossy = asked.get("loss", 0) > 0 or np.nansum(axis.of(direction, "line_lost")) > 0
    sent = axis.summary["link"]["wan_tx_bytes"] / 1514 if direction == "to_pd" else 0
    if not sent or lossy or total < AGAIN[0] * sent:
        if not drops:
            return []
        at_s = float(axis.table["t_s"].iloc[int(np.nanargmax(dropped))])
        text = f"{direction}: the shaper's queue was full and dropped {drops:.0f} packets, most about {at_s:g} s"
        return [Finding("note", "drops", text, at_s)]
    at_s = float(axis.table["t_s"].iloc[int(np.nanargmax(again))])
    by_queue = (
        f"; the shaper's queue was full and dropped {drops:.0f} packets (of up to {GSO} segments)" if drops else ""
    )
    explained = bool(axis.outages) or total <= GSO * drops
    level: Level = "note" if explained or total < AGAIN[1] * sent else "wrong"
    text = (
        f"{direction}: {total:.0f} segments were sent again, {total / sent:.2%} of all, without any loss asked for, "
        f"most about {at_s:g} s{by_queue}"
    )
    return [Finding(level, "retransmits", text, at_s)]


def _late(axis: Axis) -> list[Finding]:
    """Steps that the kernel had later than it may take."""
    scale = axis.summary["meter"]["time_scale"]
    lates = [(one["late_s"], one["t_s"]) for one in axis.events if one["event"] == "link" and one["late_s"] is not None]
    late = [(late_s, at_s) for late_s, at_s in lates if scale and late_s / scale > LATE_WALL_S]
    if not late:
        return []
    worst_s, at_s = max(late)
    text = (
        f"{len(late)} of {len(lates)} steps of the link took hold more than {LATE_WALL_S * 1e3:g} ms of wall time "
        f"late; the latest at {at_s:.4g} s, {worst_s / scale * 1e3:.0f} ms"
    )
    return [Finding("wrong", "late", text, at_s)]


def _resumed(axis: Axis) -> list[Finding]:
    """The outages, and how long after the last of them nothing moved although something waited."""
    found = []
    start, width_s = axis.table["t_s"].to_numpy(), _width_s(axis)
    for direction in axis.used:
        outages = [(start_s, end_s) for start_s, end_s, way in axis.outages if way == direction]
        if not outages:
            continue
        moved = np.nan_to_num(axis.of(direction, "goodput_bps")) > 0
        waits_s = [
            start[after[0]] - end_s if (after := np.flatnonzero((start >= end_s) & moved)).size else math.inf
            for _, end_s in outages
            if end_s < _end_s(axis)
        ]
        worst = f"; it moved again within {max(max(waits_s), 0) + width_s:.3g} s of each end" if waits_s else ""
        if waits_s and math.isinf(max(waits_s)):
            worst = "; nothing moved after the last one"
        down_s = sum(end_s - start_s for start_s, end_s in outages)
        count = "1 outage" if len(outages) == 1 else f"{len(outages)} outages"
        text = f"{direction}: {count}, {down_s:.4g} s in all{worst}"
        found.append(Finding("note", "outage", text, outages[0][0]))
    return found


def _on_wire(axis: Axis) -> bool:
    return bool(axis.summary["clock"] == "wire")


# how the system took it
def _answers(axis: Axis, steps: Sequence[LinkStep]) -> list[Finding]:
    """After each step: when the threshold answered, and when the queue was gone. Of many steps, in one sentence."""
    if not steps:
        return []
    ends = [*(one.t_s for one in steps[1:]), _end_s(axis)]
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
    rows = ((axis.table["t_s"] >= step.t_s) & (axis.table["t_s"] < until_s)).to_numpy()
    if not rows.any():
        return None
    last, best = (float(axis.table[name].to_numpy()[rows][-1]) for name in ("threshold_tokens", "optimum_tokens"))
    beside = "" if math.isnan(best) else f"; the best of the phase is {_tokens(best)}"
    return Finding(
        "note", "no reaction", f"{step.words()}: the threshold was not {way}, {_tokens(last)}{beside}", step.t_s
    )


def _drained(axis: Axis, step: LinkStep, until_s: float) -> Finding | None:
    """After a step up: how long what waited took to go, down to a tenth."""
    start = axis.table["t_s"].to_numpy()
    waits = np.nan_to_num(axis.of("to_pd", "backlog_bytes")) + np.nan_to_num(axis.of("to_pd", "unsent_bytes"))
    before = waits[(start < step.t_s) & (start >= step.t_s - 2 * _width_s(axis))]
    if step.after_bps < step.before_bps or not before.size:
        return None
    peak = float(before.max())
    if peak * 8 / (TCP_EFFICIENCY * max(step.after_bps, 1.0)) < _width_s(axis):
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
