"""What every format's reader shares: the rows it hands back, files parsed with line numbers, checked cells.

A reader refuses whatever would be silently wrong, in one sentence: file, line, field, value, remedy. It drops only
what it can name.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from traces.request import Request, TraceError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNIT_S = {"arrival_s": 1.0, "arrival_ms": 1e-3, "arrival_us": 1e-6, "arrival_ns": 1e-9}

SLOWEST_GAP_S = 30.0
"""A mean gap from here up is taken for a unit that is too coarse. Read as s, a load of 1 request/s in ms shows a mean
gap of 1000 s; 30 s is the middle, on a log scale, between that and the 1 s it should show."""
FASTEST_RPS = 1000.0
FASTEST_FRACTIONAL_RPS = 33.0
"""A mean rate above this is taken for a unit that is too fine. The lower bound is for stamps with a fraction: whole
ms need none."""
JUDGED_ROWS = 10
"""Fewer rows than this may well share a millisecond, or be an example with round stamps."""
LATEST_EPOCH_S = 1e11
"""The year 5138: a later stamp is not in the unit that it is said to be in."""

STAMP = re.compile(r"((?:19|20)\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|([+-])(\d\d):(\d\d))?")


@dataclass(slots=True)
class Rows:
    """What a reader found: requests in the file's order, the rows of the file, those dropped by reason, and notes."""

    requests: list[Request]
    rows_read: int
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A JSON-lines file: its objects, and the line of the file that each is on."""

    source: str
    records: list[dict[str, Any]]
    lines: list[int]

    @classmethod
    def parse(cls, data: bytes, source: str) -> JsonLines:
        """Read one JSON object a line. Blank lines are skipped; CRLF and a last line without newline are fine.

        Raises TraceError for a line that is not one JSON object (NaN is no JSON number), or no rows.
        """
        records: list[dict[str, Any]] = []
        lines: list[int] = []
        for number, line in enumerate(data.splitlines(), 1):
            if not line.strip():
                continue
            where = f"{source}, line {number}"
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                text = shown(line.decode("utf-8", "replace"))
                raise TraceError(
                    f"{where}: not JSON ({error}): {text}; the line is cut, or has NaN: correct or remove it"
                ) from None
            if not isinstance(record, dict):
                raise TraceError(f"{where}: {shown(repr(record))}: must be a JSON object, one request a line")
            records.append(record)
            lines.append(number)
        if not records:
            raise TraceError(f"{source}: no rows; give a file with at least one request")
        return cls(source, records, lines)


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV file as text: columns by name, and the line of the file that each row ends on (the header is line 1)."""

    source: str
    columns: dict[str, list[str]]
    lines: list[int]

    @classmethod
    def parse(cls, text: str, source: str) -> Table:
        """Read comma-separated text with a header. Blank lines are skipped; CRLF and a missing last newline are fine.

        Raises TraceError for a ragged row, a column named twice, bad quoting, or no rows.
        """
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header: list[str] = []
        cells: list[list[str]] = []
        lines: list[int] = []
        try:
            for row in reader:
                if not row or (len(row) == 1 and not row[0].strip()):
                    continue
                if not header:
                    header = [name.strip() for name in row]
                    continue
                if len(row) != len(header):
                    raise TraceError(
                        f"{source}, line {reader.line_num}: {len(row)} fields, the header has {len(header)}: "
                        "the row is cut or has an unquoted comma; correct or remove it"
                    )
                cells.append(row)
                lines.append(reader.line_num)
        except csv.Error as error:
            raise TraceError(f"{source}, line {reader.line_num}: not CSV ({error}); correct the quoting") from None
        twice = {name for name in header if header.count(name) > 1}
        if twice:
            raise TraceError(f"{source}: column {min(twice)!r} is named twice in the header; rename one")
        if not cells:
            raise TraceError(f"{source}: no rows after the header; give a file with at least one request")
        return cls(source, {name: [row[i].strip() for row in cells] for i, name in enumerate(header)}, lines)

    def column(self, name: str) -> list[str]:
        """The cells of one column. Raises TraceError, naming the columns there are, when it is missing."""
        if name not in self.columns:
            raise TraceError(
                f"{self.source}: no column {name!r}; its columns are "
                f"{', '.join(map(repr, self.columns))}: name one of them in the map"
            )
        return self.columns[name]

    def numbers(self, name: str, remedy: str = "must be a finite number; correct or remove the row") -> Floats:
        """One column as finite numbers. Raises TraceError with the line for anything else (text, empty, NaN)."""
        cells = self.column(name)
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = np.array([_number(cell) for cell in cells])
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise self.error(int(bad[0]), name, remedy)
        return values

    def tokens(self, name: str) -> Ints:
        """One column as whole token counts >= 0. Raises TraceError with the line for a fraction or a negative count."""
        values = self.numbers(name)
        bad = np.flatnonzero((values != np.floor(values)) | (values < 0) | (values > 2**53))
        if len(bad):
            raise self.error(
                int(bad[0]), name, "must be a whole number of tokens, 0 or more; correct or remove the row"
            )
        return values.astype(np.int64)

    def stamps_s(self, name: str) -> Floats:
        """One column of dates as seconds after the earliest, exact to the nanosecond.

        A date is ``YYYY-MM-DD hh:mm:ss`` (or with a ``T``), up to 9 fractional digits, and an optional ``Z`` or
        ``+hh:mm``. Raises TraceError with the line for anything else.
        """
        wall: list[str] = []
        offset_ns: list[int] = []
        for i, cell in enumerate(self.column(name)):
            match = STAMP.fullmatch(cell)
            if match is None:
                raise self.error(
                    i, name, "must be a date and time such as 2023-11-16 18:15:46.6805900; correct or remove the row"
                )
            date, sign, hours, minutes = match.groups()
            wall.append(date)
            offset_ns.append(0 if sign is None else int(sign + "1") * (int(hours) * 60 + int(minutes)) * 60 * 10**9)
        try:
            ns = np.array(wall, dtype="datetime64[ns]").astype(np.int64)
        except ValueError:
            i = next(i for i, date in enumerate(wall) if not _is_date(date))
            raise self.error(i, name, "is no date of the calendar; correct or remove the row") from None
        ns = ns - np.array(offset_ns, dtype=np.int64)
        return np.asarray((ns - ns.min()) / 1e9, dtype=np.float64)

    def error(self, row: int, name: str, remedy: str) -> TraceError:
        """The refusal of one cell: file, line, column, value, remedy."""
        return TraceError(f"{self.source}, line {self.lines[row]}: {name} = {self.columns[name][row]!r}: {remedy}")


