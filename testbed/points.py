"""Points: many runs in virtual time, each measured in a few figures, on every core or a Ray cluster, and kept.

A point is a scenario with one deployment, one rate, one window and one seed. Its figures are one small JSON file, named
by all that they depend on, so a study that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from testbed.report.intervals import main_figures, repeated
from testbed.report.window import TPOT_TOLERANCE
from testbed.scenario import Scenario, ScenarioError
from testbed.simulate import simulate
from testbed.sources import code_sha256, files_sha256, sources

GROWING: Final = 0.01
"""Queues grow when the requests that wait for their first token become more by over 1 % of the arrivals."""

OVERLOADED: Final = 0.05
"""Growth of a short run beyond which the long one needs no run: 5 % of the arrivals."""

BLOCKS: Final = 20
SAY_EVERY_S: Final = 10.0
CONNECT_S: Final = 5.0

Floats = npt.NDArray[np.float64]
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A run to be measured: a scenario with one deployment, a rate, a window and a seed.

    probe: the share (0 .. 1) of the duration to try first, where overload is to be expected; None for none.
    """

    scenario: Scenario
    probe: float | None = None


def backlog_growth(arrive_s: Floats, first_token_s: Floats, start_s: float, end_s: float) -> float:
    """The share of the arrivals that piles up in start_s .. end_s: 0 in a steady state, 1 - 1/rho in overload.

    N(t) is the backlog: the requests that have arrived by t and have no first token by then. Its mean is taken over
    each of 20 equal blocks of the window. The Theil-Sen slope of these means (the median slope over all pairs of
    blocks, which one burst, however large, moves little), in requests/s, is divided by the window's arrivals a second.

    arrive_s, first_token_s: shape (n,), model seconds, of all requests of the run; NaN for no first token. 0 when
    nothing arrives. Near saturation a run of n arrivals scatters by about sqrt((ca^2 + cs^2) / n), ca and cs being the
    coefficients of variation of interarrival and service times: 1 % for 20,000 Poisson arrivals, 2 % with ca = 3.
    """
    until = np.where(np.isnan(first_token_s), np.inf, first_token_s)
    edges = np.linspace(start_s, end_s, BLOCKS + 1)
    waited = np.array([np.clip(np.minimum(until, edge) - arrive_s, 0.0, None).sum() for edge in edges])
    means = np.diff(waited) / np.diff(edges)  # of N(t), a block
    arrivals = int(((arrive_s >= start_s) & (arrive_s < end_s)).sum())
    if not arrivals:
        return 0.0
    first, second = np.triu_indices(BLOCKS, 1)
    slopes = (means[second] - means[first]) / ((second - first) * (end_s - start_s) / BLOCKS)
    return float(np.median(slopes)) * (end_s - start_s) / arrivals


def measure(point: Point) -> Figures:
    """Run a point and return its figures, those of `main_figures` and what a search needs, JSON-ready.

    `growth` is `backlog_growth` of the window, `growing` whether that is above GROWING; `slo_met` says that the run is
    valid and whole and keeps the scenario's SLO in its P90 TTFT and P90 TPOT. When a probe's growth is above OVERLOADED
    its figures are the point's, with `stopped_early` true.
    """
    scenario = point.scenario
    workload = scenario.workload
    if point.probe is not None:
        short = {"duration_s": workload.duration_s * point.probe, "warmup_s": workload.warmup_s * point.probe}
        tried = measure(Point(scenario.model_copy(update={"workload": workload.model_copy(update=short)})))
        if tried["growth"] > OVERLOADED:
            return {**tried, "stopped_early": True}
    result = simulate(scenario)
    summary, requests = result.summary, result.requests
    growth = backlog_growth(
        requests["sched_s"].to_numpy(dtype=np.float64),
        requests["first_token_s"].to_numpy(dtype=np.float64),
        workload.warmup_s,
        workload.duration_s,
    )
    tpot_s = summary["tpot_s"]["p90"]
    tpot_met = tpot_s is None or tpot_s <= scenario.slo.tpot_s * (1 + TPOT_TOLERANCE)
    return {
        "deployment": scenario.deployments[0].name,
        "policy": scenario.deployments[0].policy.name,
        "seed": scenario.seed,
        "rate_rps": workload.rate_rps,
        "arrivals": summary["requests"]["in_window"],
        "window_s": summary["window_s"],
        "verdict": summary["verdict"]["status"],
        "threshold_tokens": summary["scheduler"]["threshold_tokens"],
        **main_figures(summary),
        "growth": growth,
        "growing": growth > GROWING,
        "slo_met": bool(summary["slo"]["ttft_p90_met"] and tpot_met and summary["verdict"]["status"] == "valid"),
        "stopped_early": False,
    }


def key(point: Point) -> str:
    """The name of a point's file: a digest of the resolved scenario (deployment, policy, rate, window, seed), of the
    files that it names, and of the code that the figures depend on."""
    scenario = point.scenario
    deployment = scenario.deployments[0]
    named = [code_version(), scenario.fingerprint(), repr(point.probe)]
    named += files_sha256(scenario)
    module, _, own = deployment.policy.name.partition(":")
    if own:
        named += [hashlib.sha256(source).hexdigest() for source in sources(module, Path.cwd()).values()]
    return hashlib.sha256("\n".join(named).encode()).hexdigest()[:24]


