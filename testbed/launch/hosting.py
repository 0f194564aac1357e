"""What a supervisor needs of whoever runs its processes: processes of this host (`local.py`), or containers
(`containers.py`). The supervisor decides what runs when; a hosting knows how.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from testbed.launch.spec import ProcessSpec


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: with an exit code, or by the signal of this number."""

    exit_code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, returncode: int) -> Ending:
        """From an exit code, or a signal's number below zero."""
        return cls(signal=-returncode) if returncode < 0 else cls(exit_code=returncode)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"was ended by {signal_name(self.signal)}"
        return f"ended with exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started. `pid` as it sees itself, which its ready file holds; `host_pid` on this host, where
    the supervisor can tell."""

    pid: int
    host_pid: int | None = None


Change = Ending | Started


class Hosting(Protocol):
    """Runs a testbed's processes. Every call may raise TestbedError, whose text is for the user."""

    async def start(self, process: ProcessSpec, again: bool, changed: Callable[[Change], None]) -> Started:
        """Start one. `again`: it ran before, and its log goes on. `changed` is called in the event loop when it has
        ended, and when somebody else has started it after that."""

    async def signal(self, name: str, number: int) -> None:
        """Send a signal to one that runs. SIGSTOP and SIGCONT freeze it whole and let it go on."""

    async def frozen(self, names: Collection[str]) -> set[str]:
        """Those of `names`, which run, that are frozen now."""

    async def run(self, site: str | None, argv: list[str], timeout_s: float) -> dict[str, Any]:
        """Run a helper in a site (None: beside the supervisor) to its end: {"rc", "stdout", "stderr", "timed_out"}.

        When its time is up it is killed, and what it started.
        """

    async def close(self) -> None:
        """Remove whatever else was made for the processes; they have all ended or been killed."""


def signal_name(number: int) -> str:
    """As in "SIGKILL", or "signal 40" where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
