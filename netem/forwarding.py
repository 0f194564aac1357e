"""What the WAN does with the packets that it forwards, before they are shaped: drop them, or let them wait in a queue.

One nf_tables table with one chain, whose rules are an interface and what is done with the packets that leave by it:
`Drop` (a blackhole, which comes first) and `Queue` (the delay line's NFQUEUE). The chain stays once it is there: to
take a hook out of the forward path makes the kernel drop every packet that waits in a queue, and to put another one in
sends them through it twice. So both share this one, and only its rules change, in one atomic step.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from netem import nfnetlink as nl
from netem.link import LinkError
from netem.nftables import Last, Table, expression, leaving_by, u32, understand_last

TABLE = Table("prfaas_forward", -150)  # mangle's place, ahead of the filters
NATIVE, COMPAT = "nft_queue", "xt_NFQUEUE"

_VERDICT_REGISTER = 0
_NF_DROP = 0
_turn = threading.Lock()


@dataclass(frozen=True, slots=True)
class Drop:
    """What leaves by `interface` is dropped."""

    interface: str

    def encode(self) -> bytes:
        verdict = nl.nested(2, nl.nested(2, nl.attribute(1, u32(_NF_DROP))))
        drop = expression("immediate", nl.attribute(1, u32(_VERDICT_REGISTER)), verdict)
        return leaving_by(self.interface) + drop


@dataclass(frozen=True, slots=True)
class Queue:
    """What leaves by `interface` waits in queue `number`, with no bypass: a queue that nobody serves drops its packets,
    which is an outage and not a shorter round trip.

    `mechanism`: nf_tables' own `queue` (NATIVE), or, where the kernel lacks that, iptables' NFQUEUE target through
    nft_compat (COMPAT).
    """

    interface: str
    number: int
    mechanism: str = NATIVE

    def encode(self) -> bytes:
        if self.mechanism == NATIVE:
            number = nl.attribute(1, struct.pack(">H", self.number))
            last = expression("queue", number, nl.attribute(2, struct.pack(">H", 1)))
        else:
            info = nl.attribute(3, struct.pack("=H6x", self.number))  # struct xt_NFQ_info, aligned as xtables does
            last = expression("target", nl.attribute(1, b"NFQUEUE\0"), nl.attribute(2, u32(0)), info)
        return leaving_by(self.interface) + last


Rule = Drop | Queue


def understand(expressions: bytes) -> Rule:
    """A rule of this module. Raises LinkError for any other."""
    interface, last = understand_last(TABLE, expressions)
    match last:
        case Last("immediate", data) if _verdict(data) == u32(_NF_DROP):
            return Drop(interface)
        case Last("queue", data) if struct.unpack(">H", data.get(3, bytes(2)))[0] == 0:
            return Queue(interface, struct.unpack(">H", data[1])[0], NATIVE)
        case Last("target", data) if data[1].rstrip(b"\0") == b"NFQUEUE" and data[2] == u32(0):
            return Queue(interface, struct.unpack_from("=H", data[3])[0], COMPAT)
    raise TABLE.foreign([last.name])


def _verdict(data: dict[int, bytes]) -> bytes | None:
    return nl.attributes(nl.attributes(data.get(2, b"")).get(2, b"")).get(1)


def kept() -> list[Rule]:
    """The rules as the kernel has them. Raises LinkError."""
    return [understand(expressions) for expressions in TABLE.rules()]


def replace(kind: type[Rule], rules: Iterable[Rule]) -> None:
    """`rules` instead of all rules of their kind, and the others as they are; nothing where they are there already.

    Raises OSError when the kernel refuses, and LinkError when it keeps something else.
    """
    with _turn:
        before = kept()
        rest = [rule for rule in before if not isinstance(rule, kind)]
        wanted = sorted([*rules, *rest], key=lambda rule: (isinstance(rule, Queue), rule.interface))
        if wanted == before:
            return
        TABLE.replace([rule.encode() for rule in wanted])
        if (now := kept()) != wanted:
            raise LinkError(f"table {TABLE.name}: asked {wanted}, the kernel kept {now}; see 'prfaas doctor'")
