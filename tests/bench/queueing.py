"""The instance machines against queueing theory: their own waits, under Poisson arrivals, with replications.

A machine alone, driven by scheduled times exactly as virtual time and a worker drive it, costs some microseconds a
request, so that the half-million requests which a load of 80 % needs fit into a test. Whoever uses these gets one mean
wait a replication; replications start empty and their first part is left out.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from emulator.decode_instance import DecodeInstance
from emulator.instance import PrefillInstance
from emulator.messages import WAKE, Admitted, Announce, Landed, Prefill, Received
from testbed.report.intervals import student_t

WARM_UP = 0.1
"""The part of every replication that is left out: it starts empty."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A mean wait over replications, seconds: mean +- half (99 %), beside what theory says."""

    mean_s: float
    half_s: float
    theory_s: float
    requests: int

    @property
    def agrees(self) -> bool:
        """Theory is inside the interval, and the interval is narrow enough to say something."""
        return abs(self.mean_s - self.theory_s) <= self.half_s < 0.03 * self.mean_s


class OneLength:
    """Every prefill takes `service_s` and leaves one byte."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s

    def t_prefill(self, tokens: int) -> float:
        return self._service_s

    def s_kv(self, tokens: int) -> float:
        return 1.0


def md1_wait_s(load: float, service_s: float) -> float:
    """M/D/1, mean wait in the queue (Pollaczek-Khinchine): rho D / (2 (1 - rho))."""
    return load * service_s / (2 * (1 - load))


def mmc_wait_s(load: float, service_s: float, servers: int) -> float:
    """M/M/c, mean wait in the queue: C(c, a) s / (c (1 - rho)), with Erlang's C from his B's recursion."""
    offered, blocked = servers * load, 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return waits * service_s / (servers * (1 - load))


def prefill_wait_s(seed: np.random.SeedSequence, load: float, count: int) -> tuple[float, float]:
    """One replication of M/D/1 on a PrefillInstance (service 1 s): the mean wait and the realised mean gap, seconds."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / load, count))
    machine = PrefillInstance("p", OneLength(1.0), pieces=1, outbox_bytes=1 << 40)
    starts = np.empty(count)
    started = 0

    def wake(at_s: float) -> None:
        nonlocal started
        for _, message in machine.handle(at_s, WAKE):
            if type(message) is Announce:
                starts[started] = at_s
                started += 1

    for i, at_s in enumerate(arrivals.tolist()):
        while (due_s := machine.next_s()) is not None and due_s <= at_s:
            wake(due_s)
        for _, message in machine.handle(at_s, Prefill(str(i), 1, 1, 0, 1, "d")):
            if type(message) is Announce:
                starts[started] = at_s
                started += 1
        if started:  # its bytes arrive at once: the outbox is no limit here
            machine.handle(at_s, Received(str(started - 1), 1))
    while (due_s := machine.next_s()) is not None:
        wake(due_s)
    first = int(count * WARM_UP)
    return float((starts - arrivals)[first:].mean()), float(np.diff(arrivals[first:]).mean())


def decode_wait_s(seed: np.random.SeedSequence, load: float, servers: int, count: int) -> tuple[float, float, float]:
    """One replication of M/M/c on a DecodeInstance, c slots, service exponential with mean 1 s.

    Answers are long (mean 10^6 tokens of 1 us), so that a length rounded up to a whole token is exponential. Returns
    the mean wait, and the realised mean gap and service, seconds.
    """
    step_s = 1e-6
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / (servers * load), count))
    lengths = np.ceil(rng.exponential(1 / step_s, count)).astype(np.int64)
    machine = DecodeInstance("d", slots=servers, step_s=step_s, landing_bytes=1 << 40)
    admitted = np.empty(count)
    done = 0

    def note(at_s: float, message: object) -> None:
        nonlocal done
        for _, told in machine.handle(at_s, message):  # type: ignore[arg-type]
            if type(told) is Admitted:
                admitted[done] = at_s
                done += 1

    for i, (at_s, length) in enumerate(zip(arrivals.tolist(), lengths.tolist(), strict=True)):
        while (due_s := machine.next_s()) is not None and due_s <= at_s:
            note(due_s, WAKE)
        machine.handle(at_s, Announce(str(i), 1, "p", 1, 1, length))
        note(at_s, Landed(i))
    while (due_s := machine.next_s()) is not None:
        note(due_s, WAKE)
    first = int(count * WARM_UP)
    gaps = float(np.diff(arrivals[first:]).mean())
    return float((admitted - arrivals)[first:].mean()), gaps, float(lengths[first:].mean() * step_s)


def replicate(
    one: Callable[[np.random.SeedSequence], tuple[float, ...]],
    expected: tuple[float, ...],
    theory_s: float,
    *,
    runs: int,
    count: int,
    seed: int,
) -> Wait:
    """Run `one` `runs` times, on every core: the 99 % interval of its first value, the others being control variates.

    The others are figures whose true means are known (`expected`): what the replications' waits owe to an arrival rate
    or a service that happened to be off is regressed out (Lavenberg and Welch 1981), a degree of freedom each.
    """
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        values = np.array(list(pool.map(one, np.random.SeedSequence(seed).spawn(runs))))
    controls = values[:, 1:] - np.asarray(expected)
    design = np.column_stack([np.ones(runs), controls])
    fit, *_ = np.linalg.lstsq(design, values[:, 0], rcond=None)
    residuals = values[:, 0] - design @ fit
    freedom = runs - design.shape[1]
    covariance = np.linalg.inv(design.T @ design) * (residuals @ residuals) / freedom
    half = student_t(freedom, 0.99) * math.sqrt(covariance[0, 0])
    return Wait(float(fit[0]), half, theory_s, runs * count)


def md1(load: float, *, runs: int, count: int, seed: int) -> Wait:
    """One prefill instance at `load`, fixed length: the mean wait beside M/D/1's."""
    one = partial(prefill_wait_s, load=load, count=count)
    return replicate(one, (1 / load,), md1_wait_s(load, 1.0), runs=runs, count=count, seed=seed)


def mmc(load: float, servers: int, *, runs: int, count: int, seed: int) -> Wait:
    """One decode instance of `servers` slots at `load`, exponential answers: the mean wait beside M/M/c's."""
    one = partial(decode_wait_s, load=load, servers=servers, count=count)
    expected = (1 / (servers * load), 1.0)
    return replicate(one, expected, mmc_wait_s(load, 1.0, servers), runs=runs, count=count, seed=seed)
