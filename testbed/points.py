"""Points: many runs in virtual time, each measured in a few figures, on every core or a Ray cluster, and kept.

A point is a scenario with one deployment, one rate, one window and one seed; its figures are one small JSON file named by
all that they depend on, so a study that was interrupted goes on where it stopped, and two studies share what they share.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from testbed.report.intervals import main_figures
from testbed.report.summary import TPOT_TOLERANCE
from testbed.scenario import Scenario, ScenarioError
from testbed.simulate import simulate

GROWING: Final = 0.01
"""Queues grow when the requests that wait for their first token become more by over 1 % of the arrivals."""

OVERLOADED: Final = 0.05
"""Growth of a short run beyond which the long one needs no run: 5 % of the arrivals."""

BLOCKS: Final = 20
SAY_EVERY_S: Final = 10.0

Floats = npt.NDArray[np.float64]
Figures = dict[str, Any]

_ROOMS: Final = ("emulator", "netem", "traces", "testbed.scheduler", "testbed.report")
_MODULES: Final = (
    "points", "simulate", "control", "assemble", "policies", "plan", "lengths", "scenario", "scenario_data",
)  # fmt: skip


def backlog_growth(arrive_s: Floats, first_token_s: Floats, start_s: float, end_s: float) -> float:
    """The share of the arrivals by which the backlog grows in start_s .. end_s: 0 in a steady state, 1 - 1/rho in overload.

    N(t) is the backlog: the requests that have arrived by t and have no first token by then. Its mean is taken over each
    of 20 equal blocks of the window; the Theil-Sen slope of these means (the median slope over all pairs of blocks, which
    one burst, however large, moves little), in requests/s, is divided by the arrivals a second in the window.

    arrive_s, first_token_s: shape (n,), model seconds, of all requests of the run; NaN for no first token. 0 when nothing
    arrives. In a run of n arrivals the statistic of a steady state scatters by about sqrt(ca^2 + cs^2) / sqrt(n), with the
    coefficients of variation of arrivals and service, and more the longer its queues are.
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


def measure(point: Scenario, probe: float | None = None) -> Figures:
    """Run a point and return its figures, those of `main_figures` and what a search needs, JSON-ready.

    `growth` is `backlog_growth` of the window, `growing` whether that is above GROWING; `slo_met` says that P90 TTFT and
    P90 TPOT keep the scenario's SLO and that every request was completed. probe: the share (0 .. 1) of the duration to try
    first; when that run's growth is above OVERLOADED, its figures are the point's, with `stopped_early` true.
    """
    if probe is not None:
        workload = point.workload
        short = {"duration_s": workload.duration_s * probe, "warmup_s": workload.warmup_s * probe}
        tried = measure(point.model_copy(update={"workload": workload.model_copy(update=short)}))
        if tried["growth"] > OVERLOADED:
            return {**tried, "stopped_early": True}
    result = simulate(point)
    summary, workload, requests = result.summary, point.workload, result.requests
    growth = backlog_growth(
        requests["sched_s"].to_numpy(dtype=np.float64),
        requests["first_token_s"].to_numpy(dtype=np.float64),
        workload.warmup_s,
        workload.duration_s,
    )
    tpot_s = summary["tpot_s"]["p90"]
    tpot_met = tpot_s is None or tpot_s <= point.slo.tpot_s * (1 + TPOT_TOLERANCE)
    failed = summary["requests"]["failed"]
    return {
        "deployment": point.deployments[0].name,
        "policy": point.deployments[0].policy.name,
        "seed": point.seed,
        "rate_rps": workload.rate_rps,
        "arrivals": summary["requests"]["in_window"],
        "failed": failed,
        "window_s": summary["window_s"],
        "threshold_tokens": summary["scheduler"]["threshold_tokens"],
        **main_figures(summary),
        "growth": growth,
        "growing": growth > GROWING,
        "slo_met": bool(summary["slo"]["ttft_p90_met"] and tpot_met and not failed),
        "stopped_early": False,
    }


