"""What must hold of the link, as data: one `Cell` is one thing asked and measured, `judge` says what is wrong with what
was found, `spoilt` why the machine was too busy to say. Pure; `matrix.py` measures.

The bounds are the project's: goodput within 2 % of what TCP can get, no more than rate and bucket in the first second,
round trips within 0.5 ms + 5 %, losses within the exact binomial interval, nothing lost or overtaken by delay alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from netem.binomial import interval
from netem.link import DIRECTIONS, burst_bytes, expected_goodput_bps, queue_bytes
from netem.schedule import Schedule, from_data

KINDS: Final = ("goodput", "rtt", "jitter", "loss", "far", "step", "schedule", "bdp")
"""bdp (a high rate far away, which buffers must hold) only when it is asked for by name."""

GOODPUT_TOLERANCE: Final = 0.02
SCHEDULE_TOLERANCE: Final = 0.05
STEP_TOLERANCE: Final = 0.05
STEP_BOUND_S: Final = 0.5
RTT_SLACK_S, RTT_TOLERANCE = 0.0005, 0.05
STOLEN_BOUND: Final = GOODPUT_TOLERANCE / 2
CPU_BOUND: Final = 0.97
TAKEN_BOUND: Final = 0.01
LATE_BOUND_S: Final = 0.0005
"""Of a timer's median lateness, where round trips are judged."""

RATES_BPS: Final = (20e6, 100e6, 500e6, 1e9, 2e9)
RTTS_S: Final = (0.005, 0.030, 0.080)
LOSSES: Final = (0.001, 0.01)
STEPS_BPS: Final = (100e6, 500e6)
STEP_S: Final = 0.05
SETTLED_S: Final = 1.0
_TRIPS = 120  # a measurement lasts that many round trips longer, for slow start and what it lost
_SUPER_PACKET_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing asked of the link and what is sent over it. Wall units; both directions get the same rate and delay.

    `direction`: of the traffic, and of the loss; None: both are measured. `delay_s`, `jitter_s`: one way. `seconds` of
    TCP, `packets` of a train at `packets_per_s`. `seed`: of a schedule.
    """

    kind: str
    rate_bps: float
    direction: str | None = None
    connections: int = 1
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    packets: int = 0
    packets_per_s: float = 10_000.0
    seed: int = 1

    @property
    def name(self) -> str:
        parts = [self.kind, f"{self.rate_bps / 1e6:g} Mbit/s"]
        if self.kind in ("rtt", "jitter", "far", "bdp"):
            parts.append(f"{2e3 * self.delay_s:g} ms" + (f" +- {2e3 * self.jitter_s:g}" if self.jitter_s else ""))
        if self.loss:
            parts.append(f"{self.loss:.1%}")
        if self.direction:
            parts.append(self.direction)
        if self.kind in ("goodput", "far", "bdp"):
            parts.append(f"x{self.connections}")
        return " ".join(parts)

    @property
    def rtt_s(self) -> float:
        return 2 * self.delay_s

    @property
    def full_rtt_s(self) -> float:
        """What a round trip takes while the shaper's queue is full, as TCP's slow start leaves it."""
        return self.rtt_s + queue_bytes(self.rate_bps, self.delay_s) * 8 / self.rate_bps

    @property
    def schedule(self) -> Schedule:
        """Of a schedule's cell: a mean with noise and dips, a step every 50 ms."""
        course = {"kind": "stationary", "mean_bps": self.rate_bps, "cv": 0.15, "step_s": STEP_S, "correlation_s": 0.5}
        dips = {"dip_every_s": 10.0, "dip_depth": 0.6, "dip_s": 1.0}
        made = from_data({**course, **dips, "seed": self.seed})
        assert isinstance(made, Schedule)
        return made

    @property
    def steps(self) -> list[tuple[float, float]]:
        """(s, bits/s) of the schedule, none sooner than 50 ms after the one before."""
        return self.schedule.steps(0.0, self.seconds, STEP_S)

    @property
    def bucket_s(self) -> float:
        """How long the shaper's bucket makes up for a late timer."""
        return burst_bytes(self.rate_bps) * 8 / self.rate_bps


LEAST_BITS: Final = 300e6
"""Of a goodput cell in the full matrix: a receiver reads up to 64 kB at once, 0.5 Mbit that 80 Mbit would show; and at
20 Mbit/s a full queue is 0.13 s, so that what slow start lost takes seconds to be made good."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How long things take: `seconds` of a goodput cell at least, `schedule_s` of a schedule, `packets` of a train."""

    seconds: float = 4.0
    schedule_s: float = 60.0
    packets: int = 40_000
    packets_per_s: float = 10_000.0
    seed: int = 1


