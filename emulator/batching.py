"""A decode instance with continuous batching: all of its requests share one step, whose time depends on them.

The batch changes at the ends of steps only, as in a real engine: who is admitted while a step runs sends its first
token at once (the prefill computed it) and joins with the next step; who is cancelled gives up its slot at once and is
computed to the end of the step. Between two changes every member advances by the same number of steps, so the machine
keeps one count of steps and one heap of what is due at which count: an event a change (and, live, one a streamed
event), none a token.
"""

from __future__ import annotations

import heapq

from emulator.decode_instance import DecodeInstance, _Transfer
from emulator.decode_step import DecodeTiming, Slowed
from emulator.messages import CONTROL, Abort, Cancel, Finished, Hinder, Key, Out, Tokens, Wake


class BatchedDecodeInstance(DecodeInstance):
    """`DecodeInstance` with a step that takes `timing.step_s(batch, KV tokens)`; all before admission is the same.

    A request of l input tokens takes part in L_out steps. Its context counts l + j tokens in its step j (from 1); token
    j + 1 leaves at the end of step j, and the slot is free at the end of the last. With a constant step and full slots
    that is equation (5), as in `DecodeInstance`; with free slots a request waits for the step under way to end, which
    the constant model does not know.

    timing: model seconds. Finished.freed_s is exact, except for an answer of one token, whose step has not begun: there
    it is what one step would take now. The rest as for `DecodeInstance`.
    """

    def __init__(
        self,
        name: str,
        *,
        slots: int,
        timing: DecodeTiming,
        landing_bytes: int,
        stream_interval: int | None = None,
        token_base: int = 0,
    ) -> None:
        super().__init__(
            name,
            slots=slots,
            step_s=timing.step_s(1, 1),  # not read here: `timing` is
            landing_bytes=landing_bytes,
            stream_interval=stream_interval,
            token_base=token_base,
        )
        self._timing = self._own_timing = timing
        self._at_s = 0.0  # the last boundary at which something changed
        self._steps = 0  # done by then, since ever
        self._batch = self._kv_tokens = 0  # in the steps from then on
        self._joined: dict[Key, int] = {}  # members: their context's tokens less the count of steps
        self._joining: dict[Key, _Transfer] = {}  # admitted, for the next boundary
        self._leaving: list[int] = []  # cancelled members, as in `_joined`
        self._change_s: float | None = None  # since when somebody waits for a boundary
        self._due_steps: list[tuple[int, int, _Transfer]] = []
        self._ahead = 0  # steps to the next boundary that counts, and its time
        self._boundary_s: float | None = None

    def next_s(self) -> float | None:
        """The next end of a step at which something happens, in model seconds; None when nothing is decoding."""
        return self._boundary_s

    def _emit(self, transfer: _Transfer, upto: int, out: list[Out]) -> None:
        """Admission: the first token leaves, and the request waits for the step under way to end."""
        at_s = transfer.admitted_s
        self._send(transfer, upto, out)
        if transfer.offer.output_tokens == upto:
            freed_s = at_s + self._timing.step_s(self._batch + 1, self._kv_tokens + transfer.offer.input_tokens + 1)
            out.append((CONTROL, Finished(*transfer.key, at_s, freed_s, upto)))
        self._joining[transfer.key] = transfer
        self._change(at_s)

    def _send(self, transfer: _Transfer, upto: int, out: list[Out]) -> None:
        if self._interval:
            out.append((CONTROL, Tokens(*transfer.key, transfer.emitted, upto - transfer.emitted)))
        transfer.emitted = upto

    def _change(self, now_s: float) -> None:
        """Somebody joins or leaves at the first boundary from now on."""
        if self._change_s is None:
            self._change_s = now_s
        self._foresee()

    def _foresee(self) -> None:
        """Find the next boundary at which something happens."""
        due = self._due_steps
        if not self._batch:
            self._ahead, self._boundary_s = 0, self._change_s
            return
        ahead = due[0][0] - self._steps if due else None
        if self._change_s is not None:
            soonest = self._timing.steps_by(self._batch, self._kv_tokens, self._change_s - self._at_s)
            ahead = soonest if ahead is None else min(ahead, soonest)
        assert ahead is not None, "a batch of cancelled requests has a change to wait for"
        self._ahead = ahead
        self._boundary_s = self._at_s + self._timing.elapsed_s(self._batch, self._kv_tokens, ahead)

    def _on_wake(self, now_s: float, _: Wake, out: list[Out]) -> None:
        while self._boundary_s is not None and self._boundary_s <= now_s:
            self._pass_boundary(self._boundary_s, out)
            self._foresee()

    def _pass_boundary(self, at_s: float, out: list[Out]) -> None:
        """The steps until at_s are done: tokens leave, slots are freed and taken, and the next step's batch is made."""
        self._kv_tokens += self._batch * self._ahead
        self._steps += self._ahead
        self._at_s = at_s
        for tokens in self._leaving:
            self._take_out(tokens)
        self._leaving.clear()
        finished = []
        due = self._due_steps
        while due and due[0][0] <= self._steps:
            transfer = heapq.heappop(due)[2]
            length = transfer.offer.output_tokens
            if transfer.emitted == length:
                del self._decoding[transfer.key]
                self._free_slots += 1
                self._take_out(self._joined.pop(transfer.key))
                continue
            step = self._steps + self._joined[transfer.key] - transfer.offer.input_tokens - 1  # its own count
            self._send(transfer, step + 1, out)
            if transfer.emitted == length:
                finished.append(transfer)
            self._schedule(transfer)
        self._admit(at_s, out)
        for key, transfer in self._joining.items():
            context = transfer.offer.input_tokens + 1
            self._joined[key] = context - self._steps
            self._batch += 1
            self._kv_tokens += context
            self._schedule(transfer)
        self._joining.clear()
        self._change_s = None
        self._timing = Slowed(self._own_timing, self.slowdown) if self.slowdown != 1.0 else self._own_timing
        freed_s = at_s + self._timing.step_s(self._batch, self._kv_tokens)
        out += [(CONTROL, Finished(*t.key, at_s, freed_s, t.offer.output_tokens)) for t in finished]

    def _take_out(self, tokens: int) -> None:
        self._batch -= 1
        self._kv_tokens -= tokens + self._steps

    def _schedule(self, transfer: _Transfer) -> None:
        """What comes next of a member: its next streamed tokens, or the end of its last step."""
        length, emitted = transfer.offer.output_tokens, transfer.emitted
        joined_at = transfer.offer.input_tokens + 1 - self._joined[transfer.key]  # the count of steps at its joining
        own = length if emitted == length else min(emitted + (self._interval or length), length) - 1
        self._sequence += 1
        heapq.heappush(self._due_steps, (joined_at + own, self._sequence, transfer))

    def _on_hinder(self, now_s: float, fault: Hinder, out: list[Out]) -> None:
        super()._on_hinder(now_s, fault, out)
        self._change(now_s)  # the step under way goes on as it began

    def _on_cancel(self, now_s: float, over: Cancel | Abort, out: list[Out]) -> None:
        key = (over.request_id, over.attempt)
        if key in self._joined:
            self._leaving.append(self._joined.pop(key))
            transfer = self._decoding[key]
            self._due_steps = [entry for entry in self._due_steps if entry[2] is not transfer]
            heapq.heapify(self._due_steps)
            self._change(now_s)
        elif self._joining.pop(key, None) is not None and not self._joining and not self._leaving:
            self._change_s = None
            self._foresee()
        super()._on_cancel(now_s, over, out)


def decode_instance(
    name: str,
    *,
    slots: int,
    step_s: float,
    timing: DecodeTiming | None,
    landing_bytes: int,
    stream_interval: int | None = None,
    token_base: int = 0,
) -> DecodeInstance:
    """The decode instance of a profile: with a constant step of `step_s`, or with a `timing` continuous batching."""
    if timing is None:
        return DecodeInstance(
            name, slots=slots, step_s=step_s, landing_bytes=landing_bytes, stream_interval=stream_interval,
            token_base=token_base,
        )  # fmt: skip
    return BatchedDecodeInstance(
        name, slots=slots, timing=timing, landing_bytes=landing_bytes, stream_interval=stream_interval,
        token_base=token_base,
    )  # fmt: skip
