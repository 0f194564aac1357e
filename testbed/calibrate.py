"""A profile from runs on the wire: what prefills and decode steps took there, beside all else that ran on those cores.

A model by itself (`profiling.py`) knows nothing of its neighbours. In a testbed it shares cores with other workers, its
own transport, the gateway and the clients, and that decides its times; a run with another seed has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pandas as pd

from emulator.measured import Step, text_of
from emulator.profile import Profile, ProfileError
from netem.fluid import TCP_EFFICIENCY
from testbed.runs import read_scenario, read_summary
from testbed.scenario import Scenario
from testbed.scheduler.api import Site

LEAST: Final = 60
"""Prefills at a site, below which nothing is said of it: 31 of them had an 8K prompt's time wrong by a quarter."""
SITES: Final[tuple[Site, ...]] = ("prfaas", "pd")
MOST_PIECES: Final = 64

Array = npt.NDArray[np.float64]


def profiles_of_runs(folders: Sequence[Path]) -> dict[str, str]:
    """A profile's YAML for each site that prefilled enough, from runs that differ in their seed alone. Raises RunError,
    ProfileError or ScenarioError for a folder that holds no valid run of a model that computes, or an unlike one."""
    scenario: Scenario | None = None
    ran: dict[str, Any] = {}
    tables, seeds = [], []
    for i, folder in enumerate(folders):
        summary, other = read_summary(folder), read_scenario(folder)
        if folder.resolve() in [one.resolve() for one in folders[:i]]:
            raise ProfileError(f"{folder}: given twice; take runs with other seeds")
        if other.backend == "timing" or not (folder / "provenance.json").is_file():
            raise ProfileError(
                f"{folder}: a run of backend timing measures nothing but its profile; take one of hybrid"
            )
        if summary["verdict"]["status"] != "valid":
            raise ProfileError(f"{folder}: the run is {summary['verdict']['status']}: no measurement; run it again")
        by = orjson.loads((folder / "provenance.json").read_bytes())
        scenario, ran = scenario or other, ran or by
        if other.model_copy(update={"seed": scenario.seed}) != scenario:
            raise ProfileError(f"{folder}: differs from {folders[0]} in more than its seed; take runs of one scenario")
        for key in ("machine", "versions", "launcher", "image"):
            if by.get(key) != ran.get(key):
                raise ProfileError(
                    f"{folder}: its {key} (provenance.json) is not that of {folders[0]}; take runs of one "
                    "machine, as it is"
                )
        seeds.append(str(other.seed))
        tables.append(pd.read_csv(folder / "requests.csv", dtype={"request_id": str}).assign(run=i))
    assert scenario is not None
    requests = pd.concat(tables, ignore_index=True)
    deployment = scenario.deployments[0]
    texts: dict[str, str] = {}
    for site in SITES:
        asked = scenario.profile(deployment, site)
        mine = requests[(requests["prefill_site"] == site) & (requests["status"] == "ok")]
        if asked is not None and len(mine) >= LEAST:
            measurement = {
                "taken_at": ran["taken_at"][:10],
                "machine": ran["machine"],
                "versions": ran["versions"],
                "threads": 1,
                "beside": f"the testbed of {scenario.name}, {deployment.name}, seed {', '.join(seeds)}, under its load",
                "model": {"preset": scenario.model.preset, **scenario.model.changes},
            }
            link = scenario.link if site == "prfaas" else None  # inside a site there is none
            pieces = asked.pieces if link is None else pieces_of(mine, TCP_EFFICIENCY * link.rate_bps, link.delay_s)
            texts[site] = _text(f"{scenario.name}-{site}", asked, pieces, mine, requests, measurement)
    if not texts:
        raise ProfileError(
            f"{', '.join(map(str, folders))}: fewer than {LEAST} prefills at each site; take a longer run, or several"
        )
    return texts


