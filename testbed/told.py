"""What a policy is told when a load begins: kept beside the load's events (`setup.json`), so that it can be told again.

`Told` is plain data, for the gateway, a results folder and a replay; `Told.setup` makes of it what `Policy.start`
takes. An oracle, and nobody else, is told the future too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from netem.fluid import TCP_EFFICIENCY
from testbed.assemble import lengths_from_json, lengths_to_json, phase_lengths, policy_setup
from testbed.link_schedule import link_steps
from testbed.policies import wants_future
from testbed.scenario import Deployment, Scenario
from testbed.scheduler.api import Future, Policy, Setup
from testbed.scheduler.model import LengthDistribution, ModelError
from traces.load import Trace

SETUP_FILE: Final = "setup.json"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class KnownFuture:
    """What is to come, as steps (model second, value), the first at 0.

    link_bps: what the link will carry of KV, model bits/s. lengths: what will be offered.
    """

    link_bps: Sequence[tuple[float, float]]
    lengths: Sequence[tuple[float, LengthDistribution]]

    @classmethod
    def of(cls, scenario: Scenario, deployment: Deployment, trace: Trace) -> KnownFuture:
        """The future of a load: its scenario's phases."""
        steps = [(0.0, scenario.link.rate_bps), *link_steps(scenario)]
        return cls([(at_s, _goodput(bps)) for at_s, bps in steps], phase_lengths(scenario, deployment, trace))

    @classmethod
    def still(cls, scenario: Scenario, lengths: LengthDistribution) -> KnownFuture:
        """The future where nothing is planned: all stays as it is."""
        return cls([(0.0, _goodput(scenario.link.rate_bps))], [(0.0, lengths)])

    def told(self) -> Future:
        return Future(_course(self.link_bps), _course(self.lengths))

    def to_json(self) -> dict[str, Any]:
        lengths = [[at_s, lengths_to_json(one)] for at_s, one in self.lengths]
        return {"link_bps": [list(step) for step in self.link_bps], "lengths": lengths}

    @classmethod
    def from_json(cls, data: Any) -> KnownFuture:
        """The inverse. Raises ModelError for data that is no future."""
        if not isinstance(data, dict) or set(data) != {"link_bps", "lengths"}:
            raise ModelError("future: must be an object with link_bps and lengths")
        link_bps, lengths = _steps(data["link_bps"], "link_bps"), _steps(data["lengths"], "lengths")
        for _, bps in link_bps:
            if isinstance(bps, bool) or not isinstance(bps, int | float) or not 0 <= bps < math.inf:
                raise ModelError(f"future.link_bps: {bps!r}: must be bits/s, 0 or more")
        return cls(link_bps, [(at_s, lengths_from_json(one)) for at_s, one in lengths])


class Told(msgspec.Struct, frozen=True):
    """A load's policy by name, its parameters, the load's lengths, and for an oracle the future, as `to_json` has
    them."""

    policy: str
    parameters: dict[str, float]
    lengths: dict[str, Any]
    future: dict[str, Any] | None = None

    def setup(self, scenario: Scenario, deployment: Deployment, policy: Policy) -> Setup:
        """What `policy` is told. Raises ModelError for lengths or a future that are none."""
        known = KnownFuture.from_json(self.future).told() if self.future and wants_future(policy) else None
        return policy_setup(scenario, deployment, lengths_from_json(self.lengths), self.parameters, known)

    def save(self, folder: Path) -> Path:
        """Write it into a folder; the file."""
        path = folder / SETUP_FILE
        path.write_bytes(msgspec.json.encode(self))
        return path


def _goodput(link_bps: float) -> float:
    """What TCP gets of a link's rate."""
    return link_bps * TCP_EFFICIENCY


def _course(steps: Sequence[tuple[float, Value]]) -> Callable[[float], Value]:
    """The value at a model second: that of the last step until then, before the first one its own."""
    starts = [at_s for at_s, _ in steps]
    return lambda at_s: steps[max(0, bisect_right(starts, at_s) - 1)][1]


def _steps(data: Any, name: str) -> list[tuple[float, Any]]:
    """Pairs (model second, whatever), in the order of time. Raises ModelError for anything else."""
    steps = data if isinstance(data, list) else []
    pairs = [one for one in steps if isinstance(one, list | tuple) and len(one) == 2]
    times = [at_s for at_s, _ in pairs if not isinstance(at_s, bool) and isinstance(at_s, int | float)]
    if not steps or len(times) != len(steps) or times != sorted(times) or not math.isfinite(sum(times)):
        raise ModelError(f"future.{name}: must be a list of [model second, value], in the order of time")
    return [(float(at_s), value) for at_s, value in pairs]