def full(settings: Settings, most_bps: float = RATES_BPS[-1]) -> Iterator[Cell]:
    """Every cell of the project's bars up to a rate, and those of `bdp`."""
    train = _train(settings)
    for rate_bps in (rate for rate in RATES_BPS if rate <= most_bps):
        for direction in DIRECTIONS:
            for connections in (1, 4):
                seconds = max(settings.seconds, LEAST_BITS / rate_bps)
                yield Cell("goodput", rate_bps, direction, connections, seconds=seconds)
    for rtt_s in RTTS_S:
        yield Cell("rtt", 100e6, delay_s=rtt_s / 2, **train)
    yield Cell("jitter", 100e6, delay_s=0.015, jitter_s=0.005, **train)
    for rate_bps, rtt_s in ((100e6, 0.005), (100e6, 0.030), (100e6, 0.080), (500e6, 0.030)):
        for direction in DIRECTIONS if rtt_s < 0.080 else DIRECTIONS[:1]:
            yield _far("far", rate_bps, rtt_s, direction, settings)
    for direction in DIRECTIONS:
        yield Cell("step", STEPS_BPS[0], direction, seconds=6.0)
    yield Cell("schedule", 200e6, DIRECTIONS[0], seconds=settings.schedule_s, seed=settings.seed)
    for direction in DIRECTIONS:
        yield _far("bdp", 1e9, 0.080, direction, settings)
    for loss in LOSSES:
        for direction in DIRECTIONS:
            yield Cell("loss", 100e6, direction, delay_s=0.0025, loss=loss, **train)


def quick(settings: Settings, most_bps: float = RATES_BPS[-1]) -> Iterator[Cell]:
    """One of each kind, in under a minute."""
    train = _train(settings, 4)
    yield Cell("goodput", 100e6, DIRECTIONS[0], 1, seconds=settings.seconds)
    yield Cell("goodput", min(1e9, most_bps), DIRECTIONS[1], 4, seconds=settings.seconds)
    yield Cell("rtt", 100e6, delay_s=0.015, **train)
    yield Cell("jitter", 100e6, delay_s=0.015, jitter_s=0.005, **train)
    yield _far("far", 100e6, 0.030, DIRECTIONS[0], settings)
    yield Cell("step", STEPS_BPS[0], DIRECTIONS[0], seconds=6.0)
    yield Cell("schedule", 200e6, DIRECTIONS[0], seconds=min(10.0, settings.schedule_s), seed=settings.seed)
    yield _far("bdp", 1e9, 0.080, DIRECTIONS[0], settings)
    yield Cell("loss", 100e6, DIRECTIONS[0], delay_s=0.0025, loss=0.01, **train)


