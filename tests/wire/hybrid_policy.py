"""A policy for `hybrid_exact`: anywhere goes, prefixes come from wherever they are held, and local nodes change roles.

It decides by the request's id alone, so that every way that there is gets used, and none because it is good.
"""

from __future__ import annotations

import zlib

from testbed.scheduler.api import Decision, Reject, RequestView, SetRole, Setup, SystemView

EVERY_S = 6.0
"""Model seconds between two changes of role."""


class Anywhere:
    def start(self, setup: Setup) -> None:
        self.next_s = EVERY_S

    def route(self, request: RequestView, view: SystemView) -> Decision | Reject:
        draw = zlib.crc32(f"{request.request_id} {request.attempt}".encode())
        prefill = [*view.prefill("prfaas"), *view.prefill("pd")]
        decode = view.decode()
        if not prefill or not decode:
            return Reject("nobody is there")
        node = prefill[draw % len(prefill)].name
        to = decode[draw // 7 % len(decode)].name
        holders = sorted(request.hits.items(), key=lambda one: -one[1])
        if not holders or draw % 5 == 0:
            return Decision(node, to, "anew")
        holder, tokens = holders[draw // 3 % len(holders)]
        if request.hits.get(node, 0) >= tokens:
            return Decision(node, to, "held", cached_tokens=request.hits[node])
        return Decision(node, to, "fetched", cached_tokens=tokens, cache_node=holder)

    def tick(self, view: SystemView) -> list[SetRole]:
        if view.now_s < self.next_s:
            return []
        local = [node for node in view.nodes.values() if node.site == "pd" and node.alive]
        prefill, decode = view.prefill("pd"), view.decode()
        self.next_s = view.now_s + EVERY_S
        if len(prefill) + len(decode) < len(local):  # somebody is on the way already
            return []
        if len(prefill) > 1:
            return [SetRole(prefill[0].name, "decode", "its turn")]
        return [SetRole(decode[0].name, "prefill", "its turn")] if len(decode) > 1 else []
