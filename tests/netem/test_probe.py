"""A whole measurement over the loopback, and what is refused. What is made of a timeline: test_timelines.py."""

from __future__ import annotations

import socket
import threading

import pytest

from netem.link import LinkError
from netem.probe import measure, serve


@pytest.mark.parametrize("reverse", [False, True])
def test_a_measurement_over_the_loopback(reverse: bool) -> None:
    port = free_port()
    ready = threading.Event()
    threading.Thread(target=serve, args=("127.0.0.1", port, ready), daemon=True).start()
    assert ready.wait(5)
    found = measure("127.0.0.1", port, seconds=0.3, connections=2, reverse=reverse)
    assert found.goodput_bps > 1e8
    assert found.first_second_bps > 0
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
