"""What a run says of prefills and decode steps is found again in its request table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from emulator.measured import fit_step
from emulator.profile import ProfileError, load_profile
from testbed.calibrate import LEAST, knots_of, pieces_of, points_of, profiles_of_runs, ratios_of, steps_of
from testbed.runs import RunError
from testbed.scenario import load


def test_the_ratio_to_the_old_profile_is_found_by_length() -> None:
    random = np.random.default_rng(1)
    tokens = random.uniform(1024, 8192, 400)
    knots = knots_of(tokens)
    assert knots[1:-1].tolist() == [2048, 4096]
    truth = np.interp(tokens, [1000, 2048, 4096, 9000], [1.2, 1.5, 1.6, 1.1])
    expected = np.interp(knots, [1000, 2048, 4096, 9000], [1.2, 1.5, 1.6, 1.1])
    assert ratios_of(knots, tokens, truth) == pytest.approx(expected)
    noisy = truth * random.uniform(0.9, 1.1, 400)
    assert ratios_of(knots, tokens, noisy) == pytest.approx(expected, rel=0.05)


def test_a_profile_reaches_as_far_as_the_old_one() -> None:
    assert points_of(np.array([1030.0, 2048.0, 3900.0]), 8192).tolist() == [
        256,
        512,
        1024,
        1030,
        2048,
        3900,
        4096,
        8192,
    ]


@pytest.mark.parametrize("pieces", [1, 2, 4, 16])
def test_pieces_are_told_from_what_was_still_to_land(pieces: int) -> None:
    """Prefills of 1 s, whose 500,000 bytes take 0.4 s at 10 Mbit/s: the last piece is what is exposed."""
    count = 40
    prefills = pd.DataFrame(
        {
            "prefill_start_s": np.zeros(count),
            "prefill_end_s": np.ones(count),
            "landed_s": np.full(count, 1 + 0.4 / pieces + 0.005),
            "kv_bytes": np.full(count, 500_000),
        }
    )
    assert pieces_of(prefills, 10e6, 0.005) == pieces


def table(*rows: tuple[float, float, int, int]) -> pd.DataFrame:
    columns = ["admitted_s", "finished_s", "input_tokens", "output_tokens"]
    return pd.DataFrame(rows, columns=columns).assign(status="ok", decode_node="d0")


def test_a_request_alone_is_a_batch_of_one() -> None:
    (step,) = steps_of(table((1.0, 2.0, 100, 11)))
    assert (step.batch, step.kv_tokens, step.seconds) == (1.0, 105.5, 0.1)


def test_who_is_there_half_of_the_time_counts_half() -> None:
    first, second = steps_of(table((0.0, 2.0, 100, 11), (1.0, 2.0, 300, 11)))
    assert first.batch == 1.5
    assert first.kv_tokens == pytest.approx(105.5 + 305.5 / 2)
    assert second.batch == 2


def test_a_node_knows_nothing_of_anothers_requests() -> None:
    both = table((0.0, 2.0, 100, 11), (0.0, 2.0, 100, 11))
    both.loc[1, "decode_node"] = "d1"
    assert [step.batch for step in steps_of(both)] == [1, 1]


def test_runs_know_nothing_of_each_other() -> None:
    both = table((0.0, 2.0, 100, 11), (0.0, 2.0, 100, 11)).assign(run=["a", "b"])
    assert [step.batch for step in steps_of(both)] == [1, 1]


def test_the_step_that_made_a_run_is_found_in_its_table() -> None:
    """Requests in turns of constant batches: their step follows 10 ms + 1 ms a request."""
    rows, at = [], 0.0
    for batch in (1, 2, 4, 8, 3, 5):
        lasts = 10 * (0.010 + 0.001 * batch)
        rows += [(at, at + lasts, 1000 + 100 * batch, 11)] * batch
        at += 1.0
    step, farthest = fit_step(steps_of(table(*rows)))
    assert step.base_s == pytest.approx(0.010, rel=0.05)
    assert step.per_request_s + 1500 * step.per_kv_token_s == pytest.approx(0.001, rel=0.2)
    assert farthest < 0.02


# --- from which runs -------------------------------------------------------------------------------------------------


def run(
    folder: Path,
    seed: int,
    sets: Sequence[str] = (),
    *,
    status: str = "valid",
    torch: str = "2",
    launcher: str = "namespaces",
) -> Path:
    """The files of a run of `hybrid` whose 60 prefills at each site took twice what its profile says."""
    folder.mkdir()
    scenario = load("hybrid", [f"seed={seed}", *sets])
    (folder / "scenario.yaml").write_text(scenario.to_yaml())
    (folder / "summary.json").write_text(json.dumps({"verdict": {"status": status}}))
    said = {
        "taken_at": "2026-12-01T00:00:00+0000",
        "machine": {"cpu": "fast"},
        "versions": {"torch": torch},
        "launcher": launcher,
    }
    (folder / "provenance.json").write_text(json.dumps(said))
    count = 2 * LEAST
    tokens = np.linspace(1024, 8192, count).astype(int)
    pd.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(count)],
            "status": "ok",
            "prefill_site": ["prfaas", "pd"] * LEAST,
            "decode_node": "pd-1",
            "input_tokens": tokens,
            "cached_tokens": 0,
            "output_tokens": 32,
            "prefill_start_s": 0.0,
            "prefill_end_s": (ends_s := 2 * load_profile("hybrid-tiny").t_prefill(tokens.astype(float))),
            "landed_s": ends_s + 0.1,
            "admitted_s": ends_s + 0.1,
            "finished_s": ends_s + 0.5,
            "kv_bytes": 500_000,
        }
    ).to_csv(folder / "requests.csv", index=False)
    return folder


def test_runs_of_other_seeds_make_one_profile_a_site(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one", 5), run(tmp_path / "other", 6)
    texts = profiles_of_runs([one, other])
    assert set(texts) == {"prfaas", "pd"}
    assert "seed 5, 6" in texts["prfaas"]
    alone, both = (
        steps_of(pd.concat(pd.read_csv(folder / "requests.csv").assign(run=i) for i, folder in enumerate(folders)))
        for folders in ([one], [one, other])
    )
    assert {(step.batch, step.seconds) for step in both} == {(step.batch, step.seconds) for step in alone}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sets": ["backend=timing"]}, "backend timing measures nothing"),
        ({"status": "invalid"}, "is invalid: no measurement"),
        ({"sets": ["workload.duration_s=61"]}, "differs from .* in more than its seed"),
        ({"torch": "3"}, "its versions .* is not that of"),
        ({"launcher": "compose"}, "its launcher .* is not that of"),
    ],
)
def test_an_unlike_run_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        profiles_of_runs([run(tmp_path / "one", 5), run(tmp_path / "other", 6, **change)])


def test_a_run_given_twice_and_a_folder_that_holds_none_are_refused(tmp_path: Path) -> None:
    one = run(tmp_path / "one", 5)
    with pytest.raises(ProfileError, match="given twice"):
        profiles_of_runs([one, tmp_path / "." / "one"])
    with pytest.raises(RunError, match="cannot be read"):
        profiles_of_runs([tmp_path])
