"""Sites and the WAN between them: three network namespaces without a name, two veth pairs.

    prfaas  up0 10.77.1.1 ── 10.77.1.2 w-prfaas   wan   w-pd 10.77.2.2 ── 10.77.2.1 up0  pd

Everything is made *inside* new namespaces that only file descriptors hold, so the namespace this runs in is never
touched and the kernel removes all of it when the last process that holds a descriptor is gone, however it went.
Needs CAP_SYS_ADMIN and CAP_NET_ADMIN: root, or root of a user namespace
(`unshare --user --map-root-user --net --mount --pid --fork --kill-child`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.attempts import try_netem
from netem.link import LinkError
from netem.segments import send_single

SITES = ("prfaas", "wan", "pd")
ADDRESSES: Mapping[str, str] = {"prfaas": "10.77.1.1", "pd": "10.77.2.1"}
WAN_ADDRESSES: Mapping[str, str] = {"prfaas": "10.77.1.2", "pd": "10.77.2.2"}
SITE_INTERFACE = "up0"
WAN_INTERFACES: Mapping[str, str] = {"to_pd": "w-pd", "to_prfaas": "w-prfaas"}  # direction -> interface that shapes it

_PREFIX = 24
SITE_MAC: Mapping[str, str] = {"prfaas": "02:77:01:00:00:01", "pd": "02:77:02:00:00:01"}
WAN_MAC: Mapping[str, str] = {"prfaas": "02:77:01:00:00:02", "pd": "02:77:02:00:00:02"}
_CLONE_NEWNET = 0x40000000
_NUD_PERMANENT = 0x80
_IFF_UP = 1
_RTO_MAX_MS = "ipv4/tcp_rto_max_ms"
_TRIES = "255"
_PRIVILEGE_REMEDY = (
    "start as root, or under 'unshare --user --map-root-user --net --mount --pid --fork --kill-child' "
    "(the kernel must allow it: sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)
_DOCTOR = "see 'prfaas doctor' for what this kernel carries"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TopologySettings:
    """What the sites' network stacks look like. Wall units.

    `congestion_control`: every TCP connection between sites uses it; None keeps the kernel's default (which differs
    from host to host, so experiments name one). `tcp_buffer_max_bytes`: upper bound of tcp_wmem and tcp_rmem.
    `slow_start_after_idle`: None leaves the kernel's value. `rto_max_s`: most seconds between two tries of TCP (1 to
    120), so that connections go on soon after an outage, and then give up only after 255 tries; None leaves the
    kernel's 120 s, as does a kernel without the knob (before Linux 6.15). `single_packets`: whether what leaves a site
    is cut into packets of the wire, which costs CPU, and without which netem loses nothing (`segments.py`); None: where
    there is netem.
    """

    congestion_control: str | None = "cubic"
    mtu: int = 1500
    tcp_buffer_max_bytes: int = 64 << 20
    slow_start_after_idle: bool | None = None
    rto_max_s: float | None = 1.0
    single_packets: bool | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """Three live namespaces. `fds` are close-on-exec; `close()` lets go of them (processes inside keep theirs).

    A process is started in a site with

        subprocess.Popen(topology.command("pd", argv), pass_fds=topology.pass_fds("pd"))

    (`asyncio.create_subprocess_exec` takes the same `pass_fds`). nsenter replaces itself by `argv`, so the pid is the
    program's. `congestion_control` is what was read back for connections between sites, `rto_max_s` the kernel's bound
    between two tries (None: this kernel has no such knob, and its bound is 120 s).
    """

    fds: Mapping[str, int]
    settings: TopologySettings
    congestion_control: str
    rto_max_s: float | None = None

    def command(self, site: str, argv: Sequence[str]) -> list[str]:
        """`argv` prefixed so that it runs in `site`. Raises LinkError for an unknown site."""
        return ["nsenter", f"--net=/proc/self/fd/{self._fd(site)}", "--", *argv]

    def pass_fds(self, site: str) -> tuple[int, ...]:
        """The descriptors that `command(site, ...)` needs inherited."""
        return (self._fd(site),)

    def call(self, site: str, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` in a thread inside `site` and return its result, e.g. to open a socket there."""
        return in_namespace(self._fd(site), function, *args)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)

    def _fd(self, site: str) -> int:
        if site not in self.fds:
            raise LinkError(f"site: no site {site!r}; use one of {', '.join(SITES)}")
        return self.fds[site]


