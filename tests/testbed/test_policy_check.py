"""`prfaas policy new` and `prfaas policy check`: what breaks the contract is named, with its line and the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from testbed.policies import SHIPPED
from testbed.policy_check import check_policy
from testbed.policy_check_source import Violation, read_source
from testbed.policy_new import new_policy
from testbed.scenario import ScenarioError

HEAD = """from testbed.scheduler.api import PD, Reject
from testbed.scheduler.rules import by_threshold


class Mine:
    def start(self, setup):
        self.setup, self.count = setup, 0

    def route(self, request, view):
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, from which policies are imported; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def checked(here: Path, body: str, before: str = "") -> list[Violation]:
    """The violations of a policy whose `route` is so."""
    text = before + HEAD + "".join(f"        {line}\n" for line in body.splitlines())
    (here / "mine.py").write_text(text)
    sys.modules.pop("mine", None)
    return check_policy("mine:Mine").violations


def line_of(here: Path, words: str) -> str:
    lines = (here / "mine.py").read_text().splitlines()
    return f"mine.py:{next(i for i, line in enumerate(lines, 1) if words in line)}"


class TestSource:
    @pytest.mark.parametrize(
        ("text", "rule", "words"),
        [
            ("import time", "purity", "imports time, a clock"),
            ("from datetime import datetime", "purity", "imports datetime, a clock"),
            ("import random", "purity", "seeded by chance"),
            ("import os", "purity", "reaches outside"),
            ("from pathlib import Path", "purity", "reaches outside"),
            ("import socket", "purity", "reaches outside"),
            ("import testbed.world", "sight", "knows what no scheduler can"),
            ("from netem import fluid", "sight", "knows what no scheduler can"),
            ("from testbed.scheduler import oracle", "sight", "is told the future"),
            ("open('x')", "purity", "open() reads or writes a file"),
            ("print(1)", "purity", "print() writes to standard output"),
            ("hash('a')", "purity", "differs from process to process"),
            ("import numpy as np\nnp.random.normal()", "purity", "draws from a generator that everybody shares"),
            ("def f(view):\n    return view.away.__self__", "sight", "__self__ reaches past"),
            ("def f(view):\n    return getattr(view.away, '__self__')", "sight", "__self__ reaches past"),
            ("def f(view):\n    return view.observed._outputs", "sight", "._outputs is somebody else's"),
        ],
    )
    def test_names_what_a_scheduler_has_no_business_with(
        self, tmp_path: Path, text: str, rule: str, words: str
    ) -> None:
        path = tmp_path / "policy.py"
        path.write_text(f"# a comment\n{text}\n")
        (one,) = read_source(path)
        assert one.rule == rule
        assert words in one.what
        assert one.where.endswith(f"policy.py:{len(text.splitlines()) + 1}")
        assert one.remedy

    def test_reads_the_modules_that_it_imports_too(self, here: Path) -> None:
        (here / "mine.py").write_text("import helper\n")
        (here / "helper.py").write_text("import time\n")
        (one,) = read_source(here / "mine.py")
        assert one.where == "helper.py:1"

    @pytest.mark.parametrize(
        "text",
        [
            "import math, heapq, collections.abc, numpy as np",
            "from random import Random\nchance = Random(7)",
            "import numpy as np\nchance = np.random.default_rng(7)",
            "from testbed.scheduler import model\nfrom testbed.scheduler.prfaas import Prfaas",
            "class A:\n    def f(self):\n        return self._x + super().f()",
        ],
    )
    def test_says_nothing_of_what_is_pure(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "policy.py"
        path.write_text(text)
        assert read_source(path) == []


class TestRun:
    def test_what_is_written_to_is_named_with_its_line(self, here: Path) -> None:
        found = checked(here, "view.nodes['pd-p-0'].queued_s = 0.0\nreturn by_threshold(request, view, 20_000.0)")
        assert (found[0].rule, found[0].where) == ("purity", line_of(here, "queued_s = 0.0"))
        assert "NodeView.queued_s is written to" in found[0].what

    def test_what_it_raises_is_named_with_its_line(self, here: Path) -> None:
        found = checked(here, "return by_threshold(request, view, self.missing)")
        assert (found[0].rule, found[0].where) == ("contract", line_of(here, "self.missing"))
        assert "AttributeError" in found[0].what

    def test_a_decision_that_cannot_be_carried_out_breaks_it(self, here: Path) -> None:
        body = "decision = by_threshold(request, view, 20_000.0)\nreturn decision._replace(prefill_node='nobody')"
        assert any("unknown node" in one.what for one in checked(here, body))

    def test_a_view_that_is_kept_breaks_it(self, here: Path) -> None:
        body = "self.kept = {'a': view.prefill(PD)[0]}\nreturn by_threshold(request, view, 20_000.0)"
        assert [one.what for one in checked(here, body)] == ["self.kept keeps a NodeView from one call to the next"]

    def test_the_order_of_a_set_is_no_reason(self, here: Path) -> None:
        body = (
            "decision = by_threshold(request, view, 20_000.0)\n"
            "return decision._replace(decode_node=list({node.name for node in view.decode()})[0])"
        )
        (one,) = checked(here, body)
        assert one.rule == "determinism"
        assert "two processes decided otherwise" in one.what

    def test_a_decision_has_to_be_quick(self, here: Path) -> None:
        body = "sum(range(40_000))\nreturn by_threshold(request, view, 20_000.0)"
        assert {one.rule for one in checked(here, body)} == {"speed"}

    def test_who_is_told_the_future_is_no_scheduler(self) -> None:
        (one,) = check_policy("oracle").violations
        assert (one.rule, one.what) == ("sight", "wants to be told the future")

    def test_a_policy_that_cannot_be_loaded_is_refused(self) -> None:
        with pytest.raises(ScenarioError, match="nowhere"):
            check_policy("nowhere:Mine")


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - {"oracle"}))
def test_the_shipped_policies_keep_it(name: str) -> None:
    done = check_policy(name)
    assert done.violations == []
    assert done.decisions > 500
    assert set(done.route_us) == {"12", "64"}


class TestNew:
    def test_a_skeleton_keeps_the_contract_as_it_is(self, here: Path) -> None:
        path, name = new_policy("my_policy", here / "policies")
        assert (path, name) == (here / "policies/my_policy.py", "policies.my_policy:MyPolicy")
        assert len(path.read_text().splitlines()) <= 30
        assert check_policy(name).violations == []

    @pytest.mark.parametrize("name", ["prfaas", "testbed", "My-Policy", "class", "2fast", "MyPolicy"])
    def test_a_name_that_cannot_be_is_refused(self, here: Path, name: str) -> None:
        with pytest.raises(ScenarioError, match="NAME"):
            new_policy(name, here)

    def test_nothing_is_overwritten(self, here: Path) -> None:
        new_policy("mine", here)
        with pytest.raises(ScenarioError, match="is there already"):
            new_policy("mine", here)
