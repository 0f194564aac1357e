"""What this kernel and account can do of a link, and by which mechanism: really tried, in a throw-away namespace.

`probe(prefix)` runs `python -m netem.capabilities` behind a prefix that gives it its own namespaces, and `judge` says
what follows. Which mechanism then has delay, jitter and loss is `netem.backend`'s choice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyroute2 import IPRoute

from netem.attempts import try_netem, try_nfqueue, why_not
from netem.backend import Backend, choose
from netem.delay import prioritise
from netem.link import LinkError
from netem.topology import bound_tries

_PATIENCE_S = 30.0
_INTERFACE, _PEER = "prfcap0", "prfcap1"
_ANY_TCP = {"prio": 1, "protocol": 0x0800, "keys": ["0x06/0xff+9"]}


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

    rate = of("veth") or of("htb") or of("u32")
    backend = choose(tried) if not rate else Backend(None, False, rate, "veth sch_htb cls_u32")
    by = {"netem": "netem", "nfqueue": "delay line (NFQUEUE)", None: None}[backend.delay]
    how = {"netem": "a queue of each htb class", "nfqueue": "packets wait in the kernel, by its own clock"}
    load = f"as root on the host: {backend.missing}"
    found = [
        Capability("rate", None, f"htb on veth, u32: {rate}", "as root on the host: modprobe veth sch_htb cls_u32")
        if rate
        else Capability("rate", "htb", "an htb class on each egress interface of the WAN; caps a flow by u32"),
        Capability("delay, loss", None, backend.why, load)
        if backend.delay is None
        else Capability("delay, loss", by, f"{backend.why}; {how[backend.delay]}"),
        Capability("jitter, stall", "delay line (NFQUEUE)", "packets wait in order; netem's jitter reorders")
        if backend.line
        else Capability("jitter, stall", None, f"NFQUEUE: {rate or of('nfqueue')}", load),
    ]
    late = " and ".join(why for why in (of("realtime"), of("locked")) if why)
    punctual = "as root (not in a user namespace), or with an rtprio and a memlock limit: see limits.conf(5)"
    found.append(
        Capability("punctuality", "normal priority", f"{late}; packets leave later on a busy machine", punctual)
        if late
        else Capability("punctuality", "real-time priority", "SCHED_FIFO, memory locked")
    )
    found.append(
        Capability(
            "after an outage",
            "stalled connections are made anew",
            f"TCP's tries cannot be bounded ({of('rto_max')}): a connection that stalls for 2 s breaks",
            "Linux 6.15 or later: connections then live through an outage",
        )
        if of("rto_max")
        else Capability("after an outage", "TCP tries again within 1 s", "tcp_rto_max_ms in the sites")
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
            "u32": lambda: ip.tc("add-filter", "u32", index(_INTERFACE), parent=0x10000, target=0x10010, **_ANY_TCP),
        }
        found = {name: why_not(step) for name, step in steps.items()}
    found |= {"netem": try_netem(), "nfqueue": try_nfqueue()}
    found["rto_max"] = _try_rto_max()
    allowed = prioritise()
    found |= {name: "" if allowed[name] else "refused" for name in ("realtime", "locked")}
    for refused_ in allowed["refused"]:
        found["realtime" if refused_.startswith("SCHED_FIFO") else "locked"] = refused_
    return found


def _try_rto_max() -> str:
    try:
        bound_tries(1.0)
    except FileNotFoundError:
        return "this kernel has no tcp_rto_max_ms"
    except LinkError as refused:
        return str(refused)
    return ""


if __name__ == "__main__":
    print(json.dumps(_try_all()))
