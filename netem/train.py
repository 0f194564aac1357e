"""Trains of numbered datagrams: what of them is lost and overtaken on the way, counted where they land."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_NUMBER = struct.Struct(">I")
_PACKET_BYTES = 64
_BUFFER_BYTES = 4 << 20
_QUIET_S = 1.0  # after the sender's last, or what the link still holds at most
_SO_RXQ_OVFL = 40
_TICK_S = 0.002


@dataclass(slots=True)
class Tally:
    """Numbers as they came. `reordered`: those that came after a higher one; a repeated one counts once."""

    seen: set[int] = field(default_factory=set)
    highest: int = -1
    reordered: int = 0
    overflowed: int = 0

    def add(self, number: int) -> None:
        if number in self.seen:
            return
        self.seen.add(number)
        if number < self.highest:
            self.reordered += 1
        else:
            self.highest = number


def open_socket(address: str) -> socket.socket:
    """A UDP socket of `address`, port by the kernel, that tells what its own buffer dropped."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
    sock.bind((address, 0))
    sock.setblocking(False)
    return sock


def emit(sock: socket.socket, to: tuple[str, int], packets: int, packets_per_s: float) -> None:
    """Send a train of that many packets, evenly but for the timer's grain."""
    start_s, sent = time.monotonic(), 0
    while sent < packets:
        due = min(packets, int((time.monotonic() - start_s) * packets_per_s) + 1)
        for number in range(sent, due):
            sock.sendto(_NUMBER.pack(number).ljust(_PACKET_BYTES, b"."), to)
        sent = due
        time.sleep(_TICK_S)


def collect(sock: socket.socket, told: socket.socket, sent: Callable[[], int]) -> Tally:
    """Receive a train until nothing more can come. `told` becomes readable once the sender is done: `sent` reads how
    many it sent. Raises OSError when the sender goes away."""
    tally, expected = Tally(), None
    while expected is None or len(tally.seen) < expected:
        wanted: list[socket.socket] = [sock] if expected is not None else [sock, told]
        ready, _, _ = select.select(wanted, [], [], _QUIET_S if expected is not None else 60.0)
        if told in ready:
            expected = sent()
        if sock in ready:
            _receive_all(sock, tally)
        if not ready:
            break
    return tally


def _receive_all(sock: socket.socket, tally: Tally) -> None:
    while True:
        try:
            packet, ancillary, _, _ = sock.recvmsg(_PACKET_BYTES, 64)
        except BlockingIOError:
            return
        tally.add(_NUMBER.unpack_from(packet)[0])
        for _, kind, data in ancillary:
            if kind == _SO_RXQ_OVFL:
                tally.overflowed = struct.unpack("=I", data)[0]
