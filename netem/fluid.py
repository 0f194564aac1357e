"""The link in virtual time: one direction, shared max-min among sender-receiver pairs, as fluid.

A pair is a first-in-first-out queue of transfers. A transfer's bytes come into being while it is computed: piece by
piece on the wire, here at the pieces' mean rate, one piece late, and with the last piece as a jump at the end (that
piece is what layer-wise pipelining cannot hide). A pair with bytes waiting takes what it is given; one that has
caught up takes no more than it produces. Rates are re-shared whenever a transfer starts, ends, catches up or runs
dry, or the link steps; between these nothing happens, so the cost does not depend on bytes or pieces.

While the link is calm (nobody waits, and all that is produced fits), or one pair alone has bytes waiting and drains
them, a change of that pair changes nothing for the others: only it is looked at. That is most of the time, and it is
where the cost of a run is decided.

Cross-traffic takes part: elastic flows always want more, and TCP shares by connection, so one of them weighs as much as
one of a pair's connections; datagrams at a constant rate take theirs first, whatever becomes of them.

Pure: `handle`-like calls with a time, `next_s()` for when it wants to be looked at again. Units are the caller's
own, consistently: seconds, bytes, bits/s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

TCP_EFFICIENCY: Final = 1448 / 1514  # payload a byte on the wire at MTU 1500 (network design page, rule 3)
LEAST_LEFT: Final = 0.2  # of the link, for TCP beside datagrams that would fill all of it (docs/findings.md)
_EPSILON: Final = 1e-6  # bytes: less than this waiting is nothing
_INFINITY: Final = float("inf")

# What happens next to a pair. Its fluid is then set to exactly what the event says, so that rounding never leaves a
# rest behind.
_SOURCE, _SENT, _CAUGHT_UP = "the source changes", "the head is sent", "sending has caught up with the source"


@dataclass(slots=True)
class _Transfer:
    """bytes in all; `mark`: the pair's cumulative count at which its last byte has been sent."""

    token: int
    size: float
    pieces: int
    start_s: float
    end_s: float
    mark: float


class _Pair:
    """What one sender has for one receiver. Counts are bytes since it was last idle, as of `at_s`; before: sent until
    then."""

    __slots__ = (
        "at_s",
        "before",
        "due_s",
        "event",
        "key",
        "produced",
        "producing",
        "rate",
        "sent",
        "source",
        "stops_s",
        "transfers",
    )

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.at_s = 0.0
        self.before = 0.0
        self.produced = 0.0
        self.sent = 0.0
        self.rate = 0.0  # bytes/s being sent
        self.source = 0.0  # bytes/s coming into being
        self.stops_s = _INFINITY  # when the source next changes
        self.due_s = _INFINITY
        self.event = _SOURCE
        self.transfers: deque[_Transfer] = deque()
        self.producing: _Transfer | None = None

    def rest(self) -> None:
        """Nothing is left to send."""
        self.before += self.sent
        self.produced = self.sent = self.rate = 0.0


