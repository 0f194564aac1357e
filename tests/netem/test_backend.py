"""Which of netem and the delay line delays: what a kernel has, what was asked, what a state needs. Pure."""

from __future__ import annotations

import pytest

from netem.backend import Asked, Delays, choose
from netem.link import LinkError, LinkState

HAS: dict[str, dict[str, str]] = {
    "both": {"netem": "", "nfqueue": ""},
    "netem": {"netem": "", "nfqueue": "no such target"},
    "line": {"netem": "no such kind", "nfqueue": ""},
    "neither": {"netem": "no such kind", "nfqueue": "no such target"},
}
FAR = LinkState(1e8, delay_s=0.01, loss=0.001)


def delays(kernel: str, asked: Asked = "auto") -> Delays:
    return Delays(choose(HAS[kernel], asked))


@pytest.mark.parametrize(
    ("kernel", "asked", "delay", "line"),
    [
        ("both", "auto", "netem", True),
        ("netem", "auto", "netem", False),
        ("line", "auto", "nfqueue", True),
        ("neither", "auto", None, False),
        ("both", "netem", "netem", True),
        ("both", "nfqueue", "nfqueue", True),
    ],
)
def test_netem_comes_first_and_either_can_be_asked_for(
    kernel: str, asked: Asked, delay: str | None, line: bool
) -> None:
    backend = choose(HAS[kernel], asked)
    assert (backend.delay, backend.line) == (delay, line)
    assert backend.why


@pytest.mark.parametrize(
    ("kernel", "asked", "why"), [("line", "netem", "no such kind"), ("netem", "nfqueue", "target")]
)
def test_what_is_asked_for_and_not_there_is_refused_with_the_module(kernel: str, asked: Asked, why: str) -> None:
    with pytest.raises(LinkError, match=f"delay_by: .*{why}.*modprobe"):
        choose(HAS[kernel], asked)


def test_a_backend_nobody_knows_is_refused() -> None:
    with pytest.raises(LinkError, match="use auto, netem, nfqueue"):
        choose(HAS["both"], "tbf")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["delay_s", "loss"])
def test_a_kernel_with_neither_refuses_delay_and_loss_and_names_the_modules(field: str) -> None:
    state = LinkState(1e8, **{field: 0.01})  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="modprobe sch_netem, or modprobe nfnetlink_queue") as refused:
        delays("neither").check({"to_pd": state})
    assert refused.value.field == f"to_pd.{field}"
    assert not delays("neither").describe()["delay"]


def test_a_rate_alone_needs_neither() -> None:
    delays("neither").check({"to_pd": LinkState(1e8), "to_prfaas": LinkState(1e6)})


@pytest.mark.parametrize(
    ("state", "field"),
    [(LinkState(1e8, delay_s=0.01, jitter_s=0.001), "jitter_s"), (LinkState(1e8, outage="stall"), "outage")],
)
def test_netem_alone_refuses_what_it_would_reorder_or_cannot_hold(state: LinkState, field: str) -> None:
    with pytest.raises(LinkError, match="nfnetlink_queue") as refused:
        delays("netem").check({"to_prfaas": state})
    assert refused.value.field == f"to_prfaas.{field}"
    for outage in ("blackhole", "down"):
        delays("netem").check({"to_pd": LinkState(1e8, outage=outage)})


def test_only_one_of_them_delays() -> None:
    """chaos-mesh#3399: a delay that was applied twice."""
    by_netem = delays("both").of_line(FAR, line_has_all=False)
    assert (by_netem.delay_s, by_netem.loss, by_netem.does_something) == (0.0, 0.0, False)
    assert delays("line").of_line(FAR, line_has_all=True).delay_s == 0.01


def test_a_stall_is_the_lines_and_leaves_the_delay_to_netem() -> None:
    made = delays("both")
    stalled = LinkState(1e8, delay_s=0.01, outage="stall")
    line_has_all = made.check({"to_pd": stalled})
    asked = made.of_line(stalled, line_has_all)
    assert (line_has_all, asked.stalled, asked.delay_s) == (False, True, 0.0)


def test_jitter_in_one_direction_gives_all_delay_to_the_line_for_good() -> None:
    made = delays("both")
    assert not made.check({"to_pd": FAR, "to_prfaas": FAR})
    assert made.check({"to_pd": LinkState(1e8, delay_s=0.01, jitter_s=0.001), "to_prfaas": FAR})
    made.line_has_all = True
    assert made.check({"to_pd": FAR, "to_prfaas": FAR})
    assert made.describe()["delay"] == "nfqueue"


def test_netem_loses_no_super_packets_and_delays_them() -> None:
    of_super_packets = Delays(choose(HAS["both"]), single=False)
    assert not of_super_packets.check({"to_pd": LinkState(1e8, delay_s=0.01)})
    with pytest.raises(LinkError, match="single_packets, or take delay_by: nfqueue") as refused:
        of_super_packets.check({"to_pd": FAR})
    assert refused.value.field == "to_pd.loss"
    jittered = LinkState(1e8, delay_s=0.01, jitter_s=0.001, loss=0.001)  # the delay line's, and it cuts by itself
    assert of_super_packets.check({"to_pd": jittered})
