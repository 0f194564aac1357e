"""The hybrid model on one GPU: built, checked and timed in under four minutes, and a short table of what was found.

    python -m tests.gpu.run

Checks: the chunk-parallel delta rule against its recurrence in float64; float32 logits against the CPU's; bfloat16
logits against float32; a state that went through its sealed messages decodes to the same bits. Times, in bfloat16, of a
model of about a billion parameters: prefill tokens/s and the share of the card's peak, the rate at which the state
reaches the host against equation (1), how much of its copying the computing hides, and decode steps.

Exit code 0 when all checks hold, 1 when one does not, 4 without a GPU: nothing was measured. `--device cpu` runs the
same code on a CPU, with a tiny model and a thread in the place of the copying stream; its figures are of no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emulator.backends.hybrid.config import BYTES, MAX_BATCH, SMALL, TINY, ModelConfig
from emulator.backends.hybrid.delta import chunked, recurrent
from emulator.backends.hybrid.handoff import Handoff, lane
from emulator.backends.hybrid.layers import KvState, LayerState
from emulator.backends.hybrid.measure import kv_bytes
from emulator.backends.hybrid.model import HybridModel, SequenceState
from emulator.backends.hybrid.state import Expected, decode, encode

LARGE = ModelConfig(
    name="large", layers=16, d_model=2048, mlp_dim=5632, heads=16, head_dim=128, rope_dim=64, latent_dim=512,
    linear_heads=16, linear_dim=128,
)  # fmt: skip
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""bfloat16, dense, as the vendor has it; the first name that is in the card's."""
RULE_ERROR = 1e-5
FLOAT32_ERROR = 1e-3
BFLOAT16_ERROR = 0.15
"""Relative, by norm, of logits. bfloat16 has 8 bits, and a model with random weights forgives nothing: on a CPU the
presets are 0.03 to 0.10 away."""
NO_GPU = 4


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    found: float
    most: float

    @property
    def holds(self) -> bool:
        return self.found <= self.most


class Bench:
    """Everything on one device. lengths: of the prompts that are timed; rows: of a prefill's block."""

    def __init__(self, device: torch.device, config: ModelConfig, lengths: Sequence[int], rows: int) -> None:
        self.device = device
        self.lengths = sorted(lengths)
        self.rows = rows
        self.small = SMALL if device.type == "cuda" else TINY
        self.model = HybridModel.seeded(config, 1, rows).to(device, torch.bfloat16)
        self.prompt = _bytes(self.lengths[-1])

    def now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def median_s(self, work: Callable[[], object], times: int = 5) -> float:
        """After one that is not counted."""
        taken = []
        for i in range(times + 1):
            began_s = self.now_s()
            work()
            if i:
                taken.append(self.now_s() - began_s)
        return statistics.median(taken)

    # checks
    def rule(self) -> Check:
        """The chunk-parallel delta rule on this device."""
        g = torch.Generator().manual_seed(3)
        heads, dim, n = 4, self.model.config.linear_dim, 1000
        q, k, v = (torch.randn(heads, n, dim, generator=g) for _ in range(3))
        log_a = -torch.sigmoid(4 * torch.randn(heads, n, dim, generator=g))
        b = torch.sigmoid(2 * torch.randn(heads, n, generator=g))
        state = torch.randn(heads, dim, dim, generator=g)
        given = [q / dim**0.5, torch.nn.functional.normalize(k, dim=-1), v, log_a, b, state]
        exact, _ = recurrent(*[x.double() for x in given])
        q, k, v, log_a, b, state = (x.to(self.device) for x in given)
        found, _ = chunked(q, k, v, log_a, b, state, self.model.config.chunk)
        return Check("chunk-parallel = recurrence (float64)", _apart(found, exact), RULE_ERROR)

    def float32(self) -> Check:
        """Logits of a prefill and of a decode step after it, on this device and on a CPU in the reference's blocks."""
        there, here = HybridModel.seeded(self.small, 1), HybridModel.seeded(self.small, 1, self.rows).to(self.device)
        return Check("float32 logits = the CPU's", _logits_apart(here, there), FLOAT32_ERROR)

    def bfloat16(self) -> Check:
        exact = HybridModel.seeded(self.small, 1, self.rows).to(self.device)
        return Check(
            "bfloat16 logits = float32's", _logits_apart(copy.deepcopy(exact).to(torch.bfloat16), exact), BFLOAT16_ERROR
        )

    def messages(self) -> Check:
        """A prefill's state, copied to the host layer by layer, sealed, verified, and decoded on this device."""
        model, tokens = self.model, 300
        expected = Expected(model.fingerprint, 1, tokens)
        state = model.empty()
        sealed: dict[int, bytes] = {}

        def seal(layer: int, one: LayerState) -> None:
            sealed[layer] = encode(model.config, layer, one, expected)

        with Handoff(lane(self.device), seal) as handoff:
            model.prefill(_bytes(tokens), state, on_layer=handoff.layer)
        layers = [_to(decode(model.config, i, sealed[i], expected), self.device) for i in range(model.config.layers)]
        arrived = SequenceState(layers, tokens)
        own, other = model.decode([7], [state]), model.decode([7], [arrived])
        return Check("a state that crossed = its own", _apart(other, own.double()), 0.0)

    # times
    def prefill(self, tokens: int) -> dict[str, Any]:
        """Alone; with its state handed over; and the copies alone."""
        model, prompt = self.model, self.prompt[:tokens]
        state = model.empty()

        def alone() -> None:
            model.prefill(prompt, model.empty())

        def handed() -> None:
            with Handoff(lane(self.device), lambda layer, one: None) as handoff:
                model.prefill(prompt, model.empty(), on_layer=handoff.layer)

        def copied() -> None:
            with Handoff(lane(self.device), lambda layer, one: None) as handoff:
                for i, one in enumerate(state.layers):
                    handoff.layer(i, one)

        model.prefill(prompt, state)
        alone_s, handed_s, copied_s = (self.median_s(work) for work in (alone, handed, copied))
        size = kv_bytes(model.config, state)
        flops = _flops(model, tokens)
        peak = _peak_flops(self.device)
        return {
            "tokens": tokens,
            "prefill_s": alone_s,
            "tokens_per_s": tokens / alone_s,
            "flops": flops,
            "peak_share": None if peak is None else flops / alone_s / peak,
            "s_kv_bytes": size,
            "phi_kv_bps": 8 * size / alone_s,
            "emitted_bps": 8 * size / handed_s,
            "copies_s": copied_s,
            "hidden": overlap(alone_s, copied_s, handed_s),
        }

    def step(self, tokens: int, batch: int) -> dict[str, Any]:
        state = self.model.empty()
        self.model.prefill(self.prompt[:tokens], state)
        states = [state.clone() for _ in range(batch)]
        seconds = self.median_s(lambda: self.model.decode([1] * batch, states), 10)
        return {"tokens": tokens, "requests": batch, "step_s": seconds}


