"""Goodput is counted at the receivers over one common window; and a whole measurement over the loopback."""

from __future__ import annotations

import socket
import threading

import pytest

from netem.link import LinkError
from netem.probe import goodput_bps, measure, serve

MS = 1_000_000


def steady(start_ms: int, end_ms: int, bytes_per_ms: int, first_burst: int = 0) -> list[tuple[int, int]]:
    return [(t * MS, first_burst + (t - start_ms) * bytes_per_ms) for t in range(start_ms, end_ms + 1, 5)]


def test_the_first_burst_does_not_count() -> None:
    rate_bps, window_s = goodput_bps([steady(0, 3000, 1000, first_burst=5_000_000)], seconds=3.0, skip_s=1.0)
    assert rate_bps == pytest.approx(8e6)
    assert window_s == pytest.approx(2.0)


def test_connections_add_up_over_the_window_they_share() -> None:
    rate_bps, window_s = goodput_bps([steady(0, 3000, 1000), steady(200, 3200, 3000)], seconds=3.0, skip_s=1.0)
    assert rate_bps == pytest.approx(32e6)
    assert window_s == pytest.approx(1.8)


def test_the_tail_after_the_senders_stopped_does_not_count() -> None:
    tail = [*steady(0, 3000, 1000), (9000 * MS, 3_000_001)]
    assert goodput_bps([tail], seconds=3.0, skip_s=1.0)[0] == pytest.approx(8e6)


def test_a_stall_inside_the_window_counts_as_time() -> None:
    resumed = [(t * MS, (t - 1000) * 1000) for t in range(2505, 3001, 5)]
    stalled = [*steady(0, 1500, 1000), (2500 * MS, 1_500_000), *resumed]
    assert goodput_bps([stalled], seconds=3.0, skip_s=1.0)[0] == pytest.approx(4e6, rel=1e-2)


def test_a_connection_that_starves_at_the_end_does_not_shorten_the_window() -> None:
    rate_bps, window_s = goodput_bps([steady(0, 3000, 1000), steady(0, 1200, 1000)], seconds=3.0, skip_s=1.0)
    assert rate_bps == pytest.approx(8e6 + 0.8e6)
    assert window_s == pytest.approx(2.0)


@pytest.mark.parametrize("timelines", [[], [[]], [steady(0, 3000, 1000), []], [steady(0, 500, 1000)]])
def test_nothing_received_is_an_error_not_a_zero(timelines: list[list[tuple[int, int]]]) -> None:
    with pytest.raises(LinkError, match="probe"):
        goodput_bps(timelines, seconds=3.0, skip_s=1.0)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_measurement_over_the_loopback(reverse: bool) -> None:
    port = free_port()
    ready = threading.Event()
    threading.Thread(target=serve, args=("127.0.0.1", port, ready), daemon=True).start()
    assert ready.wait(5)
    found = measure("127.0.0.1", port, seconds=0.3, connections=2, reverse=reverse)
    assert found.goodput_bps > 1e8
    assert found.connections == 2
    assert 0 < found.rtt_min_s <= found.rtt_p50_s <= found.rtt_p99_s < 1
    assert found.congestion_control


def test_a_peer_that_is_not_there_is_refused_with_the_remedy() -> None:
    with pytest.raises(LinkError, match=r"netem\.probe serve"):
        measure("127.0.0.1", free_port(), seconds=0.1)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LinkError, match="cannot listen"):
        serve("127.0.0.1", taken.getsockname()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
