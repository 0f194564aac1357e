"""Layer-wise hand-off: what a layer keeps is copied to the host while later layers compute, and delivered in order.

    with Handoff(lane(model.device), deliver) as handoff:
        model.prefill(tokens, state, on_layer=handoff.layer)

On a GPU copies are made in a CUDA stream of their own, into pinned memory; elsewhere in a thread, which stands in for
that.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from emulator.backends.hybrid.layers import KvState, LayerState, LinearState

Deliver = Callable[[int, LayerState], None]


class Lane(ABC):
    """Where copies are made, beside the computing."""

    @abstractmethod
    def copy(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copies on the host of what these tensors hold once all that was asked for before is computed. They are being
        made; the call waits until they are there. The tensors must not change any more."""

    @abstractmethod
    def close(self) -> None:
        """No copies any more."""


class CudaLane(Lane):
    """A stream for copies; it waits for the computing by an event, never the other way round."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        made = []
        with torch.cuda.stream(self._stream):
            for part in parts:
                host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                host.copy_(part, non_blocking=True)
                part.record_stream(self._stream)  # its memory is nobody else's before that
                made.append(host)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return made, done.synchronize

    def close(self) -> None:
        self._stream.synchronize()


class ThreadLane(Lane):
    """A thread instead of a stream: for a model that computes on the CPU, in the thread that asks."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "copy")

    def copy(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        made = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]

        @torch.inference_mode()
        def fill() -> None:
            for host, part in zip(made, parts, strict=True):
                host.copy_(part)

        copied = self._pool.submit(fill)
        return made, copied.result

    def close(self) -> None:
        self._pool.shutdown()


def lane(device: torch.device) -> Lane:
    """For a model on this device."""
    return CudaLane(device) if device.type == "cuda" else ThreadLane()


class Handoff:
    """Delivers states on the host, layer after layer, in a thread of its own. Leaving it waits for the last one, and
    raises what `deliver` raised; nothing is delivered after that."""

    def __init__(self, lane: Lane, deliver: Deliver) -> None:
        self._lane = lane
        self._deliver = deliver
        self._failure: BaseException | None = None
        self._copies: queue.SimpleQueue[tuple[int, LayerState, LayerState, Callable[[], None]] | None]
        self._copies = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="handoff", daemon=True)

    def layer(self, index: int, state: LayerState) -> None:
        """A layer is done: `on_layer` of `HybridModel.prefill`."""
        parts, wait = self._lane.copy(state.parts)
        copy = LinearState(*parts) if isinstance(state, LinearState) else KvState(parts[0], state.held, state.end)
        self._copies.put((index, state, copy, wait))  # the state itself too: it must not go before it is copied

    def __enter__(self) -> Handoff:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._copies.put(None)
        self._thread.join()
        self._lane.close()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        while (one := self._copies.get()) is not None:
            index, _, copy, wait = one
            try:
                wait()
                if self._failure is None:
                    self._deliver(index, copy)
            except BaseException as failure:
                self._failure = failure
