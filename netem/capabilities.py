"""What this kernel and account can do of a link, and by which mechanism: really tried, in a throw-away namespace.

`probe(prefix)` runs `python -m netem.capabilities` behind a prefix that gives it its own namespaces, and `judge` says
what follows. Delay, jitter and loss are the delay line's (NFQUEUE) on every kernel; sch_netem is looked for and
reported, and used by nothing yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.delay import prioritise
from netem.divert import divert
from netem.link import LinkError
from netem.nfqueue import Queue

_PATIENCE_S = 30.0
_INTERFACE, _PEER = "prfcap0", "prfcap1"


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing a link may be asked for. `backend`: what does it, None where nothing can, and then there is a remedy.

    `remedy` beside a backend says how it would do better.
    """

    name: str
    backend: str | None
    why: str
    remedy: str = ""


def judge(tried: Mapping[str, str]) -> list[Capability]:
    """What follows from the features tried: feature -> "" if it works, or why it does not."""

    def of(feature: str) -> str:
        return tried.get(feature, "could not be tried")

    rate = of("veth") or of("htb")
    line = rate or of("nfqueue")
    found = [
        Capability("rate", None, f"htb on veth: {rate}", "as root on the host: modprobe veth sch_htb")
        if rate
        else Capability("rate", "htb", "an htb class on each egress interface of the WAN"),
        Capability(
            "delay, jitter, loss",
            None,
            f"NFQUEUE: {line}",
            "as root on the host: modprobe nfnetlink_queue nft_queue (or nft_compat and xt_NFQUEUE)",
        )
        if line
        else Capability("delay, jitter, loss", "delay line (NFQUEUE)", "packets wait in the kernel, by its own clock"),
    ]
    late = " and ".join(why for why in (of("realtime"), of("locked")) if why)
    punctual = "as root (not in a user namespace), or with an rtprio and a memlock limit: see limits.conf(5)"
    found.append(
        Capability("punctuality", "normal priority", f"{late}; packets leave later on a busy machine", punctual)
        if late
        else Capability("punctuality", "real-time priority", "SCHED_FIFO, memory locked")
    )
    absent = of("netem")
    found.append(
        Capability("sch_netem", None, f"{absent}; not needed: the delay line does its work")
        if absent
        else Capability("sch_netem", "there, unused", "the delay line does its work, and never reorders")
    )
    return found


def probe(prefix: Sequence[str]) -> list[Capability]:
    """Try everything behind `prefix` (such as unshare's command), and judge. Raises LinkError if that does not run."""
    command = [*prefix, sys.executable, "-m", "netem.capabilities"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
        tried: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise LinkError(f"the kernel could not be probed: {failed}; see 'prfaas doctor'") from failed
    except ValueError:
        raise LinkError(f"the kernel could not be probed: {done.stderr.strip()}; see 'prfaas doctor'") from None
    return judge(tried)


def _try_all() -> dict[str, str]:
    """In a network namespace of its own: feature -> "" or why not."""
    with IPRoute() as ip:

        def index(name: str) -> int:
            return int((ip.link_lookup(ifname=name) or [1])[0])

        steps: dict[str, Callable[[], object]] = {
            "veth": lambda: ip.link("add", ifname=_INTERFACE, kind="veth", peer={"ifname": _PEER}),
            "htb": lambda: ip.tc("add", "htb", index(_INTERFACE), "1:", default=0x10),
            "netem": lambda: ip.tc("add", "netem", index(_PEER), "1:", delay=1000),
            "nfqueue": lambda: (divert({_INTERFACE: 1}), Queue(1, lambda *_: True)),
        }
        tried = {}
        for name, step in steps.items():
            try:
                step()
                tried[name] = ""
            except NetlinkError as refused:
                tried[name] = f"this kernel refuses it ({os.strerror(abs(refused.code))})"
            except (LinkError, OSError) as refused:
                tried[name] = str(refused)
    allowed = prioritise()
    tried |= {name: "" if allowed[name] else "refused" for name in ("realtime", "locked")}
    for refused_ in allowed["refused"]:
        tried["realtime" if refused_.startswith("SCHED_FIFO") else "locked"] = refused_
    return tried


if __name__ == "__main__":
    print(json.dumps(_try_all()))
