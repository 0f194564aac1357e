"""A direction that loses everything: what is about to leave by its interface is dropped, KV and control alike.

A rule in the WAN's forward path, before the delay line's, in an nf_tables table of its own; no table, no blackhole.
"""

from __future__ import annotations

from collections.abc import Iterable

from netem import nfnetlink as nl
from netem.divert import PRIORITY_MANGLE
from netem.link import LinkError
from netem.nftables import Table, expression, foreign, leaving_by, u32
from netem.nftables import understand as understand_rule

_REMEDY = "this kernel has no nf_tables: as root on the host, modprobe nf_tables; or ask for another outage"
TABLE = Table("prfaas_outage", PRIORITY_MANGLE - 10, _REMEDY)

_REGISTER_VERDICT = 0
_DROP = 0


def rule(interface: str) -> bytes:
    """The expressions of: what leaves by `interface` is dropped."""
    verdict = nl.nested(2, nl.nested(2, nl.attribute(1, u32(_DROP))))
    return leaving_by(interface) + expression("immediate", nl.attribute(1, u32(_REGISTER_VERDICT)), verdict)


def understand(expressions: bytes) -> str:
    """The interface of a rule of this module. Raises LinkError for any other rule."""
    interface, last = understand_rule(TABLE.name, expressions)
    verdict = nl.attributes(nl.attributes(last.data.get(2, b"")).get(2, b""))
    if last.name != "immediate" or verdict.get(1) != u32(_DROP):
        raise foreign(TABLE.name, [last.name])
    return interface


def drop(interfaces: Iterable[str]) -> None:
    """Exactly these interfaces of this network namespace forward nothing from now on. Idempotent.

    Raises LinkError when the kernel refuses or keeps something else.
    """
    wanted = set(interfaces)
    if dropping() == wanted:
        return
    try:
        TABLE.replace([rule(interface) for interface in sorted(wanted)])
    except OSError as refused:
        raise LinkError(f"table {TABLE.name}: the kernel does not drop packets ({refused}); {_REMEDY}") from refused
    if (kept := dropping()) != wanted:
        raise LinkError(f"table {TABLE.name}: asked {sorted(wanted)}, the kernel kept {sorted(kept)}; {_REMEDY}")


def dropping() -> set[str]:
    """The interfaces that forward nothing, as the kernel has it."""
    return {understand(expressions) for expressions in TABLE.rules()}
