"""The process that is cross-traffic on the wire, one in each site: `python -m netem.rivals --config FILE`.

It sends what its site's sources of `netem.cross` say, and receives (and drops) what the other site's send: TCP flows
without an end, and paced datagrams, in the class and the queue that the KV is in. It does nothing but while somebody
holds a connection to its Unix socket, lines of JSON both ways; when that ends, for whatever reason, the traffic does.

    {"t0_ns": monotonic ns, "sources": [`Source` in wall units, ...]}   {"ready": true}, and then, as it happens,
                                                                       {"source", "on", "due_ns", "t_ns"}
    {"stop": true}     nothing is sent any more                        {"stopped": true}
    {"count": true}    what landed here                                `Arrivals.count`, and what the senders noted

Source i of a load has port FIRST_PORT + i. Bytes are counted where they land, with the headers that the shaper counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from netem.cross import MOST_SOURCES, Source
from netem.link import LinkError

FIRST_PORT: Final = 7552
"""TCP and UDP; 7552-7679, docs/contracts.md."""
FRAME_BYTES: Final = 1514
DATAGRAM_BYTES: Final = 1472
_TCP_HEADERS: Final = 66  # Ethernet 14, IPv4 20, TCP 32 with time stamps
_UDP_HEADERS: Final = FRAME_BYTES - DATAGRAM_BYTES
_MOST_SEGMENTS: Final = 40  # of a super-datagram: below 64 kB
_TOGETHER_S: Final = 0.00025  # of the link, at the sender's rate: a full queue refuses a super-datagram as a whole
_TICK_S: Final = 0.002  # between the datagrams of a paced sender, or a packet's time where that is longer
_CATCH_UP_S: Final = 0.05
_CHUNK_BYTES: Final = 1 << 20
_UNSENT_BYTES: Final = 1 << 18  # what a flow's socket holds beyond what is on its way
_READ_BYTES: Final = 1 << 18  # a receiver wakes for so much: nobody waits for it
_BUFFER_BYTES: Final = 8 << 20  # asked for; the kernel gives what its rmem_max and wmem_max allow
_CONNECT_S: Final = 3.0
_AGAIN_S: Final = 0.2  # before a flow that broke is made anew
_UDP_SEGMENT, _UDP_GRO, _SOL_UDP = 103, 104, 17
_TCP_NOTSENT_LOWAT: Final = 25
_SO_MEMINFO: Final = 55
_MEMINFO: Final = struct.Struct("=32xI")  # the last of its words: what the socket's buffer had no room for
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger: what waits in the socket goes with it
_INFO_BYTES: Final = 144
_SEGMENTS: Final = struct.Struct("=128xQII")  # of struct tcp_info: bytes_received, segs_out, segs_in


@dataclass(slots=True)
class Noted:
    """What the sender of one source did. broken: flows that were lost and made anew; datagrams: sent, for
    whatever became of them; held_back: due and not sent, as the process was late or the kernel full."""

    spells: int = 0
    broken: int = 0
    datagrams: int = 0
    held_back: int = 0


@dataclass(slots=True)
class Landed:
    """What landed of one source. wire_bytes: with the headers of every packet; answered_bytes: of the receivers'
    acknowledgements, the other way. reads: of datagrams, that came together."""

    bytes: int = 0
    wire_bytes: int = 0
    answered_bytes: int = 0
    reads: int = 0


class Arrivals:
    """The receiving end of every source that sends to here."""

    def __init__(self, address: str, sources: dict[int, Source]) -> None:
        self._loop = asyncio.get_running_loop()
        self._landed = {index: Landed() for index in sources}
        self._open: dict[socket.socket, int] = {}
        self._listening: list[socket.socket] = []
        self._datagram_sockets: dict[int, socket.socket] = {}
        self._buffer = bytearray(_READ_BYTES)
        for index, source in sources.items():
            where = (address, FIRST_PORT + index)
            if source.kind == "elastic":
                sock = socket.create_server(where, backlog=128)
                self._loop.add_reader(sock, self._accept, sock, index)
            else:
                sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
                sock.bind(where)
                self._datagram_sockets[index] = sock
                self._loop.add_reader(sock, self._datagrams, sock, self._landed[index])
            sock.setblocking(False)
            self._listening.append(sock)

    def count(self) -> dict[int, Landed]:
        """By source, what has landed until now."""
        now = {index: replace(one) for index, one in self._landed.items()}
        for sock, index in self._open.items():
            _add(now[index], sock)
        for index, sock in self._datagram_sockets.items():
            _add_lost(now[index], sock)
        return now

    def close(self) -> None:
        for sock in (*self._listening, *self._open):
            self._loop.remove_reader(sock)
            sock.close()

    def _accept(self, listener: socket.socket, index: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _READ_BYTES)
            self._open[sock] = index
            self._loop.add_reader(sock, self._drain, sock)

    def _drain(self, sock: socket.socket) -> None:
        try:
            more = sock.recv_into(self._buffer, _READ_BYTES, socket.MSG_TRUNC) > 0
        except BlockingIOError:
            return
        except OSError:  # its sender resets it at the end of a spell
            more = False
        if not more:
            _add(self._landed[self._open.pop(sock)], sock)
            self._loop.remove_reader(sock)
            sock.close()

    def _datagrams(self, sock: socket.socket, landed: Landed) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                size = sock.recv_into(self._buffer, _READ_BYTES, socket.MSG_TRUNC)
                landed.reads += 1
                landed.bytes += size
                landed.wire_bytes += size + _UDP_HEADERS * -(-size // DATAGRAM_BYTES)


def _add(landed: Landed, sock: socket.socket) -> None:
    """What a receiving socket's kernel counted. Segments that came again are counted with their headers only."""
    received, segments_out, segments_in = _SEGMENTS.unpack(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    )
    landed.bytes += received
    landed.wire_bytes += received + _TCP_HEADERS * segments_in
    landed.answered_bytes += _TCP_HEADERS * segments_out


