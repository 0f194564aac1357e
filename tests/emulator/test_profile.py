"""Profiles: the published points exactly, straight lines between them, and a precise refusal of everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.profile import (
    Curve,
    KvThroughputProfile,
    Profile,
    ProfileError,
    load_kv_profile,
    load_profile,
    shipped_profiles,
)

K = 1024
MIB = 2.0**20
TIMING = ["h200-1t", "h20-1t", "toy", "toy-homogeneous"]
LOADED = {name: load_profile(name) for name in TIMING}
TABLE_3_GBPS = {
    "kimi-linear": [1.19, 2.29, 3.87, 4.88],
    "mimo-v2-flash": [0.82, 2.85, 4.66, 4.71],
    "qwen3.5-397b": [4.13, 6.28, 8.25, 7.47],
    "ring-2.5-1t": [7.27, 4.47, 2.59, 1.46],
    "minimax-m2.5": [4.94, 32.87, 59.93, 47.82],
    "qwen3-235b": [4.12, 22.42, 33.35, 21.50],
}

VALID: dict[str, Any] = {
    "name": "mine",
    "kind": "timing",
    "model": "m",
    "hardware": "h",
    "lengths_tokens": [1000, 2000],
    "s_kv": {"unit": "MB", "values": [10, 20], "status": "assumed", "source": "a test"},
    "t_prefill_s": {"values": [1.0, 3.0], "status": "assumed", "source": "a test"},
    "decode_step_s": {"value": 0.025, "status": "assumed", "source": "a test"},
    "decode_slots": {"value": 8, "status": "assumed", "source": "a test"},
    "pieces": {"value": 4, "status": "assumed", "source": "a test"},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes VALID with changes to a file; a None takes the key out."""

    def write_profile(changes: dict[str, Any]) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in (VALID | changes).items() if v is not None}))
        return path

    return write_profile


# The shipped profiles
def test_the_shipped_profiles_are_the_case_study_the_toy_table_3_and_what_was_measured_of_a_model() -> None:
    assert set(shipped_profiles()) == {*TIMING, *TABLE_3_GBPS, "hybrid-tiny"}


@pytest.mark.parametrize(("tokens", "mib"), [(K, 190.8), (8 * K, 308.9), (32 * K, 701.3), (128 * K, 2316.3)])
@pytest.mark.parametrize("name", ["h200-1t", "h20-1t"])
def test_kv_size_of_the_1t_model_is_table_5s_on_either_hardware(name: str, tokens: int, mib: float) -> None:
    assert load_profile(name).s_kv(tokens) == mib * MIB


@pytest.mark.parametrize(("tokens", "seconds"), [(K, 0.44), (8 * K, 0.72), (32 * K, 1.84), (128 * K, 7.40)])
def test_prefill_time_on_h200_is_table_5s(tokens: int, seconds: float) -> None:
    assert load_profile("h200-1t").t_prefill(tokens) == seconds


@pytest.mark.parametrize(("tokens", "gbps"), [(K, 3.61), (8 * K, 3.59), (32 * K, 3.19), (128 * K, 2.62)])
def test_equation_1_gives_table_5s_kv_throughput(tokens: int, gbps: float) -> None:
    assert load_profile("h200-1t").phi_kv_bps(tokens) == pytest.approx(gbps * 1e9, rel=0.01)


@pytest.mark.parametrize(("tokens", "gbps"), [(K, 1.6), (32 * K, 3.2)])
def test_the_toys_kv_throughput_is_the_walk_throughs(tokens: int, gbps: float) -> None:
    assert load_profile("toy").phi_kv_bps(tokens) == pytest.approx(gbps * 1e9, rel=1e-12)


@pytest.mark.parametrize("tokens", [K, 10_000, 32 * K])
def test_the_toys_homogeneous_prefill_is_half_as_slow_again(tokens: int) -> None:
    ratio = load_profile("toy-homogeneous").t_prefill(tokens) / load_profile("toy").t_prefill(tokens)
    assert ratio == pytest.approx(1.5)


