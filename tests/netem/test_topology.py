"""What of the topology needs no namespace: how a process is started in a site."""

from __future__ import annotations

import pytest

from netem.link import LinkError
from netem.topology import ADDRESSES, SITES, WAN_ADDRESSES, Topology, TopologySettings

TOPOLOGY = Topology({"prfaas": 11, "wan": 12, "pd": 13}, TopologySettings(), "cubic")


def test_a_command_enters_its_site_by_the_inherited_descriptor() -> None:
    assert TOPOLOGY.command("pd", ["ip", "link"]) == ["nsenter", "--net=/proc/self/fd/13", "--", "ip", "link"]
    assert TOPOLOGY.pass_fds("pd") == (13,)


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(LinkError, match="'paris'; use one of prfaas, wan, pd"):
        TOPOLOGY.command("paris", ["true"])


def test_every_site_but_the_wan_has_an_address_and_a_gateway() -> None:
    assert set(ADDRESSES) == set(WAN_ADDRESSES) == set(SITES) - {"wan"}
