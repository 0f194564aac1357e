"""What layers make of a link: whose word counts, what is refused, a token bucket by what was sent. Pure; no kernel."""

from __future__ import annotations

from typing import Any

import pytest

from netem.layers import Layer, LayerSpec, Meters, effective, laid_over
from netem.link import LinkError, LinkState

BASE = {"to_pd": LinkState(1e8), "to_prfaas": LinkState(2e7)}
BUCKET = {"peak_bps": 8e7, "base_bps": 8e6, "budget_bytes": 10e6}


def layer(**given: Any) -> LayerSpec:
    return LayerSpec.read({"name": "dip", "t0_ns": 0, "steps": [], **given})


def steps(*states: Any) -> list[dict[str, Any]]:
    return [{"at_s": float(i), "state": state} for i, state in enumerate(states)]


class TestTheEffectiveState:
    def test_is_the_base_without_layers_or_where_they_say_nothing(self) -> None:
        assert effective(BASE, []) == effective(BASE, [{}, {"to_pd": {}}]) == BASE

    def test_has_what_a_layer_says_and_the_base_in_all_else(self) -> None:
        made = effective(BASE, [{"delay_s": 0.01, "to_pd": {"rate_bps": 5e7}}])
        assert made == {"to_pd": LinkState(5e7, delay_s=0.01), "to_prfaas": LinkState(2e7, delay_s=0.01)}

    def test_has_the_last_layers_word_field_by_field(self) -> None:
        made = effective(BASE, [{"rate_bps": 3e7, "loss": 0.01}, {"to_pd": {"rate_bps": 4e7}}, {"loss": 0.02}])
        assert made == {"to_pd": LinkState(4e7, loss=0.02), "to_prfaas": LinkState(3e7, loss=0.02)}

    @pytest.mark.parametrize(
        ("outages", "holds"),
        [
            (["stall", None], "stall"),
            ([None, "stall"], "stall"),
            (["blackhole", "stall"], "blackhole"),
            (["stall", "blackhole"], "blackhole"),
            (["down", "blackhole"], "down"),
            ([None, None], None),
        ],
    )
    def test_of_two_outages_has_the_harder_and_nobodys_end_ends_anothers(
        self, outages: list[Any], holds: str | None
    ) -> None:
        made = effective(BASE, [{"outage": kind} for kind in outages])
        assert [state.outage for state in made.values()] == [holds, holds]

    def test_keeps_an_outage_of_the_base_whatever_layers_say(self) -> None:
        base = {"to_pd": LinkState(1e8, outage="blackhole"), "to_prfaas": LinkState(2e7)}
        made = effective(base, [{"outage": None, "rate_bps": 3e7}])
        assert made == {"to_pd": LinkState(3e7, outage="blackhole"), "to_prfaas": LinkState(3e7)}

    def test_has_an_outage_of_one_direction_there_alone(self) -> None:
        made = effective(BASE, [{"outage": "stall", "to_prfaas": {"outage": None}}])
        assert [made[way].outage for way in BASE] == ["stall", None]

    def test_is_judged_as_a_whole(self) -> None:
        """Jitter goes with a delay that another layer brings; without that, it cannot be had."""
        jitter, delay = {"jitter_s": 0.005}, {"delay_s": 0.01}
        assert effective(BASE, [jitter, delay])["to_pd"] == LinkState(1e8, delay_s=0.01, jitter_s=0.005)
        with pytest.raises(LinkError, match=r"^to_pd.jitter_s: 0.005 is more than delay_s = 0"):
            effective(BASE, [jitter])

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            ({"outage": "blackout"}, "outage: 'blackout' is no outage; use stall, blackhole, down, or null"),
            ({"rate_bps": 0}, "to_pd.rate_bps: 0 is no rate; a link that is down is an outage"),
            ({"rate": 1e8}, "to_pd.rate: .* is no field of the link"),
            ({"to_pd": 5}, "to_pd: 5 is not an object"),
            ({"mtu": 9000}, "to_pd.mtu: 9000 cannot change on a live link"),
        ],
    )
    def test_that_cannot_be_had_is_refused(self, said: dict[str, Any], why: str) -> None:
        with pytest.raises(LinkError, match=why) as refused:
            effective(BASE, [said])
        assert refused.value.remedy

    def test_refuses_a_direction_that_is_not_shaped_here(self) -> None:
        with pytest.raises(LinkError, match=r"to_prfaas: .* is not shaped here; use to_pd"):
            effective({"to_pd": LinkState(1e8)}, [{"to_prfaas": {"rate_bps": 1e8}}])


