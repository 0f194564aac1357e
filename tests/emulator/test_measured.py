"""A profile that was measured: its decode step is the one that the figures follow, and the file says what it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emulator.measured import Step, fit_step, text_of
from emulator.profile import ProfileError, load_profile

GRID = [(batch, batch * tokens) for batch in (1, 2, 8) for tokens in (100, 1000, 8000)]


def steps(base_s: float, per_request_s: float, per_kv_token_s: float) -> list[Step]:
    return [Step(b, k, base_s + per_request_s * b + per_kv_token_s * k) for b, k in GRID]


@pytest.mark.parametrize("found", [(2e-3, 1e-4, 3e-8), (2e-3, 0.0, 3e-8), (2e-3, 1e-4, 0.0), (2e-3, 0.0, 0.0)])
def test_the_fit_finds_the_step_that_made_the_figures(found: tuple[float, float, float]) -> None:
    step, farthest = fit_step(steps(*found))
    assert (step.base_s, step.per_request_s, step.per_kv_token_s) == pytest.approx(found, abs=1e-12)
    assert farthest < 1e-9


def test_no_coefficient_is_below_zero() -> None:
    """Times that fall with the batch: the nearest step that may be is a constant one."""
    step, farthest = fit_step([Step(1, 100, 0.011), Step(8, 800, 0.009)])
    assert step.per_request_s == step.per_kv_token_s == 0
    assert 0.009 < step.base_s < 0.011
    assert farthest > 0.05


def test_without_a_step_there_is_no_fit() -> None:
    with pytest.raises(ProfileError, match="no decode step"):
        fit_step([])


def written(**changes: Any) -> str:
    given: dict[str, Any] = {
        "name": "here",
        "model": "hybrid tiny",
        "hardware": "a core",
        "prefill_s": {1024: 0.03, 4096: 0.16},
        "kv_bytes": {1024: 200_000, 4096: 800_000},
        "steps": steps(2e-3, 1e-4, 1e-8),
        "slots": 8,
        "pieces": 4,
        "source": "a test",
        "measurement": {"taken_at": "2026-01-01", "threads": 1},
    }
    return text_of(**given | changes)


def test_what_is_written_is_a_profile_that_is_marked_as_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(written())
    profile = load_profile(path)
    assert profile.t_prefill(4096) == 0.16
    assert profile.s_kv(1024) == 200_000
    assert profile.decode_slots == 8
    assert profile.decode_step is not None
    assert profile.decode_step_s == pytest.approx(profile.decode_step.step_s(8, 8 * 4096), rel=1e-3)
    assert profile.provenance["t_prefill"].status == "measured"
    assert profile.measurement == {"taken_at": "2026-01-01", "threads": 1}


def test_a_longer_prefill_that_took_less_is_no_measurement() -> None:
    with pytest.raises(ProfileError, match=r"4096 tokens took 0\.02 s, one of 1024 tokens 0\.03 s"):
        written(prefill_s={1024: 0.03, 4096: 0.02})
