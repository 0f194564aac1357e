"""What the reports are made of in tests: the example of a result, whose `link-drop` has the folders of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.gate.result import GateResult
from testbed.simulate import simulate, write
from tests.gate.test_result import example

DROP = ["phases.0.duration_s=60", "phases.1.duration_s=60", "phases.2.duration_s=60", "workload.warmup_s=0"]


@pytest.fixture(scope="session")
def result() -> GateResult:
    """Worse in three of seven objectives; one scenario has a load curve, and only `link-drop` has runs to draw."""
    return example()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gate's folder: `link-drop/baseline` under prfaas, `link-drop/candidate` under static, the same requests."""
    top = tmp_path_factory.mktemp("gate")
    for arm, policy in (("baseline", "prfaas"), ("candidate", "static")):
        write(simulate("link-drop", policy=policy, sets=DROP), top / "link-drop" / arm)
    return top
