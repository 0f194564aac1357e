"""The shipped policies' rules, where the paper's threshold comes from, and how a policy of one's own is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.profile import load_profile
from testbed.lengths import hardware
from testbed.policies import SHIPPED, load_policy, wants_future
from testbed.scenario import ScenarioError
from testbed.scheduler import model
from testbed.scheduler.api import Decision, Future, NodeView, Policy, Reject, RequestView, Setup, SystemView
from testbed.scheduler.rules import least_loaded_decode, least_loaded_prefill, solve_threshold

FLEET = (("f0", "prfaas", "prefill"), ("f1", "prfaas", "prefill"), ("p0", "pd", "prefill"), ("p1", "pd", "prefill"))
DECODERS = (("d0", "pd", "decode"), ("d1", "pd", "decode"))


def system(*dead: str) -> SystemView:
    """Two prefill nodes a site and two decode nodes, all alive but `dead`."""
    nodes = {name: NodeView(name, site, role, 10) for name, site, role in (*FLEET, *DECODERS)}  # type: ignore[arg-type]
    for node in nodes.values():
        node.alive = node.name not in dead
    return SystemView(nodes, 100e9)


def request(tokens: int) -> RequestView:
    return RequestView("a", 0.0, tokens)


@pytest.fixture(scope="module")
def paper() -> Setup:
    """The case study (section 4): 4 PrfaaS instances, 3 + 5 local ones, 100 Gbps, log-normal lengths."""
    return Setup(
        link_nominal_bps=100e9,
        n_prfaas=4,
        n_p=3,
        n_d=5,
        hardware={"prfaas": hardware(load_profile("h200-1t")), "pd": hardware(load_profile("h20-1t"))},
        decode_step_s=0.025,
        decode_slots=20,
        lengths=model.LengthDistribution.log_normal(mu=9.90, sigma=1.00, low=128, high=131_072),
    )


def changed(setup: Setup, **fields: Any) -> Setup:
    return Setup(**{name: getattr(setup, name) for name in Setup.__dataclass_fields__} | fields)


def started(name: str, setup: Setup, **parameters: float) -> Policy:
    policy = load_policy(name)
    still = Future(lambda at_s: setup.link_nominal_bps, lambda at_s: setup.lengths)
    policy.start(changed(setup, parameters=parameters, future=still if wants_future(policy) else None))
    return policy


def route(policy: Policy, tokens: int, view: SystemView | None = None) -> Decision:
    decision = policy.route(request(tokens), view or system())
    assert isinstance(decision, Decision)
    return decision


class TestThreshold:
    """Equation (7): t where Theta_prfaas / p = Theta_pd-p / (1 - p)."""

    def test_prfaas_solves_the_papers_threshold(self, paper: Setup) -> None:
        assert started("prfaas", paper).threshold_tokens == pytest.approx(19_600, abs=50)  # type: ignore[attr-defined]

    def test_it_is_the_models(self, paper: Setup) -> None:
        solved = model.solve_threshold(
            model.System(
                paper.hardware["pd"],
                paper.hardware["prfaas"],
                paper.link_nominal_bps,
                decode_step_s=paper.decode_step_s,
                decode_slots=paper.decode_slots,
                output_tokens=1024,
            ),
            model.Fleet(4, 3, 5),
            paper.lengths,
        )
        assert started("prfaas", paper).threshold_tokens == solved.threshold_tokens  # type: ignore[attr-defined]
        assert started("static", paper).threshold_tokens == solved.threshold_tokens  # type: ignore[attr-defined]

    def test_static_takes_the_threshold_it_is_given(self, paper: Setup) -> None:
        assert started("static", paper, threshold_tokens=5000.0).threshold_tokens == 5000.0  # type: ignore[attr-defined]

    def test_a_narrower_link_sends_less_away(self, paper: Setup) -> None:
        assert solve_threshold(changed(paper, link_nominal_bps=4e9)) > solve_threshold(paper)

    def test_without_remote_prefill_everything_is_local(self, paper: Setup) -> None:
        assert solve_threshold(changed(paper, n_prfaas=0)) == model.ALL_LOCAL

    def test_without_local_prefill_everything_is_remote(self, paper: Setup) -> None:
        assert solve_threshold(changed(paper, n_p=0)) == model.ALL_REMOTE


class TestRules:
    """l > t goes to PrfaaS, l <= t stays."""

    @pytest.mark.parametrize("name", ["prfaas", "static"])
    def test_a_threshold_divides_the_requests(self, paper: Setup, name: str) -> None:
        policy = started(name, paper)
        t = policy.threshold_tokens  # type: ignore[attr-defined]
        assert route(policy, int(t))[:4] == ("p0", "d0", "not longer than t", t)
        assert route(policy, int(t) + 1)[:4] == ("f0", "d0", "longer than t", t)

    @given(tokens=st.integers(1, 131_072))
    def test_naive_sends_everything_away(self, tokens: int) -> None:
        assert route(load_policy("naive"), tokens) == Decision("f0", "d0", "all remote", 0.0)

    @given(tokens=st.integers(1, 131_072))
    def test_homogeneous_keeps_everything(self, tokens: int) -> None:
        assert route(load_policy("homogeneous"), tokens) == Decision("p0", "d0", "all local", None)

    @pytest.mark.parametrize(
        ("name", "tokens", "dead", "node", "site"),
        [
            ("naive", 100, ("f0", "f1"), "p0", "prfaas"),
            ("homogeneous", 100, ("p0", "p1"), "f0", "pd"),
            ("prfaas", 131_072, ("f0", "f1"), "p0", "prfaas"),
            ("prfaas", 128, ("p0", "p1"), "f0", "pd"),
        ],
    )
    def test_a_site_without_a_live_prefill_node_is_stood_in_for(
        self, paper: Setup, name: str, tokens: int, dead: tuple[str, str], node: str, site: str
    ) -> None:
        decision = route(started(name, paper), tokens, system(*dead))
        assert decision.prefill_node == node
        assert decision.reason.endswith(f", but no live prefill node at {site}")

    @pytest.mark.parametrize("name", list(SHIPPED))
    @pytest.mark.parametrize("dead", [("f0", "f1", "p0", "p1"), ("d0", "d1")])
    def test_when_nothing_lives_the_request_is_rejected(self, paper: Setup, name: str, dead: tuple[str, ...]) -> None:
        answer = started(name, paper).route(request(1000), system(*dead))
        assert isinstance(answer, Reject)
        assert answer.reason == f"no live {'decode' if 'd0' in dead else 'prefill'} node"

    @pytest.mark.parametrize("name", list(SHIPPED))
    def test_a_dead_node_is_passed_over(self, paper: Setup, name: str) -> None:
        policy, view = started(name, paper), system("f0", "p0", "d0")
        for tokens in (128, 131_072):
            decision = route(policy, tokens, view)
            assert (decision.prefill_node[1], decision.decode_node) == ("1", "d1")


class TestWhichNode:
    """Inside a cluster every shipped policy chooses alike: the least loaded."""

    def test_least_prefill_work_in_seconds(self) -> None:
        view = system()
        view.nodes["p0"].queued_s, view.nodes["p0"].queued_requests = 2.0, 1
        view.nodes["p1"].queued_s, view.nodes["p1"].queued_requests = 1.5, 9
        assert least_loaded_prefill(view.prefill("pd")).name == "p1"

    def test_fewest_requests_a_slot(self) -> None:
        view = system()
        view.nodes["d0"].assigned_requests, view.nodes["d0"].slots = 6, 10
        view.nodes["d1"].assigned_requests, view.nodes["d1"].slots = 9, 20
        assert least_loaded_decode(view.decode()).name == "d1"

    def test_a_node_whose_landing_buffer_has_room_before_all_others(self) -> None:
        view = system()
        view.nodes["d0"].waiting_grants = 1
        view.nodes["d1"].assigned_requests = 9
        assert least_loaded_decode(view.decode()).name == "d1"
        view.nodes["d1"].waiting_grants = 5
        assert least_loaded_decode(view.decode()).name == "d0"

    def test_ties_go_to_the_first(self) -> None:
        view = system()
        assert least_loaded_prefill(view.prefill("pd")).name == "p0"
        assert least_loaded_decode(view.decode()).name == "d0"

    def test_roles_are_what_they_are_now(self) -> None:
        view = system()
        view.nodes["p0"].role = "decode"
        view.nodes_changed()
        assert [node.name for node in view.prefill("pd")] == ["p1"]
        assert [node.name for node in view.decode()] == ["p0", "d0", "d1"]


MINE = """
class Mine:
    def start(self, setup): self.setup = setup
    def route(self, request, view): return None

