"""The link goes away under load and comes back: nothing is lost, nothing is left, and connections are what was said.

How soon KV flows again is measured by `python -m tests.wire.outages`, on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator.outages import RTO_MAX_MS
from testbed.launch import client, namespaces
from testbed.load import Testbed
from tests.wire.outages import KINDS, Case, outage, with_testbed

REFUSAL = namespaces.refusal()
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

needs_bound = pytest.mark.skipif(not RTO_MAX_MS.exists(), reason="needs Linux 6.15: TCP's tries cannot be bounded")


@pytest.fixture(scope="module")
def bounded() -> Iterator[Testbed]:
    with with_testbed(bounded=True) as bed:
        yield bed


@pytest.fixture(scope="module")
def unbounded(bounded: Testbed) -> Iterator[Testbed]:
    with with_testbed(bounded=False) as bed:
        yield bed


def told(bed: Testbed, site: str) -> str:
    """What the namespace of a site has for the longest time between two tries, ms."""
    command = {"site": site, "argv": ["cat", str(RTO_MAX_MS)], "timeout_s": 10}
    answer: str = client.supervisor(bed.state).post("/run", command)["stdout"]
    return answer.strip()


def until(holds: Callable[[], object], otherwise: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s, otherwise()
        time.sleep(0.05)


def node(bed: Testbed, name: str) -> dict[str, Any]:
    """What the gateway says of a worker."""
    found: dict[str, Any] = next(one for one in bed.call("GET", "/prfaas/status")["nodes"] if one["name"] == name)
    return found


def kill(bed: Testbed, name: str) -> None:
    supervisor = client.supervisor(bed.state)
    supervisor.post("/signal", {"name": name, "signal": "KILL"})

    def state() -> str:
        return next(one["state"] for one in supervisor.get("/status")["processes"] if one["name"] == name)

    until(lambda: state() == "dead", state)


def restart(bed: Testbed, name: str) -> None:
    client.supervisor(bed.state, timeout_s=60).post("/restart", {"name": name})


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


@needs_bound
def test_no_queue_of_old_accounts_keeps_back_the_first_that_is_fresh(bounded: Testbed) -> None:
    found = outage(bounded, Case("blackhole", 4.0))  # in which two nodes would give 80
    assert found.problems == []
    assert found.stale < 40


def test_a_worker_that_dies_in_an_outage_is_missed_afterwards_and_taken_back(bounded: Testbed) -> None:
    """Nothing tells of its death while the link is away, and nothing is being sent to it when the link is back."""
    link = client.agent(bounded.state)
    link.put("/link", {"outage": "blackhole"})
    try:
        kill(bounded, "prfaas-0")
    finally:
        link.put("/link", {"outage": None})
    until(lambda: not node(bounded, "prfaas-0")["alive"], lambda: node(bounded, "prfaas-0"))
    restart(bounded, "prfaas-0")
    until(lambda: node(bounded, "prfaas-0")["alive"], lambda: node(bounded, "prfaas-0"))
    found = outage(bounded, Case("blackhole", 0.5))
    assert found.problems == []


def test_an_agent_is_started_again_and_finds_the_link_as_it_was(bounded: Testbed) -> None:
    link = client.agent(bounded.state)
    before = link.get("/link")
    kill(bounded, "agent")
    restart(bounded, "agent")
    after = link.get("/link")
    for direction, was in before.items():
        assert after[direction]["kept"] == was["kept"]
        assert after[direction]["asked"] == was["asked"]
        assert after[direction]["counters"]["delay_line"]["pid"] == was["counters"]["delay_line"]["pid"]
    assert outage(bounded, Case("blackhole", 0.5)).problems == []


def test_without_a_bound_stalled_connections_break_and_are_made_anew(unbounded: Testbed) -> None:
    found = outage(unbounded, Case("blackhole", 5.0))
    assert found.problems == []
    assert found.reconnected > 0
    assert found.again_s < 10
