"""The machines beside a model that really computes: they decide as the others do, and the backend says what is done.

Nothing here has a scheduled time: a prefill ends when it is computed, a decode step likewise. What a transfer weighs is
the model's own state, all of it, since the decode node holds nothing of a cached prefix. `computing.py` has what
machine and backend say to each other.
"""

from __future__ import annotations

import math

from emulator.computing import (
    BACKEND,
    Compute,
    Computed,
    Forget,
    Install,
    Join,
    Joined,
    Keep,
    Lend,
    Release,
    Sampling,
    Step,
    Stepped,
)
from emulator.decode_instance import DecodeInstance, _Transfer
from emulator.instance import PrefillInstance, PrefillTiming, _Prefill
from emulator.kvcache import Changes, Ids, NodePool
from emulator.messages import CONTROL, Abort, AttemptFailed, Cancel, Finished, Key, Out, Prefill, Tokens
from emulator.prefix_cache import PrefixCache, _Fetch

GREEDY = Sampling()


class ComputedPrefill(PrefillInstance):
    """`PrefillInstance` whose prefills take as long as they take. An order without its prompt fails.

    timing: only its s_kv counts, the bytes of the state after so many tokens as they cross.
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
    ) -> None:
        super().__init__(
            name,
            timing,
            pieces=pieces,
            outbox_bytes=outbox_bytes,
            pool=pool,
            token_base=token_base,
            sends_whole=True,
        )
        self._handlers[Computed] = self._on_computed

    def _make_cache(self, pool: NodePool, token_base: int) -> PrefixCache:
        return _ComputedCache(self.name, pool, token_base)

    def next_s(self) -> float | None:
        return None

    def _on_prefill(self, now_s: float, order: Prefill, out: list[Out]) -> None:
        if len(order.prompt) != order.input_tokens:
            reason = f"{len(order.prompt)} bytes of prompt for {order.input_tokens} tokens: a model needs them all"
            out.append((CONTROL, AttemptFailed(order.request_id, order.attempt, reason)))
            return
        super()._on_prefill(now_s, order, out)

    def _begin(self, job: _Prefill, out: list[Out]) -> None:
        job.end_s = math.inf
        order = job.order
        cached_blocks = 0 if job.lease is None else job.lease.hit_blocks
        sampling = GREEDY if order.sampling is None else order.sampling
        out.append(
            (
                BACKEND,
                Compute(job.request_id, job.attempt, order.prompt, job.ids, cached_blocks, sampling, self.slowdown),
            )
        )

    def _on_computed(self, now_s: float, done: Computed, out: list[Out]) -> None:
        job = self._running
        key = (done.request_id, done.attempt)
        if job is None or (job.request_id, job.attempt) != key:
            return
        if done.error:
            out.append((job.decode_node, Abort(*key)))
            self._drop(key, out)
            out.append((CONTROL, AttemptFailed(*key, done.error)))
            self._start_next(now_s, out)
            return
        job.start_s, job.end_s = done.start_s, done.end_s
        self._end(job, out)

    def _keep(self, job: _Prefill, changes: Changes | None, out: list[Out]) -> None:
        if changes is not None:
            out.append((BACKEND, Keep(job.request_id, job.attempt, job.ids[: changes.kept_blocks], changes.added)))
        super()._keep(job, changes, out)

    def _forget(self, key: Key, out: list[Out]) -> _Prefill | None:
        out.append((BACKEND, Forget(*key)))
        return super()._forget(key, out)


class _ComputedCache(PrefixCache):
    """`PrefixCache` that tells the backend what is lent, and what of that which landed is kept."""

    def _lend(self, key: Key, ids: Ids, out: list[Out]) -> None:
        out.append((BACKEND, Lend(*key, ids)))

    def _unpin(self, key: Key, out: list[Out]) -> None:
        if key in self._loans:
            out.append((BACKEND, Forget(*key)))
        super()._unpin(key, out)

    def _install(self, fetch: _Fetch, token: int, out: list[Out]) -> None:
        changes = self.pool.install(fetch.ids, fetch.blocks)
        kept = fetch.ids[: fetch.blocks] if changes.kept_blocks >= fetch.blocks else ()
        out.append((BACKEND, Install(token, kept)))
        self.tell(changes, out)


class _Member:
    """A request that is being decoded. made: its tokens so far."""

    __slots__ = ("made", "transfer")

    def __init__(self, transfer: _Transfer) -> None:
        self.transfer = transfer
        self.made = 0


class ComputedDecode(DecodeInstance):
    """`DecodeInstance` with continuous batching in real steps: one at a time, of all who had joined when it began.

    A slot is free with the last token of its answer, which is when the backend says so: at its length, or before.
    """

    def __init__(
        self, name: str, *, slots: int, landing_bytes: int, stream_interval: int | None = None, token_base: int = 0
    ) -> None:
        super().__init__(
            name,
            slots=slots,
            step_s=math.nan,
            landing_bytes=landing_bytes,
            stream_interval=stream_interval,
            token_base=token_base,
        )
        self._members: dict[int, _Member] = {}  # with a slot, by token
        self._batch: dict[int, _Member] = {}  # those of them that have their first token, in the order they got it
        self._stepping = False
        self._handlers |= {Joined: self._on_joined, Stepped: self._on_stepped}

    def next_s(self) -> float | None:
        return None

    def _emit(self, transfer: _Transfer, upto: int, out: list[Out]) -> None:
        """Admission: the token that came with the state leaves once the backend has it."""
        offer = transfer.offer
        self._members[transfer.token] = _Member(transfer)
        sampling = GREEDY if offer.sampling is None else offer.sampling
        out.append((BACKEND, Join(*transfer.key, transfer.token, offer.output_tokens, sampling)))

    def _on_joined(self, now_s: float, joined: Joined, out: list[Out]) -> None:
        member = self._members.get(joined.token)
        if member is None:
            return
        self._made(now_s, member, joined.ended, out)
        if not joined.ended:
            self._batch[joined.token] = member
        self._admit(now_s, out)
        self._step(out)

    def _on_stepped(self, now_s: float, stepped: Stepped, out: list[Out]) -> None:
        self._stepping = False
        for token, ended in stepped.made:
            member = self._batch.get(token)
            if member is not None:
                self._made(now_s, member, ended, out)
        self._admit(now_s, out)
        self._step(out)

    def _step(self, out: list[Out]) -> None:
        if self._batch and not self._stepping:
            self._stepping = True
            out.append((BACKEND, Step(tuple(self._batch), self.slowdown)))

    def _made(self, now_s: float, member: _Member, ended: str, out: list[Out]) -> None:
        """One token more of a request."""
        member.made += 1
        transfer = member.transfer
        waiting = member.made - transfer.emitted
        if self._interval and (ended or member.made == 1 or waiting >= self._interval):
            out.append((CONTROL, Tokens(*transfer.key, transfer.emitted, waiting)))
            transfer.emitted = member.made
        if ended:
            out.append((CONTROL, Finished(*transfer.key, now_s, now_s, member.made, ended)))
            del self._decoding[transfer.key]
            self._free_slots += 1
            self._let_go(transfer, out)

    def _let_go(self, transfer: _Transfer, out: list[Out]) -> None:
        self._members.pop(transfer.token, None)
        self._batch.pop(transfer.token, None)
        out.append((BACKEND, Release(transfer.token)))

    def _on_cancel(self, now_s: float, over: Cancel | Abort, out: list[Out]) -> None:
        key = (over.request_id, over.attempt)
        transfer = self._decoding.get(key) or self._landed.get(key)
        if transfer is not None:
            self._let_go(transfer, out)
        super()._on_cancel(now_s, over, out)
