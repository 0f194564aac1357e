"""Runs that are kept: a gate need not run a baseline again. One small JSON file a run, named by all that it depends on.

Several gates may write at once, since a file appears whole; one that is not what was written, for whatever reason, is
run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Final

import orjson

from testbed.gate.fingerprints import code_sha256, host, sha256_of
from testbed.gate.jobs import Job, Measured
from testbed.sources import files_sha256

KEEP_DAYS: Final = 30.0
"""Runs of testbeds that nobody has used for so long are thrown away."""


def default_folder() -> Path:
    """PRFAAS_CACHE, or prfaas in the user's cache folder."""
    own = os.environ.get("PRFAAS_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas"


class Cache:
    """folder: None keeps nothing. writable: False once it turned out that nothing can be written there."""

    def __init__(self, folder: Path | None) -> None:
        self.writable = folder is not None
        self._folder = folder and folder / "gate" / sha256_of([code_sha256(), host()])[:16]
        if self._folder is not None:
            self._begin(self._folder)

    def key(self, identity: str, job: Job) -> str:
        """identity: of the arm (`Arm.identity`). The scenario's fingerprint has its policy and seed."""
        return sha256_of([identity, job.scenario.fingerprint(), list(job.rates_rps), files_sha256(job.scenario)])

    def get(self, key: str) -> Measured | None:
        """A run that is there and whole."""
        if self._folder is None:
            return None
        try:
            digest, _, body = (self._folder / f"{key}.json").read_bytes().partition(b"\n")
        except OSError:
            return None
        if hashlib.sha256(key.encode() + body).hexdigest().encode() != digest:
            return None
        measured: Measured = orjson.loads(body)
        return measured

    def put(self, key: str, measured: Measured) -> None:
        """Keep a run. A folder that cannot be written to is one that keeps nothing, and `writable` says so."""
        if self._folder is None or not self.writable:
            return
        body = orjson.dumps(measured, option=orjson.OPT_SERIALIZE_NUMPY)
        part = self._folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        try:
            part.write_bytes(hashlib.sha256(key.encode() + body).hexdigest().encode() + b"\n" + body)
            part.replace(self._folder / f"{key}.json")
        except OSError:
            self.writable = False

    def _begin(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            others = list(folder.parent.iterdir())
        except OSError:
            self.writable = False
            return
        old_s = time.time() - KEEP_DAYS * 86400
        for other in others:
            with contextlib.suppress(OSError):
                if other.stat().st_mtime < old_s:
                    shutil.rmtree(other)
