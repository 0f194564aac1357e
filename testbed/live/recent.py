"""The requests of late: time to first token, where they were prefilled, what of them was cached, why they went there.

From the records of those under way, looked over once a second, and from the rows that the gateway writes of those that
have ended: nothing is done when a request comes or goes.
"""

from __future__ import annotations

import csv
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from testbed.control import Control
from testbed.live.tail import Tail
from testbed.report.rows import GATEWAY_COLUMNS
from testbed.scheduler.api import PRFAAS

_COLUMN: Final = {name: i for i, name in enumerate(GATEWAY_COLUMNS)}


class First(NamedTuple):
    """A request that got its first token at at_s (model seconds). ttft_s: from its arrival at the gateway."""

    at_s: float
    ttft_s: float
    site: str
    reason: str
    input_tokens: int
    cached_tokens: int


def _at_s(first: First) -> float:
    return first.at_s


class Recent:
    """Of one load. rows: the gateway's rows of it. keep_s: for how long a request is of late, model seconds.
    back_bytes: how much of the rows that are there already is read.

    `errors`: of those that have failed, by kind; whoever tells of them clears it.
    """

    def __init__(self, rows: Path, keep_s: float, *, back_bytes: int) -> None:
        self.errors: Counter[str] = Counter()
        self._rows = Tail(rows, back_bytes)
        self._keep_s = keep_s
        self._firsts: list[First] = []
        self._counted: set[str] = set()  # ids of those under way that are in `_firsts`

    def read(self) -> None:
        """Take in the rows that were written since the last time."""
        for row in csv.reader(self._rows.lines()):
            if len(row) == len(GATEWAY_COLUMNS) and row[0] != GATEWAY_COLUMNS[0]:
                self._ended(row)

    def look(self, control: Control) -> None:
        """Take in those under way that have got their first token, and forget what is no longer of late."""
        counted, live = self._counted, control.live
        for request_id, record in live.items():
            if record.admitted and request_id not in counted:
                counted.add(request_id)
                self._add(
                    First(
                        record.admitted_s,
                        record.admitted_s - record.arrive_s,
                        record.prefill_site,
                        record.reason,
                        record.input_tokens,
                        record.cached_tokens,
                    )
                )
        oldest_s = control.view.now_s - self._keep_s
        del self._firsts[: bisect_right(self._firsts, oldest_s, key=_at_s)]

    def _ended(self, row: list[str]) -> None:
        if row[_COLUMN["status"]] == "failed":
            self.errors[row[_COLUMN["error"]]] += 1
        request_id, admitted = row[0], row[_COLUMN["admitted_s"]]
        if request_id in self._counted:
            self._counted.discard(request_id)
        elif admitted:
            self._add(
                First(
                    float(admitted),
                    float(admitted) - float(row[_COLUMN["arrive_s"]]),
                    row[_COLUMN["prefill_site"]],
                    row[_COLUMN["reason"]],
                    int(row[_COLUMN["input_tokens"]]),
                    int(row[_COLUMN["cached_tokens"]]),
                )
            )

    def _add(self, first: First) -> None:
        insort(self._firsts, first)

    def within(self, start_s: float, end_s: float) -> list[First]:
        """Those whose first token left in (start_s, end_s], model seconds."""
        firsts = self._firsts
        return firsts[bisect_right(firsts, start_s, key=_at_s) : bisect_right(firsts, end_s, key=_at_s)]


def figures(firsts: Iterable[First]) -> dict[str, Any]:
    """What they come to: TTFT (s), the share of them that was offloaded, the share of their prompts' tokens that was
    reused. None where there are none."""
    of = list(firsts)
    if not of:
        return {"requests": 0, "ttft_p50_s": None, "ttft_p90_s": None, "offloaded": None, "cached": None}
    p50_s, p90_s = np.percentile([one.ttft_s for one in of], [50, 90]).tolist()
    return {
        "requests": len(of),
        "ttft_p50_s": p50_s,
        "ttft_p90_s": p90_s,
        "offloaded": sum(one.site == PRFAAS for one in of) / len(of),
        "cached": sum(one.cached_tokens for one in of) / sum(one.input_tokens for one in of),
    }


def reasons(firsts: Iterable[First]) -> list[dict[str, Any]]:
    """The rules that sent them where they went, the commonest first."""
    counted = Counter((one.reason, one.site) for one in firsts)
    return [{"reason": reason, "site": site, "requests": count} for (reason, site), count in counted.most_common()]
