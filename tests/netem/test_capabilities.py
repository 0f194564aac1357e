"""What follows from what a kernel can do: the backends, the reasons, the remedies. Real kernels: tests/wire."""

from __future__ import annotations

import sys

import pytest

from netem.capabilities import Capability, judge, probe
from netem.link import LinkError

ALL = dict.fromkeys(("veth", "htb", "u32", "nfqueue", "realtime", "locked", "netem", "rto_max"), "")


def judged(**refused: str) -> dict[str, Capability]:
    return {one.name: one for one in judge({**ALL, **refused})}


def test_a_kernel_that_has_everything_needs_no_remedy() -> None:
    assert {name: one.backend for name, one in judged().items()} == {
        "rate": "htb",
        "delay, loss": "netem",
        "jitter, stall": "delay line (NFQUEUE)",
        "punctuality": "real-time priority",
        "after an outage": "TCP tries again within 1 s",
    }
    assert not any(one.remedy for one in judged().values())


def test_without_netem_the_delay_line_does_it_and_the_reason_is_told() -> None:
    found = judged(netem="no such kind")["delay, loss"]
    assert (found.backend, found.remedy) == ("delay line (NFQUEUE)", "")
    assert "sch_netem: no such kind" in found.why


def test_netem_without_a_queue_lacks_jitter_and_stalls() -> None:
    found = judged(nfqueue="no such target")
    assert found["delay, loss"].backend == "netem"
    assert found["jitter, stall"].backend is None
    assert "no such target" in found["jitter, stall"].why
    assert "modprobe nfnetlink_queue" in found["jitter, stall"].remedy


def test_without_either_a_link_has_a_rate_only() -> None:
    found = judged(nfqueue="no such target", netem="no such kind")
    assert found["rate"].backend == "htb"
    assert found["delay, loss"].backend is None
    assert "no such target" in found["delay, loss"].why
    assert "modprobe sch_netem, or modprobe nfnetlink_queue" in found["delay, loss"].remedy


@pytest.mark.parametrize("missing", ["veth", "htb", "u32"])
def test_without_a_rate_there_is_no_link(missing: str) -> None:
    found = judged(**{missing: "refused"})
    assert found["rate"].backend is None
    assert found["delay, loss"].backend is None
    assert found["jitter, stall"].backend is None


def test_an_ordinary_user_gets_the_delay_line_without_priority_and_is_told_why() -> None:
    found = judged(realtime="SCHED_FIFO: Operation not permitted", locked="mlockall: Cannot allocate memory")
    assert found["delay, loss"].backend is not None
    assert found["punctuality"].backend == "normal priority"
    assert "SCHED_FIFO: Operation not permitted and mlockall" in found["punctuality"].why
    assert found["punctuality"].remedy


def test_a_kernel_that_cannot_bound_tcps_tries_has_connections_made_anew() -> None:
    found = judged(rto_max="this kernel has no tcp_rto_max_ms")["after an outage"]
    assert found.backend == "stalled connections are made anew"
    assert "no tcp_rto_max_ms" in found.why
    assert "Linux 6.15" in found.remedy


def test_what_was_not_tried_is_not_there() -> None:
    without = (None, "normal priority", "stalled connections are made anew")
    assert all(one.backend in without for one in judge({}))


def test_a_prefix_that_does_not_run_is_refused_with_the_remedy() -> None:
    with pytest.raises(LinkError, match="prfaas doctor"):
        probe(["/nonexistent/unshare"])
    with pytest.raises(LinkError, match="no namespaces for you; see"):
        probe([sys.executable, "-c", "import sys; sys.exit('no namespaces for you')"])
