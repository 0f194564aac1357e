"""Disaggregated equals monolithic, token by token: `python -m tests.wire.hybrid_exact --n 200 --seed 1`.

A testbed with the real model over a lossy, delayed link answers random prompts while nodes change their roles, workers
are killed and started again, and clients leave; prefixes are shared, so that many prompts are prefilled from cached and
fetched state. Then the same model answers every prompt by itself, here. The greedy tokens have to be the same. One that
differs is tolerated, and counted, only where the two best logits are within TOLERANCE of each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from testbed.launch import client
from testbed.launch.launchers import LAUNCHERS, NAMESPACES
from testbed.launch.state import StateDir, TestbedError

REPOSITORY: Final = Path(__file__).parents[2]
TOLERANCE: Final = 1e-4
MOST_TOKENS: Final = 4096
MOST_AT_ONCE: Final = 8
BURST_S: Final = (0.8, 2.0)  # wall seconds between two bursts of 1 to MOST_AT_ONCE prompts
MODELS: Final = {
    "tiny": ("tiny", {}),
    "wide": ("small", {"layers": 2, "pattern": "LF"}),  # whose products are large enough for oneDNN
}
CROWD: Final = 20  # the last ones, short and with long answers, come all at once: decoding batches of MOST_AT_ONCE
CROWD_S: Final = 5.0  # wall seconds before they do
MOST_TRIES: Final = 40
REST_S: Final = 1.0  # wall seconds between two tries: a worker that was killed is back in some three
KILL_S: Final = (3.0, 6.0)  # wall seconds between two kills
REAP_S: Final = 0.2  # until the supervisor has seen that it is dead
ANSWER_S: Final = 120.0
SCENARIO: Final = """
name: exact
description: The real model over a lossy, delayed link, with everything going on.
backend: hybrid
model: {{{model}, seed: {seed}}}
deployments:
  - name: exact
    profiles: {{prfaas: hybrid-tiny, pd: hybrid-tiny}}
    fleet: {{n_prfaas: 1, n_p: 1, n_d: 2}}
    policy: {{name: "tests.wire.hybrid_policy:Anywhere"}}
workload:
  lengths: {{kind: mix, values: [1024], weights: [1]}}
  rate_rps: 1
link: {{rate_bps: 50mbps, delay_s: 0.01, loss: 0.005}}
cache_bytes: 16e6
cache: {{block_tokens: 256}}
transport: {{connections: 2, outbox_bytes: 8e6, landing_bytes: 8e6}}
max_attempts: 5
reload_s: 0.5
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    data: bytes
    output_tokens: int


@dataclass(slots=True)
class Told:
    """What the testbed answered. cached_tokens: of the prefix that was reused."""

    tokens: tuple[int, ...]
    cached_tokens: int


@dataclass(slots=True)
class Figures:
    """What happened meanwhile, and what came of it."""

    prompts: int = 0
    identical: int = 0
    tolerated: int = 0
    wrong: list[str] = field(default_factory=list)
    with_prefix_hits: int = 0
    tokens: int = 0
    kills: int = 0
    aborts: int = 0
    role_changes: int = 0
    tried_again: dict[str, int] = field(default_factory=dict)
    most_decoding_at_once: int = 0
    refused_states: int = 0
    wall_s: float = 0.0


