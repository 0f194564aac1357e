"""A testbed without its network: real gateway and workers as processes on 127.0.0.1, no namespaces, no shaping.

What they are started with is what the launcher would start them with, but for addresses and ports.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testbed.fleet import launch_spec
from testbed.launch.state import StateDir, write_json
from testbed.scenario import Scenario

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 20.0
"""How long a test waits for what must come: long, since nothing here is about speed."""


class Loopback:
    """A fleet on loopback. `with Loopback(scenario) as fleet:`; policies: a folder to import policies from."""

    def __init__(self, scenario: Scenario, policies: Path | None = None) -> None:
        self.scenario = scenario
        self.root = Path(tempfile.mkdtemp(prefix="prf"))
        self.port = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._state = StateDir(self.root / "state", create=True)
        self._state.fresh()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        spec = launch_spec(scenario, scenario.deployments[0], port=self.port, state=self._state)
        self._specs = {one.name: one for one in spec.processes if one.name != "agent"}
        self._configs = {name: dict(one.config or {}) for name, one in self._specs.items()}
        self._move_to_loopback()
        self._configs["gateway"] |= {"listen_fd": self._listener.fileno(), "import_path": [str(policies or REPOSITORY)]}

    def __enter__(self) -> Loopback:
        try:
            for stage in sorted({one.stage for one in self._specs.values()}):
                names = [name for name, one in self._specs.items() if one.stage == stage]
                for name in names:
                    self.start(name)
                for name in names:
                    self.wait_ready(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self._listener.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # processes
    def start(self, name: str) -> None:
        """Start one process (again)."""
        self._state.ready_file(name).unlink(missing_ok=True)
        path = self._state.config_file(name)
        write_json(path, self._configs[name])
        fds = (self._listener.fileno(),) if name == "gateway" else ()
        with self._state.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self._specs[name].argv, "--config", str(path)], cwd=REPOSITORY, stdout=log, stderr=log, pass_fds=fds
            )

    def wait_ready(self, name: str) -> None:
        until(self._state.ready_file(name).exists, lambda: f"{name} is not ready: {self.log(name)}")

    def kill(self, name: str) -> None:
        """SIGKILL, and gone."""
        self.processes[name].kill()
        self.processes[name].wait()

    def revive(self, *names: str) -> None:
        """Start killed workers again, and wait until the gateway has them back."""
        for name in names:
            if self.processes[name].poll() is not None:
                self.start(name)
        self.wait_alive(*names)

    def wait_alive(self, *names: str) -> None:
        until(lambda: all(self.node(name)["alive"] for name in names), lambda: f"{names} did not come back")

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def terminate(self, name: str) -> int:
        """SIGTERM; the exit code."""
        self.signal(name, signal.SIGTERM)
        return self.processes[name].wait(PATIENCE_S)

    def config(self, name: str) -> dict[str, Any]:
        """What a process was started with."""
        return dict(self._configs[name])

    def control_port(self, name: str) -> int:
        port: int = self._configs[name]["control_port"]
        return port

    def log(self, name: str) -> str:
        return self._state.log(name).read_text()

    # HTTP
    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """One request: status, headers (lower case), and the answer as JSON where it is JSON, else as a text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, payload, headers or {})
        response = connection.getresponse()
        raw = response.read().decode()
        connection.close()
        found = {key.lower(): value for key, value in response.getheaders()}
        return response.status, found, json.loads(raw) if found.get("content-type", "").startswith(JSON) else raw

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.call("GET", "/prfaas/status")[2]
        return answer

    def session(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.status()["session"]
        return answer

    def node(self, name: str) -> dict[str, Any]:
        node: dict[str, Any] = next(one for one in self.status()["nodes"] if one["name"] == name)
        return node

    def is_idle(self) -> bool:
        """Nothing is in flight, and no node holds anything of anybody."""
        status = self.status()
        held = ("queued_requests", "assigned_requests", "decoding_requests")
        return status["session"]["in_flight"] == 0 and not any(node[key] for node in status["nodes"] for key in held)

    def wait_idle(self) -> None:
        until(self.is_idle, lambda: f"not idle: {self.status()}")

    def begin(self, **body: Any) -> dict[str, Any]:
        """Begin a load; it has to be accepted. Its files are where they lie here."""
        status, _, answer = self.call("POST", "/prfaas/loads", {"lead_s": 0, **body})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer | {what: self._state.loads / answer[what] for what in ("rows", "events", "setup")}

    def end(self, load: dict[str, Any]) -> dict[str, Any]:
        status, _, totals = self.call("POST", f"/prfaas/loads/{load['id']}/end")
        assert status == 200, totals
        assert isinstance(totals, dict)
        return totals

    def _move_to_loopback(self) -> None:
        ports = {config["control_port"]: free_port() for config in self._workers()}
        data = {config["data_port"]: free_port() for config in self._workers()}
        scraped = {config["metrics_port"]: free_port() for config in self._workers()}
        for config in self._workers():
            config["metrics_port"] = scraped[config["metrics_port"]]
            for one in (config, *config["peers"].values()):
                one["host"] = "127.0.0.1"
                one["control_port"], one["data_port"] = ports[one["control_port"]], data[one["data_port"]]
        for node in self._configs["gateway"]["nodes"]:
            node["host"], node["control_port"] = "127.0.0.1", ports[node["control_port"]]
            node["metrics_port"] = scraped[node["metrics_port"]]

    def _workers(self) -> list[dict[str, Any]]:
        return [config for name, config in self._configs.items() if name != "gateway"]


JSON = "application/json"


class Stream:
    """One streamed answer, read as it comes."""

    def __init__(self, fleet: Loopback, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=PATIENCE_S)
        self._connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def events(self) -> Iterator[Any]:
        """The events' data, JSON decoded, `[DONE]` as a text; ends where the stream does."""
        for line in self.response:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield data.decode() if data == b"[DONE]" else json.loads(data)
            else:
                assert line == b"\n"

    def close(self) -> None:
        """Leave, whatever is still to come."""
        sock = self._connection.sock
        if sock is not None:
            sock.close()
        if self._response is not None:
            self._response.close()
        self._connection.close()


def until(holds: Callable[[], object], otherwise: Callable[[], str]) -> None:
    """Wait until it holds; `otherwise` says what is wrong when it does not for PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has; from 20000 up to where the kernel's own choices begin."""
    for _ in range(1000):
        port = 20000 + int.from_bytes(os.urandom(2), "big") % 12000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
