"""What a kernel does, really tried: each attempt says "" if it works, or why it does not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.divert import divert
from netem.link import LinkError
from netem.nfqueue import Queue

_LOOPBACK = 1


def why_not(step: Callable[[], Any]) -> str:
    """Nothing ("") if it does, or why the kernel does not do it."""
    try:
        step()
    except NetlinkError as refused:
        if abs(refused.code) == errno.ENOENT:
            return "this kernel has none"
        return f"this kernel refuses it ({os.strerror(abs(refused.code))})"
    except (LinkError, OSError) as refused:
        return str(refused)
    return ""


def try_netem() -> str:
    """Whether this network namespace's loopback takes a netem: "" or why not. It is gone again at once."""

    def both() -> None:
        with IPRoute() as ip:
            ip.tc("add", "netem", _LOOPBACK, "1:", delay=1000)
            ip.tc("del", index=_LOOPBACK, root=True)

    return why_not(both)


def try_nfqueue() -> str:
    """Whether packets can be diverted into a queue, in this network namespace, which keeps the rule: "" or why not."""

    def both() -> None:
        divert({"lo": 1})
        Queue(1, lambda *_: True)

    return why_not(both)
