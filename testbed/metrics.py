"""The gateway's Prometheus metrics: names after vLLM's where the thing is the same, `prfaas_` where it is ours.

Times are model seconds, KV model bytes, rates model bits/s: what a scenario is written in. A counter's *rate* is one of
the wall: `rate(x[10s]) / scalar(prfaas_time_scale)` is a model second's. Workers (`emulator.metrics`) and the link
(`netem.metrics`) have theirs; the gateway passes them on, see `testbed.scrape`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from testbed.control import Record
from testbed.scenario import Scenario
from testbed.scheduler.api import PD, PRFAAS
from testbed.session import Session

SECONDS: Final = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
"""Buckets for what takes as long as a prefill of tens of thousands of tokens, and what waits for several."""

EXPOSED: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Buckets for what overlap left of a transfer: milliseconds on an idle link, minutes after an outage."""

STEPS: Final = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5)
"""Buckets for the time of one token."""

TOKENS: Final = tuple(2**n for n in range(6, 18))
"""Buckets for the length of a prompt or an answer."""

MOST: Final = 40
"""Values of a label that a policy makes up (reasons, kinds of changes): what comes later is counted as `other`."""


class _Bounded:
    """A label whose values come from a policy, which may well put a number into each."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known and len(self._known) >= MOST:
            return "other"
        self._known.add(value)
        return value


class Metrics:
    """Counters over the life of the gateway. scenario: with one deployment; its scale, its SLO and its link."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, scenario: Scenario) -> None:
        self._registry = CollectorRegistry()
        self._slo = scenario.slo
        self._reason, self._kind, self._policy_kind = _Bounded(), _Bounded(), _Bounded()
        self._changes_counted = 0
        self._errors_counted: dict[str, int] = {}
        self._of_requests()
        self._of_the_scheduler()
        self._of_the_fleet()
        self._of_the_link()
        for name, what, value in (
            ("prfaas_time_scale", "Model seconds a wall second.", scenario.scale.time_scale),
            ("prfaas_byte_scale", "Wall bytes a model byte.", scenario.scale.byte_scale),
            ("prfaas_slo_ttft_seconds", "Time to the first token that users were promised.", self._slo.ttft_p90_s),
            ("prfaas_slo_tpot_seconds", "Time of a token that users were promised.", self._slo.tpot_s),
        ):
            self._gauge(name, what).set(value)

    def _of_requests(self) -> None:
        self._ended = self._counter(
            "prfaas_requests", "Requests that have ended (ok, failed, aborted), by where prefilled.", "status", "site"
        )
        self._failed = self._counter("prfaas_request_failures", "Requests without a whole answer, by error.", "error")
        self._success = self._counter("vllm:request_success", "Requests with a whole answer.", "finished_reason")
        self._within_slo = self._counter(
            "prfaas_requests_within_slo", "Requests that met both promises, from their arrival at the gateway."
        )
        self._retries = self._counter("prfaas_request_retries", "Attempts beyond a request's first.")
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts that were admitted.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers that have ended.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the cache.", "site")
        self._hits = self._counter("vllm:prefix_cache_hits", "... and reused.", "site")
        self._transfers = self._counter("prfaas_transfers", "Transfers landed whole, by where from.", "site")
        self._kv = self._counter("prfaas_transferred_kv_bytes", "KV that they brought, by where from.", "site")
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival at the gateway to the first token leaving the decode node, by where prefilled.",
            "site",
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Between tokens, mean of a request.", buckets=STEPS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to the last token.")
        self._queued = self._histogram("vllm:request_queue_time_seconds", "Routed to prefill begun.", "site")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "The prefill itself.", "site")
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to last.")
        self._exposed = self._histogram(
            "prfaas_exposed_transfer_seconds",
            "Prefill's end to the last KV landed: what overlap did not hide.",
            "site",
            buckets=EXPOSED,
        )
        self._admission = self._histogram("prfaas_admission_seconds", "KV landed to a decode slot.", buckets=EXPOSED)
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", buckets=TOKENS)
        self._answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", buckets=TOKENS)

    def _of_the_scheduler(self) -> None:
        self._decisions = self._counter(
            "prfaas_decisions", "Routing decisions of requests that have ended, by reason.", "reason", "site"
        )
        self._changes = self._counter("prfaas_scheduler_changes", "What the scheduler changed, by kind.", "kind")
        self._policy_errors = self._counter("prfaas_policy_errors", "A policy's failures, contained.", "kind")
        self._threshold = self._gauge("prfaas_threshold_tokens", "The threshold t; NaN when the policy has none.")
        self._scarce = self._gauge("prfaas_bandwidth_scarce", "1 in the scarce regime, NaN without regimes.")
        self._sessions = self._counter("prfaas_sessions", "Loads, and the spans between them, that have begun.")
        self._policy = self._gauge("prfaas_policy", "1 for the policy in charge.", "policy")

    def _of_the_fleet(self) -> None:
        self._serving = self._gauge("prfaas_node_serving", "1 while the node serves the role.", "node", "site", "role")
        self._nodes_up = self._gauge("prfaas_nodes_up", "Live instances.", "site", "role")
        self._slots = self._gauge("prfaas_node_decode_slots", "Slots of a node that decodes, else 0.", "node", "site")
        self._running = self._gauge("vllm:num_requests_running", "Requests in decode slots.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests not yet prefilled.", "site")
        self._live = self._gauge("prfaas_requests_live", "Requests under way.")
        self._late = self._gauge("prfaas_timer_late_p99_wall_seconds", "How late timers fire, wall seconds.", "where")

    def _of_the_link(self) -> None:
        self._egress = self._gauge("prfaas_egress_bits_per_second", "KV from the prfaas site landing, as measured.")
        self._estimate = self._gauge("prfaas_link_estimate_bits_per_second", "B_out as the scheduler estimates it.")
        self._nominal = self._gauge("prfaas_link_nominal_bits_per_second", "What the operator was told.")
        self._used = self._gauge("prfaas_egress_utilisation_ratio", "Egress over the estimate, of late.")
        self._unsent = self._gauge("prfaas_unsent_kv_bytes", "KV that waits at the prfaas site's senders.")
        self._again = self._gauge("prfaas_session_retransmits", "TCP segments sent again, of this session.")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, *labels: str, buckets: Iterable[float] = SECONDS) -> Histogram:
        return Histogram(name, what, labels, buckets=tuple(buckets), registry=self._registry)

    def register(self, collector: Collector) -> None:
        """What is shown with these."""
        self._registry.register(collector)

    def ended(self, record: Record) -> None:
        """Count a request that has ended."""
        site = record.prefill_site or "none"
        self._ended.labels(record.status, site).inc()
        if record.reason:
            self._decisions.labels(self._reason(record.reason), site).inc()
        if record.error:
            self._failed.labels(record.error).inc()
        if record.attempts > 1:
            self._retries.inc(record.attempts - 1)
        if not record.admitted:
            return
        ttft_s = record.admitted_s - record.arrive_s
        self._prompt.inc(record.input_tokens)
        self._prompt_length.observe(record.input_tokens)
        self._queries.labels(site).inc(record.input_tokens)
        self._hits.labels(site).inc(record.cached_tokens)
        self._transfers.labels(site).inc()
        self._kv.labels(site).inc(record.kv_bytes)
        self._ttft.labels(site).observe(ttft_s)
        self._admission.observe(record.admitted_s - record.landed_s)
        if record.prefilled:
            self._queued.labels(site).observe(record.prefill_start_s - record.route_s)
            self._prefill.labels(site).observe(record.prefill_end_s - record.prefill_start_s)
            self._exposed.labels(site).observe(max(0.0, record.landed_s - record.prefill_end_s))
        if record.status == "ok":
            self._answered(record, ttft_s)

    def _answered(self, record: Record, ttft_s: float) -> None:
        tokens, decode_s = record.output_tokens, record.finished_s - record.admitted_s
        # A step of exactly 25 ms belongs below 25 ms, however its sum was rounded.
        tpot_s = round(decode_s / (tokens - 1), 9) if tokens > 1 else 0.0
        self._success.labels(record.finish_reason).inc()
        self._generated.inc(tokens)
        self._answer_length.observe(tokens)
        self._e2e.observe(record.finished_s - record.arrive_s)
        self._decode.observe(decode_s)
        if tokens > 1:
            self._tpot.observe(tpot_s)
        if ttft_s <= self._slo.ttft_p90_s and tpot_s <= self._slo.tpot_s:
            self._within_slo.inc()

    def begun(self) -> None:
        """A session has begun; it has changed nothing yet."""
        self._sessions.inc()
        self._changes_counted, self._errors_counted = 0, {}

    def count(self, session: Session) -> None:
        """Count what the scheduler of the present session did since the last time; once more before it is left."""
        changes = session.control.changes
        for change in changes[self._changes_counted :]:
            self._changes.labels(self._kind(change.kind)).inc()
        self._changes_counted = len(changes)
        for kind, count in session.control.policy_errors.items():
            self._policy_errors.labels(self._policy_kind(kind)).inc(count - self._errors_counted.get(kind, 0))
            self._errors_counted[kind] = count

    def render(self, session: Session, gateway_late_s: float) -> bytes:
        """The text exposition, with the gauges as of now. gateway_late_s: its event loop's lag, p99, wall seconds."""
        self.count(session)
        control, view = session.control, session.control.view
        nodes = list(view.nodes.values())
        for site in (PRFAAS, PD):
            for role in ("prefill", "decode") if site == PD else ("prefill",):
                self._nodes_up.labels(site, role).set(sum(n.alive for n in nodes if n.site == site and n.role == role))
            self._waiting.labels(site).set(sum(n.queued_requests for n in nodes if n.site == site))
        for node in nodes:
            for role in ("prefill", "decode") if node.site == PD else ("prefill",):
                serves = node.alive and not node.silent and not node.draining and node.role == role
                self._serving.labels(node.name, node.site, role).set(serves)
            self._slots.labels(node.name, node.site).set(node.slots if node.alive and node.role == "decode" else 0)
        self._running.set(sum(n.decoding_requests for n in nodes))
        self._live.set(len(control.live))
        link = view.observed.link
        self._egress.set(view.egress_bps)
        self._estimate.set(link.bps)
        self._nominal.set(view.link_nominal_bps)
        self._used.set(link.utilisation)
        self._unsent.set(sum(n.unsent_bytes for n in nodes if n.site == PRFAAS))
        self._threshold.set(_number(getattr(control.policy, "threshold_tokens", None)))
        regime = getattr(control.policy, "regime", None)
        self._scarce.set(float("nan") if regime is None else float(regime == "scarce"))
        totals = session.totals()
        self._again.set(totals["retransmits"])
        self._late.labels("workers").set(totals["late_p99_s"])
        self._late.labels("gateway").set(gateway_late_s)
        self._policy.clear()
        self._policy.labels(session.policy).set(1)
        return generate_latest(self._registry)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
