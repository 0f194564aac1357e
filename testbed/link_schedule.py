"""The link that varies, of a scenario: where its rate changes during a load, by its schedule or by its phases; and any
schedule by itself, for people to look at.

Both clocks take the same steps: virtual time hands them to `World`, a load on the wire to the shaper's agent. Steps of
a schedule are never closer than the wire can take them (`netem.schedule.MIN_STEP_S` of wall time).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Final

from netem.courses import Point, Steps
from netem.cross import Source, present
from netem.link import DIRECTIONS, LinkError
from netem.schedule import MIN_STEP_S, Schedule, data_of, from_data
from netem.token_bucket import TokenBucketSpec, saturated
from testbed.phases import LinkStep, link_rates
from testbed.phases import link_steps as phase_steps
from testbed.scenario import Scenario, load, parse
from testbed.scenario_cross import sources
from testbed.scenario_data import read

TRIGGER: Final = "schedule"
SPAN_S: Final = 3600.0


def read_file(name: str) -> bytes:
    """A recorded schedule's content, by its path. Raises LinkError."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give the path of a schedule's file"
        raise LinkError(f"{name}: {why}", name, name, why) from None


def schedule_of(scenario: Scenario) -> Schedule | None:
    """What its link does over time, in model units, drawn from the scenario's seed unless it has its own; None when
    nothing but phases or a token bucket changes it. Raises LinkError for a file that is none."""
    made = _made(scenario)
    return made if isinstance(made, Schedule) else None


def bucket_of(scenario: Scenario) -> TokenBucketSpec | None:
    """The token bucket that its link has in each direction, if it has one: its rate depends on what is sent."""
    made = _made(scenario)
    return made if isinstance(made, TokenBucketSpec) else None


def _made(scenario: Scenario) -> Schedule | TokenBucketSpec | None:
    if scenario.link.schedule is None:
        return None
    return from_data(scenario.link.schedule, seed=scenario.seed, read=read_file, where="link.schedule")


def link_changes(scenario: Scenario) -> list[LinkStep]:
    """Where the link's rate changes during a load, from the nominal rate on.

    A schedule is followed for as long as requests come, and then until an outage that has begun is over: what it has
    then, the link keeps.
    """
    schedule = schedule_of(scenario)
    if schedule is None:
        return phase_steps(scenario.phases, scenario.link.rate_bps)
    lasts_s, min_step_s = scenario.workload.duration_s, MIN_STEP_S * scenario.scale.time_scale
    end_s = lasts_s
    while (steps := schedule.steps(0.0, end_s, min_step_s))[-1][1] == 0:
        end_s *= 2
    changes: list[LinkStep] = []
    now_bps, now_kind = scenario.link.rate_bps, None
    for at_s, rate_bps in _with_kinds(steps, schedule):
        if at_s >= lasts_s and now_bps > 0:
            break
        kind = schedule.outage(at_s) if rate_bps == 0 else None
        if (rate_bps, kind) != (now_bps, now_kind):
            changes.append(LinkStep(at_s, now_bps, rate_bps, TRIGGER, kind))
            now_bps, now_kind = rate_bps, kind
    return changes


def _with_kinds(steps: list[Point], schedule: Schedule) -> list[Point]:
    """The steps, and where one kind of outage follows another without a rate between them."""
    edges = {edge_s for one in schedule.outages for edge_s in (one.at_s, one.end_s)} - {at_s for at_s, _ in steps}
    inside = [
        (edge_s, 0.0)
        for (from_s, rate_bps), (to_s, _) in pairwise([*steps, (math.inf, 0.0)])
        for edge_s in edges
        if rate_bps == 0 and from_s < edge_s < to_s
    ]
    return sorted([*steps, *inside])


def link_steps(scenario: Scenario) -> list[tuple[float, float]]:
    """(model second, model bits/s) at which the link's rate changes during a load."""
    return [(step.at_s, step.rate_bps) for step in link_changes(scenario)]


def link_means(scenario: Scenario, spans: Sequence[tuple[float, float]]) -> list[float]:
    """The link's mean rate in each of the phases' spans, model bits/s; of a whole run without phases in its one.

    The nominal rate where a token bucket decides, as nobody knows what will be sent.
    """
    schedule = schedule_of(scenario)
    if schedule is not None:
        return [schedule.mean_bps(start_s, end_s) for start_s, end_s in spans]
    return link_rates(scenario.phases, scenario.link.rate_bps) or [scenario.link.rate_bps] * len(spans)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that somebody means, and, of a scenario's, how long it is meant for (its load) and what competes."""

    name: str
    made: Schedule | TokenBucketSpec
    lasts_s: float | None = None
    cross: Sequence[Source] = ()


