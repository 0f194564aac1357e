"""The link goes away under load and comes back: nothing is lost, nothing is left, and connections are what was said.

How soon KV flows again is measured by `python -m tests.wire.outages`, on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.outages import RTO_MAX_MS
from testbed.launch import client, namespaces
from testbed.load import Testbed
from tests.wire.outages import KINDS, Case, outage, testbed_up

REFUSAL = namespaces.refusal()
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

needs_bound = pytest.mark.skipif(not RTO_MAX_MS.exists(), reason="needs Linux 6.15: TCP's tries cannot be bounded")


@pytest.fixture(scope="module")
def bounded() -> Iterator[Testbed]:
    with testbed_up(bounded=True) as bed:
        yield bed


@pytest.fixture(scope="module")
def unbounded(bounded: Testbed) -> Iterator[Testbed]:
    with testbed_up(bounded=False) as bed:
        yield bed


def told(bed: Testbed, site: str) -> str:
    """What the namespace of a site has for the longest time between two tries, ms."""
    command = {"site": site, "argv": ["cat", str(RTO_MAX_MS)], "timeout_s": 10}
    answer: str = client.supervisor(bed.state).post("/run", command)["stdout"]
    return answer.strip()


@needs_bound
def test_tries_are_bounded_in_the_sites_and_the_host_keeps_its_own(bounded: Testbed) -> None:
    assert [told(bounded, site) for site in ("prfaas", "pd")] == ["1000", "1000"]
    assert client.supervisor(bounded.state).get("/status")["topology"]["tcp_rto_max_s"] == 1.0
    assert int(Path(RTO_MAX_MS).read_text()) != 1000


@needs_bound
@pytest.mark.parametrize("kind", KINDS)
def test_connections_live_through_an_outage_and_nothing_is_lost_or_left(bounded: Testbed, kind: str) -> None:
    found = outage(bounded, Case(kind, 1.0))
    assert found.problems == []
    assert found.reconnected == 0
    assert found.again_s < 10


def test_without_a_bound_stalled_connections_break_and_are_made_anew(unbounded: Testbed) -> None:
    found = outage(unbounded, Case("blackhole", 5.0))
    assert found.problems == []
    assert found.reconnected > 0
    assert found.again_s < 10
