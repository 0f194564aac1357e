"""Outages of the link under load, on the wire: `python -m tests.wire.outages`. Wall seconds throughout.

For each kind and length: how long after the link is back KV is delivered again (the first bytes, and the first whole
request), how many requests were lost (none may be: with the remote site silent everything is prefilled locally), and
what is left of it when the last request has ended: reservations, slots, blocks, transfers, bytes, connections.
`--without-bound` leaves TCP's tries as far apart as the kernel's default, as on a kernel before Linux 6.15: connections
that stall then break, and are dialled again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from testbed.fleet import launch_spec
from testbed.launch import client, launchers
from testbed.launch.state import StateDir
from testbed.load import Testbed
from testbed.scenario import parse

KINDS: Final = ("stall", "blackhole", "down")
LENGTHS_S: Final = (1.0, 5.0, 20.0)
BAR_S: Final = 1.5  # from restoration to the first KV
WARM_S, AFTER_S, PATIENCE_S = 2.5, 4.0, 30.0
POLL_S: Final = 0.02
STALE_S: Final = 0.5
REQUESTS_PER_S: Final = 12.0
ACCOUNT: Final = (
    "queued_requests", "queued_tokens", "running_requests", "outbox_bytes", "landing_bytes", "waiting_grants",
    "held_blocks", "open_transfers",
)  # fmt: skip
SCENARIO: Final = """
name: outages
description: Every second request is long, and prefilled remotely while the link is there.
deployments:
  - name: prfaas-pd
    profiles: {prfaas: toy, pd: toy}
    fleet: {n_prfaas: 2, n_p: 2, n_d: 2}
    policy: {name: static, threshold_tokens: 8192}
workload:
  lengths: {kind: mix, values: [1024, 32768], weights: [1, 1]}
  output_tokens: 40
  rate_rps: 1.2
  duration_s: 60
link: {rate_bps: 16gbps, delay_s: 0.05}
cache_bytes: 100000000000
scale: {time_scale: 10, byte_scale: 0.0005}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    kind: str
    length_s: float


@dataclasses.dataclass(slots=True)
class Found:
    """again_s: from restoration to the first KV byte that counts as landed; whole_again_s: to the first request whose
    KV came over the link. reconnected: connections that broke and were dialled again, control's and (of a
    node that control did not lose) those of the KV. stale: accounts of the remote nodes
    that came more than STALE_S late. nodes: what control saw of them. left: what was not free afterwards."""

    kind: str
    length_s: float
    again_s: float = math.inf
    whole_again_s: float = math.inf
    requests: int = 0
    remote: int = 0
    retried: int = 0
    lost: dict[str, int] = dataclasses.field(default_factory=dict)
    reconnected: int = 0
    stale: int = 0
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Why the outage did not go as it should, whatever the time it took."""
        told = [f"{count} requests lost: {why}" for why, count in self.lost.items()]
        told += [f"left: {what}: {held}" for what, held in self.left.items()]
        return told if self.remote else [*told, "no request was prefilled remotely"]


@contextlib.contextmanager
def with_testbed(*, bounded: bool) -> Iterator[Testbed]:
    """A testbed of its own, up. bounded: whether TCP's tries are (on a kernel that can)."""
    root = tempfile.mkdtemp(prefix="prf")
    before = os.environ.get("PRFAAS_STATE")
    os.environ["PRFAAS_STATE"] = root
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        scenario = parse(yaml.safe_load(SCENARIO), "outages")
        state = StateDir(create=True)
        spec = launch_spec(scenario, scenario.deployments[0], port=port, state=state)
        if not bounded:
            spec = dataclasses.replace(spec, topology={**(spec.topology or {}), "rto_max_s": None})
        launchers.up(spec)
        yield Testbed(state, scenario, port)
    finally:
        launchers.down()
        shutil.rmtree(root, ignore_errors=True)
        if before is None:
            del os.environ["PRFAAS_STATE"]
        else:
            os.environ["PRFAAS_STATE"] = before


