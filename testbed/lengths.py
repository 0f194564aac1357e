"""From profiles and workloads to what the model takes: hardware curves and distributions of lengths."""

from __future__ import annotations

from collections.abc import Iterable

from emulator.profile import Profile
from testbed.scheduler.model import Hardware, LengthDistribution
from traces.request import Request


def hardware(profile: Profile) -> Hardware:
    """The model's view of one instance of `profile`: S_kv in bytes and T_prefill in seconds over arrays of tokens."""
    return Hardware(s_kv=profile.s_kv, t_prefill=profile.t_prefill)


def lengths_of(requests: Iterable[Request]) -> LengthDistribution:
    """The input lengths of a workload, equal weights, as if nothing were cached. Raises ModelError when it is empty."""
    return LengthDistribution.of_sample([request.input_tokens for request in requests])


def mean_output_tokens(requests: Iterable[Request]) -> float:
    """Mean L_out of equation (5), tokens. Raises ModelError when there is no request."""
    return LengthDistribution.of_sample([request.output_tokens for request in requests]).mean
