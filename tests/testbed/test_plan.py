"""`prfaas plan`: the walk-through's toy exactly, the paper's Table 6 closely, and Figure 5 from either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emulator.profile import ProfileError, load_kv_profile, load_profile
from testbed.figures import plot_plan
from testbed.lengths import lengths_of, mean_output_tokens
from testbed.plan import TABLE_6, Deployment, plan_deployments
from testbed.scheduler.model import LengthDistribution
from traces.request import Request

H200, H20 = load_profile("h200-1t"), load_profile("h20-1t")
TOY, TOY_SLOW = load_profile("toy"), load_profile("toy-homogeneous")


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    return plan_deployments(
        [
            Deployment("prfaas-pd", "prfaas", H200, H20, n_prfaas=4, n_local=8),
            Deployment("homogeneous-pd", "homogeneous", None, H20, n_prfaas=0, n_local=12),
            Deployment("naive-pd", "naive", H200, H20, n_prfaas=4, n_local=8),
        ],
        scenario="paper",
        lengths=LengthDistribution.log_normal(mu=9.90, sigma=1.00, low=128, high=128 * 1024),
        output_tokens=1024,
        link_bps=100e9,
        kv_profiles=[load_kv_profile("ring-2.5-1t")],
        against_paper=True,
    )


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    return plan_deployments(
        [
            Deployment("prfaas-pd", "prfaas", TOY, TOY, n_prfaas=2, n_local=3),
            Deployment("walk-through", "static", TOY, TOY, n_prfaas=2, n_local=3, threshold_tokens=8192),
            Deployment("homogeneous-pd", "homogeneous", None, TOY_SLOW, n_prfaas=0, n_local=5),
            Deployment("naive-pd", "naive", TOY, TOY, n_prfaas=2, n_local=3),
        ],
        scenario="toy",
        lengths=LengthDistribution.of_sample([1024, 32768]),
        output_tokens=100,
        link_bps=8e9,
    )


def named(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(plan for plan in result["deployments"] if plan["name"] == name)


# The walk-through
def test_toy_every_split_at_the_walk_throughs_threshold(toy: dict[str, Any]) -> None:
    grid = named(toy, "walk-through")["grid"]
    assert {(row["n_p"], row["n_d"]): row["lambda_max_rps"] for row in grid} == {
        (0, 3): 0,
        (1, 2): 2,
        (2, 1): 2,
        (3, 0): 0,
    }


@pytest.mark.parametrize("name", ["prfaas-pd", "walk-through"])
def test_toy_the_tie_goes_to_one_prefill_node(toy: dict[str, Any], name: str) -> None:
    plan = named(toy, name)
    assert (plan["n_p"], plan["n_d"], plan["lambda_max_rps"]) == (1, 2, 2.0)


def test_toy_throughputs(toy: dict[str, Any]) -> None:
    plan = named(toy, "walk-through")
    assert [plan[f"theta_{stage}_rps"] for stage in ("prfaas", "pd_p", "pd_d")] == [1.0, 2.0, 8.0]


def test_toy_kv_throughputs(toy: dict[str, Any]) -> None:
    assert [toy["phi_kv_bps"][tokens]["toy"] for tokens in ("1024", "32768")] == pytest.approx([1.6e9, 3.2e9])


def test_toy_naive_is_bound_by_remote_compute(toy: dict[str, Any]) -> None:
    plan = named(toy, "naive-pd")
    assert (plan["lambda_max_rps"], plan["theta_pd_d_rps"], plan["bottleneck"]) == (1.6, 12.0, "prfaas_prefill")


def test_toy_homogeneous_beats_prfaas(toy: dict[str, Any]) -> None:
    plan = named(toy, "homogeneous-pd")
    assert (plan["n_p"], plan["n_d"], plan["lambda_max_rps"]) == (4, 1, pytest.approx(4 / 1.875))
    assert named(toy, "prfaas-pd")["ratio"] == pytest.approx(2 / (4 / 1.875))


def test_toy_ttft_is_each_lengths_prefill_time(toy: dict[str, Any]) -> None:
    assert named(toy, "walk-through")["ttft_unloaded_s"] == {"mean": 1.25, "p90": 2.0}


# The paper
CELLS = [(kind, cell) for kind, cells in TABLE_6.items() for cell in cells if (kind, cell) != ("prfaas", "egress_bps")]


@pytest.mark.parametrize(("kind", "cell"), CELLS)
def test_paper_table_6(paper: dict[str, Any], kind: str, cell: str) -> None:
    found = paper["paper"]["deployments"][f"{kind}-pd"][cell]
    allowed = 0.04 if (kind, cell) == ("naive", "ttft_mean_s") else 0.03
    assert found["ours"] == pytest.approx(found["paper"], rel=allowed)


@pytest.mark.parametrize(
    ("name", "split"), [("prfaas-pd", (4, 3, 5)), ("homogeneous-pd", (0, 9, 3)), ("naive-pd", (4, 0, 8))]
)
def test_paper_splits(paper: dict[str, Any], name: str, split: tuple[int, int, int]) -> None:
    plan = named(paper, name)
    assert (plan["n_prfaas"], plan["n_p"], plan["n_d"]) == split


def test_paper_egress(paper: dict[str, Any]) -> None:
    assert named(paper, "prfaas-pd")["egress_bps"] == pytest.approx(13e9, rel=0.10)


def test_paper_a_long_request_is_about_44k(paper: dict[str, Any]) -> None:
    assert named(paper, "prfaas-pd")["l_long_tokens"] == pytest.approx(44 * 1024, rel=0.03)


@pytest.mark.parametrize("tokens", ["1024", "8192", "32768", "131072"])
def test_paper_table_5_kv_throughput(paper: dict[str, Any], tokens: str) -> None:
    assert abs(paper["paper"]["phi_kv_bps"][tokens]["relative_error"]) < 0.01


def test_the_relative_error_is_ours_over_the_papers(paper: dict[str, Any]) -> None:
    cell = paper["paper"]["deployments"]["prfaas-pd"]["lambda_max_rps"]
    assert cell["relative_error"] == pytest.approx(cell["ours"] / 3.24 - 1)


@pytest.mark.parametrize(("name", "change"), [("naive-pd", -0.052), ("homogeneous-pd", -0.038), ("prfaas-pd", -0.017)])
def test_expectations_are_a_few_percent_lower_than_the_papers_form(
    paper: dict[str, Any], name: str, change: float
) -> None:
    expected, mean = named(paper["expectation"], name), named(paper, name)
    assert expected["lambda_max_rps"] / mean["lambda_max_rps"] - 1 == pytest.approx(change, abs=0.002)


# What the result is
def test_the_result_is_json_without_infinities(paper: dict[str, Any]) -> None:
    assert json.loads(json.dumps(paper, allow_nan=False))["scenario"] == "paper"


def test_what_does_not_exist_is_null(paper: dict[str, Any]) -> None:
    plan = named(paper, "homogeneous-pd")
    assert (plan["threshold_tokens"], plan["theta_prfaas_rps"], plan["l_long_tokens"]) == (None, None, None)


def test_the_grid_holds_every_split(paper: dict[str, Any]) -> None:
    assert [row["n_p"] for row in named(paper, "prfaas-pd")["grid"]] == list(range(9))


def test_a_fixed_split_is_the_only_one_tried() -> None:
    fixed = Deployment("fixed", "prfaas", H200, H20, n_prfaas=4, n_local=8, n_p=5)
    plan = named(_plan(fixed), "fixed")
    assert [row["n_p"] for row in plan["grid"]] == [5]


def test_kv_throughput_covers_profiles_that_time_nothing(paper: dict[str, Any]) -> None:
    assert paper["phi_kv_bps"]["32768"]["ring-2.5-1t"] == pytest.approx(2.59e9)


def test_inferred_figures_are_labelled(paper: dict[str, Any]) -> None:
    assert paper["provenance"]["h20-1t"]["t_prefill"]["status"] == "inferred"


def test_lengths_below_the_profiles_first_point_are_counted(paper: dict[str, Any]) -> None:
    assert paper["lengths"]["extended_fraction"]["h200-1t"] == pytest.approx(0.0015, abs=0.0001)


def test_without_a_homogeneous_deployment_there_is_no_ratio() -> None:
    assert named(_plan(Deployment("only", "naive", H200, H20, 4, 8)), "only")["ratio"] is None


def test_only_the_papers_scenario_is_set_beside_the_paper(toy: dict[str, Any]) -> None:
    assert "paper" not in toy


def test_lengths_beyond_a_profile_are_refused() -> None:
    with pytest.raises(ProfileError, match="200000 tokens: profile h200-1t ends at 131072"):
        _plan(Deployment("d", "prfaas", H200, H20, 4, 8), LengthDistribution.of_sample([1000] * 99 + [200_000]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("d", "static", H200, H20, 4, 8), "needs a threshold"),
        (("d", "prfaas", H200, H20, 4, 8, 9), r"n_p = 9: must be 0 \.\. 8"),
        (("d", "prfaas", None, H20, 4, 8), "4 remote instances without a profile"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deployment(*arguments)


def test_a_traces_lengths_and_outputs_are_taken_as_they_are() -> None:
    requests = [Request(0.0, 100, 10), Request(1.0, 300, 30)]
    assert (lengths_of(requests).mean, mean_output_tokens(requests)) == (200, 20)


# Figure 5
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_figure_5_is_drawn_in_the_format_of_its_name(
    paper: dict[str, Any], tmp_path: Path, suffix: str, magic: bytes
) -> None:
    plot_plan(paper, tmp_path / f"figure{suffix}")
    assert (tmp_path / f"figure{suffix}").read_bytes().startswith(magic)


def test_another_format_is_refused(paper: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"figure\.gif: a figure ends in \.png, \.svg, \.pdf"):
        plot_plan(paper, tmp_path / "figure.gif")


def test_a_deployment_with_one_route_has_no_figure(paper: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"naive-pd does not route both ways .* deployments that do: prfaas-pd"):
        plot_plan(paper, tmp_path / "figure.png", "naive-pd")


def test_figure_5_left_peaks_at_the_split(paper: dict[str, Any]) -> None:
    plan = named(paper, "prfaas-pd")
    rates = [row["lambda_max_rps"] for row in plan["sweep_split"]]
    assert rates.index(max(rates)) == plan["n_p"]


def test_figure_5_right_peaks_at_the_threshold(paper: dict[str, Any]) -> None:
    plan = named(paper, "prfaas-pd")
    sweep = plan["sweep_threshold"]
    peak = sweep["threshold_tokens"][sweep["lambda_max_rps"].index(max(sweep["lambda_max_rps"]))]
    assert peak == pytest.approx(plan["threshold_tokens"], abs=250)


def test_a_plan_without_a_figure_does_not_load_matplotlib() -> None:
    code = "import sys, testbed.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _plan(deployment: Deployment, lengths: LengthDistribution | None = None) -> dict[str, Any]:
    lengths = lengths or LengthDistribution.of_sample([1000, 20_000, 60_000])
    return plan_deployments([deployment], scenario="s", lengths=lengths, output_tokens=1024, link_bps=100e9)
