#!/usr/bin/env -S python3 -I -S
"""Whether a container's process serves: `healthy http HOST:PORT` (or the path of a Unix socket) for one that answers
HTTP, whatever it answers; `healthy fresh FILE` for one that touches a file all the time. It imports next to nothing, as
it is started again and again beside what is measured.
"""

import os
import socket
import sys
import time

FRESH_S = 10.0


def answers(where: str) -> bool:
    """Whether something speaks HTTP there."""
    if where.startswith("/"):
        family, address = socket.AF_UNIX, where
    else:
        host, _, port = where.rpartition(":")
        family, address = socket.AF_INET, (host, int(port))
    with socket.socket(family) as connection:
        connection.settimeout(4)
        connection.connect(address)
        connection.sendall(b"GET /healthy HTTP/1.0\r\n\r\n")
        return connection.recv(16).startswith(b"HTTP/1")


def main(what: str, where: str) -> int:
    try:
        healthy = answers(where) if what == "http" else time.time() - os.stat(where).st_mtime < FRESH_S
    except OSError as error:
        print(f"{where}: {error}")
        return 1
    if not healthy:
        print(f"{where}: no answer, or none of late")
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
