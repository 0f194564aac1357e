"""Virtual time: the same policy, control and instances as on the wire, carried by one heap.

`testbed.world` drives it; here are the runs and what comes of them. Nothing is left to chance, so a seed gives the same
bytes out on every machine.

    from testbed.simulate import simulate
    result = simulate("paper", sets=["workload.load_fraction=0.9"])
    result.requests          # a pandas table, the columns of requests.csv
    result.summary["ttft_s"]

To step through it in a debugger: `world = World(...)`, then `world.step()` until it returns False.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson
import pandas as pd

from netem.fluid import TCP_EFFICIENCY
from netem.link import DIRECTIONS
from testbed.assemble import (
    build_workload,
    policy_setup,
    workload_lengths,
)
from testbed.closed_form import closed_form
from testbed.crossing import event as crossed
from testbed.invariants import Run, Twin, check, judge
from testbed.link_schedule import bucket_of, link_changes, link_steps
from testbed.phases import LinkStep
from testbed.policies import load_policy, start_policy, wants_future
from testbed.report.collect import Collector
from testbed.report.link_files import LinkReport
from testbed.report.little import littles_law
from testbed.report.provenance import provenance
from testbed.report.summary import PERFECT_METER, LinkFigures, summarise
from testbed.report.timeline import virtual_timeline
from testbed.report.write import write_summary
from testbed.scenario import Scenario, ScenarioError, override
from testbed.scenario import load as load_scenario
from testbed.told import KnownFuture
from testbed.world import World
from traces.load import Trace


@dataclass(frozen=True, slots=True)
class Result:
    """A run in virtual time.

    requests: the request table (REQUEST_COLUMNS). timeline: what happened to the link and in the scheduler
    (TIMELINE_COLUMNS). summary: as summary.json. trace: what was offered.
    """

    requests: pd.DataFrame
    timeline: pd.DataFrame
    summary: dict[str, Any]
    trace: Trace
    scenario: Scenario
    wall_s: float
    events: int


def _check_link(scenario: Scenario) -> None:
    for field in ("jitter_s", "loss"):
        value = getattr(scenario.link, field)
        if value:
            raise ScenarioError(
                f"scenario {scenario.name}: link.{field} = {value:g}: virtual time's link has a rate and a delay, and "
                "loses nothing; leave it out, or take prfaas run"
            )


def simulate(
    scenario: Scenario | str,
    *,
    deployment: str | None = None,
    policy: str | None = None,
    sets: Sequence[str] = (),
    seed: int | None = None,
    workload: tuple[Trace, float] | None = None,
) -> Result:
    """Run a scenario in virtual time. workload: (trace, rate) to offer instead of the scenario's own.

    Deterministic: the same scenario and seed give the same tables, whatever the process or PYTHONHASHSEED. Raises
    ScenarioError and TraceError.
    """
    loaded = load_scenario(scenario, sets) if isinstance(scenario, str) else override(scenario, list(sets))
    loaded = loaded.only(deployment, policy)
    if seed is not None:
        loaded = loaded.model_copy(update={"seed": seed})
    _check_link(loaded)
    chosen = loaded.deployments[0]
    trace, rate_rps = build_workload(loaded, chosen) if workload is None else workload
    lengths = workload_lengths(loaded, trace)
    expected = closed_form(loaded, chosen, trace, rate_rps)
    made, other = load_policy(chosen.policy.name), load_policy(chosen.policy.name)
    future = KnownFuture.of(loaded, chosen, trace).told() if wants_future(made) else None
    for one in (made, other):
        start_policy(one, chosen.policy.name, policy_setup(loaded, chosen, lengths, chosen.policy.told, future))
    twin = Twin(other)
    collector = Collector()
    world = World(
        loaded,
        chosen,
        made,
        trace.requests,
        collector,
        steps=link_steps(loaded),
        metered=bucket_of(loaded),
        ask=twin.ask,
        tick=twin.tick,
    )
    started = time.perf_counter()
    world.run()
    wall_s = time.perf_counter() - started
    window: dict[str, Any] = {"warmup_s": loaded.workload.warmup_s, "duration_s": loaded.workload.duration_s}
    requests = collector.table(**window)
    delivered = round(world.link.delivered_bytes(world.now_s))
    figures = LinkFigures(
        asked={"nominal_bps": loaded.link.rate_bps},
        measured=None,
        wan_tx_bytes=round(delivered / TCP_EFFICIENCY),
        kv_bytes=delivered,
        direct_packets=0,
        retransmits=0,
        cross_bytes=_crossed(world) if loaded.link.cross_traffic else None,
    )
    changes = [msgspec.to_builtins(change) for change in world.control.changes]
    totals = {
        "policy_errors": world.control.policy_errors,
        "threshold_tokens": getattr(made, "threshold_tokens", None),
        "time_scale": None,
        "changes": changes,
    }
    stepped = [*_link_events(loaded), *_throttled(world.throttled)]
    stepped += [crossed(now.at_s, direction, was, now) for direction, was, now in world.crossings]
    timeline = virtual_timeline([*changes, *stepped], world.link_history, loaded.link.rate_bps)
    law, events = littles_law(world.passages, requests, world.now_s), world.events
    del world, collector  # the table has it all now, and of a million requests twice is much
    summary = summarise(
        requests,
        scheduled=len(trace.requests),
        **window,
        slo_ttft_s=loaded.slo.ttft_p90_s,
        slo_tpot_s=loaded.slo.tpot_s,
        meter=PERFECT_METER,
        link=figures,
        totals=totals,
        expected=expected,
    )
    summary = {
        "scenario": loaded.name,
        "deployment": chosen.name,
        "policy": chosen.policy.name,
        "knows_future": future is not None,
        "clock": "virtual",
        "seed": loaded.seed,
        **summary,
        "littles_law": law,
    }
    _judge(summary)
    judge(summary, check(Run(requests, timeline, summary, loaded, twin.told)))
    return Result(requests, timeline, summary, trace, loaded, wall_s, events)


def _link_events(scenario: Scenario) -> list[dict[str, Any]]:
    """The link's steps as rows of the timeline: in virtual time they come when they are due, in both directions."""
    steps = link_changes(scenario)
    return [step.event(step.at_s, direction, step.before_bps) for step in steps for direction in DIRECTIONS]


