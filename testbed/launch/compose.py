"""Not yet."""

from collections.abc import Mapping
from typing import Any

from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir, TestbedError

NAME = "compose"
STOP_S = 30.0


def prepare(state: StateDir, spec: LaunchSpec) -> Mapping[str, Any]:
    raise TestbedError("not yet")


def argv() -> list[str]:
    raise TestbedError("not yet")


def refusal() -> str | None:
    return "not yet"


def clear(state: StateDir) -> list[str]:
    return []


def host_pids(state: StateDir) -> Mapping[int, int]:
    return {}