def build(settings: TopologySettings | None = None) -> Topology:
    """Create, configure and verify the three namespaces. Raises LinkError with the remedy, leaving nothing behind."""
    settings = settings or TopologySettings()
    fds: dict[str, int] = {}
    try:
        for site in SITES:
            fds[site] = new_namespace()
            in_namespace(fds[site], _prepare, settings, site)
        for site in ADDRESSES:
            in_namespace(fds[site], _connect_site, settings, site, fds["wan"])
            in_namespace(fds["wan"], _connect_wan, site)
            in_namespace(fds[site], add_route, settings, site)
        algorithms = [in_namespace(fds[site], verify_site, settings, site) for site in ADDRESSES]
        in_namespace(fds["wan"], verify_wan, settings)
    except BaseException:
        for fd in fds.values():
            os.close(fd)
        raise
    return Topology(fds, settings, algorithms[0], in_namespace(fds["pd"], kept_rto_max_s))


def described(settings: TopologySettings, congestion_control: str, rto_max_s: float | None) -> dict[str, Any]:
    """The sites and what was read back of them, as a testbed's status and a run's provenance tell it."""
    return {
        "sites": {site: ADDRESSES.get(site) for site in SITES},
        "settings": asdict(settings),
        "congestion_control": congestion_control,
        "tcp_rto_max_s": rto_max_s,
    }


def set_wan_interface(interface: str, up: bool) -> None:
    """In the WAN's namespace: take down an interface of WAN_INTERFACES, or bring it up again with all that `build` gave
    it, and read that back. Idempotent. Raises LinkError."""
    site = next((site for site in ADDRESSES if interface == f"w-{site}"), None)
    if site is None:
        raise LinkError(f"interface {interface}: is none of the WAN's ({', '.join(WAN_INTERFACES.values())})")
    with IPRoute() as ip:
        index = index_of(ip, interface)
        try:
            ip.link("set", index=index, state="up" if up else "down")
            if up:  # its address stays, and the kernel routes to it again; the neighbour went with the interface
                _replace_neighbour(ip, index, ADDRESSES[site], SITE_MAC[site])
        except NetlinkError as refused:
            what = f"interface {interface}: the kernel did not take it {'up' if up else 'down'} ({refused})"
            raise LinkError(f"{what}; {_PRIVILEGE_REMEDY if refused.code == errno.EPERM else _DOCTOR}") from refused
        if is_up(interface) != up:
            raise LinkError(f"interface {interface}: did not get {'up' if up else 'down'}; {_DOCTOR}")
        if up:
            _verify_restored(ip, index, interface, site)


def is_up(interface: str) -> bool:
    """Whether an interface of this network namespace is up, as the kernel has it. Raises LinkError where it is not."""
    with IPRoute() as ip:
        link: Any = next(iter(ip.get_links(index_of(ip, interface))))
        return bool(link["flags"] & _IFF_UP)


