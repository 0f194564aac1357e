"""Numbered connections: from which ports they leave, and what happens when some are taken."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Callable

import pytest

from emulator import flows


def counting(first: int) -> Callable[[], int]:
    turns = itertools.count(first)
    return lambda: next(turns)


def test_a_number_is_the_ports_low_byte() -> None:
    with socket.socket() as sock:
        flows.bind(sock, 201)
        port = sock.getsockname()[1]
    assert 16384 <= port <= 32767
    assert port % 256 == 201


def test_a_connection_that_is_made_again_leaves_by_another_port() -> None:
    with socket.socket() as first, socket.socket() as again:
        flows.bind(first, 202)
        flows.bind(again, 202)
        ports = {first.getsockname()[1], again.getsockname()[1]}
    assert len(ports) == 2
    assert {port % 256 for port in ports} == {202}


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.socket() as first, socket.socket() as second:
        flows.bind(first, 203, counting(5))
        flows.bind(second, 203, counting(5))
        assert second.getsockname()[1] != first.getsockname()[1]


def test_no_free_port_is_said() -> None:
    with socket.socket() as first, socket.socket() as second:
        flows.bind(first, 204, lambda: 9)
        with pytest.raises(OSError, match="connection number 204") as refused:
            flows.bind(second, 204, lambda: 9)
    assert refused.value.errno == errno.EADDRINUSE
