"""Scenarios: what is shipped loads, what would be silently wrong is refused in one readable line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from testbed.policies import SHIPPED as POLICIES
from testbed.scenario import Scenario, ScenarioError, load, override, parse, shipped

JARGON = ("Input should", "pydantic", "validation error", "type=", "Value error", "__root__", "Traceback", "NoneType")

TOY = load("toy").model_dump(mode="json")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def refusal(*sets: str, scenario: str = "toy") -> str:
    """The one line with which the scenario is refused."""
    with pytest.raises(ScenarioError) as refused:
        load(scenario, sets)
    line = str(refused.value)
    assert "\n" not in line
    assert not any(word in line for word in JARGON)
    return line


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def data() -> dict[str, Any]:
    """The toy's resolved data, to spoil."""
    found: dict[str, Any] = yaml.safe_load(load("toy").to_yaml())
    return found


class TestWhatIsShipped:
    @pytest.mark.parametrize("name", shipped())
    def test_loads_under_its_own_name(self, name: str) -> None:
        assert load(name).name == name

    @pytest.mark.parametrize("name", shipped())
    def test_resolved_it_is_the_same_scenario_again(self, name: str, tmp_path: Path) -> None:
        scenario = load(name)
        again = load(written(tmp_path / "again.yaml", scenario.to_yaml()))
        assert again == scenario
        assert again.fingerprint() == scenario.fingerprint()

    @pytest.mark.parametrize("name", shipped())
    def test_its_policies_are(self, name: str) -> None:
        assert {deployment.policy.name for deployment in load(name).deployments} <= set(POLICIES)


class TestTheFile:
    def test_that_is_not_there(self) -> None:
        with pytest.raises(ScenarioError, match=r"^\./nowhere\.yaml: no such file; .*paper"):
            load("./nowhere.yaml")

    def test_whose_name_is_nearly_a_shipped_one(self) -> None:
        with pytest.raises(ScenarioError, match=r"'papr'.*did you mean paper\?.*\.yaml"):
            load("papr")

    def test_that_is_no_yaml(self, tmp_path: Path) -> None:
        with pytest.raises(ScenarioError, match=r"bad\.yaml: line 2: not YAML"):
            load(written(tmp_path / "bad.yaml", "name: x\nlink: {rate_bps: ]\n"))

    @pytest.mark.parametrize(("text", "what"), [("", "empty"), ("- 1\n", "a list"), ("toy", "a text")])
    def test_that_is_no_mapping(self, tmp_path: Path, text: str, what: str) -> None:
        with pytest.raises(ScenarioError, match=f"must be a mapping of keys, is {what}"):
            load(written(tmp_path / "bad.yaml", text))

    def test_that_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_bytes(b"name: \xff\xfe")
        with pytest.raises(ScenarioError, match="not UTF-8"):
            load(str(tmp_path / "bad.yaml"))

    def test_that_says_a_thing_twice(self, tmp_path: Path) -> None:
        text = load("toy").to_yaml() + "seed: 5\n"
        with pytest.raises(ScenarioError, match="seed is there twice"):
            load(written(tmp_path / "twice.yaml", text))

    def test_with_a_byte_order_mark_is_read(self, tmp_path: Path) -> None:
        assert load(written(tmp_path / "bom.yaml", "\ufeff" + load("toy").to_yaml())) == load("toy")

    def test_all_its_errors_are_told_a_line_each(self, tmp_path: Path, data: dict[str, Any]) -> None:
        data["seed"], data["slo"]["tpot"] = -1, 3
        path = written(tmp_path / "two.yaml", yaml.safe_dump(data))
        with pytest.raises(ScenarioError) as refused:
            load(path)
        lines = str(refused.value).splitlines()
        assert len(lines) == 2
        assert all(line.startswith(f"{path}: ") for line in lines)


