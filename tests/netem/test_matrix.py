"""What the counters of both directions make of a cell; measured on a real link: tests/wire."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from netem import matrix
from netem.cells import STEPS_BPS, Cell, Found, judge
from netem.link import LinkError
from netem.matrix import _schedule, _step, _with_counters
from netem.probe import Traffic

RTT = Cell("rtt", 100e6, delay_s=0.015)
LINE = {"down": False, "deaths": 1, "overflowed": 0}
DEAD = {"down": True, "deaths": 2, "outage_s": 0.0}
"""All that the agent tells of a line that does not answer."""


def counted(line: dict[str, Any] | None, drops: int = 0) -> dict[str, Any]:
    one = {"drops": drops}
    return {way: {"kv": one, "control": one, "direct_packets": 0, "delay_line": line} for way in ("to_pd", "to_prfaas")}


def test_what_a_delay_line_had_no_room_for_was_not_to_be_lost() -> None:
    found = _with_counters(RTT, Found(), counted(LINE), counted({**LINE, "overflowed": 2}, drops=1), by_netem=False)
    assert (found.drops, found.failure) == (8, None)


def test_a_link_without_a_delay_line_has_none_to_die() -> None:
    assert _with_counters(RTT, Found(), counted(None), counted(None), by_netem=True).failure is None


@pytest.mark.parametrize(
    ("before", "after"), [(LINE, DEAD), (LINE, {**LINE, "deaths": 2}), (DEAD, {**LINE, "deaths": 2})]
)
def test_a_cell_in_which_the_delay_line_died_does_not_hold(before: dict[str, Any], after: dict[str, Any]) -> None:
    found = _with_counters(RTT, Found(rtt_p50_s=0.03), counted(before), counted(after), by_netem=False)
    assert "the delay line died" in judge(RTT, found)[0]


def test_a_schedule_whose_connection_got_nothing_is_told() -> None:
    class Silent:
        playing = staticmethod(lambda t0_ns, steps: nullcontext([]))
        call = staticmethod(lambda *_: Traffic("cubic", 0, [[]]))

    bench: Any = Silent()
    found = _schedule(bench, Cell("schedule", 200e6, "to_pd", seconds=3.0))
    assert found.failure == "the connection did not survive the schedule"


def test_a_step_that_is_refused_is_told_and_not_one_that_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(state: dict[str, Any]) -> Any:
        raise LinkError("the agent is gone")

    class Refusing:
        put = staticmethod(refuse)
        call = staticmethod(lambda *_: Traffic("cubic", 0, [[]]))

    monkeypatch.setattr(matrix, "_STEP_AT_S", (0.0, 0.0))
    bench: Any = Refusing()
    found = _step(bench, Cell("step", 100e6, "to_pd", seconds=0.1))
    assert found.failure == f"the step up to {STEPS_BPS[1]:g} bits/s could not be had: the agent is gone"
