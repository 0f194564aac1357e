"""What listens in a network namespace: TCP, UDP and Unix sockets, as the kernel has them in /proc/PID/net."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TCP_LISTEN = "0A"
_ACCEPTS = 0x10000  # __SO_ACCEPTCON, the flag of a listening Unix socket


@dataclass(frozen=True, order=True)
class Listener:
    """address: of an IP socket with its port; a path, or a name that begins with @, of a Unix socket."""

    protocol: str
    address: str
    port: int = 0

    def __str__(self) -> str:
        return f"{self.protocol} {self.address}{f' port {self.port}' if self.port else ''}"


def listeners(pid: int | str = "self", holders: Iterable[int] | None = None) -> set[Listener]:
    """All that listens in the network namespace of a process; of UDP, all that is bound and not connected. holders:
    only what one of these processes has a descriptor of."""
    held = None if holders is None else {inode for holder in holders for inode in _inodes(holder)}
    found: set[Listener] = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _rows(pid, protocol):
            local, remote, state, inode = fields[1], fields[2], fields[3], fields[9]
            listens = state == _TCP_LISTEN if protocol.startswith("tcp") else remote.endswith(":0000")
            if listens and (held is None or inode in held):
                found.add(Listener(protocol, *_address(local)))
    for fields in _rows(pid, "unix"):
        listens = len(fields) > 7 and bool(int(fields[3], 16) & _ACCEPTS or fields[7].startswith("@"))
        if listens and (held is None or fields[6] in held):
            found.add(Listener("unix", " ".join(fields[7:])))
    return found


def _inodes(pid: int) -> set[str]:
    """Of the sockets that a process has a descriptor of."""
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def namespaces(pids: Iterable[int]) -> dict[str, int]:
    """Network namespace -> one of these processes that is in it."""
    return {os.readlink(f"/proc/{pid}/ns/net"): pid for pid in pids}


def _rows(pid: int | str, table: str) -> list[list[str]]:
    path = Path(f"/proc/{pid}/net/{table}")
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _address(text: str) -> tuple[str, int]:
    """`0100007F:1F40`, words in the host's order, as an address and a port."""
    words, port = text.split(":")
    raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return str(ipaddress.ip_address(socket.inet_ntop(family, raw))), int(port, 16)
