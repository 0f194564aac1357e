"""The link in Prometheus' text format, for the agent's `GET /metrics`: what it is asked, what its classes carried.

All of it is the wall's (bits and bytes of the wire, seconds of the clock): the agent knows no scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from netem.link import LinkState
from netem.tc import Counters

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


def exposition(
    states: Mapping[str, LinkState], counters: Mapping[str, Counters], lines: Mapping[str, Mapping[str, Any] | None]
) -> bytes:
    """By direction: the state in force, the kernel's counters, what `netem.keeper.Keeper.describe` says."""
    registry = CollectorRegistry()
    registry.register(_Link(states, counters, lines))
    return generate_latest(registry)


class _Link(Collector):
    def __init__(
        self,
        states: Mapping[str, LinkState],
        counters: Mapping[str, Counters],
        lines: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        self._states, self._counters, self._lines = states, counters, lines

    def collect(self) -> list[Metric]:
        rate = _gauge("prfaas_link_rate_bits_per_second", "The KV class's rate as set, on the wire.")
        delay = _gauge("prfaas_link_delay_seconds", "One-way delay asked.")
        jitter = _gauge("prfaas_link_jitter_seconds", "How far the delay moves either way.")
        loss = _gauge("prfaas_link_loss_ratio", "Share of packets lost on purpose.")
        outage = _gauge("prfaas_link_outage", "1 while nothing is to arrive.")
        backlog = _gauge("prfaas_link_backlog_bytes", "What waits in the class.", "class")
        sent = _counter("prfaas_link_sent_bytes", "What left the class, headers included.", "class")
        packets = _counter("prfaas_link_sent_packets", "The same, in packets.", "class")
        drops = _counter(
            "prfaas_link_drops", "Packets the class had no room for; where netem loses, those too.", "class"
        )
        unshaped = _counter("prfaas_link_unshaped_packets", "Packets that no class shaped: the run is invalid.")
        for way, state in self._states.items():
            rate.add_metric([way], state.rate_bps)
            delay.add_metric([way], state.delay_s)
            jitter.add_metric([way], state.jitter_s)
            loss.add_metric([way], state.loss)
            outage.add_metric([way], float(state.outage is not None))
        for way, now in self._counters.items():
            for name, of_class in (("kv", now.kv), ("control", now.control)):
                backlog.add_metric([way, name], of_class.backlog_bytes)
                sent.add_metric([way, name], of_class.sent_bytes)
                packets.add_metric([way, name], of_class.packets)
                drops.add_metric([way, name], of_class.drops)
            unshaped.add_metric([way], now.direct_packets)
        return [rate, delay, jitter, loss, outage, backlog, sent, packets, drops, unshaped, *self._delay_line()]

    def _delay_line(self) -> list[Metric]:
        held = _gauge("prfaas_delay_line_held_packets", "Packets that wait in the delay line.")
        late = _gauge("prfaas_delay_line_late_p99_seconds", "How late packets leave the delay line.")
        lost = _counter("prfaas_delay_line_lost_packets", "Packets lost on purpose.")
        overflowed = _counter("prfaas_delay_line_overflowed_packets", "Packets the delay line had no room for.")
        deaths = _counter("prfaas_delay_line_deaths", "Times the delay line died: an outage.")
        down = _gauge("prfaas_delay_line_down", "1 while the delay line is dead: nothing passes.")
        for way, line in self._lines.items():
            if not line:
                continue
            down.add_metric([way], float(line["down"]))
            deaths.add_metric([way], line["deaths"])
            if not line["down"]:  # a dead one tells nothing of itself
                held.add_metric([way], line["held"])
                late.add_metric([way], line["late_p99_s"])
                lost.add_metric([way], line["lost"])
                overflowed.add_metric([way], line["overflowed"])
        return [held, late, lost, overflowed, deaths, down]


def _gauge(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=["direction", *labels])


def _counter(name: str, what: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, what, labels=["direction", *labels])
