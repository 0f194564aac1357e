"""The first program of every container of a testbed: makes it what a process of the testbed expects to be, and becomes
that process (so that it is pid 1 of the container, and a signal for the container is one for it).

`python -m testbed.launch.contained --name NAME [...] -- PROGRAM ARGUMENT...`, with PRFAAS_STATE in the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys

from testbed.launch.handover import take_listener
from testbed.launch.state import StateDir


def main(arguments: list[str] | None = None) -> int:
    """Does not return where all is well."""
    parser = argparse.ArgumentParser(prog="testbed.launch.contained", description="Become a process of a testbed.")
    parser.add_argument("--name", required=True, help="of the process, and so of its log")
    parser.add_argument("--nice", type=int, default=0, help="added to the niceness")
    parser.add_argument("--plug-wan", type=json.loads, help="plug the WAN in: the fields of TopologySettings, as JSON")
    parser.add_argument("--listen-fd", type=int, help="take over the host's listening socket, as this descriptor")
    parser.add_argument("argv", nargs="+", metavar="PROGRAM ARGUMENT", help="what to become")
    asked = parser.parse_args(arguments)
    os.umask(0o007)  # what is made in the state directory is the user's too, by its group
    state = StateDir()
    log = os.open(state.log(asked.name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o660)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    try:
        os.nice(asked.nice)
        if asked.plug_wan is not None:
            from netem.plugged import plug_wan
            from netem.topology import TopologySettings

            plug_wan(TopologySettings(**asked.plug_wan))
        if asked.listen_fd is not None:
            with socket.socket(socket.AF_UNIX) as handover:
                handover.connect(str(state.listener_sock))
                listener = take_listener(handover)
            os.dup2(listener.detach(), asked.listen_fd)
        os.execvp(asked.argv[0], asked.argv)
    except (OSError, ValueError) as error:
        print(f"error: {asked.name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
