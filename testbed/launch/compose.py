"""The compose launcher: every process in a container of an engine on this host. Sites and link are the same; who starts
the processes differs. The state directory, which the containers share, has the same sockets and files.

Its supervisor runs on the host. If that is killed the containers run on, and `prfaas down` removes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from testbed.launch import compose_file, engine
from testbed.launch.containers import built_images, write_configs
from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir, TestbedError, write_json

PATIENCE = 3.0  # an engine takes a while for each container, and on a busy machine a long one
STOP_S = 40.0
IMAGES: Final = {"testbed": "prfaas-testbed", "model": "prfaas-testbed-model", "locust": "prfaas-testbed-locust"}
"""Target of the Dockerfile -> tag."""


def prepare(state: StateDir, spec: LaunchSpec) -> None:
    """Build the image, write the compose file, and have compose make networks and containers. Raises TestbedError."""
    client = engine.connect()
    if (other := engine.owner(client)) is not None:
        raise TestbedError(
            f"this engine runs a testbed already (state directory {other}), and one engine has room for one, as their "
            f"addresses are the same; take it down first: PRFAAS_STATE={other} prfaas down"
        )
    user, group = state.share()
    state.compose_file.write_text(compose_file.render(spec, bounds_tries=_bounds_tries()))
    computes = any((process.config or {}).get("model") is not None for process in spec.processes)
    target = "model" if computes else "testbed"
    _build(client, state, target)
    write_configs(state, spec)
    scrape = (engine.REPOSITORY / "compose/prometheus/prometheus.yml").read_text()
    scraped = state.config_file("prometheus").with_suffix(".yml")
    scraped.write_text(scrape.replace(":8000/", f":{spec.port}/"))
    scraped.chmod(0o644)  # Prometheus' image runs as a user of its own
    variables = {
        "PRFAAS_STATE": state.root,
        "PRFAAS_SOURCE": engine.REPOSITORY,
        "PRFAAS_POLICIES": Path.cwd(),
        "PRFAAS_UID": user,
        "PRFAAS_GID": group,
        "PRFAAS_PORT": spec.port,
        "PRFAAS_IMAGE": IMAGES[target],
        "PRFAAS_LOCUST_IMAGE": IMAGES["locust"],
    }
    state.compose_env.write_text("".join(f"{name}={_quoted(str(value))}\n" for name, value in variables.items()))
    engine.compose(state, "create", "--no-build", "--pull", "never")


def argv() -> list[str]:
    """The supervisor's command."""
    return [sys.executable, "-m", "testbed.launch.compose_supervisor"]


def refusal() -> str | None:
    """Why containers cannot be made here; None if they can."""
    try:
        engine.connect()
    except TestbedError as error:
        return str(error)
    return None


def clear(state: StateDir) -> list[str]:
    """Remove what this state directory's testbed left in the engine. Raises TestbedError where the engine is gone."""
    try:
        client = engine.connect()
        if engine.owner(client) not in (None, str(state.root)):
            return []
        return engine.remove(client, built_images(state))
    except TestbedError as error:
        raise TestbedError(
            f"whatever the containers of {state.root} left cannot be removed: {error}; if that engine is no more, "
            f"remove {state.compose_file}"
        ) from None


def host_pids(state: StateDir) -> Mapping[int, int]:
    """Nothing: the supervisor tells them."""
    return {}


def add(state: StateDir, profiles: Sequence[str]) -> dict[str, str]:
    """Start what watches or loads the testbed that is up, by profile; the address of each one's page.

    Raises TestbedError: not up in containers, no such profile, or an image that cannot be had.
    """
    for name in profiles:
        if name not in compose_file.PROFILES:
            raise TestbedError(f"--with {name}: there are {', '.join(compose_file.PROFILES)}")
    record = state.read()
    if record is None or record.launcher != "compose":
        raise TestbedError("what is started beside a testbed are containers; start that with --launcher compose too")
    if "locust" in profiles:
        _build(engine.connect(), state, "locust")
    options = [word for name in profiles for word in ("--profile", name)]
    services = [name for name in profiles if name != "locust"] + ["locust", "locust-worker"] * ("locust" in profiles)
    engine.compose(state, *options, "up", "--detach", "--no-build", "--no-recreate", "--no-deps", *services)
    return {name: f"http://127.0.0.1:{compose_file.PAGES[name]}" for name in profiles}


def _build(client: Any, state: StateDir, target: str) -> None:
    tag = IMAGES[target]
    wheels = (os.environ.get("TORCH_WHEELS") or None) if target == "model" else None
    if wheels is not None:
        _note(state, engine.WHEELS_TAG)
    if engine.build(client, tag, target, os.environ.get("BASE_IMAGE"), wheels):
        _note(state, tag)


def _note(state: StateDir, tag: str) -> None:
    """That an image is this testbed's, to be gone when that is."""
    write_json(state.config_file("images"), [*(one for one in built_images(state) if one != tag), tag])


def _bounds_tries() -> bool:
    return Path("/proc/sys/net/ipv4/tcp_rto_max_ms").exists()


def _quoted(value: str) -> str:
    """A value of an environment file, as it is."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
