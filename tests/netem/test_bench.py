"""A link of one's own, as far as it can be told without one; real: tests/wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netem.bench import Bench
from netem.link import LinkError
from netem.segments import are_single


@pytest.mark.parametrize(
    "ask", [lambda bench: bench.put({"rate_bps": 1e8}), lambda bench: bench.playing(1, []).__enter__()]
)
def test_an_agent_that_is_gone_is_told_in_words(tmp_path: Path, ask: Callable[[Bench], object]) -> None:
    topology: Any = None
    with pytest.raises(LinkError, match="agent does not answer"):
        ask(Bench(topology, tmp_path))


def test_an_interface_that_is_not_there_is_told_by_its_name() -> None:
    with pytest.raises(LinkError, match="interface w-nobody: not in this network namespace"):
        are_single(["w-nobody"])
