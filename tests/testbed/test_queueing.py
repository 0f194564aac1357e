"""The instances' waits are those of queueing theory: M/D/1 before prefill, M/M/c (Erlang C) before decode slots.

At 50 and 80 % of load, on the machines themselves; 90 % is in `python -m tests.bench.simulate --queueing`. Theory must
be inside a 99 % interval over replications whose half-width is below 3 %: a correct machine fails one seed in a
hundred, so seeds are fixed.
"""

from __future__ import annotations

import pytest

from testbed.simulate import simulate
from tests.bench.queueing import md1, md1_wait_s, mmc, mmc_wait_s


def test_the_formulas_are_the_textbooks() -> None:
    assert md1_wait_s(0.5, 1.0) == pytest.approx(0.5)
    assert mmc_wait_s(0.8, 1.0, 1) == pytest.approx(4.0)  # M/M/1: rho / (1 - rho)
    assert mmc_wait_s(0.5, 1.0, 2) == pytest.approx(1 / 3)  # C(2, 1) = 1/3
    assert mmc_wait_s(0.75, 1.0, 4) == pytest.approx(0.50943, abs=1e-5)  # C(4, 3) = 0.50943


@pytest.mark.parametrize(("load", "count"), [(0.5, 10_000), (0.8, 25_000)])
def test_a_prefill_instance_is_an_md1_queue(load: float, count: int) -> None:
    wait = md1(load, runs=20, count=count, seed=1)
    assert wait.agrees, wait


@pytest.mark.parametrize(("load", "servers", "count"), [(0.5, 2, 40_000), (0.8, 2, 75_000)])
def test_a_decode_instance_is_an_mmc_queue(load: float, servers: int, count: int) -> None:
    wait = mmc(load, servers, runs=20, count=count, seed=1)
    assert wait.agrees, wait


def test_the_whole_of_virtual_time_waits_as_its_prefill_instance_does() -> None:
    """One local prefill instance among the driver, control and policy, at 50 %: M/D/1 within 5 % in one long run."""
    sets = [
        "deployments.homogeneous.fleet={n_p: 1, n_d: 4}",
        "workload.lengths={kind: mix, values: [1024], weights: [1]}",
        "workload.rate_rps=0.666666667",  # T_prefill(1K) = 0.75 s
        "workload.load_fraction=null",
        "workload.duration_s=30000",
        "workload.warmup_s=100",
    ]
    summary = simulate("toy", deployment="homogeneous", sets=sets).summary
    wait_s = summary["ttft_split_s"]["overall"]["queue"]["mean"]
    assert wait_s == pytest.approx(md1_wait_s(0.5, 0.75), rel=0.05)
