"""A layer played: its steps in their time, and its token bucket by what the link really sent.

The agent does the carrying (`Player`); here is when, and what is told of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from netem.layers import Layer, Meters, laid_over
from netem.link import LinkError, LinkState
from netem.log import Log
from netem.tc import Counters

_log = Log("playing")


class Player(Protocol):
    """What `netem.agent.Agent` does for a layer. `leaving`: no step is made any more."""

    leaving: asyncio.Event

    async def say(self, layer: Layer, state: Mapping[str, Any]) -> dict[str, tuple[LinkState, LinkState, int]]: ...
    async def counters(self) -> dict[str, Counters]: ...


async def play(player: Player, layer: Layer) -> AsyncGenerator[dict[str, Any]]:
    """Rows as POST /layers answers them, each after its step was made, until the player leaves or nobody asks for more.

    A step that cannot be had is told and left out; the next one comes all the same. What a token bucket sets is tried
    again with its next look. A step that is late is made late, and those behind it one after another.
    """
    spec = layer.spec
    steps = iter(spec.steps)
    step = next(steps, None)
    says: Mapping[str, Any] = {}
    meters: Meters | None = None
    owed = ""  # why the kernel did not take a token bucket's rate
    while True:
        look_s = math.inf if spec.bucket is None else meters.next_s if meters is not None else 0.0
        at_s = min(look_s, math.inf if step is None else step.at_s)
        if await _left(player, spec.t0_ns, at_s):
            return
        if step is not None and step.at_s <= look_s:
            says, step = step.state, next(steps, None)
        else:
            counted = await player.counters()
            sent_bytes = {way: now.kv.sent_bytes for way, now in counted.items()}
            if meters is None:
                meters = Meters(spec, sent_bytes)
            elif not meters.look(max(now.t_ns for now in counted.values()), sent_bytes) and not owed:
                continue
        said = laid_over(says, meters.says) if meters is not None else says
        try:
            # Not to be left half made when the connection closes: what remains is laid over a state that is known.
            changed = await asyncio.shield(player.say(layer, said))
        except LinkError as refused:
            if str(refused) != owed:
                _log.error("step left out", layer=spec.name, at_s=at_s, reason=refused)
                yield {"layer": spec.name, "at_s": at_s, "error": str(refused)}
            owed = str(refused) if meters is not None else ""
            continue
        owed = ""
        for way, (before, now, applied_ns) in changed.items():
            yield {
                "layer": spec.name,
                "direction": way,
                "at_s": at_s,
                "t_applied_ns": applied_ns,
                "late_s": (applied_ns - spec.t0_ns) * 1e-9 - at_s,
                "before": asdict(before),
                "state": asdict(now),
            }


async def _left(player: Player, t0_ns: int, at_s: float) -> bool:
    """Wait until `at_s` after t0; whether the player left before."""
    wait_s = None if at_s == math.inf else max(0.0, at_s - (time.monotonic_ns() - t0_ns) * 1e-9)
    if wait_s == 0.0:
        return player.leaving.is_set()
    try:
        await asyncio.wait_for(player.leaving.wait(), wait_s)
        return True
    except TimeoutError:
        return False
