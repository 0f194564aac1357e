"""The supervisor of a testbed in containers, on the host: `python -m testbed.launch.compose_supervisor --config FILE`,
started by the compose launcher only, once compose has made the containers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from emulator.log import configure
from netem.topology import TopologySettings
from testbed.launch import engine as engines
from testbed.launch.containers import Containers
from testbed.launch.handover import receive_listener
from testbed.launch.spec import LaunchSpec
from testbed.launch.state import StateDir, TestbedError
from testbed.launch.supervisor import Supervisor, log


def main(arguments: list[str] | None = None) -> int:
    """0 after a stop, 1 where the testbed could not be started."""
    parser = argparse.ArgumentParser(prog="testbed.launch.compose_supervisor", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = json.loads(parser.parse_args(arguments).config.read_text())
    os.umask(0o077)
    configure("supervisor", "info")
    state, spec = StateDir(Path(config["state_dir"])), LaunchSpec.from_json(config["spec"])
    try:
        listener = receive_listener(config["handover_fd"])
        engine = engines.connect()
        containers = Containers(state, engine, engines.containers(engine), listener)
    except TestbedError as error:
        return _failed(state, error)

    async def supervise() -> int:
        containers.watch()
        try:
            topology = await containers.plug_in(TopologySettings(**(spec.topology or {})))
        except TestbedError as error:
            await containers.close()
            return _failed(state, error)
        return await Supervisor(state, config["run_id"], spec, containers, topology).run()

    return asyncio.run(supervise())


def _failed(state: StateDir, error: TestbedError) -> int:
    log.error("%s", error)
    state.failure_file.write_text(str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
