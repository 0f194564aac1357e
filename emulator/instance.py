"""The serving instances as pure machines: what they have in common, and the prefill instance.

Read `messages.py` first; `decode_instance.py` is the other one. Each machine has two calls: `handle(now_s, message)`
returns what it emits, `next_s()` the time it wants to be woken at. They know no clock, no socket and no chance, so the
worker process and virtual time carry the very same code. A machine advances by *scheduled* times: woken late, it is
still called with the time it asked for, so a late timer never delays the work behind it.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from emulator.kvcache import Changes, Ids, Lease, NodePool
from emulator.messages import (
    CONTROL,
    WIRE,
    Abort,
    Announce,
    AnyMessage,
    AttemptFailed,
    Cancel,
    Grant,
    Hinder,
    Key,
    Out,
    PeerLost,
    Prefill,
    Prefilled,
    Received,
    Refuse,
    StopTransmit,
    Transmit,
    Wake,
)
from emulator.prefix_cache import PrefixCache


class PrefillTiming(Protocol):
    """What a prefill costs: seconds and KV bytes of `tokens` uncached tokens."""

    def t_prefill(self, tokens: int) -> float: ...

    def s_kv(self, tokens: int) -> float: ...


class Machine(Protocol):
    """A pure machine: everything that decides has this shape."""

    def handle(self, now_s: float, message: AnyMessage) -> list[Out]: ...

    def next_s(self) -> float | None: ...


class _Prefill(msgspec.Struct, gc=False, eq=False):
    """One attempt at a prefill node, from its arrival until its KV has landed elsewhere.

    tokens: to be computed, as control believed. cached_tokens, kv_bytes: with a pool, known from the start of the
    prefill on. token: the grant's. ids, lease: of a pool; the lease is held while the prefill runs.
    """

    order: Prefill
    request_id: str
    attempt: int
    decode_node: str
    tokens: int
    kv_bytes: int
    cached_tokens: int
    ids: Ids = ()
    start_s: float = 0.0
    end_s: float = 0.0
    token: int | None = None
    lease: Lease | None = None


class PrefillInstance:
    """Prefills one request at a time, first come first served, and offers each one's KV to its decode node.

    A prefill of l tokens with c cached takes T_prefill(l - c) and produces S_kv(l - c) bytes in `pieces` equal pieces
    while it runs (layer-wise prefill pipelining, paper section 3). The bytes count against the outbox from the start
    of the prefill until the receiver has them all; a prefill whose bytes do not fit waits (one that is alone always
    fits).

    With a pool, c is what the pool holds of the prompt when the prefill starts; one whose order names another node as
    the holder of more is passed over in the queue until that has been fetched (or not). The KV to be sent takes
    transfer-cache room in the pool as well, under the same rule as in the outbox. At its end the prompt's whole blocks
    are kept. Without a pool, c is what the order says.

    outbox_bytes: model bytes of KV that may be produced or promised and not yet received. token_base: added to the
    token of every fetch, as in `DecodeInstance`. sends_whole: what is sent is S_kv(l), the cached part too, since the
    decode node has none of it; without it S_kv(l - c), the paper's own reckoning.
    """

    def __init__(
        self,
        name: str,
        timing: PrefillTiming,
        *,
        pieces: int,
        outbox_bytes: int,
        pool: NodePool | None = None,
        token_base: int = 0,
        sends_whole: bool = False,
    ) -> None:
        self.name = name
        self.pieces = pieces
        self.sends_whole = sends_whole
        self.outbox_bytes = outbox_bytes
        self.outbox_used = 0
        self.queued_tokens = 0
        self.pool = pool
        self._s_kv, self._t_prefill = timing.s_kv, timing.t_prefill
        self.slowdown = 1.0
        self._cache = self._make_cache(pool, token_base) if pool is not None else None
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
            Hinder: self._on_hinder,
        }
        if self._cache is not None:
            self._handlers |= dict.fromkeys(self._cache.handlers, self._on_cache)

    def _make_cache(self, pool: NodePool, token_base: int) -> PrefixCache:
        return PrefixCache(self.name, pool, token_base)

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
        cached = order.cached_tokens
        tokens = order.input_tokens - cached
        cache = self._cache
        kv_bytes = self._kv_bytes(order.input_tokens, cached) if cache is None else 0
        job = _Prefill(order, order.request_id, order.attempt, order.decode_node, tokens, kv_bytes, cached)
        if cache is not None:
            block_tokens = cache.pool.shape.block_tokens
            job.ids = order.block_ids[: (order.input_tokens - 1) // block_tokens]  # at least one token is computed
            cache.want((job.request_id, job.attempt), job.ids, cached // block_tokens, order.cache_node, out)
        self._queue.append(job)
        self.queued_tokens += tokens
        self._start_next(now_s, out)

    def _start_next(self, now_s: float, out: list[Out]) -> None:
        if self._running or not self._queue:
            return
        if self._cache is None:
            job = self._queue[0]
            if self._unsent and self.outbox_used + job.kv_bytes > self.outbox_bytes:
                return
            self._queue.popleft()
        else:
            ready = self._first_ready(self._cache)
            if ready is None or not self._take(ready, self._cache, out):
                return
            job = ready
            self._queue.remove(job)
        self.queued_tokens -= job.tokens
        job.start_s = now_s
        self.outbox_used += job.kv_bytes
        self._unsent[job.request_id, job.attempt] = job
        self._running = job
        order = job.order
        out.append(
            (
                job.decode_node,
                Announce(
                    job.request_id,
                    job.attempt,
                    self.name,
                    job.kv_bytes,
                    order.input_tokens,
                    order.output_tokens,
                    order.sampling,
                ),
            )
        )
        self._begin(job, out)

    def _begin(self, job: _Prefill, out: list[Out]) -> None:
        """The computation starts, and when it ends is known."""
        job.end_s = job.start_s + self.slowdown * self._t_prefill(job.order.input_tokens - job.cached_tokens)

    def _kv_bytes(self, input_tokens: int, cached_tokens: int) -> int:
        """What crosses of a prefill."""
        return round(self._s_kv(input_tokens if self.sends_whole else input_tokens - cached_tokens))

    def _first_ready(self, cache: PrefixCache) -> _Prefill | None:
        for job in self._queue:
            if not cache.awaits((job.request_id, job.attempt)):
                return job
        return None

    def _take(self, job: _Prefill, cache: PrefixCache, out: list[Out]) -> bool:
        """Hold what the prefill reuses, and room for the KV of the rest; False, and nothing held, if there is none."""
        pool = cache.pool
        lease = pool.begin(job.ids)
        cached = lease.hit_blocks * pool.shape.block_tokens
        kv_bytes = self._kv_bytes(job.order.input_tokens, cached)
        fits = self.outbox_used + kv_bytes <= self.outbox_bytes
        room = pool.reserve((job.request_id, job.attempt), kv_bytes) if fits or not self._unsent else None
        if room is None and self._unsent:
            pool.release(lease)
            return False
        job.lease, job.cached_tokens, job.kv_bytes = lease, cached, kv_bytes
        cache.tell(room, out)
        return True

    def _on_cache(self, now_s: float, message: AnyMessage, out: list[Out]) -> None:
        assert self._cache is not None
        self._cache.handlers[type(message)](now_s, message, out)
        self._start_next(now_s, out)

    def _on_wake(self, now_s: float, _: Wake, out: list[Out]) -> None:
        job = self._running
        if job is not None and now_s >= job.end_s:
            self._end(job, out)

    def _end(self, job: _Prefill, out: list[Out]) -> None:
        """The computation has ended, at job.end_s."""
        self._running = None
        out.append(
            (
                CONTROL,
                Prefilled(
                    job.request_id,
                    job.attempt,
                    job.start_s,
                    job.end_s,
                    job.kv_bytes,
                    job.cached_tokens,
                    0 if self._cache is None else self._cache.fetched((job.request_id, job.attempt)),
                ),
            )
        )
        if self._cache is not None and job.lease is not None:
            self._keep(job, self._cache.pool.commit(job.lease, job.ids), out)
        self._start_next(job.end_s, out)

    def _keep(self, job: _Prefill, changes: Changes | None, out: list[Out]) -> None:
        """What was computed is in the pool."""
        assert self._cache is not None
        self._cache.tell(changes, out)

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
        self._forget((done.request_id, done.attempt), out)
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
        if self._cache is not None:
            self._cache.cancel(key, out)
        self._start_next(now_s, out)

    def _on_peer_lost(self, now_s: float, lost: PeerLost, out: list[Out]) -> None:
        for key in [key for key, job in self._unsent.items() if job.decode_node == lost.node]:
            self._drop(key, out)
            out.append((CONTROL, AttemptFailed(*key, f"decode node {lost.node} is out of reach")))
        if self._cache is not None:
            self._cache.peer_lost(lost.node, out)
        self._start_next(now_s, out)

    def _on_hinder(self, now_s: float, fault: Hinder, out: list[Out]) -> None:
        self.slowdown = fault.slowdown

    def _drop(self, key: Key, out: list[Out]) -> None:
        job = self._forget(key, out)
        if job is not None and job.token is not None:
            out.append((WIRE, StopTransmit(*key, job.decode_node, job.token)))
        if job is not None and job is self._running:
            self._running = None
            if self._cache is not None and job.lease is not None:
                self._cache.pool.release(job.lease)

    def _forget(self, key: Key, out: list[Out]) -> _Prefill | None:
        job = self._unsent.pop(key, None)
        if job is not None:
            self.outbox_used -= job.kv_bytes
            if self._cache is not None:
                self._cache.pool.free(key)
        return job
