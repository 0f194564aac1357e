"""The link that varies, of a scenario: where its rate changes during a load, by its schedule or by its phases.

Both clocks take the same steps: virtual time hands them to `World`, a load on the wire to the shaper's agent. Steps of
a schedule are never closer than the wire can take them (`netem.schedule.MIN_STEP_S` of wall time).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from netem.link import LinkError
from netem.schedule import MIN_STEP_S, Schedule, from_data
from testbed.phases import LinkStep, link_rates
from testbed.phases import link_steps as phase_steps
from testbed.scenario import Scenario

TRIGGER = "schedule"


def read_file(name: str) -> bytes:
    """A recorded schedule's content, by its path. Raises LinkError."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give the path of a schedule's file"
        raise LinkError(f"{name}: {why}", name, name, why) from None


def schedule_of(scenario: Scenario) -> Schedule | None:
    """What its link does over time, in model units, drawn from the scenario's seed unless it has its own; None when
    nothing but phases changes it. Raises LinkError for a file that is none."""
    if scenario.link.schedule is None:
        return None
    made = from_data(scenario.link.schedule, seed=scenario.seed, read=read_file, where="link.schedule")
    assert isinstance(made, Schedule)  # the scenario's own check
    return made


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
    changes, now_bps = [], scenario.link.rate_bps
    for at_s, rate_bps in steps:
        if at_s >= lasts_s and now_bps > 0:
            break
        if rate_bps != now_bps:
            changes.append(LinkStep(at_s, now_bps, rate_bps, TRIGGER))
            now_bps = rate_bps
    return changes


def link_steps(scenario: Scenario) -> list[tuple[float, float]]:
    """(model second, model bits/s) at which the link's rate changes during a load."""
    return [(step.at_s, step.rate_bps) for step in link_changes(scenario)]


def link_means(scenario: Scenario, spans: Sequence[tuple[float, float]]) -> list[float]:
    """The link's mean rate in each of the phases' spans, model bits/s; of a whole run without phases in its one."""
    schedule = schedule_of(scenario)
    if schedule is not None:
        return [schedule.mean_bps(start_s, end_s) for start_s, end_s in spans]
    return link_rates(scenario.phases, scenario.link.rate_bps) or [scenario.link.rate_bps] * len(spans)
