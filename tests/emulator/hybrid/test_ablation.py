"""The ablation compares models of equal size, and its page takes its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import hybrid_ablation as ablation


def test_the_models_differ_in_their_layers_and_in_nothing_else_that_costs() -> None:
    models = ablation.variants()
    counts = [ablation.parameters(one) for one in models]
    assert max(counts) / min(counts) < 1.02
    assert {(one.layers, one.d_model, one.heads, one.head_dim) for one in models} == {(24, 256, 4, 64)}
    assert [sum(kind == "full" for kind in one.kinds) for one in models] == [6, 3, 4, 24, 24]


ROWS = [
    {
        "model": name, "parameters": 22_000_000, "mlp_dim": 1, "tokens": tokens, "s_kv_bytes": 1_000 * tokens,
        "t_prefill_s": tokens / 1024, "phi_kv_bps": 8_192_000.0, "worst_s": 3.0,
    }
    for name in ("a", "b", "c", "d", "e")
    for tokens in (1024, 2048)
]  # fmt: skip


def test_the_page_gets_the_table_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "hybrid.md"
    page.write_text(f"before\n{ablation.BEGIN}\nold\n{ablation.END}\nafter\n")
    monkeypatch.setattr(ablation, "PAGE", page)
    monkeypatch.setattr(ablation, "FIGURE", tmp_path / "ablation.svg")
    ablation.write(ROWS)
    text = page.read_text()
    assert "| a | 22.00 M | 1.02 | 2.05 | 1.00 | 2.00 | 8.2 | 8.2 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert (tmp_path / "ablation.svg").exists()
    page.write_text("no place")
    with pytest.raises(SystemExit, match="to put the table between"):
        ablation.write(ROWS)
