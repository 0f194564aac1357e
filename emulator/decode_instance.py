"""The decode instance as a pure machine: room for incoming KV, slots, and a token a step in each slot.

Read `messages.py` and `instance.py` first. `batching.py` has the one whose step depends on its batch.
"""

from __future__ import annotations

import heapq

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
    Fetch,
    FetchDone,
    FetchGrant,
    FetchMiss,
    Finished,
    Grant,
    Hinder,
    Key,
    Landed,
    Out,
    PeerLost,
    Received,
    Refuse,
    Tokens,
    Unexpect,
    Wake,
)


class _Transfer(msgspec.Struct, gc=False, eq=False):
    """One attempt at a decode node, from its announcement until its slot is free again. emitted: tokens that left."""

    offer: Announce
    key: Key
    kv_bytes: int
    token: int = 0
    landed_s: float = 0.0
    admitted_s: float = 0.0
    step_s: float = 0.0
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
        self._held_bytes = 0  # of the landing room, by a fault
        self.slowdown = 1.0
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
            Fetch: self._on_fetch,
            FetchGrant: self._on_late,
            FetchDone: self._on_late,
            Hinder: self._on_hinder,
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
            out.append((WIRE, Expect(token, transfer.kv_bytes, sender, transfer.offer.input_tokens)))
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
            transfer.step_s = self.slowdown * self.step_s
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
            finished_s = transfer.admitted_s + (length - 1) * transfer.step_s
            freed_s = transfer.admitted_s + length * transfer.step_s
            key = transfer.key
            out.append((CONTROL, Finished(key[0], key[1], finished_s, freed_s, length)))
            heapq.heappush(self._freeing, (freed_s, self._sequence, transfer))
        else:
            upto = min(upto + self._interval, length) if self._interval else length
            due_s = transfer.admitted_s + (upto - 1) * transfer.step_s
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

    def _on_hinder(self, now_s: float, fault: Hinder, out: list[Out]) -> None:
        self.slowdown = fault.slowdown
        self.landing_used += fault.held_bytes - self._held_bytes
        self._held_bytes = fault.held_bytes
        self._grant(out)

    # It may have served prefill before, and been told of as a holder of cached prefixes.
    def _on_fetch(self, now_s: float, fetch: Fetch, out: list[Out]) -> None:
        out.append((fetch.node, FetchMiss(fetch.request_id, fetch.attempt)))

    def _on_late(self, now_s: float, late: FetchGrant | FetchDone, out: list[Out]) -> None:
        """Of a fetch whose other end knows, or is about to, that this node has nothing for it any more."""
