"""The live worker: one process an instance, carrying a pure machine on the wall clock with real sockets around it.

`python -m emulator.worker --config FILE`. The machine (`instance.py`) decides; this file only moves its messages:
control connections to the gateway and between nodes (`channel.py`), KV by `transfer`, token text by the backend, and
telemetry. It is also who changes a node's role: the machine is dropped, and one of the other kind takes its place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Literal

import msgspec
import uvloop

from emulator import journal
from emulator.backend import Backend, Bounds, Host
from emulator.backends.hybrid.spec import ModelSpec
from emulator.backends.timing import TimingBackend
from emulator.channel import Channel, Dialler
from emulator.clock import TIMER_ROUND_S, Clock, Driver, Lateness
from emulator.computing import BACKEND, ComputeMessage
from emulator.decode_step import AffineStep
from emulator.door import Door
from emulator.instance import PrefillInstance
from emulator.log import Log, configure
from emulator.messages import (
    CONTROL,
    WIRE,
    AnyMessage,
    Convert,
    Damaged,
    Epoch,
    Expect,
    Hello,
    Out,
    PathSample,
    PeerLost,
    Ready,
    StopTransmit,
    Telemetry,
    Tokens,
    Transmit,
    Unexpect,
)
from emulator.metrics import WorkerMetrics
from emulator.profile import load_profile
from emulator.transfer.receiver import KvReceiver
from emulator.transfer.sender import KvSender

log = Log("worker")

REACH_S = 1.5  # wall seconds that a node waits at most for its peers before it serves without those that are missing

Role = Literal["prefill", "decode"]


class Peer(msgspec.Struct, frozen=True):
    """Where another node is reached, and the role that it begins an epoch with.

    first_flow: number of the first KV connection to it (`emulator.flows`), None where they are not numbered.
    """

    host: str
    control_port: int
    data_port: int
    role: Role
    first_flow: int | None = None


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's configuration file. Model units; `control` is the gateway's name on its control connection.

    cache_bytes: the pool of a prefill node, 0 for none. peers: every node that may ever exchange KV with this one.
    dials: those of them to which this node makes the control connection; the others make it to this node.
    metrics_port: of its Prometheus endpoint, on `host`. model: what it computes with; None for emulated time, and then
    the profile says what everything takes.
    """

    name: str
    site: Literal["prfaas", "pd"]
    role: Role
    host: str
    control_port: int
    data_port: int
    metrics_port: int
    secret: str
    ready_file: str
    profile: str
    decode_step_s: float
    decode_step: AffineStep | None
    decode_slots: int
    pieces: int
    outbox_bytes: int
    landing_bytes: int
    cache_bytes: int
    block_tokens: int
    connections: int
    stream_interval: int
    time_scale: float
    byte_scale: float
    telemetry_s: float
    log_level: str
    peers: dict[str, Peer]
    dials: tuple[str, ...]
    model: ModelSpec | None = None


