"""What a run says of prefills and decode steps is found again in its request table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from emulator.measured import fit_step
from testbed.calibrate import knots_of, steps_of, through


def test_the_line_goes_through_what_was_prefilled() -> None:
    random = np.random.default_rng(1)
    tokens = random.uniform(1024, 8192, 400)
    knots = knots_of(tokens, 8192)
    assert knots[1:-1].tolist() == [2048, 4096]

    def truth(at: np.ndarray) -> np.ndarray:
        return np.interp(at, [1000, 2048, 4096, 9000], [0.02, 0.05, 0.2, 0.6])

    assert through(knots, tokens, truth(tokens)) == pytest.approx(truth(knots))
    noisy = truth(tokens) * random.uniform(0.9, 1.1, 400)
    assert through(knots, tokens, noisy) == pytest.approx(truth(knots), rel=0.05)


def test_the_line_goes_on_to_the_old_ones_end_when_that_is_near() -> None:
    tokens = np.array([1000.0, 7000.0])
    assert knots_of(tokens, 8192)[-1] == 8192
    assert knots_of(tokens, 131072)[-1] == 7000
    assert knots_of(tokens, 4096)[-1] == 7000


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
