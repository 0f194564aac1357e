"""The serving instances as pure machines: a prefill instance and a decode instance.

Read `messages.py` first. Each machine has two calls: `handle(now_s, message)` returns what it emits, `next_s()` the
time it wants to be woken at. They know no clock, no socket and no chance, so the worker process and virtual time
carry the very same code. A machine advances by *scheduled* times: woken late, it is still called with the time it asked
for, so a late timer never delays the work behind it.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

import msgspec

from emulator.messages import (
    CONTROL,
    WIRE,
    Abort,
    Admitted,
    Announce,
    AnyMessage,
    AttemptFailed,
    Cancel,
    Damaged,
    Expect,
    Finished,
    Grant,
    Landed,
    Out,
    PeerLost,
    Prefill,
    Prefilled,
    Received,
    Refuse,
    StopTransmit,
    Tokens,
    Transmit,
    Unexpect,
    Wake,
)

Key = tuple[str, int]


class PrefillTiming(Protocol):
    """What a prefill costs: seconds and KV bytes of `tokens` uncached tokens."""

    def t_prefill(self, tokens: int) -> float: ...

    def s_kv(self, tokens: int) -> float: ...


class Machine(Protocol):
    """A pure machine: everything that decides has this shape."""

    def handle(self, now_s: float, message: AnyMessage) -> list[Out]: ...

    def next_s(self) -> float | None: ...


class _Prefill(msgspec.Struct, gc=False, eq=False):
    """One attempt at a prefill node, from its arrival until its KV has landed elsewhere. token: the grant's."""

    order: Prefill
    request_id: str
    attempt: int
    decode_node: str
    tokens: int
    kv_bytes: int
    start_s: float = 0.0
    end_s: float = 0.0
    token: int | None = None


