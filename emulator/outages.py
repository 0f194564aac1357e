"""What a TCP connection does in an outage of the link: it works again soon after, or it breaks and is made anew.

TCP doubles the time between its tries, so that after 20 s of silence the next one can be 26 s away. Where the namespace
bounds that time (Linux 6.15 and later, set by `netem.topology`), connections live through an outage and go on within
the bound. Elsewhere a connection whose peer acknowledges nothing for STALLED_S breaks, and whoever made it dials again.
Either way an end whose other end has gone unnoticed asks after it, so that half a connection does not stay.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Final

from emulator.frames import TCP_INFO_BYTES, parse_tcp_info

STALLED_S: Final = 2.0  # wall seconds; or three round trips, if they take longer
SOON_S: Final = 1.5  # wall seconds: a bound of TCP's tries with which a connection need not be given up
RTO_MAX_MS: Path = Path("/proc/sys/net/ipv4/tcp_rto_max_ms")  # of the reader's own network namespace
_ROUND_TRIPS: Final = 3
_RETRANSMITS_AT: Final = 2  # in TCP_INFO: tries in a row that were not answered
_IDLE_S, _ASK_S, _ASK_TIMES = 5, 2, 127  # keepalive: when first, how often, and how often in vain


def bounded() -> bool:
    """Whether TCP itself tries again soon after an outage, in this process's network namespace."""
    try:
        return int(RTO_MAX_MS.read_text()) <= SOON_S * 1e3
    except (OSError, ValueError):
        return False


def connect_s() -> float:
    """Wall seconds an attempt to connect may take: without a bound the kernel's own retries soon lie far apart."""
    return 5.0 if bounded() else STALLED_S


def prepare(sock: Any) -> None:
    """Make a connected TCP socket (or asyncio's stand-in for one) outlast an outage, or notice it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)
    if not bounded():
        info = parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
        stalled_s = max(STALLED_S, _ROUND_TRIPS * info.rtt_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stalled_s * 1e3))


def stalled(sock: Any) -> bool:
    """Whether what was sent last had to be sent again and is still not acknowledged: what is sent now comes late."""
    info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return info[_RETRANSMITS_AT] > 0
