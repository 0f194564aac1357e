"""`report.html`: says the verdict first, needs nothing else, and no text of anybody's is markup in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from testbed.gate.report.of_gate import view
from testbed.gate.report.page import page, spoken
from testbed.gate.report.view import Glyph
from testbed.gate.result import GateResult

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&`|"


class Seen(HTMLParser):
    """The elements of a page, and its texts by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        self.texts.setdefault(self._open, []).append(data)


def made(result: GateResult, folder: Path) -> str:
    return page(view(result, folder))


@pytest.fixture(scope="module")
def text(result: GateResult, folder: Path) -> str:
    return made(result, folder)


def test_the_verdict_comes_first_in_one_sentence(text):
    seen = Seen(text)
    assert seen.texts["h1"] == [
        "Worse: mine:HalfAway is worse than git:HEAD~1 "
        "in 3 of 7 objectives in 4 scenarios and breaks 1 promise that the baseline keeps."
    ]
    first = text.index("<h1>")
    assert all(first < text.index(what) for what in ("<table>", "<svg", "<details"))


def test_the_worst_scenario_is_first_and_open(text, result):
    assert re.findall(r'<details class="scenario"( open)?>\s*<summary><span class="name">([\w-]+)<', text)[0] == (
        " open",
        next(one.name for one in result.scenarios if one.verdict == "worse"),
    )


def test_it_fetches_nothing(text):
    for tag, attributes in Seen(text).tags:
        assert tag not in ("link", "iframe", "img")
        assert not {"src", "href"} & attributes.keys() or attributes.get("href") == "#main", (tag, attributes)
    assert "default-src 'none'" in text


def test_it_weighs_less_than_6_mb(text):
    assert len(text.encode()) < 6e6


def test_every_row_has_its_interval_unit_and_meaning(text, result):
    objective = result.scenarios[0].objectives[0]
    assert "4.058 s" in text
    assert "+6.4 % to +8.7 %" in text
    assert "bootstrap +6.9 % to +8.1 %" in text
    assert objective.unit == "s"
    assert "-0.3 points" in text
    assert "Time to first token, from when the workload schedules" in text
    assert "requests a second that meet every SLO" in text


def test_only_scenarios_whose_runs_are_there_are_drawn(text):
    data = [json.loads(one) for one in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]
    assert sorted(len(one["charts"]["arms"]) for one in data) == [0, 0, 0, 2]
    assert sum(one["charts"]["load"] is not None for one in data) == 1
    assert "cannot be read" in text


def test_no_text_is_markup(result, folder):
    arm = result.candidate.model_copy(update={"given": EVIL, "policy": EVIL})
    one = result.scenarios[0]
    found = one.invariants[0].model_copy(update={"name": EVIL, "reason": EVIL})
    objective = one.objectives[0].model_copy(update={"metric": f"phases.{EVIL}.ttft_s.p90", "reason": EVIL})
    scenario = one.model_copy(
        update={"name": EVIL, "description": EVIL, "invariants": [found], "objectives": [objective], "stopped": EVIL}
    )
    wicked = result.model_copy(
        update={"candidate": arm, "scenarios": [scenario], "reasons": [EVIL], "notes": [EVIL], "taken_at": EVIL}
    )
    seen, plain = Seen(made(wicked, folder)), Seen(made(result, folder))
    assert "img" not in {tag for tag, _ in seen.tags}
    assert not any("onerror" in attributes for _, attributes in seen.tags)
    kinds = [dict(attributes).get("type") for tag, attributes in seen.tags if tag == "script"]
    assert kinds == ["application/json", None, None]  # one scenario's data, the library, the page's own
    assert len([tag for tag, _ in plain.tags if tag == "script"]) == len(result.scenarios) + 2
    assert any(EVIL in text for text in seen.texts["h1"])


def test_the_same_policy_is_a_page_too(result, folder):
    same = result.model_copy(update={"verdict": "same", "same_policy": True, "scenarios": [], "reasons": ["nothing"]})
    assert "nothing was run" in made(same, folder)


def test_an_effect_is_said_in_words():
    assert spoken(Glyph(None, -2.0, 1.5)) == "-2 times what counts, open to +1.5; positive is better"


def test_a_scenario_whose_folder_is_no_run_says_so(result, tmp_path):
    assert "link-drop/baseline" in made(result, tmp_path)
