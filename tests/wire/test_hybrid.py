"""Disaggregated equals monolithic, token by token, on a lossy, delayed link: a part of what `hybrid_exact` measures."""

from __future__ import annotations

import sys

import pytest

from testbed.launch import namespaces
from tests.wire.hybrid_exact import check, exact

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]


def test_tokens_are_those_of_the_model_alone_whatever_goes_on() -> None:
    check(exact(40, seed=7))
