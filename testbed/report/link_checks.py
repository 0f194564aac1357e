"""What is wrong with a run's link, or with what measured it: the link doctor's checks, a finding each. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from netem.fluid import TCP_EFFICIENCY
from testbed.report.link_axis import Axis
from testbed.report.steps import Array

LEAST: Final = 0.95
"""What has to cross of what TCP can get while there is always more than enough to send."""

MOST: Final = 1.05
"""What may cross, of the rate, over a few bins."""

LATE_WALL_S: Final = 0.1
"""A step that the kernel has later than this is late: what a netlink call on a loaded machine may take."""

AGAIN: Final = (0.001, 0.01)
"""Segments sent again, of all, without any loss asked for: worth a note; wrong."""

FEW: Final = 10
"""Segments sent again that are none of anybody's business, however little was sent."""

GSO: Final = 45
"""Segments in the largest packet that the shaper sees: TCP hands it 64 kB at once."""

Level = Literal["wrong", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """level: `wrong`, of the link or the meter, or `note`. kind: a short name for it. t_s: where, if at one place."""

    level: Level
    kind: str
    text: str
    t_s: float | None = None


def wrong_link(axis: Axis) -> list[Finding]:
    """What is wrong with the link or its meter; and outages, as notes."""
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
    rows = _steady(axis, direction) & (before_s >= 2 * axis.width_s) & ~np.isnan(goodput)
    can = TCP_EFFICIENCY * axis.of(direction, "applied_bps")[rows]
    if rows.sum() < 3 or (share := float(goodput[rows].sum() / can.sum())) >= LEAST:
        return []
    backlog = axis.of(direction, "backlog_bytes")[rows]
    contended = bool((axis.summary["link"].get("cross_bytes") or {}).get(direction))
    if contended:
        why = "cross-traffic had the rest"
    elif np.isnan(backlog).all():
        why = "a cap a flow, or what competes on the link"
    elif np.nanmedian(backlog) > 0:
        why = "its queue was full all the while: the shaper sends less than it was asked to, or again what is lost"
    else:
        why = "the shaper's queue was empty: TCP does not fill it (windows, losses, a cap a flow)"
    text = f"{direction}: goodput was {share:.1%} of 0.956 x the applied rate in {rows.sum()} bins with enough to send"
    first_s = float(axis.table["t_s"].to_numpy()[rows][0])
    return [Finding("wrong" if _on_wire(axis) and not contended else "note", "slow", f"{text}; {why}", first_s)]


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
    text = f"{direction}: {over[at]:.1%} of the applied rate crossed for {4 * axis.width_s:.3g} s from {start_s:g} s"
    return [Finding("wrong", "fast", f"{text}: the shaper lets too much through", start_s)]


def _again(axis: Axis, direction: str) -> list[Finding]:
    """Segments sent again although no loss was asked for, and packets that the shaper's queue had no room for: where
    TCP fills a queue, the one is what comes of the other, and no fault."""
    dropped, again = axis.of(direction, "drops"), axis.of(direction, "retransmits")
    drops, total = np.nansum(dropped), np.nansum(again)
    asked = axis.summary["link"]["asked"].get(direction, {})
    lossy = asked.get("loss", 0) > 0 or np.nansum(axis.of(direction, "line_lost")) > 0
    sent = _sent_bytes(axis, direction) / 1514
    if not sent or lossy or total < max(FEW, AGAIN[0] * sent):
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


def _sent_bytes(axis: Axis, direction: str) -> float:
    """On the wire, of KV; towards prfaas of all that crossed: nobody counts it apart there."""
    if direction == "to_pd":
        return float(axis.summary["link"]["wan_tx_bytes"])
    return float(np.nansum(axis.of(direction, "wire_bps"))) * axis.width_s / 8


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
    start = axis.table["t_s"].to_numpy()
    for direction in axis.used:
        outages = [(start_s, end_s) for start_s, end_s, way in axis.outages if way == direction]
        if not outages:
            continue
        moved = np.nan_to_num(axis.of(direction, "goodput_bps")) > 0
        waits_s = [
            start[after[0]] - end_s if (after := np.flatnonzero((start >= end_s) & moved)).size else math.inf
            for _, end_s in outages
            if end_s < axis.end_s
        ]
        worst = ""
        if waits_s:
            took_s, scale = max(max(waits_s), 0.0) + axis.width_s, axis.summary["meter"]["time_scale"]
            wall = f" ({took_s / scale:.2g} s of wall time)" if scale and scale != 1 else ""
            worst = f"; it moved again within {took_s:.3g} s{wall} of each end"
        if waits_s and math.isinf(max(waits_s)):
            worst = "; nothing moved after the last one"
        down_s = sum(end_s - start_s for start_s, end_s in outages)
        count = "1 outage" if len(outages) == 1 else f"{len(outages)} outages"
        text = f"{direction}: {count}, {down_s:.4g} s in all{worst}"
        found.append(Finding("note", "outage", text, outages[0][0]))
    return found


def _on_wire(axis: Axis) -> bool:
    return bool(axis.summary["clock"] == "wire")
