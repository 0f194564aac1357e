"""Cached prefixes on their way to the other site because the policy said so (`Replicate`), with no request waiting."""

from __future__ import annotations

from emulator.messages import Bring, Brought, Cancel
from testbed.control.events import Command
from testbed.control.nodes import Nodes
from testbed.scheduler.api import COPIES, NodeView, Replicate

NO_ATTEMPT = 0
"""The attempt in the key of a copy: those of a request begin with 1, so no copy is taken for one."""


class Copies:
    """What is under way, of one load. A copy ends when its receiver says so, or with either of its nodes."""

    def __init__(self, fleet: Nodes) -> None:
        self._fleet = fleet
        self._begun = 0
        self._under_way: dict[str, tuple[Replicate, float]] = {}  # by name: what, and when it began

    def begin(self, action: Replicate, out: list[Command]) -> None:
        """Have a prefix fetched. Raises ValueError for one that cannot be."""
        fleet = self._fleet
        ids, source, receiver = action.block_ids, self._serving(action.from_node), self._serving(action.to_node)
        if source.site == receiver.site:
            raise ValueError(f"{source.name} and {receiver.name} are at the same site")
        if not isinstance(ids, tuple) or not ids:
            raise ValueError("block_ids: a tuple of a prefix's blocks, one or more")
        holders = fleet.view.holders(ids[-1])
        if source.name not in holders:
            raise ValueError(f"{source.name} does not hold that prefix of {len(ids)} blocks")
        if receiver.name in holders:
            raise ValueError(f"{receiver.name} holds that prefix of {len(ids)} blocks already")
        if len(self._under_way) >= COPIES:
            raise ValueError(f"{COPIES} prefixes are on their way already")
        if any(one.block_ids == ids and one.to_node == receiver.name for one, _ in self._under_way.values()):
            raise ValueError(f"that prefix of {len(ids)} blocks is on its way to {receiver.name} already")
        self._begun += 1
        name = f"copy-{self._begun}"
        self._under_way[name] = action, fleet.view.now_s
        fleet.view.copying = len(self._under_way)
        fleet.note("replicate", receiver.name, source.name, len(ids) * fleet.rules.block_tokens, action.trigger)
        out.append((receiver.name, Bring(name, NO_ATTEMPT, ids, source.name)))

    def ended(self, event: Brought) -> None:
        """A receiver's word on one of them."""
        if event.request_id in self._under_way:
            self._over(event.request_id, event.kv_bytes, "" if event.kv_bytes else ": it was gone, or found no room")

    def without(self, node: str, why: str, out: list[Command]) -> None:
        """A node takes no part in any of them from now on."""
        for name, (action, _) in list(self._under_way.items()):
            if node in (action.from_node, action.to_node):
                if self._fleet.view.nodes[action.to_node].alive:
                    out.append((action.to_node, Cancel(name, NO_ATTEMPT)))
                self._over(name, 0, f": {node} {why}")

    def _over(self, name: str, kv_bytes: int, why: str) -> None:
        fleet = self._fleet
        action, began_s = self._under_way.pop(name)
        fleet.view.copying = len(self._under_way)
        trigger = f"from {action.from_node}, after {fleet.view.now_s - began_s:.3g} s{why}"
        fleet.note("replicated", action.to_node, 0, kv_bytes, trigger)

    def _serving(self, name: str) -> NodeView:
        if self._fleet.serving.get(name) != "prefill" or self._fleet.directory is None:
            raise ValueError(f"{name} does not serve as a prefill node with a cache")
        return self._fleet.view.nodes[name]
