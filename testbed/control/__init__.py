"""Control, as a pure machine: what happens to a request between its arrival and its last token, and who is told.

Read `life.Control` first (a request's life; `handle(now_s, event)` returns commands), then `nodes.Nodes` (the fleet as
it is known: who serves, who fell silent, what lands, who changes its role) and `events` (what control is told and
answers). `gateway.py` carries its events and commands on the wire, virtual time in a heap; neither decides.
"""

from testbed.control.events import (
    CLIENT,
    Arrive,
    Change,
    ClientGone,
    Command,
    Completed,
    Disturbed,
    Event,
    Failed,
    NodeLost,
    NodeSpec,
    NodeUp,
    PolicySet,
    Record,
    Rules,
    Tick,
)
from testbed.control.life import Control, PolicyCall, TickCall, call_policy, tick_policy
from testbed.control.nodes import SILENT

__all__ = [
    "CLIENT",
    "SILENT",
    "Arrive",
    "Change",
    "ClientGone",
    "Command",
    "Completed",
    "Control",
    "Disturbed",
    "Event",
    "Failed",
    "NodeLost",
    "NodeSpec",
    "NodeUp",
    "PolicyCall",
    "PolicySet",
    "Record",
    "Rules",
    "Tick",
    "TickCall",
    "call_policy",
    "tick_policy",
]