def key(point: Scenario, probe: float | None = None) -> str:
    """The name of a point's file: a digest of the resolved scenario (deployment, policy, rate, window, seed), of the
    files that it names, and of the code that the figures depend on."""
    named = [code_version(), point.fingerprint(), repr(probe)]
    deployment = point.deployments[0]
    files = [point.workload.trace, deployment.profiles.prfaas, deployment.profiles.pd]
    named += [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files if name and Path(name).is_file()]
    module = deployment.policy.name.partition(":")[0]
    spec = importlib.util.find_spec(module) if ":" in deployment.policy.name else None
    if spec is not None and spec.origin is not None:
        named.append(hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(named).encode()).hexdigest()[:24]


@cache
def code_version() -> str:
    """A digest of the sources (and shipped profiles) that a run in virtual time depends on, whatever git says of them."""
    files = [resources.files("testbed") / f"{name}.py" for name in _MODULES]
    for room in _ROOMS:
        files += _sources(resources.files(room))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(folder: Any) -> list[Any]:
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    found = [entry for entry in entries if entry.name.endswith((".py", ".yaml"))]
    return found + [file for entry in entries if entry.is_dir() for file in _sources(entry)]


class Runner:
    """Runs points and keeps their figures in `folder` (None: nowhere). A context: it holds the connection to Ray.

    jobs: processes, None for one a core (on Ray: one a CPU of the cluster); 1 runs everything in this process. ray: the
    address of a Ray cluster, such as `auto`, where this project has to be installed. say: told of progress, now and then.
    Raises ScenarioError when Ray is asked for and not installed or not to be reached.
    """

    def __init__(
        self,
        *,
        jobs: int | None = None,
        ray: str | None = None,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
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
            import ray

            ray.shutdown()

    def run(self, points: Sequence[Scenario], probe: float | None = None) -> list[Figures]:
        """The figures of the points, in their order; those that are kept already are not run again."""
        names = [key(point, probe) for point in points]
        found = {name: figures for name in names if (figures := self._kept(name)) is not None}
        todo = {name: point for name, point in zip(names, points, strict=True) if name not in found}
        if found:
            self._say(f"{len(found)} of {len(set(names))} points are there already")
        started = said = time.monotonic()
        total = len(todo)
        for count, (name, figures) in enumerate(self._results(todo, probe), 1):
            found[name] = figures
            self._keep(name, figures)
            now = time.monotonic()
            if now - said >= SAY_EVERY_S:
                said = now
                self._say(f"{count}/{total} points, about {(now - started) / count * (total - count):.0f} s left")
        return [found[name] for name in names]

    def _results(self, todo: dict[str, Scenario], probe: float | None) -> Any:
        if self._jobs == 1 and self._ray is None:
            return ((name, measure(point, probe)) for name, point in todo.items())
        import joblib

        # The largest first: the last ones to end are then short.
        order = sorted(todo.items(), key=lambda item: -(item[1].workload.rate_rps or 0) * item[1].workload.duration_s)
        with nullcontext() if self._ray is None else joblib.parallel_config(backend="ray"):
            parallel = joblib.Parallel(n_jobs=self._jobs, batch_size=1, return_as="generator_unordered")
            return parallel(joblib.delayed(_task)(name, point, probe, os.getcwd()) for name, point in order)

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


def _task(name: str, point: Scenario, probe: float | None, import_path: str) -> tuple[str, Figures]:
    """In a worker process. import_path: where a policy of the user's own is imported from."""
    if import_path not in sys.path:
        sys.path.insert(0, import_path)
    return name, measure(point, probe)


def _connect(address: str) -> None:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise ScenarioError(f"--ray {address}: Ray is not installed; pip install 'prfaas-testbed[ray]'") from None
    try:
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ScenarioError(f"--ray {address}: no cluster there ({' '.join(str(error).split())[:200]})") from None
    register_ray()
