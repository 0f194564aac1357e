"""From a scenario to a testbed's processes: which workers, where, how configured; and the link in wall units.

This is the one place where a scenario becomes the workers' ports, their configurations and the supervisor's stages.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec

from emulator.worker import Config as WorkerConfig
from emulator.worker import Peer
from netem.link import CONTROL_PORTS, MAX_RATE_BPS, MIN_RATE_BPS, LinkError, LinkState
from netem.plan import FLOWS
from netem.topology import ADDRESSES, WAN_INTERFACES
from testbed.assemble import instances
from testbed.crossing import SENDS
from testbed.gateway import Config as GatewayConfig
from testbed.gateway import Node
from testbed.launch.spec import LaunchSpec, ProcessSpec
from testbed.launch.state import StateDir
from testbed.link_schedule import bucket_of, link_changes
from testbed.scenario import Deployment, Scenario, ScenarioError
from testbed.scenario_model import check_installed, check_memory, check_slots
from testbed.scheduler.api import PD, Role, Site

FIRST_CONTROL_PORT = CONTROL_PORTS[0]  # the shaper knows the control class by them
FIRST_METRICS_PORT = FIRST_CONTROL_PORT + 64  # of the control class too
FIRST_DATA_PORT = FIRST_CONTROL_PORT + 128
MOST_NODES = FIRST_METRICS_PORT - FIRST_CONTROL_PORT
ASKED = ("rate_bps", "delay_s", "jitter_s", "loss", "per_flow_bps")  # of a LinkState, by a scenario
SAMPLE_S = 0.25  # wall seconds between samples of the link's counters


def link_rate_bps(scenario: Scenario) -> float:
    """The nominal link on this machine's wire. Raises ScenarioError for a rate the kernel cannot shape."""
    return _wall_bps(scenario, "link.rate_bps", scenario.link.rate_bps)


def link_state(scenario: Scenario) -> LinkState:
    """What the shaper's agent is asked for at the start, wall units. Raises ScenarioError for what cannot be had."""
    link, scale = scenario.link, scenario.scale
    rate_bps, delay_s, jitter_s = link_rate_bps(scenario), scale.wall_s(link.delay_s), scale.wall_s(link.jitter_s)
    cap_bps = None if link.per_flow_bps is None else scale.wall_bps(link.per_flow_bps)
    try:
        return LinkState(rate_bps, delay_s=delay_s, jitter_s=jitter_s, loss=link.loss, per_flow_bps=cap_bps)
    except LinkError as refused:
        raise ScenarioError(
            f"scenario {scenario.name}: on this machine's wire (model seconds / scale.time_scale = "
            f"{scale.time_scale:g}) link.{refused}"
        ) from None


def check_link(scenario: Scenario) -> None:
    """Raises ScenarioError for what a scenario asks of the link during a load and the wire cannot do, LinkError for a
    schedule that is none."""
    if scenario.link.per_flow_bps is not None:
        _wall_bps(scenario, "link.per_flow_bps", scenario.link.per_flow_bps)
        if scenario.link.cross_traffic:
            raise ScenarioError(
                f"scenario {scenario.name}: link.per_flow_bps and link.cross_traffic: on the wire all that is not KV "
                "shares one flow's cap; leave one of them out, or take prfaas simulate"
            )
    if (bucket := bucket_of(scenario)) is not None:
        for name, rate_bps in (("peak_bps", bucket.peak_bps), ("base_bps", bucket.base_bps)):
            _wall_bps(scenario, f"link.schedule.{name}", rate_bps)
    for step in link_changes(scenario):
        if step.outage is None:
            _wall_bps(scenario, f"the link's rate from {step.at_s:g} s on ({step.trigger})", step.rate_bps)


def _wall_bps(scenario: Scenario, what: str, model_bps: float) -> float:
    scale = scenario.scale
    wall_bps = scale.wall_bps(model_bps)
    if not MIN_RATE_BPS <= wall_bps <= MAX_RATE_BPS:
        raise ScenarioError(
            f"scenario {scenario.name}: {what} = {model_bps:g} x scale.byte_scale = "
            f"{scale.byte_scale:g} x scale.time_scale = {scale.time_scale:g} is {wall_bps:g} bits/s on this machine's "
            f"wire; {MIN_RATE_BPS:g} to {MAX_RATE_BPS:g} can be shaped: "
            f"{'raise' if wall_bps < MIN_RATE_BPS else 'lower'} one of the three"
        )
    return wall_bps


