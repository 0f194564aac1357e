"""The link of a running testbed, from outside: show it, change its rate under traffic, measure what it carries.

Rates are asked in model units (what the scenario speaks) and shown in both. The wall's are model x byte_scale x
time_scale.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final

import orjson

from netem.link import DIRECTIONS, LinkError, expected_goodput_bps
from netem.topology import ADDRESSES
from testbed.launch import client
from testbed.launch.client import AsyncUnixClient
from testbed.launch.state import StateDir, TestbedError
from testbed.scenario import Scenario

PROBE_PORT: Final = 7424
TOLERANCE: Final = 0.05
"""Measured goodput this far from the expected one, relatively, and the link is not what was asked for."""


def show(scenario: Scenario, state: StateDir) -> dict[str, Any]:
    """Per direction: rate asked and kept (model and wall bits/s), when it was applied, and the counters."""
    answer = client.agent(state).get("/link")
    return {direction: _described(scenario, answer[direction]) for direction in DIRECTIONS}


def set_rate(scenario: Scenario, state: StateDir, rate_bps: float, direction: str | None) -> dict[str, Any]:
    """Change the rate (model bits/s) of one direction or both, while traffic flows; what the kernel then had."""
    wall = {"rate_bps": scenario.scale.wall_bps(rate_bps)}
    answer = client.agent(state).put("/link", wall if direction is None else {direction: wall})
    return {direction: _described(scenario, answer[direction]) for direction in DIRECTIONS}


def verify(
    scenario: Scenario, state: StateDir, *, seconds: float = 2.0, connections: int | None = None
) -> dict[str, Any]:
    """Measure TCP goodput both ways and compare it with what the asked rate must give (0.956 of it).

    Returns {"ok", "directions": {direction: {asked_bps, expected_bps, measured_bps, error, ...}}}; model bits/s, and
    the wall's beside them.
    """
    return asyncio.run(_verify(scenario, state, seconds, connections or scenario.transport.connections))


async def _verify(scenario: Scenario, state: StateDir, seconds: float, connections: int) -> dict[str, Any]:
    supervisor = AsyncUnixClient(state.supervisor_sock, timeout_s=seconds * 2 + 60)
    link = await AsyncUnixClient(state.agent_sock).get("/link")
    probe = [sys.executable, "-m", "netem.probe"]
    serve = {
        "site": "pd",
        "argv": [*probe, "serve", "--address", ADDRESSES["pd"], "--port", str(PROBE_PORT)],
        "timeout_s": seconds * 2 + 50,
    }
    serving = asyncio.create_task(supervisor.post("/run", serve))
    try:
        out: dict[str, Any] = {}
        for direction in DIRECTIONS:
            argv = [*probe, "measure", "--host", ADDRESSES["pd"], "--port", str(PROBE_PORT), "--seconds", str(seconds)]
            argv += ["--connections", str(connections), "--json", *(["--reverse"] if direction == "to_prfaas" else [])]
            found = await _measured(supervisor, argv, seconds, serving)
            asked = link[direction]["asked"]["rate_bps"]
            expected = expected_goodput_bps(asked, link[direction]["asked"]["mtu"])
            error = found["goodput_bps"] / expected - 1
            out[direction] = {
                "asked_bps": scenario.scale.model_bps(asked),
                "expected_bps": scenario.scale.model_bps(expected),
                "measured_bps": scenario.scale.model_bps(found["goodput_bps"]),
                "error": error,
                "ok": abs(error) <= TOLERANCE,
                "wall": {"asked_bps": asked, "expected_bps": expected, "measured_bps": found["goodput_bps"]},
                "rtt_p50_s": found["rtt_p50_s"] * scenario.scale.time_scale,
                "window_s": found["window_s"],
                "connections": connections,
                "congestion_control": found["congestion_control"],
            }
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    result = {
        "ok": all(one["ok"] for one in out.values()),
        "tolerance": TOLERANCE,
        "taken_ns": time.monotonic_ns(),
        "directions": out,
    }
    (state.root / "link-verify.json").write_bytes(orjson.dumps(result))
    return result


async def _measured(
    supervisor: AsyncUnixClient, argv: list[str], seconds: float, serving: asyncio.Task[Any]
) -> dict[str, Any]:
    """Run one measurement, waiting for the server to come up."""
    deadline = asyncio.get_running_loop().time() + 15
    while True:
        answer = await supervisor.post("/run", {"site": "prfaas", "argv": argv, "timeout_s": seconds + 40})
        if answer["rc"] == 0:
            found: dict[str, Any] = orjson.loads(answer["stdout"])
            return found
        if serving.done():
            raise TestbedError(f"the probe's server ended: {serving.result()['stderr'].strip()}")
        if asyncio.get_running_loop().time() > deadline:
            raise LinkError(answer["stderr"].strip().removeprefix("error: ") or "the probe gave no answer")
        await asyncio.sleep(0.2)


def last_verified(state: StateDir) -> dict[str, Any] | None:
    """The latest `verify` of this testbed, for a report; None when there was none."""
    try:
        found: dict[str, Any] = orjson.loads((state.root / "link-verify.json").read_bytes())
        return found
    except (OSError, orjson.JSONDecodeError):
        return None


def _described(scenario: Scenario, one: dict[str, Any]) -> dict[str, Any]:
    asked = one["asked"]["rate_bps"]
    return {
        "interface": one["interface"],
        "rate_bps": scenario.scale.model_bps(asked),
        "wall": {"rate_bps": asked, "expected_goodput_bps": expected_goodput_bps(asked, one["asked"]["mtu"])},
        "kept": one["kept"],
        "applied": one["applied"],
        "counters": one["counters"],
    }
