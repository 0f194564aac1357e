"""The gateway: the HTTP edge of control, OpenAI-compatible, and the control connections to every worker.

`python -m testbed.gateway --config FILE` (the supervisor starts it in the pd site, with the host's listening socket).
It moves bytes: requests become events, commands become messages to workers and answers to clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import uvloop
from aiohttp import web

from emulator.channel import Channel, Dialler
from emulator.clock import Clock, Lateness
from emulator.log import Log, configure
from emulator.messages import CONTROL, AnyMessage, Epoch, Hello, Hinder, Ready
from emulator.profile import ProfileError
from testbed.assemble import control_rules, cost_functions, lengths_of_workload, lengths_to_json, max_input_tokens
from testbed.bodies import lead_of, parameters_of, policy_of
from testbed.control import Completed, Control, Failed, NodeSpec
from testbed.guard import Bounds, Guard, raise_files, read_body, same_origin
from testbed.json_http import JSON, check_finite, errors_as_answers, json_object, json_response
from testbed.launch.state import TestbedError
from testbed.live.mount import Live
from testbed.metrics import Metrics
from testbed.openai_api import DONE, ApiError, Ask, Chunks, Limits, parse, stream_error, usage, whole
from testbed.policies import load_policy, wants_future
from testbed.scenario import Scenario, ScenarioError
from testbed.scheduler.api import Policy, Role
from testbed.scheduler.baselines import Homogeneous
from testbed.scheduler.model import ModelError
from testbed.scrape import Scraper
from testbed.session import BoundedCall, Session, Stream
from testbed.told import KnownFuture, Told
from traces.request import TraceError

log = Log("gateway")

READY_S: Final = 5.0  # wall seconds the workers have to start an epoch
POLICY_LIMIT_S: Final = 0.05  # wall seconds a decision may take
POLICY_START_LIMIT_S: Final = 5.0  # wall seconds: the gateway does nothing else, and a load's client waits 10 s
LAG_S: Final = 0.02  # wall seconds between samples of the event loop's lag
MOST_COMPUTED_TOKENS: Final = 4096  # of an answer that a model computes: its state grows with it
T = TypeVar("T")


class Node(msgspec.Struct, frozen=True):
    """A worker as the gateway reaches it."""

    name: str
    site: str
    role: str
    slots: int
    host: str
    control_port: int
    metrics_port: int


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway's configuration file. `scenario` is resolved, with one deployment."""

    name: str
    ready_file: str
    listen_fd: int
    secret: str
    scenario: dict[str, Any]
    nodes: list[Node]
    loads_dir: str
    agent_sock: str
    import_path: list[str]


