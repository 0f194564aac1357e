"""Collects the finished requests of a run in virtual time as plain arrays: a million of them fit in little memory, and
become a table at the end.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any, Final

import numpy as np
import pandas as pd

from testbed.control import Record
from testbed.report.rows import REQUEST_COLUMNS, WORDS
from testbed.report.tables import add_figures

_TIMES: Final = (
    "arrive_s",
    "route_s",
    "prefill_start_s",
    "prefill_end_s",
    "landed_s",
    "admitted_s",
    "finished_s",
    "threshold_tokens",
    "prefill_queue_s",
    "prefill_cost_s",
)
_COUNTS: Final = (
    "input_tokens",
    "cached_tokens",
    "output_tokens_asked",
    "output_tokens",
    "attempts",
    "kv_bytes",
    "l_pd",
    "l_prfaas",
    "prefill_tokens",
    "fetched_bytes",
)
_numbers_of, _words_of = attrgetter(*_TIMES, *_COUNTS), attrgetter(*WORDS)


class Collector:
    """Call it with each record as it ends; `table()` is then the request table, in order of arrival."""

    def __init__(self) -> None:
        self._numbers = array("d")  # counts too: whole numbers up to 2^53 are exact
        self._codes = array("I")
        self._words: dict[tuple[str, ...], int] = {}  # every combination that came up
        self._ids: list[str] = []

    def __call__(self, record: Record) -> None:
        self._numbers.extend(_numbers_of(record))
        words = _words_of(record)
        code = self._words.get(words)
        if code is None:
            code = self._words[words] = len(self._words)
        self._codes.append(code)
        self._ids.append(record.request_id)

    def __len__(self) -> int:
        return len(self._ids)

    def table(self, *, warmup_s: float, duration_s: float) -> pd.DataFrame:
        """One row a request, columns REQUEST_COLUMNS; to be called once: what was collected is given away.

        In virtual time the client is a perfect one: it sends on schedule, and tokens reach it at once.
        """
        names = (*_TIMES, *_COUNTS)
        numbers = np.frombuffer(self._numbers, dtype=np.float64).reshape(-1, len(names))
        order = np.lexsort((np.arange(len(numbers)), numbers[:, 0]))
        columns: dict[str, Any] = {"request_id": np.asarray(self._ids, dtype=object)[order]}
        for i, name in enumerate(names):
            column = numbers[order, i]
            columns[name] = column if name in _TIMES else column.astype(np.int64)
        del numbers
        self._numbers, self._ids = array("d"), []
        codes = np.frombuffer(self._codes, dtype=np.uint32)[order]
        for i, name in enumerate(WORDS):
            texts = [words[i] for words in self._words]
            stock = list(dict.fromkeys(texts))
            of_text = {text: code for code, text in enumerate(stock)}
            mapped = np.array([of_text[text] for text in texts], dtype=np.int32)
            columns[name] = pd.Categorical.from_codes(mapped[codes], stock)  # type: ignore[call-overload]
        columns["client_error"] = np.full(len(order), "", dtype=object)
        table = pd.DataFrame(columns, copy=False)  # a million rows are large: no column is copied
        del columns
        table["sched_s"] = table["send_s"] = table["arrive_s"]
        table["headers_s"] = table["first_token_s"] = table["admitted_s"]
        table["last_token_s"] = table["done_s"] = table["finished_s"]
        add_figures(table, warmup_s=warmup_s, duration_s=duration_s)
        return pd.DataFrame({name: table.pop(name) for name in REQUEST_COLUMNS}, copy=False)