class TestARefusal:
    """Each names the file, the key (items of lists by their names), the value and the remedy."""

    @pytest.mark.parametrize(
        ("item", "line"),
        [
            ("workload.rate=1", "workload.rate: unknown key; did you mean rate_rps? known here: arrivals, "),
            ("worklod.x=1", "worklod: unknown key; did you mean workload? known here: "),
            ("deployments.naive.fleet.n_dd=3", "deployments.naive.fleet.n_dd: unknown key; did you mean n_d? "),
            ("deployments.1.fleet.n_dd=3", "deployments.homogeneous.fleet.n_dd: unknown key"),
            ("workload.lengths.median=3", "workload.lengths.median: unknown key; known here: kind, "),
            ("link.5=1", "link.5: unknown key; known here: congestion_control, cross_traffic, delay_s, jitter_s, "),
        ],
    )
    def test_of_an_unknown_key_knows_the_near_ones(self, item: str, line: str) -> None:
        assert refusal(item).startswith(f"toy.yaml with --set: {line}")

    @pytest.mark.parametrize(
        ("item", "line"),
        [
            (
                "deployments.naive.fleet.n_d='3'",
                "deployments.naive.fleet.n_d = '3': must be a whole number, without quotes",
            ),
            ("deployments.naive.fleet.n_d=2.5", "deployments.naive.fleet.n_d = 2.5: must be a whole number"),
            ("deployments.naive.fleet.n_d=true", "deployments.naive.fleet.n_d = True: must be a whole number"),
            ("deployments.naive.fleet.n_d=0", "deployments.naive.fleet.n_d = 0: must be at least 1"),
            ("deployments.naive.fleet.n_d=65", "deployments.naive.fleet.n_d = 65: must be at most 64"),
            (
                "workload.duration_s=10m",
                "workload.duration_s = '10m': must be a number of seconds, without quotes or a unit",
            ),
            ("transport.outbox_bytes=64GiB", "transport.outbox_bytes = '64GiB': must be a whole number of bytes"),
            ("workload.duration_s=null", "workload.duration_s = nothing: must be a number of seconds"),
            ("workload.warmup_s=[1]", "workload.warmup_s = a list: must be a number of seconds"),
            ("slo.tpot_s=0", "slo.tpot_s = 0: must be above 0"),
            ("meter.cpu_fraction=90", "meter.cpu_fraction = 90: must be at most 1"),
            ("scale.byte_scale=2", "scale.byte_scale = 2: must be at most 1"),
            ("name=7", "name = 7: must be a text; quote it"),
            ("name=a/b", "name = 'a/b': must be letters, digits"),
            ("backend=vllm", "backend = 'vllm': must be 'timing'"),
            ("workload.arrivals.kind=bursty", "workload.arrivals.kind = 'bursty': must be 'poisson', 'gamma'"),
            ("workload.lengths.kind=zipf", "workload.lengths.kind = 'zipf': must be lognormal or mix"),
            ("workload.lengths={values: [1]}", "workload.lengths.kind = None: must be lognormal or mix"),
            ("workload.lengths.values=[]", "workload.lengths.values = a list: must have an item at least"),
            ("workload.lengths.values.1=0", "workload.lengths.values.1 = 0: must be at least 1"),
            (
                "workload.arrivals={kind: mmpp, states: [{multiplier: -1, sojourn_s: 9}]}",
                "workload.arrivals.states.0.multiplier = -1: must be at least 0",
            ),
            (
                "workload.arrivals={kind: mmpp, states: [{multiplier: 1, sojourn_s: 0}]}",
                "workload.arrivals.states.0.sojourn_s = 0: must be above 0",
            ),
            (
                "workload.arrivals={kind: mmpp, states: [{multiplier: 1, sojourn_s: 1, rate: 1}]}",
                "workload.arrivals.states.0.rate: unknown key; known here: multiplier, sojourn_s",
            ),
            (
                "workload.arrivals={kind: diurnal, period_s: 60, amplitude: 1.5}",
                "workload.arrivals.amplitude = 1.5: must be at most 1",
            ),
            (
                "workload.sessions={turns_mean: 0.5, think_s: 9}",
                "workload.sessions.turns_mean = 0.5: must be at least 1",
            ),
            (
                "workload.sessions={turns_mean: 2, think_s: 9, block: 9}",
                "workload.sessions.block: unknown key; did you mean block_size? known here: block_size, ",
            ),
            ("link=8gbps", "link = '8gbps': must be a mapping of keys"),
            ("limits.deadline_s=0", "limits.deadline_s = 0: must be above 0"),
            ("limits.waiting_requests=0", "limits.waiting_requests = 0: must be at least 1"),
            ("limits.deadline=9", "limits.deadline: unknown key; did you mean deadline_s? known here: deadline_s, "),
            ("scheduler.tick_s=0", "scheduler.tick_s = 0: must be above 0"),
            ("cache.block_tokens=0", "cache.block_tokens = 0: must be at least 1"),
            ("reload_s=0", "reload_s = 0: must be above 0"),
            (
                "deployments.naive.policy={name: prfaas, parameters: {dwell_s: long}}",
                "deployments.naive.policy.parameters.dwell_s = 'long': must be a number of seconds",
            ),
            (
                "deployments.naive.policy={name: prfaas, parameters: 9}",
                "deployments.naive.policy.parameters = 9: must be a mapping of keys",
            ),
            ("deployments=null", "deployments = nothing: must be a list"),
            ("deployments=[]", "deployments = a list: must have an item at least"),
            ("deployments.naive.fleet={}", "deployments.naive.fleet.n_d: missing; add it"),
        ],
    )
    def test_of_a_wrong_value_shows_it(self, item: str, line: str) -> None:
        assert refusal(item).startswith(f"toy.yaml with --set: {line}")

    @pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
    @pytest.mark.parametrize(
        "key",
        [
            "workload.duration_s",
            "workload.warmup_s",
            "workload.load_fraction",
            "workload.lengths.weights.0",
            "link.rate_bps",
            "scale.time_scale",
            "decode.step_s",
            "slo.ttft_p90_s",
            "telemetry_s",
        ],
    )
    def test_of_what_is_not_finite(self, key: str, value: str) -> None:
        line = refusal(f"{key}={value}")
        assert f"{key} = {value.replace('.', '')}: " in line
        assert "finite" in line or "must be" in line or "no rate" in line

    @pytest.mark.parametrize(
        ("rate", "why"),
        [
            ("100MB/s", "may mean bytes; write bits: 1 MB/s is 8mbit"),
            ("1GiB", "may mean bytes"),
            ("100mb", "may mean bytes"),
            ("1 Gibit/s", "unknown unit"),
            ("fast", "is not a rate; write e.g."),
            ("0", "no rate"),
            ("-8gbps", "is not a rate"),
            ("[1]", "is not a number"),
        ],
    )
    def test_of_a_rate_that_people_read_in_two_ways(self, rate: str, why: str) -> None:
        line = refusal(f"link.rate_bps={rate}")
        assert line.startswith("toy.yaml with --set: link.rate_bps = ")
        assert why in line

    @pytest.mark.parametrize(
        ("items", "part"),
        [
            (
                ["workload={rate_rps: 2, load_fraction: 0.5}"],
                "rate_rps = 2 and load_fraction = 0.5 are both set; remove",
            ),
            (["workload={}"], "set rate_rps (requests a model second) or load_fraction"),
            (["workload.warmup_s=300"], "warmup_s 300 must be below duration_s 300"),
            (["workload.arrivals.kind=as-is"], "arrivals.kind as-is needs a trace"),
            (["workload.trace=x.jsonl"], "arrivals.kind poisson is for synthetic workloads; use as-is or spread"),
            (["workload.arrivals.kind=gamma"], "kind gamma needs cv"),
            (["workload.arrivals.cv=2"], "cv = 2: has no meaning for poisson arrivals; leave it out, or use gamma"),
            (["workload.arrivals.kind=mmpp"], "kind mmpp needs states, such as [{multiplier: 1, sojourn_s: 60}"),
            (
                ["workload.arrivals={kind: mmpp, states: [{multiplier: 1, sojourn_s: 9}]}"],
                "states: mmpp arrivals need at least two",
            ),
            (
                [
                    "workload.arrivals.kind=mmpp",
                    "workload.arrivals.states=[{multiplier: 0, sojourn_s: 9}, {multiplier: 0, sojourn_s: 5}]",
                ],
                "and one with a multiplier above 0",
            ),
            (
                ["workload.arrivals.states=[{multiplier: 1, sojourn_s: 9}]"],
                "states: has no meaning for poisson arrivals; leave it out, or use mmpp",
            ),
            (["workload.arrivals={kind: diurnal, amplitude: 0.5}"], "kind diurnal needs period_s, the length of a day"),
            (["workload.arrivals={kind: diurnal, period_s: 60}"], "kind diurnal needs amplitude, the swing's share"),
            (["workload.arrivals.amplitude=0"], "amplitude = 0: has no meaning for poisson arrivals"),
            (
                ["workload.sessions={turns_mean: 3, think_s: 9}"],
                "workload.sessions.max_input_tokens: up to 131072 tokens, but deployments.prfaas-pd.profiles.prfaas",
            ),
            (
                ["workload.sessions={turns_mean: 3, think_s: 9, max_input_tokens: 32768, system_tokens: 500}"],
                "sessions.max_input_tokens = 32768: below the 33268 tokens of sessions.system_tokens and the longest",
            ),
            (
                ["workload={trace: x.jsonl, arrivals: {kind: as-is}, sessions: {turns_mean: 3, think_s: 9}}"],
                "sessions are for synthetic workloads, a trace has its own; remove one of them",
            ),
            (["workload.lengths.weights=[1]"], "2 values but 1 weights; give one weight a value"),
            (
                ["workload.lengths={kind: lognormal, min_tokens: 9, max_tokens: 9}"],
                "min_tokens 9 must be below max_tokens 9",
            ),
            (["workload.lengths.values=[65536, 1]"], "up to 65536 tokens, but deployments.prfaas-pd.profiles.prfaas"),
            (["deployments.naive.fleet={n_d: 2}"], "deployments.naive.fleet: n_prfaas + n_p must be at least 1"),
            (
                ["deployments.naive.profiles.prfaas=null"],
                "deployments.naive: fleet.n_prfaas is 2, but profiles.prfaas is",
            ),
            (["deployments.1.name=naive"], "names must differ, and prfaas-pd, naive, naive do not; rename one"),
            (
                ["deployments.naive.profiles.pd=h20"],
                "deployments.naive.profiles.pd: profile 'h20' does not exist; did you",
            ),
            (
                ["deployments.naive.profiles.pd=ring-2.5-1t"],
                "deployments.naive.profiles.pd: profile ring-2.5-1t has only",
            ),
            (
                ["transport.outbox_bytes=1000"],
                "transport.outbox_bytes = 1000: below the largest transfer of profile toy",
            ),
            (["transport.landing_bytes=799999999"], "transport.landing_bytes = 799999999: below the largest transfer"),
            (["deployments.naive.policy.name=naiv"], "deployments.naive.policy: name = 'naiv': did you mean naive?"),
            (["deployments.naive.policy.threshold_tokens=9"], "threshold_tokens = 9: policy naive would not use it"),
            (
                ["deployments.naive.policy.parameters={dwell_s: 9}"],
                "deployments.naive.policy: parameters: policy naive takes none (dwell_s would change nothing)",
            ),
            (
                ["deployments.naive.policy={name: prfaas, parameters: {threshold_tokens: 9}}"],
                "parameters.threshold_tokens = 9: a threshold is no free parameter; set policy.threshold_tokens",
            ),
        ],
    )
    def test_of_what_does_not_go_together(self, items: list[str], part: str) -> None:
        assert part in refusal(*items)

    def test_of_a_long_value_is_short(self) -> None:
        assert len(refusal(f"seed='{'x' * 5000}'")) < 200

    @given(st.sampled_from(sorted(Scenario.model_fields)), ANYTHING)
    def test_is_all_that_ever_happens_to_a_spoiled_scenario(self, key: str, value: Any) -> None:
        with contextlib.suppress(ScenarioError):
            parse({**TOY, key: value}, "fuzzed")


