"""Profiles: what one serving instance of a model on given hardware takes and emits, as the paper's tables give it.

A `Profile` holds S_kv(l) and T_prefill(l), the decode step and slots, and how many pieces a KVCache is sent in. A
`KvThroughputProfile` knows only Phi_kv(l), which is all the paper prints for open models. Both are read from YAML
(`profiles/*.yaml`), where every figure says where it comes from and whether it was measured, inferred or assumed.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from emulator.decode_step import AffineStep

FloatArray: TypeAlias = npt.NDArray[np.float64]
Status: TypeAlias = Literal["measured", "inferred", "assumed"]

KV_UNITS = {"bytes": 1.0, "MB": 1e6, "MiB": 2.0**20}
_SCALED = re.compile(r"(?P<base>.+)@(?P<percent>\d+(?:\.\d+)?)%")


class ProfileError(ValueError):
    """A profile, or a length asked of it, that cannot be used. Names the file or profile, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a figure comes from: `measured` is published, `inferred` follows from what is, `assumed` is chosen."""

    status: Status
    source: str


class Curve:
    """A piecewise-linear function of a length in tokens, > 0 everywhere.

    Below the first point the first segment is extended down to 1 token; where that would reach 0 or less, the line from
    the origin to the first point takes its place. A length of 0 counts as 1: something is always computed. Above the
    last point: ProfileError.
    """

    __slots__ = ("_pieces", "_xs", "_ys", "first_tokens", "last_tokens", "profile")

    def __init__(self, profile: str, tokens: Sequence[int], values: Sequence[float]) -> None:
        """`tokens`: at least two, ascending, >= 1. `values`: as many, > 0. Errors name `profile`."""
        xs, ys = [float(x) for x in tokens], [float(y) for y in values]
        if xs[0] > 1:
            slope = (ys[1] - ys[0]) / (xs[1] - xs[0])
            extended = ys[0] - slope * (xs[0] - 1)
            xs.insert(0, 1.0)
            ys.insert(0, max(extended, ys[0] / xs[1]))
        xs.insert(0, 0.0)
        ys.insert(0, ys[0])
        self.profile = profile
        self.first_tokens, self.last_tokens = int(tokens[0]), int(tokens[-1])
        self._xs, self._ys = xs, ys
        slopes = [(y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False)]
        self._pieces = list(zip(xs, ys, [*slopes, 0.0], strict=True))

    @overload
    def __call__(self, tokens: float) -> float: ...
    @overload
    def __call__(self, tokens: FloatArray) -> FloatArray: ...
    def __call__(self, tokens: float | FloatArray) -> float | FloatArray:
        """The value at `tokens`, a number or an array (same shape). Raises ProfileError outside 0 .. last point."""
        if isinstance(tokens, np.ndarray):
            inside = (tokens >= 0) & (tokens <= self.last_tokens)
            if not inside.all():
                raise self._outside(float(tokens[~inside].flat[0]))
            return np.interp(tokens, self._xs, self._ys)
        return self.at(tokens)

    def at(self, tokens: float) -> float:
        """The value at one length. Raises ProfileError outside 0 .. last point."""
        if 0 <= tokens <= self.last_tokens:
            x, y, slope = self._pieces[bisect_right(self._xs, tokens) - 1]
            return y + slope * (tokens - x)
        raise self._outside(tokens)

    def scaled(self, profile: str, factor: float) -> Curve:
        """`factor` times this curve, for a profile of another name; same points, same extension."""
        other = copy.copy(self)
        other.profile = profile
        other._ys = [factor * y for y in self._ys]
        other._pieces = [(x, factor * y, factor * slope) for x, y, slope in self._pieces]
        return other

    def _outside(self, tokens: float) -> ProfileError:
        if tokens > self.last_tokens:
            return ProfileError(
                f"a length of {tokens:g} tokens: profile {self.profile} ends at {self.last_tokens} tokens and is not "
                "extended above; cap the workload's lengths there, or add a longer point to the profile"
            )
        return ProfileError(f"a length of {tokens:g} tokens for profile {self.profile}: must be a number >= 0")


class Timing(NamedTuple):
    """What a prefill costs, one length in tokens at a time: bytes of KVCache, seconds. Errors as for `Curve`."""

    s_kv: Callable[[float], float]
    t_prefill: Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Profile:
    """One instance's timing. Lengths are uncached input tokens, 0 .. `last_tokens`; others raise ProfileError.

    decode_step_s: seconds a token, with `decode_slots` requests in the batch (T_decode and BS_max of equation 5).
    decode_step: what a step takes by its batch and KV tokens (continuous batching), or None for the constant
    decode_step_s; with one, decode_step_s is what the closed form and policies reckon with, no more.
    pieces: how many equal pieces, one a layer, the KVCache leaves in while later layers compute.
    provenance: for each of `s_kv`, `t_prefill`, `decode_step_s`, `decode_slots`, `pieces`, and `decode_step` if any.
    measurement: of one that was measured here: when, on what machine, with which versions; None of a published one.
    """

    name: str
    model: str
    hardware: str
    decode_step_s: float
    decode_slots: int
    pieces: int
    s_kv_curve: Curve
    t_prefill_curve: Curve
    provenance: dict[str, Provenance] = field(hash=False)
    decode_step: AffineStep | None = None
    measurement: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def first_tokens(self) -> int:
        """The shortest length of the profile's tables; shorter ones are an extension of the first segment."""
        return max(self.s_kv_curve.first_tokens, self.t_prefill_curve.first_tokens)

    @property
    def last_tokens(self) -> int:
        """The longest length that the profile answers for."""
        return min(self.s_kv_curve.last_tokens, self.t_prefill_curve.last_tokens)

    @overload
    def s_kv(self, tokens: float) -> float: ...
    @overload
    def s_kv(self, tokens: FloatArray) -> FloatArray: ...
    def s_kv(self, tokens: float | FloatArray) -> float | FloatArray:
        """S_kv(l): bytes of KVCache, recurrent state included, of a prefill of `tokens`. Shape as given."""
        return self.s_kv_curve(tokens)

    @overload
    def t_prefill(self, tokens: float) -> float: ...
    @overload
    def t_prefill(self, tokens: FloatArray) -> FloatArray: ...
    def t_prefill(self, tokens: float | FloatArray) -> float | FloatArray:
        """T_prefill(l): seconds of a prefill of `tokens`, alone on the instance. Shape as given."""
        return self.t_prefill_curve(tokens)

    @overload
    def phi_kv_bps(self, tokens: float) -> float: ...
    @overload
    def phi_kv_bps(self, tokens: FloatArray) -> FloatArray: ...
    def phi_kv_bps(self, tokens: float | FloatArray) -> float | FloatArray:
        """Equation (1): Phi_kv(l) = S_kv(l) / T_prefill(l), the instance's KV throughput in bits/s. Shape as given."""
        return 8 * self.s_kv_curve(tokens) / self.t_prefill_curve(tokens)

    @property
    def timing(self) -> Timing:
        """Both costs for single lengths, as instances need them."""
        return Timing(self.s_kv_curve.at, self.t_prefill_curve.at)

    def with_decode(
        self,
        *,
        step_s: float | None = None,
        slots: int | None = None,
        step: AffineStep | None = None,
        source: str = "scenario",
    ) -> Profile:
        """This profile with another decode step or number of slots (>= 1), labelled as assumed by `source`.

        step_s (> 0 s) alone is a constant step, in the place of an affine one too; `step` is an affine one.
        """
        changes: dict[str, Any] = {}
        if step is not None:
            changes["decode_step"] = step
        elif step_s is not None and self.decode_step is not None:
            changes["decode_step"] = None
        if step_s is not None:
            if not (math.isfinite(step_s) and step_s > 0):
                raise ProfileError(f"{source}: decode_step_s = {step_s}: must be seconds, greater than 0")
            changes["decode_step_s"] = step_s
        if slots is not None:
            if slots < 1:
                raise ProfileError(f"{source}: decode_slots = {slots}: must be at least 1")
            changes["decode_slots"] = slots
        provenance = self.provenance | {key: Provenance("assumed", source) for key in changes}
        if changes.get("decode_step", self.decode_step) is None:
            provenance.pop("decode_step", None)
        return replace(self, provenance=provenance, **changes)

    def scaled(self, *, t_prefill: float) -> Profile:
        """A variant whose prefills take `t_prefill` (> 0) times as long, named NAME@PERCENT% and labelled as assumed.

        `load_profile` reads that name, so a scenario can ask for it wherever it names a profile: `h20-1t@110%`.
        """
        if not (math.isfinite(t_prefill) and t_prefill > 0):
            raise ProfileError(f"profile {self.name}: T_prefill cannot be scaled by {t_prefill}; use a number above 0")
        name = f"{self.name}@{100 * t_prefill:g}%"
        source = f"{100 * t_prefill:g} % of {self.name} ({self.provenance['t_prefill'].status})"
        return replace(
            self,
            name=name,
            s_kv_curve=self.s_kv_curve.scaled(name, 1.0),
            t_prefill_curve=self.t_prefill_curve.scaled(name, t_prefill),
            provenance=self.provenance | {"t_prefill": Provenance("assumed", source)},
        )