def _text(
    name: str,
    asked: Profile,
    pieces: int,
    prefills: pd.DataFrame,
    requests: pd.DataFrame,
    measurement: dict[str, Any],
) -> str:
    tokens = (prefills["input_tokens"] - prefills["cached_tokens"]).to_numpy(float)
    seconds = (prefills["prefill_end_s"] - prefills["prefill_start_s"]).to_numpy(float)
    knots = knots_of(tokens)
    ratios = ratios_of(knots, tokens, seconds / asked.t_prefill(tokens))
    points = points_of(knots, asked.last_tokens)
    curve = asked.t_prefill(points) * np.interp(points, knots, ratios)
    left = seconds - asked.t_prefill(tokens) * np.interp(tokens, knots, ratios)
    return text_of(
        name=name,
        model=asked.model,
        hardware=f"{measurement['machine']['cpu']}, {measurement['beside']}",
        prefill_s=dict(zip(map(int, points), curve.tolist(), strict=True)),
        kv_bytes={int(one): round(asked.s_kv(float(one))) for one in points},
        steps=steps_of(requests),
        slots=asked.decode_slots,
        pieces=pieces,
        source=f"{len(prefills)} prefills of {tokens.min():.0f} to {tokens.max():.0f} tokens under load: so many times "
        f"{asked.name}'s, {ratios.min():.2f} to {ratios.max():.2f}, and beyond those lengths as at their ends",
        measurement=measurement | {"uncertain": round(float(np.std(left) / seconds.mean() / np.sqrt(len(seconds))), 4)},
    )


def knots_of(tokens: Array) -> Array:
    """Where the ratio to the old profile may bend: at powers of two inside what was prefilled, and at its ends."""
    low, high = tokens.min(), tokens.max()
    inside = [2.0**n for n in range(4, 21) if 1.2 * low < 2.0**n < high / 1.2]
    return np.array([low, *inside, high])


def points_of(knots: Array, last_tokens: int) -> Array:
    """Lengths of the new profile: powers of two from 256 on, the knots, and the old one's end."""
    powers = [2.0**n for n in range(8, 21) if 2**n < last_tokens]
    return np.unique([*powers, *knots[knots <= last_tokens], float(last_tokens)])


def ratios_of(knots: Array, tokens: Array, ratios: Array) -> Array:
    """At the knots: the piecewise-linear function of the length that is nearest to all ratios, by squares."""
    hats = np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T
    found: Array = np.linalg.lstsq(hats, ratios, rcond=None)[0]
    return found


def pieces_of(prefills: pd.DataFrame, rate_bps: float, delay_s: float) -> int:
    """The number of equal pieces, one after each equal part of a prefill, that leaves what is still to land when it
    ends as late as it was seen to be, in the median, on a link of this rate."""
    took = (prefills["prefill_end_s"] - prefills["prefill_start_s"]).to_numpy(float)
    wire = 8 * prefills["kv_bytes"].to_numpy(float) / rate_bps
    seen = float(np.median(prefills["landed_s"] - prefills["prefill_end_s"]))

    def exposed(pieces: int) -> float:
        landed = np.zeros(len(took))
        for piece in range(1, pieces + 1):
            landed = np.maximum(landed, took * piece / pieces) + wire / pieces
        return float(np.median(landed - took)) + delay_s

    return min(range(1, MOST_PIECES + 1), key=lambda pieces: abs(exposed(pieces) - seen))


def steps_of(requests: pd.DataFrame) -> Sequence[Step]:
    """A step a request: seconds between its tokens, with the requests and KV tokens that its node decoded meanwhile, in
    the mean over its time. requests: a column `run` tells those of several runs apart."""
    done = requests[(requests["status"] == "ok") & (requests["output_tokens"] > 1)]
    steps = []
    for _, group in done.groupby(["run", "decode_node"] if "run" in done else ["decode_node"]):
        start, end = group["admitted_s"].to_numpy(float), group["finished_s"].to_numpy(float)
        kv_tokens = (group["input_tokens"] + group["output_tokens"] / 2).to_numpy(float)
        tokens = group["output_tokens"].to_numpy(float)
        lasted = end - start
        for i in np.flatnonzero(lasted > 0):
            shared = np.clip(np.minimum(end, end[i]) - np.maximum(start, start[i]), 0, None) / lasted[i]
            steps.append(Step(float(shared.sum()), float(shared @ kv_tokens), float(lasted[i] / (tokens[i] - 1))))
    return steps
