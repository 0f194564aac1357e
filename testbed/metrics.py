"""The gateway's Prometheus metrics: names after vLLM's where the thing is the same."""

from __future__ import annotations

from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from testbed.control import Record
from testbed.session import Session

_TTFT_BUCKETS: Final = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


class Metrics:
    """Counters over the life of the gateway. Times in model seconds."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ended = Counter(
            "prfaas_requests",
            "Requests that have ended, by how and where prefilled.",
            ["status", "site"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival at the gateway to the first token leaving the decode node (model seconds).",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._nodes_up = Gauge("prfaas_nodes_up", "Live instances.", ["site", "role"], registry=self._registry)
        self._running = Gauge("vllm:num_requests_running", "Requests in decode slots.", registry=self._registry)
        self._waiting = Gauge(
            "vllm:num_requests_waiting", "Requests not yet prefilled.", ["site"], registry=self._registry
        )
        self._egress = Gauge(
            "prfaas_egress_bits_per_second", "KV from the prfaas site landing, model bits/s.", registry=self._registry
        )
        self._threshold = Gauge(
            "prfaas_threshold_tokens", "The routing threshold t; NaN when the policy has none.", registry=self._registry
        )

    def ended(self, record: Record) -> None:
        """Count a request that has ended."""
        self._ended.labels(record.status, record.prefill_site or "none").inc()
        if record.admitted_s == record.admitted_s:
            self._ttft.observe(record.admitted_s - record.arrive_s)

    def render(self, session: Session) -> bytes:
        """The text exposition, with the gauges as of now."""
        nodes = list(session.control.view.nodes.values())
        for site in ("prfaas", "pd"):
            for role in ("prefill", "decode"):
                self._nodes_up.labels(site, role).set(sum(n.alive for n in nodes if n.site == site and n.role == role))
            self._waiting.labels(site).set(sum(n.queued_requests for n in nodes if n.site == site))
        self._running.set(sum(n.decoding_requests for n in nodes))
        self._egress.set(session.control.view.egress_bps)
        threshold = getattr(session.control.policy, "threshold_tokens", None)
        self._threshold.set(float("nan") if threshold is None else threshold)
        return generate_latest(self._registry)