@dataclass(frozen=True, slots=True)
class KvThroughputProfile:
    """Phi_kv(l) alone: enough for equation (2), a cluster's egress. Nothing can be timed with it."""

    name: str
    model: str
    hardware: str
    phi_kv_curve: Curve
    provenance: dict[str, Provenance] = field(hash=False)

    @property
    def first_tokens(self) -> int:
        """The shortest length of the profile's table."""
        return self.phi_kv_curve.first_tokens

    @property
    def last_tokens(self) -> int:
        """The longest length that the profile answers for."""
        return self.phi_kv_curve.last_tokens

    @overload
    def phi_kv_bps(self, tokens: float) -> float: ...
    @overload
    def phi_kv_bps(self, tokens: FloatArray) -> FloatArray: ...
    def phi_kv_bps(self, tokens: float | FloatArray) -> float | FloatArray:
        """Equation (1): Phi_kv(l), bits/s of one instance, from the published table. Shape as given. ProfileError."""
        return self.phi_kv_curve(tokens)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Sourced(_Row):
    status: Status
    source: Annotated[str, Field(min_length=1)]

    @property
    def provenance(self) -> Provenance:
        return Provenance(self.status, self.source)


class _Seconds(_Sourced):
    value: Positive


class _Number(_Sourced):
    value: Count


