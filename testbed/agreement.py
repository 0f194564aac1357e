"""How far a replay and its run agree: every decision and every change of the scheduler's, one by one.

`verify` replays a run under its own policy: whatever differs is a finding. `instead` replays it under another policy:
what differs is what that one would have done, on events that are still those of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Final

from testbed.replay import Key, Late, Replayed, read_told, replay
from testbed.report.rows import SCHEDULER_EVENTS
from testbed.runs import Row, find_run, read_rows, read_summary

DECISION: Final = (
    "attempts",
    "route_s",
    "prefill_node",
    "decode_node",
    "reason",
    "threshold_tokens",
    "regime",
    "prefill_tokens",
    "cache_node",
    "l_pd",
    "l_prfaas",
    "prefill_queue_s",
    "policy_error",
)
"""The columns of `gateway.csv` that are the decision and what it was made of."""

TOO_SLOW: Final = "PolicyTooSlowError: "
"""How the policy error begins that only a clock can make."""


def verify(run: str, *, differences: int = 10) -> dict[str, Any]:
    """Replay a run under its own policy. differences: how many to give in full.

    `agree` is whether every decision and change that could be compared is the same. Raises RunError, ScenarioError.
    """
    folder = find_run(run)
    told, rows, summary = read_told(folder), recorded(folder), read_summary(folder)
    made = replay(folder, late=_late(rows))
    agreeing, differing, missing = 0, [], Counter[str]()
    for key, row in rows.items():
        of_request = made.decisions.get(key, {})
        again = of_request.get(int(row["attempts"]))
        missing["earlier attempts, of which the run keeps no row"] += max(0, int(row["attempts"]) - 1)
        if again is None and (not of_request or _number(row["route_s"]) > made.last_s):
            missing["decisions whose events are not in the log"] += 1
            continue
        fields = _differing(row, again)
        agreeing += not fields
        if fields:
            differing.append({"request_id": key[0], "attempt": int(row["attempts"]), "fields": fields})
    changes, notes = _changes(folder, summary, made), _notes(summary, made)
    return {
        "run": str(folder),
        "policy": told.policy,
        "events": made.events,
        "decisions": {"compared": agreeing + len(differing), "agree": agreeing, "not_compared": _some(missing)},
        "changes": {key: changes[key] for key in ("compared", "agree")},
        "differences": [*differing[:differences], *changes["differences"][:differences]],
        "notes": [*notes, *changes["notes"]],
        "agree": not differing and changes["agree"] == changes["compared"],
    }


def instead(run: str, policy: str) -> dict[str, Any]:
    """What another policy would have decided of every request's first attempt, on the same events.

    Raises RunError, ScenarioError, ModelError and TraceError.
    """
    folder = find_run(run)
    told, rows = read_told(folder), recorded(folder)
    made = replay(folder, policy=policy)
    counts: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    first = {key: row for key, row in rows.items() if row["attempts"] == "1"}
    for key, row in first.items():
        again = made.decisions.get(key, {}).get(1)
        if again is None:
            counts["not_compared"] += 1
        elif again["prefill_site"] != row["prefill_site"]:
            counts["other_site"] += 1
            moves[f"{row['prefill_site'] or 'refused'} to {again['prefill_site'] or 'refused'}"] += 1
        elif again["prefill_node"] != row["prefill_node"]:
            counts["other_prefill_node"] += 1
        elif again["decode_node"] != row["decode_node"]:
            counts["other_decode_node"] += 1
        else:
            counts["same"] += 1
    notes = _notes({}, made)
    if made.swaps:
        notes.append(f"the run changed its policy on its way ({', '.join(made.swaps)}); {policy} was kept throughout")
    kinds = ("same", "other_site", "other_prefill_node", "other_decode_node", "not_compared")
    return {
        "run": str(folder),
        "policy": told.policy,
        "instead": policy,
        "events": made.events,
        "decisions": {"compared": len(first) - counts["not_compared"], **{kind: counts[kind] for kind in kinds}},
        "retried": len(rows) - len(first),
        "site_moves": dict(moves.most_common()),
        "threshold_changes": sum(change.kind == "threshold" for change in made.changes),
        "policy_errors": made.policy_errors,
        "notes": notes,
    }


def recorded(folder: Path) -> dict[Key, Row]:
    """The run's own rows, one a request that has ended. Raises RunError."""
    seen: Counter[str] = Counter()
    rows: dict[Key, Row] = {}
    for row in read_rows(folder / "gateway.csv"):
        seen[row["request_id"]] += 1
        rows[row["request_id"], seen[row["request_id"]]] = row
    return rows


def _late(rows: dict[Key, Row]) -> Late:
    return {
        (*key, int(row["attempts"])): row["policy_error"].removeprefix(TOO_SLOW)
        for key, row in rows.items()
        if row["policy_error"].startswith(TOO_SLOW) and row["reason"].startswith("fallback: ")
    }


def _differing(row: Row, again: dict[str, str] | None) -> dict[str, list[str]]:
    """The fields of a decision that are not the same, [recorded, replayed]."""
    if again is None:
        return {"attempts": [row["attempts"], "no such attempt"]}
    return {name: [row[name], again[name]] for name in DECISION if name in row and row[name] != again[name]}


def _changes(folder: Path, summary: dict[str, Any], made: Replayed) -> dict[str, Any]:
    """The changes of the timeline beside those of the replay; each is the same when all of it is."""
    from testbed.load import GATEWAY_LOST

    if any(reason.startswith(GATEWAY_LOST) for reason in summary["verdict"]["reasons"]):
        note = "the gateway was lost before it could say what had changed: changes are not compared"
        return {"compared": 0, "agree": 0, "differences": [], "notes": [note]}
    rows = [row for row in read_rows(folder / "timeline.csv") if row["event"] in SCHEDULER_EVENTS]
    was = Counter(
        (
            f"{float(row['t_s']):.6f}",
            row["event"],
            row["node"],
            _word(row["before"]),
            _word(row["after"]),
            row["trigger"],
        )
        for row in rows
    )
    now = Counter(
        (f"{one.t_s:.6f}", one.kind, one.node, _word(one.before), _word(one.after), one.trigger) for one in made.changes
    )
    apart = [(change, "recorded") for change in (was - now).elements()]
    apart += [(change, "replayed") for change in (now - was).elements()]
    names = ("t_s", "kind", "node", "before", "after", "trigger")
    differences = [
        {"change": dict(zip(names, change, strict=True)), "only": only}
        for change, only in sorted(apart, key=lambda one: float(one[0][0]))
    ]
    return {"compared": (was | now).total(), "agree": (was & now).total(), "differences": differences, "notes": []}


def _word(value: float | str) -> str:
    """A value of a change as it can be compared: an infinite threshold is empty in a table."""
    number = _number(value)
    if math.isnan(number):
        return str(value)
    return f"{number:.6g}" if math.isfinite(number) else ""


def _number(value: float | str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _notes(summary: dict[str, Any], made: Replayed) -> list[str]:
    notes = [made.cut] if made.cut else []
    if made.unended:
        notes.append(f"{made.unended} requests had not ended when the log did")
    ticks = sum(count for kind, count in summary.get("policy_errors", {}).items() if kind.startswith("tick: PolicyToo"))
    if ticks:
        notes.append(f"the policy was cut off {ticks} times while it looked around, which no replay can do again")
    return notes


def _some(counts: Counter[str]) -> dict[str, int]:
    return {what: count for what, count in counts.items() if count}
