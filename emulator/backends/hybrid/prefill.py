"""A prefill node's computing: prompts, one after the other, and the prefixes that it keeps, lends and borrows.

A prompt goes through the model layer by layer, each layer in blocks of tokens. What a layer keeps of a block may leave
at once: the rows of a full-attention layer flow while it still attends, a linear layer's state follows at its end, and
what is left to send when the last token is computed is the last layer's last rows. (Chunk by chunk through all layers,
the other order, would let nothing of a recurrent state leave before the end, and costs every layer's weights a chunk.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from emulator.backends.hybrid.held import Held, Prefix, Snapshot
from emulator.backends.hybrid.layers import LayerState
from emulator.backends.hybrid.model import SequenceState
from emulator.backends.hybrid.node import Landings, Node
from emulator.backends.hybrid.parcel import Parcel
from emulator.backends.hybrid.sampling import choose
from emulator.computing import Compute, Computed, ComputeMessage, Forget, Install, Keep, Lend
from emulator.kvcache import NodePool
from emulator.log import Log
from emulator.messages import Key, Transmit

log = Log("hybrid")


class _Halted(Exception):
    """Nobody wants the prefill any more."""


@dataclass(slots=True)
class _Job:
    """A prefill. state, snapshots: once it is computed, until the pool has taken what it keeps."""

    order: Compute
    parcel: Parcel
    prefix: Prefix | None
    halted: bool = False
    state: SequenceState | None = None
    snapshots: Mapping[int, Snapshot] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.order.request_id, self.order.attempt


class PrefillSide:
    """The computing of one prefill machine, whose pool is `pool`. The loop's thread calls everything."""

    def __init__(self, node: Node, pool: NodePool | None) -> None:
        self._node = node
        self._held = None if pool is None else Held(node.model.config, pool)
        self._block_tokens = 0 if pool is None else pool.shape.block_tokens
        self._jobs: dict[Key, _Job] = {}
        self._loans: dict[Key, Prefix] = {}
        self.landings = Landings(node, answer=False)

    def tell(self, message: ComputeMessage) -> None:
        match message:
            case Compute():
                self._begin(message)
            case Keep():
                self._keep(message)
            case Forget():
                key = (message.request_id, message.attempt)
                if (job := self._jobs.pop(key, None)) is not None:
                    job.halted = True
                self._loans.pop(key, None)
            case Lend():
                assert self._held is not None
                self._loans[message.request_id, message.attempt] = self._held.prefix(message.block_ids)
            case Install():
                self._install(message)

    def source(self, order: Transmit) -> Parcel:
        key = (order.request_id, order.attempt)
        job = self._jobs.get(key)
        if job is not None:
            job.parcel.bind(order.token)
            return job.parcel
        prefix = self._loans[key]
        parcel = Parcel(self._node.model.config, self._node.fingerprint, prefix.tokens, answer=False)
        parcel.bind(order.token)
        self._node.help(partial(self._pack, prefix, parcel))
        return parcel

    def close(self) -> None:
        for job in self._jobs.values():
            job.halted = True
        self._jobs.clear()
        self._loans.clear()
        self.landings.close()

    def _begin(self, order: Compute) -> None:
        node = self._node
        prefix = None
        if order.cached_blocks:
            assert self._held is not None
            prefix = self._held.prefix(order.block_ids[: order.cached_blocks])
        parcel = Parcel(node.model.config, node.fingerprint, len(order.prompt), answer=True)
        job = self._jobs[order.request_id, order.attempt] = _Job(order, parcel, prefix)
        node.thread.submit(partial(self._compute, job))

    def _keep(self, message: Keep) -> None:
        job = self._jobs.get((message.request_id, message.attempt))
        if job is None or job.state is None or self._held is None:
            return
        size, ids = self._block_tokens, message.block_ids
        wanted = {ids.index(one) + 1 for one in message.snapshots}
        self._held.keep(ids, job.state, {number: job.snapshots[number * size] for number in wanted})
        job.state, job.snapshots = None, {}

    def _install(self, message: Install) -> None:
        arrived = self.landings.take(message.token)
        if arrived is not None and message.block_ids and self._held is not None:
            kinds, ids = self._node.model.config.kinds, message.block_ids
            last = {i: one for i, one in enumerate(arrived.state.layers) if kinds[i] != "full"}
            self._held.keep(ids, arrived.state, {len(ids): last})

    def _advance(self, parcel: Parcel) -> None:
        parcel.advance()
        self._node.host.wake()

    # threads
    def _pack(self, prefix: Prefix, parcel: Parcel) -> None:
        for layer, state in enumerate(prefix.state(self._node.model.config.layers).layers):
            parcel.take(layer, state, done=True)
        parcel.close()
        self._node.thread.tell(partial(self._advance, parcel))

    def _compute(self, job: _Job) -> None:
        node, order = self._node, job.order
        if job.halted:
            return
        start_s = node.clock.now_s()
        state = node.model.empty() if job.prefix is None else job.prefix.state(node.model.config.layers)
        error, token = "", None
        try:
            logits, snapshots = node.model.prefill(
                list(order.prompt[state.tokens :]),
                state,
                on_layer=partial(self._take, job, True),
                on_block=partial(self._take, job, False),
                keep=self._places(job, state),
            )
            token = choose(logits.numpy(), order.sampling, 0)
            if self._held is not None:
                job.state, job.snapshots = state, snapshots.places
        except _Halted:
            return
        except (MemoryError, RuntimeError) as failure:
            log.error("prefill_failed", cause=failure, request_id=order.request_id)
            error = f"its prefill failed: {failure}"
        if order.slowdown > 1:
            time.sleep((order.slowdown - 1) * (node.clock.now_s() - start_s) / node.clock.scale)
        end_s = node.clock.now_s()
        node.thread.tell(partial(self._computed, job, token, Computed(*job.key, start_s, end_s, error)))

    def _take(self, job: _Job, done: bool, layer: int, state: LayerState) -> None:
        """What a layer has become may leave."""
        if job.halted:
            raise _Halted
        if job.parcel.take(layer, state, done=done):
            self._node.thread.tell(partial(self._advance, job.parcel))

    def _places(self, job: _Job, state: SequenceState) -> Sequence[int]:
        """Where the pool may want a snapshot: after any block, since how many it keeps is known only at the end."""
        size = self._block_tokens
        if not size:
            return ()
        return range(state.tokens + size, len(job.order.block_ids) * size + 1, size)

    def _computed(self, job: _Job, token: int | None, done: Computed) -> None:
        """Only now may the last byte leave: were it received before the machine knew of the end, it never would."""
        if not job.halted:
            if token is not None:
                job.parcel.close(token)
            self._advance(job.parcel)
            self._node.host.hear(done)
