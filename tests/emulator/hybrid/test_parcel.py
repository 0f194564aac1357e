"""A transfer as a whole: it may leave while it is computed, and is taken whole or not at all."""

from __future__ import annotations

import pytest
import torch

from emulator.backends.hybrid.config import preset
from emulator.backends.hybrid.held import Held, cache_shape
from emulator.backends.hybrid.layers import KvState, LayerState
from emulator.backends.hybrid.model import HybridModel
from emulator.backends.hybrid.parcel import Parcel, parcel_bytes, unpack
from emulator.backends.hybrid.state import OVERHEAD_BYTES, TOKEN_BYTES, Expected, StateError
from emulator.kvcache import NodePool, hash_blocks

CONFIG = preset("tiny", pattern="LSF", layers=3)
TOKENS, BLOCK, TOKEN, TRANSFER = 700, 128, 65, 9
MODEL = HybridModel.seeded(CONFIG, 1)
PROMPT = bytes(i * 7 % 256 for i in range(TOKENS))
WAY = Expected(MODEL.fingerprint, TRANSFER, TOKENS)


def packed(*, bind_first: bool = True) -> tuple[Parcel, list[int]]:
    """A prefill's parcel, and how much of it was ready after every block of every layer."""
    parcel = Parcel(CONFIG, MODEL.fingerprint, TOKENS, answer=True)
    ready = []
    if bind_first:
        parcel.bind(TRANSFER)

    def take(done: bool, layer: int, state: LayerState) -> None:
        parcel.take(layer, state, done=done)
        parcel.advance()
        ready.append(parcel.ready_bytes())

    MODEL.prefill(
        list(PROMPT),
        MODEL.empty(),
        on_layer=lambda layer, state: take(True, layer, state),
        on_block=lambda layer, state: take(False, layer, state),
    )
    parcel.close(TOKEN)
    parcel.bind(TRANSFER)
    return parcel, ready


def test_its_size_is_that_of_the_state_and_of_its_messages_overhead() -> None:
    size = CONFIG.state_bytes(TOKENS) + CONFIG.layers * OVERHEAD_BYTES + TOKEN_BYTES
    assert parcel_bytes(CONFIG, TOKENS, answer=True) == size == packed()[0].ready_bytes()


@pytest.mark.parametrize("bind_first", [True, False])
def test_what_was_packed_is_unpacked_to_the_same_answer(bind_first: bool) -> None:
    parcel, _ = packed(bind_first=bind_first)
    arrived, first = unpack(CONFIG, parcel.read(0, parcel.ready_bytes()), WAY, answer=True)
    state = MODEL.empty()
    MODEL.prefill(list(PROMPT), state)
    assert first == TOKEN
    for token in (TOKEN, 1, 2):
        assert torch.equal(MODEL.decode([token], [arrived]), MODEL.decode([token], [state]))


def test_nothing_is_ready_before_the_transfer_has_its_number() -> None:
    assert set(packed(bind_first=False)[1]) == {0}


def test_rows_of_a_full_attention_layer_leave_while_it_still_attends() -> None:
    ready = packed()[1]
    assert ready == sorted(ready)
    full = ready[-(-(-TOKENS // CONFIG.chunk) + 1) :]  # of the last layer: its blocks, and its end
    assert len(set(full)) == len(full)


@pytest.mark.parametrize("place", [0, 30, 200, -1, -TOKEN_BYTES - 1])
def test_a_bit_that_was_changed_is_found(place: int) -> None:
    memory = bytearray(packed()[0].read(0, parcel_bytes(CONFIG, TOKENS, answer=True)))
    memory[place] ^= 1
    with pytest.raises(StateError):
        unpack(CONFIG, memory, WAY, answer=True)


@pytest.mark.parametrize(
    "other",
    [
        Expected(MODEL.fingerprint, TRANSFER + 1, TOKENS),
        Expected(bytes(16), TRANSFER, TOKENS),
        Expected(MODEL.fingerprint, TRANSFER, TOKENS - 1),
    ],
    ids=["transfer", "model", "length"],
)
def test_what_was_meant_for_another_is_refused(other: Expected) -> None:
    memory = bytes(packed()[0].read(0, parcel_bytes(CONFIG, TOKENS, answer=True)))
    with pytest.raises(StateError):
        unpack(CONFIG, memory, other, answer=True)


class TestHeld:
    IDS = hash_blocks(PROMPT, BLOCK)[: (TOKENS - 1) // BLOCK]

    def held(self, pool: NodePool) -> Held:
        """After a prefill of PROMPT, as a prefill node keeps it."""
        held = Held(CONFIG, pool)
        state = MODEL.empty()
        places = [BLOCK * (i + 1) for i in range(len(self.IDS))]
        _, snapshots = MODEL.prefill(list(PROMPT), state, keep=places)
        changes = pool.commit(pool.begin(self.IDS), self.IDS)
        assert changes is not None
        kept = self.IDS[: changes.kept_blocks]
        held.keep(kept, state, {len(kept): snapshots.places[len(kept) * BLOCK]})
        return held

    def test_a_held_prefix_goes_on_to_the_same_bits(self) -> None:
        shape = cache_shape(CONFIG, BLOCK)
        held = self.held(NodePool(100 * shape.block_bytes, shape))
        prefix = held.prefix(self.IDS)
        state, alone = prefix.state(CONFIG.layers), MODEL.empty()
        assert prefix.tokens == len(self.IDS) * BLOCK
        logits, _ = MODEL.prefill(list(PROMPT[prefix.tokens :]), state)
        assert torch.equal(logits, MODEL.prefill(list(PROMPT), alone)[0])
        assert isinstance(state.layers[2], KvState)

    def test_it_weighs_what_the_pool_reckons_and_what_is_evicted_is_gone(self) -> None:
        shape = cache_shape(CONFIG, BLOCK)
        pool = NodePool((len(self.IDS) + shape.snapshot_blocks) * shape.block_bytes, shape)
        held = self.held(pool)
        headers = CONFIG.layers * OVERHEAD_BYTES
        assert held.bytes_held == len(self.IDS) * shape.block_bytes + shape.snapshot_bytes - headers
        assert pool.install(tuple(range(1, len(self.IDS) + 1)), len(self.IDS)).kept_blocks == len(self.IDS)
        assert held.bytes_held == 0
