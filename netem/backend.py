"""Who delays a link's packets and loses some: netem under its htb classes where the kernel has it, else the delay line.

Jitter and stalls are the delay line's (`keeper.py`) on every kernel: netem draws each packet's delay by itself, so that
jitter reorders, or, kept in order, makes every delay the longest. From the first jitter on the line has all the delay
and loss, as a packet that changed over would be late or early. Where there is no line, they are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from netem.attempts import try_netem, try_nfqueue
from netem.forwarding import Queue
from netem.forwarding import replace as replace_rules
from netem.link import Impairment, LinkState, impairment, refuse
from netem.topology import in_namespace, new_namespace

Asked = Literal["auto", "netem", "nfqueue"]
NETEM_REMEDY = "modprobe sch_netem"
LINE_REMEDY = "modprobe nfnetlink_queue nft_queue (or nft_compat and xt_NFQUEUE)"


@dataclass(frozen=True, slots=True)
class Backend:
    """`delay`: what delays and loses, None where nothing can. `line`: whether the delay line is there, for jitter and
    stalls. `missing`: what would have to be loaded for more; "" where nothing is missing."""

    delay: Literal["netem", "nfqueue"] | None
    line: bool
    why: str
    missing: str = ""


def choose(tried: Mapping[str, str], asked: Asked = "auto") -> Backend:
    """What follows from "netem" and "nfqueue" tried: "" if it works, or why not. Raises LinkError where `asked` (other
    than "auto") is not to be had."""
    if asked not in get_args(Asked):
        refuse("delay_by", asked, "is no way to delay", f"use {', '.join(get_args(Asked))}")
    netem, line = (tried.get(name, "could not be tried") for name in ("netem", "nfqueue"))
    if asked == "netem" and netem:
        refuse("delay_by", asked, f"cannot be had (sch_netem: {netem})", f"as root on the host: {NETEM_REMEDY}")
    if asked == "nfqueue" and line:
        refuse("delay_by", asked, f"cannot be had (NFQUEUE: {line})", f"as root on the host: {LINE_REMEDY}")
    if not netem and asked != "nfqueue":
        why = "sch_netem is there" + (", and asked for" if asked == "netem" else "")
        return Backend("netem", not line, why, "" if not line else LINE_REMEDY)
    if not line:
        return Backend("nfqueue", True, "asked for" if asked == "nfqueue" else f"sch_netem: {netem}")
    return Backend(None, False, f"sch_netem: {netem}; NFQUEUE: {line}", f"{NETEM_REMEDY}, or {LINE_REMEDY}")


def tried() -> dict[str, str]:
    """ "netem" and "nfqueue", really tried in a network namespace that is thrown away: "" if it works, or why not."""
    fd = new_namespace()
    try:
        return in_namespace(fd, lambda: {"netem": try_netem(), "nfqueue": try_nfqueue()})
    finally:
        os.close(fd)


def tried_here() -> dict[str, str]:
    """The same in this network namespace, which forwards nothing yet, for who may not make one to throw away."""
    found = {"netem": try_netem(), "nfqueue": try_nfqueue()}
    if not found["nfqueue"]:
        replace_rules(Queue, [])
    return found


class Delays:
    """Which of the two delays, state by state. `line_has_all`: the delay line has all delay and loss from now on.

    `single`: packets come one by one (`segments.py`); of a super-packet netem would lose all: then loss is refused.
    """

    def __init__(self, backend: Backend, single: bool = True) -> None:
        self.backend, self.single = backend, single
        self.line_has_all = backend.delay != "netem"

    def check(self, states: Mapping[str, LinkState]) -> bool:
        """Whether the line has all delay and loss in these states. Raises LinkError for what nothing here can do."""
        for direction, state in states.items():
            asked: dict[str, object] = {}
            if self.backend.delay is None:
                asked |= {"delay_s": state.delay_s, "loss": state.loss}
            if not self.backend.line:
                asked |= {"jitter_s": state.jitter_s, "outage": state.outage if state.outage == "stall" else None}
            for field, value in asked.items():
                if value:
                    remedy = f"as root on the host: {self.backend.missing}; see 'prfaas link capabilities'"
                    refuse(f"{direction}.{field}", value, f"cannot be had on this kernel ({self.backend.why})", remedy)
        line_has_all = self.line_has_all or any(state.jitter_s for state in states.values())
        for direction, state in states.items():
            if state.loss and not (self.single or line_has_all):
                what = "cannot be had: netem would lose each super-packet whole, and the sites send such"
                remedy = "build the topology with single_packets, or take delay_by: nfqueue"
                refuse(f"{direction}.loss", state.loss, what, remedy)
        return line_has_all

    def of_line(self, state: LinkState, line_has_all: bool) -> Impairment:
        """What the delay line has to do of a state."""
        asked = impairment(state)
        return asked if line_has_all else replace(asked, delay_s=0.0, jitter_s=0.0, loss=0.0)

    def describe(self) -> dict[str, Any]:
        """{"delay": "netem", "nfqueue" or None now, "jitter": "nfqueue" or None, "why", "missing"}."""
        backend = self.backend
        delay = "nfqueue" if self.line_has_all and backend.line else backend.delay
        return {
            "delay": delay,
            "jitter": "nfqueue" if backend.line else None,
            "why": backend.why,
            "missing": backend.missing,
        }
