"""What a routing policy sees and what it answers: the whole contract between a policy and the testbed.

A policy is told at the start of a load what an operator would know (`Setup`), then asked once a request (`route`). It
sees observations only: never a request's output length, never the link's true rate. `SystemView` and `NodeView` are
live objects owned by control: read them, keep no reference across calls, change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

from testbed.scheduler.model import Hardware, LengthDistribution

API_VERSION: Final = 1

PRFAAS: Final = "prfaas"
PD: Final = "pd"
Site = Literal["prfaas", "pd"]
Role = Literal["prefill", "decode"]


class RequestView(NamedTuple):
    """A request as a scheduler can know it: its prompt, not its answer.

    arrival_s: model seconds since t = 0. input_tokens: l_total. block_hashes: prefix-chained ids of blocks of
    block_size tokens, empty when unknown. attempt: 1 for the first try, more after a node was lost under it.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    block_hashes: Sequence[int] = ()
    block_size: int = 0
    session: str = ""
    attempt: int = 1


class NodeView:
    """One instance as control knows it. Read-only for policies.

    queued_requests, queued_tokens, queued_s: routed here and not yet prefilled, the running one included; queued_s is
    their prefill time by the node's own profile, model seconds.
    assigned_requests: for a decode node, routed here and not yet finished; decoding_requests: those with a slot.
    told_s: the node's stamp of its latest telemetry, model seconds (-inf before the first). outbox_bytes,
    landing_bytes, unsent_bytes (model bytes), retransmits (cumulative), rtt_s: from it.
    """

    __slots__ = (
        "alive",
        "assigned_requests",
        "decoding_requests",
        "landing_bytes",
        "name",
        "outbox_bytes",
        "queued_requests",
        "queued_s",
        "queued_tokens",
        "retransmits",
        "role",
        "rtt_s",
        "site",
        "slots",
        "told_s",
        "unsent_bytes",
    )

    def __init__(self, name: str, site: Site, role: Role, slots: int = 0) -> None:
        self.name = name
        self.site: Site = site
        self.role: Role = role
        self.slots = slots
        self.alive = False
        self.queued_requests = 0
        self.queued_tokens = 0
        self.queued_s = 0.0
        self.assigned_requests = 0
        self.decoding_requests = 0
        self.outbox_bytes = 0
        self.landing_bytes = 0
        self.unsent_bytes = 0
        self.retransmits = 0
        self.rtt_s = 0.0
        self.told_s = float("-inf")

    def __repr__(self) -> str:
        return f"<{self.site} {self.role} {self.name} {'up' if self.alive else 'down'}>"


class SystemView:
    """The system now, as observed. One live object, not a copy a decision.

    now_s: model seconds. nodes: every instance by name. link_nominal_bps: what the operator was told the link carries.
    egress_bps, egress_bytes: KV from the prfaas site that has landed, lately (model bits/s) and in all (model bytes),
    as workers report it.
    """

    __slots__ = ("_decode", "_prefill", "egress_bps", "egress_bytes", "link_nominal_bps", "nodes", "now_s")

    def __init__(self, nodes: dict[str, NodeView], link_nominal_bps: float) -> None:
        self.now_s = 0.0
        self.nodes = nodes
        self.link_nominal_bps = link_nominal_bps
        self.egress_bps = 0.0
        self.egress_bytes = 0
        self.nodes_changed()

    def nodes_changed(self) -> None:
        """For control: a node has come, gone or changed its role."""
        serving = [n for n in self.nodes.values() if n.alive]
        prefill = [n for n in serving if n.role == "prefill"]
        self._prefill = {site: tuple(n for n in prefill if n.site == site) for site in (PRFAAS, PD)}
        self._decode = tuple(n for n in serving if n.role == "decode")

    def prefill(self, site: Site) -> Sequence[NodeView]:
        """The live prefill instances of a site, in the fleet's order."""
        return self._prefill[site]

    def decode(self) -> Sequence[NodeView]:
        """The live decode instances, in the fleet's order."""
        return self._decode


@dataclass(frozen=True, slots=True)
class Setup:
    """What an operator knows when a load begins.

    link_nominal_bps: model bits/s. n_prfaas, n_p, n_d: instances. hardware: what a prefill costs at each site (paper
    Table 5). decode_step_s: T_decode; decode_slots: BS_max. lengths: the distribution of the load's input lengths.
    parameters: the scenario's own settings for this policy.
    """

    link_nominal_bps: float
    n_prfaas: int
    n_p: int
    n_d: int
    hardware: dict[Site, Hardware]
    decode_step_s: float
    decode_slots: int
    lengths: LengthDistribution
    parameters: dict[str, float] = field(default_factory=dict)


class Decision(NamedTuple):
    """Where a request goes, and why.

    prefill_node, decode_node: names of live nodes of these roles. reason: the rule that decided, a short stable word
    or two. threshold_tokens: t at the time, when the policy has one.
    """

    prefill_node: str
    decode_node: str
    reason: str
    threshold_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is not served: its client gets HTTP 429, the reason, and Retry-After (wall seconds, rounded up)."""

    reason: str
    retry_after_s: float = 1.0


class Policy(Protocol):
    """A routing policy. Construct without arguments; one object serves one load.

    Pure: no clock, no randomness but a generator seeded by itself, no input or output. `route` runs on the request
    path: microseconds.
    """

    def start(self, setup: Setup) -> None:
        """A load begins at t = 0."""
        ...

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        """Decide where one request goes."""
        ...

