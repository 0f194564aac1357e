"""Diverts what an interface is about to forward into a queue (NFQUEUE), by an nf_tables table of its own.

No program is needed: the rules go to the kernel in one atomic batch and are read back and compared. Where the kernel
lacks nf_tables' own `queue` (nft_queue), the same rule carries iptables' NFQUEUE target through nft_compat. Neither
has a bypass: a queue that nobody serves drops its packets, which is an outage and not a shorter round trip.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping

from netem import nfnetlink as nl
from netem.link import LinkError

TABLE = "prfaas_delay"
CHAIN = "forward"

_SUBSYS = 10 << 8
_NEWTABLE, _DELTABLE, _NEWCHAIN, _NEWRULE, _GETRULE = (_SUBSYS | n for n in (0, 2, 3, 6, 7))
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFPROTO_IPV4 = 2
_HOOK_FORWARD = 2
_PRIORITY_MANGLE = -150
_ACCEPT = 1
_META_OIFNAME = 7
_REGISTER = 1
_REMEDY = "as root on the host: modprobe nft_queue (or nft_compat and xt_NFQUEUE); see 'prfaas link capabilities'"

NATIVE, COMPAT = "nft_queue", "xt_NFQUEUE"


def u32(value: int) -> bytes:
    return struct.pack(">i", value)


def queue_expression(mechanism: str, queue: int) -> bytes:
    """The rule's last expression: the packet goes to `queue`, with no bypass."""
    if mechanism == NATIVE:
        return _expression("queue", nl.attribute(1, struct.pack(">H", queue)), nl.attribute(2, struct.pack(">H", 1)))
    info = nl.attribute(3, struct.pack("=H6x", queue))  # struct xt_NFQ_info, aligned as xtables does
    return _expression("target", nl.attribute(1, b"NFQUEUE\0"), nl.attribute(2, u32(0)), info)


def rule(mechanism: str, interface: str, queue: int) -> bytes:
    """The expressions of: what leaves by `interface` goes to `queue`."""
    name = nl.nested(3, nl.attribute(1, interface.encode().ljust(16, b"\0")))
    meta = _expression("meta", nl.attribute(2, u32(_META_OIFNAME)), nl.attribute(1, u32(_REGISTER)))
    compare = _expression("cmp", nl.attribute(1, u32(_REGISTER)), nl.attribute(2, u32(0)), name)
    return b"".join((meta, compare, queue_expression(mechanism, queue)))


def _expression(name: str, *data: bytes) -> bytes:
    return nl.nested(1, nl.attribute(1, name.encode() + b"\0"), nl.nested(2, *data))


def understand(expressions: bytes) -> tuple[str, int]:
    """(interface, queue) of a rule of this module. Raises LinkError for any other rule."""
    found = []
    for _, element in nl.attribute_list(expressions):
        parts = nl.attributes(element)
        found.append((parts[1].rstrip(b"\0").decode(), nl.attributes(parts.get(2, b""))))
    names = [name for name, _ in found]
    if names[:2] == ["meta", "cmp"] and len(names) == 3 and found[0][1].get(2) == u32(_META_OIFNAME):
        interface = nl.attributes(found[1][1][3])[1].rstrip(b"\0").decode()
        last, data = found[2]
        if last == "queue" and struct.unpack(">H", data.get(3, bytes(2)))[0] == 0:
            return interface, struct.unpack(">H", data[1])[0]
        if last == "target" and data[1].rstrip(b"\0") == b"NFQUEUE" and data[2] == u32(0):
            return interface, struct.unpack_from("=H", data[3])[0]
    raise LinkError(
        f"table {TABLE}: holds a rule ({', '.join(names)}) that is not this agent's; nft delete table {TABLE}"
    )


