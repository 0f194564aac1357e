"""Collects the finished requests of a run in virtual time as plain arrays: a million of them fit in little memory, and
become a table at the end.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Final

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
)
_times_of, _counts_of, _words_of = attrgetter(*_TIMES), attrgetter(*_COUNTS), attrgetter(*WORDS)


class Collector:
    """Call it with each record as it ends; `table()` is then the request table, in order of arrival."""

    def __init__(self) -> None:
        self._times = array("d")
        self._counts = array("q")
        self._codes = array("I")
        self._words: dict[tuple[str, ...], int] = {}  # every combination that came up
        self._ids: list[str] = []

    def __call__(self, record: Record) -> None:
        self._times.extend(_times_of(record))
        self._counts.extend(_counts_of(record))
        words = _words_of(record)
        code = self._words.get(words)
        if code is None:
            code = self._words[words] = len(self._words)
        self._codes.append(code)
        self._ids.append(record.request_id)

    def __len__(self) -> int:
        return len(self._ids)

    def table(self, *, warmup_s: float, duration_s: float) -> pd.DataFrame:
        """One row a request, columns REQUEST_COLUMNS.

        In virtual time the client is a perfect one: it sends on schedule, and tokens reach it at once.
        """
        times = np.frombuffer(self._times, dtype=np.float64).reshape(-1, len(_TIMES))
        counts = np.frombuffer(self._counts, dtype=np.int64).reshape(-1, len(_COUNTS))
        codes = np.frombuffer(self._codes, dtype=np.uint32)
        order = np.lexsort((np.arange(len(times)), times[:, 0]))
        columns: dict[str, object] = {"request_id": np.asarray(self._ids, dtype=object)[order]}
        columns |= {name: times[order, i] for i, name in enumerate(_TIMES)}
        columns |= {name: counts[order, i] for i, name in enumerate(_COUNTS)}
        codes = codes[order]
        for i, name in enumerate(WORDS):
            texts = [words[i] for words in self._words]
            names = list(dict.fromkeys(texts))
            of_name = {text: code for code, text in enumerate(names)}
            mapped = np.array([of_name[text] for text in texts], dtype=np.int32)
            columns[name] = pd.Categorical.from_codes(mapped[codes], names)  # type: ignore[call-overload]
        table = pd.DataFrame(columns)
        table["sched_s"] = table["send_s"] = table["arrive_s"]
        table["headers_s"] = table["first_token_s"] = table["admitted_s"]
        table["last_token_s"] = table["done_s"] = table["finished_s"]
        table["client_error"] = ""
        add_figures(table, warmup_s=warmup_s, duration_s=duration_s)
        return table[list(REQUEST_COLUMNS)]