class PrefillInstance:
    """Prefills one request at a time, first come first served, and offers each one's KV to its decode node.

    A prefill of l tokens with c cached takes T_prefill(l - c) and produces S_kv(l - c) bytes in `pieces` equal pieces
    while it runs (layer-wise prefill pipelining, paper section 3). The bytes count against the outbox from the start
    of the prefill until the receiver has them all; a prefill whose bytes do not fit waits (one that is alone always
    fits).

    outbox_bytes: model bytes of KV that may be produced or promised and not yet received.
    """

    def __init__(self, name: str, timing: PrefillTiming, *, pieces: int, outbox_bytes: int) -> None:
        self.name = name
        self.pieces = pieces
        self.outbox_bytes = outbox_bytes
        self.outbox_used = 0
        self.queued_tokens = 0
        self._timing = timing
        self._queue: deque[_Prefill] = deque()
        self._running: _Prefill | None = None
        self._unsent: dict[Key, _Prefill] = {}  # announced, not yet received; includes the running one
        self._handlers = {
            Prefill: self._on_prefill,
            Wake: self._on_wake,
            Grant: self._on_grant,
            Received: self._on_received,
            Refuse: self._on_refuse,
            Cancel: self._on_cancel,
            PeerLost: self._on_peer_lost,
        }

    @property
    def queued_requests(self) -> int:
        return len(self._queue)

    def running_requests(self, now_s: float) -> int:
        """1 while a prefill runs, else 0."""
        return int(self._running is not None)

    def next_s(self) -> float | None:
        """When the running prefill ends, in model seconds; None when idle."""
        return self._running.end_s if self._running else None

    def accepts(self, message: AnyMessage) -> bool:
        """Whether this kind of message is for this machine."""
        return type(message) in self._handlers

    def handle(self, now_s: float, message: AnyMessage) -> list[Out]:
        """Accept one message at `now_s` (model seconds) and return what follows from it."""
        out: list[Out] = []
        self._handlers[type(message)](now_s, message, out)  # type: ignore[operator]
        return out

    def _on_prefill(self, now_s: float, order: Prefill, out: list[Out]) -> None:
        tokens = order.input_tokens - order.cached_tokens
        kv_bytes = round(self._timing.s_kv(tokens))
        self._queue.append(_Prefill(order, order.request_id, order.attempt, order.decode_node, tokens, kv_bytes))
        self.queued_tokens += tokens
        self._start_next(now_s, out)

    def _start_next(self, now_s: float, out: list[Out]) -> None:
        if self._running or not self._queue:
            return
        job = self._queue[0]
        if self._unsent and self.outbox_used + job.kv_bytes > self.outbox_bytes:
            return
        self._queue.popleft()
        self.queued_tokens -= job.tokens
        job.start_s = now_s
        job.end_s = now_s + self._timing.t_prefill(job.tokens)
        self.outbox_used += job.kv_bytes
        self._unsent[job.request_id, job.attempt] = job
        self._running = job
        order = job.order
        out.append(
            (
                job.decode_node,
                Announce(job.request_id, job.attempt, self.name, job.kv_bytes, order.input_tokens, order.output_tokens),
            )
        )

    def _on_wake(self, now_s: float, _: Wake, out: list[Out]) -> None:
        job = self._running
        if job is None or now_s < job.end_s:
            return
        self._running = None
        out.append((CONTROL, Prefilled(job.request_id, job.attempt, job.start_s, job.end_s, job.kv_bytes)))
        self._start_next(job.end_s, out)

    def _on_grant(self, now_s: float, grant: Grant, out: list[Out]) -> None:
        job = self._unsent.get((grant.request_id, grant.attempt))
        if job is None or job.token is not None:
            return
        job.token = grant.token
        out.append(
            (
                WIRE,
                Transmit(
                    job.request_id,
                    job.attempt,
                    job.decode_node,
                    grant.token,
                    job.kv_bytes,
                    self.pieces,
                    job.start_s,
                    job.end_s,
                ),
            )
        )

    def _on_received(self, now_s: float, done: Received, out: list[Out]) -> None:
        self._forget((done.request_id, done.attempt))
        self._start_next(now_s, out)

    def _on_refuse(self, now_s: float, refusal: Refuse, out: list[Out]) -> None:
        key = (refusal.request_id, refusal.attempt)
        if key in self._unsent:
            self._drop(key, out)
            out.append((CONTROL, AttemptFailed(*key, refusal.reason)))
            self._start_next(now_s, out)

    def _on_cancel(self, now_s: float, cancel: Cancel, out: list[Out]) -> None:
        key = (cancel.request_id, cancel.attempt)
        if key in self._unsent:
            out.append((self._unsent[key].decode_node, Abort(*key)))
            self._drop(key, out)
        else:
            for job in self._queue:
                if (job.request_id, job.attempt) == key:
                    self._queue.remove(job)
                    self.queued_tokens -= job.tokens
                    break
        self._start_next(now_s, out)

    def _on_peer_lost(self, now_s: float, lost: PeerLost, out: list[Out]) -> None:
        for key in [key for key, job in self._unsent.items() if job.decode_node == lost.node]:
            self._drop(key, out)
            out.append((CONTROL, AttemptFailed(*key, f"decode node {lost.node} is out of reach")))
        self._start_next(now_s, out)

    def _drop(self, key: Key, out: list[Out]) -> None:
        job = self._forget(key)
        if job is not None and job.token is not None:
            out.append((WIRE, StopTransmit(*key, job.decode_node, job.token)))
        if job is self._running:
            self._running = None

    def _forget(self, key: Key) -> _Prefill | None:
        job = self._unsent.pop(key, None)
        if job is not None:
            self.outbox_used -= job.kv_bytes
        return job


class _Transfer(msgspec.Struct, gc=False, eq=False):
    """One attempt at a decode node, from its announcement until its slot is free again. emitted: tokens that left."""

    offer: Announce
    key: Key
    kv_bytes: int
    token: int = 0
    landed_s: float = 0.0
    admitted_s: float = 0.0
    emitted: int = 0