class _Kv(_Sourced):
    unit: Literal["bytes", "MB", "MiB"]
    values: list[Positive]


class _Values(_Sourced):
    values: list[Positive]


class _Step(_Sourced):
    base_s: Positive
    per_request_s: NotNegative = 0.0
    per_kv_token_s: NotNegative = 0.0


class _File(_Row):
    name: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    hardware: Annotated[str, Field(min_length=1)]
    lengths_tokens: Annotated[list[Count], Field(min_length=2)]

    def _check(self, key: str, values: Sequence[float], *, monotone: bool) -> None:
        if len(values) != len(self.lengths_tokens):
            raise ValueError(f"{key} has {len(values)} values for {len(self.lengths_tokens)} lengths_tokens")
        for i in range(1, len(values)):
            if monotone and values[i] < values[i - 1]:
                raise ValueError(
                    f"{key} falls from {values[i - 1]:g} at {self.lengths_tokens[i - 1]} tokens to {values[i]:g} at "
                    f"{self.lengths_tokens[i]}: a longer prefill takes no less; correct the point"
                )

    def _check_lengths(self) -> None:
        if any(b <= a for a, b in zip(self.lengths_tokens, self.lengths_tokens[1:], strict=False)):
            raise ValueError(f"lengths_tokens = {self.lengths_tokens}: must ascend, each length once")


class _TimingFile(_File):
    kind: Literal["timing"]
    s_kv: _Kv
    t_prefill_s: _Values
    decode_step_s: _Seconds
    decode_slots: _Number
    pieces: _Number
    decode_step: _Step | None = None
    measurement: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _points(self) -> _TimingFile:
        self._check_lengths()
        self._check("s_kv", self.s_kv.values, monotone=True)
        self._check("t_prefill_s", self.t_prefill_s.values, monotone=True)
        return self

    def profile(self) -> Profile:
        unit, step = KV_UNITS[self.s_kv.unit], self.decode_step
        return Profile(
            name=self.name,
            model=self.model,
            hardware=self.hardware,
            decode_step_s=self.decode_step_s.value,
            decode_slots=self.decode_slots.value,
            pieces=self.pieces.value,
            s_kv_curve=Curve(self.name, self.lengths_tokens, [unit * v for v in self.s_kv.values]),
            t_prefill_curve=Curve(self.name, self.lengths_tokens, self.t_prefill_s.values),
            provenance={
                "s_kv": self.s_kv.provenance,
                "t_prefill": self.t_prefill_s.provenance,
                "decode_step_s": self.decode_step_s.provenance,
                "decode_slots": self.decode_slots.provenance,
                "pieces": self.pieces.provenance,
                **({"decode_step": step.provenance} if step else {}),
            },
            decode_step=AffineStep(step.base_s, step.per_request_s, step.per_kv_token_s) if step else None,
            measurement=self.measurement,
        )


