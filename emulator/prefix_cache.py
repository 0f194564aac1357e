"""The prefix cache of a prefill instance: its pool, what it fetches from other nodes, and what it lends to them.

A fetch moves a cached prefix from its holder H to a requester R, whose prefill waits in its queue meanwhile:

    R -- Fetch --> H        H pins what it holds of it
    R <- FetchOffer -- H    or FetchMiss: nothing usable is there
    R -- FetchGrant --> H   room is reserved in R's pool, and R's transport expects the bytes
    R <=== KV === H         full-attention blocks and one snapshot, in one piece: it all exists already
    R -- FetchDone --> H    landed or given up: H unpins, and stops what it may still be sending

It is reserve, then send, as between prefill and decode; but nobody waits for room: what does not fit now is computed.
Control may order a fetch (`Bring`) that no prefill waits for; it goes the same way, and its end is told (`Brought`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from emulator.kvcache import Changes, Ids, Lease, NodePool
from emulator.messages import (
    CONTROL,
    WIRE,
    AnyMessage,
    Bring,
    Brought,
    CacheChanged,
    Convert,
    Damaged,
    Expect,
    Fetch,
    FetchDone,
    FetchGrant,
    FetchMiss,
    FetchOffer,
    Key,
    Landed,
    Out,
    StopTransmit,
    Transmit,
    Unexpect,
)

Handler = Callable[[float, Any, list[Out]], None]


class _Fetch(msgspec.Struct, gc=False, eq=False):
    """A prefix that comes from `node`. blocks: asked for, then offered. ordered: by control, for no prefill. token: the
    grant's, of a transfer of kv_bytes."""

    key: Key
    node: str
    ids: Ids
    blocks: int
    ordered: bool = False
    token: int | None = None
    kv_bytes: int = 0


class _Loan(msgspec.Struct, gc=False, eq=False):
    """A prefix that `node` fetches from here. token: once granted."""

    node: str
    kv_bytes: int
    lease: Lease
    token: int | None = None


