"""A trace file becomes a Trace, whatever its format: told by the content, never by the name alone.

gzip, CRLF, a byte-order mark and a last line without newline are read; unsorted rows are sorted, and it is said;
everything that would be silently wrong is refused with a TraceError that names file, line, field, value and remedy.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from traces import azure, burstgpt, mooncake, prfaas, qwen_bailian, table
from traces.request import Request, TraceError
from traces.rows import JsonLines, Rows, Table

FORMATS = ("mooncake", "azure", "burstgpt", "qwen_bailian", "table", "prfaas")
MOONCAKE_ENDING, OWN_ENDING, CSV_ENDING = ".mooncake.jsonl", ".jsonl", ".csv"
"""Endings of the names of the files that ``save`` writes; .gz may follow."""
JOINED = "joined"
"""The format of a Trace that ``traces.tools.concat`` made."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload: requests sorted by arrival, and where they come from.

    requests: at least one; equal arrivals keep the file's order.
    rows_read: rows of the file; always len(requests) + sum(dropped.values()), also after slicing.
    dropped: rows left out, by reason.
    notes: what was done to the rows, and what a reader of a result must know, in order.
    source: the path as given, or "synthetic"; of joined traces, all of them.
    sha256: of the file's bytes as stored (what ``sha256sum`` prints); of the parameters for a synthetic trace; of the
        parts' identities and starts for a joined one. The other tools keep it.
    format: one of FORMATS, "synthetic", or JOINED.
    """

    requests: list[Request]
    rows_read: int
    dropped: dict[str, int]
    notes: list[str]
    source: str
    sha256: str
    format: str

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"{self.source}: no request is left; give a file or a slice with at least one")
        if self.rows_read != len(self.requests) + sum(self.dropped.values()):
            raise TraceError(
                f"{self.source}: rows_read = {self.rows_read}: must be {len(self.requests)} kept + "
                f"{sum(self.dropped.values())} dropped"
            )
        if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(self.requests)):
            raise TraceError(f"{self.source}: requests must be sorted by arrival_s")

    @property
    def rows_sha256(self) -> str:
        """The identity of the requests themselves, after every tool: sha256 of the normalised file."""
        return hashlib.sha256(prfaas.to_rows(self.requests)).hexdigest()


def load(path: str | Path, map: Mapping[str, str] | None = None, *, check_units: bool = True) -> Trace:
    """Read a trace file. Our own format keeps its arrivals, every other starts at arrival_s = 0.

    map: for a CSV that is no known trace, our names to its columns, see ``traces.table.read``.
    check_units: refuse stamps whose unit nobody can have meant (ms taken for s); off only when a person knows better.
    Raises TraceError, see the module.
    """
    source = str(path)
    stored = _stored(path)
    data = _plain(stored, source)
    name, rows = _read(data, source, map, check_units)
    requests = sorted(rows.requests, key=attrgetter("arrival_s"))
    late = sum(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(rows.requests))
    notes = list(rows.notes)
    if late:
        notes.append(f"the file was not sorted: {late} rows came before the row above them; sorted by arrival")
    stamps = len({request.arrival_s for request in requests})
    if len(requests) >= 2 * stamps > 2:
        notes.append(
            f"stamps are quantised: {len(requests)} requests on {stamps} stamps; arrivals as_is sends each stamp as "
            "one burst, spread spaces it evenly"
        )
    return Trace(requests, rows.rows_read, rows.dropped, notes, source, hashlib.sha256(stored).hexdigest(), name)


def check_target(path: Path, remedy: str, *, replace: bool = False) -> None:
    """Raises TraceError when a file cannot be made at ``path``: no folder, a folder itself, or (unless replace) a file
    that exists; remedy is for that one."""
    if not path.parent.is_dir():
        raise TraceError(f"{path}: there is no folder {path.parent}; make it, or name another place")
    if path.is_dir():
        raise TraceError(f"{path}: is a folder; name a file in it")
    if path.exists() and not replace:
        raise TraceError(f"{path}: exists already; {remedy}")


def save(trace: Trace, path: str | Path) -> list[str]:
    """Write the requests in one atomic replacement, in the format that the name's ending says, gzipped if .gz follows.

    ``.mooncake.jsonl``: Mooncake's. ``.csv``: a table with our names. Any other: our own JSON lines, which lose
    nothing (see ``traces.prfaas``). Returns what the format could not hold, a sentence each. Raises TraceError for
    requests that Mooncake's format has no place for.
    """
    target = Path(path)
    name = target.name.removesuffix(".gz")
    lost: list[str] = []
    try:
        if name.endswith(MOONCAKE_ENDING):
            data = mooncake.to_rows(trace.requests)
            lost.append("Mooncake's stamps are whole ms: arrivals are rounded, and a reader counts them from the first")
            if any(request.session for request in trace.requests):
                lost.append("Mooncake's format has no sessions: their names are left out")
        elif name.endswith(CSV_ENDING):
            data = table.to_rows(trace.requests)
            lost.append("a reader of the table counts arrivals from the first")
            if any(request.block_hashes for request in trace.requests):
                lost.append("a table has no block hashes: they are left out, and with them all shared prefixes")
        else:
            data = prfaas.to_rows(trace.requests)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return lost


def _stored(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file; give the path of a trace") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); give the path of a trace file") from None


def _plain(stored: bytes, source: str) -> bytes:
    data = stored
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{source}: damaged gzip ({error}); fetch the file again") from None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise TraceError(f"{source}: UTF-16 text; convert it to UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.startswith(b"version https://git-lfs."):
        raise TraceError(
            f"{source}: a Git LFS pointer, not the file it points to; fetch that, such as with git lfs pull"
        )
    if not data.strip():
        raise TraceError(f"{source}: empty; give a file with at least one request")
    return data


def _read(data: bytes, source: str, map: Mapping[str, str] | None, check_units: bool) -> tuple[str, Rows]:
    start = data.lstrip()[:1]
    if start == b"[":
        raise TraceError(f"{source}: one JSON array; write JSON lines instead, one object a line")
    if start == b"{":
        if map is not None:
            raise TraceError(f"{source}: JSON lines take no map; it is for the columns of a CSV file")
        return _read_json(data, source, check_units)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise TraceError(f"{source}, line {line}: not UTF-8 text; give JSON lines or CSV, plain or gzipped") from None
    cells = Table.parse(text, source)
    if map is not None:
        return "table", table.read(cells, map, check_units)
    if not set(azure.COLUMNS[1:]).isdisjoint(cells.columns):
        return "azure", azure.read(cells)
    if not set(burstgpt.COLUMNS[1:]).isdisjoint(cells.columns):
        return "burstgpt", burstgpt.read(cells, check_units)
    own = table.own_map(cells.columns)
    if own is None:
        raise TraceError(
            f"{source}: columns {_listed(cells.columns)} are no known trace; give a map, such as "
            "arrival_s=COLUMN input_tokens=COLUMN output_tokens=COLUMN"
        )
    return "table", table.read(cells, own, check_units)


def _read_json(data: bytes, source: str, check_units: bool) -> tuple[str, Rows]:
    file = JsonLines.parse(data, source)
    first = file.records[0]
    if not set(qwen_bailian.OWN).isdisjoint(first):
        return "qwen_bailian", qwen_bailian.read(file, check_units)
    if not set(prfaas.FIELDS).isdisjoint(first):
        return "prfaas", prfaas.read(file, check_units)
    if not set(mooncake.FIELDS).isdisjoint(first):
        return "mooncake", mooncake.read(file, check_units)
    raise TraceError(
        f"{source}: fields {_listed(first)} are no known trace; Mooncake has {', '.join(mooncake.FIELDS)}, "
        f"Qwen-Bailian {' and '.join(qwen_bailian.OWN)} as well, ours {', '.join(prfaas.FIELDS)}"
    )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in names)