def crowd_from(n: int) -> int:
    """The first of n prompts that is in the crowd: half of them at most are."""
    return n - min(CROWD, n // 2)


def prompts(n: int, seed: int) -> list[Prompt]:
    """Lengths from 1 to MOST_TOKENS, as many short as long ones by their logarithm; every second one begins as an
    earlier one does. The last ones are a crowd: up to 128 tokens each, with answers of some 300."""
    chance = random.Random(seed)
    made: list[Prompt] = []
    apart = crowd_from(n)
    for i in range(apart):
        size = round(math.exp(chance.uniform(0, math.log(MOST_TOKENS)))) if i % 2 else chance.randint(1, MOST_TOKENS)
        data = chance.randbytes(size)
        if i % 2 and made:
            earlier = max(made[-6:], key=lambda one: len(one.data)).data
            shared = earlier[: chance.randint(1, len(earlier))]
            data = (shared + data)[: max(size, min(len(shared) + 64, MOST_TOKENS))]
        made.append(Prompt(f"p{i}", data, chance.randint(1, 96)))
    for i in range(apart, n):
        made.append(Prompt(f"p{i}", chance.randbytes(chance.randint(1, 128)), chance.randint(256, 384)))
    return made


class Run:
    """One testbed, asked for all of the prompts."""

    def __init__(self, folder: Path, asked: list[Prompt], seed: int) -> None:
        self.folder, self.asked = folder, asked
        self.chance = random.Random(seed)
        self.figures = Figures(prompts=len(asked))
        self.told: dict[str, Told] = {}
        self.again: Counter[str] = Counter()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = folder / "state"

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PRFAAS_STATE": str(self.state), "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            [sys.executable, "-m", "testbed.cli", *words],
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )

    async def ask_all(self) -> None:
        began_s = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
            around = [asyncio.create_task(self.kill_workers()), asyncio.create_task(self.watch(http))]
            try:
                async with asyncio.TaskGroup() as tasks:
                    apart = crowd_from(len(self.asked))
                    rest = self.asked[:apart]
                    while rest:
                        size = self.chance.randint(1, MOST_AT_ONCE)
                        for prompt in rest[:size]:
                            tasks.create_task(self.answered(http, prompt))
                        del rest[:size]
                        await asyncio.sleep(self.chance.uniform(*BURST_S))
                    await asyncio.sleep(CROWD_S)
                    for prompt in self.asked[apart:]:
                        tasks.create_task(self.answered(http, prompt))
            finally:
                for task in around:
                    task.cancel()
                ended = await asyncio.gather(*around, return_exceptions=True)
                self.figures.wrong += [repr(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
            status = await self.status(http)
        self.figures.role_changes = sum(one["kind"] == "joined" for one in status["session"]["changes"])
        self.figures.refused_states = status["session"]["refused_states"]
        self.figures.tried_again = dict(self.again)
        self.figures.wall_s = round(time.monotonic() - began_s, 1)

    async def answered(self, http: aiohttp.ClientSession, prompt: Prompt) -> None:
        """Ask until there is an answer; now and then a client that leaves asks first."""
        if self.chance.random() < 0.2:
            self.figures.aborts += 1
            try:
                async with asyncio.timeout(self.chance.uniform(0.0, 0.6)):
                    await self.ask(http, prompt, "gone")
            except (TimeoutError, aiohttp.ClientError, AskedInVain):
                pass
        for attempt in range(MOST_TRIES):
            try:
                self.told[prompt.name] = await self.ask(http, prompt, str(attempt))
                return
            except AskedInVain as why:
                self.again[str(why)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.again[type(error).__name__] += 1
            await asyncio.sleep(REST_S)
        self.figures.wrong.append(f"{prompt.name}: no answer in {MOST_TRIES} tries")

    async def ask(self, http: aiohttp.ClientSession, prompt: Prompt, attempt: str) -> Told:
        """Raises AskedInVain with the error's code."""
        body = {
            "prompt": list(prompt.data),
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        names = {"X-Request-Id": f"{prompt.name}-{attempt}"}
        async with http.post(f"{self.url}/v1/completions", json=body, headers=names) as answer:
            if answer.status != 200:
                raise AskedInVain((await answer.json())["error"]["code"])
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise AskedInVain(chunk["error"]["code"])
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids", ())
                usage = chunk.get("usage") or usage
        if len(tokens) != usage.get("completion_tokens"):
            raise AskedInVain(f"{len(tokens)} tokens of {usage.get('completion_tokens')}")
        return Told(tuple(tokens), usage["prompt_tokens_details"]["cached_tokens"])

    async def status(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        async with http.get(f"{self.url}/prfaas/status") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def watch(self, http: aiohttp.ClientSession) -> None:
        while True:
            nodes = (await self.status(http))["nodes"]
            most = max(node["decoding_requests"] for node in nodes)
            self.figures.most_decoding_at_once = max(self.figures.most_decoding_at_once, most)
            await asyncio.sleep(0.05)

    async def kill_workers(self) -> None:
        """One after the other, each started again."""
        supervisor = client.supervisor(StateDir(self.state), timeout_s=60.0)
        while True:
            await asyncio.sleep(self.chance.uniform(*KILL_S))
            names = [
                one["name"] for one in supervisor.get("/status")["processes"] if one["role"] in ("prefill", "decode")
            ]
            name = self.chance.choice(names)
            await asyncio.to_thread(supervisor.post, "/signal", {"name": name, "signal": "KILL"})
            self.figures.kills += 1
            for attempt in range(MOST_TRIES):
                await asyncio.sleep(REAP_S)
                try:
                    await asyncio.to_thread(supervisor.post, "/restart", {"name": name})
                    break
                except TestbedError as error:
                    if attempt == MOST_TRIES - 1:
                        self.figures.wrong.append(f"{name}: {error}")

    def compare(self, seed: int, name: str, changes: dict[str, Any]) -> None:
        """With what the model says by itself."""
        import torch

        from emulator.backends.hybrid.config import preset
        from emulator.backends.hybrid.model import HybridModel

        torch.set_num_threads(1)
        model = HybridModel.seeded(preset(name, **changes), seed)
        for prompt in self.asked:
            told = self.told.get(prompt.name)
            if told is None:
                continue
            self.figures.tokens += len(told.tokens)
            self.figures.with_prefix_hits += told.cached_tokens > 0
            state = model.empty()
            logits, _ = model.prefill(list(prompt.data), state)
            for place in range(prompt.output_tokens):
                best = logits.topk(2)
                token = int(logits.argmax())
                if place >= len(told.tokens) or told.tokens[place] != token:
                    gap = float(best.values[0] - best.values[1])
                    if gap <= TOLERANCE and place < len(told.tokens):
                        self.figures.tolerated += 1
                    else:
                        self.figures.wrong.append(
                            f"{prompt.name}: token {place} of {len(told.tokens)} differs by {gap:g}"
                        )
                    break
                logits = model.decode([token], [state])[0]
            else:
                self.figures.identical += 1


class AskedInVain(Exception):
    """The testbed answered with an error."""


def exact(n: int, seed: int, launcher: str = NAMESPACES, model: str = "tiny") -> Figures:
    """All of it. Raises RuntimeError when the testbed does not come up or does not go."""
    name, changes = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="prf") as made:
        folder = Path(made)
        (folder / "exact.yaml").write_text(
            SCENARIO.format(seed=seed, model=f"preset: {name}, changes: {json.dumps(changes)}")
        )
        run = Run(folder, prompts(n, seed), seed)
        up = run.command("up", str(folder / "exact.yaml"), "--port", str(run.port), "--launcher", launcher)
        if up.returncode:
            raise RuntimeError(up.stderr)
        try:
            asyncio.run(run.ask_all())
        finally:
            down = run.command("down")
        if down.returncode:
            raise RuntimeError(down.stderr)
        run.compare(seed, name, changes)
        return run.figures


def check(figures: Figures) -> None:
    """What a short run has to show. Raises AssertionError."""
    assert figures.wrong == []
    assert figures.identical + figures.tolerated == figures.prompts
    assert figures.tolerated <= 1
    assert figures.with_prefix_hits > 0
    assert figures.kills > 0
    assert figures.most_decoding_at_once > 1
    assert figures.refused_states == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.wire.hybrid_exact", description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--launcher", choices=LAUNCHERS, default=NAMESPACES)
    options = parser.parse_args()
    figures = exact(options.n, options.seed, options.launcher, options.model)
    print(json.dumps(asdict(figures), indent=1))
    sys.exit(1 if figures.wrong else 0)


if __name__ == "__main__":
    main()
