"""Sites and a WAN that a container engine made, each site on a bridge of its own with the WAN: made into what
`topology.build` makes of veths, the same names, addresses and neighbours.

    prfaas  up0 10.77.1.1 ── bridge ── 10.77.1.2 w-prfaas   wan   w-pd 10.77.2.2 ── bridge ── 10.77.2.1 up0  pd

`plug_site` and `plug_wan` run inside the containers' namespaces with CAP_NET_ADMIN. The engine makes the WAN's with
forwarding off, and `open_way` turns it on, once the agent has shaped both ways: so a WAN that was killed and started
again is never a link without a shape.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem import nfnetlink as nl
from netem.attempts import try_netem
from netem.link import LinkError
from netem.segments import send_single
from netem.topology import (
    ADDRESSES,
    SITE_INTERFACE,
    SITE_MAC,
    WAN_ADDRESSES,
    WAN_MAC,
    TopologySettings,
    add_route,
    configure,
    kept_rto_max_s,
    verify_site,
    verify_wan,
)

UNPLUGGED = {"prfaas": "10.77.1.254", "pd": "10.77.2.254"}
"""What the engine calls the WAN; as it knows WAN_ADDRESSES for the gateways of the sites, it gives them to nobody."""

_RTM_SETLINK, _IFLA_AF_SPEC, _IFLA_INET_CONF, _FORWARDING = 19, 26, 1, 1


def plug_site(site: str, settings: TopologySettings) -> dict[str, Any]:
    """In a site: its interface, and the route to the other site. Returns what was read back: {"congestion_control",
    "tcp_rto_max_s"}. Raises LinkError. Once for each life of the site's container."""
    wmem, rmem = (Path(f"/proc/sys/net/ipv4/tcp_{way}mem").read_text().split()[2] for way in "wr")
    if {wmem, rmem} != {str(settings.tcp_buffer_max_bytes)}:
        raise LinkError(
            f"{site}: asked for TCP buffers of {settings.tcp_buffer_max_bytes} bytes; the engine made {wmem}, {rmem}"
        )
    with IPRoute() as ip:
        index = _take_over(ip, ADDRESSES[site], SITE_INTERFACE, SITE_MAC[site], settings.mtu)
        if not try_netem() if settings.single_packets is None else settings.single_packets:
            send_single(ip, index)
        configure(ip, SITE_INTERFACE, ADDRESSES[site], WAN_ADDRESSES[site], WAN_MAC[site])
    add_route(settings, site)
    return {"congestion_control": verify_site(settings, site), "tcp_rto_max_s": kept_rto_max_s()}


def plug_wan(settings: TopologySettings) -> None:
    """In the WAN: its two interfaces, between which nothing passes yet. Raises LinkError."""
    with IPRoute() as ip:
        for site, address in UNPLUGGED.items():
            name = f"w-{site}"
            _take_over(ip, address, name, WAN_MAC[site], settings.mtu)
            if _forwards(name):
                raise LinkError(f"interface {name}: forwards already; the WAN is to be made with net.ipv4.ip_forward 0")
            configure(ip, name, WAN_ADDRESSES[site], ADDRESSES[site], SITE_MAC[site])
    verify_wan(settings)


def open_way(interfaces: Iterable[str]) -> None:
    """Forward what comes in by these interfaces of the WAN, by netlink, as /proc/sys is read-only in a container.
    Raises LinkError."""
    for name in interfaces:
        try:
            index = socket.if_nametoindex(name)
        except OSError:
            raise LinkError(f"interface {name}: not in this network namespace; the WAN is to be plugged in") from None
        conf = nl.nested(_IFLA_INET_CONF, nl.attribute(_FORWARDING, struct.pack("=I", 1)))
        spec = nl.nested(_IFLA_AF_SPEC, nl.nested(socket.AF_INET, conf))
        body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, 0, 0) + spec
        header = struct.pack("=IHHII", 16 + len(body), _RTM_SETLINK, nl.REQUEST | nl.ACK, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.bind((0, 0))
            kernel.send(header + body)
            _, _, answer = next(nl.messages(kernel.recv(4096)))
        if code := nl.error_of(answer):
            raise LinkError(f"interface {name}: the kernel does not let it forward ({os.strerror(code)})")
        if not _forwards(name):
            raise LinkError(f"interface {name}: asked to forward, the kernel kept it off; see 'prfaas doctor'")


def _take_over(ip: IPRoute, address: str, name: str, mac: str, mtu: int) -> int:
    """The interface that has `address`, named and numbered anew, down and without any address; its index."""
    found = [one["index"] for one in ip.get_addr(family=socket.AF_INET) if one.get_attr("IFA_LOCAL") == address]
    if len(found) != 1:
        raise LinkError(f"interface {name}: the engine gave {len(found)} of this container's the address {address}")
    index = int(found[0])
    ip.link("set", index=index, state="down")
    ip.link("set", index=index, ifname=name, address=mac, mtu=mtu)
    ip.flush_addr(index=index)
    return index


def _forwards(name: str) -> bool:
    return Path(f"/proc/sys/net/ipv4/conf/{name}/forwarding").read_text().strip() == "1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m netem.plugged", description="Plug a site's container in.")
    parser.add_argument("site", choices=list(ADDRESSES))
    parser.add_argument("settings", type=json.loads, help="the fields of TopologySettings, as JSON")
    arguments = parser.parse_args()
    try:
        print(json.dumps(plug_site(arguments.site, TopologySettings(**arguments.settings))))
    except (LinkError, NetlinkError, OSError, TypeError) as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
