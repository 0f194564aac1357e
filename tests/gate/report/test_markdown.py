"""`report.md`: short enough for a comment, the verdict first, and nothing in it that somebody else made markup."""

import re

import pytest

from testbed.gate.report.markdown import MOST_BYTES, markdown, plain
from testbed.gate.report.of_gate import view
from testbed.gate.report.view import View


@pytest.fixture(scope="module")
def text(result, folder):
    return markdown(view(result, folder))


def test_the_verdict_is_the_first_line(text):
    assert text.splitlines()[0] == (
        "## 🔴 Worse: mine:HalfAway is worse than git:HEAD\\~1 "
        "in 3 of 7 objectives in 4 scenarios and breaks 1 promise that the baseline keeps."
    )


def test_every_objective_is_a_row_of_as_many_cells(text, result):
    table = [line for line in text.split("<details>")[0].splitlines() if line.startswith("|")]
    assert len(table) == 2 + sum(len(one.objectives) for one in result.scenarios)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {9}


def test_scenarios_are_folded_and_closed(text, result):
    assert text.count("<details>") == text.count("</details>") == len(result.scenarios) + 1


def test_a_long_one_is_cut_between_blocks_and_says_so(result, folder):
    one = result.scenarios[0]
    many = [one.model_copy(update={"name": f"{one.name}-{i}", "description": "x" * 2000}) for i in range(60)]
    text = markdown(view(result.model_copy(update={"scenarios": many}), folder))
    assert MOST_BYTES * 0.9 < len(text.encode()) < 65_000
    assert text.count("<details>") == text.count("</details>")
    assert text.rstrip().endswith("report.html has all of it.*")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("a|b", "a\\|b"),
        ("@everyone", "&#64;everyone"),
        ("[x](y)", "\\[x\\]\\(y\\)"),
        ("two\nlines", "two lines"),
        ("https://example.org", "https&#58;//example.org"),
        ("# `code`", "\\# \\`code\\`"),
    ],
)
def test_a_text_means_itself(given, told):
    assert plain(given) == told


def test_nothing_to_say_is_said():
    assert markdown(View("t", "same", "Same.", [], [], None, [], [])).startswith("## ⚪ Same.\n")
