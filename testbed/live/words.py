"""What happened, in words for the log: the scheduler's changes, the link's steps, faults, failures, loads.

An event of the log: `id` (the same event has the same one), `t_s` (Unix seconds), `model_s` (since the load's t = 0),
`kind`, `text` (what), `why` (what brought it about).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final

from testbed.control import Change
from testbed.live.link_log import Step

MOST_ALIKE: Final = 3
"""Of changes of one kind and trigger in a row, that are told one by one; more are told together."""
_WAYS: Final = {"to_pd": "PrfaaS → PD", "to_prfaas": "PD → PrfaaS"}


def rate(bps: float) -> str:
    """A rate as people read it."""
    return f"{bps / 1e9:.3g} Gbps" if bps >= 0.995e9 else f"{bps / 1e6:.3g} Mbps"


def duration(seconds: float) -> str:
    """A time as people read it."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def changes(told: Iterable[Change]) -> list[tuple[Change, str, str]]:
    """(the change, what, why) for the log; many of a kind at once are one line."""
    out = []
    for _, alike in groupby(told, lambda change: (change.kind, change.trigger)):
        group = list(alike)
        if len(group) > MOST_ALIKE:
            out.append((group[-1], f"{len(group)} times, the last: {_change(group[-1])}", group[-1].trigger))
        else:
            out += [(change, _change(change), change.trigger) for change in group]
    return out


def _change(change: Change) -> str:
    before, after, node = change.before, change.after, change.node
    match change.kind:
        case "threshold":
            return f"threshold {_tokens(before)} → {_tokens(after)} tokens"
        case "regime":
            return f"bandwidth is {after}, was {before}"
        case "role":
            return f"{node} is to change from {before} to {after}; it drains"
        case "joined":
            return f"{node} serves {after}"
        case "node":
            return f"{node} is {after}, was {before}"
        case "policy":
            return f"policy {after}, was {before}"
        case "replicate":
            return f"a prefix of {_tokens(after)} tokens is copied from {before} to {node}"
        case "replicated":
            return f"a copied prefix is at {node}"
        case "recall":
            return f"request {before} is taken back from {node}"
        case "policy_error":
            return f"{before} {after}"
        case "fault":
            return f"healed: {before}" if after == "none" else str(after)
    return f"{change.kind} {node} {before} → {after}"


def _tokens(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if math.isfinite(value) else "∞"


def step(made: Step) -> tuple[str, str]:
    """(what, why) of a step of the link."""
    way = "both ways" if len(made.directions) > 1 else _WAYS[made.directions[0]]
    before, after = made.before or {}, made.after
    said = [
        text
        for key, text in (
            ("outage", _outage(before, after)),
            ("rate_bps", f"{_was(before, 'rate_bps', rate)}{rate(after['rate_bps'])}"),
            ("delay_s", f"delay {_was(before, 'delay_s', duration)}{duration(after['delay_s'])}"),
            ("jitter_s", f"jitter {_was(before, 'jitter_s', duration)}{duration(after['jitter_s'])}"),
            ("loss", f"loss {_was(before, 'loss', '{:.3g}'.format)}{after['loss']:.3g}"),
            ("per_flow_bps", "another cap for each connection"),
        )
        if before.get(key) != after[key] and not (before == {} and not after[key])
    ]
    return f"link {way}: {', '.join(said)}", _cause(made.layer)


def _was(before: Mapping[str, Any], key: str, words: Any) -> str:
    return f"{words(before[key])} → " if key in before else ""


def _outage(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return f"outage ({after['outage']})" if after["outage"] else f"the outage ({before.get('outage')}) is over"


def _cause(layer: str | None) -> str:
    if layer is None:
        return "its base state"
    if layer == "schedule":
        return "the load's schedule"
    if layer.startswith("chaos-"):
        return f"an experiment ({layer})"
    return f"fault {layer}"