def new_namespace() -> int:
    """A descriptor (close-on-exec) of a new, empty network namespace; the caller's own namespace does not change."""

    def unshare() -> int:
        if _libc().unshare(_CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise LinkError(f"cannot create a network namespace ({os.strerror(code)}); {_PRIVILEGE_REMEDY}")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(unshare)


def in_namespace(fd: int, function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in a short-lived thread inside the network namespace `fd`; its exception is raised here."""

    def enter() -> T:
        if _libc().setns(fd, _CLONE_NEWNET) != 0:
            why = os.strerror(ctypes.get_errno())
            raise LinkError(f"cannot enter the network namespace of descriptor {fd} ({why}); {_PRIVILEGE_REMEDY}")
        try:
            return function(*args)
        except NetlinkError as refused:
            remedy = {errno.EOPNOTSUPP: "modprobe veth", errno.EPERM: _PRIVILEGE_REMEDY}.get(refused.code, _DOCTOR)
            what = f"{function.__name__.strip('_')} {args[1:]}"
            raise LinkError(f"network namespace: {what}: the kernel refused ({refused}); {remedy}") from refused

    return _in_thread(enter)


def _in_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(function())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=body, name="netem-namespace")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prepare(settings: TopologySettings, site: str) -> None:
    with IPRoute() as ip:
        ip.link("set", index=index_of(ip, "lo"), state="up")
    for family in ("tcp_wmem", "tcp_rmem"):
        low, default, _ = _read_sysctl(f"ipv4/{family}").split()
        _write_sysctl(f"ipv4/{family}", f"{low} {default} {max(settings.tcp_buffer_max_bytes, int(default))}")
    if settings.rto_max_s is not None and kept_rto_max_s() is not None:
        bound_tries(settings.rto_max_s)
    if settings.slow_start_after_idle is not None:
        _write_sysctl("ipv4/tcp_slow_start_after_idle", str(int(settings.slow_start_after_idle)))
    for scope in ("all", "default"):  # so that nothing but what is sent crosses the link
        if Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").exists():
            _write_sysctl(f"ipv6/conf/{scope}/disable_ipv6", "1")
    if site == "wan":
        _write_sysctl("ipv4/ip_forward", "1")


def bound_tries(rto_max_s: float) -> None:
    """At most this between two tries of TCP in this namespace. Raises LinkError, and FileNotFoundError where the kernel
    has no such knob."""
    _read_sysctl(_RTO_MAX_MS)
    _write_sysctl(_RTO_MAX_MS, str(round(rto_max_s * 1e3)))
    _write_sysctl("ipv4/tcp_retries2", _TRIES)  # the default, 15, would then be 14 s of outage


def kept_rto_max_s() -> float | None:
    """The bound between two tries of TCP in this namespace; None where the kernel has none that can be set."""
    try:
        return int(_read_sysctl(_RTO_MAX_MS)) / 1e3
    except FileNotFoundError:
        return None


def _connect_site(settings: TopologySettings, site: str, wan_fd: int) -> None:
    peer = {"ifname": f"w-{site}", "net_ns_fd": wan_fd, "address": WAN_MAC[site], "mtu": settings.mtu}
    with IPRoute() as ip:
        ip.link("add", ifname=SITE_INTERFACE, kind="veth", address=SITE_MAC[site], mtu=settings.mtu, peer=peer)
        single = settings.single_packets
        if not try_netem() if single is None else single:  # netem takes a super-packet for one packet
            send_single(ip, index_of(ip, SITE_INTERFACE))
        configure(ip, SITE_INTERFACE, ADDRESSES[site], WAN_ADDRESSES[site], WAN_MAC[site])


def _connect_wan(site: str) -> None:
    with IPRoute() as ip:
        configure(ip, f"w-{site}", WAN_ADDRESSES[site], ADDRESSES[site], SITE_MAC[site])


def configure(ip: IPRoute, name: str, address: str, neighbour: str, neighbour_mac: str) -> None:
    index = index_of(ip, name)
    ip.link("set", index=index, state="up")
    ip.addr("add", index=index, address=address, prefixlen=_PREFIX)
    _replace_neighbour(ip, index, neighbour, neighbour_mac)


def _replace_neighbour(ip: IPRoute, index: int, address: str, mac: str) -> None:
    # A permanent neighbour: no ARP waits in the KV's queue, or is lost in an outage.
    ip.neigh("replace", ifindex=index, dst=address, lladdr=mac, state=_NUD_PERMANENT)


def add_route(settings: TopologySettings, site: str) -> None:
    # The algorithm rides on the route: the sysctl refuses "restricted" ones outside the host's first namespace.
    metrics = {"cc_algo": settings.congestion_control}
    with IPRoute() as ip:
        try:
            ip.route("add", dst="default", gateway=WAN_ADDRESSES[site], metrics=metrics)
        except NetlinkError as refused:
            if refused.code == errno.EINVAL and settings.congestion_control is not None:
                raise _no_such_algorithm(settings.congestion_control) from refused
            raise


def _no_such_algorithm(name: str) -> LinkError:
    available = _read_sysctl("ipv4/tcp_available_congestion_control")
    return LinkError(
        f"congestion_control: this kernel does not carry {name!r} (it has: {available}); "
        f"name one of these, or as root on the host: modprobe tcp_{name}"
    )


def index_of(ip: IPRoute, name: str) -> int:
    found = ip.link_lookup(ifname=name)
    if not found:
        raise LinkError(f"interface {name}: not in this network namespace; the topology builds it")
    return int(found[0])


def _read_sysctl(name: str) -> str:
    return " ".join(Path("/proc/sys/net", name).read_text().split())


def _write_sysctl(name: str, value: str) -> None:
    try:
        Path("/proc/sys/net", name).write_text(value)
    except OSError as refused:
        remedy = "mount a fresh procfs in this mount namespace (mount -t proc proc /proc)"
        raise LinkError(f"sysctl net/{name}: cannot set {value!r} ({refused.strerror}); {remedy}") from refused
    kept = _read_sysctl(name)
    if kept != value:
        raise LinkError(f"sysctl net/{name}: asked {value!r}, the kernel kept {kept!r}; ask for a value it accepts")


def verify_site(settings: TopologySettings, site: str) -> str:
    gateway = WAN_ADDRESSES[site]
    with IPRoute() as ip:
        _verify_interface(ip, SITE_INTERFACE, ADDRESSES[site], settings.mtu)
        defaults = [r for r in ip.get_routes(family=2) if r["dst_len"] == 0 and r.get_attr("RTA_GATEWAY") == gateway]
    if not defaults:
        raise LinkError(f"{site}: no default route over {gateway} was kept; does something else change the namespace?")
    if settings.congestion_control is None:
        return _read_sysctl("ipv4/tcp_congestion_control")
    metrics = defaults[0].get_attr("RTA_METRICS")
    algorithm = metrics.get_attr("RTAX_CC_ALGO") if metrics is not None else None
    if algorithm != settings.congestion_control:
        raise _no_such_algorithm(settings.congestion_control)
    return str(algorithm)


def verify_wan(settings: TopologySettings) -> None:
    with IPRoute() as ip:
        for site, address in WAN_ADDRESSES.items():
            _verify_interface(ip, f"w-{site}", address, settings.mtu)


def _verify_restored(ip: IPRoute, index: int, interface: str, site: str) -> None:
    """What a down interface has lost, and the address that it had."""
    addresses = {a.get_attr("IFA_LOCAL") for a in ip.get_addr(index=index)}
    routes = {r.get_attr("RTA_DST") for r in ip.get_routes(family=2, oif=index) if r["dst_len"] == _PREFIX}
    neighbours = {
        n.get_attr("NDA_DST"): n.get_attr("NDA_LLADDR")
        for n in ip.get_neighbours(ifindex=index)
        if n["state"] & _NUD_PERMANENT
    }
    network = ADDRESSES[site].rpartition(".")[0] + ".0"
    kept = (WAN_ADDRESSES[site] in addresses, network in routes, neighbours.get(ADDRESSES[site]) == SITE_MAC[site])
    if not all(kept):
        what = f"addresses {sorted(map(str, addresses))}, routes {sorted(map(str, routes))}, neighbours {neighbours}"
        raise LinkError(f"interface {interface}: up again, but the kernel kept {what}; start anew: prfaas down")


def _verify_interface(ip: IPRoute, name: str, address: str, mtu: int) -> None:
    link: Any = next(iter(ip.get_links(index_of(ip, name))))
    seen = {a.get_attr("IFA_LOCAL") for a in ip.get_addr(index=link["index"])}
    if address not in seen or not link["flags"] & 1 or link.get_attr("IFLA_MTU") != mtu:
        kept = f"addresses {sorted(map(str, seen))}, up {bool(link['flags'] & 1)}, MTU {link.get_attr('IFLA_MTU')}"
        raise LinkError(f"interface {name}: asked {address}, up, MTU {mtu}; the kernel kept {kept}")
