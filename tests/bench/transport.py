"""How much of a shaped link the KV transport fills, beside iperf3 on the same link in the same run.

    python -m tests.bench.transport --json

Two sites and a WAN between them, in namespaces that this run makes: it starts itself again under `unshare`, as root or
as an ordinary user, and the kernel removes everything with it. Sender and receiver are processes of their own, under
uvloop. Every transfer goes the whole way: announced over a control connection, expected, granted, sent, landed;
`--depth` of them are under way at once, as a prefill node's outbox has them. Runs of iperf3 (as many streams as a pair
has connections) and of the transport alternate; their medians are compared. Exit code 1 when a ratio is below `--bar`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import uvloop

from emulator.clock import Clock
from emulator.door import Door
from emulator.messages import Expect, Transmit
from emulator.transfer.receiver import KvReceiver
from emulator.transfer.sender import FRAME_BYTES, KvSender
from netem.link import LinkState
from netem.tc import Shaper
from netem.topology import ADDRESSES, WAN_INTERFACES, Topology, build

INSIDE = "PRFAAS_BENCH_INSIDE"
CONTROL_PORT, DATA_PORT, PROBE_PORT = 7169, 7297, 7424  # docs/contracts.md
SECRET = "bench"
SLACK_S = 20.0  # a child may take this much longer than its measurement


def cpu_s() -> float:
    """CPU seconds of this process, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def shape(rate_bps: float) -> None:
    """Shape both directions; runs in the WAN's namespace. The shaping stays when the process leaves."""
    for interface in WAN_INTERFACES.values():
        async with Shaper(interface) as shaper:
            await shaper.apply(LinkState(rate_bps=rate_bps))


