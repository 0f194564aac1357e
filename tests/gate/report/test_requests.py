"""The requests that a report tells of are the right ones, and their sentences are the run's own figures."""

from pathlib import Path

import pytest

from testbed.explain import Explainer
from testbed.gate.report.requests import lost_most, worst


@pytest.fixture(scope="module")
def told(folder: Path) -> tuple[Explainer, Explainer]:
    return Explainer(folder / "link-drop" / "baseline"), Explainer(folder / "link-drop" / "candidate")


def test_the_slowest_are_told_slowest_first(told):
    rows = told[1].requests.sort_values("ttft_s", ascending=False)
    assert [one.request_id for one in worst(told[1])] == rows["request_id"].head(3).tolist()


def test_those_that_lost_most_are_found_by_pairs(told):
    was, now = (one.requests.set_index("request_id")["ttft_s"] for one in told)
    expected = (now - was).sort_values(ascending=False).head(3)
    found = lost_most(told[1], told[0])
    assert [one.request_id for one in found] == expected.index.tolist()
    assert [one.was_s for one in found] == pytest.approx(was[expected.index].tolist())


def test_the_sentences_say_where_it_went_and_what_its_ttft_was_made_of(told):
    one = worst(told[1])[0]
    row = told[1].requests.set_index("request_id").loc[one.request_id]
    text = " ".join(one.sentences)
    assert row["prefill_node"] in text
    assert f"TTFT {row['ttft_s']:.2f} s" in text
    assert "most of it is transfer" in text
    assert "link 100 Gbps to 5 Gbps" in text


def test_what_is_told_already_is_not_told_again(told):
    lost = lost_most(told[1], told[0])
    again = [one for one in worst(told[1], besides=lost) if one.request_id in {each.request_id for each in lost}]
    assert again
    assert {tuple(one.sentences) for one in again} == {("As above.",)}


def test_a_failed_request_comes_first(told, monkeypatch):
    table = told[1].requests.copy()
    table.loc[5, ["status", "error", "error_message"]] = ["failed", "refused", "no room"]
    monkeypatch.setattr(told[1], "requests", table)
    first = worst(told[1])[0]
    assert first.request_id == table.loc[5, "request_id"]
    assert first.sentences[0] == "It failed: refused (no room)."
    assert first.request_id in {one.request_id for one in lost_most(told[1], told[0])}