class FluidLink:
    """One direction of the link. `capacity_bps` is the shaped rate; TCP payload gets `efficiency` of it.

    per_flow_bps: cap of one pair, None for none (a pair of k capped connections is capped at k times one's cap: the
    caller's sum).
    burst_bytes: the shaper's bucket, payload: what an idle link lets through at once; it fills at the rate left over.
    Not with a cap: a bucket would let a capped pair through faster than its cap.
    delay_s: one way, added to every landing. produced_bytes: payload of all transfers, cumulative, what was stopped
    unsent taken off.
    """

    def __init__(
        self,
        capacity_bps: float,
        *,
        efficiency: float = TCP_EFFICIENCY,
        delay_s: float = 0.0,
        per_flow_bps: float | None = None,
        burst_bytes: float = 0.0,
    ) -> None:
        self.delay_s = delay_s
        self.produced_bytes = 0.0
        self._delivered = 0.0
        self._efficiency = efficiency
        self._cap = _INFINITY if per_flow_bps is None else per_flow_bps / 8
        self._capacity = self._whole = capacity_bps * efficiency / 8  # of the whole, datagrams may have their part
        self._rivals = 0.0  # elastic flows, in pairs: one pair has as many connections as it has
        self._elastic = 0.0  # bytes/s they get since _rivals_s
        self._datagrams = 0.0  # bytes/s, as payload, that are asked for
        self._rivals_s = 0.0
        self._crossed = 0.0  # bytes of both until then
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._active: dict[tuple[str, str], _Pair] = {}
        self._landings: deque[tuple[float, int]] = deque()
        self._burst = self._tokens = burst_bytes if per_flow_bps is None else 0.0
        self._spare = self._capacity  # bytes/s that fill the bucket, since _spare_s
        self._spare_s = -_INFINITY if self._burst else 0.0
        self._calm = True  # nobody waits, every active pair sends what it produces
        self._alone: _Pair | None = None  # or: only this one waits, and all others send what they produce
        self._demand = 0.0  # what those who do not wait send together, bytes/s, while either holds
        self._next_s = _INFINITY
        self._next_pair: _Pair | None = None

    # what the outside says
    def transmit(
        self,
        now_s: float,
        sender: str,
        receiver: str,
        token: int,
        size: float,
        pieces: int,
        start_s: float,
        end_s: float,
    ) -> None:
        """A granted transfer of `size` bytes.

        Its piece i, from 0, exists from start_s + (i + 1) / pieces x (end_s - start_s).
        """
        self._advance(now_s)
        key = (sender, receiver)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(key)
        if key in self._active:
            self._flow(now_s, pair)
        else:
            pair.at_s = now_s
            self._active[key] = pair
        last = pair.transfers[-1].mark if pair.transfers else pair.produced
        pair.transfers.append(_Transfer(token, size, pieces, start_s, end_s, last + size))
        self.produced_bytes += size
        before = pair.source
        if pair.producing is None:
            self._produce(now_s, pair)
        self._settle(now_s, pair, before)

    def stop(self, now_s: float, token: int) -> None:
        """Forget a transfer: what of it is not sent is never sent."""
        self._advance(now_s)
        for key, pair in self._active.items():
            for transfer in pair.transfers:
                if transfer.token == token:
                    self._flow(now_s, pair)
                    self._remove(now_s, pair, transfer)
                    if not pair.transfers:
                        del self._active[key]
                    self._share(now_s)
                    return

    def withdraw(self, now_s: float, node: str) -> list[tuple[str, str, int, float, int, float, float]]:
        """Forget every transfer from or to a node; what of each was not sent yet, as `transmit` takes it."""
        self._advance(now_s)
        rest = []
        for key, pair in self._active.items():
            if node in key:
                self._flow(now_s, pair)
                for one in pair.transfers:
                    unsent = one.mark - max(one.mark - one.size, pair.sent)
                    rest.append((*key, one.token, unsent, one.pieces, one.start_s, one.end_s))
        for transfer in rest:
            self.stop(now_s, transfer[2])
        return rest

    def set_capacity(self, now_s: float, capacity_bps: float, burst_bytes: float | None = None) -> None:
        """The link steps. 0 is an outage: nothing moves. burst_bytes: the bucket's size from now on, unless
        unchanged."""
        self._advance(now_s)
        if burst_bytes is not None and self._cap == _INFINITY:
            self._fill_bucket(now_s)
            self._burst, self._tokens = burst_bytes, min(self._tokens, burst_bytes)
        self._count_cross(now_s)
        self._whole = capacity_bps * self._efficiency / 8
        self._compete(now_s)

    def set_cross(self, now_s: float, flows: float, constant_bps: float) -> None:
        """What competes from now on: elastic flows, each as much as one connection (`flows` is theirs over the
        connections of a pair), and datagrams at constant_bps of the link, at most all of it but LEAST_LEFT."""
        self._advance(now_s)
        self._count_cross(now_s)
        self._rivals, self._datagrams = flows, constant_bps * self._efficiency / 8
        self._elastic = 0.0
        self._compete(now_s)

    def crossed_bytes(self, now_s: float) -> float:
        """What cross-traffic has sent by `now_s`, cumulative, as if it were payload of TCP."""
        self._advance(now_s)
        self._count_cross(now_s)
        return self._crossed

    def advance(self, now_s: float) -> list[tuple[float, int]]:
        """Everything up to now: (landed_s, token) of each transfer whose last byte has arrived since, in order."""
        if self._next_s <= now_s:
            self._advance(now_s)
        landed = []
        while self._landings and self._landings[0][0] <= now_s:
            landed.append(self._landings.popleft())
        return landed

    def next_s(self) -> float | None:
        """No transfer lands before this time, unless the outside says something; None when none ever will.

        While the link is calm that is the end of the computation a transfer belongs to; what happens until then slows
        transfers down if anything, and `advance` goes through it in its order.
        """
        due_s = self._next_s
        if self._calm and due_s != _INFINITY:
            due_s = _INFINITY
            for pair in self._active.values():
                end_s = pair.transfers[0].end_s
                if pair.due_s > end_s:
                    end_s = pair.due_s
                if end_s < due_s:
                    due_s = end_s
        if self._landings and self._landings[0][0] < due_s:
            due_s = self._landings[0][0]
        return None if due_s == _INFINITY else due_s

    def delivered_bytes(self, now_s: float) -> float:
        """Payload sent by `now_s`, cumulative. At the end of all transfers it is produced_bytes."""
        self._advance(now_s)
        for pair in self._active.values():
            self._flow(now_s, pair)
        return self._delivered

    def paths(self, now_s: float) -> Iterator[tuple[str, str, float, float]]:
        """Of every pair that ever sent: sender, receiver, payload sent by `now_s` (cumulative), bytes that wait."""
        self._advance(now_s)
        for pair in self._pairs.values():
            if pair.transfers:
                self._flow(now_s, pair)
            yield *pair.key, pair.before + pair.sent, pair.produced - pair.sent

    @property
    def capacity_bps(self) -> float:
        """The shaped rate at present; 0 while the link is cut."""
        return self._whole * 8 / self._efficiency

    @property
    def idle(self) -> bool:
        """Nothing is being sent or produced."""
        return not self._active

    # the fluid
    def _compete(self, now_s: float) -> None:
        """Datagrams take their part of the link; what is left is shared."""
        self._capacity = self._whole
        if self._datagrams:
            self._capacity = max(self._whole - self._datagrams, self._whole * LEAST_LEFT)
        self._share(now_s)

    def _count_cross(self, now_s: float) -> None:
        self._crossed += (self._elastic + self._whole - self._capacity) * (now_s - self._rivals_s)
        self._rivals_s = now_s

    def _produce(self, now_s: float, pair: _Pair) -> None:
        """Bring the pair's source to where it is at `now_s`: pieces already due exist, the next ones flow."""
        while True:
            transfer = pair.producing
            if transfer is None:
                for one in pair.transfers:
                    if one.mark > pair.produced + _EPSILON:
                        transfer = one
                        break
            if transfer is None:
                pair.producing, pair.source, pair.stops_s = None, 0.0, _INFINITY
                return
            if now_s >= transfer.end_s:
                pair.produced = transfer.mark
                pair.producing = None
                continue
            pair.producing = transfer
            length_s = transfer.end_s - transfer.start_s
            first_s = transfer.start_s + length_s / transfer.pieces
            if now_s < first_s:
                pair.source, pair.stops_s = 0.0, first_s
                return
            rate = transfer.size / length_s
            pair.produced = max(pair.produced, transfer.mark - transfer.size + (now_s - first_s) * rate)
            pair.source = rate
            pair.stops_s = transfer.end_s
            return

    def _remove(self, now_s: float, pair: _Pair, transfer: _Transfer) -> None:
        begun = transfer.mark - transfer.size
        unsent = transfer.mark - max(begun, pair.sent)
        self.produced_bytes -= unsent
        pair.transfers.remove(transfer)
        for later in pair.transfers:
            if later.mark > transfer.mark:
                later.mark -= unsent
        if pair.produced > begun:
            existing = min(pair.produced, transfer.mark) - max(begun, pair.sent)
            pair.produced -= max(0.0, existing)
        if pair.producing is transfer:
            pair.producing = None
        self._produce(now_s, pair)

    def _advance(self, now_s: float) -> None:
        """Let everything happen that is due by `now_s`, in order of time."""
        while self._next_s <= now_s:
            at_s, pair = self._next_s, self._next_pair
            assert pair is not None
            before = pair.source
            self._flow(at_s, pair)
            self._happen(at_s, pair)
            self._settle(at_s, pair, before)

    def _settle(self, now_s: float, pair: _Pair, before: float) -> None:
        """After a pair has changed, its source having been `before`: the rates, and what happens next."""
        if self._cap != _INFINITY or not (self._calm or self._alone is pair):
            self._share(now_s)
            return
        waiting = pair.produced - pair.sent
        others = self._demand if self._alone is pair else self._demand - before
        demand = others + pair.source
        if demand > self._capacity or (waiting > _EPSILON and self._alone is pair):
            self._share(now_s)
            return
        if self._burst:
            self._fill_bucket(now_s)
        if waiting > _EPSILON:
            taken = waiting if waiting < self._tokens else self._tokens  # by the bucket, at once
            self._tokens -= taken
            self._delivered += taken
            pair.sent = pair.produced if taken == waiting else pair.sent + taken
            if taken < waiting:
                self._drain(now_s, pair, others)
                return
        while pair.transfers and pair.sent >= pair.transfers[0].mark - _EPSILON:
            self._landings.append((now_s + self.delay_s, pair.transfers.popleft().token))
        if pair.transfers:
            pair.rate = pair.source
            pair.due_s, pair.event = pair.stops_s, _SOURCE
        elif pair.key in self._active:
            pair.rest()
            del self._active[pair.key]
        self._calm, self._alone = True, None
        self._demand = demand
        self._spare = self._capacity - demand
        self._look()

    def _drain(self, now_s: float, pair: _Pair, others: float) -> None:
        """This pair alone has bytes waiting: it gets all that the others, who send what they produce, leave."""
        left = self._capacity - others
        for other in self._active.values():
            if other.source > left and other is not pair:  # then it would have to give way
                self._share(now_s)
                return
        pair.rate = left
        self._foresee(pair)
        self._calm, self._alone = False, pair
        self._demand, self._spare = others, 0.0
        self._look()

    def _look(self) -> None:
        """Which pair has the next event."""
        next_s, next_pair = _INFINITY, None
        for pair in self._active.values():
            if pair.due_s < next_s:
                next_s, next_pair = pair.due_s, pair
        self._next_s, self._next_pair = next_s, next_pair

    def _happen(self, at_s: float, pair: _Pair) -> None:
        transfers = pair.transfers
        if pair.event is _SENT:
            if pair.sent < transfers[0].mark:  # else the bucket took what follows too
                self._delivered += transfers[0].mark - pair.sent
                pair.sent = transfers[0].mark
            self._landings.append((at_s + self.delay_s, transfers.popleft().token))
            if not transfers:
                pair.rest()
                del self._active[pair.key]
                return
        elif pair.event is _CAUGHT_UP:
            self._delivered += pair.produced - pair.sent
            pair.sent = pair.produced
        if pair.stops_s <= at_s:
            self._produce(at_s, pair)

    def _flow(self, now_s: float, pair: _Pair) -> None:
        """Bring a pair's counts to `now_s`, at the rates it has had since they were taken."""
        elapsed_s = now_s - pair.at_s
        if elapsed_s > 0:
            moved = pair.rate * elapsed_s
            pair.produced += pair.source * elapsed_s
            if pair.sent + moved > pair.produced:
                moved = pair.produced - pair.sent
            pair.sent += moved
            self._delivered += moved
            pair.at_s = now_s

    def _share(self, now_s: float) -> None:
        """Max-min fair rates for all pairs from `now_s` on, then the time of the next event under them."""
        if self._burst:
            self._spend_burst(now_s)
        left, largest = self._capacity, 0.0
        waiting = []
        active = self._active.values()
        next_s, next_pair = _INFINITY, None
        filled = False
        for pair in active:
            if pair.at_s < now_s:
                self._flow(now_s, pair)
            done = pair.transfers[0].mark - pair.sent <= _EPSILON  # by the bucket, or as another was in this moment
            if done or pair.produced - pair.sent > _EPSILON:
                waiting.append(pair)
                continue
            source = pair.rate = pair.source
            left -= source
            if source > largest:
                largest = source
            pair.due_s, pair.event = pair.stops_s, _SOURCE
            if pair.stops_s < next_s:
                next_s, next_pair = pair.stops_s, pair
        rivals = self._rivals
        if waiting or rivals:
            share = left / (len(waiting) + rivals)
            if share > self._cap:
                share = self._cap
            if largest > share or largest > self._cap:
                self._fill(active, waiting)
                waiting, filled = list(active), True
            else:
                for pair in waiting:
                    pair.rate = share
        elif left < 0 or largest > self._cap:
            self._fill(active, waiting)
            waiting, filled = list(active), True
        for pair in waiting:
            self._foresee(pair)
            if pair.due_s < next_s:
                next_s, next_pair = pair.due_s, pair
        self._next_s, self._next_pair = next_s, next_pair
        self._calm = not waiting and not rivals
        self._alone = waiting[0] if len(waiting) == 1 and not filled and not rivals else None
        self._demand = sum([pair.rate for pair in active if pair is not self._alone])
        self._spare = max(0.0, left if self._calm else self._capacity - sum([pair.rate for pair in active]))
        if rivals:
            self._outdo(now_s, rivals)

    def _outdo(self, now_s: float, rivals: float) -> None:
        """Elastic flows take all that the pairs leave, what the bucket holds too."""
        self._count_cross(now_s)
        self._elastic = min(self._spare, rivals * self._cap)
        self._spare -= self._elastic
        self._crossed += self._tokens
        self._tokens = 0.0

    def _fill_bucket(self, now_s: float) -> None:
        """The bucket as it is at `now_s`, filled by what was left over."""
        if now_s > self._spare_s:
            self._tokens = min(self._burst, self._tokens + self._spare * min(now_s - self._spare_s, 1e9))
            self._spare_s = now_s

    def _spend_burst(self, now_s: float) -> None:
        """What the bucket holds goes out at once to whoever has bytes waiting, in the order the pairs became active."""
        self._fill_bucket(now_s)
        for pair in self._active.values():
            if self._tokens <= 0:
                return
            self._flow(now_s, pair)
            taken = min(self._tokens, pair.produced - pair.sent)
            if taken > _EPSILON:
                pair.sent += taken
                self._delivered += taken
                self._tokens -= taken

    def _fill(self, active: Iterable[_Pair], waiting: list[_Pair]) -> None:
        """Max-min where not every pair that has caught up gets what it produces: water-filling, smallest want first."""
        wants = sorted(
            ((self._cap if pair in waiting else min(pair.source, self._cap)), i, pair) for i, pair in enumerate(active)
        )
        left, count = self._capacity, len(wants) + self._rivals  # they want no less than anybody, so they come last
        for want, _, pair in wants:
            pair.rate = min(want, left / count)
            left -= pair.rate
            count -= 1

    @staticmethod
    def _foresee(pair: _Pair) -> None:
        """What happens next to a pair, and when: its source changes, its head is sent, or it catches up."""
        pair.due_s, pair.event = pair.stops_s, _SOURCE
        rate = pair.rate
        left = pair.transfers[0].mark - pair.sent  # of the head
        if left <= _EPSILON:  # the bucket took the rest of it
            pair.due_s, pair.event = pair.at_s, _SENT
            return
        if rate <= 0:
            return
        waiting = pair.produced - pair.sent
        if left <= waiting + _EPSILON:
            due_s, event = pair.at_s + max(0.0, left) / rate, _SENT
        elif waiting > _EPSILON and rate > pair.source:
            due_s, event = pair.at_s + waiting / (rate - pair.source), _CAUGHT_UP
        else:
            return
        if due_s < pair.due_s:
            pair.due_s, pair.event = due_s, event
