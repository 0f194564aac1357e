"""How long a decode step takes when it depends on what is in it: step(batch, KV tokens), and its sums over steps.

A batch of B requests whose contexts hold K tokens takes a + b B + c K seconds a step: the weights are read once (a),
every request costs something (b), and every token of KV is read (c). K grows by B a step, so the time of n steps is a
closed form, and nobody has to count tokens one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class DecodeTiming(Protocol):
    """What continuous batching needs to know. batch: requests in the step; kv_tokens: in all of their contexts."""

    def step_s(self, batch: int, kv_tokens: int) -> float:
        """Seconds of one step."""
        ...

    def elapsed_s(self, batch: int, kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` steps of an unchanged batch that starts with `kv_tokens`; 0 for none."""
        ...

    def steps_by(self, batch: int, kv_tokens: int, elapsed_s: float) -> int:
        """The least number of steps that take `elapsed_s` seconds or more; 0 for 0 s."""
        ...


@dataclass(frozen=True, slots=True)
class AffineStep:
    """step(B, K) = base_s + per_request_s B + per_kv_token_s K, seconds; base_s > 0, the others >= 0."""

    base_s: float
    per_request_s: float = 0.0
    per_kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("base_s", "above 0"), ("per_request_s", "at least 0"), ("per_kv_token_s", "at least 0")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "base_s" and value == 0):
                raise ValueError(f"{name} = {value}: must be seconds, {least}")

    def step_s(self, batch: int, kv_tokens: int) -> float:
        """Seconds of one step."""
        return self.base_s + self.per_request_s * batch + self.per_kv_token_s * kv_tokens

    def elapsed_s(self, batch: int, kv_tokens: int, steps: int) -> float:
        """n step(B, K) + c B n (n - 1) / 2: step i finds K + i B tokens of KV."""
        growth = self.per_kv_token_s * batch
        return steps * self.step_s(batch, kv_tokens) + growth * (steps * (steps - 1) // 2)

    def steps_by(self, batch: int, kv_tokens: int, elapsed_s: float) -> int:
        """The root of `elapsed_s`'s quadratic, put right where its rounding misses a whole number."""
        if elapsed_s <= 0:
            return 0
        growth = self.per_kv_token_s * batch
        linear = self.step_s(batch, kv_tokens) - growth / 2
        # Written so that nothing cancels: n = 2 e / (p + sqrt(p^2 + 2 q e)), e / p without growth.
        steps = math.ceil(2 * elapsed_s / (linear + math.sqrt(linear * linear + 2 * growth * elapsed_s)))
        while self.elapsed_s(batch, kv_tokens, steps) < elapsed_s:
            steps += 1
        while steps > 1 and self.elapsed_s(batch, kv_tokens, steps - 1) >= elapsed_s:
            steps -= 1
        return steps


@dataclass(frozen=True, slots=True)
class Slowed:
    """Another timing, each of whose steps takes `factor` times as long."""

    timing: DecodeTiming
    factor: float

    def step_s(self, batch: int, kv_tokens: int) -> float:
        """Seconds of one step."""
        return self.factor * self.timing.step_s(batch, kv_tokens)

    def elapsed_s(self, batch: int, kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` steps."""
        return self.factor * self.timing.elapsed_s(batch, kv_tokens, steps)

    def steps_by(self, batch: int, kv_tokens: int, elapsed_s: float) -> int:
        """The least number of steps that take `elapsed_s` seconds or more."""
        return self.timing.steps_by(batch, kv_tokens, elapsed_s / self.factor)