def outage(bed: Testbed, case: Case) -> Found:
    """One outage in the middle of a load of its own."""
    connections = established(bed)
    load = bed.call("POST", "/prfaas/loads", {"lead_s": 0.0, "rate_rps": bed.scenario.workload.rate_rps})
    found, restored_ns = asyncio.run(_under_load(bed, case, load["id"]))
    _wait(lambda: not _held(bed, load["id"]))
    found.left = _held(bed, load["id"])
    _wait(lambda: established(bed) <= connections)
    if (more := established(bed) - connections) > 0:
        found.left["connections"] = more
    accounts = bed.call("GET", f"/prfaas/loads/{load['id']}")["accounts"]
    found.reconnected = sum(account["lost_connections"] for account in accounts.values())
    totals = bed.call("POST", f"/prfaas/loads/{load['id']}/end")
    began_s = WARM_S / 2 * bed.scenario.scale.time_scale  # they all come up at t = 0
    changes = [change for change in totals["changes"] if change["kind"] == "node" and change["t_s"] > began_s]
    found.nodes = dict(Counter(f"{change['before']} to {change['after']}" for change in changes))
    found.reconnected += found.nodes.get("up to lost", 0)
    found.stale = _stale(bed.state.loads / load["events"], STALE_S * bed.scenario.scale.time_scale)
    with (bed.state.loads / load["rows"]).open(newline="") as rows:
        _read(found, list(csv.DictReader(rows)), (restored_ns - load["t0_ns"]) * 1e-9, bed.scenario.scale.time_scale)
    return found


async def _under_load(bed: Testbed, case: Case, load_id: str) -> tuple[Found, int]:
    found = Found(case.kind, case.length_s)
    link = client.AsyncUnixClient(bed.state.agent_sock)
    url = f"http://127.0.0.1:{bed.port}"
    stop = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def landed() -> int:
            async with session.get(f"{url}/prfaas/loads/{load_id}") as response:
                return int((await response.json())["kv_landed_bytes"].get("prfaas", 0))

        offered = asyncio.create_task(_offer(session, url, stop, found))
        try:
            await asyncio.sleep(WARM_S)
            cut_ns = _applied_ns(await link.put("/link", {"outage": case.kind}))
            await asyncio.sleep(case.length_s - (time.monotonic_ns() - cut_ns) * 1e-9)
            before = await landed()
            restored_ns = _applied_ns(await link.put("/link", {"outage": None}))
            while (since_s := (time.monotonic_ns() - restored_ns) * 1e-9) < PATIENCE_S:
                if await landed() > before:
                    found.again_s = since_s
                    break
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(max(0.0, AFTER_S - since_s))
        finally:
            await link.put("/link", {"outage": None})
            stop.set()
            await offered
    return found, restored_ns


def _applied_ns(answer: dict[str, Any]) -> int:
    return max(int(one["applied"]["t_applied_ns"]) for one in answer.values())


async def _offer(session: aiohttp.ClientSession, url: str, stop: asyncio.Event, found: Found) -> None:
    """Requests at a steady rate until told to stop, every second one long; then until each has ended."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    asked: list[asyncio.Task[None]] = []
    while not stop.is_set():
        asked.append(asyncio.create_task(_ask(session, url, 32768 if len(asked) % 2 else 1024, found)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(0.0, began_s + len(asked) / REQUESTS_PER_S - loop.time()))
    await asyncio.gather(*asked)
    found.requests = len(asked)


async def _ask(session: aiohttp.ClientSession, url: str, tokens: int, found: Found) -> None:
    body = {"model": "prfaas", "prfaas": {"input_tokens": tokens}, "max_tokens": 40, "stream": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.read()
        if response.status == 200 and answer.endswith(b"data: [DONE]\n\n"):
            return
        why = answer[-200:].decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        why = repr(error)
    found.lost[why] = found.lost.get(why, 0) + 1


def _read(found: Found, rows: list[dict[str, str]], restored_s: float, scale: float) -> None:
    """What the gateway's rows say (model seconds); restored_s: wall seconds after t = 0."""
    remote = [row for row in rows if row["prefill_site"] == "prfaas" and row["landed_s"]]
    found.remote = len(remote)
    found.retried = sum(int(row["attempts"]) > 1 for row in rows)
    landed_s = [float(row["landed_s"]) / scale - restored_s for row in remote]
    found.whole_again_s = min((after_s for after_s in landed_s if after_s > 0), default=math.inf)


