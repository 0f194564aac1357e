"""The testbed at one moment as plain data: nodes, queues, what crosses between the sites, what the scheduler knows.

Everything is in model units, and read from what control and the workers' accounts hold already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from emulator.messages import Telemetry
from testbed.control import Control, Record
from testbed.scheduler.api import NodeView, Site
from testbed.session import Session


class Flows:
    """KV between the sites, by node: bits/s out of a sender or into a receiver, from what had landed at the last two
    looks, by the receivers' own accounts."""

    def __init__(self) -> None:
        self._before: dict[str, Telemetry] = {}

    def look(self, accounts: Mapping[str, Telemetry], sites: Mapping[str, Site]) -> dict[str, float]:
        """Bits/s by node since the last look."""
        rates: dict[str, float] = {}
        for receiver, now in accounts.items():
            before = self._before.get(receiver)
            self._before[receiver] = now
            if before is None or now.t_s <= before.t_s:
                continue
            for sender, total in now.kv_landed_bytes.items():
                gained = total - before.kv_landed_bytes.get(sender, 0)
                if gained > 0 and sites[sender] != sites[receiver]:
                    bps = gained * 8 / (now.t_s - before.t_s)
                    for name in (sender, receiver):
                        rates[name] = rates.get(name, 0.0) + bps
        return rates


def nodes(session: Session, flows: Flows) -> list[dict[str, Any]]:
    """Every instance, in the fleet's order."""
    view, conversion = session.control.view, session.control.fleet.conversion
    rates = flows.look(session.telemetry, {name: node.site for name, node in view.nodes.items()})
    out = []
    for node in view.nodes.values():
        account = session.telemetry.get(node.name)
        converting = conversion is not None and conversion.node == node.name
        out.append(
            {
                "name": node.name,
                "site": node.site,
                "role": node.role,
                "becomes": conversion.role if conversion is not None and converting else None,
                "state": _state(node, converting),
                "queued_requests": node.queued_requests,
                "queued_s": node.queued_s,
                "assigned_requests": node.assigned_requests,
                "decoding_requests": node.decoding_requests,
                "slots": node.slots,
                "unsent_bytes": node.unsent_bytes,
                "cross_bps": rates.get(node.name, 0.0),
                "slowdown": 1.0 if account is None else account.slowdown,
            }
        )
    return out


def _state(node: NodeView, converting: bool) -> str:
    """up | draining | reloading | silent | lost"""
    if node.draining and node.alive:
        return "draining"
    if not node.alive:
        return "reloading" if converting else "lost"
    return "silent" if node.silent else "up"


def stages(live: Iterable[Record]) -> dict[str, int]:
    """How many requests are where: waiting for or in their prefill at either site, on their way to a decode node (from
    the other site, or within the own), decoding."""
    counts = {"prefill_prfaas": 0, "prefill_pd": 0, "crossing": 0, "landing": 0, "decoding": 0}
    for record in live:
        if record.admitted:
            counts["decoding"] += 1
        elif record.prefilled:
            counts["crossing" if record.prefill_site == "prfaas" else "landing"] += 1
        elif record.placed:
            counts[f"prefill_{record.prefill_site}"] += 1
    return counts


def scheduler(control: Control) -> dict[str, Any]:
    """What the policy goes by: t (tokens; None: it has none, or it is infinite), regime, and the link as observed."""
    link = control.view.observed.link
    threshold = getattr(control.policy, "threshold_tokens", None)
    return {
        "threshold_tokens": float(threshold) if isinstance(threshold, Real) and math.isfinite(threshold) else None,
        "regime": getattr(control.policy, "regime", None),
        "link_estimate_bps": link.bps,
        "utilisation": link.utilisation,
        "unsent_bytes": sum(n.unsent_bytes for n in control.view.nodes.values() if n.site == "prfaas"),
        "egress_bps": control.view.egress_bps,
        "policy_errors": sum(control.policy_errors.values()),
    }
