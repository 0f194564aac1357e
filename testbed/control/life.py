"""A request's life, as a pure machine: what happens to it between its arrival and its last token, and who is told.

`handle(now_s, event)` takes what the outside says (a request arrived, a node came or went, a worker's message) and
returns commands for it (a message to a node, an answer for a client). It calls the policy, keeps the `SystemView` the
policy reads, retries what may be retried, and frees everything of a request however it ends. `gateway.py` carries its
events and commands on the wire, virtual time in a heap; neither decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from emulator.kvcache import aligned
from emulator.messages import (
    Admitted,
    AttemptFailed,
    Brought,
    CacheChanged,
    Cancel,
    Convert,
    Finished,
    Prefill,
    Prefilled,
    Telemetry,
)
from testbed.control import judge
from testbed.control.copies import Copies
from testbed.control.events import (
    CLIENT,
    Arrive,
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
from testbed.control.nodes import Nodes
from testbed.scheduler.api import (
    NO_HITS,
    PRFAAS,
    Action,
    Away,
    Decision,
    NodeView,
    Note,
    Policy,
    Recall,
    Reject,
    Replicate,
    RequestView,
    SetRole,
    Site,
    SystemView,
)
from testbed.scheduler.estimators import Observed

PolicyCall = Callable[[Policy, RequestView, SystemView], Decision | Reject]
TickCall = Callable[[Policy, SystemView], Sequence[Action]]


def tick_policy(policy: Policy, view: SystemView) -> Sequence[Action]:
    """Let the policy look around, without a time limit (virtual time); a policy without `tick` changes nothing."""
    tick = getattr(policy, "tick", None)
    return tick(view) if tick is not None else ()


def call_policy(policy: Policy, request: RequestView, view: SystemView) -> Decision | Reject:
    """Ask the policy, without a time limit (virtual time). The gateway passes a bounded one instead."""
    return policy.route(request, view)


class Control:
    """The life of every request of one load.

    fleet: the instances. cost: T_prefill(l) at each site. policy: started already.
    fallback: decides when the policy fails. ask, tick: how the policy is called. changes: what the scheduler changed,
    in order.
    """

    def __init__(
        self,
        fleet: Sequence[NodeSpec],
        cost: Mapping[Site, Callable[[float], float]],
        link_nominal_bps: float,
        policy: Policy,
        fallback: Policy,
        rules: Rules | None = None,
        *,
        ask: PolicyCall = call_policy,
        tick: TickCall = tick_policy,
    ) -> None:
        rules = Rules() if rules is None else rules
        nodes = {spec.name: NodeView(spec.name, spec.site, spec.role, spec.slots) for spec in fleet}
        self.observed = Observed(link_nominal_bps, rules.pieces)
        self.view = SystemView(nodes, link_nominal_bps, self.observed)
        self.rules = rules
        self.fleet = Nodes(self.view, rules)
        self.copies = Copies(self.fleet)
        self.view.away = self._away
        self.live: dict[str, Record] = {}
        self.policy = self._before = policy
        self.policy_errors: dict[str, int] = {}
        self.changes = self.fleet.changes
        self.waiting = 0  # live requests without a first token
        self._nodes = nodes
        self._serving = self.fleet.serving
        self._directory = self.fleet.directory
        self._fallback = fallback
        self._ask = ask
        self._tick = tick
        self._cost = cost
        self._tick_due_s = rules.tick_s
        self._deadlines: deque[tuple[float, Record]] = deque()
        self._handlers: Mapping[type, Callable[[float, Any, list[Command]], None]] = {
            Arrive: self._on_arrive,
            ClientGone: self._on_client_gone,
            NodeUp: self._on_node_up,
            NodeLost: self._on_node_lost,
            Tick: self._on_tick,
            PolicySet: self._on_policy_set,
            Disturbed: self._on_disturbed,
            Prefilled: self._on_prefilled,
            Admitted: self._on_admitted,
            Finished: self._on_finished,
            AttemptFailed: self._on_attempt_failed,
            CacheChanged: self._on_cache_changed,
            Brought: self._on_brought,
            Telemetry: self._on_telemetry,
        }

    def next_s(self) -> float:
        """When control wants a `Tick`, model seconds: to look around, or because a deadline is due."""
        if self._deadlines and self._deadlines[0][0] < self._tick_due_s:
            return self._deadlines[0][0]
        return self._tick_due_s

    @property
    def busy(self) -> bool:
        """Whether anything is under way that needs ticks to end."""
        return bool(self.live) or self.fleet.conversion is not None

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Accept one event at `now_s` (model seconds) and return the commands that follow from it."""
        self.view.now_s = now_s
        out: list[Command] = []
        self._handlers[type(event)](now_s, event, out)
        return out

    def set_policy(self, policy: Policy) -> None:
        """Put another policy, started already, in charge of what is still to be decided; a `PolicySet` is to follow.

        What was observed stays.
        """
        self._before = self.policy
        self.policy = policy

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
        self.waiting += 1
        rules = self.rules
        if self._directory is not None and event.block_hashes:
            record.block_ids = aligned(event.block_hashes, event.block_size, event.input_tokens, rules.block_tokens)
            self._look_up(record)
        self.observed.lengths.add(now_s, event.input_tokens, record.l_pd, record.l_prfaas)
        if rules.waiting_requests is not None and self.waiting > rules.waiting_requests:
            record.reason = "too many requests wait"
            self._fail(record, "overloaded", f"{rules.waiting_requests} requests wait already", 429, out, 1.0)
            return
        if rules.deadline_s is not None:
            self._deadlines.append((now_s + rules.deadline_s, record))
        self._route(now_s, record, out)

    def _look_up(self, record: Record) -> None:
        """What is cached of a request, and where, as far as the directory knows."""
        assert self._directory is not None
        hits = self._directory.hits(record.block_ids)
        record.l_pd = record.l_prfaas = 0
        for name, tokens in hits.items():
            if self._nodes[name].site == PRFAAS:
                record.l_prfaas = max(record.l_prfaas, tokens)
            else:
                record.l_pd = max(record.l_pd, tokens)
        if hits or record.view.hits:
            record.view = record.view._replace(
                l_pd=record.l_pd, l_prfaas=record.l_prfaas, hits=hits, block_ids=record.block_ids
            )

    def _route(self, now_s: float, record: Record, out: list[Command]) -> None:
        record.attempts += 1
        if record.attempts > 1:
            record.view = record.view._replace(attempt=record.attempts, hits=NO_HITS)
            if self._directory is not None:
                self._look_up(record)
        decision = self._decide(record, record.view)
        if isinstance(decision, Reject):
            record.reason = decision.reason
            unable = not (self.view.decode() and any(n.alive and n.role == "prefill" for n in self._nodes.values()))
            kind, status = ("unavailable", 503) if unable else ("rejected", 429)
            self._fail(record, kind, decision.reason, status, out, decision.retry_after_s)
            return
        prefill_node, decode_node, reason, threshold, cached, cache_node, regime = decision
        prefill, decode = self._nodes[prefill_node], self._nodes[decode_node]
        record.route_s = now_s
        record.reason, record.regime = reason, regime
        record.threshold_tokens = math.nan if threshold is None else float(threshold)
        record.prefill_node, record.decode_node, record.prefill_site = prefill_node, decode_node, prefill.site
        record.cache_node = cache_node
        record.cache_site = self._nodes[cache_node].site if cache_node else ""
        record.placed, record.prefilled = True, False
        tokens = record.prefill_tokens = record.input_tokens - cached
        record.prefill_queue_s = prefill.queued_s
        record.prefill_cost_s = self._cost[prefill.site](tokens)
        prefill.queued_requests += 1
        prefill.queued_tokens += tokens
        prefill.queued_s += record.prefill_cost_s
        decode.assigned_requests += 1
        order = Prefill(
            record.request_id,
            record.attempts,
            record.input_tokens,
            cached,
            record.output_tokens_asked,
            decode_node,
            record.block_ids,
            cache_node,
        )
        out.append((prefill_node, order))

    def _decide(self, record: Record, view: RequestView) -> Decision | Reject:
        """The policy's decision; the fallback's when it raises, is too slow or names a node that cannot take it."""
        try:
            decision = self._ask(self.policy, view, self.view)
            problem = judge.problem(decision, view, self._serving, self._nodes)
        except Exception as error:  # a policy is somebody else's code: whatever it raises must not stop the testbed
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return decision
        record.policy_error = problem
        self._count(problem.split(":", 1)[0])
        decision = self._fallback.route(view, self.view)
        if isinstance(decision, Decision):
            return decision._replace(reason=f"fallback: {decision.reason}")
        return decision

    def _on_prefilled(self, now_s: float, event: Prefilled, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        if record is None or record.prefilled:
            return
        self._leave_prefill(record)
        record.prefill_start_s, record.prefill_end_s = event.start_s, event.end_s
        record.kv_bytes, record.cached_tokens = event.kv_bytes, event.cached_tokens
        record.fetched_bytes = event.fetched_bytes
        if record.status:
            self._complete(record, out)

    def _on_admitted(self, now_s: float, event: Admitted, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        if record is None or record.admitted:
            return
        record.landed_s, record.admitted_s = event.landed_s, event.admitted_s
        self.waiting -= 1
        self._nodes[record.decode_node].decoding_requests += 1
        if record.prefill_site == PRFAAS and record.prefilled:
            self.observed.link.transfer(record.prefill_end_s, event.landed_s, record.kv_bytes)

    def _on_finished(self, now_s: float, event: Finished, out: list[Command]) -> None:
        record = self._current(event.request_id, event.attempt)
        if record is None or record.status:
            return
        record.finished_s, record.output_tokens, record.status = event.finished_s, event.tokens, "ok"
        record.finish_reason = event.reason
        self.observed.answered(event.tokens)
        prefill = self._nodes[record.prefill_node]
        # A short answer may end before its prefill node's own word is here: then that completes it.
        if record.prefilled or not prefill.alive or prefill.silent:
            self._complete(record, out)

    def _complete(self, record: Record, out: list[Command]) -> None:
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
        elif record.attempts >= self.rules.max_attempts:
            self._fail(record, kind, f"{why}; given up after {record.attempts} attempts", 503, out)
        else:
            self._leave_nodes(record)
            record.prefill_start_s = record.prefill_end_s = math.nan
            record.kv_bytes = record.cached_tokens = record.fetched_bytes = 0
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
        if not record.admitted:
            self.waiting -= 1
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
        node.queued_tokens -= record.prefill_tokens
        node.queued_s = node.queued_s - record.prefill_cost_s if node.queued_requests else 0.0

    def _current(self, request_id: str, attempt: int) -> Record | None:
        record = self.live.get(request_id)
        return record if record is not None and record.attempts == attempt else None

    # the nodes
    def _on_node_up(self, now_s: float, event: NodeUp, out: list[Command]) -> None:
        if self._nodes[event.node].alive:
            self._on_node_lost(now_s, NodeLost(event.node, "it began anew"), out)
        self.fleet.up(now_s, event)

    def _on_node_lost(self, now_s: float, event: NodeLost, out: list[Command]) -> None:
        if self.fleet.lost(event):
            node = self._nodes[event.node]
            self.copies.without(event.node, "was lost", out)
            self._retry_at(now_s, node, f"node {event.node} was lost ({event.reason})", out, lost=True)

    def _retry_at(self, now_s: float, node: NodeView, why: str, out: list[Command], *, lost: bool) -> None:
        """Try again elsewhere what a node no longer serves. lost: it is gone, with the answers it was sending."""
        for record in list(self.live.values()):
            if record.status:  # its answer has ended: whatever is still to be told of it, nobody may
                if node.name in (record.prefill_node, record.decode_node):
                    self._complete(record, out)
            elif record.prefill_node == node.name and record.admitted:
                if lost and not record.prefilled:
                    self._leave_prefill(record)
            elif node.name in (record.prefill_node, record.decode_node) and (lost or not record.admitted):
                # Its KV may have landed whole, but nobody might ever say so: a second prefill is safe, waiting is not.
                self._again(now_s, record, "node_lost", why, out)

    def _on_cache_changed(self, now_s: float, event: CacheChanged, out: list[Command]) -> None:
        self.fleet.cache_changed(event)

    def _on_brought(self, now_s: float, event: Brought, out: list[Command]) -> None:
        self.copies.ended(event)

    def _on_telemetry(self, now_s: float, event: Telemetry, out: list[Command]) -> None:
        self.fleet.told(now_s, event)

    # looking around
    def _on_tick(self, now_s: float, event: Tick, out: list[Command]) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_s:
            record = deadlines.popleft()[1]
            if self.live.get(record.request_id) is record and not record.admitted:
                self._cancel(record, out)
                message = f"no first token within {self.rules.deadline_s:g} s"
                self._fail(record, "deadline", message, 504, out)
        if now_s < self._tick_due_s:
            return
        self._tick_due_s = now_s + self.rules.tick_s
        for node, why in self.fleet.find_silent(now_s):  # nothing is left waiting for one
            self.copies.without(node.name, "is silent", out)
            self._retry_at(now_s, node, f"node {node.name} is silent: {why}", out, lost=False)
        self.fleet.observe(now_s)
        self._convert(out)
        try:
            actions = list(self._tick(self.policy, self.view))
        except Exception as error:  # a policy is somebody else's code
            self._count(f"tick: {type(error).__name__}")
            return
        for action in actions:
            try:
                self._do(now_s, action, out)
            except Exception as error:  # one that cannot be done says nothing of the others
                self._count(f"action: {type(error).__name__}")
                self.fleet.refused(action, error)

    def _count(self, kind: str) -> None:
        """A failure of the policy's."""
        self.policy_errors[kind] = self.policy_errors.get(kind, 0) + 1

    def _do(self, now_s: float, action: Action, out: list[Command]) -> None:
        """What the policy asks for."""
        if isinstance(action, Note):
            self.fleet.note(action.kind, "", action.before, action.after, action.trigger)
        elif isinstance(action, SetRole):
            self.fleet.change_role(action)
        elif isinstance(action, Replicate):
            self.copies.begin(action, out)
        elif isinstance(action, Recall):
            self._recall(now_s, action, out)
        else:
            raise TypeError(f"not an action: {type(action).__name__}")

    def _away(self) -> list[Away]:
        """The requests at the remote site that have no first token yet and another try left."""
        now_s = self.view.now_s
        return [
            Away(
                record.request_id,
                record.input_tokens,
                record.prefill_tokens,
                record.l_pd,
                record.prefill_node,
                record.kv_bytes,
                now_s - record.route_s,
            )
            for record in self.live.values()
            if self._recallable(record)
        ]

    def _recallable(self, record: Record) -> bool:
        here = record.placed and record.prefill_site == PRFAAS and not record.admitted
        return here and record.attempts < self.rules.max_attempts

    def _recall(self, now_s: float, action: Recall, out: list[Command]) -> None:
        record = self.live.get(action.request_id)
        if record is None or not self._recallable(record):
            raise ValueError(f"request {action.request_id} is not one that can be recalled")
        self.fleet.note("recall", record.prefill_node, record.request_id, "", action.trigger)
        self._again(now_s, record, "recalled", action.trigger, out)

    def _convert(self, out: list[Command]) -> None:
        """The node that is to change its role: once nothing of a request is on it any more, it may."""
        conversion = self.fleet.conversion
        if conversion is None or conversion.sent:
            return
        name = conversion.node
        for record in self.live.values():
            if record.placed and (record.decode_node == name or (record.prefill_node == name and not record.admitted)):
                return
            if record.cache_node == name and not record.prefilled:  # it may still ask for its prefix
                return
        self.copies.without(name, "changes its role", out)
        self.fleet.drained(conversion)
        out.append((name, Convert(conversion.role, self.rules.reload_s)))

    def _on_policy_set(self, now_s: float, event: PolicySet, out: list[Command]) -> None:
        note = self.fleet.note
        note("policy", "", type(self._before).__name__, event.name, "asked for")
        was, now = (getattr(policy, "threshold_tokens", None) for policy in (self._before, self.policy))
        if isinstance(was, Real) and isinstance(now, Real) and was != now:
            note("threshold", "", float(was), float(now), f"policy {event.name}")

    def _on_disturbed(self, now_s: float, event: Disturbed, out: list[Command]) -> None:
        before, after = (event.what, "none") if event.healed else ("none", event.what)
        self.fleet.note("fault", event.node, before, after, "by hand")
