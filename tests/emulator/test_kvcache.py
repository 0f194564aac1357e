"""The hybrid prefix cache pool: what a prompt can reuse, what goes first, and that nothing is lost or given twice."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emulator.kvcache import CacheShape, Changes, Ids, Lease, NodePool, aligned, hash_blocks
from emulator.profile import load_profile
from tests.bench.kvcache import UNLIMITED_BYTES, hit_ratio, pool_ids, replay, shape_of
from tests.traces.files import MOONCAKE, needs
from traces.load import load

BLOCK_BYTES = 10
TOY = CacheShape(block_tokens=1, block_bytes=BLOCK_BYTES, snapshot_bytes=15)  # a snapshot takes two blocks
DENSE = CacheShape(block_tokens=1, block_bytes=BLOCK_BYTES, snapshot_bytes=0)


def pool_of(blocks: int, shape: CacheShape = TOY) -> NodePool:
    return NodePool(blocks * BLOCK_BYTES, shape)


def prompt(text: str) -> Ids:
    """A prompt of one block a letter."""
    return hash_blocks(text.encode(), 1)


def prefill(pool: NodePool, text: str) -> Changes:
    changes = pool.commit(pool.begin(prompt(text)), prompt(text))
    assert changes is not None
    pool.check()
    return changes


# ids


def test_ids_are_equal_as_far_as_the_tokens_are() -> None:
    one, other = hash_blocks([1, 2, 3, 4, 5, 6], 2), hash_blocks([1, 2, 3, 9, 5, 6], 2)
    assert one[0] == other[0]
    assert set(one[1:]).isdisjoint(other[1:])


def test_the_last_block_may_be_partial_and_is_then_another() -> None:
    assert hash_blocks([1, 2, 3], 2)[0] == hash_blocks([1, 2, 3, 4], 2)[0]
    assert hash_blocks([1, 2, 3], 2)[1] != hash_blocks([1, 2, 3, 4], 2)[1]
    assert hash_blocks([], 2) == ()


def test_bytes_are_tokens() -> None:
    assert hash_blocks(b"\x01\x02\x03", 2) == hash_blocks([1, 2, 3], 2)


def test_ids_are_the_same_in_another_process() -> None:
    code = "from emulator.kvcache import hash_blocks; print(*hash_blocks([7, 8, 1 << 40], 2))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert tuple(map(int, told.split())) == hash_blocks([7, 8, 1 << 40], 2)


def test_a_block_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens = 0: must be at least 1"):
        hash_blocks([1], 0)


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "expected"),
    [
        (41, 10, (1, 2, 3, 4)),  # four whole blocks and a token to compute
        (40, 10, (1, 2, 3)),  # the whole prompt is never a hit
        (39, 10, (1, 2, 3)),
        (41, 20, (2, 4)),  # an id names its whole prefix
        (40, 20, (2,)),
        (9, 10, ()),
        (41, 15, ()),  # no multiple
        (41, 5, ()),
    ],
)
def test_a_prompts_whole_pool_blocks(tokens: int, block_tokens: int, expected: Ids) -> None:
    hashes = tuple(range(1, -(-tokens // 10) + 1))
    assert aligned(hashes, 10, tokens, block_tokens) == expected


def test_a_request_without_hashes_has_no_ids() -> None:
    assert aligned((), 0, 100, 10) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_pool_blocks_hold_whole_blocks_of_the_prompt_but_not_all_of_it(
    tokens: list[int], block_size: int, ratio: int
) -> None:
    ids = aligned(hash_blocks(tokens, block_size), block_size, len(tokens), block_size * ratio)
    assert len(ids) == (len(tokens) - 1) // (block_size * ratio)
    assert set(ids) <= set(hash_blocks(tokens, block_size))


# weights


def test_the_papers_model_weighs_a_snapshot_as_some_twenty_blocks() -> None:
    shape = shape_of("h200-1t", 512)
    assert shape.block_bytes == pytest.approx((2316.3 - 190.8) / 127 / 2 * 2**20, rel=1e-6)
    assert shape.snapshot_bytes == pytest.approx(174 * 2**20, rel=0.01)
    assert shape.snapshot_blocks == 21


def test_a_prefix_weighs_its_kv_at_the_ends_of_the_table() -> None:
    profile = load_profile("h200-1t")
    shape = shape_of("h200-1t", 512)
    for tokens in (profile.first_tokens, profile.last_tokens):
        weight = tokens / 512 * shape.block_bytes + shape.snapshot_bytes
        assert weight == pytest.approx(profile.s_kv(tokens), rel=1e-6)


def test_weights_are_never_negative() -> None:
    convex = CacheShape.of(lambda tokens: tokens**2, 10, first_tokens=1, last_tokens=10)
    assert (convex.snapshot_bytes, convex.snapshot_blocks) == (0, 0)
    flat = CacheShape.of(lambda tokens: 1000.0, 10, first_tokens=1, last_tokens=10)
    assert (flat.block_bytes, flat.snapshot_bytes) == (1, 1000)


def test_weights_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes = 0: must be at least 1"):
        CacheShape(1, 0, 0)
    with pytest.raises(ValueError, match="lengths 5 and 5: must ascend"):
        CacheShape.of(float, 1, first_tokens=5, last_tokens=5)


# what can be reused


def test_a_prompt_again_hits_all_of_its_blocks() -> None:
    pool = pool_of(100)
    assert prefill(pool, "abcd") == Changes((prompt("abcd")[3],), (), 4)
    assert pool.match(prompt("abcd")) == 4
    assert pool.match(prompt("abcdef")) == 4
    assert (pool.prefix_blocks, pool.snapshots, pool.used_blocks) == (4, 1, 6)


def test_blocks_without_a_snapshot_at_their_end_cannot_be_reused() -> None:
    pool = pool_of(100)
    prefill(pool, "abcd")
    assert pool.present(prompt("abc")) == 3
    assert pool.match(prompt("abc")) == 0
    assert pool.match(prompt("abxy")) == 0


def test_the_second_prompt_to_branch_off_leaves_a_snapshot_for_the_third() -> None:
    pool = pool_of(100)
    prefill(pool, "abcd")
    lease = pool.begin(prompt("abxy"))
    assert (lease.hit_blocks, lease.branch_blocks) == (0, 2)
    changes = pool.commit(lease, prompt("abxy"))
    assert changes == Changes((prompt("ab")[1], prompt("abxy")[3]), (), 4)
    assert pool.match(prompt("abzz")) == 2


def test_a_caller_who_takes_no_snapshot_at_the_branch_leaves_none() -> None:
    pool = pool_of(100)
    prefill(pool, "abcd")
    lease = pool.begin(prompt("abxy"))
    lease.branch_blocks = 0
    pool.commit(lease, prompt("abxy"))
    assert pool.match(prompt("abzz")) == 0


def test_no_branch_where_a_prompt_continues_an_earlier_one() -> None:
    pool = pool_of(100)
    prefill(pool, "ab")
    lease = pool.begin(prompt("abcd"))
    assert (lease.hit_blocks, lease.branch_blocks) == (2, 0)


def test_a_hit_is_no_longer_than_the_decision_counted_on() -> None:
    pool = pool_of(100)
    prefill(pool, "ab")
    prefill(pool, "abcd")
    assert [pool.begin(prompt("abcde"), upto).hit_blocks for upto in (0, 1, 2, 3, 4, 9)] == [0, 0, 2, 2, 4, 4]
    pool.check()


def test_hits_are_counted_in_tokens() -> None:
    pool = NodePool(1000, CacheShape(512, 1, 1))
    prefill(pool, "ab")
    prefill(pool, "abc")
    assert pool.hit_tokens == 2 * 512


def test_without_recurrent_state_every_block_can_be_reused() -> None:
    pool = pool_of(100, DENSE)
    assert prefill(pool, "abcd") == Changes(prompt("abcd"), (), 4)
    assert pool.match(prompt("abxy")) == 2
    lease = pool.begin(prompt("abxy"), 1)
    assert (lease.hit_blocks, lease.branch_blocks) == (1, 0)
    pool.check()


# what goes first


def test_the_least_recently_used_goes_first() -> None:
    pool = pool_of(9)
    for text in ("a", "b", "c", "a"):
        prefill(pool, text)
    assert prefill(pool, "d").removed == prompt("b")
    assert [pool.match(prompt(text)) for text in "abcd"] == [1, 0, 1, 1]


def test_a_tail_goes_before_what_it_follows() -> None:
    pool = pool_of(10)
    prefill(pool, "abcdef")
    pool.reserve("kv", 5 * BLOCK_BYTES)
    assert pool.present(prompt("abcdef")) == 5
    assert (pool.evicted_snapshots, pool.evicted_blocks) == (1, 1)


def test_of_two_groups_the_one_whose_oldest_is_older_gives() -> None:
    pool = pool_of(12)
    prefill(pool, "ab")
    prefill(pool, "abcd")  # the blocks of ab are used again, and so is its snapshot: the hit
    prefill(pool, "abcd")  # here they are not: the snapshot of ab is now the oldest
    assert prefill(pool, "xyz").removed == (prompt("ab")[1],)
    assert pool.match(prompt("abcd")) == 4


def test_an_evicted_snapshot_is_taken_again_by_who_passes() -> None:
    pool = pool_of(12)
    for text in ("ab", "abcd", "abcd", "xyz"):
        prefill(pool, text)
    assert pool.match(prompt("abx")) == 0
    assert prefill(pool, "abx").added == (prompt("ab")[1], prompt("abx")[2])


def test_what_is_leased_stays() -> None:
    pool = pool_of(6)
    prefill(pool, "abcd")
    lease = pool.begin(prompt("abcd"))
    assert pool.reserve("kv", 1) is None
    assert prefill(pool, "x").kept_blocks == 0
    assert pool.match(prompt("abcd")) == 4
    assert pool.release(lease)
    assert pool.reserve("kv", 1) == Changes(removed=(prompt("abcd")[3],))


# too small


def test_a_pool_too_small_keeps_the_longest_leading_part_that_fits() -> None:
    pool = pool_of(5)
    assert prefill(pool, "abcdef") == Changes((prompt("abc")[2],), (), 3)
    assert pool.match(prompt("abcdef")) == 3


def test_no_block_is_kept_without_room_for_a_snapshot() -> None:
    pool = pool_of(2)
    assert prefill(pool, "ab") == Changes()
    assert pool.used_blocks == 0


def test_a_prompt_may_take_the_room_of_the_snapshot_that_it_started_from() -> None:
    pool = pool_of(6)
    prefill(pool, "ab")
    assert prefill(pool, "abcd") == Changes((prompt("abcd")[3],), (prompt("ab")[1],), 4)


def test_the_end_comes_before_the_branch() -> None:
    pool = pool_of(8)
    prefill(pool, "abcd")
    changes = prefill(pool, "abxyzz")
    assert (changes.kept_blocks, changes.added) == (6, (prompt("abxyzz")[5],))
    assert pool.match(prompt("abq")) == 0


# leases


def test_a_late_commit_is_refused_and_changes_nothing() -> None:
    pool = pool_of(100)
    lease = pool.begin(prompt("ab"))
    assert pool.release(lease)
    assert pool.commit(lease, prompt("ab")) is None
    assert pool.used_blocks == 0


def test_a_lease_ends_once() -> None:
    pool = pool_of(100)
    prefill(pool, "ab")
    one, other = pool.begin(prompt("ab")), pool.begin(prompt("ab"))
    assert (pool.release(one), pool.release(one)) == (True, False)
    assert pool.referenced_blocks == 4
    assert pool.commit(other, prompt("ab")) is not None
    assert (pool.release(other), pool.commit(other, prompt("ab")), pool.referenced_blocks) == (False, None, 0)


def test_a_lease_of_another_pool_is_refused() -> None:
    pool, restarted = pool_of(100), pool_of(100)
    lease = pool.begin(prompt("ab"))
    assert restarted.commit(lease, prompt("ab")) is None


# transfers


def test_a_transfer_takes_whole_blocks_and_gives_them_back_once() -> None:
    pool = pool_of(10)
    assert pool.reserve("r1", 21) == Changes()
    assert (pool.transfer_blocks, pool.referenced_blocks) == (3, 3)
    assert (pool.free("r1"), pool.free("r1"), pool.used_blocks) == (True, False, 0)


def test_a_transfer_that_does_not_fit_evicts_nothing() -> None:
    pool = pool_of(10)
    prefill(pool, "abcd")
    assert pool.reserve("r1", 101) is None
    assert pool.match(prompt("abcd")) == 4


def test_a_transfer_has_room_once() -> None:
    pool = pool_of(10)
    pool.reserve("r1", 10)
    assert pool.reserve("r1", 10) is None
    assert pool.transfer_blocks == 1


def test_a_transfer_of_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_bytes = -1: must be at least 0"):
        pool_of(10).reserve("r1", -1)


# a prefix from elsewhere


def test_a_prefix_that_landed_can_be_reused_at_its_length() -> None:
    pool = pool_of(100)
    assert pool.install(prompt("abcd"), 3) == Changes((prompt("abc")[2],), (), 3)
    assert pool.match(prompt("abcd")) == 3


def test_a_snapshot_fetched_for_one_length_is_of_no_use_at_another() -> None:
    pool = pool_of(5)
    assert pool.install(prompt("abcd"), 4) == Changes()
    assert pool_of(5, DENSE).install(prompt("abcdefg"), 7).kept_blocks == 5


def test_what_is_there_already_is_not_added_again() -> None:
    pool = pool_of(100)
    prefill(pool, "abcd")
    assert pool.install(prompt("abcd"), 4) == Changes((), (), 4)
    assert prefill(pool, "abcd") == Changes((), (), 4)


def test_check_tells_a_pool_that_contradicts_itself() -> None:
    pool = pool_of(100)
    prefill(pool, "abcd")
    pool.prefix_blocks += 1
    with pytest.raises(AssertionError):
        pool.check()


# the real trace


@needs(MOONCAKE)
@pytest.mark.parametrize(("branches", "expected"), [(False, 0.343), (True, 0.352)])
def test_the_conversation_trace_hits_what_the_design_expects(branches: bool, expected: float) -> None:
    """With unlimited room; of all blocks, as traces.info counts them (where a cache without snapshots hits 0.366)."""
    requests = load(MOONCAKE).requests
    pool = NodePool(UNLIMITED_BYTES, shape_of("h200-1t", 512))
    replay(pool, pool_ids(requests, 512), branches=branches)
    assert hit_ratio(pool, requests) == pytest.approx(expected, abs=0.003)
    pool.check()


@needs(MOONCAKE)
def test_a_pool_under_pressure_stays_sound_and_full() -> None:
    requests = load(MOONCAKE).requests
    pool = NodePool(200 << 30, shape_of("h200-1t", 512))
    replay(pool, pool_ids(requests, 512))
    pool.check()
    assert pool.referenced_blocks == 0
    assert 0.99 * pool.capacity_blocks <= pool.used_blocks <= pool.capacity_blocks
    assert pool.evicted_blocks > 100_000


# any order of events

Entry = tuple[str, int]  # "kv" or "state", and the id


class Naive:
    """The pool as a list of single blocks and snapshots, oldest first: slow, and obviously what is meant."""

    def __init__(self, capacity: int, weight: int) -> None:
        self.capacity = capacity
        self.weight = weight
        self.refs: dict[Entry, int] = {}
        self.idle: list[Entry] = []
        self.transfers: dict[int, int] = {}
        self.before: dict[int, int] = {}  # the id before an id

    def size(self, entry: Entry) -> int:
        return 1 if entry[0] == "kv" else self.weight

    @property
    def used(self) -> int:
        return sum(map(self.size, self.refs)) + sum(self.transfers.values())

    @property
    def referenced(self) -> int:
        return sum(self.size(entry) for entry, refs in self.refs.items() if refs) + sum(self.transfers.values())

    def present(self, ids: Ids) -> int:
        return next((at for at, one in enumerate(ids) if ("kv", one) not in self.refs), len(ids))

    def usable(self, ids: Ids) -> list[int]:
        upto = range(1, self.present(ids) + 1)
        return [0, *(at for at in upto if not self.weight or ("state", ids[at - 1]) in self.refs)]

    def hold(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry in self.idle:
                self.idle.remove(entry)
            self.refs[entry] = self.refs.get(entry, 0) + 1

    def let_go(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.refs[entry] -= 1
            if not self.refs[entry]:
                self.idle.append(entry)

    def make_room(self, blocks: int) -> list[int]:
        removed = []
        while self.used + blocks > self.capacity:
            kind, one = self.idle.pop(0)
            del self.refs[kind, one]
            if kind == "kv":
                assert ("state", one) not in self.refs, "a snapshot without its blocks"
                assert all(self.before.get(other) != one for _, other in self.refs), "a block out of a chain's middle"
            if kind == "state" or not self.weight:
                removed.append(one)
        return removed

    def store(self, ids: Ids, branch: int, whole: bool) -> Changes:
        self.before |= dict(zip(ids[1:], ids, strict=False))
        present = self.present(ids)
        there = path(ids[:present])
        self.hold(there)
        room = self.capacity - self.referenced - self.weight
        keep = min(len(ids), present + room)
        if room < 0 or not keep or (whole and keep < len(ids)):
            self.let_go(there)
            return Changes(kept_blocks=self.usable(ids[:present])[-1])
        snapshots = [keep] if self.weight else []
        if self.weight and 0 < branch < keep and room - (keep - present) >= self.weight:
            snapshots = [branch, keep]
        wanted = path(ids[:keep], *snapshots)
        new = [entry for entry in wanted if entry not in self.refs]
        self.hold([entry for entry in wanted if entry not in new and entry not in there])
        removed = self.make_room(sum(map(self.size, new)))
        self.hold(new)
        self.let_go(wanted)
        added = [one for kind, one in reversed(new) if kind == "state" or not self.weight]
        return Changes(tuple(added), tuple(removed), keep)


def path(ids: Ids, *snapshots: int) -> list[Entry]:
    """All blocks of `ids`, and the snapshots after so many of them: the deepest first, a snapshot before its block."""
    found: list[Entry] = []
    for at in range(len(ids), 0, -1):
        found += [("state", ids[at - 1])] * (at in snapshots) + [("kv", ids[at - 1])]
    return found


TOKENS = st.lists(st.integers(0, 1), max_size=7).map(tuple)


class PoolMachine(RuleBasedStateMachine):
    """Any order of events, late and double ones too: the pool does what the naive one does, block for block."""

    @initialize(capacity=st.integers(0, 24), snapshot_bytes=st.sampled_from([0, 1, 15, 30]))
    def start(self, capacity: int, snapshot_bytes: int) -> None:
        shape = CacheShape(1, BLOCK_BYTES, snapshot_bytes)
        self.pool = NodePool(capacity * BLOCK_BYTES + 9, shape)
        self.naive = Naive(capacity, shape.snapshot_blocks)
        self.leases: list[tuple[Lease, Ids]] = []
        self.over: list[tuple[Lease, Ids]] = []
        self.directory: set[int] = set()
        self.seen: set[Ids] = set()

    def ids(self, tokens: tuple[int, ...]) -> Ids:
        ids = hash_blocks(tokens, 1)
        self.seen.add(ids)
        return ids

    def told(self, changes: Changes, expected: Changes) -> None:
        assert sorted(changes.removed) == sorted(expected.removed)
        assert (changes.added, changes.kept_blocks) == (expected.added, expected.kept_blocks)
        assert self.directory.isdisjoint(changes.added)
        assert self.directory.issuperset(changes.removed)
        self.directory |= set(changes.added)
        self.directory -= set(changes.removed)

    @rule(tokens=TOKENS, upto=st.none() | st.integers(0, 7))
    def begin(self, tokens: tuple[int, ...], upto: int | None) -> None:
        ids = self.ids(tokens)
        lease = self.pool.begin(ids, upto)
        assert lease.hit_blocks == max(at for at in self.naive.usable(ids) if upto is None or at <= upto)
        present = self.naive.present(ids)
        off = self.naive.weight > 0 and lease.hit_blocks < present < len(ids)
        assert lease.branch_blocks == (present if off else 0)
        self.naive.hold(self.held(lease, ids))
        self.leases.append((lease, ids))

    def held(self, lease: Lease, ids: Ids) -> list[Entry]:
        return path(ids[: lease.hit_blocks], *([lease.hit_blocks] if self.naive.weight else []))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=2).map(tuple))
    def commit(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        lease, ids = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.over.append((lease, ids))
        longer = ids + tuple(hash((ids, *more[: at + 1])) for at in range(len(more)))
        self.seen.add(longer)
        changes = self.pool.commit(lease, longer)
        assert changes is not None
        self.naive.let_go(self.held(lease, ids))
        self.told(changes, self.naive.store(longer, lease.branch_blocks, whole=False))
        if self.pool.capacity_blocks - self.pool.referenced_blocks >= len(longer) + self.naive.weight:
            assert self.pool.match(longer) == changes.kept_blocks == len(longer)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, ids = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.over.append((lease, ids))
        assert self.pool.release(lease)
        self.naive.let_go(self.held(lease, ids))

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def come_late(self, data: st.DataObject) -> None:
        lease, ids = data.draw(st.sampled_from(self.over))
        assert self.pool.commit(lease, ids) is None
        assert not self.pool.release(lease)

    @rule(key=st.integers(0, 4), kv_bytes=st.integers(0, 120))
    def reserve(self, key: int, kv_bytes: int) -> None:
        blocks = -(-kv_bytes // BLOCK_BYTES)
        changes = self.pool.reserve(key, kv_bytes)
        fits = self.naive.referenced + blocks <= self.naive.capacity
        assert (changes is not None) == (fits and key not in self.naive.transfers)
        if changes is not None:
            self.told(changes, Changes(removed=tuple(self.naive.make_room(blocks))))
            self.naive.transfers[key] = blocks

    @rule(key=st.integers(0, 4))
    def free(self, key: int) -> None:
        assert self.pool.free(key) == (self.naive.transfers.pop(key, None) is not None)

    @rule(tokens=TOKENS, upto=st.integers(0, 7))
    def install(self, tokens: tuple[int, ...], upto: int) -> None:
        ids = self.ids(tokens)
        self.told(self.pool.install(ids, upto), self.naive.store(ids[:upto], 0, whole=self.naive.weight > 0))

    @invariant()
    def nothing_is_lost_or_given_twice(self) -> None:
        self.pool.check()
        assert (self.pool.used_blocks, self.pool.referenced_blocks) == (self.naive.used, self.naive.referenced)

    @invariant()
    def every_prompt_finds_what_is_there(self) -> None:
        for ids in self.seen:
            assert self.pool.present(ids) == self.naive.present(ids)
            usable = self.naive.usable(ids)
            assert self.pool.match(ids) == usable[-1]
            assert usable[1:] == [at for at, one in enumerate(ids, 1) if one in self.directory]

    @invariant()
    def what_is_leased_is_there(self) -> None:
        for lease, ids in self.leases:
            assert self.pool.match(ids[: lease.hit_blocks]) == lease.hit_blocks

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease, _ in self.leases:
            assert self.pool.release(lease)
        for key in self.naive.transfers:
            assert self.pool.free(key)
        self.pool.check()
        assert self.pool.referenced_blocks == self.pool.transfer_blocks == 0
        assert self.pool.reserve("everything", self.pool.capacity_blocks * BLOCK_BYTES) is not None
        assert (self.pool.prefix_blocks, self.pool.snapshots) == (0, 0)


TestPool = PoolMachine.TestCase
