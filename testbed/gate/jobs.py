"""A run to be made for a gate, and what is known of it afterwards: what passes between a gate and its workers.

Light on purpose: the process that only judges needs nothing that simulates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from testbed.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Job:
    """scenario: of one deployment, with the arm's policy, a fixed rate and a seed. rates_rps: to run it at, for
    `lambda_max_rps`; () for its own. folder: where the results of the last rate go; None for nowhere."""

    scenario: Scenario
    rates_rps: tuple[float, ...] = ()
    folder: str | None = None


Measured = dict[str, Any]
"""What is known of a run, JSON-ready: `status` and `reasons` (the verdict), `summary` (as far as objectives look),
`findings` (invariants: name, status, value, bound, sentence, promised), `like` (`testbed.gate.fingerprints`; None of
a run that did not end), `digest`, `requests`, `wall_s`; of one at several rates `load` (rates_rps, ttft_p90_s)
too."""
