"""Diverts what an interface is about to forward into a queue (NFQUEUE), by whichever way this kernel has."""

from __future__ import annotations

from collections.abc import Mapping

from netem.forwarding import COMPAT, NATIVE, TABLE, Queue, kept, replace
from netem.link import LinkError

_REMEDY = "as root on the host: modprobe nft_queue (or nft_compat and xt_NFQUEUE); see 'prfaas link capabilities'"


def divert(queues: Mapping[str, int]) -> str:
    """Send what each interface forwards to its queue (interface -> number), in this network namespace; the mechanism.

    Idempotent. Raises LinkError when the kernel refuses or keeps something else.
    """
    there = [rule for rule in kept() if isinstance(rule, Queue)]
    if {rule.interface: rule.number for rule in there} == dict(queues):
        return there[0].mechanism
    refused: OSError | None = None
    for mechanism in (NATIVE, COMPAT):
        try:
            replace(Queue, [Queue(interface, number, mechanism) for interface, number in queues.items()])
            return mechanism
        except OSError as why:
            refused = why
    raise LinkError(f"table {TABLE.name}: the kernel does not divert packets to a queue ({refused}); {_REMEDY}")
