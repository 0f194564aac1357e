"""One chain of rules in the forward path, as a table of our own in nf_tables: replaced in one step, and read back.

No program is needed: the rules go to the kernel in one atomic batch. A rule is an interface and what is done with the
packets that are about to leave by it: its last expression, which `forwarding.py` knows.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from netem import nfnetlink as nl
from netem.link import LinkError

CHAIN = "forward"

_SUBSYS = 10 << 8
_NEWTABLE, _NEWCHAIN, _NEWRULE, _GETRULE, _DELRULE = (_SUBSYS | n for n in (0, 3, 6, 7, 8))
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFPROTO_IPV4 = 2
_HOOK_FORWARD = 2
_ACCEPT = 1
_META_OIFNAME = 7
_REGISTER = 1
_PATIENCE_S = 5.0


def u32(value: int) -> bytes:
    return struct.pack(">i", value)


def expression(name: str, *data: bytes) -> bytes:
    """An expression of a rule: its name and its attributes."""
    return nl.nested(1, nl.attribute(1, name.encode() + b"\0"), nl.nested(2, *data))


def leaving_by(interface: str) -> bytes:
    """The expressions that select what is about to leave by `interface`."""
    name = nl.nested(3, nl.attribute(1, interface.encode().ljust(16, b"\0")))
    meta = expression("meta", nl.attribute(2, u32(_META_OIFNAME)), nl.attribute(1, u32(_REGISTER)))
    return meta + expression("cmp", nl.attribute(1, u32(_REGISTER)), nl.attribute(2, u32(0)), name)


@dataclass(frozen=True, slots=True)
class Last:
    """What a rule does to what it selected: the name of its last expression and that one's attributes."""

    name: str
    data: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Table:
    """A table with one chain in the forward path. `priority`: where in it, earlier the lower."""

    name: str
    priority: int

    def foreign(self, names: Sequence[str]) -> LinkError:
        """The refusal of a table that holds somebody else's rules."""
        remedy = f"nft delete table {self.name}"
        return LinkError(f"table {self.name}: holds a rule ({', '.join(names)}) that is not this agent's; {remedy}")

    def replace(self, rules: Sequence[bytes]) -> None:
        """The chain, made where it was not there, holds these rules from now on. Raises OSError."""
        name = self.name.encode() + b"\0"
        table = nl.attribute(1, name)
        hook = nl.nested(4, nl.attribute(1, u32(_HOOK_FORWARD)), nl.attribute(2, u32(self.priority)))
        chain = nl.attribute(1, name) + nl.attribute(3, CHAIN.encode() + b"\0") + hook
        chain += nl.attribute(5, u32(_ACCEPT)) + nl.attribute(7, b"filter\0")
        where = nl.attribute(1, name) + nl.attribute(2, CHAIN.encode() + b"\0")
        wanted = [(_NEWTABLE, table), (_NEWCHAIN, chain), (_DELRULE, where)]  # without a handle: all of them
        wanted += [(_NEWRULE, where + nl.nested(4, rule)) for rule in rules]
        batch = [nl.message(_BATCH_BEGIN, nl.REQUEST, 0, 0, _SUBSYS >> 8)]
        for seq, (kind, body) in enumerate(wanted, start=1):
            how = {_DELRULE: 0, _NEWRULE: nl.CREATE | nl.APPEND}.get(kind, nl.CREATE)
            flags = nl.REQUEST | nl.ACK | how
            batch.append(nl.message(kind, flags, seq, _NFPROTO_IPV4, 0, body))
        batch.append(nl.message(_BATCH_END, nl.REQUEST, len(wanted) + 1, 0, _SUBSYS >> 8))
        with _socket() as sock:
            sock.send(b"".join(batch))
            answered = 0
            while answered < len(wanted):
                for kind, _, payload in nl.messages(sock.recv(1 << 16)):
                    if kind == nl.NLMSG_ERROR:
                        answered += 1
                        if code := nl.error_of(payload):
                            raise OSError(code, os.strerror(code))

    def rules(self) -> list[bytes]:
        """The expressions of each rule that the kernel has; none where there is no such table. Raises LinkError."""
        name = nl.attribute(1, self.name.encode() + b"\0")
        found: list[bytes] = []
        with _socket() as sock:
            sock.send(nl.message(_GETRULE, nl.REQUEST | nl.DUMP, 99, _NFPROTO_IPV4, 0, name))
            while True:
                for kind, _, payload in nl.messages(sock.recv(1 << 16)):
                    if kind == nl.NLMSG_DONE:
                        return found
                    if kind == nl.NLMSG_ERROR:
                        code = nl.error_of(payload)
                        if code == errno.ENOENT:
                            return found
                        remedy = "as root on the host: modprobe nf_tables; see 'prfaas link capabilities'"
                        raise LinkError(f"table {self.name}: cannot be read back ({os.strerror(code)}); {remedy}")
                    if kind == _NEWRULE:
                        parts = nl.attributes(payload[4:])
                        if parts[1].rstrip(b"\0").decode() == self.name:
                            found.append(parts[4])


def understand_last(table: Table, expressions: bytes) -> tuple[str, Last]:
    """(interface, what is done) of a rule that `leaving_by` and one more expression made. Raises LinkError."""
    found = []
    for _, element in nl.attribute_list(expressions):
        parts = nl.attributes(element)
        found.append((parts[1].rstrip(b"\0").decode(), nl.attributes(parts.get(2, b""))))
    names = [name for name, _ in found]
    if names[:2] != ["meta", "cmp"] or len(names) != 3 or found[0][1].get(2) != u32(_META_OIFNAME):
        raise table.foreign(names)
    interface = nl.attributes(found[1][1][3])[1].rstrip(b"\0").decode()
    return interface, Last(*found[2])


@contextmanager
def _socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, nl.NETLINK_NETFILTER) as sock:
        sock.bind((0, 0))
        sock.settimeout(_PATIENCE_S)
        yield sock
