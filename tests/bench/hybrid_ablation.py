"""What hybrid attention saves: S_kv and KV throughput of models of equal size whose layers differ, measured.

    python -m tests.bench.hybrid_ablation --write

Five models of 24 layers and the same width, as many parameters as the first within 1 % (by the width of their MLPs):
3:1 and 7:1 linear to full attention (latent), 5:1 sliding to full (grouped, a window of 128 tokens), and all full,
latent and grouped. Each prefills prompts of several lengths on one core in float32; S_kv is what its state weighs as it
crosses, Phi_kv = S_kv / T_prefill (equation 1). `--write` puts the table and the plot into docs/hybrid.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from emulator.backends.hybrid.config import ModelConfig
from emulator.backends.hybrid.measure import kv_bytes
from emulator.backends.hybrid.model import HybridModel

PAGE = Path("docs/hybrid.md")
FIGURE = Path("docs/figures/hybrid-ablation.svg")
BEGIN, END = "<!-- made by tests/bench/hybrid_ablation.py -->", "<!-- end -->"
FIRST = ModelConfig(
    name="3:1 linear, MLA", layers=24, d_model=256, mlp_dim=704, pattern="LLLF", heads=4, linear_heads=4, window=128
)
OTHERS: dict[str, dict[str, Any]] = {
    "7:1 linear, MLA": {"pattern": "LLLLLLLF"},
    "5:1 sliding, GQA": {"pattern": "SSSSSF", "attention": "gqa"},
    "all full, MLA": {"pattern": "F"},
    "all full, GQA": {"pattern": "F", "attention": "gqa"},
}
WIDTH_STEP = 16  # of an MLP
MOST_APART = 0.01


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in HybridModel(config).parameters())


def equal_size(config: ModelConfig, target: int) -> ModelConfig:
    """This model with MLPs of the width that brings it nearest to so many parameters."""
    widths = [dataclasses.replace(config, mlp_dim=WIDTH_STEP * n) for n in (1, 2)]
    one, two = map(parameters, widths)
    steps = 1 + round((target - one) / (two - one))
    return dataclasses.replace(config, mlp_dim=WIDTH_STEP * steps)


def variants() -> list[ModelConfig]:
    """Raises SystemExit when one of them cannot be made equal."""
    target = parameters(FIRST)
    models = [FIRST, *(equal_size(dataclasses.replace(FIRST, name=n, **c), target) for n, c in OTHERS.items())]
    for one in models:
        if abs(parameters(one) / target - 1) > MOST_APART:
            raise SystemExit(f"{one.name}: {parameters(one)} parameters are not {target}")
    return models


def measure(models: Sequence[ModelConfig], lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rounds over all models and lengths, so that a slower moment of the machine is nobody's own."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 256, (max(lengths),), generator=generator).tolist()
    built = [HybridModel.seeded(config, 1) for config in models]
    taken: dict[tuple[int, int], list[float]] = {}
    weights: dict[tuple[int, int], int] = {}
    for model in built:
        model.prefill(prompt[: min(lengths)], model.empty())
    for _ in range(rounds):
        for i, model in enumerate(built):
            for length in lengths:
                state = model.empty()
                began_s = time.perf_counter()
                model.prefill(prompt[:length], state)
                taken.setdefault((i, length), []).append(time.perf_counter() - began_s)
                weights[i, length] = kv_bytes(model.config, state)
    rows = []
    for i, config in enumerate(models):
        for length in lengths:
            seconds = min(taken[i, length])  # the machine's own: what is above is what else runs on it
            rows.append(
                {
                    "model": config.name,
                    "parameters": parameters(config),
                    "mlp_dim": config.mlp_dim,
                    "tokens": length,
                    "s_kv_bytes": weights[i, length],
                    "t_prefill_s": seconds,
                    "phi_kv_bps": 8 * weights[i, length] / seconds,
                    "worst_s": max(taken[i, length]),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a model, three figures a length."""
    lengths = sorted({row["tokens"] for row in rows})
    by = {(row["model"], row["tokens"]): row for row in rows}
    names = list(dict.fromkeys(row["model"] for row in rows))
    heads = ["layers", "parameters"]
    for what in ("S_kv, MB", "T_prefill, s", "Phi_kv, Mbit/s"):
        heads += [f"{what}, {length // 1024}K" for length in lengths]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in names:
        cells = [name, f"{by[name, lengths[0]]['parameters'] / 1e6:.2f} M"]
        cells += [f"{by[name, length]['s_kv_bytes'] / 1e6:.2f}" for length in lengths]
        cells += [f"{by[name, length]['t_prefill_s']:.2f}" for length in lengths]
        cells += [f"{by[name, length]['phi_kv_bps'] / 1e6:.1f}" for length in lengths]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """S_kv and Phi_kv against the length, a line a model."""
    from testbed.figures.draw import DECODE, PALETTE, logarithmic, panels, save

    figure, axes = panels(1, 2, 9.0, 3.6)
    colours = dict(zip(dict.fromkeys(row["model"] for row in rows), (*PALETTE, DECODE), strict=True))
    for place, key, scale, title in (
        (axes[0, 0], "s_kv_bytes", 1e6, "S_kv, MB"),
        (axes[0, 1], "phi_kv_bps", 1e6, "Phi_kv = S_kv / T_prefill, Mbit/s"),
    ):
        for name, colour in colours.items():
            mine = [row for row in rows if row["model"] == name]
            place.plot(
                [row["tokens"] / 1024 for row in mine],
                [row[key] / scale for row in mine],
                color=colour,
                marker="o",
                label=name,
            )
        place.set_title(title)
        place.set_xlabel("prompt, K tokens")
        logarithmic(place)
    axes[0, 0].legend(fontsize="small")
    save(figure, path)


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Table and plot into the docs. Raises SystemExit when the page has no place for them."""
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE}: no {BEGIN} ... {END} to put the table between")
    picture = f"![S_kv and KV throughput by length](figures/{FIGURE.name})"
    apart = statistics.median(row["worst_s"] / row["t_prefill_s"] - 1 for row in rows)
    note = f"The least of rounds over all of them; the worst of a figure's rounds was {apart:.0%} more, in the median."
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n\n{note}\n\n{picture}\n{END}{after}", encoding="utf-8")
    draw(rows, FIGURE)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.hybrid_ablation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE} and {FIGURE}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(variants(), sorted(set(asked.lengths)), asked.rounds)
    if asked.write:
        write(rows)
    print(json.dumps({"bench": "hybrid_ablation", "rows": rows}, indent=1) if asked.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
