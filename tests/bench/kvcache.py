"""How many requests a second one node's prefix cache pool takes, and what it hits, over a trace in its order.

    python -m tests.bench.kvcache TRACE --json
    python -m tests.bench.kvcache TRACE --capacity-gib 1000 --json

A request is match + begin + commit; the ids are made before. The shape is that of the profile. Requests/s are the
median of the runs, by process time; `loop_ns` as in `tests.bench.simulate`. `hit_ratio` is of all blocks of the
prompts, whole or not, as `ideal_hit_ratio`, what an unlimited block cache without snapshots would hit (`traces.info`);
`token_hit_ratio` is of all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from typing import Any

from emulator.kvcache import CacheShape, Ids, NodePool, aligned
from emulator.profile import load_profile
from tests.bench.simulate import loop_ns
from traces.info import prefix
from traces.load import load
from traces.request import Request

UNLIMITED_BYTES = 1 << 60


def shape_of(profile: str, block_tokens: int) -> CacheShape:
    """The weights of a shipped profile's model."""
    timing = load_profile(profile)
    return CacheShape.of(timing.s_kv, block_tokens, first_tokens=timing.first_tokens, last_tokens=timing.last_tokens)


def pool_ids(requests: Iterable[Request], block_tokens: int) -> list[Ids]:
    """The ids of every request's whole pool blocks."""
    return [aligned(r.block_hashes, r.block_size, r.input_tokens, block_tokens) for r in requests]


def replay(pool: NodePool, prompts: Iterable[Ids], *, branches: bool = True) -> float:
    """One request after the other, each over before the next; process time in seconds."""
    started = time.process_time()
    for ids in prompts:
        pool.match(ids)
        lease = pool.begin(ids)
        if not branches:
            lease.branch_blocks = 0
        pool.commit(lease, ids)
    return time.process_time() - started


def hit_ratio(pool: NodePool, requests: Iterable[Request]) -> float:
    """What `pool` hit of all of the prompts' pool blocks, a partial last one counted as one."""
    size = pool.shape.block_tokens
    return pool.hit_tokens / size / sum(-(-request.input_tokens // size) for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kvcache", description="The speed of a node's pool.")
    parser.add_argument("trace", help="a trace with block hashes")
    parser.add_argument("--profile", default="h200-1t")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--capacity-gib", type=float, default=UNLIMITED_BYTES / 2**30)
    parser.add_argument("--no-branches", action="store_true", help="snapshots at the ends of prompts only")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    requests = load(asked.trace).requests
    prompts = pool_ids(requests, asked.block_tokens)
    shape = shape_of(asked.profile, asked.block_tokens)
    taken_s = []
    for _ in range(asked.runs):
        pool = NodePool(int(asked.capacity_gib * 2**30), shape)
        taken_s.append(replay(pool, prompts, branches=not asked.no_branches))
    found: dict[str, Any] = {
        "requests": len(prompts),
        "blocks_per_request": sum(map(len, prompts)) / len(prompts),
        "requests_per_cpu_s": len(prompts) / statistics.median(taken_s),
        "loop_ns": loop_ns(),
        "ideal_hit_ratio": (prefix(requests) or {}).get("hit_ratio"),
        "hit_ratio": hit_ratio(pool, requests),
        "token_hit_ratio": pool.hit_tokens / sum(request.input_tokens for request in requests),
        "snapshot_blocks": shape.snapshot_blocks,
        "capacity_blocks": pool.capacity_blocks,
        "used_blocks": pool.used_blocks,
        "snapshots": pool.snapshots,
        "evicted_blocks": pool.evicted_blocks,
        "evicted_snapshots": pool.evicted_snapshots,
    }
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            print(f"{key}: {value:,.3f}" if isinstance(value, float) else f"{key}: {value}")


if __name__ == "__main__":
    main()
