"""The serving instances joined by a wire that keeps the order of a connection and no other, without and with caches."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.kvcache import CacheShape, NodePool
from emulator.messages import (
    CONTROL,
    WAKE,
    WIRE,
    Admitted,
    AnyMessage,
    AttemptFailed,
    CacheChanged,
    Cancel,
    Convert,
    Damaged,
    Expect,
    Finished,
    Landed,
    Out,
    PeerLost,
    Prefill,
    Prefilled,
    StopTransmit,
    Tokens,
    Transmit,
    Unexpect,
)
from tests.emulator.drive import (
    STEP_S,
    Linear,
    assert_decode_idle,
    assert_prefill_idle,
)


class Joined(RuleBasedStateMachine):
    """Two prefill nodes and two decode nodes under a control that retries, joined by a wire in arbitrary order.

    Every directed pair keeps its own order (a TCP connection does); which pair delivers next, how long anything takes,
    what is cancelled and which connection breaks is Hypothesis' choice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.machines: dict[str, PrefillInstance | DecodeInstance] = {
            **self.prefill_nodes(),
            "d0": DecodeInstance("d0", slots=2, step_s=STEP_S, landing_bytes=1200, stream_interval=2),
            "d1": DecodeInstance("d1", slots=1, step_s=STEP_S, landing_bytes=700, stream_interval=2, token_base=1000),
        }
        self.wires: dict[tuple[str, str], deque[AnyMessage]] = {}
        self.sending: dict[int, tuple[str, Transmit]] = {}  # by token: who sends, and what
        self.expected: dict[str, dict[int, Expect]] = {name: {} for name in self.machines}
        self.tokens: set[int] = set()
        self.attempt: dict[str, int] = {}  # of requests that have not ended
        self.ended: dict[str, str] = {}
        self.output: dict[str, int] = {}
        self.heard: dict[tuple[str, int], list[AnyMessage]] = {}

    def prefill_nodes(self) -> dict[str, PrefillInstance]:
        return {name: PrefillInstance(name, Linear(), pieces=2, outbox_bytes=1500) for name in ("p0", "p1")}

    # what carries messages
    def tell(self, name: str, message: AnyMessage) -> None:
        """Deliver to a machine now, after all it had asked to be woken for."""
        machine = self.machines[name]
        while (due_s := machine.next_s()) is not None and due_s <= self.now_s:
            self.emit(name, machine.handle(due_s, WAKE))
        if message is not WAKE:
            self.emit(name, machine.handle(self.now_s, message))

    def emit(self, name: str, out: list[Out]) -> None:
        for destination, message in out:
            if destination == CONTROL:
                self.wires.setdefault((name, CONTROL), deque()).append(message)
            elif destination != WIRE:
                self.wires.setdefault((name, destination), deque()).append(message)
            elif type(message) is Transmit:
                assert message.token not in self.sending
                self.sending[message.token] = (name, message)
            elif type(message) is StopTransmit:
                self.sending.pop(message.token, None)
            elif type(message) is Expect:
                assert message.token not in self.tokens
                self.tokens.add(message.token)
                self.expected[name][message.token] = message
            else:
                assert type(message) is Unexpect
                del self.expected[name][message.token]

    def deliver(self, pair: tuple[str, str]) -> None:
        receiver = pair[1]
        message = self.wires[pair].popleft()
        if receiver == CONTROL:
            self.control(message)
        else:
            self.receive(receiver, message)

    def receive(self, name: str, message: AnyMessage) -> None:
        assert self.machines[name].accepts(message)
        self.tell(name, message)

    def control(self, message: Any) -> None:
        name, attempt = message.request_id, message.attempt
        self.heard.setdefault((name, attempt), []).append(message)
        if self.attempt.get(name) != attempt:
            return
        if type(message) is Finished:
            self.end(name, "finished")
        elif type(message) is AttemptFailed:
            admitted = any(type(m) is Admitted for m in self.heard[name, attempt])
            if not admitted:
                self.cancel(name)
                if attempt < 3:
                    self.route(name, attempt + 1)
                else:
                    self.end(name, "failed")

    def end(self, name: str, how: str) -> None:
        assert name not in self.ended
        self.ended[name] = how
        del self.attempt[name]

    def cancel(self, name: str) -> None:
        for node in self.machines:
            self.wires.setdefault((CONTROL, node), deque()).append(Cancel(name, self.attempt[name]))

    def route(self, name: str, attempt: int) -> None:
        prefill, decode, tokens = self.routes[name]
        if attempt > 1:
            decode = "d0"
        self.attempt[name] = attempt
        self.wires.setdefault((CONTROL, prefill), deque()).append(self.order(name, attempt, tokens, decode))

    def order(self, name: str, attempt: int, tokens: int, decode: str) -> Prefill:
        return Prefill(name, attempt, tokens, 0, self.output[name], decode)

    # what happens
    @initialize()
    def begin(self) -> None:
        self.routes: dict[str, tuple[str, str, int]] = {}

    @rule(
        prefill=st.sampled_from(["p0", "p1"]),
        decode=st.sampled_from(["d0", "d1"]),
        tokens=st.sampled_from([10, 40, 60, 100, 110]),
        output=st.integers(1, 6),
    )
    def arrive(self, prefill: str, decode: str, tokens: int, output: int) -> None:
        name = f"r{len(self.output)}"
        self.output[name] = output
        self.routes[name] = (prefill, decode, tokens)
        self.route(name, 1)

    @rule(data=st.data(), count=st.integers(1, 6))
    def carry(self, data: st.DataObject, count: int) -> None:
        """Deliver the next message of some pair."""
        for _ in range(count):
            pairs = sorted(pair for pair, queue in self.wires.items() if queue)
            if not pairs:
                return
            self.deliver(data.draw(st.sampled_from(pairs)))

    @rule(ticks=st.integers(1, 8))
    def pass_time(self, ticks: int) -> None:
        self.now_s += ticks * 0.15
        for name in self.machines:
            self.tell(name, WAKE)

    def ready(self) -> list[int]:
        return sorted(token for token, (_, sent) in self.sending.items() if sent.end_s <= self.now_s)

    def arrives(self, token: int, damaged: bool) -> None:
        sender, sent = self.sending.pop(token)
        expected = self.expected[sent.decode_node].pop(sent.token, None)
        if expected is None:
            return  # a late writer: discarded
        assert (expected.kv_bytes, expected.prefill_node) == (sent.kv_bytes, sender)
        if damaged:
            self.expected[sent.decode_node][sent.token] = expected  # until the machine says Unexpect
            self.tell(sent.decode_node, Damaged(sent.token, "checksum"))
        else:
            self.tell(sent.decode_node, Landed(sent.token))

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), damaged=st.sampled_from([False, False, False, True]))
    def kv_arrives(self, data: st.DataObject, damaged: bool) -> None:
        self.arrives(data.draw(st.sampled_from(self.ready())), damaged)

    @precondition(lambda self: self.attempt)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.attempt)))
        self.cancel(name)
        self.end(name, "cancelled")

    @rule(prefill=st.sampled_from(["p0", "p1"]), decode=st.sampled_from(["d0", "d1"]))
    def connection_breaks(self, prefill: str, decode: str) -> None:
        """What was under way between the two is lost, and both are told."""
        self.part(prefill, decode)

    def part(self, one: str, other: str) -> None:
        self.wires.pop((one, other), None)
        self.wires.pop((other, one), None)
        for token, (sender, sent) in list(self.sending.items()):
            if {sender, sent.decode_node} == {one, other}:
                del self.sending[token]
        self.tell(one, PeerLost(other))
        self.tell(other, PeerLost(one))

    # what always holds
    @invariant()
    def room_is_never_exceeded(self) -> None:
        for machine in self.machines.values():
            if isinstance(machine, DecodeInstance):
                assert 0 <= machine.landing_used <= machine.landing_bytes
                assert 0 <= machine.running_requests(self.now_s) <= machine.slots
                assert set(machine._coming) == set(self.expected[machine.name])
            else:
                assert machine.outbox_used == sum(job.kv_bytes for job in machine._unsent.values())
                assert machine.outbox_used <= machine.outbox_bytes or len(machine._unsent) == 1
                assert machine.queued_tokens == sum(job.tokens for job in machine._queue)

    def teardown(self) -> None:
        """Let everything run out: then every request has ended once, nothing is held, and every stamp is in order."""
        for _ in range(10_000):
            for pair in [pair for pair, queue in self.wires.items() if queue]:
                while self.wires[pair]:
                    self.deliver(pair)
            for token in self.ready():
                self.arrives(token, damaged=False)
            if not (any(self.wires.values()) or self.sending or any(m.next_s() for m in self.machines.values())):
                break
            self.now_s += 0.25
            for name in self.machines:
                self.tell(name, WAKE)
        assert not self.attempt
        assert set(self.ended) == set(self.output)
        for machine in self.machines.values():
            (assert_prefill_idle if isinstance(machine, PrefillInstance) else assert_decode_idle)(machine)
        for key, heard in self.heard.items():
            self.check_attempt(key, heard)

    def check_attempt(self, key: tuple[str, int], heard: list[AnyMessage]) -> None:
        """What control heard of one attempt, whether it still cared or not."""
        name, attempt = key
        first: dict[type, Any] = {}
        for message in heard:
            if type(message) is not AttemptFailed and type(message) is not Tokens:
                assert type(message) not in first, "told twice"
            first.setdefault(type(message), message)
        prefilled, admitted, finished = first.get(Prefilled), first.get(Admitted), first.get(Finished)
        told = [k for m in heard if type(m) is Tokens for k in range(m.first, m.first + m.count)]
        assert told == list(range(len(told)))
        if prefilled:
            computed = self.routes[name][2] - prefilled.cached_tokens
            assert prefilled.kv_bytes == 10 * computed > 0
            assert prefilled.end_s == prefilled.start_s + computed / 100
        if prefilled and admitted:
            assert prefilled.start_s < prefilled.end_s <= admitted.landed_s
        if admitted:
            assert admitted.landed_s <= admitted.admitted_s
        if finished:
            output = self.output[name]
            assert len(told) == output == finished.tokens
            assert finished.finished_s == admitted.admitted_s + (output - 1) * STEP_S
            assert finished.freed_s == admitted.admitted_s + output * STEP_S
        if self.ended[name] == "finished" and attempt == max(a for n, a in self.heard if n == name):
            assert finished


