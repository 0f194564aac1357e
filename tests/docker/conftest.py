"""What the tests in containers share: an engine with a base image, and one small testbed for all that leave it up."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testbed.cli.shared import bring_up
from testbed.launch import engine as engines
from testbed.launch import launchers
from testbed.launch.state import StateDir, TestbedError
from testbed.load import Testbed
from testbed.scenario import parse
from tests.wire.loopback import free_port

SCENARIO = {
    "name": "contained",
    "description": "A small fleet in containers.",
    "deployments": [
        {
            "name": "prfaas-pd",
            "profiles": {"prfaas": "toy", "pd": "toy"},
            "fleet": {"n_prfaas": 2, "n_p": 1, "n_d": 2},
            "policy": {"name": "static", "threshold_tokens": 8192},
        }
    ],
    "workload": {
        "lengths": {"kind": "mix", "values": [1024, 32768], "weights": [1, 1]},
        "output_tokens": 100,
        "rate_rps": 1,
        "duration_s": 40,
        "warmup_s": 0,
    },
    "link": {"rate_bps": "8gbps", "delay_s": 0.02},
    "decode": {"stream_interval": 10},
    "scale": {"time_scale": 5, "byte_scale": 0.001},
}


def why_not() -> str | None:
    """Why nothing can be run in containers here; None if it can."""
    try:
        engine = engines.connect()
        engine.images.get(os.environ.get("BASE_IMAGE", "python:3.11-slim"))
    except TestbedError as error:
        return str(error)
    except Exception as error:  # the SDK's, for an image that is not there
        return f"{error}; name one that is there: BASE_IMAGE=..."
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_not() if here else None
    if reason is not None and os.environ.get("PRFAAS_CI") != "1":
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Contained:
    """A testbed in containers; `before` is what the engine had."""

    testbed: Testbed
    engine: Any
    before: dict[str, set[str]] = field(default_factory=dict)

    @property
    def made(self) -> dict[str, Any]:
        """Service -> container, as they are now."""
        return engines.containers(self.engine)


def holds(engine: Any) -> dict[str, set[str]]:
    """What an engine has of everything that a testbed could leave in it."""
    return {
        "containers": {one.name for one in engine.containers.list(all=True)},
        "networks": {one.name for one in engine.networks.list()},
        "volumes": {one.name for one in engine.volumes.list()},
        "tags": {tag for one in engine.images.list() for tag in one.tags},
    }


@pytest.fixture(scope="module")
def contained() -> Iterator[Contained]:
    """A testbed that is up; down again after the module, with nothing left of it. Its state directory is at home, which
    for root is out of reach in a container, and one in namespaces has left a load there."""
    engine = engines.connect()
    before = holds(engine)
    root = Path(tempfile.mkdtemp(prefix=".prf", dir=Path.home()))
    os.environ["PRFAAS_STATE"] = str(root)
    earlier = root / "loads" / "adhoc-1"
    earlier.mkdir(parents=True, mode=0o700)
    (earlier / "setup.json").touch(mode=0o600)
    try:
        testbed, _ = bring_up(parse(SCENARIO, "contained"), free_port(), "compose")
        yield Contained(testbed, engine, before)
    finally:
        launchers.down()
        left = holds(engine)
        state = sorted(path.name for path in StateDir(root).root.iterdir() if path.suffix in (".sock", ".yaml", ".env"))
        del os.environ["PRFAAS_STATE"]
        shutil.rmtree(root, ignore_errors=True)
    assert left == before
    assert set(state) <= {"scenario.yaml"}
