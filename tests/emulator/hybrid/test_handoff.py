"""What is handed over while later layers compute is each layer's state, whole, in order; here in a thread's lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from emulator.backends.hybrid.config import preset
from emulator.backends.hybrid.handoff import Handoff, Lane, ThreadLane, lane
from emulator.backends.hybrid.layers import KvState, LayerState
from emulator.backends.hybrid.model import HybridModel

MODEL = HybridModel.seeded(preset("tiny", pattern="LSF", layers=6), 1)
PROMPT = list(range(200))


def test_every_layer_arrives_whole_and_in_order() -> None:
    arrived: list[tuple[int, LayerState]] = []
    state = MODEL.empty()
    with Handoff(lane(MODEL.device), lambda layer, one: arrived.append((layer, one))) as handoff:
        MODEL.prefill(PROMPT, state, on_layer=handoff.layer)
    assert [layer for layer, _ in arrived] == list(range(6))
    for (_, copy), own in zip(arrived, state.layers, strict=True):
        assert type(copy) is type(own)
        for there, here in zip(copy.parts, own.parts, strict=True):
            assert torch.equal(there, here)
            assert there.data_ptr() != here.data_ptr()
        if isinstance(copy, KvState) and isinstance(own, KvState):
            assert (copy.held, copy.end) == (own.held, own.end)


class HeldLane(ThreadLane):
    """Copies nothing before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    def copy(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        made, wait = super().copy(parts)

        def wait_longer() -> None:
            assert self.let.wait(10)
            wait()

        return made, wait_longer


def test_computing_does_not_wait_for_copies() -> None:
    held, arrived = HeldLane(), []
    with Handoff(held, lambda layer, one: arrived.append(layer)) as handoff:
        MODEL.prefill(PROMPT, MODEL.empty(), on_layer=handoff.layer)
        assert arrived == []  # all is computed, nothing copied
        held.let.set()
    assert arrived == list(range(6))


def test_what_the_receiver_raises_is_raised_and_ends_the_delivery() -> None:
    seen = []

    def deliver(layer: int, state: LayerState) -> None:
        seen.append(layer)
        if layer == 2:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"), Handoff(ThreadLane(), deliver) as handoff:
        MODEL.prefill(PROMPT, MODEL.empty(), on_layer=handoff.layer)
    assert seen == [0, 1, 2]


def test_a_prefill_that_fails_leaves_with_its_own_error() -> None:
    def fail() -> None:
        with Handoff(ThreadLane(), lambda layer, one: None) as handoff:
            handoff.layer(0, MODEL.empty().layers[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_lane_fits_the_device() -> None:
    assert isinstance(lane(torch.device("cpu")), ThreadLane)
    assert issubclass(ThreadLane, Lane)
