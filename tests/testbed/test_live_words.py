"""What the live page's log says, and what its controls take and refuse."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.chaos import faults
from testbed.control import Change
from testbed.live import asked, words
from testbed.live.link_log import Step
from testbed.live.troubles import describe
from testbed.openai_api import ApiError
from testbed.scenario import Scale
from tests.testbed.live_session import ROLES

SCALE = Scale(time_scale=10, byte_scale=0.001)
AT = {"rate_bps": 16e9, "delay_s": 0.0, "jitter_s": 0.0, "loss": 0.0, "outage": None, "per_flow_bps": None}


@pytest.mark.parametrize(
    ("kind", "node", "before", "after", "said"),
    [
        ("threshold", "", 19641.2, 33516.0, "threshold 19,641 → 33,516 tokens"),
        ("threshold", "", 19641.2, float("inf"), "threshold 19,641 → ∞ tokens"),
        ("regime", "", "abundant", "scarce", "bandwidth is scarce, was abundant"),
        ("role", "pd-p-0", "prefill", "decode", "pd-p-0 is to change from prefill to decode; it drains"),
        ("joined", "pd-p-0", "prefill", "decode", "pd-p-0 serves decode"),
        ("node", "prfaas-0", "up", "lost", "prfaas-0 is lost, was up"),
        ("policy", "", "Prfaas", "static", "policy static, was Prfaas"),
        ("recall", "prfaas-0", "r7", "", "request r7 is taken back from prfaas-0"),
        ("fault", "", "none", "outage (stall) (page-1, 20 s)", "outage (stall) (page-1, 20 s)"),
        ("fault", "", "outage (stall) (page-1)", "none", "healed: outage (stall) (page-1)"),
    ],
)
def test_a_change_in_words(kind: str, node: str, before: Any, after: Any, said: str) -> None:
    ((_, text, why),) = words.changes([Change(1.0, kind, node, before, after, "the reason")])
    assert (text, why) == (said, "the reason")


def test_many_of_a_kind_at_once_are_one_line() -> None:
    told = [Change(1.0, "recall", "prfaas-0", f"r{i}", "", "the link is slow") for i in range(5)]
    ((_, text, _),) = words.changes(told)
    assert text == "5 times, the last: request r4 is taken back from prfaas-0"
    assert len(words.changes(told[:3])) == 3


@pytest.mark.parametrize(
    ("now", "directions", "layer", "said", "why"),
    [
        ({"rate_bps": 4e9}, 2, "page-1", "link both ways: 16 Gbps → 4 Gbps", "fault page-1"),
        ({"delay_s": 0.2}, 1, None, "link PrfaaS → PD: delay 0 ms → 200 ms", "its base state"),
        ({"outage": "stall"}, 2, "chaos-0", "link both ways: outage (stall)", "an experiment (chaos-0)"),
        ({"rate_bps": 0.5e9, "loss": 0.02}, 2, "schedule", "link both ways: 16 Gbps → 500 Mbps, loss 0 → 0.02",
         "the load's schedule"),
    ],
)  # fmt: skip
def test_a_step_of_the_link_in_words(now: dict[str, Any], directions: int, layer: Any, said: str, why: str) -> None:
    ways = ("to_pd", "to_prfaas")[:directions]
    assert words.step(Step(1, ways, layer, AT, {**AT, **now})) == (said, why)


def test_the_end_of_an_outage_in_words() -> None:
    assert words.step(Step(1, ("to_pd",), None, {**AT, "outage": "down"}, AT))[0].endswith("the outage (down) is over")


class TestWhatMayBeAsked:
    def test_a_step_of_the_link(self) -> None:
        step = asked.link_step({"rate_bps": "4gbps", "delay_s": 0.2, "duration_s": 60}, SCALE)
        assert step.says == {"rate_bps": 4e9, "delay_s": 0.2}
        assert describe(step) == "link: 4 Gbps, delay 200 ms"

    @pytest.mark.parametrize(
        ("body", "field", "said"),
        [
            ({"duration_s": 60}, "rate_bps", "nothing is asked of the link"),
            ({"rate_bps": 4e9}, "duration_s", "duration_s: missing; add it"),
            ({"rate_bps": 4e9, "duration_s": 0}, "duration_s", "duration_s = 0: must be above 0"),
            ({"rate_bps": 4e9, "duration_s": 0.1}, "duration_s", "can have 1 to 36000"),
            ({"rate_bps": 4e9, "duration_s": 1e9}, "duration_s", "can have 1 to 36000"),
            ({"rate_bps": 1e6, "duration_s": 60}, "rate_bps", "rate_bps = 1e+06: this machine's wire can have 1e+08"),
            ({"rate_bps": "16 GB", "duration_s": 60}, "rate_bps", "bytes"),
            ({"rate_bps": True, "duration_s": 60}, "rate_bps", "rate_bps = True"),
            ({"delay_s": 30, "duration_s": 60}, "delay_s", "delay_s = 30: this machine's wire can have 0 to 20"),
            ({"loss": 0.9, "duration_s": 60}, "loss", "loss = 0.9: must be at most 0.5"),
            ({"loss": float("nan"), "duration_s": 60}, "loss", "must be a finite number"),
            ({"rate": 4e9, "duration_s": 60}, "rate", "rate: unknown key; did you mean rate_bps?"),
            ({"rate_bps": 4e9, "duration_s": 60, "at_s": 3}, "at_s", "begins now"),
            ({"rate_bps": 4e9, "duration_s": 60, "direction": "up"}, "direction", "'to_pd' or 'to_prfaas'"),
        ],
    )
    def test_what_cannot_be_had_of_the_link_is_refused_in_words(
        self, body: dict[str, Any], field: str, said: str
    ) -> None:
        with pytest.raises(ApiError) as refused:
            asked.link_step(body, SCALE)
        assert (refused.value.status, refused.value.param) == (400, field)
        assert said in refused.value.message

    def test_a_fault(self) -> None:
        made = asked.fault({"kind": "slow_worker", "node": "pd-d-0", "duration_s": 60}, SCALE, ROLES)
        assert made == faults.SlowWorker(at_s=0.0, duration_s=60.0, node="pd-d-0")

    @pytest.mark.parametrize(
        ("body", "field", "said"),
        [
            ({"duration_s": 60}, "kind", "kind = None: no fault that can be made by hand; take outage"),
            ({"kind": "clients_leave", "duration_s": 60}, "kind", "kind = 'clients_leave'"),
            ({"kind": ["outage"], "duration_s": 60}, "kind", "kind = ['outage']"),
            ({"kind": "outage", "how": "never", "duration_s": 60}, "how", "how = 'never': must be 'stall'"),
            ({"kind": "slow_worker", "duration_s": 60}, "node", "node: missing"),
            ({"kind": "slow_worker", "node": "pd-d-9", "duration_s": 60}, "node", "no such worker; there are prfaas-0"),
            ({"kind": "slow_worker", "node": "pd-d-0", "factor": 1, "duration_s": 60}, "factor", "must be above 1"),
            ({"kind": "landing_full", "node": "pd-p-0", "duration_s": 60}, "node", "a prefill node has no landing"),
            ({"kind": "outage", "rate_bps": 1e9, "duration_s": 60}, "rate_bps", "known here: duration_s, how, kind"),
            ({"kind": "delay_spike", "delay_s": 0.1, "jitter_s": 0.2, "duration_s": 60}, None, "more than delay_s"),
        ],
    )
    def test_a_fault_that_cannot_be_made_is_refused_in_words(
        self, body: dict[str, Any], field: str | None, said: str
    ) -> None:
        with pytest.raises(ApiError) as refused:
            asked.fault(body, SCALE, ROLES)
        assert (refused.value.status, refused.value.param) == (400, field)
        assert said in refused.value.message

    def test_every_kind_can_be_asked_for(self) -> None:
        more = {"node": "pd-d-0"}
        for kind, model in asked.KINDS.items():
            body = {"kind": kind, "duration_s": 60, **(more if "node" in model.model_fields else {})}
            assert isinstance(asked.fault(body, SCALE, ROLES), model)
