"""The model: its equations by hand, what any optimum must satisfy, and the figures that a narrower link leads to."""

from __future__ import annotations

import ast
import functools
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.profile import load_kv_profile, load_profile
from testbed.lengths import hardware
from testbed.scheduler import model
from testbed.scheduler.model import (
    ALL_LOCAL,
    ALL_REMOTE,
    Fleet,
    Hardware,
    LengthDistribution,
    ModelError,
    System,
    conditional,
    evaluate,
    grid_search,
    optimum,
    solve_threshold,
)

PAPER_LENGTHS = LengthDistribution.log_normal(mu=9.90, sigma=1.00, low=128, high=128 * 1024)
TOY_LENGTHS = LengthDistribution.of_sample([1024, 32768])

lengths = st.lists(st.integers(1, 131_072), min_size=1, max_size=30).map(LengthDistribution.of_sample)
fleets = st.builds(Fleet, st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
thresholds = st.one_of(st.floats(0, 140_000), st.just(ALL_LOCAL))


@functools.cache
def paper_system(link_gbps: float = 100) -> System:
    local, remote = hardware(load_profile("h20-1t")), hardware(load_profile("h200-1t"))
    return System(local, remote, link_gbps * 1e9, decode_step_s=0.025, decode_slots=20, output_tokens=1024)


def toy_system(link_bps: float = 8e9) -> System:
    toy = hardware(load_profile("toy"))
    return System(toy, toy, link_bps, decode_step_s=0.025, decode_slots=10, output_tokens=100)


# The distribution of lengths
def test_the_papers_lengths_have_the_mean_it_states() -> None:
    assert PAPER_LENGTHS.mean == pytest.approx(27_000, rel=0.02)


def test_the_papers_threshold_offloads_the_share_it_states() -> None:
    assert PAPER_LENGTHS.above(np.ones_like(PAPER_LENGTHS.atoms), np.array([19_400.0]))[0] == pytest.approx(
        0.4957, abs=1e-4
    )


def test_a_truncated_log_normal_agrees_with_a_sample_of_it() -> None:
    drawn = np.random.default_rng(1).lognormal(9.9, 1.0, 400_000)
    sample = LengthDistribution.of_sample(drawn[(drawn >= 128) & (drawn <= 131_072)])
    assert sample.mean == pytest.approx(PAPER_LENGTHS.mean, rel=0.005)


@settings(deadline=None)
@given(lengths, st.lists(thresholds, min_size=1, max_size=5).map(np.array))
def test_below_and_above_a_threshold_make_the_whole(dist: LengthDistribution, t: np.ndarray) -> None:
    assert dist.below(dist.atoms, t) + dist.above(dist.atoms, t) == pytest.approx(np.full(len(t), dist.mean))


def test_weights_are_relative() -> None:
    assert LengthDistribution.of_sample([10, 20], [1, 3]).mean == 17.5


def test_a_fully_cached_prompt_counts_as_one_token() -> None:
    assert LengthDistribution.of_sample([0, 5]).low == 1


@pytest.mark.parametrize(
    ("values", "weights"), [([], None), ([math.nan], None), ([1, 2], [1]), ([1], [0]), ([1, 2], [-1, 2])]
)
def test_lengths_that_make_no_distribution_are_refused(values: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ModelError, match=r"lengths: |weights: "):
        LengthDistribution.of_sample(values, weights)


@pytest.mark.parametrize("arguments", [(9.9, 0, 128, 1000), (9.9, 1, 1000, 128), (9.9, 1, 0, 10), (40, 0.1, 128, 1000)])
def test_an_impossible_log_normal_is_refused(arguments: tuple[float, float, float, float]) -> None:
    with pytest.raises(ModelError, match="log-normal"):
        LengthDistribution.log_normal(*arguments)


# Equations (1)-(6), by hand on the toy
def test_equation_1() -> None:
    found = model.phi_kv_bps(hardware(load_profile("toy")), np.array([1024.0, 32768.0]))
    assert found == pytest.approx([1.6e9, 3.2e9])


@pytest.mark.parametrize(("name", "tbps"), [("minimax-m2.5", 3.8), ("qwen3-235b", 2.1), ("ring-2.5-1t", 0.170)])
def test_equation_2_gives_the_papers_egress_of_512_h200(name: str, tbps: float) -> None:
    egress = model.cluster_egress_bps(512 // 8, load_kv_profile(name).phi_kv_bps(32 * 1024))
    assert egress == pytest.approx(tbps * 1e12, rel=0.03)


@pytest.mark.parametrize(("link_bps", "rate"), [(8e9, 1.0), (math.inf, 1.0), (3.2e9, 0.5), (0, 0)])
def test_equation_3_is_compute_or_the_link_whichever_is_lower(link_bps: float, rate: float) -> None:
    assert model.theta_prfaas(2, link_bps, prefill_long_s=2.0, kv_long_bytes=800e6) == rate


@pytest.mark.parametrize("n_p", [0, 1, 2, 3])
def test_equation_4_on_the_toy_is_two_a_prefill_instance(n_p: int) -> None:
    assert model.theta_pd_p(n_p, 0.5) == 2 * n_p


@pytest.mark.parametrize("n_d", [0, 1, 2, 3])
def test_equation_5_on_the_toy_is_four_a_decode_instance(n_d: int) -> None:
    assert model.theta_pd_d(n_d, slots=10, step_s=0.025, output_tokens=100) == pytest.approx(4 * n_d)


@pytest.mark.parametrize(("split", "rate"), [((0, 3), 0), ((1, 2), 2), ((2, 1), 2), ((3, 0), 0)])
@pytest.mark.parametrize("form", ["mean", "expectation"])
def test_equation_6_on_every_split_of_the_toy(split: tuple[int, int], rate: float, form: model.Form) -> None:
    assert evaluate(toy_system(), Fleet(2, *split), TOY_LENGTHS, 8192, form).lambda_max == rate


def test_all_offloaded_leaves_local_prefill_vacuous_not_undefined() -> None:
    point = evaluate(toy_system(), Fleet(2, 0, 3), TOY_LENGTHS, ALL_REMOTE)
    assert (point.p, point.theta_pd_p, point.lambda_max) == (1.0, math.inf, 1.6)


def test_nothing_offloaded_leaves_the_remote_cluster_vacuous_not_undefined() -> None:
    point = evaluate(toy_system(), Fleet(0, 2, 1), TOY_LENGTHS, ALL_LOCAL)
    assert (point.p, point.theta_prfaas, point.egress_bps, point.lambda_max) == (0.0, math.inf, 0.0, 1.6)


def test_naive_on_a_narrow_link_is_bound_by_the_link() -> None:
    point = evaluate(toy_system(link_bps=3.6e9), Fleet(2, 0, 3), TOY_LENGTHS, ALL_REMOTE)
    assert point.bottleneck == "link"
    assert point.lambda_max == pytest.approx(1.0)


@settings(deadline=None)
@given(lengths, fleets, thresholds, st.sampled_from(["mean", "expectation"]))
def test_lambda_max_is_finite_and_no_more_than_any_stage_allows(
    dist: LengthDistribution, fleet: Fleet, t: float, form: model.Form
) -> None:
    point = evaluate(paper_system(), fleet, dist, t, form)
    prfaas, local = point.p * point.lambda_max, (1 - point.p) * point.lambda_max
    assert 0 <= point.lambda_max <= point.theta_pd_d
    assert prfaas <= point.theta_prfaas * (1 + 1e-9)
    assert local <= point.theta_pd_p * (1 + 1e-9)


@settings(deadline=None)
@given(lengths, fleets, thresholds, st.floats(0.5, 20), st.sampled_from(["mean", "expectation"]))
def test_what_crosses_the_link_fits_it(
    dist: LengthDistribution, fleet: Fleet, t: float, gbps: float, form: model.Form
) -> None:
    assert evaluate(paper_system(gbps), fleet, dist, t, form).egress_bps <= gbps * 1e9 * (1 + 1e-9)


@settings(deadline=None)
@given(lengths, fleets)
def test_the_forms_agree_where_profiles_are_straight(dist: LengthDistribution, fleet: Fleet) -> None:
    straight = Hardware(s_kv=lambda x: 1e6 + 1e3 * x, t_prefill=lambda x: 0.1 + 1e-4 * x)
    system = System(straight, straight, 1e9, 0.025, 20, 1000)
    mean, expectation = (evaluate(system, fleet, dist, 20_000, form).lambda_max for form in ("mean", "expectation"))
    assert mean == pytest.approx(expectation)


# Equation (7): the threshold
@pytest.mark.parametrize("form", ["mean", "expectation"])
@pytest.mark.parametrize("link_gbps", [100, 8, 5])
def test_at_the_threshold_both_prefill_ceilings_are_equal(form: model.Form, link_gbps: float) -> None:
    point = solve_threshold(paper_system(link_gbps), Fleet(4, 3, 5), PAPER_LENGTHS, form)
    assert point.theta_prfaas / point.p == pytest.approx(point.theta_pd_p / (1 - point.p), rel=1e-3)


@settings(deadline=None)
@given(lengths, fleets, st.floats(0, 140_000))
def test_no_other_threshold_carries_more(dist: LengthDistribution, fleet: Fleet, other: float) -> None:
    best = solve_threshold(paper_system(), fleet, dist).lambda_max
    assert evaluate(paper_system(), fleet, dist, other).lambda_max <= best * (1 + 1e-8)


@settings(deadline=None)
@given(lengths, fleets)
def test_a_narrower_link_never_carries_more(dist: LengthDistribution, fleet: Fleet) -> None:
    wide, narrow = (solve_threshold(paper_system(gbps), fleet, dist).lambda_max for gbps in (10, 5))
    assert narrow <= wide * (1 + 1e-8)


def test_a_plateau_of_the_threshold_goes_by_its_geometric_middle() -> None:
    assert solve_threshold(toy_system(), Fleet(2, 1, 2), TOY_LENGTHS).threshold_tokens == 5792


def test_a_decode_bound_fleet_still_balances_its_prefill() -> None:
    bound, free = (solve_threshold(paper_system(), Fleet(4, 3, n_d), PAPER_LENGTHS) for n_d in (1, 50))
    assert bound.threshold_tokens == free.threshold_tokens


def test_without_a_remote_cluster_all_stays_local() -> None:
    assert solve_threshold(paper_system(), Fleet(0, 9, 3), PAPER_LENGTHS).p == 0


def test_without_local_prefill_all_is_offloaded() -> None:
    assert solve_threshold(paper_system(), Fleet(4, 0, 8), PAPER_LENGTHS).p == 1


def test_a_broken_link_keeps_all_local() -> None:
    assert solve_threshold(paper_system(link_gbps=0), Fleet(4, 3, 5), PAPER_LENGTHS).p == 0


def test_a_long_window_of_lengths_finds_the_distributions_threshold() -> None:
    window = LengthDistribution.of_sample(_window(20_000))
    found = solve_threshold(paper_system(), Fleet(4, 3, 5), window).threshold_tokens
    assert found == pytest.approx(19_641, rel=0.03)


def test_a_window_of_1000_lengths_is_solved_within_5_ms() -> None:
    window, system = _window(1000), paper_system()
    best = math.inf
    for _ in range(10):
        begun = time.perf_counter()
        solve_threshold(system, Fleet(4, 3, 5), LengthDistribution.of_sample(window))
        best = min(best, time.perf_counter() - begun)
    assert best < 0.005


# Equation (8): the split
def test_around_the_best_split_prefill_and_decode_change_places() -> None:
    grid = grid_search(paper_system(), 4, 8, PAPER_LENGTHS, threshold_tokens=19_400)
    prefill_bound = [point.theta_prfaas + point.theta_pd_p < point.theta_pd_d for point in grid]
    assert prefill_bound == [True] * 4 + [False] * 5


def test_equal_splits_go_to_fewer_prefill_nodes() -> None:
    assert optimum(grid_search(toy_system(), 2, 3, TOY_LENGTHS)).fleet == Fleet(2, 1, 2)


@pytest.mark.parametrize(
    ("gbps", "rate", "t"),
    [
        (100, 3.20, 19_600),
        (12, 3.20, 19_600),
        (10, 2.80, 21_600),
        (8, 2.40, 24_400),
        (6, 1.98, 28_700),
        (5, 1.78, 31_700),
    ],
)
def test_what_a_narrower_link_does_to_the_split_3_5(gbps: float, rate: float, t: float) -> None:
    point = solve_threshold(paper_system(gbps), Fleet(4, 3, 5), PAPER_LENGTHS)
    assert [point.lambda_max, point.threshold_tokens] == pytest.approx([rate, t], rel=0.01)


@pytest.mark.parametrize(("gbps", "rate", "t"), [(5, 1.73, 32_500), (12, 3.10, None)])
def test_what_tcps_share_of_a_narrower_link_does_to_the_split_3_5(gbps: float, rate: float, t: float | None) -> None:
    point = solve_threshold(paper_system(gbps * 0.956), Fleet(4, 3, 5), PAPER_LENGTHS)
    assert point.lambda_max == pytest.approx(rate, rel=0.01)
    assert t is None or point.threshold_tokens == pytest.approx(t, rel=0.01)


@pytest.mark.parametrize(("gbps", "split", "rate"), [(10, (4, 4), 3.06), (8, (4, 4), 2.64), (6, (5, 3), 2.34)])
def test_what_a_narrower_link_does_to_the_best_split(gbps: float, split: tuple[int, int], rate: float) -> None:
    point = optimum(grid_search(paper_system(gbps), 4, 8, PAPER_LENGTHS))
    assert point.fleet == Fleet(4, *split)
    assert point.lambda_max == pytest.approx(rate, rel=0.01)


# The unloaded TTFT
def test_unloaded_ttft_weighs_both_routes() -> None:
    assert model.unloaded_ttft_s(toy_system(), TOY_LENGTHS, 8192) == (1.25, 2.0)


def test_unloaded_ttft_quantile_is_of_the_times_not_of_the_lengths() -> None:
    slow_local = System(hardware(load_profile("h20-1t")), hardware(load_profile("h200-1t")), 1e9, 0.025, 20, 100)
    dist = LengthDistribution.of_sample([30_000, 32_000])
    assert model.unloaded_ttft_s(slow_local, dist, 31_000)[1] == pytest.approx(load_profile("h20-1t").t_prefill(30_000))


# The room
def test_the_model_imports_nothing_but_numpy_and_the_standard_library() -> None:
    tree = ast.parse(Path(model.__file__).read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= {"__future__", "math", "collections.abc", "dataclasses", "typing", "numpy", "numpy.typing"}


def test_conditional_means_lie_on_their_side_of_the_threshold() -> None:
    given_t = conditional(paper_system(), PAPER_LENGTHS, np.array([500.0, 19_400.0, 100_000.0]), "mean")
    assert (given_t.l_short <= [500, 19_400, 100_000]).all()
    assert (given_t.l_long >= [500, 19_400, 100_000]).all()


def _window(size: int) -> list[int]:
    drawn = np.random.default_rng(7).lognormal(9.9, 1.0, 2 * size)
    return [int(x) for x in drawn if 128 <= x <= 131_072][:size]
