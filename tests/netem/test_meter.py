"""How late timers are, and what of that a shaper's bucket does not make up for."""

from __future__ import annotations

import time

import pytest

from netem.meter import TICK_S, Meter, metered


def test_only_what_is_late_beyond_the_bucket_is_stolen() -> None:
    found = metered([0.001] * 98 + [0.006, 0.024], wall_s=1.0, bucket_s=0.004, cpu_busy=0.5)
    assert found.stolen == pytest.approx(0.002 + 0.020)
    assert (found.late_p50_s, found.late_p99_s, found.late_max_s) == (0.001, 0.024, 0.024)
    assert found.cpu_busy == 0.5


def test_nothing_noted_is_nothing_late() -> None:
    assert metered([], wall_s=1.0, bucket_s=0.004, cpu_busy=0.0).late_max_s == 0.0


def test_a_meter_wakes_on_its_grid_and_reads_the_cpu() -> None:
    with Meter() as meter:
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass
    found = meter.read(bucket_s=1.0)
    assert found.stolen == 0.0
    assert 0 <= found.late_p50_s <= found.late_max_s
    assert 0 < found.cpu_busy <= 1
    assert TICK_S < 0.2