def block_ids(blocks: int, branch: int) -> tuple[int, ...]:
    """A prompt's blocks; it leaves the common prefix after three blocks in branch 1, after six in branch 2."""
    shared = min(blocks, 3 * branch) if branch else blocks
    return (*range(1, shared + 1), *range(100 * branch + shared + 1, 100 * branch + blocks + 1))


class JoinedWithCaches(Joined):
    """The same with pools: three prefill nodes that fetch cached prefixes from each other.

    Prompts share prefixes; whom control names as a prefix's holder, and how much of it, is Hypothesis' choice, right or
    not. One prefill node may become a decode node.
    """

    def __init__(self) -> None:
        self.converted = False
        self.directory: dict[str, set[int]] = {"p0": set(), "p1": set(), "p2": set()}
        self.prompts: dict[str, tuple[tuple[int, ...], int, str]] = {}  # block ids, blocks believed cached, where
        super().__init__()

    def prefill_nodes(self) -> dict[str, PrefillInstance]:
        """The later ones hold something from the beginning."""
        shape = CacheShape(block_tokens=10, block_bytes=100, snapshot_bytes=150)
        nodes = {}
        for i, (name, capacity) in enumerate([("p0", 1500), ("p1", 3000), ("p2", 6000)]):
            pool = NodePool(capacity, shape)
            for branch in range(i + 1):
                ids = block_ids(9, branch)
                self.directory[name].update(pool.install(ids, 3 * (i + branch)).added)
            nodes[name] = PrefillInstance(
                name, Linear(), pieces=2, outbox_bytes=1500, pool=pool, token_base=10_000 * (i + 1)
            )
        return nodes

    def order(self, name: str, attempt: int, tokens: int, decode: str) -> Prefill:
        ids, blocks, holder = self.prompts[name]
        return Prefill(name, attempt, tokens, 10 * blocks, self.output[name], decode, ids, holder)

    def control(self, message: Any) -> None:
        if type(message) is not CacheChanged:
            super().control(message)
        elif not (self.converted and message.node == "p2"):
            held = self.directory[message.node]
            assert held.issuperset(message.removed)
            held.difference_update(message.removed)
            assert held.isdisjoint(message.added)
            held.update(message.added)

    def cancel(self, name: str) -> None:
        """Control tells all nodes, or those alone that it believes to have it."""
        nodes = self.machines if int(name[1:]) % 2 else self.routes[name][:2]
        for node in nodes:
            self.wires.setdefault((CONTROL, node), deque()).append(Cancel(name, self.attempt[name]))

    def receive(self, name: str, message: AnyMessage) -> None:
        if self.machines[name].accepts(message):
            self.tell(name, message)
        else:
            assert self.converted, message
            assert name == "p2"

    @rule(
        prefill=st.sampled_from(["p0", "p1", "p2"]),
        decode=st.sampled_from(["d0", "d1"]),
        holder=st.sampled_from(["", "p0", "p1", "p2"]),
        blocks=st.integers(0, 10),
        branch=st.integers(0, 2),
        believed=st.integers(0, 10),
        output=st.integers(1, 6),
    )
    def arrive_with_prefix(
        self, prefill: str, decode: str, holder: str, blocks: int, branch: int, believed: int, output: int
    ) -> None:
        name = f"r{len(self.output)}"
        self.output[name] = output
        self.prompts[name] = (block_ids(blocks, branch), min(believed, blocks), holder)
        if self.converted and prefill == "p2":
            prefill = "p0"
        self.routes[name] = (prefill, decode, 10 * blocks + 5)
        self.route(name, 1)

    def arrive(self, prefill: str, decode: str, tokens: int, output: int) -> None:
        """Not here: prompts have blocks."""

    @rule(nodes=st.sampled_from([("p0", "p1"), ("p0", "p2"), ("p1", "p2")]))
    def prefill_nodes_lose_each_other(self, nodes: tuple[str, str]) -> None:
        self.part(*nodes)

    @precondition(lambda self: len(self.output) > 2 and not self.converted)
    @rule()
    def convert(self) -> None:
        """Once nobody is routed there any more; others may be fetching from it at this moment."""
        machine = self.machines["p2"]
        assert isinstance(machine, PrefillInstance)
        if (
            machine._queue
            or machine._unsent
            or machine.next_s()
            or any(self.routes[r][0] == "p2" for r in self.attempt)
        ):
            return
        if any(type(m) is Prefill for m in self.wires.get((CONTROL, "p2"), ())):
            return
        self.converted = True
        self.tell("p2", Convert("decode", 1.0))
        assert machine.pool is not None
        assert machine.pool.referenced_blocks == 0
        self.machines["p2"] = DecodeInstance(
            "p2", slots=1, step_s=STEP_S, landing_bytes=1000, stream_interval=2, token_base=50_000
        )

    @invariant()
    def pools_hold_what_is_under_way_and_nothing_else(self) -> None:
        for machine in self.machines.values():
            if isinstance(machine, PrefillInstance):
                pool, cache = machine.pool, machine._cache
                assert pool is not None
                assert cache is not None
                pool.check()
                running = machine._running
                leases = [loan.lease for loan in cache._loans.values()] + ([running.lease] if running else [])
                assert pool._leases == set(leases)
                assert set(cache._coming) == set(self.expected[machine.name])
                room = set(pool._transfers)
                assert room.issuperset(cache._coming)
                assert room - set(cache._coming) <= set(machine._unsent)
                assert set(cache._fetches) <= {(job.request_id, job.attempt) for job in machine._queue}

    def teardown(self) -> None:
        super().teardown()
        for name, machine in self.machines.items():
            if isinstance(machine, PrefillInstance):
                assert machine.pool is not None
                assert machine.pool.referenced_blocks == machine.pool.transfer_blocks == 0
                machine.pool.check()
                usable = {run.ids[-1] for run in machine.pool._runs() if run.snapshot is not None}
                assert self.directory[name] == usable


TestJoined = Joined.TestCase
TestJoined.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestJoinedWithCaches = JoinedWithCaches.TestCase
TestJoinedWithCaches.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
