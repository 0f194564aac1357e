"""Chunk-parallel prefill of linear attention beside the recurrence it equals, and what a decode step costs by length.

    python -m tests.bench.hybrid --json

On one core, in float32: the delta rule alone, a whole linear layer of the `small` model, and the `tiny` model, each
once chunk-parallel and once token by token; how far both are from a recurrence in float64; and a decode step of one
layer of each kind after prompts of several lengths, eight requests at once. Exit code 1 when at 4,096 tokens the layer
is not `--bar` times as fast, when the error of the chunk-parallel form is 1e-5 or more, or when a linear layer's step
grows by half or more from the shortest prompt to the longest.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emulator.backends.hybrid.config import SMALL, TINY, preset
from emulator.backends.hybrid.delta import chunked, recurrent
from emulator.backends.hybrid.layers import KvState, LayerState, LinearState, Mixer
from emulator.backends.hybrid.model import HybridModel

AT = 4096
MOST_ERROR = 1e-5
MOST_GROWTH = 1.5
BATCH = 8
STEPS = 20


def least_s(work: Callable[[], Any], times: int) -> float:
    """Wall seconds at their least, which are the machine's own; what is above is what else runs on it."""
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


def both_s(chunked: Callable[[], Any], recurrent: Callable[[], Any]) -> dict[str, float]:
    """Of two forms of the same, in turns."""
    turns = [(least_s(chunked, 4), least_s(recurrent, 1)) for _ in range(3)]
    return {"chunked_s": min(one for one, _ in turns), "recurrent_s": min(other for _, other in turns)}


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, by norms."""
    return float((found.double() - exact).norm() / exact.norm())


def rule_inputs(tokens: int) -> list[Tensor]:
    """q, k, v, log a, b and a state, of the small model's size; decays from hardly any to the bound."""
    g = torch.Generator().manual_seed(3)
    heads, dim = SMALL.linear_heads, SMALL.linear_dim
    q, k, v = (torch.randn(heads, tokens, dim, generator=g) for _ in range(3))
    log_a = -SMALL.gate_bound * torch.sigmoid(4 * torch.randn(heads, tokens, dim, generator=g))
    b = torch.sigmoid(2 * torch.randn(heads, tokens, generator=g))
    state = torch.randn(heads, dim, dim, generator=g)
    return [q / dim**0.5, torch.nn.functional.normalize(k, dim=-1), v, log_a, b, state]