class NoMethods: pass
class NoRoute:
    def start(self, setup): pass
class NeedsArguments(Mine):
    def __init__(self, a): pass
class Raises(Mine):
    def __init__(self): raise RuntimeError("no licence")
class RaisesAttributeError(Mine):
    def __init__(self): self.missing
class Quits(Mine):
    def __init__(self): raise SystemExit(7)
not_a_class = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of somebody's own, importable."""
    (tmp_path / "mine_policy.py").write_text(MINE)
    (tmp_path / "mine_broken.py").write_text("import mine_policy\nmine_policy.no_such_name\n")
    (tmp_path / "mine_syntax.py").write_text("def (:\n")
    (tmp_path / "mine_lacking.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


class TestLoadPolicy:
    """By name, or as package.module:Class; every mistake is told in one sentence."""

    @pytest.mark.parametrize("name", list(SHIPPED))
    def test_a_shipped_policy_by_name(self, name: str) -> None:
        assert type(load_policy(name)) is SHIPPED[name]

    def test_every_load_gets_its_own_object(self) -> None:
        assert load_policy("prfaas") is not load_policy("prfaas")

    @pytest.mark.usefixtures("mine")
    def test_ones_own(self) -> None:
        assert type(load_policy("mine_policy:Mine")).__name__ == "Mine"

    def test_shipped_ones_have_an_address_too(self) -> None:
        assert type(load_policy("testbed.scheduler.prfaas:Prfaas")) is SHIPPED["prfaas"]

    @pytest.mark.usefixtures("mine")
    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("nonsense", "use one of prfaas, static, naive, homogeneous, oracle, or your own as package.module:Class"),
            ("", "use one of prfaas"),
            ("prfas", "did you mean prfaas? use one of"),
            ("homogenous", "did you mean homogeneous?"),
            ("no_such_module:Mine", "No module named 'no_such_module'; the module must be importable from the folder"),
            ("mine_lacking:Mine", "No module named 'a_module_that_is_not_there'"),
            ("mine_policy:Nine", "module mine_policy has no class 'Nine'"),
            ("mine_policy:", "module mine_policy has no class ''"),
            (":Mine", "cannot be imported: ValueError"),
            ("mine_broken:Mine", "cannot be imported: AttributeError"),
            ("mine_syntax:Mine", "cannot be imported: SyntaxError"),
            ("mine_policy:NeedsArguments", "cannot be made: TypeError"),
            ("mine_policy:Raises", "cannot be made: RuntimeError: no licence"),
            ("mine_policy:RaisesAttributeError", "cannot be made: AttributeError"),
            ("mine_policy:not_a_class", "cannot be made: TypeError"),
            ("mine_policy:Quits", "cannot be made: SystemExit: 7"),
            ("mine_policy:NoMethods", "has no method start and no method route; see testbed.scheduler.api.Policy"),
            ("mine_policy:NoRoute", "has no method route;"),
        ],
    )
    def test_a_mistake_is_named_with_its_remedy(self, name: str, says: str) -> None:
        with pytest.raises(ScenarioError) as caught:
            load_policy(name)
        assert str(caught.value).startswith(f"policy {name!r}: ")
        assert says in str(caught.value)