def _add_lost(landed: Landed, sock: socket.socket) -> None:
    """What crossed the link and found this process too slow: so many reads, taken to be as large as the others."""
    (lost,) = _MEMINFO.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))
    more = 1 + lost / max(1, landed.reads)
    landed.bytes, landed.wire_bytes = round(landed.bytes * more), round(landed.wire_bytes * more)


@dataclass(slots=True)
class Departures:
    """The sending end of every source of this site. tell: an event, as it happens."""

    peer: str
    t0_ns: int
    sources: dict[int, Source]
    tell: Any
    noted: dict[int, Noted] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self) -> None:
        for index, source in self.sources.items():
            self.noted[index] = Noted()
            self._tasks.append(asyncio.create_task(self._follow(index, source)))

    async def stop(self) -> None:
        await _end(self._tasks)
        self._tasks.clear()

    async def _follow(self, index: int, source: Source) -> None:
        for start_s, stop_s in source.spells():
            await self._until(index, start_s, on=True)
            self.noted[index].spells += 1
            sending = [asyncio.create_task(one) for one in self._senders(index, source)]
            try:
                await self._until(index, stop_s, on=False)
            finally:
                await _end(sending)

    async def _until(self, index: int, at_s: float, *, on: bool) -> None:
        """Wait for a time of the load, which may never come, and say that it has."""
        if at_s == float("inf"):
            await asyncio.Event().wait()
        due_ns = self.t0_ns + round(at_s * 1e9)
        while (wait_ns := due_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(min(wait_ns * 1e-9, 3600.0))
        self.tell({"source": index, "on": on, "due_ns": due_ns, "t_ns": time.monotonic_ns()})

    def _senders(self, index: int, source: Source) -> Iterator[Any]:
        to, noted = (self.peer, FIRST_PORT + index), self.noted[index]
        if source.rate_bps is not None:
            yield _pace(to, source.rate_bps, noted)
        for _ in range(source.flows or 0):
            yield _flow(to, noted)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel, wait, and raise what one of them failed of."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


async def _flow(to: tuple[str, int], noted: Noted) -> None:
    """One flow that always has more to send, until cancelled; a connection that breaks is made anew."""
    while True:
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            try:
                await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, to), _CONNECT_S)
                await _bulk(sock)
            except OSError as error:
                noted.broken += 1
                print(f"a flow to port {to[1]} broke and is made anew: {error!r}", file=sys.stderr, flush=True)
        await asyncio.sleep(_AGAIN_S)


async def _bulk(sock: socket.socket) -> None:
    source = os.memfd_create("netem-rivals", os.MFD_CLOEXEC)
    try:
        os.ftruncate(source, _CHUNK_BYTES)
        while True:
            try:
                os.sendfile(sock.fileno(), source, 0, _CHUNK_BYTES)
            except BlockingIOError:
                await _writable(sock)
    finally:
        os.close(source)