def divert(queues: Mapping[str, int]) -> str:
    """Send what each interface forwards to its queue (interface -> number), in this network namespace; the mechanism.

    Idempotent: rules that are there already stay, others of this table are replaced in one step. Raises LinkError when
    the kernel refuses or keeps something else.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, nl.NETLINK_NETFILTER) as sock:
        sock.bind((0, 0))
        sock.settimeout(5.0)
        mechanism, kept = _read_back(sock)
        if kept == dict(queues):
            return mechanism
        refused: OSError | None = None
        for mechanism in (NATIVE, COMPAT):
            try:
                _replace(sock, mechanism, queues)
            except OSError as why:
                refused = why
                continue
            mechanism, kept = _read_back(sock)
            if kept != dict(queues):
                raise LinkError(f"table {TABLE}: asked {dict(queues)}, the kernel kept {kept}; {_REMEDY}")
            return mechanism
    raise LinkError(f"table {TABLE}: the kernel does not divert packets to a queue ({refused}); {_REMEDY}")


def _replace(sock: socket.socket, mechanism: str, queues: Mapping[str, int]) -> None:
    """One transaction: the table is emptied, whether it was there or not, and filled. Raises OSError."""
    table = nl.attribute(1, TABLE.encode() + b"\0")
    hook = nl.nested(4, nl.attribute(1, u32(_HOOK_FORWARD)), nl.attribute(2, u32(_PRIORITY_MANGLE)))
    chain = nl.attribute(1, TABLE.encode() + b"\0") + nl.attribute(3, CHAIN.encode() + b"\0") + hook
    chain += nl.attribute(5, u32(_ACCEPT)) + nl.attribute(7, b"filter\0")
    wanted = [(_NEWTABLE, table), (_DELTABLE, table), (_NEWTABLE, table), (_NEWCHAIN, chain)]
    for interface, queue in queues.items():
        where = nl.attribute(1, TABLE.encode() + b"\0") + nl.attribute(2, CHAIN.encode() + b"\0")
        wanted.append((_NEWRULE, where + nl.nested(4, rule(mechanism, interface, queue))))
    batch = [nl.message(_BATCH_BEGIN, nl.REQUEST, 0, 0, _SUBSYS >> 8)]
    for seq, (kind, body) in enumerate(wanted, start=1):
        flags = nl.REQUEST | nl.ACK | (0 if kind == _DELTABLE else nl.CREATE)
        batch.append(nl.message(kind, flags, seq, _NFPROTO_IPV4, 0, body))
    batch.append(nl.message(_BATCH_END, nl.REQUEST, len(wanted) + 1, 0, _SUBSYS >> 8))
    sock.send(b"".join(batch))
    answered = 0
    while answered < len(wanted):
        for kind, _, payload in nl.messages(sock.recv(1 << 16)):
            if kind == nl.NLMSG_ERROR:
                answered += 1
                if code := nl.error_of(payload):
                    _drain(sock)
                    raise OSError(code, os.strerror(code))


def _drain(sock: socket.socket) -> None:
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        sock.settimeout(5.0)


def _read_back(sock: socket.socket) -> tuple[str, dict[str, int]]:
    """(mechanism, interface -> queue) as the kernel has it; an empty mapping where there is no such table."""
    body = nl.attribute(1, TABLE.encode() + b"\0")
    sock.send(nl.message(_GETRULE, nl.REQUEST | nl.DUMP, 99, _NFPROTO_IPV4, 0, body))
    found: dict[str, int] = {}
    mechanism = NATIVE
    while True:
        for kind, _, payload in nl.messages(sock.recv(1 << 16)):
            if kind == nl.NLMSG_DONE:
                return mechanism, found
            if kind == nl.NLMSG_ERROR:
                code = nl.error_of(payload)
                if code == errno.ENOENT:
                    return mechanism, found
                raise LinkError(f"table {TABLE}: cannot be read back ({os.strerror(code)}); {_REMEDY}")
            if kind == _NEWRULE:
                parts = nl.attributes(payload[4:])
                if parts[1].rstrip(b"\0").decode() == TABLE:
                    interface, queue = understand(parts[4])
                    found[interface] = queue
                    mechanism = COMPAT if b"NFQUEUE" in parts[4] else NATIVE
