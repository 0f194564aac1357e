"""A direction that loses everything: what is about to leave by its interface is dropped, KV and control alike, before
the delay line."""

from __future__ import annotations

from collections.abc import Iterable

from netem.forwarding import TABLE, Drop, kept, replace
from netem.link import LinkError

_REMEDY = "as root on the host: modprobe nf_tables; or ask for another outage"


def drop(interfaces: Iterable[str]) -> None:
    """Exactly these interfaces of this network namespace forward nothing from now on. Idempotent.

    Raises LinkError when the kernel refuses or keeps something else.
    """
    try:
        replace(Drop, [Drop(interface) for interface in interfaces])
    except OSError as refused:
        raise LinkError(f"table {TABLE.name}: the kernel does not drop packets ({refused}); {_REMEDY}") from refused


def dropping() -> set[str]:
    """The interfaces that forward nothing, as the kernel has it."""
    return {rule.interface for rule in kept() if isinstance(rule, Drop)}
