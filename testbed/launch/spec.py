"""What a launcher is asked to start: processes in sites, the link's topology, the gateway's port. Plain frozen data, so
that one specification serves every launcher and can be compared with the one that is already up.
"""

import hashlib
import json
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.launch.state import TestbedError

READY_TIMEOUT_S = 30.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the testbed.

    `name` is unique and names its log, ready file and configuration. The process says that it is ready by creating
    `StateDir().ready_file(name)`, holding its own pid; its configuration has to tell it so. `argv` is what runs; where
    `config` is not None it is written as JSON and `--config FILE` is appended. Where `listens`, the host's listening
    socket is inherited, and `config` gets the key `listen_fd`.
    `site` is a site of the topology, or None for the supervisor's own, isolated namespace.
    Processes of a lower `stage` are ready before those of a higher one start; within a stage they start together.
    `cpus` pins the process to these cores; `nice` is added to its niceness (below 0 needs root, else refused at start).
    """

    name: str
    site: str | None
    argv: tuple[str, ...]
    role: str = ""
    config: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    listens: bool = False
    stage: int = 0
    cpus: tuple[int, ...] = ()
    nice: int = 0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise TestbedError(f"process name {self.name!r}: use letters, digits, '.', '_' and '-', at most 64 of them")
        if not self.argv:
            raise TestbedError(f"process {self.name}: argv is empty")


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything a launcher needs. `topology` holds the fields of `netem.topology.TopologySettings` (None: no sites at
    all); `port` is the gateway's on 127.0.0.1. `fingerprint` tells two specifications apart: leave it empty to have it
    computed from all the others.

    Raises `TestbedError` where names repeat, more than one process listens, or the port is not 1-65535.
    """

    processes: tuple[ProcessSpec, ...]
    topology: Mapping[str, Any] | None
    port: int = 8000
    scenario: str = ""
    ready_timeout_s: float = READY_TIMEOUT_S
    fingerprint: str = ""

    def __post_init__(self) -> None:
        names = [process.name for process in self.processes]
        for name in names:
            if names.count(name) > 1:
                raise TestbedError(f"process name {name!r} is used more than once")
        if sum(process.listens for process in self.processes) > 1:
            raise TestbedError("more than one process asks for the listening socket; only the gateway may")
        if not 1 <= self.port <= 65535:
            raise TestbedError(f"port {self.port}: not between 1 and 65535; choose another with --port")
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", _fingerprint(self))

    def to_json(self) -> dict[str, Any]:
        """As the supervisor's configuration carries it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LaunchSpec":
        """The inverse of `to_json`."""
        processes = tuple(
            ProcessSpec(**{**one, "argv": tuple(one["argv"]), "cpus": tuple(one["cpus"])}) for one in data["processes"]
        )
        return cls(**{**data, "processes": processes})


@dataclass(frozen=True, slots=True)
class Up:
    """A testbed that is up. `already`: it was before this call. `dead` names processes that have ended since."""

    launcher: str
    run_id: str
    scenario: str
    port: int
    url: str
    state_dir: str
    started_at: str
    already: bool
    dead: tuple[str, ...] = ()


def signal_number(value: object) -> int:
    """A signal's number from "KILL", "SIGKILL", "9" or 9. Raises `TestbedError` if there is none."""
    try:
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
            return signal.Signals(int(value)).value
        name = str(value).upper()
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"].value
    except (KeyError, ValueError):
        raise TestbedError(f"signal {value!r}: no such signal; name one such as KILL, TERM, STOP or CONT") from None


def _fingerprint(spec: LaunchSpec) -> str:
    data = {key: value for key, value in asdict(spec).items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
