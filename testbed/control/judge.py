"""Whether a policy's decision can be carried out, and what is wrong with it when not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from testbed.scheduler.api import Decision, NodeView, Reject, RequestView, Role


def problem(decision: object, request: RequestView, serving: Mapping[str, Role], nodes: Mapping[str, NodeView]) -> str:
    """What is wrong, a short kind, mostly with a colon and the details; empty for a decision that can be carried out.

    serving: the role of each node that takes requests.
    """
    if type(decision) is not Decision:
        return _no_decision(decision)
    threshold = decision.threshold_tokens
    if type(threshold) is not float and threshold is not None and not isinstance(threshold, Real):
        return f"bad threshold_tokens: {threshold!r}"
    prefill, decode = serving.get(decision.prefill_node), serving.get(decision.decode_node)
    cached = decision.cached_tokens
    if prefill == "prefill" and decode == "decode" and type(cached) is int and not cached:
        return ""
    if found := _bad_cache(decision, request):
        return found
    for name, role in ((decision.prefill_node, "prefill"), (decision.decode_node, "decode")):
        node = nodes.get(name)
        if node is None:
            return f"unknown node: {name}"
        if not node.alive:
            return f"dead node: {name}"
        if name not in serving:
            return f"{'draining' if node.draining else 'silent'} node: {name}"
        if node.role != role:
            return f"wrong role: {name} is a {node.role} node"
    return ""


def _bad_cache(decision: Decision, request: RequestView) -> str:
    cached, source = decision.cached_tokens, decision.cache_node
    if type(cached) is not int or not 0 <= cached < request.input_tokens:
        return f"bad cached_tokens: {cached!r}"
    if cached > request.hits.get(source or decision.prefill_node, 0):
        return f"no such prefix: {cached} tokens at {source or decision.prefill_node}"
    return ""


def _no_decision(decision: object) -> str:
    if isinstance(decision, Reject):
        return "" if 0 <= decision.retry_after_s < math.inf else f"bad retry_after_s: {decision.retry_after_s!r}"
    return f"not a decision: {type(decision).__name__}"
