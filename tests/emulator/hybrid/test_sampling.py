"""The next token: greedy, or drawn by request and place alone, within the nucleus."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.backends.hybrid.sampling import choose
from emulator.computing import Sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))


def drawn(sampling: Sampling, times: int = 4000) -> np.ndarray:
    """How often each token comes, over so many places."""
    return np.bincount([choose(LOGITS, sampling, place) for place in range(times)], minlength=5) / times


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    assert choose(LOGITS, Sampling(), 0) == 1
    assert choose(np.array([1.0, 2.0, 2.0]), Sampling(), 5) == 1


def test_tokens_come_as_often_as_they_are_likely() -> None:
    assert drawn(Sampling(temperature=1.0)) == pytest.approx(np.exp(LOGITS), abs=0.03)


def test_a_low_temperature_sharpens() -> None:
    sharp = np.exp(LOGITS) ** 2 / (np.exp(LOGITS) ** 2).sum()
    assert drawn(Sampling(temperature=0.5)) == pytest.approx(sharp, abs=0.03)


def test_only_the_fewest_tokens_that_have_top_p_between_them_come() -> None:
    seen = drawn(Sampling(temperature=1.0, top_p=0.65))
    assert seen == pytest.approx(np.array([0, 0.4, 0, 0.3, 0]) / 0.7, abs=0.03)
    assert drawn(Sampling(temperature=1.0, top_p=1e-9))[1] == 1.0


def test_the_seed_and_the_place_decide_and_nothing_else() -> None:
    one, other = Sampling(1.0, seed=1), Sampling(1.0, seed=2)
    told = [choose(LOGITS, one, place) for place in range(50)]
    assert told == [choose(LOGITS, one, place) for place in range(50)]
    assert told != [choose(LOGITS, other, place) for place in range(50)]
    assert len(set(told)) > 1


def test_a_negative_seed_is_one() -> None:
    assert choose(LOGITS, Sampling(1.0, seed=-(2**63)), 0) in range(5)
