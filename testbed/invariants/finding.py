"""What an invariant is given (`Run`) and what it says (`Finding`). Both are plain data; an invariant is a function from
the one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from testbed.scenario import Scenario
from testbed.scenario_bounds import Bounds

Status = Literal["held", "broken", "not_checked"]
Means = Literal["invalid", "failed", "note"]

DEFAULTS: Final = Bounds(
    drain_s=300.0, threshold_changes=8, role_changes=3, cycle=0.5, recover_s=120.0, backlog_s=20.0, wait_s=300.0
)
"""Where the scenario promises nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of an invariant in a run.

    name: stable. value, bound: of what the sentence says, None where there is none. means: what a breach makes of the
    run: `invalid` (its accounts cannot be believed), `failed` (the system broke what was promised), or a `note`.
    """

    name: str
    status: Status
    value: float | None
    bound: float | None
    sentence: str
    means: Means = "note"

    def to_json(self) -> dict[str, Any]:
        """As plain data: what numpy reckoned is a float there."""
        numbers = {key: None if of is None else float(of) for key, of in (("value", self.value), ("bound", self.bound))}
        return {**asdict(self), **numbers}


@dataclass(frozen=True, slots=True)
class Run:
    """A run as an invariant sees it, of either clock.

    requests: REQUEST_COLUMNS. timeline: TIMELINE_COLUMNS. summary: as summary.json, as far as it is known. scenario: of
    the one deployment that ran. twin: how many decisions a second policy object was asked for as well, and the first
    one that it made otherwise, empty for none; None where there was no second one. folder: the results folder of a run
    on the wire, whose log can be replayed. disturbed: an experiment of chaos did something to it.
    """

    requests: pd.DataFrame
    timeline: pd.DataFrame
    summary: Mapping[str, Any]
    scenario: Scenario
    twin: tuple[int, str] | None = None
    folder: Path | None = None
    disturbed: bool = False

    @property
    def on_wire(self) -> bool:
        return bool(self.summary["clock"] == "wire")

    def bound(self, name: str) -> tuple[float, Means]:
        """A bound of the scenario's, and what breaking it means: only what the scenario promised is a failure."""
        promised = getattr(self.scenario.bounds, name)
        if promised is not None:
            return float(promised), "failed"
        return float(getattr(DEFAULTS, name)), "note"


def held(name: str, sentence: str, value: float | None = None, bound: float | None = None) -> Finding:
    return Finding(name, "held", value, bound, sentence)


def not_checked(name: str, sentence: str) -> Finding:
    return Finding(name, "not_checked", None, None, sentence)


def at_most(name: str, value: float, bound: float, means: Means, sentence: str) -> Finding:
    """Held while value <= bound."""
    return Finding(name, "held" if value <= bound else "broken", value, bound, sentence, means)