class TestSet:
    @pytest.mark.parametrize(
        ("item", "read"),
        [
            ("workload.duration_s=600", lambda s: s.workload.duration_s == 600),
            ("workload.duration_s=1e3", lambda s: s.workload.duration_s == 1000),
            ("link.rate_bps=16gbps", lambda s: s.link.rate_bps == 16e9),
            ("link.rate_bps=8 Gbit/s", lambda s: s.link.rate_bps == 8e9),
            ("transport.outbox_bytes=64e9", lambda s: s.transport.outbox_bytes == 64_000_000_000),
            ("deployments.naive.fleet.n_d=4", lambda s: s.deployment("naive").fleet.n_d == 4),
            ("deployments.2.fleet.n_d=4", lambda s: s.deployment("naive").fleet.n_d == 4),
            ("workload.lengths.values.0=2048", lambda s: s.workload.lengths.values == [2048, 32768]),
            ("slo={ttft_p90_s: 2}", lambda s: (s.slo.ttft_p90_s, s.slo.tpot_s) == (2, 0.025)),
            ("meter.late_p99_s=0.1", lambda s: s.meter.late_p99_s == 0.1),
            ("description=a=b, c", lambda s: s.description == "a=b, c"),
            ("workload.load_fraction=0.9", lambda s: s.workload.load_fraction == 0.9),
            ("workload.rate_rps=2", lambda s: (s.workload.rate_rps, s.workload.load_fraction) == (2, None)),
        ],
    )
    def test_lays_a_value_over_the_scenario(self, item: str, read: Any) -> None:
        assert read(load("toy", [item]))

    def test_later_ones_win(self) -> None:
        assert load("toy", ["seed=1", "seed=2"]).seed == 2

    def test_reaches_into_what_was_left_empty(self, tmp_path: Path) -> None:
        text = load("toy").to_yaml() + "\n"
        data = yaml.safe_load(text)
        data["scale"] = None
        path = written(tmp_path / "empty.yaml", yaml.safe_dump(data))
        assert load(path, ["scale.time_scale=3"]).scale.time_scale == 3

    @pytest.mark.parametrize(
        ("item", "part"),
        [
            ("workload", "must be key=value, such as workload.load_fraction=0.8"),
            ("=5", "must be key=value"),
            ("a..b=5", "must be key=value"),
            ("seed=[", "'[' is not a YAML value"),
            (
                "deployments.nobody.fleet.n_d=1",
                "deployments has no item 'nobody'; it has prfaas-pd, homogeneous, naive",
            ),
            ("deployments.3.fleet.n_d=1", "deployments has no item '3'"),
            ("workload.lengths.values.2=1", "workload.lengths.values has no item '2'; it has items 0 to 1"),
            ("name.x=1", "name is 'toy', which has no keys; set name itself"),
        ],
    )
    def test_of_a_bad_form_is_refused(self, item: str, part: str) -> None:
        line = refusal(item)
        assert line.startswith(f"--set '{item}'")
        assert part in line

    def test_on_a_resolved_scenario_is_the_same(self) -> None:
        items = ["workload.rate_rps=2", "deployments.naive.fleet.n_d=4", "link.rate_bps=16gbps"]
        assert override(load("toy"), items) == load("toy", items)