class _ThroughputFile(_File):
    kind: Literal["kv_throughput"]
    phi_kv_gbps: _Values

    @model_validator(mode="after")
    def _points(self) -> _ThroughputFile:
        self._check_lengths()
        self._check("phi_kv_gbps", self.phi_kv_gbps.values, monotone=False)
        return self

    def profile(self) -> KvThroughputProfile:
        return KvThroughputProfile(
            name=self.name,
            model=self.model,
            hardware=self.hardware,
            phi_kv_curve=Curve(self.name, self.lengths_tokens, [1e9 * v for v in self.phi_kv_gbps.values]),
            provenance={"phi_kv": self.phi_kv_gbps.provenance},
        )


_FILE: TypeAdapter[_TimingFile | _ThroughputFile] = TypeAdapter(
    Annotated[_TimingFile | _ThroughputFile, Field(discriminator="kind")]
)


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the package, sorted."""
    return sorted(f.name.removesuffix(".yaml") for f in _shipped().iterdir() if f.name.endswith(".yaml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A timing profile: a shipped one by name, or a YAML file (anything with a `/` or ending in .yaml or .yml).

    `NAME@110%` is that profile with prefills that take 110 % of its time (`Profile.scaled`).

    Raises ProfileError for a name that is not shipped, a file that is no profile, or one that has only KV throughput.
    """
    profile = load_kv_profile(name_or_path)
    if isinstance(profile, KvThroughputProfile):
        raise ProfileError(
            f"profile {profile.name} has only KV throughput (Phi_kv), neither S_kv nor T_prefill: it can show a "
            "cluster's egress, but no prefill can be timed with it; choose a profile with kind: timing, such as h200-1t"
        )
    return profile


def load_kv_profile(name_or_path: str | Path) -> Profile | KvThroughputProfile:
    """Any profile, for uses that need no more than `phi_kv_bps`. Names, files and errors as in `load_profile`."""
    text = str(name_or_path)
    if variant := _SCALED.fullmatch(text):
        profile = load_profile(variant["base"])
        return profile.scaled(t_prefill=float(variant["percent"]) / 100)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return _parse(text, _read(Path(text)))
    shipped = shipped_profiles()
    if text not in shipped:
        near = difflib.get_close_matches(text, shipped, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ProfileError(
            f"profile {text!r} does not exist; {hint}shipped: {', '.join(shipped)}; or give the path of a .yaml file"
        )
    return _read_shipped(text)


@cache
def _read_shipped(name: str) -> Profile | KvThroughputProfile:
    return _parse(f"{name}.yaml", _shipped().joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def _shipped() -> resources.abc.Traversable:
    return resources.files("emulator").joinpath("profiles")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ProfileError(
            f"{path}: cannot be read as a profile ({reason}); shipped by name: {', '.join(shipped_profiles())}"
        ) from None


def _parse(where: str, text: str) -> Profile | KvThroughputProfile:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ProfileError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ProfileError(f"{where}: must be a mapping with a profile's keys (see emulator/profiles/h200-1t.yaml)")
    try:
        return _FILE.validate_python(content).profile()
    except ValidationError as error:
        raise ProfileError("; ".join(_explain(where, problem) for problem in error.errors())) from None


def _explain(where: str, problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"] if part not in ("timing", "kv_throughput"))
    match problem["type"]:
        case "extra_forbidden":
            return f"{where}: {key}: unknown key; remove it or correct its spelling"
        case "missing":
            return f"{where}: {key}: missing; add it"
        case "union_tag_not_found" | "union_tag_invalid":
            return f"{where}: kind: must be timing (S_kv and T_prefill) or kv_throughput (Phi_kv alone)"
        case "value_error":
            return f"{where}: {problem['ctx']['error']}"
        case _:
            return f"{where}: {key} = {problem['input']!r}: {problem['msg'].removeprefix('Input ')}"