async def receive(options: argparse.Namespace) -> None:
    """The decode side: JSON lines on the control connection, KV on the data port."""
    done = asyncio.Event()
    control: list[asyncio.StreamWriter] = []
    measured: dict[str, Any] = {}

    def tell(message: dict[str, Any]) -> None:
        control[0].write(json.dumps(message).encode() + b"\n")

    receiver = KvReceiver(
        "d0",
        Door(SECRET),
        lambda token: tell({"landed": token}),
        lambda token, reason: tell({"damaged": token, "reason": reason}),
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        control.append(writer)
        began_s, began_cpu_s, token = time.monotonic(), cpu_s(), 0
        while line := await reader.readline():
            message = json.loads(line)
            if "mark" in message:
                began_s, began_cpu_s = time.monotonic(), cpu_s()
            else:
                token += 1
                receiver.expect(Expect(token, message["kv_bytes"], "p0"))
                tell({"grant": message["announce"], "token": token})
        measured["cpu"] = (cpu_s() - began_cpu_s) / (time.monotonic() - began_s)
        writer.close()
        done.set()

    await receiver.listen(ADDRESSES["pd"], DATA_PORT)
    server = await asyncio.start_server(serve, ADDRESSES["pd"], CONTROL_PORT)
    print("ready", flush=True)
    await done.wait()
    server.close()
    await receiver.close()
    print(json.dumps({**measured, "refused": dict(receiver.refused), "duplicates": receiver.duplicates}), flush=True)


async def send(options: argparse.Namespace) -> None:
    """The prefill side: one warm-up transfer, then transfers back to back for the time asked; prints what landed."""
    clock = Clock(time.monotonic_ns(), 1.0)
    sender = KvSender("p0", SECRET, clock, connections=options.connections, frame_bytes=options.frame_bytes)
    host = ADDRESSES["pd"]
    reader, writer = await asyncio.open_connection(host, CONTROL_PORT)
    size = round(options.transfer_mb * 1e6)
    announced = landed = 0

    def tell(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    def announce() -> None:
        nonlocal announced
        announced += 1
        tell({"announce": announced, "kv_bytes": size})

    async def next_landed() -> None:
        nonlocal landed
        while True:
            message = json.loads(await reader.readline())
            if "grant" in message:
                name, now_s = f"r{message['grant']}", clock.now_s()
                sender.transmit(Transmit(name, 0, "d0", message["token"], size, 8, now_s, now_s), host, DATA_PORT)
            elif "landed" in message:
                landed += 1
                return
            else:
                raise RuntimeError(f"transfer damaged: {message}")

    announce()
    await next_landed()
    tell({"mark": True})
    began_s, began_cpu_s, first = time.monotonic(), cpu_s(), landed
    for _ in range(options.depth):
        announce()
    while True:
        await next_landed()
        elapsed_s = time.monotonic() - began_s
        if elapsed_s < options.seconds:
            announce()
        elif landed == announced:
            break
    cpu = (cpu_s() - began_cpu_s) / elapsed_s
    paths = sender.paths()[0]
    writer.close()
    await sender.close()
    goodput_bps = (landed - first) * size * 8 / elapsed_s
    sent = {"goodput_bps": goodput_bps, "transfers": landed - first, "cpu": cpu, "retransmits": paths.retransmits}
    print(json.dumps(sent), flush=True)


class Bench:
    """Starts the children in their sites and puts their figures together."""

    def __init__(self, topology: Topology, options: argparse.Namespace) -> None:
        self.topology = topology
        self.options = options

    def start(self, site: str, argv: list[str]) -> subprocess.Popen[str]:
        command = self.topology.command(site, argv)
        return subprocess.Popen(
            command, pass_fds=self.topology.pass_fds(site), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )

    def role(self, site: str, role: str, *extra: str) -> subprocess.Popen[str]:
        options = self.options
        return self.start(
            site,
            [
                *(sys.executable, "-m", "tests.bench.transport", "--role", role, *extra),
                *("--seconds", str(options.seconds), "--transfer-mb", str(options.transfer_mb)),
                *("--depth", str(options.depth), "--connections", str(options.connections)),
                *("--frame-bytes", str(options.frame_bytes)),
            ],
        )

    def finish(self, child: subprocess.Popen[str]) -> str:
        try:
            out, _ = child.communicate(timeout=self.options.seconds + SLACK_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
        if child.returncode != 0:
            raise RuntimeError(f"{child.args!r}: exit code {child.returncode}: {out}")
        return out

    def iperf3(self) -> dict[str, Any]:
        """One run of iperf3: payload bits/s received, CPU shares of its two ends."""
        port = str(PROBE_PORT)
        server = self.start("pd", ["iperf3", "-s", "-1", "-p", port, "--forceflush"])
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise RuntimeError("iperf3 -s ended; is it installed?")
        streams = ["-P", str(self.options.connections), "-O", "1", "-t", str(max(1, round(self.options.seconds)))]
        client = self.start("prfaas", ["iperf3", "-c", ADDRESSES["pd"], "-p", port, *streams, "-J"])
        end = json.loads(self.finish(client))["end"]
        self.finish(server)
        cpu = end["cpu_utilization_percent"]
        return {
            "goodput_bps": end["sum_received"]["bits_per_second"],
            "cpu_sender": cpu["host_total"] / 100,
            "cpu_receiver": cpu["remote_total"] / 100,
            "retransmits": end["sum_sent"]["retransmits"],
        }

    def ours(self) -> dict[str, Any]:
        """One run of the transport."""
        receiver = self.role("pd", "receive")
        assert receiver.stdout is not None
        if receiver.stdout.readline().strip() != "ready":
            raise RuntimeError("the receiver did not start")
        sent = json.loads(self.finish(self.role("prfaas", "send")))
        received = json.loads(self.finish(receiver))
        return {
            **{key: sent[key] for key in ("goodput_bps", "transfers", "retransmits")},
            **{"cpu_sender": sent["cpu"], "cpu_receiver": received["cpu"]},
            **{"refused": received["refused"], "duplicates": received["duplicates"]},
        }

    def compare(self, rate_bps: float) -> dict[str, Any]:
        """Alternating runs at one rate: medians and their ratio."""
        self.finish(self.role("wan", "shape", "--rate-bps", str(rate_bps)))
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for i in range(self.options.rounds):
            first, second = (self.iperf3, self.ours) if i % 2 == 0 else (self.ours, self.iperf3)
            results = {first.__name__: first(), second.__name__: second()}
            pairs.append((results["iperf3"], results["ours"]))
        figures: dict[str, Any] = {"rate_bps": rate_bps}
        for name, runs in (("iperf3", [a for a, _ in pairs]), ("ours", [b for _, b in pairs])):
            figures[name] = {
                key: statistics.median(run[key] for run in runs)
                for key in ("goodput_bps", "cpu_sender", "cpu_receiver", "retransmits")
            }
            figures[name]["runs_bps"] = [round(run["goodput_bps"]) for run in runs]
        figures["ours"]["refused"] = sum(sum(run["refused"].values()) + run["duplicates"] for _, run in pairs)
        figures["ratio"] = figures["ours"]["goodput_bps"] / figures["iperf3"]["goodput_bps"]
        return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.transport", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rates-mbit", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs at each rate")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one run")
    parser.add_argument("--transfer-mb", type=float, default=8.0)
    parser.add_argument("--depth", type=int, default=2, help="transfers announced at once")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--frame-bytes", type=int, default=FRAME_BYTES)
    parser.add_argument("--bar", type=float, default=0.95, help="least ratio of medians, ours over iperf3's")
    parser.add_argument("--role", choices=("shape", "receive", "send"), help=argparse.SUPPRESS)
    parser.add_argument("--rate-bps", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "shape":
        asyncio.run(shape(options.rate_bps))
        return 0
    if options.role is not None:
        uvloop.run({"receive": receive, "send": send}[options.role](options))
        return 0
    if INSIDE not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        own = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        again = [sys.executable, "-m", "tests.bench.transport", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", *user, *own, *again], {**os.environ, INSIDE: "1"})
    rates = []
    for rate_mbit in options.rates_mbit:
        topology = build()
        try:
            rates.append(Bench(topology, options).compare(rate_mbit * 1e6))
        finally:
            topology.close()
    passed = all(figures["ratio"] >= options.bar for figures in rates)
    if options.json:
        asked = ("transfer_mb", "depth", "connections", "frame_bytes", "seconds", "rounds", "bar")
        settings = {key: getattr(options, key) for key in asked}
        print(json.dumps({"bench": "transport", "passed": passed, **settings, "rates": rates}, indent=1))
        return 0 if passed else 1
    for figures in rates:
        ours, theirs = figures["ours"], figures["iperf3"]
        print(
            f"{figures['rate_bps'] / 1e6:6.0f} Mbit/s: ours {ours['goodput_bps'] / 1e6:.1f}, "
            f"iperf3 {theirs['goodput_bps'] / 1e6:.1f} Mbit/s, ratio {figures['ratio']:.3f}; "
            f"CPU of sender and receiver {ours['cpu_sender']:.0%} and {ours['cpu_receiver']:.0%} "
            f"(iperf3 {theirs['cpu_sender']:.0%} and {theirs['cpu_receiver']:.0%})"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
