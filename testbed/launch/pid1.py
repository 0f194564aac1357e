"""Pid 1 of a testbed in namespaces: builds the topology and supervises every process in it. Whatever ends this process
ends them all, by the kernel's hand.

Started by the namespaces launcher only: `unshare ... python -m testbed.launch.pid1 --config FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emulator.log import configure
from testbed.launch.handover import receive_listener
from testbed.launch.local import LocalProcesses, Sites
from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir
from testbed.launch.supervisor import Supervisor, log


def main(arguments: list[str] | None = None) -> int:
    """0 after a stop, 1 where the testbed could not be started."""
    parser = argparse.ArgumentParser(prog="testbed.launch.pid1", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = json.loads(parser.parse_args(arguments).config.read_text())
    if os.getpid() != 1:
        print("error: the supervisor runs as pid 1 of its own namespaces; use `prfaas up`", file=sys.stderr)
        return 2
    os.umask(0o077)
    configure("supervisor", "info")
    state, spec = StateDir(Path(config["state_dir"])), LaunchSpec.from_json(config["spec"])
    try:
        listener = receive_listener(config["handover_fd"])
        sites, topology = _build_sites(spec)
    except Exception as error:  # a user's error carries its own text; anything else its kind as well
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        log.exception("the topology could not be built")
        state.failure_file.write_text(text)
        return 1
    processes = LocalProcesses(state, sites, listener)

    async def supervise() -> int:
        processes.watch()
        return await Supervisor(state, config["run_id"], spec, processes, topology).run()

    return asyncio.run(supervise())


def _build_sites(spec: LaunchSpec) -> tuple[Sites | None, Mapping[str, Any]]:
    if spec.topology is None:
        return None, {}
    from netem import topology

    built = topology.build(topology.TopologySettings(**spec.topology))
    return built, topology.described(built.settings, built.congestion_control, built.rto_max_s)


if __name__ == "__main__":
    sys.exit(main())