def chunk_by_chunk(given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """As a prefill on a CPU has it: a chunk at a time, in the cache."""
    *inputs, state = given
    out = []
    for parts in zip(*(torch.split(x, SMALL.chunk, 1) for x in inputs), strict=True):
        read, state = chunked(*parts, state, SMALL.chunk)
        out.append(read)
    return torch.cat(out, 1), state


def rule(tokens: int) -> dict[str, Any]:
    """The delta rule alone."""
    given = rule_inputs(tokens)
    exact, exact_state = recurrent(*[x.double() for x in given])
    out, after = chunk_by_chunk(given)
    together, _ = chunked(*given, SMALL.chunk)  # type: ignore[misc]
    return {
        "tokens": tokens,
        **both_s(lambda: chunk_by_chunk(given), lambda: recurrent(*given)),
        "error": max(error(out, exact), error(after, exact_state), error(together, exact)),
        "recurrent_error": error(recurrent(*given)[0], exact),
    }


def feed(layer: Mixer, state: LayerState, x: Tensor, rows: int) -> Tensor:
    """A layer's prefill of x, whole blocks."""
    feed = layer.begin(state, len(x), rows)
    return torch.cat([feed.block(part, len(part)) for part in torch.split(x, rows)])


def step_by_step(layer: Mixer, state: LayerState, x: Tensor) -> Tensor:
    return torch.cat([layer.decode(x[t : t + 1], [state]) for t in range(len(x))])


def layer(tokens: int) -> dict[str, Any]:
    """A linear layer with everything that it does: projections, convolution, gates, normalisation."""
    model = HybridModel.seeded(preset("small", layers=1, pattern="L"), 1)
    one, precise = model.layers[0].mixer, copy.deepcopy(model).double().layers[0].mixer
    x = torch.randn(tokens, SMALL.d_model, generator=torch.Generator().manual_seed(5))

    def new(dtype: torch.dtype = torch.float32) -> LayerState:
        return one.empty(torch.device("cpu"), dtype)

    exact = step_by_step(precise, new(torch.float64), x.double())
    return {
        "tokens": tokens,
        **both_s(lambda: feed(one, new(), x, model.rows), lambda: step_by_step(one, new(), x)),
        "error": error(feed(one, new(), x, model.rows), exact),
        "recurrent_error": error(step_by_step(one, new(), x), exact),
    }


def model(tokens: int) -> dict[str, Any]:
    """The whole tiny model, full attention included: a prefill, and the same by decode steps of one request."""
    one = HybridModel.seeded(TINY, 1)
    prompt = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()

    def decode() -> Tensor:
        state = one.empty()
        for token in prompt:
            logits = one.decode([token], [state])
        return logits[0]

    found, _ = one.prefill(prompt, one.empty())
    began_s = time.perf_counter()
    exact = decode()
    recurrent_s = time.perf_counter() - began_s
    return {
        "tokens": tokens,
        "chunked_s": least_s(lambda: one.prefill(prompt, one.empty()), 4),
        "recurrent_s": recurrent_s,
        "apart": float((found - exact).abs().max()),
    }


def steps(kind: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """A decode step of one layer, eight requests of so many tokens each."""
    changes = {"L": {}, "F": {}, "S": {"attention": "gqa"}}[kind]
    model = HybridModel.seeded(preset("small", layers=1, pattern=kind, **changes), 1)
    one = model.layers[0].mixer
    x = torch.randn(BATCH, SMALL.d_model, generator=torch.Generator().manual_seed(6))
    found = []
    for tokens in lengths:
        state: LayerState = model.empty().layers[0]
        if isinstance(state, LinearState):
            feed(one, state, torch.randn(tokens, SMALL.d_model), model.rows)
        else:
            kept = tokens if one.kind == "full" else min(tokens, SMALL.window)
            state = KvState(torch.randn(kept, state.rows.shape[1]), kept, tokens)
        states = [state.clone() for _ in range(BATCH)]
        found.append({"tokens": tokens, "step_s": least_s(lambda states=states: one.decode(x, states), STEPS)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hybrid", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, AT])
    parser.add_argument("--step-lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--bar", type=float, default=10.0, help="least ratio, of a linear layer at 4,096 tokens")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        lengths = sorted({*asked.lengths, AT})
        found: dict[str, Any] = {"rule": [rule(n) for n in lengths], "layer": [layer(n) for n in lengths]}
        found["model"] = [model(AT)]
        for row in (row for part in ("rule", "layer", "model") for row in found[part]):
            row["ratio"] = row["recurrent_s"] / row["chunked_s"]
        kinds = {"L": "linear", "F": "full", "S": "sliding"}
        found["decode"] = {name: steps(kind, asked.step_lengths) for kind, name in kinds.items()}
    linear = [row["step_s"] for row in found["decode"]["linear"]]
    found["linear_growth"] = linear[-1] / linear[0]
    at = next(row for row in found["layer"] if row["tokens"] == AT)
    wrong = max(row["error"] for part in ("rule", "layer") for row in found[part])
    passed = at["ratio"] >= asked.bar and wrong < MOST_ERROR and found["linear_growth"] < MOST_GROWTH
    if asked.json:
        print(json.dumps({"bench": "hybrid", "passed": passed, "bar": asked.bar, **found}, indent=1))
        return 0 if passed else 1
    for part in ("rule", "layer", "model"):
        for row in found[part]:
            told = f"error {row['error']:.1e}" if "error" in row else f"logits at most {row['apart']:.1e} apart"
            print(
                f"{part:5} {row['tokens']:6,} tokens: {1000 * row['chunked_s']:8.1f} ms, token by token "
                f"{1000 * row['recurrent_s']:9.1f} ms, {row['ratio']:5.1f} times; {told}"
            )
    for name, rows in found["decode"].items():
        told = ", ".join(f"{1000 * row['step_s']:.2f} ms at {row['tokens']:,}" for row in rows)
        print(f"decode step of a {name} layer, {BATCH} requests: {told}")
    print("passed" if passed else f"failed: a bar of {asked.bar:g} times, {MOST_ERROR:g}, growth below {MOST_GROWTH:g}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
