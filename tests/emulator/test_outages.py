"""What a connection is told about outages, by what the kernel can bound. Real outages: tests/wire/test_outages.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from emulator import outages

OTHERS_BOUND = [None, "120000\n", "no number\n"]  # no such knob, the kernel's default, garbage


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """The two ends of a connection on loopback."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        dialled = stack.enter_context(socket.create_connection(listener.getsockname()))
        yield [dialled, stack.enter_context(listener.accept()[0])]


def kernel_says(monkeypatch: pytest.MonkeyPatch, folder: Path, rto_max_ms: str | None) -> None:
    knob = folder / "tcp_rto_max_ms"
    if rto_max_ms is not None:
        knob.write_text(rto_max_ms)
    monkeypatch.setattr(outages, "RTO_MAX_MS", knob)


def test_with_a_bound_a_connection_is_kept_through_an_outage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[socket.socket]
) -> None:
    kernel_says(monkeypatch, tmp_path, "1000\n")
    for end in ends:
        outages.prepare(end)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    assert outages.connect_s() == 5.0


@pytest.mark.parametrize("rto_max_ms", OTHERS_BOUND)
def test_without_one_a_stalled_connection_breaks_and_a_dial_is_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[socket.socket], rto_max_ms: str | None
) -> None:
    kernel_says(monkeypatch, tmp_path, rto_max_ms)
    for end in ends:
        outages.prepare(end)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000
    assert outages.connect_s() == 2.0


@pytest.mark.parametrize("rto_max_ms", ["1000\n", None])
def test_an_end_asks_after_the_other_so_that_half_a_connection_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[socket.socket], rto_max_ms: str | None
) -> None:
    kernel_says(monkeypatch, tmp_path, rto_max_ms)
    for end in ends:
        outages.prepare(end)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) <= 5


def test_a_connection_that_is_answered_is_not_stalled(ends: list[socket.socket]) -> None:
    dialled, accepted = ends
    dialled.sendall(b"x" * 1000)
    assert accepted.recv(1000)
    assert not any(outages.stalled(end) for end in ends)
