"""How the host's listening socket gets to who will serve it: as a message over a socket, so that no process in between
holds a copy of it.
"""

from __future__ import annotations

import errno
import os
import socket

from testbed.launch import processes
from testbed.launch.state import TestbedError

BACKLOG = 4096


def open_port(port: int) -> socket.socket:
    """The listening socket of 127.0.0.1:`port` on this host. Raises `TestbedError` where it cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = processes.port_holder(port) or "another program"
            raise TestbedError(f"port {port} of 127.0.0.1 is in use by {holder}; choose another with --port") from None
        raise TestbedError(
            f"port {port} of 127.0.0.1 cannot be opened ({error.strerror}); choose another with --port"
        ) from None


def send_listener(through: socket.socket, listener: socket.socket) -> None:
    """Send the listening socket; ours stays open until it is closed."""
    socket.send_fds(through, [b"listener"], [listener.fileno()])


def receive_listener(descriptor: int | None) -> socket.socket | None:
    """The host's listening socket from the socket that was inherited as `descriptor`; None where there is none."""
    if descriptor is None:
        return None
    with socket.socket(fileno=descriptor) as handover:
        return take_listener(handover)


def take_listener(handover: socket.socket) -> socket.socket:
    """The listening socket that was sent through `handover`. Raises TestbedError where none comes."""
    _, descriptors, _, _ = socket.recv_fds(handover, 16, 1)
    if not descriptors:
        raise TestbedError("the launcher's listening socket did not arrive; start again with `prfaas up`")
    os.set_inheritable(descriptors[0], False)
    return socket.socket(fileno=descriptors[0])
