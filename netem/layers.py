"""What is laid over a link's base state, by whom, and what comes out of it: pure, in wall units.

A layer says partial states in time (`LayerSpec.steps`), and may have a token bucket that sets rates by what is sent.
`effective` puts base and layers together; `agent.py` plays layers and carries the result to the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from netem.link import DIRECTIONS, OUTAGES, LinkError, LinkState, OutageKind, update

if TYPE_CHECKING:
    from netem.token_bucket import TokenBucket, TokenBucketSpec

LOOK_S = 0.02
"""How close the looks of a token bucket at what was sent may be."""
_FIELDS = ("name", "t0_ns", "steps", "token_bucket")
_EXAMPLE = '{"name": "dip", "t0_ns": 1, "steps": [{"at_s": 0, "state": {"rate_bps": 1e8}}], "token_bucket": null}'


def _refuse(where: str, value: object, problem: str, remedy: str) -> NoReturn:
    raise LinkError(f"{where}: {value!r} {problem}; {remedy}", where, value, remedy)


@dataclass(frozen=True, slots=True)
class Step:
    """From `at_s` on (seconds after the layer's t0) the layer says `state`, and nothing of what it said before."""

    at_s: float
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer as it is asked for: the body of POST /layers. `t0_ns`: CLOCK_MONOTONIC.

    `bucket`: of each direction; `resume_s`: how much of the peak an empty one fills with before it is used again.
    """

    name: str
    t0_ns: int
    steps: tuple[Step, ...] = ()
    bucket: TokenBucketSpec | None = None
    resume_s: float = 1.0

    @classmethod
    def read(cls, body: object) -> LayerSpec:
        """Raises LinkError, with the field, for a body that is no layer; what its states say is not looked at."""
        if not isinstance(body, Mapping) or not {"name", "t0_ns", "steps"} <= body.keys() <= set(_FIELDS):
            _refuse("layer", body, f"is not an object of {', '.join(_FIELDS)}", f"send e.g. {_EXAMPLE}")
        name, t0_ns, steps = body["name"], body["t0_ns"], body["steps"]
        if not isinstance(name, str) or not name:
            _refuse("name", name, "is no name", "give the layer a text by which people know it")
        if isinstance(t0_ns, bool) or not isinstance(t0_ns, int):
            _refuse("t0_ns", t0_ns, "is no time", "give CLOCK_MONOTONIC in nanoseconds, an integer")
        if not isinstance(steps, list | tuple):
            _refuse("steps", steps, "is not a list", f"send e.g. {_EXAMPLE}")
        made: list[Step] = []
        for i, step in enumerate(steps):
            where = f"steps[{i}]"
            if not isinstance(step, Mapping) or step.keys() != {"at_s", "state"}:
                _refuse(where, step, "is not an object of at_s and state", f"send e.g. {_EXAMPLE}")
            at_s, state = step["at_s"], step["state"]
            if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < float("inf"):
                _refuse(f"{where}.at_s", at_s, "is no time", "give seconds after t0_ns, at least 0")
            if made and at_s <= made[-1].at_s:
                _refuse(f"{where}.at_s", at_s, f"s is not after the step at {made[-1].at_s:g} s", "put them in order")
            if not isinstance(state, Mapping):
                _refuse(f"{where}.state", state, "is not an object", 'send e.g. {"rate_bps": 1e8}')
            made.append(Step(float(at_s), state))
        return _with_bucket(cls(name, t0_ns, tuple(made)), body.get("token_bucket"))

    @property
    def stalls(self) -> bool:
        """Whether it will ask for a stall, for which the delay line has to be there."""
        return any(_outage(step.state, way) == "stall" for step in self.steps for way in DIRECTIONS)


def _with_bucket(spec: LayerSpec, asked: object) -> LayerSpec:
    if asked is None:
        return spec
    from netem.token_bucket import TokenBucketSpec  # brings numpy, which the agent needs for nothing else

    if not isinstance(asked, Mapping):
        _refuse("token_bucket", asked, "is not an object", "give peak_bps, base_bps and budget_bytes, or null")
    given = dict(asked)
    resume_s = given.pop("resume_s", spec.resume_s)
    if isinstance(resume_s, bool) or not isinstance(resume_s, int | float) or not 0 < resume_s < float("inf"):
        _refuse("token_bucket.resume_s", resume_s, "is no span of time", "give seconds, more than 0")
    try:
        return replace(spec, bucket=TokenBucketSpec(**given), resume_s=float(resume_s))
    except LinkError as wrong:
        where = f"token_bucket.{wrong.field}"
        raise LinkError(f"token_bucket.{wrong}", where, wrong.value, wrong.remedy) from None
    except TypeError as wrong:
        known = "peak_bps, base_bps, budget_bytes, initial_bytes, refill_bps, resume_s"
        _refuse("token_bucket", dict(asked), f"is no token bucket ({wrong})", f"give {known}")


@dataclass(slots=True, eq=False)
class Layer:
    """A layer that is being played. `says`: the partial state that it says now."""

    spec: LayerSpec
    says: Mapping[str, Any] = field(default_factory=dict)


def effective(base: Mapping[str, LinkState], says: Sequence[Mapping[str, Any]]) -> dict[str, LinkState]:
    """What a link does whose base state the layers' partial states are laid over, in the order in which they were made.

    The last to name a field has its way. Of outages the hardest holds, whoever asks for it: nobody's end of an outage
    ends another's. Raises LinkError for a state that cannot be had.
    """
    both = [{key: value for key, value in said.items() if key not in DIRECTIONS} for said in says]
    merged: dict[str, Any] = {}
    for way, state in base.items():
        own = [{**shared, **_object(said, way)} for shared, said in zip(both, says, strict=True)]
        asked = [state.outage, *(one.pop("outage", None) for one in own)]
        fields: dict[str, Any] = {key: value for one in own for key, value in one.items()}
        merged[way] = {**fields, "outage": _hardest(asked)}
    for said in says:
        for way in (key for key in said if key in DIRECTIONS and key not in base):
            _refuse(way, said[way], "is not shaped here", f"use {', '.join(base)}")
    return update(base, merged)


def _object(said: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    value = said.get(way, {})
    if not isinstance(value, Mapping):
        _refuse(way, value, "is not an object", 'send e.g. {"to_pd": {"rate_bps": 1e8}}')
    return value


def _outage(said: Mapping[str, Any], way: str) -> object:
    value = said.get(way)
    own = value if isinstance(value, Mapping) else {}
    return own.get("outage", said.get("outage"))


def _hardest(asked: Sequence[Any]) -> OutageKind | None:
    """Raises LinkError for what is no outage."""
    for kind in asked:
        if kind is not None and kind not in OUTAGES:
            _refuse("outage", kind, "is no outage", f"use {', '.join(OUTAGES)}, or null for none")
    return max((kind for kind in asked if kind is not None), key=OUTAGES.index, default=None)


class Meters:
    """The token buckets of a layer, one a direction, from t0 on. `sent_bytes`: what each direction had sent by then."""

    def __init__(self, spec: LayerSpec, sent_bytes: Mapping[str, int]) -> None:
        from netem.token_bucket import TokenBucket

        assert spec.bucket is not None
        self._spec, self._before = spec, dict(sent_bytes)
        self._buckets: dict[str, TokenBucket] = {
            way: TokenBucket(spec.bucket, resume_s=spec.resume_s, look_s=LOOK_S) for way in sent_bytes
        }

    @property
    def says(self) -> dict[str, Any]:
        """The rates as a partial state."""
        return {way: {"rate_bps": bucket.rate_bps} for way, bucket in self._buckets.items()}

    @property
    def next_s(self) -> float:
        """When the next look is due, seconds after t0: no rate can have to change sooner."""
        return min(bucket.next_s() for bucket in self._buckets.values())

    def look(self, t_ns: int, sent_bytes: Mapping[str, int]) -> bool:
        """Tell the buckets what has been sent until t_ns; whether a rate is another one now."""
        before = self.says
        for way, bucket in self._buckets.items():
            t_s = max(0.0, (t_ns - self._spec.t0_ns) * 1e-9)
            bucket.advance(t_s, (sent_bytes[way] - self._before[way]) * 8.0)
        return self.says != before


def laid_over(said: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A partial state with another's directions over it."""
    return {**said, **{way: {**_object(said, way), **own} for way, own in over.items()}}
