"""The embedded launcher: every process in network namespaces of this host, as root or as an ordinary user, without touching
the host's network. `up` starts one outer `unshare`; its child is the supervisor, pid 1 of the testbed.
"""

from typing import Any

from testbed.launch.spec import LaunchSpec, Up

LAUNCHER = "namespaces"


def up(spec: LaunchSpec) -> Up:
    """Start the testbed, or find the one that is up already from the same specification.

    Raises `TestbedError` where another specification is up, the port is taken, namespaces are not allowed, or a process does
    not become ready (then with the last lines of its log); whatever was started is removed again.
    """
    raise NotImplementedError


def down() -> list[str]:
    """Stop the testbed and remove what is left of one; returns, in words, what was removed (empty: nothing was left)."""
    raise NotImplementedError


def status() -> dict[str, Any]:
    """What is up: `{"up": bool, "stale": bool, ...}` with the record's fields and the supervisor's `/status` answer."""
    raise NotImplementedError
