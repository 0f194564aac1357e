"""All invariants of a run, in their order, and what they make of its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from testbed.invariants.accounts import bytes_conserved
from testbed.invariants.calm import no_cycle, role_changes, threshold_changes
from testbed.invariants.decisions import deterministic
from testbed.invariants.finding import Finding, Run
from testbed.invariants.life import causal, conserved
from testbed.invariants.little import littles_law
from testbed.invariants.queues import drained, not_starved
from testbed.invariants.recovery import recovered
from testbed.invariants.work import work_conserved

Invariant = Callable[[Run], Finding]

INVARIANTS: Final[Sequence[Invariant]] = (
    conserved,
    causal,
    bytes_conserved,
    littles_law,
    work_conserved,
    deterministic,
    drained,
    not_starved,
    threshold_changes,
    role_changes,
    no_cycle,
    recovered,
)
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