@pytest.mark.parametrize("name", TABLE_3_GBPS)
def test_kv_throughput_of_open_models_is_table_3s(name: str) -> None:
    found = load_kv_profile(name).phi_kv_bps(np.array([K, 8 * K, 32 * K, 128 * K], dtype=float))
    assert found == pytest.approx(np.array(TABLE_3_GBPS[name]) * 1e9)


@pytest.mark.parametrize("name", TIMING)
def test_every_figure_of_a_timing_profile_says_where_it_comes_from(name: str) -> None:
    assert set(load_profile(name).provenance) == {"s_kv", "t_prefill", "decode_step_s", "decode_slots", "pieces"}


def test_the_h20_prefill_time_is_labelled_as_inferred() -> None:
    assert load_profile("h20-1t").provenance["t_prefill"].status == "inferred"


# Between, below and above the points
@pytest.mark.parametrize("name", TIMING)
@pytest.mark.parametrize("figure", ["s_kv", "t_prefill"])
@settings(deadline=None)
@given(data=st.data())
def test_kv_and_prefill_time_never_fall_with_length(name: str, figure: str, data: st.DataObject) -> None:
    curve = getattr(LOADED[name], figure)
    a, b = sorted(data.draw(st.tuples(*[st.floats(0, LOADED[name].last_tokens)] * 2)))
    assert curve(a) <= curve(b) * (1 + 1e-12)


@pytest.mark.parametrize("name", TIMING)
@settings(deadline=None)
@given(data=st.data())
def test_one_token_more_costs_about_one_token_more(name: str, data: st.DataObject) -> None:
    profile = LOADED[name]
    tokens = data.draw(st.integers(0, profile.last_tokens - 1))
    assert profile.t_prefill(tokens + 1) - profile.t_prefill(tokens) < 1e-3


@pytest.mark.parametrize("name", TIMING)
@settings(deadline=None)
@given(data=st.data())
def test_an_array_is_answered_like_its_elements(name: str, data: st.DataObject) -> None:
    profile = LOADED[name]
    tokens = data.draw(st.lists(st.floats(0, profile.last_tokens), min_size=1, max_size=5))
    assert profile.s_kv(np.array(tokens)) == pytest.approx([profile.s_kv(x) for x in tokens])


def test_below_the_first_point_the_first_segment_is_extended() -> None:
    assert load_profile("toy").t_prefill(512) == pytest.approx(0.5 - 512 * 1.5 / (31 * K))


def test_a_profile_says_below_which_length_it_is_extended() -> None:
    assert load_profile("toy").first_tokens == 1024


@pytest.mark.parametrize("tokens", [0, 1, 500])
def test_a_steep_first_segment_is_not_extended_to_nothing(tokens: int) -> None:
    assert Curve("steep", [1000, 2000], [1.0, 100.0])(tokens) > 0


def test_nothing_uncached_costs_as_much_as_one_token() -> None:
    assert load_profile("toy").t_prefill(0) == load_profile("toy").t_prefill(1)


@pytest.mark.parametrize("tokens", [32_769, np.array([5.0, 32_769.0])])
def test_above_the_last_point_the_profile_refuses_and_says_where_it_ends(tokens: float) -> None:
    with pytest.raises(ProfileError, match=r"32769 tokens: profile toy ends at 32768 tokens .* cap the workload"):
        load_profile("toy").s_kv(tokens)


@pytest.mark.parametrize("tokens", [-1, float("nan")])
def test_a_length_that_is_none_is_refused(tokens: float) -> None:
    with pytest.raises(ProfileError, match="must be a number >= 0"):
        load_profile("toy").t_prefill(tokens)


# What has only KV throughput
def test_a_profile_with_only_kv_throughput_times_no_prefill() -> None:
    with pytest.raises(ProfileError, match=r"ring-2.5-1t has only KV throughput .* choose a profile with kind: timing"):
        load_profile("ring-2.5-1t")