def overlap(alone_s: float, copies_s: float, both_s: float) -> float:
    """The share of the copies' time that the computing hid: 1 when both take no longer than the computing alone, 0 when
    they take as long as one after the other."""
    return min(1.0, max(0.0, (alone_s + copies_s - both_s) / copies_s))


def _bytes(count: int) -> list[int]:
    return torch.randint(0, BYTES, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def _apart(found: Tensor, exact: Tensor) -> float:
    found = found.double().to(exact.device)
    return float((found - exact).norm() / exact.norm())


def _logits_apart(found: HybridModel, exact: HybridModel) -> float:
    """The farthest of some prompts: after a prefill, and after a decode step."""
    most = 0.0
    for tokens in (1, 65, 500):
        prompt, states = _bytes(tokens), (found.empty(), exact.empty())
        pairs = [[model.prefill(prompt, s)[0] for model, s in zip((found, exact), states, strict=True)]]
        pairs.append([model.decode([3], [s])[0] for model, s in zip((found, exact), states, strict=True)])
        most = max([most, *(_apart(one, other.double()) for one, other in pairs)])
    return most


def _to(state: LayerState, device: torch.device) -> LayerState:
    if isinstance(state, KvState):
        return KvState(state.rows.to(device), state.held, state.end)
    return type(state)(state.memory.to(device), state.recent.to(device))


def _flops(model: HybridModel, tokens: int) -> float:
    """Of the products with weights, and of full attention; the delta rule and sliding windows are left out."""
    config = model.config
    weights = sum(w.numel() for name, w in model.named_parameters() if w.dim() > 1 and not name.startswith("embed"))
    width = config.head_dim + config.rope_dim if config.attention == "mla" else config.head_dim
    full = sum(kind == "full" for kind in config.kinds)
    return 2.0 * weights * tokens + full * config.heads * (width + config.head_dim) * float(tokens) ** 2


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{result['device']}, torch {result['torch']}, {result['model']} ({result['parameters']:,} parameters)"]
    for check in result["checks"]:
        verdict = "ok  " if check["holds"] else "FAIL"
        lines.append(f"  {verdict} {check['name']}: {check['found']:.1e} (at most {check['most']:g})")
    lines.append("  prefill   tokens/s  of peak   S_kv, MB  (1), Gbit/s  emitted  copies hidden")
    for row in result["prefill"]:
        peak = "-" if row["peak_share"] is None else f"{row['peak_share']:.1%}"
        lines.append(
            f"  {row['tokens']:7,} {row['tokens_per_s']:10,.0f} {peak:>8} {row['s_kv_bytes'] / 1e6:10.1f} "
            f"{row['phi_kv_bps'] / 1e9:12.2f} {row['emitted_bps'] / row['phi_kv_bps']:8.1%} {row['hidden']:14.1%}"
        )
    for row in result["decode"]:
        lines.append(f"  decode step, {row['requests']} of {row['tokens']:,} tokens: {1000 * row['step_s']:.2f} ms")
    lines.append(f"  {result['seconds']:.0f} s in all")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", help="of the prompts; 2048 8192 32768, or 128 512 on a CPU")
    parser.add_argument("--rows", type=int, help="of a prefill's block; 2048, or 128 on a CPU")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("skipped: this machine has no GPU that torch finds; nothing was checked or timed", file=sys.stderr)
        return NO_GPU
    began_s = time.monotonic()
    cuda = asked.device == "cuda"
    lengths = asked.lengths or ([2048, 8192, 32768] if cuda else [128, 512])
    device = torch.device(asked.device)
    with torch.inference_mode():
        bench = Bench(device, LARGE if cuda else TINY, lengths, asked.rows or (2048 if cuda else 128))
        checks = [bench.rule(), bench.float32(), bench.bfloat16(), bench.messages()]
        result = {
            "device": torch.cuda.get_device_name(device) if cuda else "CPU, standing in: its figures are of no GPU",
            "torch": torch.__version__,
            "model": bench.model.config.name,
            "parameters": sum(weight.numel() for weight in bench.model.parameters()),
            "checks": [{"name": c.name, "found": c.found, "most": c.most, "holds": c.holds} for c in checks],
            "prefill": [bench.prefill(tokens) for tokens in bench.lengths],
            "decode": [bench.step(n, b) for n in (bench.lengths[0], bench.lengths[-1]) for b in (1, MAX_BATCH)],
            "seconds": time.monotonic() - began_s,
        }
    print(json.dumps(result, indent=1) if asked.json else table(result))
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
