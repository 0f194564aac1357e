"""A worker's Prometheus endpoint: what its telemetry says, under vLLM's names where the thing is the same.

Served by a thread of prometheus-client's on the site's own address; a scrape reads the latest account, so that it takes
nothing from the machine. Model units, as the account itself; times that are the wall's say so in their name. Counters
begin anew with each load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Final

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from emulator.door import REASONS
from emulator.messages import Telemetry

SILENT_S: Final = 5.0
"""Wall seconds after which a client that says nothing no longer holds a thread."""


class _Handler(MetricsHandler):
    timeout = SILENT_S


class _Server(ThreadingHTTPServer):
    """http.server's own asks the resolver for its name, and in a site nobody answers: ten seconds of every start."""

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class WorkerMetrics(Collector):
    """Of one node. `told` with each account of itself."""

    def __init__(self, node: str, site: str) -> None:
        self._node = {"node": node, "site": site}
        self._latest: tuple[Telemetry, str, float | None] | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def told(self, account: Telemetry, role: str, cache_usage: float | None) -> None:
        """role: the node's present one. cache_usage: the share of its pool in use, None without one."""
        self._latest = (account, role, cache_usage)

    def serve(self, host: str, port: int) -> None:
        """Answer GET /metrics on host:port until the process ends. Raises OSError for a port that cannot be had."""
        server = _Server((host, port), _Handler.factory(self.registry))
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        if self._latest is None:
            return
        account, role, cache_usage = self._latest
        yield _info("prfaas_node", "Who this is, and the role it serves.", {**self._node, "role": role})
        for name, what, value in (
            ("prfaas_account_time_seconds", "When all of this was so, model time of the load.", account.t_s),
            ("vllm:num_requests_running", "Requests that compute, or hold a decode slot.", account.running_requests),
            ("vllm:num_requests_waiting", "Requests that wait here.", account.queued_requests),
            ("prfaas_queued_tokens", "Tokens that wait to be prefilled.", account.queued_tokens),
            ("prfaas_outbox_bytes", "KV produced or promised, not yet received (model bytes).", account.outbox_bytes),
            ("prfaas_landing_bytes", "Room granted to KV that is to land (model bytes).", account.landing_bytes),
            ("prfaas_waiting_grants", "Transfers that wait for room.", account.waiting_grants),
            ("prfaas_open_transfers", "Transfers begun, and not acknowledged whole or landed.", account.open_transfers),
            ("prfaas_held_blocks", "Blocks of the cache that a prefill or a transfer holds.", account.held_blocks),
            ("prfaas_slowdown_ratio", "How many times as long computing takes: above 1 a fault.", account.slowdown),
            ("prfaas_timer_late_p99_wall_seconds", "How late timers fire, wall seconds.", account.late_p99_s),
            ("prfaas_timer_late_max_wall_seconds", "The latest a timer fired, wall seconds.", account.late_max_s),
        ):
            yield self._gauge(name, what, value)
        if cache_usage is not None:
            yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use (0-1).", cache_usage)
        yield self._counter("prfaas_kv_sent_bytes", "KV sent (model bytes).", account.kv_sent_bytes)
        yield self._counter("prfaas_lost_connections", "KV connections to others lost.", account.lost_connections)
        yield self._counter("prfaas_refused_frames", "Frames of the data plane refused.", account.refused_frames)
        yield self._counter("prfaas_refused_states", "Transfers landed whole, and refused.", account.refused_states)
        yield self._refused(account.refused_connections)
        yield self._by_sender("prfaas_kv_landed_bytes", "KV landed whole (model bytes).", account.kv_landed_bytes)
        yield self._by_sender("prfaas_wire_landed_bytes", "The same as bytes on the wire.", account.wire_landed_bytes)
        yield from self._paths(account)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=list(self._node))
        family.add_metric(list(self._node.values()), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=list(self._node))
        family.add_metric(list(self._node.values()), value)
        return family

    def _by_sender(self, name: str, what: str, by_sender: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, what, labels=[*self._node, "sender"])
        for sender, count in sorted(by_sender.items()):
            family.add_metric([*self._node.values(), sender], count)
        return family

    def _refused(self, by_reason: dict[str, int]) -> Metric:
        what = "Connections refused at the door, by reason, since the process began."
        family = CounterMetricFamily("prfaas_refused_connections", what, labels=[*self._node, "reason"])
        for reason in REASONS:
            family.add_metric([*self._node.values(), reason], by_reason.get(reason, 0))
        return family

    def _paths(self, account: Telemetry) -> Iterator[Metric]:
        labels = [*self._node, "peer"]
        sent_again = CounterMetricFamily("prfaas_tcp_retransmits", "TCP segments sent again.", labels=labels)
        trip = GaugeMetricFamily("prfaas_tcp_rtt_seconds", "TCP's smoothed round trip (model seconds).", labels=labels)
        unsent = GaugeMetricFamily("prfaas_tcp_unsent_bytes", "KV in the sockets, unsent (model bytes).", labels=labels)
        for path in account.paths:
            at = [*self._node.values(), path.peer]
            sent_again.add_metric(at, path.retransmits)
            trip.add_metric(at, path.rtt_s)
            unsent.add_metric(at, path.unsent_bytes)
        yield from (sent_again, trip, unsent)


def _info(name: str, what: str, labels: dict[str, str]) -> Metric:
    family = InfoMetricFamily(name, what)
    family.add_metric([], labels)
    return family
