"""The fleet as control knows it: who serves, who was heard of when, what lands, who holds what, who changes its role.

It knows nothing of requests: `life.Control` says when one is tried again because of a node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from emulator.messages import CacheChanged, Telemetry
from testbed.control.events import Change, NodeLost, NodeUp, Rules
from testbed.directory import Directory
from testbed.scheduler.api import PD, PRFAAS, NodeView, Role, SetRole, SystemView

SILENT: Final = 3.5
"""Accounts that may be missing before a node counts as silent."""

REFUSALS: Final = 100
"""Actions of a policy's that could not be done: the most that are written down; all are counted."""


class Conversion:
    """A node that is to change its role. sent: it has drained and been told."""

    def __init__(self, node: str, role: Role) -> None:
        self.node = node
        self.role: Role = role
        self.sent = False


class Nodes:
    """Every instance of one load. view: what the policy sees, kept by this. changes: what changed, in order.

    serving: the role of each node that takes requests. directory: who holds which cached prefix, None without caches.
    conversion: the node that is changing its role, if there is one.
    """

    def __init__(self, view: SystemView, rules: Rules) -> None:
        self.view = view
        self.rules = rules
        self.serving: dict[str, Role] = {}
        self.directory = Directory(rules.block_tokens) if rules.block_tokens else None
        self.conversion: Conversion | None = None
        self.changes: list[Change] = []
        self._refused: set[tuple[str, str]] = set()
        if self.directory is not None:
            view.holders = self.directory.holders
        self._nodes: Mapping[str, NodeView] = view.nodes
        self._landed: dict[str, tuple[float, int]] = {}  # a live node's last report: when, bytes from the prfaas site
        self._landing_bps: dict[str, float] = {}
        self._accounted_s = self._silent_due_s = -math.inf
        self._accountants: tuple[str, ...] = ()  # the nodes whose accounts the last sum was of

    def note(self, kind: str, node: str, before: float | str, after: float | str, trigger: str) -> None:
        """Write down a change."""
        self.changes.append(Change(self.view.now_s, kind, node, before, after, trigger))

    def refused(self, action: object, error: Exception) -> None:
        """Write down an action of the policy's that could not be done; again and again the same one, once, and no more
        than REFUSALS of them."""
        asked, why = type(action).__name__, f"{type(error).__name__}: {error}"
        if len(self._refused) < REFUSALS and (asked, why) not in self._refused:
            self._refused.add((asked, why))
            self.note("policy_error", "", asked, "left out", why)

    def up(self, now_s: float, event: NodeUp) -> None:
        """A node that was out of service serves."""
        node = self._nodes[event.node]
        joins = self.conversion is not None and self.conversion.node == event.node
        if joins:
            self.conversion = None
            self.note("joined", event.node, node.role, event.role, "it has reloaded")
        elif now_s > 0:
            self.note("node", event.node, "lost", "up", f"it serves {event.role}")
        node.role = event.role
        node.alive = True
        node.draining = node.silent = False
        node.told_s = now_s
        node.outbox_bytes = node.landing_bytes = node.unsent_bytes = node.retransmits = node.waiting_grants = 0
        node.rtt_s = 0.0
        counted = self._landed[event.node][1] if joins else 0  # its epoch goes on, and its counters
        self._landed[event.node] = (now_s, counted)
        self._accountants = ()
        self._changed()

    def lost(self, event: NodeLost) -> bool:
        """A node is gone; whether it was in service."""
        node = self._nodes[event.node]
        reloading = False
        if self.conversion is not None and self.conversion.node == event.node:
            reloading = self.conversion.sent
            self.conversion, node.draining = None, False
        if self.directory is not None:
            self.directory.forget(event.node)
        if reloading:
            self.note("node", event.node, "reloading", "lost", event.reason)
        if not node.alive:
            return False
        self._out_of_service(node)
        self.note("node", event.node, "up", "lost", event.reason)
        return True

    def cache_changed(self, event: CacheChanged) -> None:
        """A node's own word on what its cache holds."""
        if self.directory is not None and self._nodes[event.node].alive:
            self.directory.changed(event.node, event.added, event.removed)

    def told(self, now_s: float, event: Telemetry) -> None:
        """A node's account of itself."""
        node = self._nodes[event.node]
        if not node.alive or event.t_s < node.told_s:  # a later account, or its coming up, is known already
            return
        node.told_s = event.t_s
        node.outbox_bytes, node.landing_bytes = event.outbox_bytes, event.landing_bytes
        node.waiting_grants = event.waiting_grants
        node.unsent_bytes = sum([path.unsent_bytes for path in event.paths])
        node.retransmits = sum([path.retransmits for path in event.paths])
        node.rtt_s = max([path.rtt_s for path in event.paths], default=0.0)
        if node.silent and event.t_s >= self._oldest_s(now_s):
            node.silent = False
            self._changed()
            self.note("node", node.name, "silent", "up", "it was heard of again")
        self._count_egress(event)

    def find_silent(self, now_s: float) -> list[tuple[NodeView, str]]:
        """Nodes that have not been heard of, and for how long: a silent node is not an idle one."""
        if now_s < self._silent_due_s:
            return []
        self._silent_due_s = now_s + self.rules.telemetry_s / 2
        oldest_s = self._oldest_s(now_s)
        found = []
        for node in self._nodes.values():
            if node.alive and not node.silent and node.told_s < oldest_s:
                node.silent = True
                self._landing_bps.pop(node.name, None)
                why = f"nothing was heard of it for {now_s - node.told_s:.3g} s"
                self.note("node", node.name, "up", "silent", why)
                found.append((node, why))
        if found:
            self._changed()
        return found

    def observe(self, now_s: float) -> None:
        """Sum up for the estimators, once every node where KV from the remote site may land has given a new account:
        the decode nodes and, with caches, the local prefill nodes, which fetch prefixes."""
        observed = self.view.observed
        heard = [n for n in self._nodes.values() if n.site == PD and n.alive and not n.silent]
        decoders = [node for node in heard if node.role == "decode"]
        receivers = decoders if self.directory is None else heard
        told = [node.told_s for node in receivers]
        if not decoders or min(told) <= self._accounted_s:
            return
        fresh_s = self._accounted_s - self.rules.telemetry_s / 2  # later than the sums before, but for their phases
        self._accounted_s = max(told)
        unsent = retransmits = 0
        rtt_s = 0.0
        for node in self._nodes.values():
            if node.site == PRFAAS and node.alive:
                retransmits += node.retransmits
                if node.told_s > fresh_s:  # what a sender said long ago waits no longer, or nobody knows
                    unsent += node.unsent_bytes
                    rtt_s = max(rtt_s, node.rtt_s)
        accountants = tuple([node.name for node in receivers])
        account = observed.link.account if accountants == self._accountants else observed.link.rebase
        self._accountants = accountants
        account(sum(told) / len(told), self.view.egress_bytes, unsent)
        observed.path(now_s, rtt_s, retransmits)
        for site, series in observed.queue_s.items():
            nodes = self.view.prefill(site)  # type: ignore[arg-type]
            if nodes:
                series.add(now_s, sum([node.queued_s for node in nodes]) / len(nodes))
        load = sum([node.assigned_requests for node in decoders]) / sum([node.slots for node in decoders])
        observed.decode_load.add(now_s, load)

    def change_role(self, action: SetRole) -> None:
        """Take a node out of service for its new role. Raises ValueError for one that cannot have it, or not now."""
        node = self._nodes.get(action.node)
        able = node is not None and (action.role != "decode" or node.slots > 0)
        if node is None or not able or node.site == PRFAAS or {node.role, action.role} != {"prefill", "decode"}:
            raise ValueError(f"{action.node} cannot become a {action.role} node")
        if not node.alive or node.draining or node.silent:
            raise ValueError(f"{action.node} is not in service")
        if self.conversion is not None:
            raise ValueError(f"{self.conversion.node} is still changing its role")
        serving = self.view.decode() if node.role == "decode" else self.view.prefill(node.site)
        if len(serving) < 2:
            raise ValueError(f"{action.node} is the last {node.role} node of its site")
        node.draining = True
        self._changed()
        self.conversion = Conversion(node.name, action.role)
        self.note("role", node.name, node.role, action.role, action.trigger)

    def drained(self, conversion: Conversion) -> None:
        """Nothing of a request is left on the node that is to change its role: it is told so now."""
        conversion.sent = True
        self._out_of_service(self._nodes[conversion.node])
        if self.directory is not None:
            self.directory.forget(conversion.node)

    def _count_egress(self, event: Telemetry) -> None:
        """Egress is counted where it lands: what the local nodes' counters gained between their last two reports."""
        nodes = self._nodes
        total = sum([count for sender, count in event.kv_landed_bytes.items() if nodes[sender].site == PRFAAS])
        then_s, before = self._landed[event.node]
        self._landed[event.node] = (event.t_s, total)
        if nodes[event.node].site != PD:
            return
        gained = total - before if total >= before else total  # its counters began anew
        self.view.egress_bytes += gained
        if event.t_s > then_s:
            self._landing_bps[event.node] = gained * 8 / (event.t_s - then_s)
            self.view.egress_bps = sum(self._landing_bps.values())

    def _oldest_s(self, now_s: float) -> float:
        """The oldest account that a node which is not silent may have given last."""
        return now_s - SILENT * self.rules.telemetry_s

    def _out_of_service(self, node: NodeView) -> None:
        node.alive = False
        self._landing_bps.pop(node.name, None)
        self.view.egress_bps = sum(self._landing_bps.values())
        self._changed()

    def _changed(self) -> None:
        serving = [n for n in self._nodes.values() if n.alive and not n.draining and not n.silent]
        self.serving.clear()
        self.serving.update({n.name: n.role for n in serving})
        self.view.nodes_changed()
