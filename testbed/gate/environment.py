"""Which code a worker imports: the testbed that is installed, with the scheduler or the policy of another revision.

Light on purpose: a worker imports it before it may import anything of the scheduler.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SCHEDULER = "testbed.scheduler"


@dataclass(frozen=True, slots=True)
class Environment:
    """scheduler: a folder that holds `testbed/scheduler` of another revision, for all of the testbed to import in its
    stead. own: a folder that somebody's policy module is imported from, before all others."""

    scheduler: Path | None = None
    own: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        """For the process: one thread, as there is a process a core; compiled modules are of the scheduler that is
        installed."""
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return threads if self.scheduler is None else {**threads, "PRFAAS_PURE": "1"}

    def enter(self) -> None:
        """Make this process's imports so. Raises RuntimeError when a scheduler was imported before."""
        import testbed

        sys.path.insert(0, str(Path.cwd()))
        if self.own is not None:
            sys.path.insert(0, str(self.own))
        if self.scheduler is None:
            return
        if SCHEDULER in sys.modules:
            raise RuntimeError(f"{SCHEDULER} is imported already, from {sys.modules[SCHEDULER].__file__}")
        testbed.__path__.insert(0, str(self.scheduler / "testbed"))