def launch_spec(
    scenario: Scenario, deployment: Deployment, *, port: int, state: StateDir, from_image: bool = False
) -> LaunchSpec:
    """What the launcher starts for one deployment of a scenario. from_image: with what an image has installed, so that
    a model's packages need not be here.

    The fingerprint is that of what has to be started, not of the load: a second `up` finds the first. The data plane's
    secret is new each time.
    """
    check_link(scenario)
    secret = secrets.token_hex(16)
    nodes = instances(deployment)
    if len(nodes) > MOST_NODES:
        raise ScenarioError(
            f"scenario {scenario.name}: deployment {deployment.name}: {len(nodes)} instances; this machine's wire has "
            f"ports for {MOST_NODES}: take a smaller fleet, or prfaas simulate"
        )
    if scenario.backend == "hybrid":
        decode = scenario.profile(deployment, "pd")
        assert decode is not None
        check_slots(scenario.name, deployment.name, decode.decode_slots)
        if not from_image:
            check_installed(scenario)
        check_memory(scenario, len(nodes))
    ports = {name: (FIRST_CONTROL_PORT + i, FIRST_DATA_PORT + i) for i, (name, _, _) in enumerate(nodes)}
    first_flows = _first_flows(scenario, nodes)
    processes = [
        _agent(scenario, state, _flows(scenario, first_flows)),
        *(_rivals(site, state) for site in SENDS if scenario.link.cross_traffic),
    ]
    for i, (name, site, role) in enumerate(nodes):
        peers = {
            other: Peer(ADDRESSES[its_site], *ports[other], its_role, first_flows.get((name, other)))
            for other, its_site, its_role in nodes
            if other != name and _exchange_kv(scenario, site, its_site)
        }
        config = WorkerConfig(
            name=name,
            site=site,
            role=role,
            host=ADDRESSES[site],
            control_port=ports[name][0],
            data_port=ports[name][1],
            metrics_port=FIRST_METRICS_PORT + i,
            secret=secret,
            ready_file=str(state.ready_file(name)),
            peers=peers,
            dials=tuple(other for other, _, _ in nodes[i + 1 :] if other in peers),
            model=scenario.model.spec(i) if scenario.backend == "hybrid" else None,
            **_timing(scenario, deployment, site),
        )
        processes.append(_process(name, site, role, "emulator.worker", config, stage=1 if role == "decode" else 2))
    processes.append(_gateway(scenario, deployment, nodes, ports, secret, state))
    return LaunchSpec(
        processes=tuple(processes),
        topology={"congestion_control": scenario.link.congestion_control},
        port=port,
        scenario=scenario.name,
        fingerprint=f"{scenario.only(deployment.name).fingerprint(testbed_only=True)} {scenario.log_level}",
    )


def _exchange_kv(scenario: Scenario, site: Site, other: Site) -> bool:
    """Whether nodes of these sites may ever send KV to each other: any node of the pd site may be converted to either
    role, and cached prefixes go from any prefill node to any other."""
    return scenario.cache_bytes > 0 or PD in (site, other)


def _first_flows(scenario: Scenario, nodes: list[tuple[str, Site, Role]]) -> dict[tuple[str, str], int]:
    """(sender, receiver) -> number of its first connection, for those that send KV over a link that caps each: no two
    connections that leave a site have the same number. Raises ScenarioError where the numbers do not suffice."""
    if scenario.link.per_flow_bps is None:
        return {}
    connections = scenario.transport.connections
    found: dict[tuple[str, str], int] = {}
    for site in ADDRESSES:
        across = [
            (name, other)
            for name, its_site, _ in nodes
            for other, other_site, _ in nodes
            if its_site == site != other_site and (site != PD or scenario.cache_bytes > 0)
        ]
        if len(across) * connections > FLOWS:
            raise ScenarioError(
                f"scenario {scenario.name}: link.per_flow_bps: {len(across)} pairs of nodes x transport.connections = "
                f"{connections} leave the {site} site; the shaper tells {FLOWS} connections apart; lower "
                "transport.connections, or take fewer nodes"
            )
        found |= {pair: connections * i for i, pair in enumerate(across)}
    return found


