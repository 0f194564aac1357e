"""A request's life, as a pure machine: what happens to it between its arrival and its last token, and who is told.

`handle(now_s, event)` takes what the outside says (a request arrived, a node came or went, a worker's message) and
returns commands for it (a message to a node, an answer for a client). It calls the policy, keeps the `SystemView` the
policy reads, retries what may be retried, and frees everything of a request however it ends. `gateway.py` carries its
events and commands on the wire, virtual time in a heap; neither decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Final

import msgspec

from emulator.messages import (
    Admitted,
    AttemptFailed,
    Cancel,
    Finished,
    Prefill,
    Prefilled,
    Telemetry,
)
from testbed.scheduler.api import PRFAAS, Decision, NodeView, Policy, Reject, RequestView, Role, Site, SystemView

CLIENT: Final = "client"


# Events. Workers' messages (Prefilled, Admitted, Finished, AttemptFailed, Telemetry) are events too.
class Arrive(msgspec.Struct, frozen=True, tag=True):
    """A request has arrived. output_tokens is for the workers; a policy never sees it."""

    request_id: str
    input_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    block_size: int = 0
    session: str = ""


class ClientGone(msgspec.Struct, frozen=True, tag=True):
    """The client no longer waits for the request."""

    request_id: str


class NodeUp(msgspec.Struct, frozen=True, tag=True):
    """The node serves `role` and is empty."""

    node: str
    role: Role


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """The node is dead or out of reach."""

    node: str
    reason: str


Event = Arrive | ClientGone | NodeUp | NodeLost | Prefilled | Admitted | Finished | AttemptFailed | Telemetry


class Record(msgspec.Struct, gc=False, eq=False):
    """Everything known of one request; one row of the results when it ends. Times: model seconds, nan for none.

    status: ok | failed | aborted (its client left). error: a short kind. policy_error: how the policy failed, when a
    fallback decided.
    """

    view: RequestView
    request_id: str
    input_tokens: int
    output_tokens_asked: int
    arrive_s: float
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0
    kv_bytes: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    prefill_site: str = ""
    reason: str = ""
    status: str = ""
    error: str = ""
    error_message: str = ""
    policy_error: str = ""
    threshold_tokens: float = math.nan
    route_s: float = math.nan
    prefill_start_s: float = math.nan
    prefill_end_s: float = math.nan
    landed_s: float = math.nan
    admitted_s: float = math.nan
    finished_s: float = math.nan
    prefill_cost_s: float = 0.0
    placed: bool = False  # counted at its nodes
    prefilled: bool = False  # no longer counted at its prefill node

    @classmethod
    def of(cls, view: RequestView, output_tokens: int) -> Record:
        """A request that has just arrived."""
        return cls(view, view.request_id, view.input_tokens, output_tokens, view.arrival_s)

    @property
    def admitted(self) -> bool:
        """Whether it has a decode slot, and tokens of its answer may have been sent."""
        return self.admitted_s == self.admitted_s


class Completed(msgspec.Struct, frozen=True):
    """For the client: the last token has left."""

    record: Record


class Failed(msgspec.Struct, frozen=True):
    """For the client: the request ends with an error. http_status counts when nothing was sent yet."""

    record: Record
    http_status: int
    retry_after_s: float | None = None


Command = tuple[str, Prefill | Cancel | Completed | Failed]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """An instance of the fleet. slots: BS_max, for a node that can decode."""

    name: str
    site: Site
    role: Role
    slots: int


PolicyCall = Callable[[Policy, RequestView, SystemView], Decision | Reject]


def call_policy(policy: Policy, request: RequestView, view: SystemView) -> Decision | Reject:
    """Ask the policy, without a time limit (virtual time). The gateway passes a bounded one instead."""
    return policy.route(request, view)


class Control:
    """The life of every request of one load.

    fleet: the instances. cost: T_prefill(l) at each site. policy: started already.
    fallback: decides when the policy fails. max_attempts: tries of a request before it fails. ask: how the policy is
    called.
    """

    def __init__(
        self,
        fleet: Sequence[NodeSpec],
        cost: Mapping[Site, Callable[[float], float]],
        link_nominal_bps: float,
        policy: Policy,
        fallback: Policy,
        *,
        max_attempts: int = 3,
        ask: PolicyCall = call_policy,
    ) -> None:
        nodes = {spec.name: NodeView(spec.name, spec.site, spec.role, spec.slots) for spec in fleet}
        self.view = SystemView(nodes, link_nominal_bps)
        self.live: dict[str, Record] = {}
        self.policy = policy
        self.policy_errors: dict[str, int] = {}
        self._nodes = nodes
        self._serving: dict[str, Role] = {}  # the live nodes
        self._fallback = fallback
        self._max_attempts = max_attempts
        self._ask = ask
        self._cost = cost
        self._landed: dict[str, tuple[float, int]] = {}  # a live node's last report: when, bytes from the prfaas site
        self._landing_bps: dict[str, float] = {}
        self._handlers: Mapping[type, Callable[..., None]] = {
            Arrive: self._on_arrive,
            ClientGone: self._on_client_gone,
            NodeUp: self._on_node_up,
            NodeLost: self._on_node_lost,
            Prefilled: self._on_prefilled,
            Admitted: self._on_admitted,
            Finished: self._on_finished,
            AttemptFailed: self._on_attempt_failed,
            Telemetry: self._on_telemetry,
        }

    def next_s(self) -> float | None:
        """Control has no timer of its own yet."""
        return None

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Accept one event at `now_s` (model seconds) and return the commands that follow from it."""
        self.view.now_s = now_s
        out: list[Command] = []
        self._handlers[type(event)](now_s, event, out)
        return out

    def is_current(self, request_id: str, attempt: int) -> bool:
        """Whether the attempt is the request's present one: tokens of any other are not for its client."""
        record = self.live.get(request_id)
        return record is not None and record.attempts == attempt

    # a request's life
    def _on_arrive(self, now_s: float, event: Arrive, out: list[Command]) -> None:
        view = RequestView(
            event.request_id, now_s, event.input_tokens, event.block_hashes, event.block_size, event.session
        )
        record = Record.of(view, event.output_tokens)
        self.live[event.request_id] = record
        self._route(now_s, record, out)

    def _route(self, now_s: float, record: Record, out: list[Command]) -> None:
        record.attempts += 1
        view = record.view
        if record.attempts > 1:
            view = RequestView(
                view.request_id, view.arrival_s, view.input_tokens, view.block_hashes, view.block_size, view.session,
                record.attempts,
            )
        decision = self._decide(record, view)
        if isinstance(decision, Reject):
            record.reason = decision.reason
            unable = not (self.view.decode() and any(n.alive and n.role == "prefill" for n in self._nodes.values()))
            kind, status = ("unavailable", 503) if unable else ("rejected", 429)
            self._fail(record, kind, decision.reason, status, out, decision.retry_after_s)
            return
        prefill, decode = self._nodes[decision.prefill_node], self._nodes[decision.decode_node]
        record.route_s = now_s
        record.reason = decision.reason
        record.threshold_tokens = math.nan if decision.threshold_tokens is None else float(decision.threshold_tokens)
        record.prefill_node, record.decode_node, record.prefill_site = prefill.name, decode.name, prefill.site
        record.placed, record.prefilled = True, False
        tokens = record.input_tokens - record.cached_tokens
        record.prefill_cost_s = self._cost[prefill.site](tokens)
        prefill.queued_requests += 1
        prefill.queued_tokens += tokens
        prefill.queued_s += record.prefill_cost_s
        decode.assigned_requests += 1
        order = Prefill(
            record.request_id,
            record.attempts,
            record.input_tokens,
            record.cached_tokens,
            record.output_tokens_asked,
            decode.name,
        )
        out.append((prefill.name, order))

    def _decide(self, record: Record, view: RequestView) -> Decision | Reject:
        """The policy's decision; the fallback's when it raises, is too slow or names a node that cannot take it."""
        try:
            decision = self._ask(self.policy, view, self.view)
            problem = self._problem(decision)
        except Exception as error:  # a policy is somebody else's code: whatever it raises must not stop the testbed
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return decision
        record.policy_error = problem
        kind = problem.split(":", 1)[0]
        self.policy_errors[kind] = self.policy_errors.get(kind, 0) + 1
        decision = self._fallback.route(view, self.view)
        if isinstance(decision, Decision):
            return Decision(
                decision.prefill_node, decision.decode_node, f"fallback: {decision.reason}", decision.threshold_tokens
            )
        return decision

    def _problem(self, decision: object) -> str:
        if type(decision) is not Decision:
            return self._no_decision(decision)
        threshold = decision.threshold_tokens
        if type(threshold) is not float and threshold is not None and not isinstance(threshold, Real):
            return f"bad threshold_tokens: {threshold!r}"
        prefill, decode = self._serving.get(decision.prefill_node), self._serving.get(decision.decode_node)
        if prefill == "prefill" and decode == "decode":
            return ""
        for name, role in ((decision.prefill_node, "prefill"), (decision.decode_node, "decode")):
            node = self._nodes.get(name)
            if node is None:
                return f"unknown node: {name}"
            if not node.alive:
                return f"dead node: {name}"
            if node.role != role:
                return f"wrong role: {name} is a {node.role} node"
        return ""

    @staticmethod
    def _no_decision(decision: object) -> str:
        if isinstance(decision, Reject):
            return "" if 0 <= decision.retry_after_s < math.inf else f"bad retry_after_s: {decision.retry_after_s!r}"
        return f"not a decision: {type(decision).__name__}"

    def _on_prefilled(self, now_s: float, event: Prefilled, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        if record is None or record.prefilled:
            return
        self._leave_prefill(record)
        record.prefill_start_s, record.prefill_end_s = event.start_s, event.end_s
        record.kv_bytes = event.kv_bytes

    def _on_admitted(self, now_s: float, event: Admitted, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        if record is None or record.admitted:
            return
        record.landed_s, record.admitted_s = event.landed_s, event.admitted_s
        self._nodes[record.decode_node].decoding_requests += 1

    def _on_finished(self, now_s: float, event: Finished, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        if record is None:
            return
        record.finished_s, record.output_tokens, record.status = event.finished_s, event.tokens, "ok"
        self._release(record)
        out.append((CLIENT, Completed(record)))

    def _on_attempt_failed(self, now_s: float, event: AttemptFailed, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        # Once admitted, its KV is where it belongs: a prefill node that fails the attempt only missed the word of that.
        if record is not None and not record.admitted:
            self._again(now_s, record, "attempt_failed", event.reason, out)

    def _on_client_gone(self, now_s: float, event: ClientGone, out: list[Command]) -> None:
        record = self.live.get(event.request_id)
        if record is not None:
            self._cancel(record, out)
            record.status, record.error = "aborted", "client_gone"
            self._release(record)
            out.append((CLIENT, Failed(record, 499)))

    def _again(self, now_s: float, record: Record, kind: str, why: str, out: list[Command]) -> None:
        """Try a request once more where that is safe: no token of its answer has been sent."""
        self._cancel(record, out)
        if record.admitted:
            self._fail(
                record, kind, f"{why}; part of the answer had been sent, so the request cannot be tried again", 502, out
            )
        elif record.attempts >= self._max_attempts:
            self._fail(record, kind, f"{why}; given up after {record.attempts} attempts", 503, out)
        else:
            self._leave_nodes(record)
            record.prefill_start_s = record.prefill_end_s = math.nan
            record.kv_bytes = 0
            self._route(now_s, record, out)

    def _fail(
        self,
        record: Record,
        kind: str,
        message: str,
        status: int,
        out: list[Command],
        retry_after_s: float | None = None,
    ) -> None:
        record.status, record.error, record.error_message = "failed", kind, message
        self._release(record)
        out.append((CLIENT, Failed(record, status, retry_after_s)))

    def _cancel(self, record: Record, out: list[Command]) -> None:
        for name in (record.prefill_node, record.decode_node):
            if record.placed and self._nodes[name].alive:
                out.append((name, Cancel(record.request_id, record.attempts)))

    def _release(self, record: Record) -> None:
        self._leave_nodes(record)
        del self.live[record.request_id]

    def _leave_nodes(self, record: Record) -> None:
        if not record.placed:
            return
        record.placed = False
        if not record.prefilled:
            self._leave_prefill(record)
        decode = self._nodes[record.decode_node]
        decode.assigned_requests -= 1
        if record.admitted:
            decode.decoding_requests -= 1

    def _leave_prefill(self, record: Record) -> None:
        record.prefilled = True
        node = self._nodes[record.prefill_node]
        node.queued_requests -= 1
        node.queued_tokens -= record.input_tokens - record.cached_tokens
        node.queued_s = node.queued_s - record.prefill_cost_s if node.queued_requests else 0.0

    def _current(self, request_id: str, attempt: int) -> Record | None:
        record = self.live.get(request_id)
        return record if record is not None and record.attempts == attempt else None

    # the nodes
    def _on_node_up(self, now_s: float, event: NodeUp, out: list[Command]) -> None:
        node = self._nodes[event.node]
        if node.alive:
            self._on_node_lost(now_s, NodeLost(event.node, "it began anew"), out)
        node.role = event.role
        node.alive = True
        self._serving[event.node] = event.role
        self.view.nodes_changed()
        node.told_s = -math.inf
        node.outbox_bytes = node.landing_bytes = node.unsent_bytes = node.retransmits = 0
        node.rtt_s = 0.0
        self._landed[event.node] = (now_s, 0)

    def _on_node_lost(self, now_s: float, event: NodeLost, out: list[Command]) -> None:
        node = self._nodes[event.node]
        if not node.alive:
            return
        node.alive = False
        del self._serving[event.node]
        self.view.nodes_changed()
        self._landing_bps.pop(event.node, None)
        self.view.egress_bps = sum(self._landing_bps.values())
        why = f"node {event.node} was lost ({event.reason})"
        for record in list(self.live.values()):
            if record.prefill_node == event.node and record.admitted:
                if not record.prefilled:
                    self._leave_prefill(record)
            elif event.node in (record.prefill_node, record.decode_node):
                # Its KV may have landed whole, but nobody might ever say so: a second prefill is safe, waiting is not.
                self._again(now_s, record, "node_lost", why, out)

    def _on_telemetry(self, now_s: float, event: Telemetry, out: list[Command]) -> None:
        node = self._nodes[event.node]
        if not node.alive:
            return
        node.told_s = event.t_s
        node.outbox_bytes, node.landing_bytes = event.outbox_bytes, event.landing_bytes
        node.unsent_bytes = sum(path.unsent_bytes for path in event.paths)
        node.retransmits = sum(path.retransmits for path in event.paths)
        node.rtt_s = max((path.rtt_s for path in event.paths), default=0.0)
        if node.role == "decode":
            self._count_egress(event)

    def _count_egress(self, event: Telemetry) -> None:
        """Egress is counted where it lands: what the decode nodes' counters gained between their last two reports."""
        total = sum(count for sender, count in event.kv_landed_bytes.items() if self._nodes[sender].site == PRFAAS)
        then_s, before = self._landed[event.node]
        self._landed[event.node] = (event.t_s, total)
        self.view.egress_bytes += total - before
        if event.t_s > then_s:
            self._landing_bps[event.node] = (total - before) * 8 / (event.t_s - then_s)
            self.view.egress_bps = sum(self._landing_bps.values())
