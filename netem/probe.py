"""Measures what a link really carries: TCP goodput over k connections, either way, round trips, losses, reordering.

    python -m netem.probe serve   --address 10.77.2.1 --port 7424
    python -m netem.probe measure --host 10.77.2.1 --port 7424 --seconds 3 --connections 1 [--reverse] [--json]
        [--packets 20000]   and of a train of that many datagrams first, what was lost and overtaken on the way

Goodput is counted where it lands. The receiver of each connection notes (time, bytes so far) every ms; the figure
is the bytes of all connections over one common window, that opens `skip_s` after the last connection's first byte (the
shaper's burst and TCP's slow start are over by then) and closes when the first sender stops; the first second is told
apart. No copy is made on either side (sendfile out of memory, MSG_TRUNC discards), so a Gbit/s costs a small part of
a core. `measure` does all of it; `traffic`, `round_trips` and `train` are its parts, for who wants more of them.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from netem.link import LinkError
from netem.plan import FLOW_PORTS, PROBE_FLOWS
from netem.timelines import Timeline, first_second_bps, goodput_bps
from netem.train import Tally, collect, emit, open_socket

_CHUNK_BYTES = 1 << 20
_NOTE_NS = 1_000_000
_PATIENCE_S = 30.0
_TURNS = 64
_SETTLED_TRIPS = 40
_MIN_TRIPS, _MAX_TRIPS, _TRIPS_S = 20, 100, 3.0
_UNSENT_BYTES = 256 << 10  # what a sender keeps unsent at most, so that it stops when it is told to
_LENGTH = struct.Struct(">I")
_TCP_NOTSENT_LOWAT = 25


@dataclass(frozen=True, slots=True)
class Measurement:
    """`goodput_bps`: TCP payload over `window_s`, all connections; `first_second_bps`: over the first second of
    sending, burst and slow start included. `rtt_*_s`: idle round trips of one byte; `rtt_jitter_s`: the mean difference
    of two that follow each other. `train`: None where none was asked for.
    """

    goodput_bps: float
    window_s: float
    first_second_bps: float
    connections: int
    reverse: bool
    congestion_control: str
    rtt_min_s: float
    rtt_p50_s: float
    rtt_p99_s: float
    rtt_jitter_s: float
    train: TrainFound | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """TCP in one direction: when the first sender began (CLOCK_MONOTONIC ns), and a timeline a connection."""

    congestion_control: str
    began_ns: int
    timelines: list[Timeline]


@dataclass(frozen=True, slots=True)
class TrainFound:
    """Datagrams sent one way, lost on the link, and overtaken. `overflowed`: lost by a busy receiver, not the link."""

    sent: int
    lost: int
    reordered: int
    overflowed: int


def measure(
    host: str,
    port: int,
    seconds: float = 3.0,
    connections: int = 1,
    reverse: bool = False,
    skip_s: float | None = None,
    packets: int = 0,
    packets_per_s: float = 5000.0,
) -> Measurement:
    """Measure against a running `serve`: from here to there, or back if `reverse`. Takes about `seconds`, and up to
    three for the round trips, and the time of the train.

    `packets_per_s` of 106 bytes on the wire must fit the link easily. `skip_s` defaults to a third of `seconds`, at
    most 1 s or 40 round trips: what slow start lost is then made up for. Raises LinkError when the peer is not reached
    or goes away.
    """
    if seconds <= 0 or connections < 1:
        raise LinkError(f"probe: seconds {seconds} and connections {connections} must be positive")
    try:
        trips = round_trips(host, port)
        found = train(host, port, packets, packets_per_s, reverse) if packets else None
        if skip_s is None:
            skip_s = settled_s(seconds, min(trips))
        sent = traffic(host, port, seconds, connections, reverse)
    except OSError as failure:
        remedy = "is 'python -m netem.probe serve' running there, and the link up?"
        raise LinkError(f"probe: {host}:{port}: {failure}; {remedy}") from failure
    rate_bps, window_s = goodput_bps(sent.timelines, seconds, skip_s)
    first_bps = first_second_bps(sent.timelines, sent.began_ns)
    of_rate = rate_bps, window_s, first_bps, connections, reverse, sent.congestion_control
    return Measurement(*of_rate, *rtt_figures(trips), found)


def settled_s(seconds: float, rtt_s: float) -> float:
    """What of a measurement is left out at its start: a second or 40 round trips, a third of it at most."""
    return min(max(1.0, _SETTLED_TRIPS * rtt_s), seconds / 3)


def rtt_figures(trips: Sequence[float]) -> tuple[float, float, float, float]:
    """(least, median, p99, mean difference of two that follow each other) of at least two round trips, seconds."""
    ordered = sorted(trips)
    jitter_s = statistics.fmean(abs(after - before) for before, after in pairwise(trips))
    return ordered[0], statistics.median(ordered), ordered[int(len(ordered) * 0.99)], jitter_s


def traffic(host: str, port: int, seconds: float, connections: int, reverse: bool) -> Traffic:
    """TCP as fast as it goes for that long, over new connections. Raises OSError when the peer goes away."""
    timelines: list[Timeline] = []
    failures: list[OSError] = []
    algorithms: list[str] = []
    began_ns: list[int] = []

    def one(number: int) -> None:
        try:
            with _connect(host, port, number) as sock:
                algorithms.append(_congestion_control(sock))
                _send(sock, {"do": "send" if reverse else "receive", "seconds": seconds})
                if reverse:
                    began_ns.append(int(_receive(sock)))
                    timelines.append(_drain(sock))
                else:
                    began_ns.append(time.monotonic_ns())
                    _flood(sock, seconds)
                    timelines.append(_receive(sock))
        except OSError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Traffic(algorithms[0], min(began_ns), timelines)


def round_trips(host: str, port: int) -> list[float]:
    """Seconds, in the order of the trips: a hundred, or fewer where they take long. Raises OSError."""
    found: list[float] = []
    with _connect(host, port) as sock:
        _send(sock, {"do": "echo"})
        while len(found) < _MIN_TRIPS or (len(found) < _MAX_TRIPS and sum(found) < _TRIPS_S):
            start_ns = time.perf_counter_ns()
            sock.sendall(b".")
            _receive_exactly(sock, 1)
            found.append((time.perf_counter_ns() - start_ns) / 1e9)
    return found


def train(host: str, port: int, packets: int, packets_per_s: float, reverse: bool) -> TrainFound:
    """That many datagrams, one way. Raises OSError when the peer goes away."""
    with _connect(host, port) as sock, open_socket(sock.getsockname()[0]) as udp:
        asked = {"do": "train", "reverse": reverse, "packets": packets, "packets_per_s": packets_per_s}
        _send(sock, {**asked, "port": udp.getsockname()[1]})
        if reverse:
            tally = collect(udp, sock, lambda: int(_receive(sock)))
            return TrainFound(packets, *_judged(packets, tally))
        emit(udp, (host, int(_receive(sock))), packets, packets_per_s)
        _send(sock, packets)
        return TrainFound(packets, *_receive(sock))


def _judged(packets: int, tally: Tally) -> tuple[int, int, int]:
    """(lost on the link, reordered, lost by the receiver)."""
    return packets - len(tally.seen) - tally.overflowed, tally.reordered, tally.overflowed


def _answer_train(sock: socket.socket, asked: dict[str, Any]) -> None:
    packets = int(asked["packets"])
    with open_socket(sock.getsockname()[0]) as udp:
        if asked["reverse"]:
            emit(udp, (sock.getpeername()[0], int(asked["port"])), packets, float(asked["packets_per_s"]))
            _send(sock, packets)
            return
        _send(sock, udp.getsockname()[1])
        _send(sock, _judged(packets, collect(udp, sock, lambda: int(_receive(sock)))))


def serve(address: str, port: int, ready: threading.Event | None = None) -> None:
    """Answer measurements on `address`:`port` until the process ends. Raises LinkError if it cannot listen there."""
    try:
        listener = socket.create_server((address, port), backlog=128)
    except OSError as refused:
        remedy = "probe ports are 7424-7551; run it in the site whose address this is"
        raise LinkError(f"probe: cannot listen on {address}:{port} ({refused.strerror}); {remedy}") from refused
    if ready is not None:
        ready.set()
    with listener:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_answer, args=(sock,), daemon=True).start()


def _answer(sock: socket.socket) -> None:
    with sock:
        sock.settimeout(_PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            asked = _receive(sock)
            match asked["do"]:
                case "receive":
                    _send(sock, _drain(sock))
                case "send":
                    _send(sock, time.monotonic_ns())
                    _flood(sock, float(asked["seconds"]))
                case "train":
                    _answer_train(sock, asked)
                case "echo":
                    while byte := sock.recv(1):
                        sock.sendall(byte)
        except (OSError, KeyError, TypeError, ValueError) as failure:
            print(f"probe: a measurement ended early: {failure!r}", file=sys.stderr)


def _flood(sock: socket.socket, seconds: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    source = os.memfd_create("netem-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(source, _CHUNK_BYTES)
        os.pwrite(source, b"\xa5" * _CHUNK_BYTES, 0)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_PATIENCE_S), 0))
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            os.sendfile(sock.fileno(), source, 0, _CHUNK_BYTES)
    finally:
        os.close(source)
    sock.settimeout(_PATIENCE_S)
    sock.shutdown(socket.SHUT_WR)


def _drain(sock: socket.socket) -> list[tuple[int, int]]:
    buffer = bytearray(_CHUNK_BYTES)
    timeline: list[tuple[int, int]] = []
    total = 0
    while received := sock.recv_into(buffer, _CHUNK_BYTES, socket.MSG_TRUNC):
        total += received
        now_ns = time.monotonic_ns()
        if not timeline or now_ns - timeline[-1][0] >= _NOTE_NS:
            timeline.append((now_ns, total))
    return timeline


def _connect(host: str, port: int, number: int | None = None) -> socket.socket:
    """`number`: of the connections of one measurement, which a shaper that caps flows tells apart by their ports."""
    sock = socket.socket()
    try:
        sock.settimeout(_PATIENCE_S)
        if number is not None:
            _leave_by(sock, number)
        sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _leave_by(sock: socket.socket, number: int) -> None:
    first = FLOW_PORTS[0] + PROBE_FLOWS[number % len(PROBE_FLOWS)]
    for turn in random.sample(range(_TURNS), _TURNS):  # those of a minute ago may still be known to either end
        try:
            sock.bind(("", first + 256 * turn))
            return
        except OSError as taken:
            if taken.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all {_TURNS} ports of connection {number} are taken")


def _congestion_control(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _send(sock: socket.socket, message: object) -> None:
    body = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket) -> Any:
    return json.loads(_receive_exactly(sock, _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))[0]))


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    body = bytearray()
    while len(body) < count:
        piece = sock.recv(count - len(body))
        if not piece:
            raise ConnectionResetError("the peer closed the connection")
        body += piece
    return bytes(body)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m netem.probe", description="Goodput and round trip of a link.")
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="answer measurements")
    server.add_argument("--address", required=True)
    client = commands.add_parser("measure", help="measure against a server")
    client.add_argument("--host", required=True)
    client.add_argument("--seconds", type=float, default=3.0)
    client.add_argument("--connections", type=int, default=1)
    client.add_argument("--reverse", action="store_true", help="from the server to here")
    client.add_argument("--packets", type=int, default=0, help="a train of datagrams; 0 for none")
    client.add_argument("--packets-per-s", type=float, default=5000.0)
    client.add_argument("--json", action="store_true", help="one JSON object on stdout")
    for command in (server, client):
        command.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    try:
        if args.command == "serve":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            serve(args.address, args.port)
        datagrams = {"packets": args.packets, "packets_per_s": args.packets_per_s}
        found = measure(args.host, args.port, args.seconds, args.connections, args.reverse, **datagrams)
    except LinkError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(asdict(found)))
    else:
        print(f"goodput {found.goodput_bps / 1e6:.1f} Mbit/s over {found.window_s:.1f} s ({found.congestion_control})")
        print(f"first second {found.first_second_bps / 1e6:.1f} Mbit")
        print(f"idle round trip min {found.rtt_min_s * 1e3:.3f} ms, p50 {found.rtt_p50_s * 1e3:.3f} ms")
        if found.train is not None:
            print(f"train of {found.train.sent}: {found.train.lost} lost, {found.train.reordered} reordered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