def _stale(events: Path, bound_s: float) -> int:
    with events.open() as lines:
        told = [one for line in lines if (one := json.loads(line))["event"]["type"] == "Telemetry"]
    remote = [one for one in told if one["event"]["node"].startswith("prfaas")]
    return sum(one["t_s"] - one["event"]["t_s"] > bound_s for one in remote)


def _held(bed: Testbed, load_id: str) -> dict[str, Any]:
    """What is not free, by the gateway's account and by every worker's last one."""
    totals = bed.call("GET", f"/prfaas/loads/{load_id}")
    held = {
        f"{node} {key}": account[key] for node, account in totals["accounts"].items() for key in ACCOUNT if account[key]
    }
    for node in bed.call("GET", "/prfaas/status")["nodes"]:
        for key in ("queued_requests", "assigned_requests", "decoding_requests"):
            if node[key]:
                held[f"control: {node['name']} {key}"] = node[key]
    if totals["in_flight"]:
        held["requests under way"] = totals["in_flight"]
    return held


def established(bed: Testbed) -> int:
    """Established TCP connections inside both sites."""
    count = 0
    for site in ("prfaas", "pd"):
        command = {"site": site, "argv": ["cat", "/proc/self/net/tcp"], "timeout_s": 10}
        lines = client.supervisor(bed.state).post("/run", command)["stdout"].splitlines()[1:]
        count += sum(line.split()[3] == "01" for line in lines)
    return count


def _wait(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def row(found: Found, bounded: bool) -> str:
    late = bounded and not found.again_s <= BAR_S
    state = "WRONG" if found.problems else "late" if late else "ok"
    nodes = ", ".join(f"{what} {count}" for what, count in found.nodes.items())
    return (
        f"{found.kind:10} {found.length_s:5g} {state:6} {found.again_s:8.3f} {found.whole_again_s:8.3f} "
        f"{found.requests:9} {found.remote:7} {found.retried:8} {sum(found.lost.values()):5} {len(found.left):5} "
        f"{found.reconnected:12} {found.stale:6}  {nodes}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every outage ended within the bar (with the bound), lost nothing and left nothing, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.wire.outages", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="these kinds only; repeatable")
    parser.add_argument("--seconds", type=float, action="append", help="these lengths only; repeatable")
    parser.add_argument(
        "--without-bound", action="store_true", help="leave TCP's tries as the kernel's default has them"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output; rows go to stderr")
    asked = parser.parse_args(arguments)
    bounded, out = not asked.without_bound, sys.stderr if asked.json else sys.stdout
    print(
        "kind       for s found    KV, s whole, s  requests  remote  retried  lost  left  reconnected  stale  nodes",
        file=out,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is up is taken down
    rows = []
    with with_testbed(bounded=bounded) as bed:
        for length_s in asked.seconds or LENGTHS_S:
            for kind in asked.kind or KINDS:
                found = outage(bed, Case(kind, length_s))
                rows.append(found)
                print(row(found, bounded), *found.problems, sep="\n    WRONG ", file=out, flush=True)
    ok = all(not found.problems and (not bounded or found.again_s <= BAR_S) for found in rows)
    if asked.json:
        answers = [dataclasses.asdict(found) for found in rows]
        print(json.dumps({"ok": ok, "bounded": bounded, "bar_s": BAR_S, "outages": answers}, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
