"""nfnetlink's wire format: messages and attributes, as bytes. What nf_tables and NFQUEUE have in common; no sockets."""

from __future__ import annotations

import struct
from collections.abc import Iterator

REQUEST, ACK, DUMP, CREATE, APPEND = 0x1, 0x4, 0x300, 0x400, 0x800
NLMSG_ERROR, NLMSG_DONE = 2, 3
NETLINK_NETFILTER = 12
HEADER_BYTES = 20  # nlmsghdr 16, nfgenmsg 4

_NESTED = 0x8000


def attribute(kind: int, body: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    return struct.pack("=HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


def nested(kind: int, *inner: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attribute(kind | _NESTED, b"".join(inner))


def message(kind: int, flags: int, seq: int, family: int, resource: int, body: bytes = b"") -> bytes:
    """A whole netlink message. `kind`: subsystem << 8 | message; `resource`: e.g. the number of a queue."""
    payload = struct.pack(">BBH", family, 0, resource) + body
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, seq, 0) + payload


def messages(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(kind, sequence number, payload after the 16-byte header) of every message in what a socket gave."""
    at = 0
    while at + 16 <= len(raw):
        length, kind, _, seq, _ = struct.unpack_from("=IHHII", raw, at)
        if length < 16:
            raise ValueError(f"a netlink message of {length} bytes")
        yield kind, seq, raw[at + 16 : at + length]
        at += length + (-length % 4)


def attributes(raw: bytes) -> dict[int, bytes]:
    """Kind -> body of the attributes in `raw`; the last of a kind wins."""
    return dict(attribute_list(raw))


def attribute_list(raw: bytes) -> list[tuple[int, bytes]]:
    """(kind, body) in order, for lists whose elements share a kind."""
    found, at = [], 0
    while at + 4 <= len(raw):
        length, kind = struct.unpack_from("=HH", raw, at)
        if length < 4:
            raise ValueError(f"a netlink attribute of {length} bytes")
        found.append((kind & 0x3FFF, raw[at + 4 : at + length]))
        at += length + (-length % 4)
    return found


def error_of(payload: bytes) -> int:
    """The errno of an NLMSG_ERROR's payload; 0 is an acknowledgement."""
    return -int(struct.unpack_from("=i", payload)[0])
