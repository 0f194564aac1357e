"""What a worker's log says of the messages that pass through it: a request's milestones, and at debug all but tokens.

A milestone has the times and sizes that the node itself stamped, in model units.
"""

from __future__ import annotations

from typing import Final

from emulator.log import Log
from emulator.messages import Admitted, AnyMessage, AttemptFailed, CacheChanged, Finished, Prefilled, Telemetry, Tokens

log = Log("worker")

MILESTONES: Final = {
    Prefilled: ("prefilled", ("start_s", "end_s", "kv_bytes", "cached_tokens")),
    Admitted: ("admitted", ("landed_s", "admitted_s")),
    Finished: ("finished", ("finished_s", "tokens")),
}
UNTOLD: Final = frozenset({Tokens, Telemetry, CacheChanged})
"""Many, or no request's."""


def emitted(destination: str, message: AnyMessage) -> None:
    """This node's machine says something to somebody."""
    kind = type(message)
    if kind in UNTOLD:
        return
    milestone = MILESTONES.get(kind)
    if milestone is not None:
        event, fields = milestone
        log.info(event, **_whose(message), **{name: getattr(message, name) for name in fields})
    elif isinstance(message, AttemptFailed):
        log.warning("attempt failed", **_whose(message), reason=message.reason)
    else:
        log.debug(kind.__name__, to=destination, **_whose(message))


def received(peer: str, message: AnyMessage) -> None:
    """Somebody says something to this node."""
    log.debug(type(message).__name__, by=peer, **_whose(message))


def _whose(message: AnyMessage) -> dict[str, object]:
    return {name: getattr(message, name, None) for name in ("request_id", "attempt")}
