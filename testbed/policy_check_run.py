"""A policy, run in two short virtual loads and watched: what it decides, what it writes to, what it raises, how long it
takes.

`prfaas policy check` starts it in processes of their own with other hash seeds, and compares:

    python -m testbed.policy_check_run POLICY

prints one JSON object (`Watched.to_json`) and nothing else on standard output.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import orjson

from testbed.assemble import build_workload, policy_setup, workload_lengths
from testbed.control import PolicyCall, TickCall, call_policy, tick_policy
from testbed.link_schedule import bucket_of, link_steps
from testbed.policies import load_policy, start_policy
from testbed.scenario import load
from testbed.scheduler import estimators
from testbed.scheduler.api import Action, Decision, NodeView, Policy, Reject, RequestView, SystemView
from testbed.world import World

LOADS: Final[dict[str, tuple[str, ...]]] = {
    "a link that falls and is cut": (
        "phases=[]", "workload.duration_s=260", "workload.rate_rps=2", "link.rate_bps=20gbps",
        "link.schedule={kind: steps, steps: [[0, 20gbps], [60, 3gbps], [140, 20gbps]], "
        "outages: [{at_s: 180, duration_s: 15}]}",
    ),
    "conversations with cached prefixes": (
        "phases=[]", "workload.duration_s=150", "workload.rate_rps=2", "link.rate_bps=20gbps", "cache_bytes=200e9",
        "workload.sessions={turns_mean: 6, think_s: 20, system_tokens: 4096}",
        "workload.lengths={kind: lognormal, mu: 8.0, sigma: 1.0, min_tokens: 128, max_tokens: 32768}",
    ),
}  # fmt: skip
"""The loads, as overrides of `link-drop`: what makes policies go wrong, in 800 requests."""

FLEETS: Final = {12: (4, 3, 5), 64: (21, 16, 27)}
"""Instances a speed is measured at: remote prefill, local prefill, local decode."""

GUARDED: Final = (NodeView, SystemView, estimators.Observed, estimators.LinkEstimate, estimators.Lengths)
ROUNDS: Final = 7
CALLS: Final = 300


class WroteToItError(Exception):
    """A policy wrote to something that is not its own."""


class Watched:
    """What was seen. decided: a line a decision and an action, by load. problems: (kind, where, what), each once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.decided: dict[str, list[str]] = {}
        self.problems: list[tuple[str, str, str]] = []
        self.file = ""
        self.route_line = 0
        self.speed_us: dict[str, float] = {}
        self.tick_ms = 0.0

    def problem(self, kind: str, where: str, what: str) -> None:
        if all((kind, what) != (one[0], one[2]) for one in self.problems):
            self.problems.append((kind, where, what))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("decided", "problems", "speed_us", "tick_ms")}

    def run(self) -> None:
        """All loads, then the speed."""
        made = load_policy(self.name)
        code = type(made).route.__code__
        self.file, self.route_line = code.co_filename, code.co_firstlineno
        for what, sets in LOADS.items():
            self.decided[what] = self._load(sets)
        if not self.problems:
            for count in FLEETS:
                self.speed_us[str(count)] = self._speed_us(count)

    def _load(self, sets: Sequence[str]) -> list[str]:
        lines: list[str] = []
        ticks_ms = []

        def ask(policy: Policy, request: RequestView, view: SystemView) -> Decision | Reject:
            hits = dict(request.hits)
            with self._watched(view):
                decision = policy.route(request, view)
            if hits != request.hits:
                self.problem("purity", self._at_route(), "the request's hits were changed by route")
            lines.append(f"{request.request_id} {decision}")
            return decision

        def tick(policy: Policy, view: SystemView) -> Sequence[Action]:
            looks = getattr(policy, "tick", None)
            if looks is None:
                return ()
            began = time.perf_counter()
            with self._watched(view):
                actions = list(looks(view))
            ticks_ms.append((time.perf_counter() - began) * 1e3)
            lines.extend(f"{view.now_s:g} {action}" for action in actions)
            return actions

        policy, world = self._world(sets, ask=ask, tick=tick)
        world.run()
        self.tick_ms = max([self.tick_ms, statistics.median(ticks_ms) if ticks_ms else 0.0])
        for kind, count in world.control.policy_errors.items():
            self.problem("contract", self._at_route(), f"{kind}: {count} times")
        self._keeps(policy)
        return lines

    def _world(
        self, sets: Sequence[str], ask: PolicyCall = call_policy, tick: TickCall = tick_policy
    ) -> tuple[Policy, World]:
        loaded = load("link-drop", sets).only(None, self.name)
        deployment = loaded.deployments[0]
        trace, _ = build_workload(loaded, deployment)
        policy = load_policy(self.name)
        lengths = workload_lengths(loaded, trace)
        start_policy(policy, self.name, policy_setup(loaded, deployment, lengths, deployment.policy.told))
        return policy, World(
            loaded,
            deployment,
            policy,
            trace.requests,
            lambda record: None,
            steps=link_steps(loaded),
            metered=bucket_of(loaded),
            ask=ask,
            tick=tick,
        )

    @contextlib.contextmanager
    def _watched(self, view: SystemView) -> Iterator[None]:
        """A call of the policy's, in which nothing that is control's can be written to."""
        names = list(view.nodes)
        for one in GUARDED:
            one.__setattr__ = _refuse  # type: ignore[method-assign]
        try:
            yield
        except WroteToItError as error:
            self.problem("purity", self._where(error), str(error))
            raise
        except Exception as error:
            self.problem("contract", self._where(error), f"raises {type(error).__name__}: {error}")
            raise
        finally:
            for one in GUARDED:
                del one.__setattr__
        if names != list(view.nodes):
            self.problem("purity", self._at_route(), "view.nodes was changed")

    def _keeps(self, policy: Policy) -> None:
        """What it holds of control's when a load is over: in an attribute, or a collection or two inside one."""
        for name, value in list(getattr(policy, "__dict__", {}).items()):
            inside = _inside(value, 3)
            if kept := next((one for one in inside if isinstance(one, NodeView | SystemView)), None):
                what = f"self.{name} keeps a {type(kept).__name__} from one call to the next"
                self.problem("purity", self._at_route(), what)

    def _speed_us(self, count: int) -> float:
        """Microseconds of process time a decision, the best of ROUNDS; the slower of without and with cached
        prefixes."""
        prfaas, p, d = FLEETS[count]
        fleet = f"deployments.prfaas-pd.fleet={{n_prfaas: {prfaas}, n_p: {p}, n_d: {d}}}"
        policy, world = self._world([fleet, "phases=[]", "workload.warmup_s=0", "workload.duration_s=10"])
        view = world.control.view
        hits = {n.name: 512 * (i % 20 + 1) for i, n in enumerate(view.nodes.values()) if n.role == "prefill"}
        plain = [RequestView(f"r{i}", 0.0, 400 + 300 * i) for i in range(CALLS)]
        cached = [
            one._replace(input_tokens=one.input_tokens + 12_000, l_pd=9728, l_prfaas=10_240, hits=hits) for one in plain
        ]
        return max(_best_us(policy.route, requests, view) for requests in (plain, cached))

    def _at_route(self) -> str:
        return f"{self.file}:{self.route_line}"

    def _where(self, error: Exception) -> str:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
        own = [one for one in frames if one.filename == self.file] or frames
        return f"{own[-1].filename}:{own[-1].lineno}" if own else self._at_route()


def _refuse(target: object, name: str, value: object) -> None:
    raise WroteToItError(f"{type(target).__name__}.{name} is written to: what a policy is shown is not its own")


def _inside(value: Any, depth: int) -> list[Any]:
    """A value, and what its collections hold, so many of them deep."""
    if isinstance(value, dict):
        parts = list(value.values())
    else:
        parts = list(value) if isinstance(value, list | tuple | set | frozenset | deque) else []
    return [value, *(one for part in parts for one in _inside(part, depth - 1))] if depth else [value]


def _best_us(route: Callable[..., object], requests: Sequence[RequestView], view: SystemView) -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.process_time_ns()
        for request in requests:
            route(request, view)
        took.append((time.process_time_ns() - began) / len(requests) / 1e3)
    return min(took)


def main() -> int:
    watched = Watched(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        watched.run()
    sys.stdout.write(orjson.dumps(watched.to_json()).decode())
    return 0


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.exit(main())
