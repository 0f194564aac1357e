"""The invariants' words, from a summary's `invariants`: for `report.md`, and for the terminal at a run's end."""

from __future__ import annotations

from typing import Any


def invariant_lines(summary: dict[str, Any]) -> list[str]:
    """Them all as Markdown; none of a summary from before there were any."""
    findings = summary.get("invariants")
    if not findings:
        return []
    return [
        "## Invariants",
        "",
        f"{_counted(findings)}.",
        "",
        *(
            f"- {'**broken**' if one['status'] == 'broken' else one['status'].replace('_', ' ')}, `{one['name']}`: "
            f"{one['sentence']}"
            for one in sorted(findings, key=lambda one: one["status"] != "broken")
        ),
        "",
    ]


def invariant_line(summary: dict[str, Any]) -> str | None:
    """One line for the end of a run."""
    findings = summary.get("invariants")
    if not findings:
        return None
    broken = [one["sentence"] for one in findings if one["status"] == "broken"]
    return f"invariants: {'; '.join([_counted(findings), *broken])}"


def _counted(findings: list[dict[str, Any]]) -> str:
    counts = {status: sum(one["status"] == status for one in findings) for status in ("held", "broken", "not_checked")}
    words = [f"{counts['held']} held"]
    words += [f"{counts['broken']} broken"] if counts["broken"] else []
    words += [f"{counts['not_checked']} not checked"] if counts["not_checked"] else []
    return ", ".join(words)
