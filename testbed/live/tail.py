"""The lines that others add to a file, read as they come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 1 << 20
"""Of a file, in one reading: who falls behind further goes on nearer to its end."""


class Tail:
    """Reads whole lines of a file that grows. back_bytes: how much of what is there already is read at first.

    A file that is not there has no lines yet; one that was replaced or cut is read from its beginning.
    """

    def __init__(self, path: Path, back_bytes: int = 0) -> None:
        self._path = path
        self._inode, self._at = 0, 0
        try:
            there = path.stat()
        except FileNotFoundError:
            return
        self._inode = there.st_ino
        self._at = self._line_after(max(0, there.st_size - back_bytes))

    def lines(self) -> list[str]:
        """What has been added since the last call, without line ends."""
        try:
            with self._path.open("rb") as file:
                there = os.fstat(file.fileno())
                if there.st_ino != self._inode or there.st_size < self._at:
                    self._inode, self._at = there.st_ino, 0
                if there.st_size - self._at > MOST_BYTES:
                    self._at = self._line_after(there.st_size - MOST_BYTES)
                file.seek(self._at)
                whole, end, _ = file.read(MOST_BYTES).rpartition(b"\n")
        except FileNotFoundError:
            self._inode, self._at = 0, 0
            return []
        self._at += len(whole) + len(end)
        return whole.decode(errors="replace").split("\n") if end else []

    def _line_after(self, at: int) -> int:
        """The first place, from `at` on, at which a line begins."""
        if at == 0:
            return 0
        with self._path.open("rb") as file:
            file.seek(at - 1)
            return at - 1 + len(file.readline())
