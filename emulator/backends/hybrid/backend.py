"""The model as a worker's backend: it makes the machines, computes for them, and has the bytes of what they send.

`prefill.py` and `decode.py` are its two sides; `node.py` what they share. It has one side at a time, the role of its
machine; a change of role or a new epoch drops it with all that it holds.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from emulator.backend import Bounds, Host
from emulator.backends.hybrid.config import preset
from emulator.backends.hybrid.decode import DecodeSide
from emulator.backends.hybrid.held import cache_shape
from emulator.backends.hybrid.model import HybridModel
from emulator.backends.hybrid.node import Node
from emulator.backends.hybrid.parcel import Parcel
from emulator.backends.hybrid.prefill import PrefillSide
from emulator.backends.hybrid.spec import ModelSpec
from emulator.backends.hybrid.thread import ComputeThread
from emulator.clock import Clock
from emulator.computed import ComputedDecode, ComputedPrefill
from emulator.computing import ComputeMessage
from emulator.kvcache import NodePool
from emulator.messages import Expect, Tokens, Transmit

CLOSE_S = 2.0  # wall seconds that a computation under way has to end


class HybridBackend:
    """spec: the model; bounds: of the machines."""

    def __init__(self, spec: ModelSpec, bounds: Bounds, clock: Clock, host: Host) -> None:
        torch.set_num_threads(1)
        config = preset(spec.preset, **spec.changes)
        weights = None if spec.weights is None else Path(spec.weights)
        model = HybridModel.seeded(config, spec.seed) if weights is None else HybridModel.load(config, weights)
        thread = ComputeThread(spec.core, host.stop)
        helper = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._node = Node(model, model.fingerprint, thread, helper, clock, host, Counter())
        self._bounds = bounds
        self._side: PrefillSide | DecodeSide | None = None

    def machine(self, role: str, token_base: int) -> ComputedPrefill | ComputedDecode:
        if self._side is not None:
            self._side.close()
        bounds, config = self._bounds, self._node.model.config
        if role == "decode":
            self._side = DecodeSide(self._node)
            return ComputedDecode(
                bounds.name,
                slots=bounds.slots,
                landing_bytes=bounds.landing_bytes,
                stream_interval=bounds.stream_interval,
                token_base=token_base,
            )
        pool = None
        if bounds.cache_bytes:
            pool = NodePool(bounds.cache_bytes, cache_shape(config, bounds.block_tokens))
        self._side = PrefillSide(self._node, pool)
        return ComputedPrefill(
            bounds.name,
            _Weights(self._node),
            pieces=config.layers,
            outbox_bytes=bounds.outbox_bytes,
            pool=pool,
            token_base=token_base,
        )

    def tell(self, message: ComputeMessage) -> None:
        assert self._side is not None
        self._side.tell(message)

    def source(self, order: Transmit) -> Parcel:
        assert isinstance(self._side, PrefillSide)
        return self._side.source(order)

    def memory(self, expected: Expect, size_bytes: int) -> memoryview:
        assert self._side is not None
        return self._side.landings.memory(expected, size_bytes)

    def withdraw(self, token: int) -> None:
        assert self._side is not None
        self._side.landings.withdraw(token)

    def landed(self, token: int) -> None:
        assert self._side is not None
        self._side.landings.landed(token)

    def fill(self, tokens: Tokens) -> Tokens:
        return self._side.fill(tokens) if isinstance(self._side, DecodeSide) else tokens

    @property
    def refused_states(self) -> int:
        return self._node.refused.total()

    def close(self) -> bool:
        """Whether what was being computed has ended."""
        if self._side is not None:
            self._side.close()
        self._node.helper.shutdown(cancel_futures=True)
        return self._node.thread.close(CLOSE_S)


class _Weights:
    """What a prefill machine must know of the model: how much crosses."""

    def __init__(self, node: Node) -> None:
        self.s_kv = node.transfer_bytes

    def t_prefill(self, tokens: int) -> float:
        raise NotImplementedError("a prefill that is computed takes as long as it takes")
