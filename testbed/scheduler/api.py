"""What a routing policy sees and what it answers: the whole contract between a policy and the testbed.

A policy is told at the start of a load what an operator would know (`Setup`), then asked once a request (`route`). It
sees observations only: never a request's output length, never the link's true rate. `SystemView` and `NodeView` are
live objects owned by control: read them, keep no reference across calls, change nothing. A policy that has a method
`tick` is asked again and again (every `Setup.tick_s`) what to change: its own threshold, a node's role, where cached
prefixes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol

from testbed.scheduler.estimators import Observed
from testbed.scheduler.model import Hardware, LengthDistribution

API_VERSION: Final = 4

PRFAAS: Final = "prfaas"
PD: Final = "pd"
Site = Literal["prfaas", "pd"]
Role = Literal["prefill", "decode"]
INTRA_BPS: Final = 800e9
"""KV inside a site, bits/s a pair: the paper's RDMA fabric, taken as 8 x 100 Gbps. On the wire it is loopback."""

NO_HITS: Final[Mapping[str, int]] = MappingProxyType({})


class RequestView(NamedTuple):
    """A request as a scheduler can know it: its prompt, not its answer.

    arrival_s: model seconds since t = 0. input_tokens: l_total. block_hashes: prefix-chained ids of blocks of
    block_size tokens, empty when unknown. attempt: 1 for the first try, more after a node was lost under it.
    l_pd, l_prfaas: the longest prefix cached at a node of either site, tokens; hits: that of every node that holds one.
    They are what the directory knows, and may be stale: the node looks again. block_ids: the prompt's whole cache
    blocks (`Setup.block_tokens` each), from the first on; () where nothing of it is cached.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    block_hashes: Sequence[int] = ()
    block_size: int = 0
    session: str = ""
    attempt: int = 1
    l_pd: int = 0
    l_prfaas: int = 0
    hits: Mapping[str, int] = NO_HITS
    block_ids: tuple[int, ...] = ()


class Away(NamedTuple):
    """A request that was sent to the remote site and has no first token yet. Model units.

    prefill_tokens: what is computed of it there. kv_bytes: what that made; 0 while it has not ended. l_pd: as in
    RequestView. age_s: since it was routed.
    """

    request_id: str
    input_tokens: int
    prefill_tokens: int
    l_pd: int
    prefill_node: str
    kv_bytes: int
    age_s: float


class NodeView:
    """One instance as control knows it. Read-only for policies.

    queued_requests, queued_tokens, queued_s: routed here and not yet prefilled, the running one included; queued_s is
    their prefill time by the node's own profile, model seconds. assigned_requests: for a decode node, routed here and
    not yet finished; decoding_requests: those with a slot. alive: reachable and in service. draining: takes nothing
    new, to change its role. silent: nothing was heard of it for too long; it may be alive, and is not counted on.
    told_s: the node's stamp of its latest telemetry, model seconds (or when it came up). outbox_bytes,
    landing_bytes, unsent_bytes (model bytes), retransmits (cumulative), rtt_s, waiting_grants (transfers to a decode
    node that wait for room in its landing buffer): from it.
    """

    __slots__ = (
        "alive",
        "assigned_requests",
        "decoding_requests",
        "draining",
        "landing_bytes",
        "name",
        "outbox_bytes",
        "queued_requests",
        "queued_s",
        "queued_tokens",
        "retransmits",
        "role",
        "rtt_s",
        "silent",
        "site",
        "slots",
        "told_s",
        "unsent_bytes",
        "waiting_grants",
    )

    def __init__(self, name: str, site: Site, role: Role, slots: int = 0) -> None:
        self.name = name
        self.site: Site = site
        self.role: Role = role
        self.slots = slots
        self.alive = self.draining = self.silent = False
        self.queued_requests = 0
        self.queued_tokens = 0
        self.queued_s = 0.0
        self.assigned_requests = 0
        self.decoding_requests = 0
        self.outbox_bytes = 0
        self.landing_bytes = 0
        self.unsent_bytes = 0
        self.waiting_grants = 0
        self.retransmits = 0
        self.rtt_s = 0.0
        self.told_s = float("-inf")

    def __repr__(self) -> str:
        return f"<{self.site} {self.role} {self.name} {'up' if self.alive else 'down'}>"


class SystemView:
    """The system now, as observed. One live object, not a copy a decision.

    now_s: model seconds. nodes: every instance by name. link_nominal_bps: what the operator was told the link
    carries. egress_bps, egress_bytes: KV from the prfaas site that has landed, lately (model bits/s) and in all
    (model bytes), as workers report it. observed: what is known from observations, whatever the policy.
    fleet_version: changes whenever a node comes, goes, falls silent or changes its role. copying: prefixes on their way
    by `Replicate`, at most COPIES. holders(block_id): the nodes that hold the prefix which ends with that block, as far
    as the directory knows. away(): the requests at the remote site that may be tried once more, in the order in which
    they came; it looks at every request, so ask when there is a reason.
    """

    __slots__ = (
        "_decode",
        "_prefill",
        "away",
        "copying",
        "egress_bps",
        "egress_bytes",
        "fleet_version",
        "holders",
        "link_nominal_bps",
        "nodes",
        "now_s",
        "observed",
    )

    def __init__(self, nodes: dict[str, NodeView], link_nominal_bps: float, observed: Observed | None = None) -> None:
        self.now_s = 0.0
        self.nodes = nodes
        self.link_nominal_bps = link_nominal_bps
        self.egress_bps = 0.0
        self.egress_bytes = 0
        self.observed = observed if observed is not None else Observed(link_nominal_bps)
        self.fleet_version = 0
        self.copying = 0
        self.holders: Callable[[int], Sequence[str]] = lambda block_id: ()
        self.away: Callable[[], Sequence[Away]] = lambda: ()
        self.nodes_changed()

    def nodes_changed(self) -> None:
        """For control: a node has come, gone, fallen silent or changed its role."""
        self.fleet_version += 1
        serving = [n for n in self.nodes.values() if n.alive and not n.draining and not n.silent]
        prefill = [n for n in serving if n.role == "prefill"]
        self._prefill = {site: tuple(n for n in prefill if n.site == site) for site in (PRFAAS, PD)}
        self._decode = tuple(n for n in serving if n.role == "decode")

    def prefill(self, site: Site) -> Sequence[NodeView]:
        """The prefill instances of a site that take requests, in the fleet's order."""
        return self._prefill[site]

    def decode(self) -> Sequence[NodeView]:
        """The decode instances that take requests, in the fleet's order."""
        return self._decode


