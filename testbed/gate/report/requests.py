"""The requests of a run that are worth a look, each with its explanation in two or three sentences.

What is said of one is `testbed.explain`'s, shortened; `prfaas explain RUN REQUEST` has the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from testbed.explain import Explainer
from testbed.gate.report.view import Told
from testbed.report.window import completed

WORST: Final = 3
"""So many requests of each kind."""
CHANGES: Final = 2
"""So many of the changes before a request are named."""


def worst(told: Explainer, besides: Sequence[Told] = ()) -> list[Told]:
    """The slowest of a run, and before them those that failed. besides: of those that are told there all is said."""
    table = told.requests
    ok = completed(table)
    failed = table[~ok].head(WORST)
    slowest = table[ok].nlargest(WORST, "ttft_s")
    said = {one.request_id: one for one in besides}
    return [
        replace(said[name], sentences=["As above."], was_s=None) if name in said else _told(told, name, None)
        for name in map(str, [*failed["request_id"], *slowest["request_id"]])
    ]


def lost_most(told: Explainer, base: Explainer) -> list[Told]:
    """The requests that wait longest beyond what they waited in the other run, which had the very same requests; those
    first that failed here alone."""
    columns = ["request_id", "ttft_s"]
    now, was = [one.requests[completed(one.requests)][columns] for one in (told, base)]
    failed = was[~was["request_id"].isin(now["request_id"])].head(WORST)
    both = now.merge(was, on="request_id", suffixes=("", "_was"))
    both["more_s"] = both["ttft_s"] - both["ttft_s_was"]
    slower = both[both["more_s"] > 0].nlargest(WORST, "more_s")
    pairs = [*zip(failed["request_id"], failed["ttft_s"], strict=True)]
    pairs += zip(slower["request_id"], slower["ttft_s_was"], strict=True)
    return [_told(told, request_id, float(was_s)) for request_id, was_s in pairs]


def _told(told: Explainer, request_id: str, was_s: float | None) -> Told:
    found = told.tell(str(request_id))
    return Told(
        request_id=str(request_id),
        ttft_s=found["ttft_s"],
        was_s=was_s,
        sentences=[text for text in (_ending(found), _where(found), _parts(found), _before(found)) if text],
        command=f"prfaas explain {told.folder} {request_id}",
    )


def _ending(found: dict[str, Any]) -> str:
    error = found["error"] or found["client_error"]
    return f"It failed: {error} ({found['error_message'] or 'the client says so'})." if error else ""


def _where(found: dict[str, Any]) -> str:
    decision = found["decision"]
    tokens = f"{found['input_tokens']:,} tokens in"
    cached = "" if decision is None else _cached(found["input_tokens"], decision["uncached_pd"])
    if decision is None:
        return f"{tokens}; control never decided on it."
    if not decision["prefill_node"]:
        return f"{tokens}; no node was chosen: {decision['reason']}."
    t = decision["threshold_tokens"]
    words = "no threshold" if t is None else "t above every length" if math.isinf(t) else f"t = {t:,.0f} tokens"
    regime = f", bandwidth {decision['regime']}" if decision["regime"] else ""
    tries = f", in attempt {found['attempts']}" if found["attempts"] > 1 else ""
    waits = ""
    if (decision["prefill_queue_s"] or 0.0) >= 0.05:
        waits = f" {decision['prefill_queue_s']:.1f} s of prefill waited there when it was chosen."
    return (
        f"{tokens}{cached}; prefilled at {decision['prefill_node']} "
        f"({decision['prefill_site']}{tries}) by the rule “{decision['reason']}” with {words}{regime}.{waits}"
    )


def _cached(tokens: int, uncached: int) -> str:
    return "" if uncached == tokens else f", {uncached:,} of them not cached locally"


def _parts(found: dict[str, Any]) -> str:
    known = {part: value for part, value in found["ttft_parts_s"].items() if value is not None and value >= 0.005}
    if found["ttft_s"] is None or not known:
        return ""
    largest = max(known, key=lambda part: known[part])
    added = " + ".join(f"{part} {value:.2f}" for part, value in known.items())
    return f"TTFT {found['ttft_s']:.2f} s = {added}; most of it is {largest}."


def _before(found: dict[str, Any]) -> str:
    recent = sorted(found["changes_before"], key=lambda one: float(one["ago_s"]))[:CHANGES]
    if not recent:
        return ""
    return "Before: " + "; ".join(f"{one['ago_s']:.1f} s earlier {_change(one)}" for one in recent) + "."


def _change(one: dict[str, Any]) -> str:
    before, after = (_value(one["kind"], str(one[key])) for key in ("before", "after"))
    node = f" of {one['node']}" if one["node"] else ""
    trigger = f" ({one['trigger']})" if one["trigger"] else ""
    return f"{one['kind']}{node} {before} to {after}{trigger}"


def _value(kind: str, value: str) -> str:
    if kind == "threshold":
        return f"{float(value):,.0f}" if value and math.isfinite(float(value)) else "all local"
    return f"{float(value) / 1e9:g} Gbps" if kind == "link" and value else value or "none"
