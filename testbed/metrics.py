"""The gateway's Prometheus metrics: names after vLLM's where the thing is the same, `prfaas_` where it is ours.

Times are model seconds, KV model bytes, rates model bits/s: what a scenario is written in. Workers (`emulator.metrics`)
and the link (`netem.metrics`) have theirs; the gateway passes them on, see `targets`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from testbed.control import Record
from testbed.scheduler.api import PRFAAS
from testbed.session import Session

SECONDS: Final = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Buckets for what takes as long as a prefill of tens of thousands of tokens."""

STEPS: Final = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5)
"""Buckets for the time of one token."""

MOST_REASONS: Final = 40
"""Reasons told apart; a policy that makes up more (a number in the text) has the rest counted as `other`."""


class Metrics:
    """Counters over the life of the gateway."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._reasons: set[str] = set()
        self._counted: tuple[str, int] = ("", 0)  # of which session how many changes are counted
        self._ended = self._counter(
            "prfaas_requests", "Requests that have ended, by how and where prefilled.", "status", "site"
        )
        self._decisions = self._counter(
            "prfaas_decisions", "Routing decisions of requests that have ended, by reason.", "reason", "site"
        )
        self._changes = self._counter("prfaas_scheduler_changes", "What the scheduler changed, by kind.", "kind")
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts that were admitted.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers that have ended.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the cache.", "site")
        self._hits = self._counter("vllm:prefix_cache_hits", "... and reused.", "site")
        self._kv = self._counter("prfaas_transferred_kv_bytes", "KV that decode nodes got, by where from.", "site")
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival at the gateway to the first token leaving the decode node."
        )
        self._tpot = self._histogram(
            "vllm:time_per_output_token_seconds", "Between tokens, mean of a request.", buckets=STEPS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to the last token.")
        self._queued = self._histogram("vllm:request_queue_time_seconds", "Routed to prefill begun.", "site")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "The prefill itself.", "site")
        self._exposed = self._histogram(
            "prfaas_exposed_transfer_seconds", "Prefill's end to the last KV landed: what overlap did not hide.", "site"
        )
        self._serving = self._gauge("prfaas_node_serving", "1 while the node serves the role.", "node", "site", "role")
        self._nodes_up = self._gauge("prfaas_nodes_up", "Live instances.", "site", "role")
        self._running = self._gauge("vllm:num_requests_running", "Requests in decode slots.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests not yet prefilled.", "site")
        self._live = self._gauge("prfaas_requests_live", "Requests under way.")
        self._egress = self._gauge("prfaas_egress_bits_per_second", "KV from the prfaas site landing, lately.")
        self._estimate = self._gauge("prfaas_link_estimate_bits_per_second", "B_out as the scheduler estimates it.")
        self._nominal = self._gauge("prfaas_link_nominal_bits_per_second", "What the operator was told.")
        self._used = self._gauge("prfaas_egress_utilisation_ratio", "Egress over the estimate.")
        self._unsent = self._gauge("prfaas_unsent_kv_bytes", "KV that waits at the prfaas site's senders.")
        self._scarce = self._gauge("prfaas_bandwidth_scarce", "1 in the scarce regime, NaN without regimes.")
        self._threshold = self._gauge("prfaas_threshold_tokens", "The threshold t; NaN when the policy has none.")
        self._again = self._gauge("prfaas_retransmits", "TCP segments sent again, of this session.")
        self._late = self._gauge("prfaas_timer_late_p99_wall_seconds", "How late timers fire, wall seconds.", "where")
        self._held = self._gauge("prfaas_session_running", "1; the session it is about.", "session", "policy")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, *labels: str, buckets: Iterable[float] = SECONDS) -> Histogram:
        return Histogram(name, what, labels, buckets=tuple(buckets), registry=self._registry)

    def ended(self, record: Record) -> None:
        """Count a request that has ended."""
        site = record.prefill_site or "none"
        self._ended.labels(record.status, site).inc()
        if record.reason:
            self._decisions.labels(self._known(record.reason), site).inc()
        if not record.admitted:
            return
        self._prompt.inc(record.input_tokens)
        self._queries.labels(site).inc(record.input_tokens)
        self._hits.labels(site).inc(record.cached_tokens)
        self._kv.labels(site).inc(record.kv_bytes)
        self._ttft.observe(record.admitted_s - record.arrive_s)
        if record.prefilled:
            self._queued.labels(site).observe(record.prefill_start_s - record.route_s)
            self._prefill.labels(site).observe(record.prefill_end_s - record.prefill_start_s)
            self._exposed.labels(site).observe(max(0.0, record.landed_s - record.prefill_end_s))
        if record.status == "ok":
            self._generated.inc(record.output_tokens)
            self._e2e.observe(record.finished_s - record.arrive_s)
            if record.output_tokens > 1:
                self._tpot.observe((record.finished_s - record.admitted_s) / (record.output_tokens - 1))

    def _known(self, reason: str) -> str:
        if reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
            return "other"
        self._reasons.add(reason)
        return reason

    def render(self, session: Session, gateway_late_s: float) -> bytes:
        """The text exposition, with the gauges as of now. gateway_late_s: its event loop's lag, p99, wall seconds."""
        control, view = session.control, session.control.view
        nodes = list(view.nodes.values())
        for site in ("prfaas", "pd"):
            for role in ("prefill", "decode"):
                self._nodes_up.labels(site, role).set(sum(n.alive for n in nodes if n.site == site and n.role == role))
            self._waiting.labels(site).set(sum(n.queued_requests for n in nodes if n.site == site))
        for node in nodes:
            for role in ("prefill", "decode") if node.site != PRFAAS else ("prefill",):
                serves = node.alive and not node.silent and not node.draining and node.role == role
                self._serving.labels(node.name, node.site, role).set(serves)
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
        self._held.clear()
        self._held.labels(session.id, session.told.policy).set(1)
        self._count_changes(session)
        return generate_latest(self._registry)

    def _count_changes(self, session: Session) -> None:
        which, count = self._counted
        changes = session.control.changes
        for change in changes[count if which == session.id else 0 :]:
            self._changes.labels(change.kind).inc()
        self._counted = (session.id, len(changes))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
