"""What the gateway's metrics count, of requests that are made up; real ones: tests/wire."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testbed.control import Change, Control, NodeSpec, NodeUp, Record
from testbed.metrics import MOST, Metrics
from testbed.scenario import load
from testbed.scheduler.api import RequestView
from testbed.scheduler.baselines import Homogeneous, Static
from testbed.session import Session

SCENARIO = load("smoke").only("prfaas-pd")  # promises a first token within 6 s, and 25 ms a token


def record(**changed: object) -> Record:
    """A request that was prefilled away for 2 s, crossed in 0.5 s more, and had 11 tokens in exactly 0.25 s."""
    one = Record.of(RequestView("r", 10.0, 1000), 11)
    fields = {
        "status": "ok",
        "reason": "long",
        "prefill_site": "prfaas",
        "attempts": 1,
        "cached_tokens": 100,
        "kv_bytes": 5000,
        "output_tokens": 11,
        "route_s": 10.0,
        "prefill_start_s": 11.0,
        "prefill_end_s": 13.0,
        "landed_s": 13.5,
        "admitted_s": 14.0,
        "finished_s": 14.0 + 10 * 0.025,
        "prefilled": True,
        **changed,
    }
    for name, value in fields.items():
        setattr(one, name, value)
    return one


class Rendering:
    """What a scrape of these metrics finds: samples by name and labels."""

    def __init__(self, metrics: Metrics, session: Session) -> None:
        text = metrics.render(session, 0.001).decode()
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (one.name, frozenset(one.labels.items())): one.value for family in self.families for one in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def labels(self, name: str) -> set[frozenset[tuple[str, str]]]:
        return {labels for sample, labels in self.samples if sample == name}


class Stub(Session):
    """A session without a loop and files: a control with one policy, and totals."""

    def __init__(self) -> None:
        fleet = [NodeSpec("prfaas-0", "prfaas", "prefill", 0), NodeSpec("pd-d-0", "pd", "decode", 7)]
        cost = {"prfaas": float, "pd": float}
        policy = Static()
        policy.threshold_tokens = 8192.0
        self.control = Control(fleet, cost, 1e9, policy, Homogeneous())  # type: ignore[arg-type]
        self.policy = "static"

    def totals(self) -> dict[str, object]:
        return {"retransmits": 3, "late_p99_s": 0.002}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(SCENARIO)


@pytest.fixture
def session() -> Stub:
    return Stub()


def test_a_request_that_was_answered_is_counted_once_everywhere(metrics: Metrics, session: Stub) -> None:
    metrics.ended(record())
    found = Rendering(metrics, session)
    assert found("prfaas_requests_total", status="ok", site="prfaas") == 1
    assert found("vllm:request_success_total", finished_reason="length") == 1
    assert found("vllm:prompt_tokens_total") == 1000
    assert found("vllm:generation_tokens_total") == 11
    assert found("vllm:prefix_cache_hits_total", site="prfaas") == 100
    assert found("prfaas_transferred_kv_bytes_total", site="prfaas") == 5000
    assert found("vllm:time_to_first_token_seconds_sum", site="prfaas") == 4.0
    assert found("vllm:request_queue_time_seconds_sum", site="prfaas") == 1.0
    assert found("vllm:request_prefill_time_seconds_sum", site="prfaas") == 2.0
    assert found("prfaas_exposed_transfer_seconds_sum", site="prfaas") == 0.5
    assert found("prfaas_admission_seconds_sum") == 0.5
    assert found("vllm:request_decode_time_seconds_sum") == pytest.approx(0.25)
    assert found("vllm:e2e_request_latency_seconds_sum") == pytest.approx(4.25)
    assert found("prfaas_requests_within_slo_total") == 1
    assert found.labels("prfaas_request_failures_total") == set()


def test_an_answer_that_its_model_ended_with_the_last_token_asked_for_was_stopped(
    metrics: Metrics, session: Stub
) -> None:
    metrics.ended(record(finish_reason="stop"))
    assert Rendering(metrics, session)("vllm:request_success_total", finished_reason="stop") == 1


def test_a_token_time_at_its_promise_is_below_it(metrics: Metrics, session: Stub) -> None:
    """0.025 s a token, summed up in floats, is a little more."""
    at_s = 0.1 + 0.2
    metrics.ended(record(admitted_s=at_s, finished_s=at_s + 10 * 0.025, arrive_s=0.0, landed_s=0.0))
    found = Rendering(metrics, session)
    assert found("vllm:request_time_per_output_token_seconds_bucket", le="0.025") == 1
    assert found("prfaas_requests_within_slo_total") == 1


@pytest.mark.parametrize("late", [{"arrive_s": 7.5}, {"finished_s": 14.0 + 10 * 0.026}])
def test_one_promise_broken_is_not_within_the_slo(metrics: Metrics, session: Stub, late: dict[str, float]) -> None:
    metrics.ended(record(**late))
    assert Rendering(metrics, session)("prfaas_requests_within_slo_total") == 0


def test_a_request_that_failed_before_its_first_token(metrics: Metrics, session: Stub) -> None:
    nothing = {"landed_s": math.nan, "admitted_s": math.nan, "finished_s": math.nan, "prefilled": False}
    metrics.ended(record(status="failed", error="node_lost", attempts=3, **nothing))
    found = Rendering(metrics, session)
    assert found("prfaas_request_failures_total", error="node_lost") == 1
    assert found("prfaas_request_retries_total") == 2
    assert found("vllm:prompt_tokens_total") == 0
    assert found.labels("vllm:time_to_first_token_seconds_count") == set()


def test_reasons_that_a_policy_makes_up_are_bounded(metrics: Metrics, session: Stub) -> None:
    for i in range(MOST + 10):
        metrics.ended(record(reason=f"{i} tokens"))
    found = Rendering(metrics, session)
    assert len(found.labels("prfaas_decisions_total")) == MOST + 1
    assert found("prfaas_decisions_total", reason="other", site="prfaas") == 10


def test_what_the_scheduler_changed_is_counted_once_over_sessions(metrics: Metrics, session: Stub) -> None:
    session.control.changes.append(Change(1.0, "threshold", "", 1.0, 2.0, "why"))
    session.control.policy_errors["ValueError"] = 2
    metrics.count(session)
    metrics.begun()
    other = Stub()
    other.control.changes.append(Change(0.5, "threshold", "", 2.0, 3.0, "why"))
    other.control.policy_errors["ValueError"] = 1
    Rendering(metrics, other)
    found = Rendering(metrics, other)
    assert found("prfaas_scheduler_changes_total", kind="threshold") == 2
    assert found("prfaas_policy_errors_total", kind="ValueError") == 3
    assert found("prfaas_sessions_total") == 1


def test_gauges_are_of_now(metrics: Metrics, session: Stub) -> None:
    session.control.handle(0.0, NodeUp("prfaas-0", "prefill"))
    session.control.handle(0.0, NodeUp("pd-d-0", "decode"))
    found = Rendering(metrics, session)
    assert found("prfaas_nodes_up", site="prfaas", role="prefill") == 1
    assert found("prfaas_node_serving", node="pd-d-0", site="pd", role="decode") == 1
    assert found("prfaas_node_serving", node="pd-d-0", site="pd", role="prefill") == 0
    assert found("prfaas_node_decode_slots", node="pd-d-0", site="pd") == 7
    assert found("prfaas_threshold_tokens") == 8192
    assert math.isnan(found("prfaas_bandwidth_scarce"))
    assert found("prfaas_timer_late_p99_wall_seconds", where="gateway") == 0.001
    assert found("prfaas_policy", policy="static") == 1
    assert found("prfaas_time_scale") == SCENARIO.scale.time_scale


def test_every_metric_says_what_it_is_and_whose_name_it_has(metrics: Metrics, session: Stub) -> None:
    metrics.ended(record())
    for family in Rendering(metrics, session).families:
        assert family.documentation
        assert family.name.startswith(("vllm:", "prfaas_"))
