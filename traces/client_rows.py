"""What the client saw: one row a scheduled request, and what the rows say about the meter and about the system.

Pure apart from reading and writing the CSV; it imports neither Locust nor gevent, so anything may import it.
``traces.sse`` fills the rows in. All stamps are CLOCK_MONOTONIC nanoseconds of the one host, as in docs/contracts.md.
"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from traces.request import TraceError

PASS, FAILED, USAGE, INVALID, INCONCLUSIVE = 0, 1, 2, 3, 4
"""The exit codes of docs/contracts.md."""

LEFT = "left"
"""The error of a request whose client left because the replay was told so (``--leave``)."""


@dataclass(slots=True)
class ClientRow:
    """One scheduled request, as the client saw it. The field names are the CSV's columns; None is an empty cell.

    request_id: what X-Request-Id said.        index: the row's place in the trace file, from 0.
    t_sched_ns: when the trace says.           t_send_ns: when the client began to connect and send.
    t_headers_ns: the response's headers were complete.
    t_first_token_ns, t_last_token_ns: first and last chunk with non-empty content.
    t_done_ns: ``[DONE]`` arrived, or the failure was noticed.
    http_status: the response's status.        error: a short kind, empty when the request was answered in full.
    output_tokens: what the server's usage says, never a count of chunks.
    chunks: chunks with non-empty content.
    Each stamp is taken when ``recv`` returned, before anything is parsed.
    """

    request_id: str
    index: int
    t_sched_ns: int
    t_send_ns: int | None = None
    t_headers_ns: int | None = None
    t_first_token_ns: int | None = None
    t_last_token_ns: int | None = None
    t_done_ns: int | None = None
    http_status: int | None = None
    error: str = ""
    input_tokens: int = 0
    output_tokens_asked: int = 0
    output_tokens: int | None = None
    chunks: int = 0

    @property
    def lateness_s(self) -> float | None:
        """t_send - t_sched in wall seconds: the meter's own delay. None when nothing was sent."""
        return None if self.t_send_ns is None else (self.t_send_ns - self.t_sched_ns) / 1e9

    @property
    def ttft_s(self) -> float | None:
        """t_first_token - t_sched in wall seconds, so that a late client hides no queueing. None without a token."""
        return None if self.t_first_token_ns is None else (self.t_first_token_ns - self.t_sched_ns) / 1e9

    @property
    def e2e_s(self) -> float | None:
        """t_done - t_sched in wall seconds. None while the request runs."""
        return None if self.t_done_ns is None else (self.t_done_ns - self.t_sched_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """(t_last_token - t_first_token) / (n - 1) in wall seconds, n from the server's usage. None for n < 2."""
        if self.t_first_token_ns is None or self.t_last_token_ns is None or (self.output_tokens or 0) < 2:
            return None
        return (self.t_last_token_ns - self.t_first_token_ns) / 1e9 / ((self.output_tokens or 0) - 1)

    def csv_line(self) -> str:
        """This row as one CSV line with its newline. Nothing needs quotes: ids and kinds are of ``[A-Za-z0-9._-]``."""
        values = [getattr(self, name) for name in COLUMNS]
        return ",".join("" if value is None else str(value) for value in values) + "\n"


COLUMNS = tuple(field.name for field in fields(ClientRow))
_OPTIONAL = {field.name for field in fields(ClientRow) if field.type == "int | None"}
_TEXT = {"request_id", "error"}


def write_rows(path: Path, rows: Iterable[ClientRow]) -> None:
    """Write the CSV, header first, ordered by index, in one atomic replacement."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(",".join(COLUMNS) + "\n")
        file.writelines(row.csv_line() for row in sorted(rows, key=lambda row: row.index))
    os.replace(partial, path)


def read_rows(path: Path) -> list[ClientRow]:
    """The rows of a CSV written here (or of a part of it). A torn last line, left by a killed writer, is passed over.

    Raises TraceError, naming file, line and field, for any other line that does not fit.
    """
    rows = []
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    reader = csv.reader(lines)
    header = tuple(next(reader, ()))
    if header != COLUMNS:
        raise TraceError(f"{path}: the header is {','.join(header) or 'missing'}: must be {','.join(COLUMNS)}")
    for cells in reader:
        if len(cells) != len(COLUMNS):
            raise TraceError(f"{path}: line {reader.line_num} has {len(cells)} fields: must have {len(COLUMNS)}")
        values: dict[str, str | int | None] = {}
        for name, cell in zip(COLUMNS, cells, strict=True):
            try:
                values[name] = cell if name in _TEXT else None if cell == "" and name in _OPTIONAL else int(cell)
            except ValueError:
                raise TraceError(f"{path}: line {reader.line_num}: {name} = {cell!r}: must be a whole number") from None
        rows.append(ClientRow(**values))  # type: ignore[arg-type]
    return rows


def percentile(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank percentile: the ceil(q n)-th smallest of n values, one that was measured; None for no values.

    q: in (0, 1].
    """
    return sorted(values)[math.ceil(q * len(values)) - 1] if values else None


def lateness_p99_s(rows: Iterable[ClientRow]) -> float | None:
    """The p99 of t_send - t_sched in wall seconds; None when nothing was sent."""
    return percentile([late for row in rows if (late := row.lateness_s) is not None], 0.99)


def busiest(samples: Sequence[tuple[int, float]], window_s: float) -> float:
    """The largest share of one core that a process used over a stretch of window_s, or over all when it ran shorter.

    samples: (CLOCK_MONOTONIC ns, CPU seconds used so far) in order. 0.0 for fewer than two.
    """
    shares = []
    first = 0
    for last, (now_ns, cpu_s) in enumerate(samples):
        while first + 1 < last and now_ns - samples[first + 1][0] >= window_s * 1e9:
            first += 1
        start_ns, start_cpu_s = samples[first]
        if now_ns > start_ns and (now_ns - start_ns >= window_s * 1e9 or last == len(samples) - 1):
            shares.append((cpu_s - start_cpu_s) / ((now_ns - start_ns) / 1e9))
    return max(shares, default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay comes to.

    verdict: ``valid``, ``failed`` (the system), ``invalid`` (the meter) or ``interrupted``. reasons: one sentence each.
    scheduled, completed, failed: requests. by_error: failed requests by kind.
    late_p99_s: nearest-rank p99 of t_send - t_sched, wall seconds. cpu_busy: busiest process, share of one core.
    exit_code: see docs/contracts.md; 4 (inconclusive) when interrupted.
    """

    verdict: str
    reasons: tuple[str, ...]
    scheduled: int
    completed: int
    failed: int
    by_error: dict[str, int]
    late_p99_s: float | None
    cpu_busy: float
    exit_code: int


def judge(
    rows: Sequence[ClientRow],
    total: int,
    *,
    cpu_busy: float,
    late_bound_s: float,
    cpu_bound: float,
    interrupted: bool = False,
    meter_faults: Sequence[str] = (),
) -> Outcome:
    """Verdict of a replay of ``total`` trace rows. The meter comes first: when it failed, its figures say nothing.

    cpu_busy, cpu_bound: share of one core. late_bound_s: wall seconds. meter_faults: what else spoils the measurement.
    """
    late_p99_s = lateness_p99_s(rows)
    by_error = dict(sorted(Counter(row.error for row in rows if row.error).items()))
    failed = sum(by_error.values())
    invalid = list(meter_faults)
    if late_p99_s is not None and late_p99_s > late_bound_s:
        invalid.append(
            f"requests left late: lateness p99 is {late_p99_s * 1e3:.1f} ms, the bound is {late_bound_s * 1e3:g} ms"
        )
    if cpu_busy > cpu_bound:
        invalid.append(
            f"the load generator was {cpu_busy:.0%} busy, the bound is {cpu_bound:.0%} of a core: use more --processes"
        )
    if interrupted:
        verdict, code = "interrupted", INCONCLUSIVE
        reasons = [f"interrupted after {len(rows)} of {total} requests", *invalid]
    elif invalid or len(rows) != total:
        verdict, code, reasons = "invalid", INVALID, invalid
        if len(rows) != total:
            reasons.append(f"{len(rows)} rows for {total} requests of the trace")
    elif failed:
        verdict, code = "failed", FAILED
        reasons = [f"{failed} of {total} requests failed: " + ", ".join(f"{kind} {n}" for kind, n in by_error.items())]
    else:
        verdict, code, reasons = "valid", PASS, []
    return Outcome(verdict, tuple(reasons), len(rows), len(rows) - failed, failed, by_error, late_p99_s, cpu_busy, code)
