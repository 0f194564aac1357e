"""The gate's arithmetic against numbers computed by hand, against SciPy, and against what it promises."""

import math

import numpy as np
import pytest

from testbed.gate.statistics import (
    MOST_FOLD,
    best_weight,
    bootstrap_interval,
    log_ratio,
    radius,
    sequence_interval,
)

stats = pytest.importorskip("scipy.stats")


def test_a_ratio_is_a_difference_of_logarithms():
    assert log_ratio(2.0, 3.0) == pytest.approx(0.405465, abs=1e-6)
    assert log_ratio(3.0, 2.0) == pytest.approx(-0.405465, abs=1e-6)
    assert log_ratio(0.0, 0.0) == 0.0


@pytest.mark.parametrize(("was", "now", "fold"), [(0.0, 1.0, MOST_FOLD), (1.0, 0.0, -MOST_FOLD), (1.0, 1e9, MOST_FOLD)])
def test_no_ratio_is_more_than_thousandfold(was, now, fold):
    assert log_ratio(was, now) == fold


def test_the_radius_by_hand():
    # n = 16, alpha = 0.05, c^2 = 4: q = (0.0025 * 4 / 20)^(1/16) = 0.0005^(0.0625) = e^(-7.600902 / 16) = 0.621850;
    # 20 (1 - q) = 7.563002; 20 q - 4 = 8.436998; radius = sqrt(7.563002 / 8.436998) = 0.946788
    assert radius(16, 1.0, 0.05, 4.0) == pytest.approx(0.946788, abs=1e-5)
    assert radius(16, 3.0, 0.05, 4.0) == pytest.approx(3 * 0.946788, abs=3e-5)


def test_the_interval_is_where_the_martingale_is_below_one_over_alpha():
    x = np.array([0.3, -0.1, 0.5, 0.2, 0.9, 0.4, 0.1, 0.6, 0.35, 0.45, 0.2, 0.5])
    alpha, n = 0.05, len(x)
    weight = best_weight(n, alpha)

    def martingale(mean: float) -> float:
        v, s = float(((x - mean) ** 2).sum()), float((x - mean).sum())
        return math.sqrt(weight / (n + weight)) * ((n + weight) * v / ((n + weight) * v - s * s)) ** (n / 2)

    low, high = sequence_interval(x, alpha, n)
    assert martingale(low) == pytest.approx(1 / alpha)
    assert martingale(high) == pytest.approx(1 / alpha)
    assert martingale((low + high) / 2) < 1


def test_few_runs_say_nothing_and_equal_ones_everything():
    assert radius(3, 1.0, 0.004, 1.0) == math.inf
    assert sequence_interval(np.array([0.1]), 0.05, 20) == (-math.inf, math.inf)
    assert sequence_interval(np.zeros(8), 0.05, 20) == (0.0, 0.0)


def test_it_is_wider_than_students_t_which_allows_one_look_only():
    for n in (8, 16, 40):
        t = float(stats.t.ppf(0.975, n - 1)) / math.sqrt(n - 1)  # in deviations with divisor n
        assert t < radius(n, 1.0, 0.05, best_weight(n, 0.05)) < 3 * t


def test_looking_after_every_run_is_wrong_as_rarely_as_promised():
    rng = np.random.default_rng(7)
    alpha, most, trials = 0.05, 40, 2000
    x = rng.normal(size=(trials, most))
    n = np.arange(1, most + 1)
    mean = x.cumsum(axis=1) / n
    deviation = np.sqrt(np.maximum((x**2).cumsum(axis=1) / n - mean**2, 0.0))
    half = np.array([radius(int(k), 1.0, alpha, best_weight(most, alpha)) for k in n[3:]])
    wrong = (np.abs(mean[:, 3:]) > half * deviation[:, 3:]).any(axis=1).mean()
    assert wrong <= alpha
    naive = np.array([float(stats.t.ppf(1 - alpha / 2, k - 1)) / math.sqrt(k - 1) for k in n[3:]])
    assert (np.abs(mean[:, 3:]) > naive * deviation[:, 3:]).any(axis=1).mean() > 2 * alpha  # the test can fail


def test_the_bootstrap_agrees_with_scipys():
    rng = np.random.default_rng(3)
    for sample in (rng.normal(0.1, 1.0, 30), rng.exponential(1.0, 25), rng.lognormal(0.0, 1.0, 40)):
        known = stats.bootstrap(
            (sample,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(5)
        ).confidence_interval
        low, high = bootstrap_interval(sample)
        width = known.high - known.low
        assert low == pytest.approx(known.low, abs=0.05 * width)
        assert high == pytest.approx(known.high, abs=0.05 * width)


def test_the_bootstrap_of_what_does_not_vary_is_a_point():
    assert bootstrap_interval(np.full(9, 0.25)) == (0.25, 0.25)
