"""A link of its own: the topology, the agent in its WAN and a probe's server, no workers. For measuring the link.

Used as root of its namespaces (pid 1 under `unshare`, or User-Mode Linux's only program), so that the kernel removes
all of it with the process. Measurements run in threads of this process that stand in the prfaas site.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from netem.link import LinkError
from netem.topology import ADDRESSES, WAN_INTERFACES, Topology, TopologySettings, build

PORT: Final = 7424  # the first of the probe's, docs/contracts.md
START_S: Final = 60.0  # User-Mode Linux takes ten
_ANSWER_S = 30.0
_PAUSE_S = 0.02

T = TypeVar("T")


class Bench:
    """The link while `link` is open. Everything it raises for is a LinkError."""

    def __init__(self, topology: Topology, directory: Path) -> None:
        self.topology = topology
        self._socket = str(directory / "agent.sock")

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a measurement, `function(host, port, *args)`, in the prfaas site, against the server in pd."""
        return self.topology.call("prfaas", function, ADDRESSES["pd"], PORT, *args)

    def put(self, state: Mapping[str, Any]) -> Any:
        """Ask the agent for a state, as PUT /link; what it answers."""
        return self._request("PUT", "/link", state)

    def counters(self) -> dict[str, dict[str, Any]]:
        """By direction, as GET /counters."""
        found: dict[str, dict[str, Any]] = self._request("GET", "/counters")
        return found

    @contextmanager
    def playing(self, t0_ns: int, steps: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """A layer with these steps over the link, as POST /layers; yields the rows of those applied as they come, and
        takes the layer away at the end."""
        rows: list[dict[str, Any]] = []
        body = {"name": "schedule", "t0_ns": t0_ns, "steps": list(steps), "token_bucket": None}
        with self._asking() as connection:
            connection.request("POST", "/layers", json.dumps(body), {"Content-Type": "application/json"})
            stream, response = connection.sock, connection.getresponse()
            if response.status != http.client.OK:
                raise _refused(json.loads(response.read()))
        stream.settimeout(None)

        def read() -> None:
            with suppress(OSError, http.client.HTTPException):  # it ends in the middle, when the layer is taken away
                rows.extend(json.loads(line) for line in iter(response.readline, b""))

        reading = threading.Thread(target=read, name="netem-layer", daemon=True)
        reading.start()
        try:
            yield rows
        finally:
            stream.shutdown(socket.SHUT_RDWR)
            reading.join(_ANSWER_S)
            connection.close()

    def _request(self, method: str, path: str, body: object = None) -> Any:
        with self._asking() as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        connection.close()
        if response.status != http.client.OK:
            raise _refused(answer)
        return answer

    @contextmanager
    def _asking(self) -> Iterator[http.client.HTTPConnection]:
        """A connection to the agent, closed if anything is raised; an agent that is gone is a LinkError."""
        connection = http.client.HTTPConnection("agent")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_ANSWER_S)
        try:
            connection.sock.connect(self._socket)
            yield connection
        except (OSError, http.client.HTTPException) as gone:
            connection.close()
            raise LinkError(f"the bench's agent does not answer ({gone!r}); run it again") from gone
        except BaseException:
            connection.close()
            raise


def _refused(answer: Any) -> LinkError:
    error = answer["error"]
    return LinkError(error["message"], error.get("field"), error.get("value"), error.get("remedy"))


@contextmanager
def link(directory: Path, agent: Mapping[str, Any], settings: TopologySettings | None = None) -> Iterator[Bench]:
    """Bring a link up, with its files in `directory`, and take it down. `agent`: fields of the agent's configuration
    beside its files, `state` at least. Raises LinkError when it does not come up, with what the agent said."""
    with ExitStack() as stack:
        topology = build(settings)
        stack.callback(topology.close)
        ready = directory / "ready"
        config = {
            "socket": str(directory / "agent.sock"),
            "interfaces": dict(WAN_INTERFACES),
            "applied_log": str(directory / "applied.jsonl"),
            "counters_csv": str(directory / "counters.csv"),
            "ready_file": str(ready),
            **agent,
        }
        (directory / "agent.json").write_text(json.dumps(config))
        log = stack.enter_context(open(directory / "bench.log", "w+"))

        def start(site: str, *argv: str) -> subprocess.Popen[bytes]:
            command = topology.command(site, [sys.executable, "-m", *argv])
            fds = topology.pass_fds(site)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, pass_fds=fds)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        server = start("pd", "netem.probe", "serve", "--address", ADDRESSES["pd"], "--port", str(PORT))
        agents = start("wan", "netem.agent", "--config", str(directory / "agent.json"))
        end_s = time.monotonic() + START_S
        while not (ready.exists() and topology.call("prfaas", _answers)):
            if time.monotonic() > end_s or agents.poll() is not None or server.poll() is not None:
                said = (directory / "bench.log").read_text().strip().removeprefix("error: ")
                raise LinkError(f"the link did not come up: {said or f'no answer within {START_S:g} s'}")
            time.sleep(_PAUSE_S)
        yield Bench(topology, directory)


def _answers() -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((ADDRESSES["pd"], PORT)) == 0
