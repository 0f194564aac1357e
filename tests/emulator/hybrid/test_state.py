"""What crosses the link is decoded only when it is exactly what was to come."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from emulator.backends.hybrid.config import TINY, preset
from emulator.backends.hybrid.layers import KvState, LinearState
from emulator.backends.hybrid.model import HybridModel, SequenceState
from emulator.backends.hybrid.state import OVERHEAD_BYTES, Expected, StateError, decode, encode, message_bytes
from tests.emulator.hybrid.prefixes import prefix_of

CONFIG = preset("tiny", pattern="LSF", layers=3)
TOKENS = 200
MODEL = HybridModel.seeded(CONFIG, 1)
PROMPT = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
WAY = Expected(MODEL.fingerprint, 7, TOKENS)


@pytest.fixture(scope="module")
def prefilled() -> SequenceState:
    state = MODEL.empty()
    MODEL.prefill(PROMPT, state)
    return state


def messages(state: SequenceState, expected: Expected = WAY) -> list[bytes]:
    return [encode(CONFIG, i, one, expected) for i, one in enumerate(state.layers)]


def test_what_arrives_decodes_to_the_same_bits(prefilled: SequenceState) -> None:
    arrived = SequenceState([decode(CONFIG, i, m, WAY) for i, m in enumerate(messages(prefilled))], TOKENS)
    there = prefilled.clone()
    for token in (1, 2, 3):
        assert torch.equal(MODEL.decode([token], [there]), MODEL.decode([token], [arrived]))


def test_the_bytes_are_those_of_the_configuration(prefilled: SequenceState) -> None:
    sizes = [len(message) for message in messages(prefilled)]
    assert sizes == [message_bytes(CONFIG, i, TOKENS) for i in range(3)]
    assert sum(sizes) == CONFIG.state_bytes(TOKENS) + 3 * OVERHEAD_BYTES


def test_after_a_cached_prefix_only_what_follows_crosses() -> None:
    since = 128
    state = MODEL.empty()
    logits, snapshots = MODEL.prefill(PROMPT, state, keep=[since])
    way = dataclasses.replace(WAY, since=since)
    told = messages(state, way)
    assert [len(m) for m in told] == [message_bytes(CONFIG, i, TOKENS, since) for i in range(3)]
    assert len(told[2]) - OVERHEAD_BYTES == CONFIG.layer_bytes("full", TOKENS - since)
    prefix = prefix_of(state, since, snapshots.places[since])
    layers = [decode(CONFIG, i, message, way) for i, message in enumerate(told)]
    new, old = layers[2], prefix.layers[2]
    assert isinstance(new, KvState)
    assert isinstance(old, KvState)
    old.extend(new.kept)
    arrived = SequenceState([layers[0], layers[1], old], TOKENS)
    assert torch.equal(MODEL.decode([9], [arrived]), MODEL.decode([9], [state]))
    assert logits.shape == (258,)


def test_bfloat16_keeps_its_bits() -> None:
    state = LinearState(torch.randn(2, 32, 32), torch.randn(3, 192).to(torch.bfloat16))
    back = decode(CONFIG, 0, encode(CONFIG, 0, state, WAY), WAY)
    assert isinstance(back, LinearState)
    assert torch.equal(back.memory, state.memory)
    assert torch.equal(back.recent, state.recent)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_any_flipped_bit_is_noticed(layer: int, prefilled: SequenceState) -> None:
    whole = messages(prefilled)[layer]
    for at in [*range(OVERHEAD_BYTES), *random.Random(layer).sample(range(len(whole)), 100), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(StateError):
            decode(CONFIG, layer, bytes(damaged), WAY)


@pytest.mark.parametrize("keep", [0, 3, OVERHEAD_BYTES - 1, OVERHEAD_BYTES, -1, -16])
def test_a_message_cut_off_is_noticed(keep: int, prefilled: SequenceState) -> None:
    with pytest.raises(StateError):
        decode(CONFIG, 2, messages(prefilled)[2][:keep], WAY)


def test_more_than_a_message_is_noticed(prefilled: SequenceState) -> None:
    told = messages(prefilled)
    with pytest.raises(StateError, match="damaged or cut off"):
        decode(CONFIG, 2, told[2] + told[2], WAY)


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (dataclasses.replace(WAY, transfer=8), "of transfer 7; 8 was to come"),
        (dataclasses.replace(WAY, fingerprint=HybridModel.seeded(CONFIG, 2).fingerprint), "another model"),
        (dataclasses.replace(WAY, tokens=TOKENS - 1), "another layer, place or length"),
        (dataclasses.replace(WAY, since=64), "another layer, place or length"),
    ],
)
def test_another_transfers_message_is_refused(expected: Expected, said: str, prefilled: SequenceState) -> None:
    """A replay of one that was right in its time, too."""
    with pytest.raises(StateError, match=said):
        decode(CONFIG, 2, messages(prefilled)[2], expected)


def test_another_layers_message_is_refused(prefilled: SequenceState) -> None:
    told = messages(prefilled)
    for layer, message in ((0, told[1]), (1, told[0]), (1, told[2]), (2, told[1])):
        with pytest.raises(StateError, match="another layer"):
            decode(CONFIG, layer, message, WAY)


def test_two_layers_of_one_kind_are_told_apart() -> None:
    model = HybridModel.seeded(TINY, 1)
    state = model.empty()
    model.prefill(PROMPT, state)
    way = Expected(model.fingerprint, 1, TOKENS)
    told = encode(TINY, 0, state.layers[0], way)
    decode(TINY, 0, told, way)
    with pytest.raises(StateError, match="another layer"):
        decode(TINY, 1, told, way)


def test_a_later_version_is_refused(prefilled: SequenceState) -> None:
    later = bytearray(messages(prefilled)[0])
    later[4] += 1
    with pytest.raises(StateError, match="version 2; this end speaks 1"):
        decode(CONFIG, 0, bytes(later), WAY)