def _flows(scenario: Scenario, first_flows: dict[tuple[str, str], int]) -> int:
    """How many numbers are in use, of either site."""
    return max((first + scenario.transport.connections for first in first_flows.values()), default=0)


def _agent(scenario: Scenario, state: StateDir, flows: int) -> ProcessSpec:
    asked = link_state(scenario)
    config = {
        "socket": str(state.agent_sock),
        "interfaces": dict(WAN_INTERFACES),
        "state": {field: getattr(asked, field) for field in ASKED},
        "seed": scenario.seed,
        "applied_log": str(state.root / "link-applied.jsonl"),
        "counters_csv": str(state.root / "link-counters.csv"),
        "ready_file": str(state.ready_file("agent")),
        "sample_s": SAMPLE_S,
        "log_dir": str(state.logs),
        "flows": flows,
        "log_level": scenario.log_level,
    }
    return ProcessSpec("agent", "wan", (sys.executable, "-m", "netem.agent"), role="link", config=config, stage=0)


def _rivals(site: str, state: StateDir) -> ProcessSpec:
    """A site's process for cross-traffic. What it sends comes with each load (`testbed.crossing`)."""
    name = f"cross-{site}"
    (other,) = set(ADDRESSES) - {site}
    config = {
        "socket": str(state.cross_socks[site]),
        "ready_file": str(state.ready_file(name)),
        "sends": SENDS[site],
        "address": ADDRESSES[site],
        "peer": ADDRESSES[other],
    }
    return ProcessSpec(name, site, (sys.executable, "-m", "netem.rivals"), role="cross", config=config, stage=0)


def _timing(scenario: Scenario, deployment: Deployment, site: Site) -> dict[str, Any]:
    """What a worker needs to know of time and size: its site's profile for prefill, the pd profile's decode."""
    name, decode = getattr(deployment.profiles, site), scenario.profile(deployment, "pd")
    assert decode is not None
    return {
        "profile": str(Path(name).absolute()) if "/" in name or Path(name).suffix else name,
        "decode_step_s": decode.decode_step_s,
        "decode_step": decode.decode_step,
        "decode_slots": decode.decode_slots,
        "pieces": scenario.pieces(deployment, site),
        "outbox_bytes": scenario.transport.outbox_bytes,
        "landing_bytes": scenario.transport.landing_bytes,
        "cache_bytes": scenario.cache_bytes,
        "block_tokens": scenario.cache.block_tokens,
        "connections": scenario.transport.connections,
        "stream_interval": scenario.decode.stream_interval,
        "time_scale": scenario.scale.time_scale,
        "byte_scale": scenario.scale.byte_scale,
        "telemetry_s": scenario.telemetry_s,
        "log_level": scenario.log_level,
    }


def _gateway(
    scenario: Scenario,
    deployment: Deployment,
    nodes: list[tuple[str, Site, Role]],
    ports: dict[str, tuple[int, int]],
    secret: str,
    state: StateDir,
) -> ProcessSpec:
    decode = scenario.profile(deployment, "pd")
    assert decode is not None
    config = GatewayConfig(
        name="gateway",
        ready_file=str(state.ready_file("gateway")),
        listen_fd=-1,  # the launcher's
        secret=secret,
        scenario=scenario.only(deployment.name).model_dump(mode="json"),
        nodes=[
            Node(
                name,
                site,
                role,
                decode.decode_slots if site == "pd" else 0,
                ADDRESSES[site],
                ports[name][0],
                FIRST_METRICS_PORT + i,
            )
            for i, (name, site, role) in enumerate(nodes)
        ],
        loads_dir=str(state.root / "loads"),
        agent_sock=str(state.agent_sock),
        import_path=[str(Path.cwd())],
    )
    return _process("gateway", "pd", "gateway", "testbed.gateway", config, stage=3, listens=True)


def _process(
    name: str, site: str, role: str, module: str, config: msgspec.Struct, *, stage: int, listens: bool = False
) -> ProcessSpec:
    data = msgspec.to_builtins(config)
    return ProcessSpec(name, site, (sys.executable, "-m", module), role=role, config=data, stage=stage, listens=listens)
