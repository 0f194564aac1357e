"""How late timers are, and what of that a shaper's bucket does not make up for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from netem.meter import TICK_S, Meter, metered, own_limits, shares


def test_only_what_is_late_beyond_the_bucket_is_stolen() -> None:
    found = metered([0.001] * 98 + [0.006, 0.024], wall_s=1.0, bucket_s=0.004, cpu_busy=0.5, taken=0.1)
    assert found.stolen == pytest.approx(0.002 + 0.020)
    assert (found.late_p50_s, found.late_p99_s, found.late_max_s) == (0.001, 0.024, 0.024)
    assert (found.cpu_busy, found.taken) == (0.5, 0.1)


def test_nothing_noted_is_nothing_late() -> None:
    assert metered([], wall_s=1.0, bucket_s=0.004, cpu_busy=0.0, taken=0.0).late_max_s == 0.0


def test_a_meter_wakes_on_its_grid_and_reads_the_cpu() -> None:
    with Meter() as meter:
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            pass
    found = meter.read(bucket_s=1.0)
    assert found.stolen == 0.0
    assert 0 <= found.late_p50_s <= found.late_max_s
    assert 0 < found.cpu_busy <= 1
    assert 0 <= found.taken < 1
    assert TICK_S < 0.2


class TestAContainersOwnLimit:
    """Control groups as files; the outermost that bounds the process counts like the innermost."""

    def group(self, folder: Path, cpu_max: str, used_us: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(cpu_max)
        (folder / "cpu.stat").write_text(f"usage_usec {used_us}\nuser_usec 1\n")

    def of(self, top: Path, line: str) -> dict[Path, tuple[float, float]]:
        (top / "self").write_text(line)
        return own_limits(top / "self", top / "fs")

    def test_is_found_around_the_process(self, tmp_path: Path) -> None:
        pod, container = tmp_path / "fs/pod", tmp_path / "fs/pod/one"
        self.group(pod, "200000 100000", 5_000_000)
        self.group(container, "50000 100000", 1_000_000)
        self.group(tmp_path / "fs/other", "1000 100000", 1)
        assert self.of(tmp_path, "0::/pod/one\n") == {pod: (5.0, 2.0), container: (1.0, 0.5)}

    @pytest.mark.parametrize("line", ["0::/\n", "0::/gone\n", "1:cpu:/old\n", "", "0::/../../etc\n"])
    def test_nothing_bounds_it(self, tmp_path: Path, line: str) -> None:
        self.group(tmp_path / "fs", "max 100000", 9)
        assert self.of(tmp_path, line) == {}

    def test_its_share_is_of_what_it_may_have(self) -> None:
        pod, container = Path("pod"), Path("pod/one")
        before = {pod: (5.0, 2.0), container: (1.0, 0.5)}
        after = {pod: (7.0, 2.0), container: (2.0, 0.5), Path("new"): (1.0, 1.0)}
        assert shares(before, after, wall_s=2.0) == [0.5, 1.0]
