"""Virtual time's innermost modules, compiled: the same code, 1.6 times as fast, and never of another version.

`make fast` makes a build (`testbed/fast_build.py`); this is what finds it. mypyc compiles the modules as they are. A
build lies in the environment's site-packages under a name made of the sources' own digest, so an edited module is
simply not the one that was compiled: it runs as Python until it is built again. `PRFAAS_PURE=1` leaves a build aside,
for a debugger or a comparison; results are the same bytes either way.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

MODULES: Final = (
    "emulator.batching",
    "emulator.computed",
    "emulator.decode_instance",
    "emulator.instance",
    "emulator.kvcache",
    "emulator.prefix_cache",
    "netem.fluid",
    "testbed.control.judge",
    "testbed.control.life",
    "testbed.control.nodes",
    "testbed.directory",
    "testbed.report.collect",
    "testbed.scheduler.estimators",
    "testbed.scheduler.prfaas",
    "testbed.scheduler.rules",
    "testbed.world",
)
"""What is compiled: where virtual time spends most of its own time. All else stays Python, the policies' API too."""

ROOT: Final = Path(__file__).resolve().parent.parent
STORE: Final = Path(os.environ.get("PRFAAS_FAST_DIR") or Path(sysconfig.get_path("purelib")) / "prfaas_fast")
PURE: Final = "PRFAAS_PURE"
SUFFIX: Final = importlib.machinery.EXTENSION_SUFFIXES[0]


def source(module: str) -> Path:
    """The module's own file."""
    return ROOT / (module.replace(".", "/") + ".py")


def key() -> str:
    """The digest of what a build is made of: the modules' sources, this Python and its ABI."""
    digest = hashlib.sha256(f"{sys.version} {SUFFIX}".encode())
    for module in MODULES:
        digest.update(source(module).read_bytes())
    return digest.hexdigest()[:16]


class _Compiled(MetaPathFinder):
    """Finds the modules, and what they share, in a build."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


def install() -> bool:
    """Let imports find the build of these very sources, if there is one; whether they will."""
    if os.environ.get(PURE) or not STORE.is_dir():
        return False
    folder = STORE / key()
    files = {file.name.removesuffix(SUFFIX): file for file in folder.glob(f"*{SUFFIX}")}
    if not set(MODULES) <= set(files):
        return False
    sys.meta_path.insert(0, _Compiled(files))
    return True