@cache
def code_version() -> str:
    """A digest of the code and the shipped profiles that a run in virtual time depends on."""
    return code_sha256(__name__)[:16]


def repeat(scenario: Scenario, first: Mapping[str, Any], repeats: int, runner: Runner) -> dict[str, Any]:
    """`repeats` runs under seeds from the scenario's own: the mean and 95 % interval of each of the main figures.

    first: the summary of the run under the scenario's own seed. Raises ScenarioError for a trace: no seed changes it.
    """
    refuse_repeats(scenario, repeats)
    seeds = [scenario.seed + i for i in range(repeats)]
    others = runner.run([Point(scenario.model_copy(update={"seed": seed})) for seed in seeds[1:]])
    figures = main_figures(first)
    runs = [figures, *({name: run[name] for name in figures} for run in others)]
    return repeated(seeds, [first["verdict"]["status"], *(run["verdict"] for run in others)], runs)


def refuse_repeats(scenario: Scenario, repeats: int) -> None:
    """Raises ScenarioError for several runs of a trace: they would be the same run."""
    if repeats > 1 and scenario.workload.trace is not None:
        raise ScenarioError(
            f"--repeats {repeats}: workload.trace = {scenario.workload.trace} is the same under every seed, and so is "
            "each run of it; leave --repeats out"
        )


class Runner:
    """Runs points and keeps their figures in `folder` (None: nowhere). A context: it holds the connection to Ray.

    measuring: what runs one point, here or in another process; `measure` unless given. A folder is for one of them.
    jobs: processes, None for one a core (on Ray: one a CPU of the cluster); 1 runs everything in this process. ray: the
    address of a Ray cluster, such as `auto`, where this project has to be installed. say: told of progress, now and
    then. Raises ScenarioError when Ray is asked for and not installed or not to be reached.
    """

    def __init__(
        self,
        *,
        measuring: Callable[[Point], Figures] | None = None,
        jobs: int | None = None,
        ray: str | None = None,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._measuring = measure if measuring is None else measuring
        self._jobs = -1 if jobs is None else jobs
        self._ray = ray
        self._folder = folder
        self._say = say

    def __enter__(self) -> Runner:
        if self._ray is not None:
            _connect(self._ray)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ray is not None:
            importlib.import_module("ray").shutdown()

    def run(self, points: Sequence[Point]) -> list[Figures]:
        """The figures of the points, in their order; those that are kept already are not run again."""
        names = [key(point) for point in points]
        found = {name: figures for name in names if (figures := self._kept(name)) is not None}
        todo = {name: point for name, point in zip(names, points, strict=True) if name not in found}
        if found:
            self._say(f"{len(found)} of {len(set(names))} points are there already")
        started = said = time.monotonic()
        total = len(todo)
        for count, (name, figures) in enumerate(self._results(todo), 1):
            found[name] = figures
            self._keep(name, figures)
            now = time.monotonic()
            if now - said >= SAY_EVERY_S:
                said = now
                self._say(f"{count}/{total} points, about {(now - started) / count * (total - count):.0f} s left")
        return [found[name] for name in names]

    def _results(self, todo: dict[str, Point]) -> Iterator[tuple[str, Figures]]:
        """(name, figures) of every point, as they become known."""
        if self._jobs == 1 and self._ray is None:
            yield from (_task(name, point, self._measuring, os.getcwd()) for name, point in todo.items())
            return
        import joblib

        # The largest first: the last ones to end are then short.
        tasks = [
            joblib.delayed(_task)(name, point, self._measuring, os.getcwd())
            for name, point in sorted(todo.items(), key=lambda item: -_size(item[1].scenario))
        ]
        if self._ray is None:
            yield from joblib.Parallel(self._jobs, batch_size=1, return_as="generator_unordered")(tasks)
            return
        with joblib.parallel_config(backend="ray"):  # gives results only together: a few a CPU at a time
            some = 4 * joblib.effective_n_jobs(self._jobs)
            for first in range(0, len(tasks), some):
                yield from joblib.Parallel(self._jobs, batch_size=1)(tasks[first : first + some])

    def _kept(self, name: str) -> Figures | None:
        if self._folder is None:
            return None
        try:
            kept: Figures = orjson.loads((self._folder / f"{name}.json").read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return kept

    def _keep(self, name: str, figures: Figures) -> None:
        """Written under another name first: a file that is there is whole."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{name}.{os.getpid()}"
        part.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
        part.replace(self._folder / f"{name}.json")


def _size(scenario: Scenario) -> float:
    return (scenario.workload.rate_rps or 0.0) * scenario.workload.duration_s


def _task(name: str, point: Point, measuring: Callable[[Point], Figures], import_path: str) -> tuple[str, Figures]:
    """One point, in a worker process or here. import_path: where a policy of the user's own is imported from.

    Standard output is for results: what a policy prints goes to standard error.
    """
    if import_path not in sys.path:
        sys.path.insert(0, import_path)
    with contextlib.redirect_stdout(sys.stderr):
        return name, measuring(point)


def _connect(address: str) -> None:
    try:
        ray: Any = importlib.import_module("ray")
        backend: Any = importlib.import_module("ray.util.joblib")
    except ImportError:
        raise ScenarioError(f"--ray {address}: Ray is not installed; pip install 'prfaas-testbed[ray]'") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ScenarioError(f"--ray {address}: no cluster there ({' '.join(str(error).split())[:200]})") from None
    backend.register_ray()
