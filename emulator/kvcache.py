"""The hybrid prefix cache pool of one node (paper, section 3): what it holds, what a prompt can reuse, what goes first.

Two kinds of state share one bounded pool of equal blocks. Full-attention KV is *block-level*: a pool block for every
`block_tokens` tokens, reusable by prefix. Recurrent state is *request-level*: a snapshot of fixed size (some twenty
pool blocks), reusable only at the exact length it was taken at. So the usable hit of a prompt is the longest prefix of
whole blocks that are all held and that ends at a snapshot. A third group is transfer cache: KV on its way elsewhere,
any length, never evicted, dropped by its owner.

Inside, the held prefixes are a tree of *runs*, blocks that no other prompt and no snapshot divides, so that a request
costs some steps a run and none a block. What nobody references waits in one queue, oldest first, whatever its group.
Every touch enters a snapshot before its run and a run before the run it follows; so the front of the queue is never
followed by anything: tails go first, and no snapshot outlives its blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import NamedTuple

Ids = tuple[int, ...]
"""The prefix-chained ids of a prompt's whole pool blocks: one id stands for the whole prefix up to and including it."""


def hash_blocks(tokens: Sequence[int] | bytes, block_tokens: int) -> Ids:
    """Prefix-chained ids, one a block of `block_tokens` tokens, the last one of what is left; the same in any process.

    tokens: whole numbers below 2^63; of bytes, each is a token. Raises ValueError when block_tokens < 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens = {block_tokens}: must be at least 1")
    ids, before = [], b""
    for start in range(0, len(tokens), block_tokens):
        piece = array("q", list(tokens[start : start + block_tokens])).tobytes()
        before = hashlib.blake2b(before + piece, digest_size=8).digest()
        ids.append(int.from_bytes(before, "little"))
    return tuple(ids)


def aligned(hashes: Ids, block_size: int, input_tokens: int, block_tokens: int) -> Ids:
    """The ids of a prompt's whole pool blocks, from a request's prefix-chained hashes of `block_size` tokens each.

    At least one token is left to compute, so a prompt of exactly k blocks has k - 1. Empty when `block_tokens` is no
    multiple of `block_size`, or without hashes (block_size 0).
    """
    if not hashes or block_size < 1 or block_tokens % block_size:
        return ()
    step = block_tokens // block_size
    return hashes[step - 1 : (input_tokens - 1) // block_tokens * step : step]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a cached prefix weighs.

    block_tokens: tokens a pool block, >= 1. block_bytes: model bytes of its full-attention KV, >= 1; every pool block
    has this size. snapshot_bytes: model bytes of one recurrent state, >= 0; 0 is a model without one, whose every block
    can be reused. Raises ValueError.
    """

    block_tokens: int
    block_bytes: int
    snapshot_bytes: int

    def __post_init__(self) -> None:
        for field, least in (("block_tokens", 1), ("block_bytes", 1), ("snapshot_bytes", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least {least}")

    @property
    def snapshot_blocks(self) -> int:
        """Pool blocks that one snapshot takes (aligned block sizes: a whole number)."""
        return -(-self.snapshot_bytes // self.block_bytes)

    @classmethod
    def of(
        cls, s_kv: Callable[[float], float], block_tokens: int, *, first_tokens: int, last_tokens: int
    ) -> CacheShape:
        """The shape of a model, derived from its S_kv(l), model bytes at l tokens: no profile states the two apart.

        S_kv(l) = snapshot + slope x l through the two lengths given (the ends of the profile's table). The slope is
        the full-attention KV of a token (a block has at least 1 byte), what is left at l = 0 the snapshot (at least 0).
        """
        if not first_tokens < last_tokens:
            raise ValueError(f"lengths {first_tokens} and {last_tokens}: must ascend, a slope needs two")
        first, last = s_kv(first_tokens), s_kv(last_tokens)
        slope = max(0.0, (last - first) / (last_tokens - first_tokens))
        return cls(block_tokens, max(1, round(slope * block_tokens)), max(0, round(first - slope * first_tokens)))


class Changes(NamedTuple):
    """What one call changed, for the directory.

    added, removed: ids at which a usable prefix now exists, or no longer does. kept_blocks: of a prompt stored, the
    blocks that are usable now; fewer than asked for when the pool is too small.
    """

    added: Ids = ()
    removed: Ids = ()
    kept_blocks: int = 0


class _Run:
    """Consecutive blocks of a prefix: `ids`, ending at block number `end`, after the run `parent`."""

    __slots__ = ("children", "end", "ids", "parent", "refs", "snapshot")

    def __init__(self, parent: _Run | None, ids: Ids, end: int, refs: int) -> None:
        self.parent = parent
        self.ids = ids
        self.end = end
        self.refs = refs
        self.children: dict[int, _Run] = {}  # by their first id
        self.snapshot: _Snapshot | None = None  # the state after the last block


class _Snapshot:
    __slots__ = ("refs", "run")

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.refs = 1


class Lease:
    """A prefill's hold on what it reuses, until it is committed or released.

    hit_blocks: usable blocks, held. branch_blocks: where, beyond the hit, this prompt leaves the blocks that an earlier
    one left here: a snapshot is taken there in passing; 0 for nowhere, or set to 0 by a caller who takes none.
    """

    __slots__ = ("_run", "_snapshots", "branch_blocks", "hit_blocks")

    def __init__(self, hit_blocks: int, branch_blocks: int, run: _Run, snapshots: tuple[_Snapshot, ...]) -> None:
        self.hit_blocks = hit_blocks
        self.branch_blocks = branch_blocks
        self._run = run
        self._snapshots = snapshots


class NodePool:
    """The bounded pool of one node. A call that is refused returns None (or False) and has changed nothing.

    capacity_bytes: model bytes, cut to whole pool blocks. Figures, in pool blocks: `capacity_blocks`, `used_blocks` =
    `prefix_blocks` + `snapshots` x shape.snapshot_blocks + `transfer_blocks`, and `referenced_blocks`, those of them
    that cannot be evicted now. Counters since the start: `hit_tokens` leased, `evicted_blocks`, `evicted_snapshots`.
    on_evicted(ids, snapshot): told of blocks, or of the snapshot after one, that are no longer held; for whoever keeps
    what they stand for.
    """

    def __init__(self, capacity_bytes: int, shape: CacheShape) -> None:
        self.shape = shape
        self.capacity_blocks = capacity_bytes // shape.block_bytes
        self.prefix_blocks = self.snapshots = self.transfer_blocks = self.referenced_blocks = 0
        self.hit_tokens = self.evicted_blocks = self.evicted_snapshots = 0
        self.on_evicted: Callable[[Ids, bool], None] | None = None
        self._weight = shape.snapshot_blocks
        self._root = _Run(None, (), 0, 0)
        self._idle: OrderedDict[_Run | _Snapshot, None] = OrderedDict()  # unreferenced, the first to go first
        self._leases: set[Lease] = set()
        self._transfers: dict[Hashable, int] = {}

    @property
    def used_blocks(self) -> int:
        return self.prefix_blocks + self.snapshots * self._weight + self.transfer_blocks

    def match(self, ids: Ids) -> int:
        """The usable hit of a prompt, in blocks; nothing is touched."""
        run, _, matched = self._find(ids)
        return self._usable(run).end if self._weight else run.end + matched

    def present(self, ids: Ids) -> int:
        """The longest prefix whose full-attention blocks are held, usable or not; nothing is touched."""
        run, _, matched = self._find(ids)
        return run.end + matched

    def begin(self, ids: Ids, usable_upto: int | None = None) -> Lease:
        """Hold a prompt's usable hit, or what of it is no longer than `usable_upto` blocks, while it is prefilled."""
        run, child, matched = self._find(ids)
        present = run.end + matched
        branch = 0
        if self._weight:
            run = self._usable(run)
            while usable_upto is not None and run.end > usable_upto and run.parent is not None:
                run = self._usable(run.parent)
            branch = present if run.end < present < len(ids) else 0
        else:
            upto = present if usable_upto is None else min(present, max(0, usable_upto))
            run = self._cut(child if child is not None and upto > run.end else run, upto)
        self._hold(run)
        snapshots: tuple[_Snapshot, ...] = ()
        if run.snapshot is not None:
            self._hold_snapshot(run.snapshot)
            snapshots = (run.snapshot,)
        self.hit_tokens += run.end * self.shape.block_tokens
        lease = Lease(run.end, branch, run, snapshots)
        self._leases.add(lease)
        return lease

    def commit(self, lease: Lease, ids: Ids) -> Changes | None:
        """The prefill has ended: its lease ends, its blocks are kept, a snapshot after the last and one at the branch.

        When that does not fit beside what others hold, the longest leading part that fits is kept, with the state at
        its end, through which the prefill passed; the branch's snapshot is left out first. None when the lease is over.
        """
        if not self.release(lease):
            return None
        return self._store(ids, lease.branch_blocks, whole=False)

    def release(self, lease: Lease) -> bool:
        """End a lease without keeping anything. False when it is over already."""
        if lease not in self._leases:
            return False
        self._leases.remove(lease)
        self._let_go(lease._run, lease._snapshots)
        return True

    def install(self, ids: Ids, upto_blocks: int) -> Changes:
        """A prefix fetched from elsewhere has landed: keep `upto_blocks` blocks of `ids`, and the snapshot after them.

        A snapshot was fetched for that length alone, so all is kept, or nothing; without snapshots, what fits.
        """
        return self._store(ids[:upto_blocks], 0, whole=bool(self._weight))

    def reserve(self, key: Hashable, kv_bytes: int) -> Changes | None:
        """Take transfer-cache room for `kv_bytes` (model bytes, >= 0) under `key`, evicting what it needs.

        None when it does not fit even so, or when `key` has room already.
        """
        if kv_bytes < 0:
            raise ValueError(f"kv_bytes = {kv_bytes}: must be at least 0")
        blocks = -(-kv_bytes // self.shape.block_bytes)
        if key in self._transfers or self.referenced_blocks + blocks > self.capacity_blocks:
            return None
        removed = self._make_room(blocks)
        self._transfers[key] = blocks
        self.transfer_blocks += blocks
        self.referenced_blocks += blocks
        return Changes(removed=removed)

    def free(self, key: Hashable) -> bool:
        """The transfer is over, however it ended: its room is free. False when `key` has none."""
        blocks = self._transfers.pop(key, None)
        if blocks is None:
            return False
        self.transfer_blocks -= blocks
        self.referenced_blocks -= blocks
        return True

    def _find(self, ids: Ids) -> tuple[_Run, _Run | None, int]:
        """The last run that `ids` contain whole, the run in which they leave the tree or end, and how far into that."""
        run, at, length = self._root, 0, len(ids)
        while at < length:
            child = run.children.get(ids[at])
            if child is None:
                break
            piece = ids[at : child.end]
            if piece != child.ids:
                return run, child, next(compress(count(), map(ne, piece, child.ids)), len(piece))
            run, at = child, child.end
        return run, None, 0

    def _usable(self, run: _Run) -> _Run:
        """The last run up to this one that ends at a snapshot; the root when none does."""
        while run.snapshot is None and run.parent is not None:
            run = run.parent
        return run

    def _cut(self, run: _Run, end: int) -> _Run:
        """The run on the path to `run` that ends at block `end`; one that only contains it is divided there.

        The later part stays what it was, for its holders and in the queue; the caller holds the earlier one at once.
        """
        while run.parent is not None and run.parent.end >= end:
            run = run.parent
        if run.end <= end or run.parent is None:
            return run
        size = end - run.parent.end
        early = _Run(run.parent, run.ids[:size], end, run.refs)
        run.parent.children[run.ids[0]] = early
        run.parent, run.ids = early, run.ids[size:]
        early.children[run.ids[0]] = run
        if not run.refs:
            self._idle[early] = None
        return early

    def _hold(self, run: _Run) -> None:
        while run.parent is not None:
            if not run.refs:
                del self._idle[run]
                self.referenced_blocks += len(run.ids)
            run.refs += 1
            run = run.parent

    def _hold_snapshot(self, snapshot: _Snapshot) -> None:
        if not snapshot.refs:
            del self._idle[snapshot]
            self.referenced_blocks += self._weight
        snapshot.refs += 1

    def _let_go(self, run: _Run, snapshots: Sequence[_Snapshot]) -> None:
        """Undo a hold of `run` and of `snapshots` on its path; what nobody holds any more has been used just now."""
        idle = self._idle
        while run.parent is not None:
            snapshot = run.snapshot
            if snapshot is not None and snapshot in snapshots:
                snapshot.refs -= 1
                if not snapshot.refs:
                    idle[snapshot] = None
                    self.referenced_blocks -= self._weight
            run.refs -= 1
            if not run.refs:
                idle[run] = None
                self.referenced_blocks -= len(run.ids)
            run = run.parent

    def _store(self, ids: Ids, branch: int, *, whole: bool) -> Changes:
        """Keep the blocks of `ids` and snapshots at the end and at `branch`: all, or (unless `whole`) what fits."""
        run, child, matched = self._find(ids)
        if child is not None:
            run = self._cut(child, run.end + matched)
        present, weight = run.end, self._weight
        self._hold(run)
        room = self.capacity_blocks - self.referenced_blocks - weight
        keep = min(len(ids), present + room)
        if room < 0 or not keep or (whole and keep < len(ids)):
            kept = self._usable(run).end
            self._let_go(run, ())
            return Changes(kept_blocks=kept)
        marks = [keep] if weight else []
        if weight and 0 < branch < keep and room - (keep - present) >= weight:
            marks.insert(0, branch)
        held = []
        for mark in marks:
            if mark <= present and (old := self._cut(run, mark).snapshot) is not None:
                self._hold_snapshot(old)
                held.append(old)
        removed = self._make_room(keep - present + weight * (len(marks) - len(held)))
        for end in marks or (keep,):
            if end > run.end:
                later = _Run(run, ids[run.end : end], end, 1)
                run.children[ids[run.end]] = later
                run = later
        self.prefix_blocks += keep - present
        self.referenced_blocks += keep - present
        added = [] if weight else list(ids[present:keep])
        for mark in marks:
            at = self._cut(run, mark)
            if at.snapshot is None:
                at.snapshot = _Snapshot(at)
                held.append(at.snapshot)
                self.snapshots += 1
                self.referenced_blocks += weight
                added.append(ids[mark - 1])
        self._let_go(run, held)
        return Changes(tuple(added), removed, keep)

    def _make_room(self, blocks: int) -> Ids:
        """Evict until `blocks` are free; the caller knows that so many can be. Returns the ids no longer usable."""
        removed: list[int] = []
        short = blocks + self.used_blocks - self.capacity_blocks
        while short > 0:
            oldest = next(iter(self._idle))
            if isinstance(oldest, _Snapshot):
                del self._idle[oldest]
                oldest.run.snapshot = None
                removed.append(oldest.run.ids[-1])
                if self.on_evicted is not None:
                    self.on_evicted(oldest.run.ids[-1:], True)
                self.snapshots -= 1
                self.evicted_snapshots += 1
                short -= self._weight
                continue
            gone = oldest.ids[-short:]
            if len(gone) < len(oldest.ids):
                oldest.ids = oldest.ids[:-short]
                oldest.end -= short
            else:
                del self._idle[oldest]
                assert oldest.parent is not None
                del oldest.parent.children[gone[0]]
            if not self._weight:
                removed.extend(gone)
            if self.on_evicted is not None:
                self.on_evicted(gone, False)
            self.prefix_blocks -= len(gone)
            self.evicted_blocks += len(gone)
            short -= len(gone)
        return tuple(removed)

    def check(self) -> None:
        """Raise AssertionError if anything inside contradicts itself. Takes a walk over the whole pool: for tests."""
        runs = list(self._runs())
        snapshots = [run.snapshot for run in runs if run.snapshot is not None]
        assert self.prefix_blocks == sum(len(run.ids) for run in runs)
        assert self.snapshots == len(snapshots)
        assert self.transfer_blocks == sum(self._transfers.values())
        assert 0 <= self.used_blocks <= self.capacity_blocks
        held = sum(len(run.ids) for run in runs if run.refs) + self._weight * sum(1 for s in snapshots if s.refs)
        assert self.referenced_blocks == held + self.transfer_blocks
        refs: dict[_Run | _Snapshot, int] = dict.fromkeys([*runs, *snapshots], 0)
        for lease in self._leases:
            for snapshot in lease._snapshots:
                assert snapshot.run is lease._run, "a leased snapshot is not where its lease ends"
                refs[snapshot] += 1
            run = lease._run
            assert run.end == lease.hit_blocks
            while run.parent is not None:
                refs[run] += 1
                run = run.parent
        place = {entry: at for at, entry in enumerate(self._idle)}
        for entry, leases in refs.items():
            assert entry.refs == leases, "references differ from the leases alive"
            assert (entry in place) == (not leases), "evictable and referenced, or neither"
        assert len(place) == sum(1 for leases in refs.values() if not leases), "something evictable is not in the tree"
        for run in runs:
            later: list[_Run | _Snapshot] = [*run.children.values(), *([run.snapshot] if run.snapshot else [])]
            assert all(place[entry] < place[run] for entry in later if run in place), "a tail would outlive its prefix"

    def _runs(self) -> Iterator[_Run]:
        waiting = [self._root]
        while waiting:
            run = waiting.pop()
            for first, child in run.children.items():
                assert child.parent is run
                assert child.ids[0] == first
                assert child.end == run.end + len(child.ids)
                yield child
                waiting.append(child)
