"""Numbered connections: the link's shaper tells them apart by their sender's port, to cap each by itself.

Number n (0-247 here) leaves by one of the ports 16384 + n, 16384 + 256 + n, ...: a connection that is made anew takes
another of them, as the one before may still be known to either end. docs/contracts.md has the ports.
"""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Callable
from typing import Final

FIRST_PORT: Final = 16384
NUMBERS: Final = 256
_TURNS: Final = 64
_turns = itertools.count()


def bind(sock: socket.socket, number: int, turn: Callable[[], int] = lambda: next(_turns)) -> None:
    """Have a socket leave by a port of this number. Raises OSError (EADDRINUSE) where all of them are taken."""
    for _ in range(_TURNS):
        try:
            sock.bind(("", FIRST_PORT + NUMBERS * (turn() % _TURNS) + number))
            return
        except OSError as taken:
            if taken.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports of connection number {number} are taken")
