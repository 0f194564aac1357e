"""One load on the wall clock: a Control, the streams of its clients, and the files its rows and events go to.

A session begins at one monotonic instant, t = 0 for everything in it, with empty workers and a freshly started policy.
Between loads an "adhoc" session serves whoever comes. It only carries events and commands; `control/` decides.
"""

from __future__ import annotations

import asyncio
import csv
import io
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import msgspec

from emulator.clock import TIMER_ROUND_S, Clock
from emulator.log import Log
from emulator.messages import AnyMessage, Prefill, Telemetry, Tokens
from testbed.control import (
    CLIENT,
    Arrive,
    ClientGone,
    Completed,
    Control,
    Disturbed,
    Event,
    Failed,
    NodeLost,
    NodeUp,
    PolicySet,
    Record,
    Tick,
    tick_policy,
)
from testbed.openai_api import Ask
from testbed.openai_model import Work
from testbed.report.rows import GATEWAY_COLUMNS, gateway_row
from testbed.scheduler.api import Action, Decision, Policy, Reject, RequestView, Role, Setup, SystemView
from testbed.told import Told

MOST_UNREAD: Final = 4096  # messages of tokens that may wait for one client
FLUSH_S: Final = 0.5  # wall seconds between writes of rows and events
INSIST_S: Final = 0.0002  # wall seconds between rings: a policy that catches all is hit outside its `try` in the end


log = Log("gateway")

Answer = TypeVar("Answer")  # of a policy's method


class PolicyTooSlowError(Exception):
    """A policy took longer than it may on the request path."""


class PolicyQuitError(Exception):
    """A policy raised what would end the process or the task: SystemExit, KeyboardInterrupt, CancelledError."""


class _Alarm(BaseException):
    """Raised inside a policy that is too slow; no Exception, so that the policy's own handlers do not swallow it."""