class PrefixCache:
    """Both ends of the fetches of one prefill instance, and what its pool tells control.

    token_base: added to every fetch's token. `handlers`: what it accepts, by kind; a prefill that waited may be able to
    start after any of them.
    """

    def __init__(self, name: str, pool: NodePool, token_base: int) -> None:
        self.pool = pool
        self._name = name
        self._next_token = token_base
        self._fetches: dict[Key, _Fetch] = {}
        self._coming: dict[int, _Fetch] = {}  # granted, by token
        self._loans: dict[Key, _Loan] = {}
        self._fetched: dict[Key, int] = {}  # what has come for prefills that have not ended
        self.handlers: dict[type[AnyMessage], Handler] = {
            Bring: self._on_bring,
            Fetch: self._on_fetch,
            FetchOffer: self._on_offer,
            FetchMiss: self._on_miss,
            FetchGrant: self._on_grant,
            FetchDone: self._on_done,
            Landed: self._on_landed,
            Damaged: self._on_damaged,
            Convert: self._on_convert,
        }

    def tell(self, changes: Changes | None, out: list[Out]) -> None:
        """Let control know what the pool gained and lost."""
        if changes is not None and (changes.added or changes.removed):
            out.append((CONTROL, CacheChanged(self._name, changes.added, changes.removed)))

    # the requester
    def want(self, key: Key, ids: Ids, blocks: int, node: str, out: list[Out]) -> None:
        """A prefill has arrived that is to reuse `blocks` blocks: ask `node` for them where fewer are here."""
        if node not in ("", self._name) and self.pool.match(ids) < blocks:
            self._fetches[key] = _Fetch(key, node, ids[:blocks], blocks)
            out.append((node, Fetch(*key, self._name, ids[:blocks], blocks)))

    def awaits(self, key: Key) -> bool:
        """Whether a fetch for this prefill is under way."""
        return key in self._fetches

    def fetched(self, key: Key) -> int:
        """Model bytes that have come for this prefill, which has ended."""
        return self._fetched.pop(key, 0)

    def _on_bring(self, now_s: float, order: Bring, out: list[Out]) -> None:
        key, ids = (order.request_id, order.attempt), order.block_ids
        if self.pool.match(ids) >= len(ids):
            out.append((CONTROL, Brought(*key, 0)))
            return
        self._fetches[key] = _Fetch(key, order.node, ids, len(ids), ordered=True)
        out.append((order.node, Fetch(*key, self._name, ids, len(ids))))

    def _on_offer(self, now_s: float, offer: FetchOffer, out: list[Out]) -> None:
        fetch = self._fetches.get((offer.request_id, offer.attempt))
        if fetch is None:
            out.append((offer.node, FetchDone(offer.request_id, offer.attempt)))
            return
        token = self._next_token
        better = offer.blocks > self.pool.match(fetch.ids)  # a prefill that ended meanwhile may have left it here
        room = self.pool.reserve(token, offer.kv_bytes) if better else None
        if room is None:
            self._give_up(fetch, out)
            return
        self.tell(room, out)
        self._next_token = token + 1
        fetch.blocks, fetch.token, fetch.kv_bytes = offer.blocks, token, offer.kv_bytes
        self._coming[token] = fetch
        tokens = offer.blocks * self.pool.shape.block_tokens
        out.append((WIRE, Expect(token, offer.kv_bytes, fetch.node, tokens)))
        out.append((fetch.node, FetchGrant(*fetch.key, token)))

    def _on_miss(self, now_s: float, miss: FetchMiss, out: list[Out]) -> None:
        fetch = self._fetches.get((miss.request_id, miss.attempt))
        if fetch is not None:
            self._forget(fetch, out)

    def _on_landed(self, now_s: float, landed: Landed, out: list[Out]) -> None:
        fetch = self._coming.pop(landed.token, None)
        if fetch is None:
            return
        del self._fetches[fetch.key]
        self.pool.free(landed.token)
        self._install(fetch, landed.token, out)
        out.append((fetch.node, FetchDone(*fetch.key)))
        if fetch.ordered:
            out.append((CONTROL, Brought(*fetch.key, fetch.kv_bytes)))
        else:
            self._fetched[fetch.key] = fetch.kv_bytes

    def _install(self, fetch: _Fetch, token: int, out: list[Out]) -> None:
        """What has landed is the pool's."""
        self.tell(self.pool.install(fetch.ids, fetch.blocks), out)

    def _on_damaged(self, now_s: float, damaged: Damaged, out: list[Out]) -> None:
        fetch = self._coming.get(damaged.token)
        if fetch is not None:
            self._give_up(fetch, out)

    def _give_up(self, fetch: _Fetch, out: list[Out]) -> None:
        self._forget(fetch, out)
        out.append((fetch.node, FetchDone(*fetch.key)))

    def _forget(self, fetch: _Fetch, out: list[Out]) -> None:
        """Whatever has not landed of it never will."""
        del self._fetches[fetch.key]
        if fetch.token is not None:
            del self._coming[fetch.token]
            self.pool.free(fetch.token)
            out.append((WIRE, Unexpect(fetch.token)))
        if fetch.ordered:
            out.append((CONTROL, Brought(*fetch.key, 0)))

    # the holder
    def _on_fetch(self, now_s: float, fetch: Fetch, out: list[Out]) -> None:
        key = (fetch.request_id, fetch.attempt)
        lease = self.pool.begin(fetch.block_ids, usable_upto=fetch.blocks)
        blocks = lease.hit_blocks
        if not blocks:
            self.pool.release(lease)
            out.append((fetch.node, FetchMiss(*key)))
            return
        kv_bytes = blocks * self.pool.shape.block_bytes + self.pool.shape.snapshot_bytes
        self._loans[key] = _Loan(fetch.node, kv_bytes, lease)
        self._lend(key, fetch.block_ids[:blocks], out)
        out.append((fetch.node, FetchOffer(*key, self._name, kv_bytes, blocks)))

    def _lend(self, key: Key, ids: Ids, out: list[Out]) -> None:
        """What is pinned under `key` will be sent."""

    def _on_grant(self, now_s: float, grant: FetchGrant, out: list[Out]) -> None:
        key = (grant.request_id, grant.attempt)
        loan = self._loans.get(key)
        if loan is not None:
            loan.token = grant.token
            out.append((WIRE, Transmit(*key, loan.node, grant.token, loan.kv_bytes, 1, now_s, now_s)))

    def _on_done(self, now_s: float, done: FetchDone, out: list[Out]) -> None:
        self._unpin((done.request_id, done.attempt), out)

    def _unpin(self, key: Key, out: list[Out]) -> None:
        loan = self._loans.pop(key, None)
        if loan is not None:
            self.pool.release(loan.lease)
            if loan.token is not None:
                out.append((WIRE, StopTransmit(*key, loan.node, loan.token)))

    def _on_convert(self, now_s: float, convert: Convert, out: list[Out]) -> None:
        """The instance ends here. What was granted is on its way and still lands; no other fetch will be served."""
        for key, loan in self._loans.items():
            self.pool.release(loan.lease)
            if loan.token is None:
                out.append((loan.node, FetchMiss(*key)))
        self._loans.clear()

    # both
    def cancel(self, key: Key, out: list[Out]) -> None:
        """The attempt is over, wherever its fetch stands and whichever end of it this is."""
        fetch = self._fetches.get(key)
        if fetch is not None:
            self._give_up(fetch, out)
        self._fetched.pop(key, None)
        self._unpin(key, out)

    def peer_lost(self, node: str, out: list[Out]) -> None:
        """Fetches from `node` never come, and what it fetched from here is nobody's any more."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.node == node]:
            self._forget(fetch, out)
        for key in [key for key, loan in self._loans.items() if loan.node == node]:
            self._unpin(key, out)