async def _writable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock)


async def _pace(to: tuple[str, int], rate_bps: float, noted: Noted) -> None:
    """Datagrams at a rate of the link, headers counted, until cancelled. What a tick was late for comes with the next
    one, _CATCH_UP_S of it at most."""
    packet_s = FRAME_BYTES * 8 / rate_bps
    most = max(1, int(_CATCH_UP_S / packet_s))
    together = max(1, min(_MOST_SEGMENTS, int(_TOGETHER_S / packet_s)))
    payload, sent, began_s = memoryview(bytes(DATAGRAM_BYTES * together)), 0, time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        sock.setsockopt(_SOL_UDP, _UDP_SEGMENT, DATAGRAM_BYTES)
        while True:
            due = int((time.monotonic() - began_s) / packet_s) + 1
            if due - sent > most:
                noted.held_back += due - sent - most
                sent = due - most
            while sent < due:
                count = min(due - sent, together)
                sent += count
                try:
                    sock.sendto(payload[: count * DATAGRAM_BYTES], to)
                except BlockingIOError:
                    noted.held_back += count
                    continue
                except OSError:  # no way there, as while the link is down: lost
                    pass
                noted.datagrams += count
            await asyncio.sleep(max(_TICK_S, packet_s))


class Rivals:
    """This site's process. sends: the direction of what goes out from here. address, peer: this site's, the other's."""

    def __init__(self, sends: str, address: str, peer: str) -> None:
        self._sends, self._address, self._peer = sends, address, peer
        self._busy = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: at most one load at a time."""

        def say(line: dict[str, Any]) -> None:
            writer.write(json.dumps(line).encode() + b"\n")

        if self._busy:
            say({"error": "another load has its cross-traffic on the link; wait for its end"})
            writer.close()
            return
        self._busy = True
        try:
            await self._load(reader, say)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever held it is gone, and with it the traffic
        except (LinkError, OSError, ValueError, KeyError, TypeError) as error:
            print(f"cross-traffic: {error!r}", file=sys.stderr, flush=True)
            say({"error": f"cross-traffic: {error}"})
        finally:
            self._busy = False
            writer.close()

    async def _load(self, reader: asyncio.StreamReader, say: Any) -> None:
        if not (first := await reader.readline()):
            return
        asked = json.loads(first)
        sources = [Source(**one) for one in asked["sources"]]
        if len(sources) > MOST_SOURCES:
            raise LinkError(f"sources: {len(sources)} of them; there are ports for {MOST_SOURCES}")
        mine = {index: one for index, one in enumerate(sources) if one.direction == self._sends}
        arrivals = Arrivals(self._address, {i: one for i, one in enumerate(sources) if i not in mine})
        departures = Departures(self._peer, int(asked["t0_ns"]), mine, say)
        try:
            say({"ready": True})
            departures.begin()
            while line := await reader.readline():
                if "stop" in json.loads(line):
                    await departures.stop()
                    say({"stopped": True})
                else:
                    say(_counted(departures, arrivals))
        finally:
            try:
                await departures.stop()
            finally:
                arrivals.close()


def _counted(departures: Departures, arrivals: Arrivals) -> dict[str, Any]:
    landed = {
        index: {"bytes": one.bytes, "wire_bytes": one.wire_bytes, "answered_bytes": one.answered_bytes}
        for index, one in arrivals.count().items()
    }
    return {"landed": landed, "noted": {index: asdict(one) for index, one in departures.noted.items()}}


async def run(config: dict[str, Any]) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    path = Path(config["socket"])
    path.unlink(missing_ok=True)
    rivals = Rivals(config["sends"], config["address"], config["peer"])
    server = await asyncio.start_unix_server(rivals.serve, path)
    Path(config["ready_file"]).write_text(f"{os.getpid()}\n")
    await stop.wait()
    server.close()
    path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m netem.rivals", description="What competes with the KV.")
    parser.add_argument("--config", type=Path, required=True, help="JSON: socket, ready_file, sends, address, peer")
    try:
        asyncio.run(run(json.loads(parser.parse_args().config.read_text())))
    except (OSError, ValueError, KeyError) as refused:
        print(f"error: {refused!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
