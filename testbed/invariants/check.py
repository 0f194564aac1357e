"""All invariants of a run, in their order, and what they make of its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from testbed.invariants.finding import Finding, Run

Invariant = Callable[[Run], Finding]

INVARIANTS: Final[Sequence[Invariant]] = ()
"""Each is a function of a run; its docstring is its definition."""


def check(run: Run) -> list[Finding]:
    """What became of every invariant in a run, in the order of INVARIANTS."""
    return [invariant(run) for invariant in INVARIANTS]


def judge(summary: dict[str, Any], findings: Sequence[Finding]) -> None:
    """Put the findings into a summary, and into its verdict as far as they mean something there."""
    summary["invariants"] = [finding.to_json() for finding in findings]
    broken = [finding for finding in findings if finding.status == "broken" and finding.means != "note"]
    if not broken:
        return
    verdict = summary["verdict"]
    invalid = verdict["status"] == "invalid" or any(finding.means == "invalid" for finding in broken)
    reasons = [*verdict["reasons"], *(finding.sentence for finding in broken)]
    summary["verdict"] = {"status": "invalid" if invalid else "failed", "reasons": reasons}
