"""A session around a real control, with one node of each kind, whose workers a test plays."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from emulator.clock import Clock
from emulator.messages import Admitted, AnyMessage, Finished, Prefilled
from testbed.control import Control, NodeSpec, Rules
from testbed.openai_api import Ask
from testbed.scenario import Scenario, load
from testbed.scheduler.api import Decision, RequestView, Setup, SystemView
from testbed.session import Session
from testbed.told import Told

SCENARIO: Scenario = load("smoke").only("prfaas-pd")
FLEET = (
    NodeSpec("prfaas-0", "prfaas", "prefill", 0),
    NodeSpec("pd-p-0", "pd", "prefill", 20),
    NodeSpec("pd-d-0", "pd", "decode", 20),
)
ROLES = {spec.name: spec.role for spec in FLEET}


class LongAway:
    """A policy: what is longer than a thousand tokens goes away."""

    threshold_tokens = 1000.0

    def start(self, setup: Setup) -> None:
        """Nothing to start."""

    def route(self, request: RequestView, view: SystemView) -> Decision:
        away = request.input_tokens > self.threshold_tokens
        return Decision("prfaas-0" if away else "pd-p-0", "pd-d-0", "long" if away else "short", 1000.0)


class Played:
    """`session`, at model second 0 now, and what its workers say."""

    def __init__(self, folder: Path, name: str, before: Session | None = None) -> None:
        control = Control(
            FLEET, {"prfaas": _cost, "pd": _cost}, 16e9, LongAway(), LongAway(), Rules(tick_s=1e6, telemetry_s=1e6)
        )
        clock = Clock(time.monotonic_ns(), SCENARIO.scale.time_scale)
        told = Told("long-away", {}, {"values": [1], "weights": [1]})
        self.session = Session(name, clock, control, told, self._send, folder / "loads" / name, before)
        self.sent: list[tuple[str, AnyMessage]] = []
        for spec in FLEET:
            self.session.node_up(spec.name, spec.role)

    def _send(self, node: str, message: AnyMessage) -> bool:
        self.sent.append((node, message))
        return True

    def first_token(self, request_id: str, tokens: int, *, ttft_s: float, cached: int = 0) -> None:
        """A request that came `ttft_s` model seconds ago gets its first token now."""
        session = self.session
        session.arrive(request_id, Ask("prfaas", False, tokens, 4, True, False))
        now_s = session.clock.now_s()
        record = session.control.live[request_id]
        record.arrive_s = now_s - ttft_s
        session.node_message(record.prefill_node, Prefilled(request_id, 1, now_s, now_s, 10, cached))
        session.node_message("pd-d-0", Admitted(request_id, 1, now_s, now_s))

    def finish(self, request_id: str) -> None:
        now_s = self.session.clock.now_s()
        self.session.node_message("pd-d-0", Finished(request_id, 1, now_s, now_s, 4))


def _cost(tokens: float) -> float:
    return tokens * 1e-4


@asynccontextmanager
async def played(folder: Path, name: str = "20260101-000000-abcdef") -> AsyncIterator[Played]:
    """One, closed afterwards."""
    made = Played(folder, name)
    try:
        yield made
    finally:
        made.session.close()