def _crossed(world: World) -> dict[str, int]:
    """What cross-traffic had of each direction, headers counted."""
    return {direction: round(size / TCP_EFFICIENCY) for direction, size in world.crossed_bytes().items()}


def _throttled(changes: Sequence[tuple[float, str, float, float]]) -> list[dict[str, Any]]:
    """What a token bucket made of the link, as rows of the timeline."""
    return [LinkStep(at_s, was, bps, "token bucket").event(at_s, way, was) for at_s, way, was, bps in changes]


def _judge(summary: dict[str, Any]) -> None:
    """A run whose own accounts disagree is no measurement."""
    problems = summary["littles_law"]["problems"]
    if problems:
        reasons = [*problems, *summary["verdict"]["reasons"]]
        summary["verdict"] = {"status": "invalid", "reasons": reasons}


def write(result: Result, out: Path, requests: Literal["none", "csv", "parquet"] | str = "csv") -> None:
    """The results folder of a run in virtual time: as of a run on the wire, without what only the wire has."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "scenario.yaml").write_text(result.scenario.to_yaml())
    facts = provenance(result.scenario, result.trace, None)
    (out / "provenance.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    link = LinkReport.of_run(result.timeline, result.requests, result.summary)
    link.write(out)
    summary = {**result.summary, "link_doctor": link.told.to_json()}
    write_summary(out, summary)
    result.timeline.to_csv(out / "timeline.csv", index=False, float_format="%.6f")
    if requests == "csv":
        result.requests.to_csv(out / "requests.csv", index=False, float_format="%.9f")
    elif requests == "parquet":
        try:
            result.requests.to_parquet(out / "requests.parquet", index=False)
        except ImportError:
            raise ScenarioError(
                "--requests parquet: pyarrow is not installed; pip install 'prfaas-testbed[parquet]', or use csv"
            ) from None
