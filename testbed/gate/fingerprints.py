"""What a run depends on besides its policy: the scenario, the requests, the machine and the testbed's code.

Every run is told what it was made with by the process that made it, so that a tree edited under a gate, or a file of
another machine, is noticed instead of compared.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any, Final

import orjson

from testbed import sources
from testbed.gate.environment import SCHEDULER
from testbed.scenario import Scenario

Like = dict[str, str]
"""ALIKE by name, each a SHA-256."""

ALIKE: Final = ("scenario_sha256", "trace_sha256", "host_sha256", "code_sha256")


@cache
def code_sha256() -> str:
    """Of what a run depends on besides the policy: all code of ours that it imports but the scheduler's, and the
    profiles."""
    return sources.code_sha256("testbed.gate.measure", but=SCHEDULER)


@cache
def host() -> dict[str, str]:
    """What the arithmetic of virtual time depends on."""
    return {
        "python": platform.python_version(),
        "arch": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        **{name: metadata.version(name) for name in ("numpy", "pandas")},
    }


def sha256_of(value: Any) -> str:
    """Of JSON-ready data."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def scenario_sha256(scenario: Scenario, rates_rps: Sequence[float] = ()) -> str:
    """Of what is run, but for policy and seed. scenario: of one deployment."""
    data = scenario.data()
    del data["deployments"][0]["policy"], data["seed"]
    return sha256_of([data, list(rates_rps)])


def like(scenario: Scenario, rates_rps: Sequence[float], trace_sha256: str) -> Like:
    """Of a run that this process made."""
    return {
        "scenario_sha256": scenario_sha256(scenario, rates_rps),
        "trace_sha256": trace_sha256,
        "host_sha256": sha256_of(host()),
        "code_sha256": code_sha256(),
    }
