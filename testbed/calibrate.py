"""A profile from a run on the wire: what prefills and decode steps took there, beside all else that ran on those cores.

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
from testbed.runs import read_scenario, read_summary
from testbed.scheduler.api import Site

LEAST: Final = 30
"""Prefills at a site, below which nothing is said of it."""
SITES: Final[tuple[Site, ...]] = ("prfaas", "pd")
NEAR: Final = 1.25
"""Up to so many times the longest prompt that was prefilled the last segment is drawn on."""

Array = npt.NDArray[np.float64]


def profiles_of_run(folder: Path) -> dict[str, str]:
    """A profile's YAML for each site that prefilled enough. Raises RunError, ProfileError or ScenarioError for a folder
    that holds no valid run of a model that computes."""
    summary, scenario = read_summary(folder), read_scenario(folder)
    if scenario.backend == "timing" or not (folder / "provenance.json").is_file():
        raise ProfileError(f"{folder}: a run of backend timing measures nothing but its profile; take one of hybrid")
    if summary["verdict"]["status"] != "valid":
        raise ProfileError(f"{folder}: the run is {summary['verdict']['status']}: no measurement; run it again")
    requests = pd.read_csv(folder / "requests.csv", dtype={"request_id": str})
    ran = orjson.loads((folder / "provenance.json").read_bytes())
    deployment = scenario.deployments[0]
    texts: dict[str, str] = {}
    for site in SITES:
        asked = scenario.profile(deployment, site)
        mine = requests[(requests["prefill_site"] == site) & (requests["status"] == "ok")]
        if asked is not None and len(mine) >= LEAST:
            measurement = {
                "taken_at": ran["taken_at"],
                "machine": ran["machine"],
                "versions": ran["versions"],
                "threads": 1,
                "beside": f"the testbed of {scenario.name}, {deployment.name}, seed {scenario.seed}, under its load",
                "model": {"preset": scenario.model.preset, **scenario.model.changes},
            }
            texts[site] = _text(f"{scenario.name}-{site}", asked, mine, requests, measurement)
    if not texts:
        raise ProfileError(f"{folder}: fewer than {LEAST} prefills at each site; take a longer run")
    return texts


def _text(
    name: str, asked: Profile, prefills: pd.DataFrame, requests: pd.DataFrame, measurement: dict[str, Any]
) -> str:
    tokens = (prefills["input_tokens"] - prefills["cached_tokens"]).to_numpy(float)
    seconds = (prefills["prefill_end_s"] - prefills["prefill_start_s"]).to_numpy(float)
    knots = knots_of(tokens, asked.last_tokens)
    curve = through(knots, tokens, seconds)
    left = seconds - np.interp(tokens, knots, curve)
    source = f"{len(prefills)} prefills of a run, a line through {len(knots)} points by least squares"
    uncertain = float(np.std(left) / seconds.mean() / np.sqrt(len(seconds)))
    return text_of(
        name=name,
        model=asked.model,
        hardware=f"{measurement['machine']['cpu']}, {measurement['beside']}",
        prefill_s=dict(zip(map(int, knots), curve.tolist(), strict=True)),
        kv_bytes={int(one): round(asked.s_kv(float(one))) for one in knots},
        steps=steps_of(requests),
        slots=asked.decode_slots,
        pieces=asked.pieces,
        source=source,
        measurement=measurement | {"uncertain": round(uncertain, 4)},
    )


def knots_of(tokens: Array, last_tokens: int) -> Array:
    """Where the line may bend: at powers of two inside what was prefilled, and at its ends; the last of them is where
    the old profile ends, if that is near."""
    low, high = tokens.min(), tokens.max()
    if high < last_tokens <= NEAR * high:
        high = last_tokens
    inside = [2.0**n for n in range(4, 21) if 1.2 * low < 2.0**n < high / 1.2]
    return np.array([low, *inside, high])


def through(knots: Array, tokens: Array, seconds: Array) -> Array:
    """Values at the knots of the piecewise-linear function nearest to all points, by squares."""
    hats = np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T
    found: Array = np.linalg.lstsq(hats, seconds, rcond=None)[0]
    return found


def steps_of(requests: pd.DataFrame) -> Sequence[Step]:
    """A step a request: seconds between its tokens, with the requests and KV tokens that its node decoded meanwhile, in
    the mean over its time."""
    done = requests[(requests["status"] == "ok") & (requests["output_tokens"] > 1)]
    steps = []
    for _, group in done.groupby("decode_node"):
        start, end = group["admitted_s"].to_numpy(float), group["finished_s"].to_numpy(float)
        kv_tokens = (group["input_tokens"] + group["output_tokens"] / 2).to_numpy(float)
        tokens = group["output_tokens"].to_numpy(float)
        lasted = end - start
        for i in np.flatnonzero(lasted > 0):
            shared = np.clip(np.minimum(end, end[i]) - np.maximum(start, start[i]), 0, None) / lasted[i]
            steps.append(Step(float(shared.sum()), float(shared @ kv_tokens), float(lasted[i] / (tokens[i] - 1))))
    return steps
