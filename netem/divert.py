"""Diverts what an interface is about to forward into a queue (NFQUEUE), by an nf_tables table of its own.

Where the kernel lacks nf_tables' own `queue` (nft_queue), the same rule carries iptables' NFQUEUE target through
nft_compat. Neither has a bypass: a queue that nobody serves drops its packets, which is an outage and not a shorter
round trip.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from netem import nfnetlink as nl
from netem.link import LinkError
from netem.nftables import Table, expression, foreign, leaving_by, u32
from netem.nftables import understand as understand_rule

PRIORITY_MANGLE = -150
_REMEDY = "as root on the host: modprobe nft_queue (or nft_compat and xt_NFQUEUE); see 'prfaas link capabilities'"
TABLE = Table("prfaas_delay", PRIORITY_MANGLE, _REMEDY)

NATIVE, COMPAT = "nft_queue", "xt_NFQUEUE"


def queue_expression(mechanism: str, queue: int) -> bytes:
    """The rule's last expression: the packet goes to `queue`, with no bypass."""
    if mechanism == NATIVE:
        return expression("queue", nl.attribute(1, struct.pack(">H", queue)), nl.attribute(2, struct.pack(">H", 1)))
    info = nl.attribute(3, struct.pack("=H6x", queue))  # struct xt_NFQ_info, aligned as xtables does
    return expression("target", nl.attribute(1, b"NFQUEUE\0"), nl.attribute(2, u32(0)), info)


def rule(mechanism: str, interface: str, queue: int) -> bytes:
    """The expressions of: what leaves by `interface` goes to `queue`."""
    return leaving_by(interface) + queue_expression(mechanism, queue)


def understand(expressions: bytes) -> tuple[str, str, int]:
    """(mechanism, interface, queue) of a rule of this module. Raises LinkError for any other rule."""
    interface, last = understand_rule(TABLE.name, expressions)
    data = last.data
    if last.name == "queue" and struct.unpack(">H", data.get(3, bytes(2)))[0] == 0:
        return NATIVE, interface, struct.unpack(">H", data[1])[0]
    if last.name == "target" and data[1].rstrip(b"\0") == b"NFQUEUE" and data[2] == u32(0):
        return COMPAT, interface, struct.unpack_from("=H", data[3])[0]
    raise foreign(TABLE.name, [last.name])


def divert(queues: Mapping[str, int]) -> str:
    """Send what each interface forwards to its queue (interface -> number), in this network namespace; the mechanism.

    Idempotent: rules that are there already stay, others of this table are replaced in one step. Raises LinkError when
    the kernel refuses or keeps something else.
    """
    mechanism, kept = _read_back()
    if kept == dict(queues):
        return mechanism
    refused: OSError | None = None
    for mechanism in (NATIVE, COMPAT):
        try:
            TABLE.replace([rule(mechanism, interface, queue) for interface, queue in queues.items()])
        except OSError as why:
            refused = why
            continue
        mechanism, kept = _read_back()
        if kept != dict(queues):
            raise LinkError(f"table {TABLE.name}: asked {dict(queues)}, the kernel kept {kept}; {_REMEDY}")
        return mechanism
    raise LinkError(f"table {TABLE.name}: the kernel does not divert packets to a queue ({refused}); {_REMEDY}")


def _read_back() -> tuple[str, dict[str, int]]:
    """(mechanism, interface -> queue) as the kernel has it; an empty mapping where there is no such table."""
    found = [understand(expressions) for expressions in TABLE.rules()]
    return found[0][0] if found else NATIVE, {interface: queue for _, interface, queue in found}