def _train(settings: Settings, part: int = 1) -> dict[str, Any]:
    return {"packets": settings.packets // part, "packets_per_s": settings.packets_per_s}


def _far(kind: str, rate_bps: float, rtt_s: float, direction: str, settings: Settings) -> Cell:
    seconds = settings.seconds + _TRIPS * rtt_s
    return Cell(kind, rate_bps, direction, 4, delay_s=rtt_s / 2, seconds=seconds)


def expected_goodput(cell: Cell, start_s: float = 0.0, end_s: float = 0.0) -> float:
    """What TCP can get, bits/s: of the rate, or of the schedule's mean between two times."""
    if cell.kind == "schedule":
        return expected_goodput_bps(cell.schedule.mean_bps(start_s, end_s))
    return expected_goodput_bps(cell.rate_bps)


def first_second_bound_bits(rate_bps: float) -> float:
    """Bits on the wire that an honest shaper lets through in a second that begins with a full bucket: the rate, the
    bucket, and the one super-packet that htb sends on credit when it is nearly empty."""
    return rate_bps + (burst_bytes(rate_bps) + _SUPER_PACKET_BYTES) * 8


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of a cell; None where it was not. Wall units.

    `error`: goodput over what is expected, less 1. `first_second_bits`: on the wire in the first second, and the bound.
    `trains`: by direction sent, lost, overtaken, and overflowed in a busy receiver.
    `drops`: of the shaper's queues and the delay's mechanism, `congestion_drops` of the KV queue under TCP, which is
    how TCP finds the rate. `direct_packets`: unshaped. `step_s`: until goodput was the new one, up and down.
    `late_step_s`: how late the latest step of a schedule was. `failure`: why there is nothing else.
    """

    goodput_bps: float | None = None
    expected_bps: float | None = None
    error: float | None = None
    first_second_bits: float | None = None
    first_second_bound_bits: float | None = None
    rtt_min_s: float | None = None
    rtt_p50_s: float | None = None
    rtt_p99_s: float | None = None
    rtt_jitter_s: float | None = None
    trains: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    drops: int = 0
    congestion_drops: int = 0
    direct_packets: int = 0
    step_s: Mapping[str, float | None] = field(default_factory=dict)
    steps: int | None = None
    late_step_s: float | None = None
    congestion_control: str | None = None
    failure: str | None = None

    @property
    def loss_bounds(self) -> dict[str, tuple[float, float]]:
        """By direction: the loss fractions the train does not speak against."""
        return {way: interval(one["lost"], one["sent"]) for way, one in self.trains.items()}


def judge(cell: Cell, found: Found) -> list[str]:
    """What is wrong, in words with the figures; nothing if all of it holds."""
    if found.failure:
        return [found.failure]
    wrong = []
    tolerance = SCHEDULE_TOLERANCE if cell.kind == "schedule" else GOODPUT_TOLERANCE
    if found.error is not None and abs(found.error) > tolerance:
        wrong.append(f"goodput {found.error:+.2%} off, {tolerance:.0%} allowed")
    first, bound = found.first_second_bits, found.first_second_bound_bits
    if first is not None and bound is not None and first > bound:
        wrong.append(f"{first / 1e6:.2f} Mbit in the first second, {bound / 1e6:.2f} are rate and burst")
    if found.rtt_p50_s is not None and not cell.loss:
        slack_s = RTT_SLACK_S + RTT_TOLERANCE * cell.rtt_s + 2 * cell.jitter_s
        if abs(found.rtt_p50_s - cell.rtt_s) > slack_s:
            wrong.append(
                f"round trip {found.rtt_p50_s * 1e3:.2f} ms, {cell.rtt_s * 1e3:g} +- {slack_s * 1e3:.2f} asked"
            )
    for way, (low, high) in found.loss_bounds.items():
        train, asked = found.trains[way], cell.loss if way == cell.direction else 0.0
        if not low <= asked <= high or (not asked and train["lost"]):
            wrong.append(f"{way}: {train['lost']} of {train['sent']} lost, {asked:.1%} asked")
        if train["reordered"]:
            wrong.append(f"{way}: {train['reordered']} overtaken")
    if found.drops:
        wrong.append(f"{found.drops} packets dropped that were not to be lost")
    if found.direct_packets:
        wrong.append(f"{found.direct_packets} packets unshaped")
    for which, response_s in found.step_s.items():
        if response_s is None or response_s > STEP_BOUND_S:
            took = "never came" if response_s is None else f"took {response_s:.2f} s"
            wrong.append(f"the step {which} {took}, {STEP_BOUND_S:g} s allowed")
    return wrong


def spoilt(cell: Cell, found: Found, meter: Mapping[str, float], wrong: Sequence[str]) -> list[str]:
    """Why this machine was too busy for the figures to be the link's; nothing if it was not. meter: of `Metered`.

    Late timers spoil a cell whatever it says. A CPU without rest, or one that its host gave to others, does when
    something is `wrong` with it: a busy machine can make a good link look bad, and no bad one good.
    """
    why = []
    if meter["stolen"] > STOLEN_BOUND:
        why.append(f"timers late beyond the shaper's bucket {meter['stolen']:.1%} of the time")
    if found.rtt_p50_s is not None and not cell.loss and meter["late_p50_s"] > LATE_BOUND_S:
        why.append(f"timers {meter['late_p50_s'] * 1e3:.2f} ms late in the median")
    if wrong and meter["cpu_busy"] > CPU_BOUND:
        why.append(f"CPU {meter['cpu_busy']:.0%} busy")
    if wrong and meter["taken"] > TAKEN_BOUND:
        why.append(f"the host took {meter['taken']:.1%} of the CPU")
    if overflowed := sum(train["overflowed"] for train in found.trains.values()):
        why.append(f"the receiver itself lost {overflowed}")
    return why


def asked_of(cell: Cell) -> dict[str, Any]:
    """The cell as a report tells it."""
    return {"cell": cell.name, **asdict(cell)}


def of_kinds(cells: Sequence[Cell], kinds: Sequence[str] | None) -> list[Cell]:
    """Those of these kinds; without any, all but `bdp`."""
    return [cell for cell in cells if (cell.kind in kinds if kinds else cell.kind != "bdp")]
