"""The rules every shipped policy shares: which node inside a cluster, and where equation (7) puts the threshold.

They stand apart so that two policies differ in their routing rule and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """The node with the fewest requests a slot, those on their way included; ties go to the first. There is one."""
    best, least = nodes[0], nodes[0].assigned_requests / nodes[0].slots
    for node in nodes:
        load = node.assigned_requests / node.slots
        if load < least:
            best, least = node, load
    return best


def send(view: SystemView, site: Site, reason: str, threshold_tokens: float | None = None) -> Decision | Reject:
    """Prefill at `site` if it has a live prefill node, else at the other site; decode at the least loaded node."""
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
    return Decision(least_loaded_prefill(prefills).name, least_loaded_decode(decoders).name, reason, threshold_tokens)


def by_threshold(request: RequestView, view: SystemView, threshold_tokens: float) -> Decision | Reject:
    """The paper's rule: l > t is prefilled by PrfaaS, l <= t by the local cluster (section 2)."""
    if request.input_tokens > threshold_tokens:
        return send(view, PRFAAS, "longer than t", threshold_tokens)
    return send(view, PD, "not longer than t", threshold_tokens)


def solve_threshold(setup: Setup) -> float:
    """The t of equation (7) in the paper's form, tokens: for the load's lengths, the fleet as it is, the nominal link.

    A fleet without remote prefill keeps everything local (infinity), one without local prefill sends everything away
    (0).
    """
    if not setup.n_prfaas:
        return model.ALL_LOCAL
    if not setup.n_p:
        return model.ALL_REMOTE
    system = model.System(
        local=setup.hardware[PD],
        remote=setup.hardware[PRFAAS],
        link_bps=setup.link_nominal_bps,
        decode_step_s=setup.decode_step_s,
        decode_slots=setup.decode_slots,
        output_tokens=1.0,  # unknown to a policy, and without influence on the threshold of a given split
    )
    fleet = model.Fleet(setup.n_prfaas, setup.n_p, setup.n_d)
    return model.solve_threshold(system, fleet, setup.lengths).threshold_tokens