class Gateway:
    """All state of the gateway process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.scenario = Scenario.model_validate(config.scenario)
        self.deployment = self.scenario.deployments[0]
        self.limits = Limits(
            model="prfaas",
            max_input_tokens=max_input_tokens(self.scenario, self.deployment),
            max_output_tokens=MOST_COMPUTED_TOKENS if self.scenario.backend == "hybrid" else 1 << 20,
            default_chat_tokens=self.scenario.workload.output_tokens,
            computes=self.scenario.backend == "hybrid",
            block_tokens=self.scenario.cache.block_tokens if self.scenario.cache_bytes else 0,
        )
        self.stopped = asyncio.Event()
        self.lag = Lateness()
        self.metrics = Metrics(self.scenario)
        self.guard = Guard(Bounds(connections=raise_files(Bounds().connections)))
        self.metrics.register(self.guard)
        scraped = {n.name: (n.host, n.metrics_port) for n in config.nodes}
        self._scraper = Scraper(self.limits.model, scraped, Path(config.agent_sock))
        self._ask = BoundedCall(POLICY_LIMIT_S)
        self._fleet = [NodeSpec(n.name, n.site, n.role, n.slots) for n in config.nodes]  # type: ignore[arg-type]
        self._cost = cost_functions(self.scenario, self.deployment)
        lengths = lengths_of_workload(self.scenario.workload, self.limits.max_input_tokens)
        self._lengths = lengths_to_json(lengths)
        self._still = KnownFuture.still(self.scenario, lengths).to_json()  # what an oracle is told between loads
        self._open = asyncio.Event()  # a session is there to take requests
        self._turn = asyncio.Lock()  # one session change at a time
        self._epoch = 0
        self._t0_ns = 0  # of the epoch
        self._adhoc = 0
        self._ready: dict[str, int] = {}  # node -> the epoch it is ready at
        self._roles: dict[str, Role] = {}
        self._all_ready = asyncio.Event()
        self.session: Session | None = None
        self.links: dict[str, Dialler] = {}
        self.live = Live(
            self.scenario,
            Path(config.agent_sock).parent,
            {node.name: node.role for node in config.nodes},
            lambda: self.session,
            self._send,
            lambda: self.lag.p99_s(),
        )

    async def run(self) -> None:
        """Serve until told to stop."""
        config = self.config
        hello = Hello(CONTROL, config.secret)
        for node in config.nodes:
            self.links[node.name] = Dialler(
                node.name, node.host, node.control_port, hello, self._on_message, self._on_up, self._on_down
            )
        deadline_s = time.monotonic() + READY_S
        while missing := [name for name, link in self.links.items() if link.channel is None]:
            if time.monotonic() > deadline_s:
                raise TestbedError(f"no connection to {', '.join(missing)} within {READY_S:g} s; see their logs")
            await asyncio.sleep(0.01)
        async with self._turn:
            await self._begin_adhoc()
        await self.guard.serve(self._app(), socket.socket(fileno=config.listen_fd))
        lag = asyncio.create_task(self._watch_lag())
        Path(config.ready_file).write_text(str(os.getpid()))
        gc.collect()
        gc.freeze()
        await self.stopped.wait()
        lag.cancel()
        await self.guard.close()
        for link in self.links.values():
            await link.close()
        if self.session is not None:
            self.session.close()

    async def _watch_lag(self) -> None:
        """How late this process's event loop is: the gateway has no other timers to judge itself by."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_S
            await asyncio.sleep(LAG_S)
            self.lag.add(max(0.0, loop.time() - due))
            with contextlib.suppress(OSError):  # a container's health is how fresh it is, as the port is the host's
                os.utime(self.config.ready_file)

    # sessions
    async def begin(self, session_id: str, policy: Policy, told: Told, lead_s: float) -> Session:
        """A new session, t = 0 `lead_s` wall seconds from now.

        Raises ApiError when requests are under way or the policy refuses.
        """
        self._refuse_when_busy()
        async with self._turn:
            self._refuse_when_busy()
            return await self._begin(session_id, policy, told, lead_s)

    async def end(self, session: Session) -> dict[str, Any]:
        """The totals of a load, once its last request and its workers' last account of themselves are in."""
        async with self._turn:
            while session.control.live:  # someone may come as the last one leaves
                await session.idle.wait()
            if self.session is not session:
                raise _no_load(session.id)
            self._open.clear()  # whoever comes now is served by the next session
            try:
                await asyncio.sleep(1.5 * self.scenario.telemetry_s / session.clock.scale)
                totals = {**self._totals(session), "accounts": _accounts(session)}
                await self._begin_adhoc()
                totals["changes"] = session.changes()  # those of all that is in its log
            finally:
                self._open.set()
            return totals

    def _refuse_when_busy(self) -> None:
        if self.session is not None and (live := len(self.session.control.live)):
            raise ApiError(409, f"{live} requests are under way; wait until they end", code="busy")

    def _own_parameters(self, policy: str) -> dict[str, float]:
        """What the scenario says to a policy, be it its own or one that takes its place."""
        return self.scenario.only(self.deployment.name, policy).deployments[0].policy.told

    def _start_policy(self, policy: Policy, told: Told) -> None:
        """Start a policy, within the time it has. Raises ApiError where that fails."""
        try:
            setup = told.setup(self.scenario, self.deployment, policy)
        except ModelError as error:
            raise ApiError(400, str(error), "future" if str(error).startswith("future") else "lengths") from None
        if setup.future is None and wants_future(policy):
            raise ApiError(
                400,
                f"policy {told.policy!r} has to be told the future when a load begins, and this one was begun without; "
                f"prfaas load --policy {told.policy}",
                "policy",
            )
        try:
            self._ask.start(policy, setup, POLICY_START_LIMIT_S)
        except Exception as error:
            raise ApiError(400, f"the policy cannot start: {type(error).__name__}: {error}", "policy") from error

    async def _begin(self, session_id: str, policy: Policy, told: Told, lead_s: float) -> Session:
        scenario, deployment = self.scenario, self.deployment
        self._start_policy(policy, told)
        self._open.clear()
        self._epoch += 1
        self._all_ready.clear()
        self._t0_ns = time.monotonic_ns() + round(lead_s * 1e9)
        for link in self.links.values():
            link.send(Epoch(self._epoch, self._t0_ns))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self._all_ready.wait()
        if self.session is not None:
            self.metrics.count(self.session)
            self.session.close()
        control = Control(
            self._fleet,
            self._cost,
            scenario.link.rate_bps,
            policy,
            Homogeneous(),
            control_rules(scenario, deployment),
            ask=self._ask,
            tick=self._ask.tick,
        )
        folder = Path(self.config.loads_dir) / session_id
        clock = Clock(self._t0_ns, scenario.scale.time_scale)
        session = Session(session_id, clock, control, told, self._send, folder, before=self.session)
        self.metrics.begun()
        session.on_end = self.metrics.ended
        self.session = session
        self.live.session_began()
        self.lag = Lateness()
        log.info("session begins", session=session_id, policy=told.policy, epoch=self._epoch)
        for node, epoch in self._ready.items():
            if epoch == self._epoch and self.links[node].channel is not None:
                session.node_up(node, self._roles[node])
        self._open.set()
        return session

    async def _begin_adhoc(self) -> None:
        self._adhoc += 1
        spec = self.deployment.policy
        told = Told(spec.name, spec.told, self._lengths, self._still)
        await self._begin(f"adhoc-{self._adhoc}", load_policy(spec.name), told, 0.0)

    # workers
    def _send(self, node: str, message: AnyMessage) -> bool:
        return self.links[node].send(message)

    def _on_up(self, channel: Channel) -> None:
        if self._epoch:
            channel.send(Epoch(self._epoch, self._t0_ns))

    def _on_down(self, node: str, reason: str) -> None:
        log.warning("node lost", node=node, reason=reason)
        self._ready.pop(node, None)
        self._check_ready()
        if self.session is not None:
            self.session.node_lost(node, reason)

    def _on_message(self, channel: Channel, message: AnyMessage) -> None:
        node = channel.peer
        if isinstance(message, Ready):
            if message.epoch == self._epoch:
                self._ready[node] = message.epoch
                self._roles[node] = message.role  # type: ignore[assignment]
                self._check_ready()
                if self._open.is_set() and self.session is not None:
                    self.session.node_up(node, self._roles[node])
        elif self.session is not None and self._ready.get(node) == self._epoch:
            self.session.node_message(node, message)

    def _check_ready(self) -> None:
        connected = [node for node, link in self.links.items() if link.channel is not None]
        if all(self._ready.get(node) == self._epoch for node in connected):
            self._all_ready.set()

    # HTTP
    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard.middleware, errors_as_answers, same_origin])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/metrics/targets", self._scraper.get_targets),
                web.get("/metrics/{name}", self._scraper.get_others),
                web.get("/prfaas/status", self._status),
                web.post("/prfaas/policy", self._set_policy),
                web.post("/prfaas/nodes/{name}/hinder", self._hinder),
                web.post("/prfaas/loads", self._begin_load),
                web.get("/prfaas/loads/{id}", self._load),
                web.post("/prfaas/loads/{id}/end", self._end_load),
            ]
        )
        self.live.add_to(app)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        request_id = request.headers.get("X-Request-Id") or f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        if len(request_id) > 128 or not request_id.isprintable():
            raise ApiError(400, "X-Request-Id: at most 128 printable characters", "X-Request-Id")
        request["id"] = request_id
        ask = parse(await read_body(request, self.limits.most_body_bytes), chat=chat, limits=self.limits)
        await self._open.wait()
        session = self.session
        assert session is not None
        try:
            stream = session.arrive(request_id, ask)
        except KeyError:
            raise ApiError(
                409, f"X-Request-Id {request_id!r}: a request of that id is under way; use another", "X-Request-Id"
            ) from None
        try:
            return await (self._streamed if ask.stream else self._whole)(request, ask, stream)
        finally:
            session.client_gone(stream)  # a no-op after the answer's end

    async def _whole(self, request: web.Request, ask: Ask, stream: Stream) -> web.StreamResponse:
        texts: list[str] = []
        ids: list[int] = []
        while True:
            item = await stream.queue.get()
            if isinstance(item, Completed):
                break
            if isinstance(item, Failed):
                raise _failure(item)
            texts.append(item.text)
            ids += item.ids
        record = item.record
        body = whole(
            ask,
            stream.request_id,
            int(time.time()),
            "".join(texts),
            tuple(ids),
            record.finish_reason,
            usage(ask, record.output_tokens, record.cached_tokens),
        )
        return web.Response(body=body, content_type=JSON, headers={"X-Request-Id": stream.request_id})

    async def _streamed(self, request: web.Request, ask: Ask, stream: Stream) -> web.StreamResponse:
        item = await stream.queue.get()
        if isinstance(item, Failed):  # nothing was sent yet: a plain error
            raise _failure(item)
        stream.on_unread = lambda: self.guard.drop(request)
        chunks = Chunks(ask, stream.request_id, int(time.time()))
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Request-Id": stream.request_id,
            }
        )
        await response.prepare(request)
        if ask.chat:
            await response.write(chunks.role())
        while not isinstance(item, Completed | Failed):
            if chunks.is_worth_sending(item.text):
                await response.write(chunks.text(item.text, item.ids))
            item = await stream.queue.get()
        if isinstance(item, Failed):
            await response.write(stream_error(item.record.error_message, item.record.error))
        else:
            record = item.record
            end = chunks.last(record.finish_reason)
            if ask.include_usage:
                end += chunks.usage(usage(ask, record.output_tokens, record.cached_tokens))
            await response.write(end + DONE)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.limits.model,
            "object": "model",
            "created": 0,
            "owned_by": "prfaas-testbed",
            "max_model_len": self.limits.max_input_tokens,
        }
        return json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        nodes = self.session.control.view.nodes.values() if self.session else ()
        serving = {role: sum(n.alive and n.role == role for n in nodes) for role in ("prefill", "decode")}
        return json_response(
            {"status": "ok" if all(serving.values()) else "unavailable", "live": serving},
            200 if all(serving.values()) else 503,
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        assert self.session is not None
        text = self.metrics.render(self.session, self.lag.p99_s())
        return web.Response(body=text, headers={"Content-Type": self.metrics.content_type})

    async def _status(self, request: web.Request) -> web.Response:
        session = self.session
        assert session is not None
        nodes = [
            {
                "name": n.name,
                "site": n.site,
                "role": n.role,
                "alive": n.alive,
                "queued_requests": n.queued_requests,
                "assigned_requests": n.assigned_requests,
                "decoding_requests": n.decoding_requests,
                "slots": n.slots,
                "refused_connections": session.refused_connections(n.name),
                "told_age_s": session.clock.now_s() - n.told_s if math.isfinite(n.told_s) else None,
            }
            for n in session.control.view.nodes.values()
        ]
        policy = session.control.policy
        name = f"{type(policy).__module__}:{type(policy).__qualname__}"
        return json_response(
            {
                "scenario": self.scenario.name,
                "deployment": self.deployment.name,
                "policy": name,
                "session": self._totals(session),
                "clients": self.guard.to_json(),
                "nodes": nodes,
            }
        )

    def _totals(self, session: Session) -> dict[str, Any]:
        return {**session.totals(), "gateway_late_p99_s": self.lag.p99_s(), "gateway_late_max_s": self.lag.max_s}

    async def _begin_load(self, request: web.Request) -> web.Response:
        body = await json_object(request, {"lead_s", "lengths", "policy", "parameters", "rate_rps", "future"})
        lead_s = lead_of(body)
        check_finite(body.get("rate_rps"), "rate_rps")
        name, policy = policy_of(body, self.deployment.policy.name)
        parameters = {**self._own_parameters(name), **parameters_of(body)}
        lengths = self._lengths if body.get("lengths") is None else body["lengths"]
        told = Told(name, parameters, lengths, body.get("future"))
        load_id = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
        begun = self.begin(load_id, policy, told, lead_s)
        session = await _to_the_end(begun)
        return json_response(
            {
                "id": load_id,
                "t0_ns": session.clock.t0_ns,
                "time_scale": session.clock.scale,
                "threshold_tokens": session.totals()["threshold_tokens"],
                "model": self.limits.model,
                **session.files,
            }
        )

    async def _set_policy(self, request: web.Request) -> web.Response:
        """Another policy for the present session; what was observed stays."""
        body = await json_object(request, {"policy", "parameters"})
        if body.get("policy") is None:
            raise ApiError(400, "policy: say which, by name or as package.module:Class", "policy")
        name, policy = policy_of(body, "")
        parameters = {**self._own_parameters(name), **parameters_of(body)}
        await self._open.wait()
        session = self.session
        assert session is not None
        self._start_policy(policy, msgspec.structs.replace(session.told, policy=name, parameters=parameters))
        session.set_policy(policy, name, parameters)
        log.info("policy set", policy=name, session=session.id)
        return json_response(
            {"policy": name, "session": session.id, "threshold_tokens": session.totals()["threshold_tokens"]}
        )

    def _the_load(self, request: web.Request) -> Session:
        session = self.session
        if session is None or session.id != request.match_info["id"]:
            raise _no_load(request.match_info["id"])
        return session

    async def _load(self, request: web.Request) -> web.Response:
        session = self._the_load(request)
        return json_response({**self._totals(session), "accounts": _accounts(session)})

    async def _hinder(self, request: web.Request) -> web.Response:
        """A fault for a worker, or its healing (`emulator.messages.Hinder`)."""
        name = request.match_info["name"]
        body = await json_object(request, {"slowdown", "held_bytes"})
        for field in ("slowdown", "held_bytes"):
            check_finite(body.get(field), field)
        slowdown, held_bytes = body.get("slowdown", 1.0), body.get("held_bytes", 0)
        if slowdown < 1:
            raise ApiError(400, f"slowdown = {slowdown!r}: must be at least 1", "slowdown")
        if held_bytes < 0 or held_bytes != int(held_bytes):
            raise ApiError(400, f"held_bytes = {held_bytes!r}: must be a whole number, at least 0", "held_bytes")
        if name not in self.links:
            raise ApiError(404, f"no node {name!r}; there are {', '.join(self.links)}", code="not_found")
        if not self.links[name].send(Hinder(float(slowdown), int(held_bytes))):
            raise ApiError(409, f"no connection to {name}", code="unreachable")
        return json_response({"node": name, "slowdown": slowdown, "held_bytes": held_bytes})

    async def _end_load(self, request: web.Request) -> web.Response:
        """Wait for the load's last request and for the workers' last account of themselves; then its totals."""
        session = self._the_load(request)
        await session.idle.wait()
        return json_response(await _to_the_end(self.end(session)))


def _accounts(session: Session) -> dict[str, Any]:
    """What each worker said of itself last."""
    return {node: msgspec.to_builtins(told) for node, told in session.telemetry.items()}


async def _to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """A change of session, seen through even when whoever asked for it leaves: half of one leaves the door shut."""
    return await asyncio.shield(asyncio.ensure_future(change))


def _no_load(load_id: str) -> ApiError:
    return ApiError(404, f"no load {load_id!r} is under way", code="not_found")


def _failure(failed: Failed) -> ApiError:
    record = failed.record
    return ApiError(failed.http_status, record.error_message, None, record.error, failed.retry_after_s)


async def serve(config: Config) -> None:
    """Run the gateway until SIGTERM or SIGINT."""
    gateway = Gateway(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.stopped.set)
    await gateway.run()


def main() -> None:
    """The entry of `python -m testbed.gateway`."""
    parser = argparse.ArgumentParser(prog="testbed.gateway", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=Config)
    sys.path[:0] = config.import_path
    configure(config.name, config.scenario["log_level"])
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(config))
    except (ApiError, ProfileError, ScenarioError, TestbedError, TraceError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