class BoundedCall:
    """Calls a policy with a limit (wall seconds), enforced by SIGALRM: policies run in the gateway's main thread.

    A policy that is too slow, or that would end the process, raises PolicyTooSlowError or PolicyQuitError.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._asking = False
        signal.signal(signal.SIGALRM, self._ring)

    def __call__(self, policy: Policy, request: RequestView, view: SystemView) -> Decision | Reject:
        return self._within(self.limit_s, "no decision", policy.route, request, view)

    def tick(self, policy: Policy, view: SystemView) -> Sequence[Action]:
        """As `tick_policy`, within the limit."""
        return self._within(self.limit_s, "not done looking around", _looked, policy, view)

    def start(self, policy: Policy, setup: Setup, limit_s: float) -> None:
        self._within(limit_s, "not ready", policy.start, setup)

    def _within(self, limit_s: float, lacking: str, call: Callable[..., Answer], *args: object) -> Answer:
        self._asking = True
        signal.setitimer(signal.ITIMER_REAL, limit_s, INSIST_S)
        try:
            return call(*args)
        except _Alarm:
            self._asking = False  # it rings again and again
            raise PolicyTooSlowError(f"{lacking} within {limit_s:g} s") from None
        except Exception:
            raise
        except BaseException as error:
            raise PolicyQuitError(f"{type(error).__name__}: {error}") from error
        finally:
            self._asking = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._asking:
            raise _Alarm


def _looked(policy: Policy, view: SystemView) -> Sequence[Action]:
    """All of what a policy asks for, also of one that makes it up on the way."""
    return list(tick_policy(policy, view))


class Stream:
    """What a client's handler reads: text of tokens, then Completed or Failed. on_unread: told when too much waits."""

    __slots__ = ("on_unread", "queue", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.on_unread: Callable[[], None] = lambda: None
        self.queue: asyncio.Queue[Tokens | Completed | Failed] = asyncio.Queue()


class Session:
    """The live edge of one Control. send(node, message): to a worker's control connection. told: what its policy was
    told.

    folder: gets `gateway.csv` (one row a request), `events.jsonl` (every event control saw, in order) and `setup.json`
    (`told`): what a replay takes. before: the session before this one, from whose end on the kernel's own counters
    count. files: the three, by their paths from the folder's parent.
    """

    def __init__(
        self,
        session_id: str,
        clock: Clock,
        control: Control,
        told: Told,
        send: Callable[[str, AnyMessage], bool],
        folder: Path,
        before: Session | None = None,
    ) -> None:
        self.id = session_id
        self.clock = clock
        self.control = control
        self.told = told
        self.policy = told.policy  # the name of the one in charge
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.telemetry: dict[str, Telemetry] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.on_end: Callable[[Record], None] = lambda record: None
        self._send = send
        self._retransmits_before: dict[str, int] = before.retransmits() if before else {}
        self._streams: dict[str, Stream] = {}
        self._work: dict[str, Work] = {}  # of those whom a model is to answer
        folder.mkdir(parents=True, exist_ok=True)
        self.rows_path, self.events_path = folder / "gateway.csv", folder / "events.jsonl"
        paths = {"rows": self.rows_path, "events": self.events_path, "setup": told.save(folder)}
        self.files = {what: str(path.relative_to(folder.parent)) for what, path in paths.items()}
        self._rows = io.StringIO(newline="")
        self._csv = csv.writer(self._rows, lineterminator="\n")
        self._csv.writerow(GATEWAY_COLUMNS)
        self._events: list[bytes] = []
        self._logged = 0  # changes that are in the log
        self._encode = msgspec.json.Encoder().encode
        self._rows_file = self.rows_path.open("w", encoding="utf-8", newline="")
        self._events_file = self.events_path.open("wb")
        self._loop = asyncio.get_running_loop()
        self._flusher: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = 0.0
        self._flush()
        self._arm()

    # what the outside says
    def arrive(self, request_id: str, ask: Ask) -> Stream:
        """A request has come; its stream. Raises KeyError when a request of that id is under way."""
        if request_id in self._streams:
            raise KeyError(request_id)
        stream = self._streams[request_id] = Stream(request_id)
        if ask.work is not None:
            self._work[request_id] = ask.work
        self.idle.clear()
        self._handle(
            Arrive(request_id, ask.input_tokens, ask.output_tokens, ask.block_hashes, ask.block_size, ask.session)
        )
        return stream

    def client_gone(self, stream: Stream) -> None:
        """The client left before its answer was whole."""
        if self._streams.get(stream.request_id) is stream:
            self._handle(ClientGone(stream.request_id))

    def node_up(self, node: str, role: Role) -> None:
        self._handle(NodeUp(node, role))

    def node_lost(self, node: str, reason: str) -> None:
        self._handle(NodeLost(node, reason))

    def set_policy(self, policy: Policy, name: str, parameters: dict[str, float]) -> None:
        """Put another policy, started already, in charge of what is still to be decided."""
        self.policy = name
        self.control.set_policy(policy)
        self._handle(PolicySet(name, parameters))

    def disturbed(self, what: str, node: str, *, healed: bool) -> None:
        """Somebody made something go wrong by hand, or healed it."""
        self._handle(Disturbed(what, node, healed))

    def node_message(self, node: str, message: AnyMessage) -> None:
        """A worker's message: token text goes straight to its client, everything else to control."""
        if type(message) is Tokens:
            if self.control.is_current(message.request_id, message.attempt):
                stream = self._streams[message.request_id]
                if stream.queue.qsize() < MOST_UNREAD:
                    stream.queue.put_nowait(message)
                else:
                    stream.on_unread()
            return
        if type(message) is Telemetry:
            self.telemetry[node] = message
        self._handle(message)  # type: ignore[arg-type]

    def _handle(self, event: Event) -> None:
        control, now_s = self.control, self.clock.now_s()
        self._events.append(self._encode({"t_s": now_s, "event": event}))
        for destination, command in control.handle(now_s, event):
            if type(command) is Prefill:
                self._log_routed(command)
            if destination == CLIENT:
                assert isinstance(command, Completed | Failed)
                self._end(command)
            else:
                assert not isinstance(command, Completed | Failed)
                if not self._send(destination, self._with_work(command)):
                    # Its connection is gone and the loss is about to be told; control then tries elsewhere.
                    self._loop.call_soon(self.node_lost, destination, "no connection to it")
        if len(control.changes) != self._logged:
            self._log_changes()
        if control.next_s() < self._armed_s:
            self._arm()

    def _with_work(self, command: AnyMessage) -> AnyMessage:
        """An order to prefill goes out with the prompt, which control does not know."""
        if isinstance(command, Prefill) and (work := self._work.get(command.request_id)) is not None:
            return msgspec.structs.replace(command, prompt=work.prompt, sampling=work.sampling)
        return command

    def _arm(self) -> None:
        """Wait for the time at which control wants to look around."""
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = self.control.next_s()
        self._timer = self._loop.call_at(self.clock.monotonic_s(self._armed_s) + TIMER_ROUND_S, self._look)

    def _look(self) -> None:
        if self.clock.now_s() >= self._armed_s:
            self._handle(Tick())
        self._arm()

    def _end(self, command: Completed | Failed) -> None:
        record = command.record
        self.counts[record.status] += 1
        if record.error:
            self.errors[record.error] += 1
        self._csv.writerow(gateway_row(record))
        self._streams.pop(record.request_id).queue.put_nowait(command)
        self._work.pop(record.request_id, None)
        _log_ended(record)
        self.on_end(record)
        if not self._streams:
            self.idle.set()

    # the log
    def _log_routed(self, order: Prefill) -> None:
        record = self.control.live[order.request_id]
        log.info(
            "routed",
            request_id=order.request_id,
            attempt=order.attempt,
            t_s=record.route_s,
            prefill=record.prefill_node,
            decode=order.decode_node,
            reason=record.reason,
            input_tokens=order.input_tokens,
            cached_tokens=order.cached_tokens or None,
            policy_error=record.policy_error or None,
        )

    def _log_changes(self) -> None:
        """What the scheduler changed, and nodes that came and went."""
        for one in self.control.changes[self._logged :]:
            fields = {"node": one.node or None, "before": one.before, "after": one.after, "trigger": one.trigger}
            log.info(f"{one.kind} changed", t_s=one.t_s, **fields)
        self._logged = len(self.control.changes)

    # files
    def _flush(self) -> None:
        self._write()
        self._flusher = self._loop.call_later(FLUSH_S, self._flush)

    def _write(self) -> None:
        if self._rows.tell():
            self._rows_file.write(self._rows.getvalue())
            self._rows_file.flush()
            self._rows.seek(0)
            self._rows.truncate()
        if self._events:
            self._events_file.write(b"\n".join(self._events) + b"\n")
            self._events_file.flush()
            self._events.clear()

    def close(self) -> None:
        """Write what is left and close the files."""
        for timer in (self._flusher, self._timer):
            if timer is not None:
                timer.cancel()
        self._write()
        self._rows_file.close()
        self._events_file.close()

    def retransmits(self) -> dict[str, int]:
        """TCP segments sent again since the connections were made, by the node that sent them."""
        told = {node: sum(path.retransmits for path in told.paths) for node, told in self.telemetry.items()}
        return {**self._retransmits_before, **told}

    def refused_connections(self, node: str) -> dict[str, int]:
        """Strangers that the node has refused since its process began, by reason."""
        told = self.telemetry.get(node)
        return dict(told.refused_connections) if told else {}

    def changes(self) -> list[dict[str, Any]]:
        """What the scheduler changed so far, in order, as plain data."""
        return [msgspec.to_builtins(change) for change in self.control.changes]

    def totals(self) -> dict[str, Any]:
        """What came of the session so far. Bytes that crossed to the other site, by the one they came from: kv model
        bytes, wire bytes on the wire."""
        kv: Counter[str] = Counter()
        wire: Counter[str] = Counter()
        nodes = self.control.view.nodes
        for receiver, told in self.telemetry.items():
            for landed, total in ((told.kv_landed_bytes, kv), (told.wire_landed_bytes, wire)):
                for sender, count in landed.items():
                    if nodes[sender].site != nodes[receiver].site:
                        total[nodes[sender].site] += count
        return {
            "id": self.id,
            "t0_ns": self.clock.t0_ns,
            "time_scale": self.clock.scale,
            "now_ns": time.monotonic_ns(),
            "arrived": sum(self.counts.values()) + len(self._streams),
            "in_flight": len(self._streams),
            "ended": dict(self.counts),
            "errors": dict(self.errors),
            "kv_landed_bytes": dict(kv),
            "wire_landed_bytes": dict(wire),
            "refused_frames": sum(told.refused_frames for told in self.telemetry.values()),
            "refused_states": sum(told.refused_states for told in self.telemetry.values()),
            "late_p99_s": max((told.late_p99_s for told in self.telemetry.values()), default=0.0),
            "late_max_s": max((told.late_max_s for told in self.telemetry.values()), default=0.0),
            "retransmits": sum(
                max(0, count - self._retransmits_before.get(node, 0)) for node, count in self.retransmits().items()
            ),
            "policy_errors": dict(self.control.policy_errors),
            "changes": self.changes(),
            "threshold_tokens": getattr(self.control.policy, "threshold_tokens", None),
            **self.files,
        }


def _log_ended(record: Record) -> None:
    tell = log.warning if record.status == "failed" else log.info
    tell(
        "ended",
        request_id=record.request_id,
        attempt=record.attempts,
        status=record.status,
        error=record.error or None,
        message=record.error_message or None,
        ttft_s=record.admitted_s - record.arrive_s if record.admitted else None,
        output_tokens=record.output_tokens,
    )
