"""`junit.xml`: by the schema that CI's readers share, a case an objective, each ended as it should."""

import xml.etree.ElementTree as ElementTree

import pytest

from testbed.gate.report.junit import junit

ATTRIBUTES = {
    "testsuites": ({"name", "tests", "failures", "errors", "time"}, {"testsuite"}),
    "testsuite": ({"name", "tests", "failures", "errors", "time", "timestamp"}, {"properties", "testcase"}),
    "properties": (set(), {"property"}),
    "property": ({"name", "value"}, set()),
    "testcase": ({"name", "classname", "time"}, {"failure", "error", "system-out"}),
    "failure": ({"message", "type"}, set()),
    "error": ({"message", "type"}, set()),
    "system-out": (set(), set()),
}
"""Of the Jenkins schema (junit-10.xsd): what each element that is written has to have, and may hold."""


def follows_the_schema(node: ElementTree.Element) -> None:
    attributes, children = ATTRIBUTES[node.tag]
    assert set(node.keys()) == attributes, node.tag
    for child in node:
        assert child.tag in children, (node.tag, child.tag)
        follows_the_schema(child)
    if node.tag in ("testsuites", "testsuite"):
        cases = list(node.iter("testcase"))
        assert int(node.get("tests")) == len(cases)
        assert int(node.get("failures")) == sum(case.find("failure") is not None for case in cases)
        assert int(node.get("errors")) == sum(case.find("error") is not None for case in cases)


@pytest.fixture(scope="module")
def root(result):
    return ElementTree.fromstring(junit(result))


def test_it_follows_the_schema(root):
    follows_the_schema(root)


def test_a_case_an_objective_of_every_scenario(root, result):
    names = {(case.get("classname"), case.get("name")) for case in root.iter("testcase")}
    for one in result.scenarios:
        for objective in one.objectives:
            assert (f"gate.quick.{one.name}", objective.metric) in names


def test_a_case_ends_as_its_verdict(root, result):
    ended = {"worse": "failure", "inconclusive": "error", "invalid": "error", "better": None, "same": None}
    by_name = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    for one in result.scenarios:
        for objective in one.objectives:
            case = by_name[f"gate.quick.{one.name}", objective.metric]
            found = next((kind for kind in ("failure", "error") if case.find(kind) is not None), None)
            assert found == ended[objective.verdict]
            if found:
                assert case.find(found).get("message") == objective.reason


def test_a_meter_that_failed_and_a_promise_that_was_broken_are_cases(result):
    one = result.scenarios[0]
    run = one.runs[0].model_copy(update={"status": "invalid", "reasons": ["late"]})
    promise = one.invariants[0].model_copy(update={"worse": True, "reason": "lost 3"})
    broken = one.model_copy(update={"runs": [run], "invariants": [promise]})
    root = ElementTree.fromstring(junit(result.model_copy(update={"scenarios": [broken]})))
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert cases["runs"].find("error").text == f"seed {run.seed} of the baseline: late"
    assert cases[f"invariant {promise.name}"].find("failure").text == "lost 3"


def test_what_xml_cannot_hold_is_replaced(result):
    one = result.scenarios[0].model_copy(update={"name": "a\x00b<&\x1b"})
    root = ElementTree.fromstring(junit(result.model_copy(update={"scenarios": [one]})))
    assert root.find("testsuite").get("name") == "a\ufffdb<&\ufffd"


def test_the_same_policy_has_a_case_too(result):
    same = result.model_copy(update={"verdict": "same", "same_policy": True, "scenarios": []})
    root = ElementTree.fromstring(junit(same))
    follows_the_schema(root)
    assert root.get("tests") == "1"
