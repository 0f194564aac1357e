"""The link of a running testbed, from outside: show it, change it under traffic, measure what it carries.

Rates and delays are asked in model units (what the scenario speaks) and shown in both. The wall's rates are model x
byte_scale x time_scale, its delays model / time_scale.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson

from netem.binomial import interval
from netem.cells import first_second_bound_bits
from netem.link import DIRECTIONS, LinkError, OutageKind, expected_goodput_bps
from netem.plan import PROBE_FLOWS
from netem.topology import ADDRESSES
from testbed.launch import client
from testbed.launch.client import AsyncUnixClient
from testbed.launch.state import StateDir, TestbedError
from testbed.scenario import Scenario

PROBE_PORT: Final = 7424
RTT_FIGURES: Final = ("min", "p50", "p99", "jitter")
SLOW_START_TRIPS: Final = 120
"""Of a round trip; a measurement lasts that much longer, and leaves out its first third."""
TRAIN_PACKETS: Final = 5000
"""Of a measurement, at as many a second: 4 Mbit/s, or half of what a slower link carries."""
TRAIN_BYTES: Final = 106
"""Of a packet of the train, on the wire."""
TOLERANCE: Final = 0.05
"""Measured goodput this far from the expected one, relatively, and the link is not what was asked for."""


def show(scenario: Scenario, state: StateDir) -> dict[str, Any]:
    """Per direction: what was asked and kept (model and wall units), when it was applied, and the counters."""
    answer = client.agent(state).get("/link")
    return {direction: _described(scenario, answer[direction]) for direction in DIRECTIONS}


def change(
    scenario: Scenario,
    state: StateDir,
    direction: str | None,
    *,
    rate_bps: float | None = None,
    delay_s: float | None = None,
    jitter_s: float | None = None,
    loss: float | None = None,
    outage: OutageKind | Literal["none"] | None = None,
) -> dict[str, Any]:
    """Change one direction or both while traffic flows, what is given only; what the kernel then had.

    Model bits/s and seconds, one-way; loss is a fraction; the outage "none" ends the one there is. What a load or a
    fault lays over the link meanwhile stays over it. Raises TestbedError for what cannot be had.
    """
    scale = scenario.scale
    asked = {
        "rate_bps": None if rate_bps is None else scale.wall_bps(rate_bps),
        "delay_s": None if delay_s is None else scale.wall_s(delay_s),
        "jitter_s": None if jitter_s is None else scale.wall_s(jitter_s),
        "loss": loss,
    }
    wall: dict[str, Any] = {field: value for field, value in asked.items() if value is not None}
    if outage is not None:
        wall["outage"] = None if outage == "none" else outage
    answer = client.agent(state).put("/link", wall if direction is None else {direction: wall})
    return {direction: _described(scenario, answer[direction]) for direction in DIRECTIONS}


def verify(
    scenario: Scenario, state: StateDir, *, seconds: float = 2.0, connections: int | None = None
) -> dict[str, Any]:
    """Measure both ways, and compare: TCP goodput with what the asked rate must give (0.956 of it), its first wall
    second with rate and bucket, the idle round trip with both delays, and of a train of datagrams what was lost and
    overtaken.

    Where loss is asked for, goodput is the congestion control's and not judged; round trip, loss and order are judged
    where a delay line makes them. Of a rate alone they are told: a busy machine loses a datagram now and then.
    Returns {"ok", "directions": {direction: {asked_bps, expected_bps, measured_bps, error, ...}}}; model units, and
    the wall's beside them.
    """
    try:
        return asyncio.run(_verify(scenario, state, seconds, connections or scenario.transport.connections))
    except asyncio.CancelledError:  # Ctrl-C before asyncio counts it as one: its handler is there a moment earlier
        raise KeyboardInterrupt from None


async def _verify(scenario: Scenario, state: StateDir, seconds: float, connections: int) -> dict[str, Any]:
    supervisor = AsyncUnixClient(state.supervisor_sock, timeout_s=seconds * 2 + 60)
    link = await AsyncUnixClient(state.agent_sock).get("/link")
    asked_of = {direction: link[direction]["asked"] for direction in DIRECTIONS}
    rtt_s = sum(asked["delay_s"] for asked in asked_of.values())
    rtt_slack_s = 0.0005 + 0.05 * rtt_s + 2 * sum(asked["jitter_s"] for asked in asked_of.values())
    lossless = not any(asked["loss"] for asked in asked_of.values())
    far = any(asked[what] for asked in asked_of.values() for what in ("delay_s", "jitter_s", "loss"))
    seconds += SLOW_START_TRIPS * rtt_s
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
            argv += [
                "--connections",
                str(connections),
                "--packets",
                str(TRAIN_PACKETS),
                "--packets-per-s",
                str(_packets_per_s(asked_of[direction])),
                "--json",
                *(["--reverse"] if direction == "to_prfaas" else []),
            ]
            found = await _measured(supervisor, argv, seconds, serving)
            asked, loss = asked_of[direction]["rate_bps"], asked_of[direction]["loss"]
            gets, bound_bits = _attainable(asked_of[direction], connections)
            expected = expected_goodput_bps(gets, asked_of[direction]["mtu"])
            error = found["goodput_bps"] / expected - 1
            train = found["train"]
            first_bps = found["first_second_bps"] * gets / expected  # with its headers, as the bound is
            loss_low, loss_high = interval(train["lost"], train["sent"])
            sound = {
                "goodput": not lossless or abs(error) <= TOLERANCE,
                "rtt": not far or abs(found["rtt_p50_s"] - rtt_s) <= rtt_slack_s,
                "loss": not far or loss_low <= loss <= loss_high,
                "first second": first_bps <= bound_bits,
                "order": not far or train["reordered"] == 0,
            }
            out[direction] = {
                "asked_bps": scenario.scale.model_bps(asked),
                "expected_bps": scenario.scale.model_bps(expected),
                "measured_bps": scenario.scale.model_bps(found["goodput_bps"]),
                "error": error,
                "ok": all(sound.values()),
                "wrong": [what for what, is_sound in sound.items() if not is_sound],
                "wall": {"asked_bps": asked, "expected_bps": expected, "measured_bps": found["goodput_bps"]},
                "asked_rtt_s": rtt_s * scenario.scale.time_scale,
                **{f"rtt_{which}_s": found[f"rtt_{which}_s"] * scenario.scale.time_scale for which in RTT_FIGURES},
                "first_second_bps": scenario.scale.model_bps(first_bps),
                "first_second_bound_bps": scenario.scale.model_bps(bound_bits),
                "asked_loss": loss,
                "loss_bounds": [loss_low, loss_high],
                "train": train,
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


def _attainable(asked: Mapping[str, Any], connections: int) -> tuple[float, float]:
    """(bits/s, bits in the first second) that the probe's connections get, headers too: link or caps."""
    rate_bps, cap_bps = asked["rate_bps"], asked["per_flow_bps"]
    bound_bits = first_second_bound_bits(rate_bps)
    if cap_bps is None:
        return rate_bps, bound_bits
    told_apart = min(connections, len(PROBE_FLOWS))
    return min(rate_bps, told_apart * cap_bps), min(bound_bits, told_apart * first_second_bound_bits(cap_bps))


