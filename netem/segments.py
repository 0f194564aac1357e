"""Whether the WAN's links carry super-packets (GSO, up to 64 kB as one), or each packet by itself, as netem needs it.

netem counts packets and loses them one by one; of a super-packet it would take 40 others along. A site's interface that
may hand over one segment at a time cuts what TCP gives it, live connections too. The topology sets that, inside the
sites; the agent, which stands in the WAN, looks at it when netem is to lose. Delayed alone, a super-packet is no harm.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroute2 import IPRoute

from netem.link import LinkError

SINGLE = 1


def send_single(ip: IPRoute, index: int) -> None:
    """Cut whatever leaves by this interface into single packets. Raises LinkError when the kernel keeps otherwise."""
    ip.link("set", index=index, gso_max_segs=SINGLE)
    kept = next(iter(ip.get_links(index))).get_attr("IFLA_GSO_MAX_SEGS")
    if kept != SINGLE:
        raise LinkError(f"interface {index}: asked to hand over {SINGLE} segment at a time, the kernel kept {kept}")


def are_single(interfaces: Iterable[str]) -> bool:
    """Whether whatever reaches these interfaces of the WAN from their sites comes in single packets. Raises LinkError
    where there is no such interface."""
    with IPRoute() as ip:
        for name in interfaces:
            if not (found := ip.link_lookup(ifname=name)):
                raise LinkError(f"interface {name}: not in this network namespace; run the agent in the WAN's")
            link = next(iter(ip.get_links(found[0])))
            peer = {"index": link.get_attr("IFLA_LINK"), "if_netnsid": link.get_attr("IFLA_LINK_NETNSID")}
            segments = next(iter(ip.link("get", **peer))).get_attr("IFLA_GSO_MAX_SEGS")
            if segments != SINGLE:
                return False
    return True