class TestOneDeployment:
    def test_is_the_first_unless_named(self) -> None:
        assert [d.name for d in load("toy").only(None).deployments] == ["prfaas-pd"]
        assert [d.name for d in load("toy").only("naive").deployments] == ["naive"]

    def test_that_is_not_there_is_refused_with_those_that_are(self) -> None:
        with pytest.raises(
            ScenarioError, match="scenario toy: no deployment 'nive'; it has prfaas-pd, homogeneous, naive"
        ):
            load("toy").only("nive")

    def test_under_another_policy_changes_nothing_else(self) -> None:
        before, after = load("toy").only(None), load("toy").only(None, "naive")
        assert after.deployments[0].policy.name == "naive"
        assert after.deployments[0].policy.threshold_tokens is None  # it was static's
        assert after.deployments[0].fleet == before.deployments[0].fleet

    def test_under_a_policy_of_ones_own_keeps_the_threshold(self) -> None:
        assert load("toy").only(None, "mine:Policy").deployments[0].policy.threshold_tokens == 8192

    def test_under_a_policy_there_is_not_is_refused(self) -> None:
        with pytest.raises(ScenarioError, match=r"--policy 'naiv'.*did you mean naive"):
            load("toy").only(None, "naiv")


class TestAPolicysParameters:
    def test_are_told_to_it_with_the_threshold(self) -> None:
        items = ["deployments.prfaas-pd.policy={name: 'mine:Policy', threshold_tokens: 9}"]
        spec = load("toy", [*items, "deployments.prfaas-pd.policy.parameters.dwell_s=2"]).deployment().policy
        assert spec.told == {"dwell_s": 2, "threshold_tokens": 9}

    def test_are_its_own_and_not_another_policys(self) -> None:
        ours = load("toy", ["deployments.prfaas-pd.policy={name: prfaas, parameters: {dwell_s: 2}}"])
        assert ours.only(None, "prfaas").deployments[0].policy.told == {"dwell_s": 2}
        assert ours.only(None, "mine:Policy").deployments[0].policy.told == {}