def _packets_per_s(asked: Mapping[str, Any]) -> float:
    """Of the train, so that it fits the link (and the cap a flow, which all datagrams share)."""
    rate_bps = min(asked["rate_bps"], asked["per_flow_bps"] or asked["rate_bps"])
    return float(min(TRAIN_PACKETS, rate_bps / 2 / (8 * TRAIN_BYTES)))


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
    asked, scale = one["asked"], scenario.scale
    rate_bps, delay_s, jitter_s = asked["rate_bps"], asked["delay_s"], asked["jitter_s"]
    expected_bps = expected_goodput_bps(rate_bps, asked["mtu"])
    return {
        "interface": one["interface"],
        "rate_bps": scale.model_bps(rate_bps),
        "delay_s": delay_s * scale.time_scale,
        "jitter_s": jitter_s * scale.time_scale,
        "loss": asked["loss"],
        "outage": asked["outage"],
        "per_flow_bps": None if asked["per_flow_bps"] is None else scale.model_bps(asked["per_flow_bps"]),
        "delay_by": one["delay_by"],
        "layers": one["layers"],
        "wall": {
            "rate_bps": rate_bps,
            "expected_goodput_bps": expected_bps,
            "delay_s": delay_s,
            "jitter_s": jitter_s,
        },
        "kept": one["kept"],
        "outage_kept": one["outage_kept"],
        "applied": one["applied"],
        "counters": one["counters"],
    }