def find(text: str, seed: int) -> Found:
    """What somebody means by a schedule.

    text: a mapping such as {kind: square, ...}, the path of a YAML or JSON file with one or with a scenario, of a
    recording (CSV or mahimahi, by its content), or a shipped scenario's name. Raises LinkError and ScenarioError.
    """
    if text.lstrip().startswith("{"):
        data = read(text, "SCHEDULE")
        return Found("schedule", from_data(data, seed=seed, read=read_file))
    if "/" not in text and "." not in text and not Path(text).is_file():
        return _of_scenario(load(text))
    content = read_file(text)
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        data = read(content.decode("utf-8-sig", "replace"), text)
        if "kind" in data:
            return Found(Path(text).stem, from_data(data, seed=seed, read=read_file, where=text))
        return _of_scenario(parse(data, text))
    kind = "csv" if b"," in content.lstrip().split(b"\n", 1)[0] else "mahimahi"
    return Found(Path(text).name, from_data({"kind": kind, "file": text}, read=read_file))


def _of_scenario(scenario: Scenario) -> Found:
    """Its schedule, or what its phases make of the link."""
    steps = {0.0: scenario.link.rate_bps, **dict(link_steps(scenario))}
    made = _made(scenario) or Schedule(Steps(tuple(steps.items())))
    cross = sources(scenario.link.cross_traffic, scenario.seed)
    return Found(scenario.name, made, scenario.workload.duration_s, cross)


def describe(found: Found, end_s: float | None = None) -> dict[str, Any]:
    """A schedule's figures and steps in [0, end_s), s and bits/s; a token bucket's for somebody who always sends.
    `cross`, of each direction with cross-traffic: the means of its elastic flows and of its datagrams' rate, and
    `steps`: (t_s, flows, bits/s of datagrams).

    end_s: unless given, its load's, else two periods, or all that happens until a last rate holds, or an hour of what
    goes on. down_s: in outages.
    """
    name, made, end_s = found.name, found.made, end_s or found.lasts_s
    if isinstance(made, TokenBucketSpec):
        end_s = end_s or SPAN_S
        data, steps, course = data_of(made), saturated(made, end_s), "a token bucket, always used"
        made = Schedule(Steps(tuple(steps)))
    else:
        end_s = end_s or _span_s(made)
        data, steps, course = made.to_data(), made.steps(0.0, end_s), _course_of(made)
    lengths_s = [b - a for (a, _), (b, _) in pairwise([*steps, (end_s, 0.0)])]
    rates = [rate_bps for _, rate_bps in steps]
    return {
        "name": name,
        "course": course,
        "end_s": end_s,
        "mean_bps": made.mean_bps(0.0, end_s),
        "min_bps": min(rates),
        "max_bps": max(rates),
        "down_s": sum(length_s for length_s, rate_bps in zip(lengths_s, rates, strict=True) if rate_bps == 0),
        "changes": len(steps) - 1,
        "shortest_step_s": min(lengths_s[:-1], default=None),
        "schedule": data,
        "steps": steps,
        "cross": {way: told for way in DIRECTIONS if (told := _competing(found.cross, way, end_s))},
    }


def _competing(cross: Sequence[Source], direction: str, end_s: float) -> dict[str, Any]:
    """What competes in a direction in [0, end_s); empty when nothing does."""
    steps = [tuple(now) for now in takewhile(lambda now: now.at_s < end_s, present(cross, direction))]
    if not steps:
        return {}
    spans = [b[0] - a[0] for a, b in pairwise([*steps, (end_s, 0, 0.0)])]
    flows, constant_bps = (sum(length_s * now[i] for length_s, now in zip(spans, steps, strict=True)) for i in (1, 2))
    return {"mean_flows": flows / end_s, "mean_constant_bps": constant_bps / end_s, "steps": steps}


def _course_of(made: Schedule) -> str:
    if made.period_s is not None:
        return f"{made.course.kind}, again every {made.period_s:g} s"
    if made.duration_s is not None:
        return f"{made.course.kind}, holds from {made.duration_s:g} s on"
    return f"{made.course.kind}, goes on as its seed has it"


def _span_s(made: Schedule) -> float:
    if made.period_s is not None:
        return 2 * made.period_s
    return SPAN_S if made.duration_s is None else max(60.0, 1.25 * made.duration_s)
