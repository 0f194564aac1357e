"""`junit.xml`: a gate's result as test results, a suite a scenario, and a case an objective, an invariant that was
promised, and the scenario's runs.

Worse is a failure; inconclusive and invalid are errors, as no verdict was reached; all else passes.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Final, Literal

from testbed.gate.result import GateResult, ScenarioResult, Verdict

ENDED: Final[dict[Verdict, Literal["failure", "error"] | None]] = {
    "better": None,
    "same": None,
    "worse": "failure",
    "inconclusive": "error",
    "invalid": "error",
}
NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What may not stand in XML 1.0 at all, not even escaped."""


@dataclass(frozen=True, slots=True)
class Case:
    """ended: None for one that passed. kind: the verdict. said: why."""

    name: str
    ended: Literal["failure", "error"] | None
    kind: str
    said: str
    wall_s: float = 0.0


def junit(result: GateResult) -> bytes:
    """The whole file, as the JUnit schema has it."""
    name = f"prfaas gate {result.suite.name}"
    root = ElementTree.Element("testsuites", name=_xml(name))
    suites = [(one.name, cases(one), _properties(result, one)) for one in result.scenarios]
    if not suites:
        suites = [(result.suite.name, [Case("verdict", ENDED[result.verdict], result.verdict, result.reasons[0])], {})]
    every = [case for _, found, _ in suites for case in found]
    _count(root, every)
    for scenario, found, properties in suites:
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(scenario), timestamp=result.taken_at[:19])
        _count(suite, found)
        if properties:
            box = ElementTree.SubElement(suite, "properties")
            for key, value in properties.items():
                ElementTree.SubElement(box, "property", name=key, value=_xml(value))
        for case in found:
            classname = f"gate.{result.suite.name}.{scenario}"
            node = ElementTree.SubElement(
                suite, "testcase", name=_xml(case.name), classname=_xml(classname), time=f"{case.wall_s:.3f}"
            )
            if case.ended is not None:
                ended = ElementTree.SubElement(node, case.ended, message=_xml(case.said), type=case.kind)
                ended.text = _xml(case.said)
            else:
                ElementTree.SubElement(node, "system-out").text = _xml(case.said)
    ElementTree.indent(root)
    out: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return out + b"\n"


def cases(one: ScenarioResult) -> list[Case]:
    """Of a scenario: its objectives, the promises made of its runs, and whether these can be believed."""
    invalid = [run for run in one.runs if run.status == "invalid"]
    said = "; ".join(f"seed {run.seed} of the {run.arm}: {', '.join(run.reasons)}" for run in invalid)
    wall_s = sum(run.wall_s for run in one.runs)
    runs = Case("runs", "error" if invalid else None, "invalid", said or f"{len(one.runs)} runs", wall_s)
    objectives = [
        Case(objective.metric, ENDED[objective.verdict], objective.verdict, objective.reason)
        for objective in one.objectives
    ]
    promises = [
        Case(f"invariant {found.name}", "failure" if found.worse else None, "worse", found.reason)
        for found in one.invariants
        if found.worse or (found.checked and found.promised)
    ]
    return [runs, *objectives, *promises]


def _properties(result: GateResult, one: ScenarioResult) -> dict[str, str]:
    return {
        "baseline": result.baseline.given,
        "candidate": result.candidate.given,
        "verdict": one.verdict,
        "seeds": ", ".join(map(str, one.seeds)),
        "stopped": one.stopped,
    }


def _count(node: ElementTree.Element, found: list[Case]) -> None:
    node.set("tests", str(len(found)))
    node.set("failures", str(sum(case.ended == "failure" for case in found)))
    node.set("errors", str(sum(case.ended == "error" for case in found)))
    node.set("time", f"{sum(case.wall_s for case in found):.3f}")


def _xml(text: str) -> str:
    return NOT_XML.sub("\ufffd", text)
