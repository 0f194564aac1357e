"""A WAN that begins without forwarding, as in a container: nothing passes until the way is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from netem.link import LinkError
from netem.plugged import open_way
from testbed.launch import namespaces

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

INSIDE = """
import pathlib, socket
from netem.plugged import open_way
from netem.topology import ADDRESSES, WAN_INTERFACES, build

topology = build()
forward = pathlib.Path("/proc/sys/net/ipv4/ip_forward")
topology.call("wan", forward.write_text, "0")
listener = topology.call("pd", socket.create_server, (ADDRESSES["pd"], 7300))

def passes():
    def connect():
        with socket.socket() as one:
            one.settimeout(0.3)
            return one.connect_ex((ADDRESSES["pd"], 7300))
    return topology.call("prfaas", connect) == 0

print(passes())
topology.call("wan", open_way, WAN_INTERFACES.values())
print(passes(), topology.call("wan", forward.read_text).strip())
"""


def test_the_way_is_opened_by_netlink_alone() -> None:
    argv = [*namespaces.unshare_argv(), sys.executable, "-c", INSIDE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.stdout.split("\n")[:2] == ["False", "True 0"], done.stderr


def test_a_way_that_is_not_there_is_told() -> None:
    with pytest.raises(LinkError, match="interface w-none: not in this network namespace"):
        open_way(["w-none"])