@dataclass(frozen=True, slots=True)
class Setup:
    """What an operator knows when a load begins.

    link_nominal_bps: model bits/s. n_prfaas, n_p, n_d: instances. hardware: what a prefill costs at each site (paper
    Table 5). decode_step_s: T_decode; decode_slots: BS_max. lengths: the distribution of the load's input lengths.
    parameters: the scenario's own settings for this policy. pieces: of a transfer from the remote site. tick_s: model
    seconds between two calls of `tick`. reload_s: model seconds that a node takes to change its role. intra_bps: model
    bits/s inside a site. future: for the oracle alone, None for everybody else. block_tokens: of the prefix cache, 0
    without one.
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
    pieces: int = 1
    tick_s: float = 1.0
    reload_s: float = 60.0
    intra_bps: float = INTRA_BPS
    future: Future | None = None
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Future:
    """What only an oracle knows. link_bps(t): the true rate at a model second; lengths(t): the true distribution
    then."""

    link_bps: Callable[[float], float]
    lengths: Callable[[float], LengthDistribution]


class Decision(NamedTuple):
    """Where a request goes, and why.

    prefill_node, decode_node: names of live nodes of these roles. reason: the rule that decided, a short stable word
    or two. threshold_tokens: t at the time, when the policy has one. cached_tokens: how much of a cached prefix is to
    be used; cache_node: the node it is fetched from, when that is another than the prefill node. regime: scarce or
    abundant, when the policy tells them apart.
    """

    prefill_node: str
    decode_node: str
    reason: str
    threshold_tokens: float | None = None
    cached_tokens: int = 0
    cache_node: str = ""
    regime: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is not served: its client gets HTTP 429, the reason, and Retry-After (wall seconds, rounded up)."""

    reason: str
    retry_after_s: float = 1.0


class Note(NamedTuple):
    """A change of the policy's own that is to be on record. kind: threshold, regime. trigger: what brought it about."""

    kind: str
    before: float | str
    after: float | str
    trigger: str


class SetRole(NamedTuple):
    """Convert a local node: it takes nothing new, drains, reloads, and joins again in `role`. trigger: as for Note."""

    node: str
    role: Role
    trigger: str


class Replicate(NamedTuple):
    """Bring a cached prefix to the other site before anybody there asks for it. trigger: as for Note.

    block_ids: of a `RequestView`, from the first on, up to the last block of a prefix that `from_node` holds and
    `to_node` does not; both serve as prefill nodes.
    """

    block_ids: tuple[int, ...]
    from_node: str
    to_node: str
    trigger: str


COPIES: Final = 8
"""The most prefixes that may be on their way by `Replicate` at one time."""


class Recall(NamedTuple):
    """Give up on one of `SystemView.away()`, and try the request once more. trigger: as for Note."""

    request_id: str
    trigger: str


Action = Note | SetRole | Replicate | Recall


class Policy(Protocol):
    """A routing policy. Construct without arguments; one object serves one load.

    Pure: no clock, no randomness but a generator seeded by itself, no input or output. `route` runs on the request
    path: microseconds. A method `tick(view: SystemView) -> Sequence[Action]` is optional: control calls it every
    `Setup.tick_s` while requests are under way, and does what it asks for; an action that cannot be done is left out,
    counted as the policy's error and on the timeline. It may take milliseconds.
    """

    def start(self, setup: Setup) -> None:
        """A load begins at t = 0."""
        ...

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        """Decide where one request goes."""
        ...