class TestAFingerprint:
    def test_is_of_the_contents_and_not_of_the_file(self, tmp_path: Path) -> None:
        copy = load(written(tmp_path / "other.yaml", load("toy").to_yaml()))
        assert copy.fingerprint() == load("toy").fingerprint()
        assert load("toy", ["seed=2"]).fingerprint() != load("toy").fingerprint()

    def test_of_a_testbed_does_not_see_what_only_a_load_cares_for(self) -> None:
        of_a_load = load("toy", ["seed=2", "workload.rate_rps=1", "slo.tpot_s=1", "meter.late_p99_s=1"])
        assert of_a_load.fingerprint(testbed_only=True) == load("toy").fingerprint(testbed_only=True)
        other = load("toy", ["link.rate_bps=1gbps"])
        assert other.fingerprint(testbed_only=True) != load("toy").fingerprint(testbed_only=True)


class TestOverridesOfAProfile:
    def test_decode_and_pieces(self) -> None:
        scenario = load("toy", ["decode.step_s=0.05", "decode.slots=3", "transport.pieces=8"])
        profile = scenario.profile(scenario.deployment(), "pd")
        assert profile is not None
        assert (profile.decode_step_s, profile.decode_slots) == (0.05, 3)
        assert scenario.pieces(scenario.deployment(), "pd") == 8

    def test_a_site_without_a_profile_has_none(self) -> None:
        scenario = load("toy")
        assert scenario.profile(scenario.deployment("homogeneous"), "prfaas") is None
