"""The real model in containers, whose image has PyTorch's build for CPUs: the same tokens as the model by itself."""

from __future__ import annotations

import os

import pytest

from testbed.launch import engine as engines
from testbed.launch.launchers import COMPOSE
from tests.docker.conftest import holds
from tests.wire.hybrid_exact import check, exact

WHEELS = os.environ.get("TORCH_WHEELS")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not WHEELS, reason="TORCH_WHEELS names no folder with PyTorch's wheel for CPUs"),
]


def test_tokens_are_those_of_the_model_alone_and_nothing_is_left() -> None:
    engine = engines.connect()
    before = holds(engine)
    check(exact(40, seed=7, launcher=COMPOSE))
    assert holds(engine) == before
