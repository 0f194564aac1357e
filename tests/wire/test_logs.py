"""What real processes log of a request: its milestones wherever it goes, by its id, and nothing per token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.logs import Event, Reader, Wanted, find
from testbed.scenario import load
from tests.wire.loopback import Loopback, Stream, until

SCALE = ["scale.time_scale=10", "scale.byte_scale=0.001"]
LONG = 32768  # goes to the PrfaaS site: the toy's threshold is 8192
ODD = 'r 1 level=error "x"'  # a name that a client may give


@pytest.fixture(scope="module")
def fleet() -> Iterator[Loopback]:
    """A testbed at the default level."""
    with Loopback(load("toy", SCALE).only("prfaas-pd")) as running:
        yield running


def ask(fleet: Loopback, request_id: str, tokens: int) -> None:
    body = {"model": "prfaas", "prfaas": {"input_tokens": LONG}, "max_tokens": tokens}
    status, _, answer = fleet.call("POST", "/v1/completions", body, {"X-Request-Id": request_id})
    assert status == 200, answer


def logged(fleet: Loopback, request_id: str | None, level: str = "debug") -> list[Event]:
    """The events of one request, of all processes, in the order of time."""
    wanted = Wanted(level, request_id)
    return [event for event in Reader(find(fleet.root / "state" / "logs")).more() if wanted(event)]


def milestones(fleet: Loopback, request_id: str, count: int) -> list[Event]:
    """They are written as they happen, each process by itself."""
    until(lambda: len(logged(fleet, request_id)) >= count, lambda: text(fleet, request_id))
    return logged(fleet, request_id)


def text(fleet: Loopback, request_id: str | None) -> str:
    return "\n".join(event.text() for event in logged(fleet, request_id))


@pytest.mark.parametrize("request_id", ["followed", ODD])
def test_a_request_is_followed_by_its_id_through_every_process(fleet: Loopback, request_id: str) -> None:
    ask(fleet, request_id, 8)
    events = {event.fields["event"]: event.fields for event in milestones(fleet, request_id, 6)}
    assert set(events) == {"routed", "prefilled", "sent", "admitted", "finished", "ended"}
    routed = events["routed"]
    assert (routed["process"], routed["reason"], routed["input_tokens"]) == ("gateway", "longer than t", str(LONG))
    assert events["prefilled"]["process"] == events["sent"]["process"] == routed["prefill"]
    assert routed["prefill"].startswith("prfaas-")
    assert events["admitted"]["process"] == events["finished"]["process"] == events["sent"]["to"] == routed["decode"]
    assert events["ended"]["process"] == "gateway"
    assert events["ended"]["status"] == "ok"
    assert {one["attempt"] for one in events.values()} == {"1"}


def test_the_milestones_stamps_are_in_order_and_its_bytes_are_those_sent(fleet: Loopback) -> None:
    ask(fleet, "stamped", 8)
    events = {event.fields["event"]: event.fields for event in milestones(fleet, "stamped", 6)}
    stamps = [("routed", "t_s"), ("prefilled", "start_s"), ("prefilled", "end_s"), ("admitted", "landed_s")]
    stamps += [("admitted", "admitted_s"), ("finished", "finished_s")]
    times = [float(events[event][stamp]) for event, stamp in stamps]
    assert times == sorted(times)
    scale = fleet.scenario.scale.byte_scale
    assert int(events["sent"]["wire_bytes"]) == pytest.approx(int(events["prefilled"]["kv_bytes"]) * scale, abs=1)


def test_a_longer_answer_has_no_more_lines(fleet: Loopback) -> None:
    ask(fleet, "brief", 2)
    ask(fleet, "lengthy", 400)
    assert len(milestones(fleet, "lengthy", 6)) == len(milestones(fleet, "brief", 6)) == 6


def test_a_client_that_leaves_is_told_with_what_became_of_it(fleet: Loopback) -> None:
    body = {"model": "prfaas", "prfaas": {"input_tokens": LONG}, "max_tokens": 4000}
    stream = Stream(fleet, body, **{"X-Request-Id": "left"})
    next(stream.events())
    stream.close()
    fleet.wait_idle()
    ended = milestones(fleet, "left", 5)[-1].fields
    assert (ended["event"], ended["status"], ended["error"]) == ("ended", "aborted", "client_gone")


def test_a_lost_worker_is_told_by_the_gateway_and_its_requests_go_on_elsewhere(fleet: Loopback) -> None:
    fleet.kill("prfaas-0")
    until(
        lambda: any(event.fields["event"] == "node lost" for event in logged(fleet, None, "warning")),
        lambda: fleet.log("gateway"),
    )
    lost = next(event for event in logged(fleet, None, "warning") if event.fields["event"] == "node lost")
    assert (lost.fields["process"], lost.fields["node"]) == ("gateway", "prfaas-0")
    fleet.revive("prfaas-0")
    events = [event.fields for event in logged(fleet, None)]
    assert any(one["event"] == "node changed" and one["after"] == "lost" for one in events)


def test_no_line_is_none(fleet: Loopback) -> None:
    """Whatever the tests before this one did."""
    for path in (fleet.root / "state" / "logs").glob("*.log"):
        for line in path.read_text().splitlines():
            assert Event.parse(line), f"{path.name}: {line}"


def test_at_debug_every_message_of_a_request_is_told_but_tokens() -> None:
    with Loopback(load("toy", ["log_level=debug", *SCALE]).only("prfaas-pd")) as fleet:
        ask(fleet, "close", 50)
        until(
            lambda: any(one.fields["event"] == "Received" and "by" in one.fields for one in logged(fleet, "close")),
            lambda: text(fleet, "close"),
        )
        told = [one.fields["event"] for one in logged(fleet, "close")]
    assert {"Prefill", "Announce", "Grant", "Transmit", "Received"} <= set(told)
    assert "Tokens" not in told
    assert len(told) < 25


def test_at_warning_a_request_that_goes_well_is_not_told() -> None:
    with Loopback(load("toy", ["log_level=warning", *SCALE]).only("prfaas-pd")) as fleet:
        ask(fleet, "well", 2)
        assert logged(fleet, None) == []
