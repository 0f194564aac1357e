"""Who may connect to a node: whoever knows the testbed's token, and says so in time.

Control and KV connections share one door a node. Until it has said a valid hello a connection is a stranger: it has
HELLO_S to do so, there are never more than MOST_STRANGERS (a newcomer displaces the one that waits longest, so that
they cannot keep a node's peers out), and nothing it sends but the hello is looked at. Refusals are counted by reason.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

from emulator.frames import secret_digest
from emulator.log import Log

HELLO_S: Final = 5.0  # wall seconds
MOST_STRANGERS: Final = 64
REASONS: Final = ("no_hello", "malformed", "wrong_version", "wrong_token", "unknown_node", "crowded")
_TOLD_TIMES: Final = 5  # each reason is logged that often: whoever knocks does not fill the log

log = Log("door")


class Stranger(Protocol):
    """A connection that has not said who it is."""

    def show_out(self, reason: str) -> None:
        """Close it, without an answer."""
        ...


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None:
        """Do not call."""
        ...


class Door:
    """The door of one node, used on the event loop's thread.

    secret: the data plane's token. nodes: the names that may come in; None for any. later(delay_s, call, *args) -> a
    handle with `cancel()`: the running event loop's `call_later` unless given. refused: connections refused, by reason
    (REASONS), over the life of the process.
    """

    def __init__(
        self, secret: str, nodes: Collection[str] | None = None, later: Callable[..., Timer] | None = None
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._digest = secret_digest(secret)
        self._nodes = None if nodes is None else frozenset(nodes)
        self._later = later
        self._waiting: dict[Stranger, Timer] = {}  # in the order they came

    @property
    def strangers(self) -> int:
        """Connections that have not said who they are."""
        return len(self._waiting)

    def knock(self, stranger: Stranger) -> None:
        """A connection was made, and its time runs."""
        if len(self._waiting) >= MOST_STRANGERS:
            self.refuse(next(iter(self._waiting)), "crowded")
        later = self._later or asyncio.get_running_loop().call_later
        self._waiting[stranger] = later(HELLO_S, self.refuse, stranger, "no_hello")

    def admit(self, stranger: Stranger, node: str, digest: bytes) -> bool:
        """Whether this hello lets it in. digest: of the token it knows. One that is not let in is shown out."""
        if not hmac.compare_digest(digest, self._digest):
            self.refuse(stranger, "wrong_token")
        elif self._nodes is not None and node not in self._nodes:
            self.refuse(stranger, "unknown_node")
        else:
            self.forget(stranger)
            return True
        return False

    def refuse(self, stranger: Stranger, reason: str) -> None:
        """Show it out, and count it."""
        self.forget(stranger)
        self.refused[reason] += 1
        if self.refused[reason] <= _TOLD_TIMES:
            log.warning("connection refused", reason=reason)
        stranger.show_out(reason)

    def forget(self, stranger: Stranger) -> None:
        """It is in, or gone."""
        timer = self._waiting.pop(stranger, None)
        if timer is not None:
            timer.cancel()
