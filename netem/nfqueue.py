"""One NFQUEUE: packets wait in the kernel, only their metadata comes up, verdicts go down. Non-blocking, no threads."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from netem import nfnetlink as nl
from netem.link import LinkError

_SUBSYS = 3 << 8
_PACKET, _VERDICT, _CONFIG, _VERDICT_BATCH = (_SUBSYS | n for n in range(4))
_DROP, _ACCEPT = 0, 1
_BIND = 1
_COPY_META = 1
_F_GSO = 4
_ATTR_TIMESTAMP = 3
_TIMESTAMP = struct.Struct(">QQ")
_ID_AT = nl.HEADER_BYTES + 4  # the first attribute is the packet's header, and its id comes first in that
_SO_RCVBUFFORCE = 33
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5
_BUFFER_BYTES = 64 << 20
_ANSWER_S = 2.0
_BATCH = 128  # packets taken up before the caller looks at its clock again
_NO_AGE_NS = 1_000_000_000  # a packet "older" than this shows a step of the wall clock

_TABLE = Path("/proc/net/netfilter/nfnetlink_queue")


class Queue:
    """Queue `number` of this network namespace, owned until the process ends.

    `arrive(packet id, CLOCK_MONOTONIC ns at which the kernel queued it)` says whether to keep the packet. Raises
    LinkError when the queue cannot be had. `verdict_errors` counts verdicts on packets that were gone.
    """

    def __init__(self, number: int, arrive: Callable[[int, int], bool]) -> None:
        self.number = number
        self.verdict_errors = 0
        self._arrive = arrive
        self._seq = 0
        self._raw = bytearray(8192)
        self._buffer = memoryview(self._raw)
        self._timestamp_at: dict[int, int] = {}  # length of a message -> where its time stamp is
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, nl.NETLINK_NETFILTER)
        self._sock.bind((0, 0))
        self._sock.setblocking(False)
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
                break
            except PermissionError:  # in a user namespace: the kernel's rmem_max bounds it, and overflows are counted
                continue
        self._sock.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self._configure(nl.attribute(1, struct.pack(">BBH", _BIND, 0, socket.AF_INET)))
        self._configure(nl.attribute(2, struct.pack(">IB", 0, _COPY_META)))

    def fileno(self) -> int:
        return self._sock.fileno()

    def set(self, limit_packets: int, whole_super_packets: bool) -> None:
        """Bound what waits; and whether super-packets (GSO) wait whole or are cut into the packets of the wire."""
        self._configure(nl.attribute(3, struct.pack(">I", limit_packets)))
        flags = _F_GSO if whole_super_packets else 0
        self._configure(nl.attribute(5, struct.pack(">I", flags)) + nl.attribute(4, struct.pack(">I", _F_GSO)))

    def take(self) -> None:
        """Take up what has arrived, at most a batch of it."""
        for _ in range(_BATCH):
            try:
                length = self._sock.recv_into(self._buffer)
            except BlockingIOError:
                return
            self._handle(length)

    def accept(self, newest: int) -> None:
        """Let go, in order, every packet up to `newest`."""
        self._sock.send(self._verdict(_VERDICT_BATCH, newest, _ACCEPT))

    def dropped(self) -> int:
        """Packets that found the queue full, or that could not be told of, since it was bound."""
        for line in _TABLE.read_text().splitlines():
            words = line.split()
            if int(words[0]) == self.number:
                return int(words[5]) + int(words[6])
        raise LinkError(f"queue {self.number}: the kernel has it no more")

    def _verdict(self, kind: int, packet: int, what: int) -> bytes:
        return nl.message(kind, nl.REQUEST, 0, 0, self.number, nl.attribute(2, struct.pack(">II", what, packet)))

    def _handle(self, length: int) -> tuple[int, int] | None:
        """Deal with the message in the buffer; (sequence number, errno) if it answers a request."""
        kind = struct.unpack_from("=H", self._buffer, 4)[0]
        if kind == _PACKET:
            (packet,) = struct.unpack_from(">I", self._buffer, _ID_AT)
            if not self._arrive(packet, self._queued_ns(length)):
                self._sock.send(self._verdict(_VERDICT, packet, _DROP))
            return None
        (seq,) = struct.unpack_from("=I", self._buffer, 8)
        if kind == nl.NLMSG_ERROR and seq == 0:
            self.verdict_errors += 1
        return (seq, nl.error_of(bytes(self._buffer[16:length]))) if kind == nl.NLMSG_ERROR else None

    def _queued_ns(self, length: int) -> int:
        """When the kernel queued the packet in the buffer. It stamps with the wall clock, to the microsecond."""
        at = self._timestamp_at.get(length, 0)
        if not at or struct.unpack_from("=HH", self._buffer, at - 4) != (20, _ATTR_TIMESTAMP):
            at = self._timestamp_at[length] = self._find_timestamp(length)
        now_ns = time.monotonic_ns()
        if not at:
            return now_ns
        seconds, micros = _TIMESTAMP.unpack_from(self._buffer, at)
        age_ns = time.time_ns() - seconds * 1_000_000_000 - micros * 1_000
        return now_ns - age_ns if 0 <= age_ns < _NO_AGE_NS else now_ns

    def _find_timestamp(self, length: int) -> int:
        at = nl.HEADER_BYTES
        while at + 4 <= length:
            size, kind = struct.unpack_from("=HH", self._buffer, at)
            if kind == _ATTR_TIMESTAMP and size == 20:
                return at + 4
            at += max(4, size + (-size % 4))
        return 0

    def _configure(self, body: bytes) -> None:
        """Send, and wait for the kernel's answer; packets that come meanwhile are taken up."""
        self._seq += 1
        self._sock.send(nl.message(_CONFIG, nl.REQUEST | nl.ACK, self._seq, 0, self.number, body))
        while True:
            if not select.select([self._sock], [], [], _ANSWER_S)[0]:
                raise LinkError(f"queue {self.number}: the kernel does not answer; restart the delay line")
            answer = self._handle(self._sock.recv_into(self._buffer))
            if answer is not None and answer[0] == self._seq:
                break
        if answer[1]:
            remedy = {
                errno.EPERM: "it needs CAP_NET_ADMIN in the WAN's network namespace, and no other process on the queue",
                errno.EBUSY: "another process serves it; end that",
            }.get(answer[1], "see 'prfaas link capabilities'")
            raise LinkError(f"queue {self.number}: the kernel refused ({os.strerror(answer[1])}); {remedy}")