class Worker:
    """One instance: its machine, its connections, its telemetry."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.exit_code = 0
        self.stopped = asyncio.Event()
        self.clock = Clock(0, config.time_scale)
        self.lateness = Lateness()
        self.metrics = WorkerMetrics(config.name, config.site)
        self.backend = make_backend(config, self.clock, Host(self._hear, self._wake, self._fail))
        numbered = {name: peer.first_flow for name, peer in config.peers.items() if peer.first_flow is not None}
        self.sender = KvSender(
            config.name,
            config.secret,
            self.clock,
            connections=config.connections,
            byte_scale=config.byte_scale,
            first_flows=numbered,
            sources=self.backend.source,
        )
        self.door = Door(config.secret, {CONTROL, *config.peers})
        self.receiver = KvReceiver(
            config.name,
            self.door,
            self.backend.landed,
            self._on_damaged,
            byte_scale=config.byte_scale,
            sink=self.backend.memory,
        )
        self._gateway: Channel | None = None
        self._inbound: dict[str, Channel] = {}  # nodes that dialled this one
        self._outbound: dict[str, Dialler] = {}  # nodes that this one dials
        self._token_base = secrets.randbits(62) & ~0xFFFFFFFF
        self._loop = asyncio.get_running_loop()
        self._all_decode = asyncio.Event()  # every decode node was reached once
        self._telemetry: asyncio.TimerHandle | None = None
        self._epoch = 0
        self._joining: asyncio.TimerHandle | None = None  # while this node reloads
        self._reaching: asyncio.TimerHandle | None = None  # while it would serve, and waits for its peers
        self._new_machine(config.role)

    async def run(self) -> None:
        """Listen, say that this worker is ready, and serve until told to stop."""
        config = self.config
        server = await self._loop.create_server(self._accept, config.host, config.control_port)
        await self.receiver.listen(config.host, config.data_port)
        self.metrics.serve(config.host, config.metrics_port)
        self._dial_peers()
        if config.role == "prefill":
            await self._all_decode.wait()
        if not self.stopped.is_set():
            Path(config.ready_file).write_text(str(os.getpid()))
            gc.collect()
            gc.freeze()
            await self.stopped.wait()
        server.close()
        self.driver.close()
        for timer in filter(None, [self._telemetry, self._joining, self._reaching]):
            timer.cancel()
        for dialler in self._outbound.values():
            await dialler.close()
        for channel in [*self._inbound.values(), *filter(None, [self._gateway])]:
            channel.close("this node is stopping")
        await self.sender.close()
        await self.receiver.close()
        if not self.backend.close():
            os._exit(self.exit_code)  # a thread still computes, and must not meet the end of the interpreter

    def stop(self) -> None:
        """Leave, even while decode nodes are still being waited for."""
        self.stopped.set()
        self._all_decode.set()

    # the machine
    def _new_machine(self, role: str) -> None:
        """An empty machine at the present epoch."""
        self.role = role
        self._token_base += 1 << 32
        self.machine = self.backend.machine(role, self._token_base & (1 << 63) - 1)
        self.driver = Driver(self.machine, self.clock, self._deliver, self.lateness)

    def _hear(self, message: AnyMessage) -> None:
        self.driver.handle(message)

    def _wake(self) -> None:
        self.sender.wake()

    def _fail(self, why: str) -> None:
        """Computing cannot go on: for everybody else this node is lost."""
        log.error("computing ends", why=why)
        self.exit_code = 1
        self.stop()

    def _start_epoch(self, epoch: Epoch) -> None:
        self.driver.close()
        self._not_ready()
        self._epoch = epoch.epoch
        self.clock.t0_ns = epoch.t0_ns
        self.lateness = Lateness()
        self.sender.reset()
        self.receiver.reset()
        self._new_machine(self.config.role)

    def _convert(self, order: Convert) -> None:
        """The new machine is there at once, to answer what still comes; nobody gives it work before it says Ready."""
        if self.machine.accepts(order):
            self.driver.handle(order)
        self.driver.close()
        self.receiver.expect_nothing()
        self._new_machine(order.role)
        for node in self.config.peers:
            self._reach(node)
        self._not_ready()
        self._joining = self._loop.call_later(order.reload_s / self.clock.scale + TIMER_ROUND_S, self._join)

    def _join(self) -> None:
        """Serve, once every peer is reached: control is often back before them, and its requests would all fail."""
        self._reaching = self._loop.call_later(REACH_S, self._serve)
        self._look_for_peers()

    def _look_for_peers(self) -> None:
        if self._reaching is not None and all(self._channel(node) is not None for node in self.config.peers):
            self._serve()

    def _serve(self) -> None:
        self._not_ready()
        log.info("serves", role=self.role, epoch=self._epoch)
        self._tell_control(Ready(self.config.name, self._epoch, self.role))

    def _not_ready(self) -> None:
        """Whatever was to make it say so is off."""
        for timer in filter(None, [self._joining, self._reaching]):
            timer.cancel()
        self._joining = self._reaching = None

    def _deliver(self, out: list[Out]) -> None:
        for destination, message in out:
            journal.emitted(destination, message)
            if destination == CONTROL:
                self._tell_control(message)
            elif destination == WIRE:
                self._tell_wire(message)
            elif destination == BACKEND:
                assert isinstance(message, ComputeMessage)
                self.backend.tell(message)
            elif not self._tell_peer(destination, message):
                self._loop.call_soon(self._peer_lost, destination)

    def _tell_control(self, message: AnyMessage) -> None:
        if type(message) is Tokens:
            message = self.backend.fill(message)
        if self._gateway is not None:
            self._gateway.send(message)

    def _tell_peer(self, node: str, message: AnyMessage) -> bool:
        channel = self._channel(node)
        return channel is not None and channel.send(message)

    def _channel(self, node: str) -> Channel | None:
        """The control connection with another node, whoever made it."""
        dialler = self._outbound.get(node)
        return dialler.channel if dialler is not None else self._inbound.get(node)

    def _tell_wire(self, message: AnyMessage) -> None:
        match message:
            case Transmit():
                peer = self.config.peers[message.decode_node]
                self.sender.transmit(message, peer.host, peer.data_port)
            case StopTransmit():
                self.sender.stop(message)
            case Expect():
                self.receiver.expect(message)
            case Unexpect():
                self.receiver.unexpect(message.token)
                self.backend.withdraw(message.token)
            case _:
                raise TypeError(f"{message!r} is not for the transport")

    def _on_damaged(self, token: int, reason: str) -> None:
        self.backend.withdraw(token)
        self.driver.handle(Damaged(token, reason))

    # connections
    def _accept(self) -> Channel:
        return Channel(self._on_message, self._on_closed, door=self.door)

    def _dial_peers(self) -> None:
        config = self.config
        for name in config.dials:
            peer = config.peers[name]
            self._outbound[name] = Dialler(
                name,
                peer.host,
                peer.control_port,
                Hello(config.name, config.secret),
                self._on_message,
                self._peer_up,
                lambda node, reason: self._peer_lost(node),
            )
        self._look_for_decode()

    def _peer_up(self, channel: Channel) -> None:
        self._reach(channel.peer)
        self._look_for_decode()
        self._look_for_peers()

    def _look_for_decode(self) -> None:
        peers = self.config.peers
        if all(dialler.channel for name, dialler in self._outbound.items() if peers[name].role == "decode"):
            self._all_decode.set()

    def _reach(self, node: str) -> None:
        """Open the KV connections that are sure to be used; all others are made by the first transfer."""
        peer = self.config.peers[node]
        if self.role == "prefill" and peer.role == "decode" and self._channel(node) is not None:
            self.sender.connect(node, peer.host, peer.data_port)

    def _peer_lost(self, node: str) -> None:
        self.driver.handle(PeerLost(node))
        self.sender.forget_peer(node)
        self.receiver.forget_peer(node)

    def _on_message(self, channel: Channel, message: AnyMessage) -> None:
        journal.received(channel.peer, message)
        match message:
            case Hello(node=node):
                if node == CONTROL:
                    self._gateway = channel
                    self._report()
                else:
                    if node in self._inbound:  # it has lost its connection, and this end has not been told yet
                        self._peer_lost(node)
                    self._inbound[node] = channel
                    self._reach(node)
                    self._look_for_peers()
            case Epoch():
                self._start_epoch(message)
                self._join()
            case Convert():
                self._convert(message)
            case _ if self.machine.accepts(message):
                self.driver.handle(message)
            case _:
                log.warning("misdirected message", by=channel.peer, message=type(message).__name__, role=self.role)

    def _on_closed(self, channel: Channel, reason: str) -> None:
        if self.stopped.is_set():
            return
        if channel is self._gateway:
            # Nobody is left to answer to: the next gateway starts a new epoch.
            log.warning("gateway lost", reason=reason)
            self._gateway = None
            self._start_epoch(Epoch(0, self.clock.t0_ns))
        elif channel.peer and self._inbound.get(channel.peer) is channel:
            log.warning("peer lost", node=channel.peer, reason=reason)
            del self._inbound[channel.peer]
            self._peer_lost(channel.peer)

    # telemetry
    def _report(self) -> None:
        """Send this node's account of itself, and again every telemetry_s.

        None waits for the end of an outage: a queue of old ones would keep back the first that is fresh.
        """
        if self._telemetry is not None:
            self._telemetry.cancel()
        if self._gateway is None:
            return
        self._telemetry = self._loop.call_later(self.config.telemetry_s / self.clock.scale, self._report)
        if self._gateway.is_stalled:
            return
        machine, now_s = self.machine, self.clock.now_s()
        outbox_bytes = landing_bytes = queued_tokens = waiting_grants = held_blocks = 0
        cache_usage: float | None = None
        if isinstance(machine, PrefillInstance):
            queued_tokens, outbox_bytes = machine.queued_tokens, machine.outbox_used
            if machine.pool is not None:
                held_blocks = machine.pool.referenced_blocks
                cache_usage = machine.pool.used_blocks / max(1, machine.pool.capacity_blocks)
        else:
            landing_bytes, waiting_grants = machine.landing_used, machine.waiting_grants
        account = Telemetry(
            node=self.config.name,
            t_s=now_s,
            queued_requests=machine.queued_requests,
            queued_tokens=queued_tokens,
            running_requests=machine.running_requests(now_s),
            outbox_bytes=outbox_bytes,
            landing_bytes=landing_bytes,
            waiting_grants=waiting_grants,
            kv_sent_bytes=self.sender.sent_kv_bytes,
            kv_landed_bytes=self.receiver.landed_kv_bytes,
            wire_landed_bytes=dict(self.receiver.landed_bytes),
            refused_frames=self.receiver.refused_frames,
            refused_states=self.backend.refused_states,
            late_p99_s=self.lateness.p99_s(),
            late_max_s=self.lateness.max_s,
            paths=tuple(self._in_model_units(path) for path in self.sender.paths()),
            slowdown=machine.slowdown,
            held_blocks=held_blocks,
            open_transfers=self.sender.live_transfers + self.receiver.expected,
            lost_connections=self.sender.lost_connections,
            refused_connections=dict(self.door.refused),
        )
        self._gateway.send(account)
        self.metrics.told(account, self.role, cache_usage)

    def _in_model_units(self, path: PathSample) -> PathSample:
        """A wall-unit sample in model units: wall rate = model rate x b x a, wall delay = model delay / a."""
        a, b = self.config.time_scale, self.config.byte_scale
        return msgspec.structs.replace(
            path,
            rtt_s=path.rtt_s * a,
            delivery_rate_bps=path.delivery_rate_bps / (a * b),
            unsent_bytes=round(path.unsent_bytes / b),
        )


def make_backend(config: Config, clock: Clock, host: Host) -> Backend:
    """Emulated time, or the model that the configuration names; torch is imported only for that."""
    bounds = Bounds(
        config.name,
        config.outbox_bytes,
        config.landing_bytes,
        config.cache_bytes,
        config.block_tokens,
        config.decode_slots,
        config.stream_interval,
    )
    if config.model is not None:
        from emulator.backends.hybrid.backend import HybridBackend

        return HybridBackend(config.model, bounds, clock, host)
    step_s, step = config.decode_step_s, config.decode_step
    return TimingBackend(load_profile(config.profile), bounds, host, step_s=step_s, step=step, pieces=config.pieces)


async def serve(config: Config) -> int:
    """Run one worker until SIGTERM or SIGINT; its exit code."""
    worker = Worker(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run()
    return worker.exit_code


def main() -> None:
    """The entry of `python -m emulator.worker`."""
    parser = argparse.ArgumentParser(prog="emulator.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=Config)
    configure(config.name, config.log_level)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(uvloop.run(serve(config)))


if __name__ == "__main__":
    main()