def shown(text: str) -> str:
    """A value as a message shows it: its start, when it is long."""
    return text if len(text) <= 60 else text[:60] + "..."


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _is_date(date: str) -> bool:
    try:
        np.datetime64(date, "ns")
    except ValueError:
        return False
    return True


def from_columns(
    table: Table, arrival_s: Floats, input_name: str, output_name: str, sessions: Sequence[str] | None = None
) -> Rows:
    """The rows of a table. A row with zero tokens is a request that failed in its day: dropped, by reason.

    arrival_s: seconds after the earliest row, one a row. Raises TraceError for a length that is no count, or when
        nothing is left.
    """
    inputs, outputs = table.tokens(input_name), table.tokens(output_name)
    dropped: dict[str, int] = {}
    for reason, mask in (
        (f"{input_name} is 0", inputs == 0),
        (f"{output_name} is 0", (outputs == 0) & (inputs > 0)),
    ):
        if mask.any():
            dropped[reason] = int(mask.sum())
    keep = (inputs > 0) & (outputs > 0)
    if not keep.any():
        raise TraceError(
            f"{table.source}: none of its {len(keep)} rows has both {input_name} and {output_name} "
            "above 0; map other columns"
        )
    names = [""] * len(keep) if sessions is None else sessions
    return Rows(
        [
            Request(arrival, tokens_in, tokens_out, session=name)
            for arrival, tokens_in, tokens_out, name, kept in zip(
                arrival_s.tolist(), inputs.tolist(), outputs.tolist(), names, keep.tolist(), strict=True
            )
            if kept
        ],
        len(keep),
        dropped,
    )


def check_not_negative(stamps: Floats, lines: Sequence[int], field_name: str, source: str) -> None:
    """Raises TraceError for the first stamp before 0: such a stamp has no start of the trace to be relative to."""
    bad = np.flatnonzero(stamps < 0)
    if len(bad):
        i = int(bad[0])
        raise TraceError(
            f"{source}, line {lines[i]}: {field_name} = {stamps[i]:g}: must be 0 or more; correct or remove the row"
        )


def check_not_too_coarse(
    stamps: Floats, key: str, field_name: str, source: str, remedy: str, slowest_gap_s: float = SLOWEST_GAP_S
) -> None:
    """Refuse stamps whose unit is probably finer than ``key`` says (ms taken for s).

    A number carries no unit, so this judges the rate that the unit would mean: a mean gap of slowest_gap_s or more, or
    a stamp past the year 5138, raises TraceError. stamps: in the unit of ``key`` (a key of UNIT_S), in any order.
    """
    latest = float(stamps.max())
    remedy += ", or turn the unit check off if the unit is right"
    if latest * UNIT_S[key] > LATEST_EPOCH_S:
        raise TraceError(f"{source}: {field_name} = {latest:.0f} read as {key} is past the year 5138; {remedy}")
    gap_s = _mean_gap_s(stamps, key)
    if gap_s >= slowest_gap_s:
        raise TraceError(
            f"{source}: {field_name} read as {key} means one request every {gap_s:.4g} s, "
            f"{gap_s * (len(stamps) - 1):.6g} s in all: too slow to be meant; {remedy}"
        )


def unit_doubt(stamps: Floats, key: str, field_name: str) -> list[str]:
    """A note where ``check_not_too_coarse`` passes but cannot tell: whole numbers with a mean gap of 1 s or more may be
    slow traffic in whole seconds, or the ms of a busy service."""
    gap_s = _mean_gap_s(stamps, key)
    if gap_s < 1 or not _whole(stamps):
        return []
    return [
        f"{field_name} read as {key} means one request every {gap_s:.3g} s; whole numbers do not show their unit: "
        "if it is a finer one, map that"
    ]


def check_not_too_fine(stamps: Floats, key: str, field_name: str, source: str, remedy: str) -> None:
    """Refuse stamps whose unit is probably coarser than ``key`` says (s taken for ms), judged by the rate.

    Raises TraceError above FASTEST_RPS for whole numbers, above FASTEST_FRACTIONAL_RPS for numbers with a fraction.
    """
    gap_s = _mean_gap_s(stamps, key)
    if len(stamps) < JUDGED_ROWS or gap_s == 0:
        return
    if 1 / gap_s > (FASTEST_RPS if _whole(stamps) else FASTEST_FRACTIONAL_RPS):
        raise TraceError(
            f"{source}: {field_name} read as {key} means {1 / gap_s:.4g} requests/s: too fast to be meant; {remedy}, "
            "or turn the unit check off if the unit is right"
        )


def _mean_gap_s(stamps: Floats, key: str) -> float:
    return float(stamps.max() - stamps.min()) * UNIT_S[key] / max(1, len(stamps) - 1)


def _whole(stamps: Floats) -> bool:
    return bool((stamps == np.floor(stamps)).all())