class TestEdited:
    """A policy whose file was edited is loaded as it is now, by the process that had loaded it before."""

    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        (tmp_path / "mine_package").mkdir()
        (tmp_path / "mine_package" / "__init__.py").touch()
        source = tmp_path / "mine_package" / "edited.py"
        monkeypatch.syspath_prepend(tmp_path)
        yield source
        for name in [name for name in sys.modules if name.startswith("mine_")]:
            del sys.modules[name]

    @staticmethod
    def write(source: Path, version: int) -> None:
        """The same size, and within one tick of the file system's clock: only the content tells them apart."""
        source.write_text(f"{MINE}\nMine.version = {version}\n")

    @staticmethod
    def version() -> int:
        return load_policy("mine_package.edited:Mine").version  # type: ignore[attr-defined,no-any-return]

    def test_it_is_the_new_one(self, source: Path) -> None:
        found = []
        for version in (1, 2, 2, 3):
            self.write(source, version)
            found.append(self.version())
        assert found == [1, 2, 2, 3]

    def test_one_that_was_not_edited_is_not_run_again(self, source: Path) -> None:
        self.write(source, 1)
        assert type(load_policy("mine_package.edited:Mine")) is type(load_policy("mine_package.edited:Mine"))

    def test_a_policy_that_is_in_charge_stays_what_it_is(self, source: Path) -> None:
        self.write(source, 1)
        before = load_policy("mine_package.edited:Mine")
        self.write(source, 2)
        load_policy("mine_package.edited:Mine")
        assert before.version == 1  # type: ignore[attr-defined]

    def test_an_edit_that_fails_is_told_and_mended_by_the_next(self, source: Path) -> None:
        self.write(source, 1)
        self.version()
        source.write_text("raise RuntimeError('half an edit')")
        with pytest.raises(ScenarioError, match="cannot be imported: RuntimeError: half an edit"):
            self.version()
        with pytest.raises(ScenarioError, match="half an edit"):
            self.version()
        self.write(source, 2)
        assert self.version() == 2

    def test_its_package_has_the_new_one_too(self, source: Path) -> None:
        self.write(source, 1)
        self.version()
        self.write(source, 2)
        self.version()
        assert sys.modules["mine_package"].edited is sys.modules["mine_package.edited"]  # type: ignore[attr-defined]