class TestALayer:
    def test_is_read_as_it_is_asked_for(self) -> None:
        made = layer(t0_ns=7, steps=steps({"rate_bps": 1e8}, {}), token_bucket={**BUCKET, "resume_s": 0.1})
        assert (made.name, made.t0_ns, made.resume_s) == ("dip", 7, 0.1)
        assert [(step.at_s, step.state) for step in made.steps] == [(0.0, {"rate_bps": 1e8}), (1.0, {})]
        assert made.bucket is not None
        assert (made.bucket.peak_bps, made.bucket.initial_bytes) == (8e7, None)

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            ({"name": ""}, "name"),
            ({"t0_ns": 1.5}, "t0_ns"),
            ({"steps": {}}, "steps"),
            ({"steps": [{"at_s": 0}]}, r"steps\[0\]"),
            ({"steps": [{"at_s": -1, "state": {}}]}, r"steps\[0\].at_s"),
            ({"steps": [{"at_s": 1, "state": {}}, {"at_s": 1, "state": {}}]}, r"steps\[1\].at_s"),
            ({"steps": [{"at_s": 0, "state": 5}]}, r"steps\[0\].state"),
            ({"token_bucket": 5}, "token_bucket"),
            ({"token_bucket": {"peak_bps": 8e7}}, "token_bucket"),
            ({"token_bucket": {**BUCKET, "base_bps": 9e7}}, "token_bucket.base_bps"),
            ({"token_bucket": {**BUCKET, "resume_s": 0}}, "token_bucket.resume_s"),
            ({"color": "red"}, "layer"),
        ],
    )
    def test_that_is_none_is_refused_by_field(self, given: dict[str, Any], field: str) -> None:
        with pytest.raises(LinkError, match=f"^{field}: ") as refused:
            layer(**given)
        assert refused.value.remedy

    def test_says_whether_it_will_stall(self) -> None:
        assert layer(steps=steps({}, {"to_pd": {"outage": "stall"}})).stalls
        assert layer(steps=steps({"outage": "stall"})).stalls
        assert not layer(steps=steps({"outage": "blackhole"}, {"outage": None})).stalls

    def test_says_nothing_before_its_first_step(self) -> None:
        assert effective(BASE, [Layer(layer(steps=steps({"rate_bps": 1e6}))).says]) == BASE

    def test_rates_of_a_token_bucket_lie_over_its_steps(self) -> None:
        said = laid_over({"rate_bps": 3e7, "to_pd": {"loss": 0.01}}, {"to_pd": {"rate_bps": 8e7}})
        assert said == {"rate_bps": 3e7, "to_pd": {"loss": 0.01, "rate_bps": 8e7}}


class TestATokenBucket:
    """Peak 80 Mbit/s, base 8, which refills it: 10 MB last 80e6 / 72e6 = 1.11 s of always sending."""

    def meters(self, **given: Any) -> Meters:
        spec = layer(t0_ns=10**9, token_bucket={**BUCKET, **given})
        return Meters(spec, {"to_pd": 500, "to_prfaas": 0})

    def sent(self, to_pd: float) -> dict[str, int]:
        return {"to_pd": 500 + round(to_pd), "to_prfaas": 0}

    def test_begins_at_its_peak_in_both_directions(self) -> None:
        assert self.meters().says == {"to_pd": {"rate_bps": 8e7}, "to_prfaas": {"rate_bps": 8e7}}

    def test_is_looked_at_when_it_can_be_empty_at_the_soonest(self) -> None:
        assert self.meters().next_s == pytest.approx(80e6 / 72e6)

    def test_goes_on_at_its_peak_while_less_was_sent(self) -> None:
        meters = self.meters()
        assert not meters.look(2_111_111_111, self.sent(5e6))
        assert meters.next_s == pytest.approx(1.111 + (80e6 - 40e6 + 8e6 * 1.111) / 72e6, abs=0.01)

    def test_is_at_its_base_once_the_budget_is_sent_and_only_that_direction(self) -> None:
        meters = self.meters()
        assert meters.look(2_111_111_111, self.sent(11_111_200))
        assert meters.says == {"to_pd": {"rate_bps": 8e6}, "to_prfaas": {"rate_bps": 8e7}}

    @pytest.mark.parametrize(("resume_s", "resumes_s"), [(0.05, 0.5), (0.01, 0.1)])
    def test_is_at_its_peak_again_when_it_has_filled(self, resume_s: float, resumes_s: float) -> None:
        """The peak of resume_s at the base's 8 Mbit/s, a tenth of it."""
        meters = self.meters(resume_s=resume_s)
        sent = self.sent(11_111_200)
        assert meters.look(2_111_111_111, sent)
        assert not meters.look(2_111_111_111 + round((resumes_s - 0.02) * 1e9), sent)
        assert meters.look(2_111_111_111 + round((resumes_s + 0.02) * 1e9), sent)
        assert meters.says["to_pd"] == {"rate_bps": 8e7}

    def test_that_looks_before_its_t0_takes_that_for_t0(self) -> None:
        assert not self.meters().look(10**9 - 5, self.sent(0))