class DecodeInstance:
    """Grants room to incoming KV, admits what has landed to its slots, and decodes one token a step in each.

    Reserve, then send: an announced transfer is granted room for all of its bytes, first in first out, out of
    `landing_bytes`; the room is free again at admission. Token k (from 1) of an answer leaves at admission + (k - 1)
    T_decode, and the slot is held L_out x T_decode, which makes equation (5), Theta_pd-d = N_d BS_max / (T_decode
    L_out), exact.

    slots: BS_max. step_s: T_decode, model seconds. landing_bytes: model bytes. stream_interval: tokens an event, or
    None for no token events at all (virtual time). token_base: added to every transfer token (random on the wire, so
    that no stale token is ever right).
    """

    def __init__(
        self,
        name: str,
        *,
        slots: int,
        step_s: float,
        landing_bytes: int,
        stream_interval: int | None = None,
        token_base: int = 0,
    ) -> None:
        self.name = name
        self.slots = slots
        self.step_s = step_s
        self.landing_bytes = landing_bytes
        self.landing_used = 0
        self._interval = stream_interval
        self._next_token = token_base
        self._free_slots = slots
        self._waiting: dict[Key, _Transfer] = {}  # announced, not granted; in order
        self._coming: dict[int, _Transfer] = {}  # granted, by token
        self._landed: dict[Key, _Transfer] = {}  # landed, not admitted; in order
        self._decoding: dict[Key, _Transfer] = {}
        self._events: list[tuple[float, int, _Transfer]] = []  # tokens to come
        self._freeing: list[tuple[float, int, _Transfer]] = []  # finished: when their slots are free
        self._sequence = 0
        self._handlers = {
            Wake: self._on_wake,
            Announce: self._on_announce,
            Landed: self._on_landed,
            Damaged: self._on_damaged,
            Abort: self._on_cancel,
            Cancel: self._on_cancel,
            PeerLost: self._on_peer_lost,
        }

    @property
    def queued_requests(self) -> int:
        """Requests whose KV has landed and that wait for a slot."""
        return len(self._landed)

    def running_requests(self, now_s: float) -> int:
        """Slots taken at `now_s` (a slot is held for one step after its last token)."""
        self._reclaim(now_s)
        return self.slots - self._free_slots

    @property
    def waiting_grants(self) -> int:
        return len(self._waiting)

    def next_s(self) -> float | None:
        """When the next token event or end is due, or a slot is free for one that waits; None when nothing is.

        Model seconds. A slot that nobody waits for is freed without an event: it is looked at when it is needed.
        """
        events = self._events
        if self._landed and self._freeing:
            freed_s = self._freeing[0][0]
            return events[0][0] if events and events[0][0] <= freed_s else freed_s
        return events[0][0] if events else None

    def accepts(self, message: AnyMessage) -> bool:
        """Whether this kind of message is for this machine."""
        return type(message) in self._handlers

    def handle(self, now_s: float, message: AnyMessage) -> list[Out]:
        """Accept one message at `now_s` (model seconds) and return what follows from it."""
        out: list[Out] = []
        self._handlers[type(message)](now_s, message, out)  # type: ignore[operator]
        return out

    def _on_announce(self, now_s: float, offer: Announce, out: list[Out]) -> None:
        if offer.kv_bytes > self.landing_bytes:
            reason = (
                f"{offer.kv_bytes} bytes of KV exceed the {self.landing_bytes} bytes of landing room of {self.name}"
            )
            out.append((offer.prefill_node, Refuse(offer.request_id, offer.attempt, reason)))
            return
        key = (offer.request_id, offer.attempt)
        self._waiting[key] = _Transfer(offer, key, offer.kv_bytes)
        self._grant(out)

    def _grant(self, out: list[Out]) -> None:
        waiting = self._waiting
        while waiting:
            key = next(iter(waiting))
            transfer = waiting[key]
            if self.landing_used + transfer.kv_bytes > self.landing_bytes:
                return
            del waiting[key]
            self.landing_used += transfer.kv_bytes
            token = transfer.token = self._next_token
            self._next_token = token + 1
            self._coming[token] = transfer
            sender = transfer.offer.prefill_node
            out.append((WIRE, Expect(token, transfer.kv_bytes, sender)))
            out.append((sender, Grant(key[0], key[1], token)))

    def _on_landed(self, now_s: float, landed: Landed, out: list[Out]) -> None:
        transfer = self._coming.pop(landed.token, None)
        if transfer is None:
            return
        transfer.landed_s = now_s
        key = transfer.key
        self._landed[key] = transfer
        out.append((transfer.offer.prefill_node, Received(key[0], key[1])))
        self._admit(now_s, out)

    def _reclaim(self, now_s: float) -> None:
        """The slots that are free by `now_s`."""
        freeing = self._freeing
        while freeing and freeing[0][0] <= now_s:
            del self._decoding[heapq.heappop(freeing)[2].key]
            self._free_slots += 1

    def _admit(self, now_s: float, out: list[Out]) -> None:
        landed = self._landed
        if not landed:
            return
        self._reclaim(now_s)
        admitted = False
        while self._free_slots and landed:
            key = next(iter(landed))
            transfer = landed.pop(key)
            self._free_slots -= 1
            self.landing_used -= transfer.kv_bytes
            transfer.admitted_s = now_s
            self._decoding[key] = transfer
            admitted = True
            out.append((CONTROL, Admitted(key[0], key[1], transfer.landed_s, now_s)))
            self._emit(transfer, 1, out)
        if admitted and self._waiting:
            self._grant(out)

    def _emit(self, transfer: _Transfer, upto: int, out: list[Out]) -> None:
        """Let the tokens up to number `upto` leave, and schedule what comes after them."""
        length = transfer.offer.output_tokens
        if self._interval:
            out.append((CONTROL, Tokens(*transfer.key, transfer.emitted, upto - transfer.emitted)))
        transfer.emitted = upto
        self._sequence += 1
        if upto == length:
            finished_s = transfer.admitted_s + (length - 1) * self.step_s
            freed_s = transfer.admitted_s + length * self.step_s
            key = transfer.key
            out.append((CONTROL, Finished(key[0], key[1], finished_s, freed_s, length)))
            heapq.heappush(self._freeing, (freed_s, self._sequence, transfer))
        else:
            upto = min(upto + self._interval, length) if self._interval else length
            due_s = transfer.admitted_s + (upto - 1) * self.step_s
            heapq.heappush(self._events, (due_s, self._sequence, transfer))

    def _on_wake(self, now_s: float, _: Wake, out: list[Out]) -> None:
        events, interval = self._events, self._interval
        while (due_s := self.next_s()) is not None and due_s <= now_s:
            if events and events[0][0] == due_s:
                transfer = heapq.heappop(events)[2]
                length = transfer.offer.output_tokens
                self._emit(transfer, min(transfer.emitted + interval, length) if interval else length, out)
            else:
                self._admit(due_s, out)

    def _on_damaged(self, now_s: float, damaged: Damaged, out: list[Out]) -> None:
        transfer = self._coming.pop(damaged.token, None)
        if transfer is None:
            return
        self.landing_used -= transfer.kv_bytes
        out.append((WIRE, Unexpect(damaged.token)))
        out.append((transfer.offer.prefill_node, Refuse(*transfer.key, damaged.reason)))
        out.append((CONTROL, AttemptFailed(*transfer.key, damaged.reason)))
        self._grant(out)

    def _on_cancel(self, now_s: float, over: Cancel | Abort, out: list[Out]) -> None:
        # A Cancel may overtake the Announce, and the sender's Abort cross the landing of its KV: both end every stage.
        key = (over.request_id, over.attempt)
        if key in self._decoding:
            self._leave(self._decoding.pop(key))
            self._free_slots += 1
            self._admit(now_s, out)
        elif key in self._landed:
            self.landing_used -= self._landed.pop(key).kv_bytes
        else:
            self._give_up(key, out)
        self._grant(out)

    def _leave(self, transfer: _Transfer) -> None:
        """What is still scheduled for a cancelled request is void."""
        for heap in (self._events, self._freeing):
            for i, entry in enumerate(heap):
                if entry[2] is transfer:
                    del heap[i]
                    heapq.heapify(heap)
                    break

    def _on_peer_lost(self, now_s: float, lost: PeerLost, out: list[Out]) -> None:
        unfinished = [*self._waiting.values(), *self._coming.values()]
        for transfer in unfinished:
            if transfer.offer.prefill_node == lost.node:
                self._give_up(transfer.key, out)
                out.append(
                    (
                        CONTROL,
                        AttemptFailed(*transfer.key, f"prefill node {lost.node} was lost before its KV had landed"),
                    )
                )
        self._grant(out)

    def _give_up(self, key: Key, out: list[Out]) -> None:
        """Forget a transfer that has not landed."""
        if self._waiting.pop(key, None) is not None:
            return
        for token, transfer in self._coming.items():
            if transfer.key == key:
                del self._coming[token]
                self.landing_used -= transfer.kv_bytes
                out.append((WIRE, Unexpect(token)))
                return
