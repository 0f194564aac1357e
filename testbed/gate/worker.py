"""A worker process: it takes jobs from its parent's socket, one after another, until that is closed.

`python -m testbed.gate.worker FD` reads an Environment first, and imports the testbed only then, so that it can be
another revision's scheduler. Its standard output is its parent's standard error: what policies print goes there.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

Answer = tuple[str, Any]
"""("ready", None) once; then of each job ("done", what came of it) or ("refused", why it cannot be run)."""


def serve(connection: Connection) -> None:
    """Run jobs until the parent is gone."""
    connection.recv().enter()
    from testbed.gate.measure import REFUSALS, measure

    connection.send(("ready", None))
    while True:
        job = connection.recv()
        try:
            answer: Answer = ("done", measure(job))
        except REFUSALS as error:
            answer = ("refused", str(error))
        connection.send(answer)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent that is interrupted
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
