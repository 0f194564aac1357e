"""The rules every shipped policy shares: which node inside a cluster, and where equation (7) puts the threshold.

They stand apart so that two policies differ in their routing rule and in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from testbed.scheduler import model
from testbed.scheduler.api import PD, PRFAAS, Decision, NodeView, Reject, RequestView, Setup, Site, SystemView


def least_loaded_prefill(nodes: Sequence[NodeView]) -> NodeView:
    """The node with the least prefill work routed to it, in seconds; ties go to the first. There is at least one."""
    best, least = nodes[0], nodes[0].queued_s
    for node in nodes:
        if node.queued_s < least:
            best, least = node, node.queued_s
    return best


def least_loaded_decode(nodes: Sequence[NodeView]) -> NodeView:
    """The node with the fewest requests a slot, those on their way included; ties go to the first. There is one.

    Before all others those whose landing buffer has room: elsewhere KV waits, and the prefill node's outbox fills.
    """
    best, least = nodes[0], (True, math.inf)
    for node in nodes:
        load = node.waiting_grants > 0, node.assigned_requests / node.slots
        if load < least:
            best, least = node, load
    return best


def send(
    view: SystemView, site: Site, reason: str, threshold_tokens: float | None = None, regime: str = ""
) -> Decision | Reject:
    """Prefill at `site` if it has a live prefill node, else at the other site; decode at the least loaded node.

    What the chosen node has cached of the prompt is not looked at.
    """
    decoders = view.decode()
    if not decoders:
        return Reject("no live decode node")
    prefills = view.prefill(site)
    if not prefills:
        other: Site = PD if site == PRFAAS else PRFAAS
        prefills = view.prefill(other)
        reason = f"{reason}, but no live prefill node at {site}"
    if not prefills:
        return Reject("no live prefill node")
    return Decision(
        least_loaded_prefill(prefills).name,
        least_loaded_decode(decoders).name,
        reason,
        threshold_tokens,
        0,
        "",
        regime,
    )


def by_threshold(request: RequestView, view: SystemView, threshold_tokens: float) -> Decision | Reject:
    """The paper's rule: l > t is prefilled by PrfaaS, l <= t by the local cluster (section 2)."""
    if request.input_tokens > threshold_tokens:
        return send(view, PRFAAS, "longer than t", threshold_tokens)
    return send(view, PD, "not longer than t", threshold_tokens)


def system_of(setup: Setup, link_bps: float, output_tokens: float = 1.0) -> model.System:
    """The deployment as the equations take it. output_tokens: mean L_out; without influence on the threshold of a
    split."""
    return model.System(
        local=setup.hardware[PD],
        remote=setup.hardware.get(PRFAAS),
        link_bps=link_bps,
        decode_step_s=setup.decode_step_s,
        decode_slots=setup.decode_slots,
        output_tokens=output_tokens,
    )


def solve_threshold(
    setup: Setup,
    fleet: model.Fleet | None = None,
    lengths: model.LengthDistribution | None = None,
    link_bps: float | None = None,
) -> float:
    """The t of equation (7) in the paper's form, tokens: by default for what the operator said when the load began.

    A fleet without remote prefill keeps everything local (infinity), one without local prefill sends everything away
    (0). link_bps: bits/s; with none at all everything stays local, too.
    """
    fleet = model.Fleet(setup.n_prfaas, setup.n_p, setup.n_d) if fleet is None else fleet
    link_bps = setup.link_nominal_bps if link_bps is None else link_bps
    if not fleet.n_prfaas or link_bps <= 0:
        return model.ALL_LOCAL
    if not fleet.n_p:
        return model.ALL_REMOTE
    return model.solve_threshold(system_of(setup, link_bps), fleet, lengths or setup.lengths).threshold_tokens


class CostTable:
    """T_prefill and S_kv of a site by length, looked up rather than computed: in steps of STEP tokens, rounded up."""

    STEP: Final = 256

    def __init__(self, hardware: model.Hardware, longest_tokens: float) -> None:
        """longest_tokens: the longest length of the workload; longer ones are taken as that."""
        lengths = np.append(np.arange(1, longest_tokens, self.STEP, dtype=np.float64), longest_tokens)
        self._seconds: list[float] = hardware.t_prefill(lengths).tolist()
        self._bytes: list[float] = hardware.s_kv(lengths).tolist()
        self._last = len(self._seconds) - 1

    def __call__(self, tokens: int) -> float:
        """Seconds of a prefill of `tokens`."""
        at = -(-tokens // self.STEP)
        return self._seconds[at if at < self._last else self._last]

    def kv_bytes(self, tokens: int) -> float:
        """Bytes of KV of `tokens`."""
        at = -(-tokens // self.STEP)
        return self._bytes[at if at < self._last else self._last]
