"""A series: one deployment under several policies, several seeds, or both, every policy with the very same requests.

A run of a series is a scenario with one deployment: its policy and its seed name it. `arms` makes one scenario a
policy, `runs` puts the runs in the order in which the wire takes them, and `Observe` is what virtual time does with
one of them, on whatever core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from testbed.assemble import at_fixed_rates, capacity_rps, lengths_of_workload, max_input_tokens, policy_setup
from testbed.points import Point
from testbed.policies import load_policy, start_policy, wants_future
from testbed.scenario import Scenario, ScenarioError
from testbed.simulate import simulate, write
from testbed.told import KnownFuture


def policy_names(text: str) -> list[str]:
    """The policies of `--policy a,b,c`, in their order. Raises ScenarioError for an empty one and for one twice."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ScenarioError(f"--policy {text!r}: an empty name; give policies with a comma between them")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ScenarioError(f"--policy {text!r}: {twice[0]} is there twice; name each policy once")
    return names


def arms(scenario: Scenario, names: Sequence[str]) -> list[Scenario]:
    """One scenario a policy, all with the same requests. scenario: with the deployment to compare on.

    A `load_fraction` is of the deployment's Lambda_max under its own policy, whichever policies are compared. Every
    policy is loaded and started once, so that one that cannot be is known now. Raises ScenarioError for it and for one
    under which the deployment serves nothing; ModelError and TraceError.
    """
    base = at_fixed_rates(scenario.only(scenario.deployments[0].name))
    made = [base.only(None, name) for name in names]
    for arm in made:
        deployment = arm.deployments[0]
        policy = load_policy(deployment.policy.name)
        lengths = lengths_of_workload(arm.workload, max_input_tokens(arm, deployment))
        capacity_rps(arm, deployment, lengths)
        future = KnownFuture.still(arm, lengths).told() if wants_future(policy) else None
        setup = policy_setup(arm, deployment, lengths, deployment.policy.told, future)
        start_policy(policy, deployment.policy.name, setup)
    return made


def runs(arms: Sequence[Scenario], repeats: int) -> list[Scenario]:
    """Every arm under `repeats` seeds from its own, interleaved (A B C, A B C, ...): what drifts, drifts for all."""
    return [arm.model_copy(update={"seed": arm.seed + i}) for i in range(repeats) for arm in arms]


def place(folder: Path, run: Scenario, *, policies: bool, repeats: bool) -> Path:
    """The results folder of one run: a folder a policy where there are several policies, a folder a seed likewise."""
    if policies:
        folder /= run.deployments[0].policy.name.replace(":", ".")
    return folder / f"seed-{run.seed}" if repeats else folder


def completed_ttft_s(requests: pd.DataFrame) -> npt.NDArray[np.float64]:
    """The TTFTs (s) that a summary's `ttft_s` is of: those of the window's requests that completed."""
    ok = (requests["status"] == "ok") & (requests["client_error"] == "")
    return requests.loc[ok & requests["in_window"], "ttft_s"].dropna().to_numpy(dtype=np.float64)


def read_ttft_s(folder: Path) -> npt.NDArray[np.float64]:
    """The same from a results folder's `requests.csv`."""
    columns = ["status", "client_error", "in_window", "ttft_s"]
    table = pd.read_csv(folder / "requests.csv", usecols=columns, dtype={"client_error": str})
    return completed_ttft_s(table.fillna({"client_error": ""}))


@dataclass(frozen=True, slots=True)
class Observe:
    """Runs a point of a comparison of policies in virtual time: its summary and, for a plot, its TTFTs.

    folder: where its results go, as `place` says; None for nowhere. requests: none, csv or parquet, as for `write`.
    """

    folder: Path | None
    requests: str
    with_ttft: bool
    repeats: bool

    def __call__(self, point: Point) -> dict[str, Any]:
        result = simulate(point.scenario)
        if self.folder is not None:
            out = place(self.folder, result.scenario, policies=True, repeats=self.repeats)
            write(result, out, self.requests)
        ttft_s = completed_ttft_s(result.requests) if self.with_ttft else None
        return {"summary": result.summary, "ttft_s": ttft_s}