def test_a_profile_with_only_kv_throughput_still_shows_its_egress() -> None:
    assert isinstance(load_kv_profile("ring-2.5-1t"), KvThroughputProfile)


# Changing decode
def test_a_scenarios_decode_slots_replace_the_profiles_and_are_labelled() -> None:
    changed = load_profile("toy").with_decode(slots=3, source="toy.yaml")
    assert (changed.decode_slots, changed.provenance["decode_slots"].source) == (3, "toy.yaml")


def test_an_impossible_decode_step_is_refused() -> None:
    with pytest.raises(ProfileError, match="decode_step_s = 0: must be seconds, greater than 0"):
        load_profile("toy").with_decode(step_s=0)


def test_a_variant_takes_a_share_of_the_time_and_the_same_bytes() -> None:
    base, slower = load_profile("h20-1t"), load_profile("h20-1t@110%")
    lengths = np.array([1.0, 500.0, 1024.0, 20_000.0, 131072.0])
    assert slower.t_prefill(lengths) == pytest.approx(1.1 * base.t_prefill(lengths))
    assert slower.t_prefill(500) == pytest.approx(1.1 * base.t_prefill(500))
    assert slower.s_kv(lengths) == pytest.approx(base.s_kv(lengths))
    assert (slower.name, slower.first_tokens, slower.last_tokens) == ("h20-1t@110%", 1024, 131072)
    assert slower.provenance["t_prefill"].status == "assumed"
    assert "110 % of h20-1t" in slower.provenance["t_prefill"].source


def test_a_variant_of_a_profile_without_times_or_of_no_time_is_refused() -> None:
    with pytest.raises(ProfileError, match="neither S_kv nor T_prefill"):
        load_profile("ring-2.5-1t@110%")
    with pytest.raises(ProfileError, match="cannot be scaled by 0"):
        load_profile("h20-1t@0%")


# Files
def test_a_file_of_ones_own_is_read(write: Callable[[dict[str, Any]], Path]) -> None:
    profile = load_profile(write({}))
    assert isinstance(profile, Profile)
    assert profile.s_kv(1500) == 15e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, r"mine\.yaml: colour: unknown key"),
        ({"model": None}, r"mine\.yaml: model: missing; add it"),
        ({"kind": "other"}, r"mine\.yaml: kind: must be timing .* or kv_throughput"),
        ({"lengths_tokens": [2000, 1000]}, r"lengths_tokens = \[2000, 1000\]: must ascend"),
        ({"lengths_tokens": [1000]}, r"lengths_tokens = \[1000\]: .*at least 2 items"),
        ({"t_prefill_s": VALID["t_prefill_s"] | {"values": [3, 1]}}, r"t_prefill_s falls from 3 .* to 1 at 2000"),
        ({"t_prefill_s": VALID["t_prefill_s"] | {"values": [1]}}, r"t_prefill_s has 1 values for 2 lengths_tokens"),
        ({"t_prefill_s": VALID["t_prefill_s"] | {"values": [0, 1]}}, r"t_prefill_s\.values\.0 = 0: .*greater than 0"),
        ({"s_kv": VALID["s_kv"] | {"unit": "MBit"}}, r"s_kv\.unit = 'MBit': .*'bytes', 'MB' or 'MiB'"),
        ({"s_kv": VALID["s_kv"] | {"status": "guessed"}}, r"s_kv\.status = 'guessed'"),
        ({"decode_slots": VALID["decode_slots"] | {"value": 2.5}}, r"decode_slots\.value = 2\.5"),
    ],
)
def test_a_wrong_file_is_refused_by_file_key_and_value(
    write: Callable[[dict[str, Any]], Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(write(change))


def test_a_name_that_is_not_shipped_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ProfileError, match=r"'h200' does not exist; did you mean h200-1t\? shipped: h20-1t"):
        load_profile("h200")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read as a profile"):
        load_profile(tmp_path / "none.yaml")


@pytest.mark.parametrize(("text", "message"), [("a: [", "not YAML"), ("- 1", "must be a mapping")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        load_profile(path)
