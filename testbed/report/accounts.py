"""What the workers told of both ends of the link during a load on the wire, from its event log, as series over time.

A worker gives an account of itself every `telemetry_s`: what its sockets say (`TCP_INFO`: segments sent again, bytes
not sent yet, round trips) and what has landed at it. Each has its own clock ticks, so a figure of all workers at one
time is the sum of what each said last; of what landed, in between by a straight line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from testbed.scheduler.api import PRFAAS

ACCOUNT_COLUMNS: Final = ("kv_bytes", "unsent_bytes", "retransmits", "rtt_s")
_KINDS: Final = (b'"Telemetry"', b'"NodeLost"')

Series = dict[str, np.ndarray[Any, Any]]


class _Sender:
    """A node's sockets towards the other site: a row an account."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int, float]] = []  # t_s, unsent, retransmits, rtt
        self._counted: dict[str, int] | None = None  # a peer's connections' own counts
        self._sum = 0

    def tell(self, t_s: float, paths: list[dict[str, Any]]) -> None:
        counts = {path["peer"]: path["retransmits"] for path in paths}
        if self._counted is not None:  # connections outlive a load: its first account is where counting begins
            for peer, count in counts.items():
                before = self._counted.get(peer, 0)
                self._sum += count - before if count >= before else count  # a new connection counts from 0
        self._counted = {**(self._counted or {}), **counts}
        rtts = [path["rtt_s"] for path in paths if path["rtt_s"] > 0]
        unsent = sum(path["unsent_bytes"] for path in paths)
        self.rows.append((t_s, unsent, self._sum, max(rtts, default=np.nan)))

    def lost(self, t_s: float) -> None:
        self.rows.append((t_s, 0, self._sum, np.nan))


class _Receiver:
    """KV from the other site that landed at a node, model bytes, cumulative: (t_s, bytes) an account."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []
        self._counted = self._sum = 0

    def tell(self, t_s: float, count: int) -> None:
        self._sum += count - self._counted if count >= self._counted else count  # it may have begun anew
        self._counted = count
        self.rows.append((t_s, self._sum))

    def from_zero(self) -> list[tuple[float, float]]:
        """The rows and one at t = 0, before which nothing of the load can have landed, whenever it was first told."""
        return sorted([*self.rows, (0.0, max((landed for t_s, landed in self.rows if t_s <= 0), default=0.0))])


class Accounts:
    """The series of a load. `at` gives them at any times."""

    def __init__(self, events: Path, site_of: Mapping[str, str]) -> None:
        """events: the load's `events.jsonl`. site_of: a node's site. Raises OSError."""
        self._site_of = site_of
        self._senders = {node: _Sender() for node in site_of}
        self._receivers = {node: _Receiver() for node in site_of}
        for t_s, event in _told(events):
            node = event["node"]
            if event["type"] == "NodeLost":
                self._senders[node].lost(t_s)
                continue
            paths = [path for path in event["paths"] if site_of[path["peer"]] != site_of[node]]
            self._senders[node].tell(event["t_s"], paths)
            landed = event["kv_landed_bytes"].items()
            away = sum(count for sender, count in landed if site_of[sender] != site_of[node])
            self._receivers[node].tell(event["t_s"], away)

    def at(self, direction: str, times_s: np.ndarray[Any, Any]) -> Series:
        """ACCOUNT_COLUMNS of a direction at ascending model seconds: KV landed, bytes that wait at the senders,
        segments sent again (both counts since the first account), the longest smoothed round trip. NaN before any
        account."""
        from_prfaas = direction == "to_pd"
        unsent, again = np.zeros(len(times_s)), np.zeros(len(times_s))
        rtt_s, landed = np.full(len(times_s), np.nan), np.zeros(len(times_s))
        first_s = np.inf
        for node, site in self._site_of.items():
            sends = (site == PRFAAS) == from_prfaas
            if not (self._senders[node].rows if sends else self._receivers[node].rows):
                continue
            rows = self._senders[node].rows if sends else self._receivers[node].from_zero()
            told = np.array(sorted(rows), dtype=np.float64)
            first_s = min(first_s, told[0, 0])
            if not sends:
                landed += np.interp(times_s, told[:, 0], told[:, 1], left=0.0)
                continue
            last = np.searchsorted(told[:, 0], times_s, "right") - 1
            known = last >= 0
            unsent[known] += told[last[known], 1]
            again[known] += told[last[known], 2]
            rtt_s[known] = np.fmax(rtt_s[known], told[last[known], 3])
        for series in (unsent, again, landed):
            series[times_s < first_s] = np.nan
        return dict(zip(ACCOUNT_COLUMNS, (landed, unsent, again, rtt_s), strict=True))


def _told(events: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    """(model second, event) of the accounts and losses in the log; the other lines are not even parsed."""
    with events.open("rb") as file:
        for line in file:
            if any(kind in line for kind in _KINDS):
                row = orjson.loads(line)
                if row["event"]["type"] in ("Telemetry", "NodeLost"):
                    yield row["t_s"], row["event"]
