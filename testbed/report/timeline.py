"""`timeline.csv`: samples of the link and events, in the order of time, of either clock.

On the wire a sample joins what the shaper's agent counted in the kernel with what the workers' sockets said. In virtual
time it is what the modelled link had sent and what waited, at the times when the nodes give an account of themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from netem.fluid import TCP_EFFICIENCY
from netem.link import DIRECTIONS
from testbed.report.accounts import ACCOUNT_COLUMNS, Accounts
from testbed.report.rows import TIMELINE_COLUMNS

SAMPLES: Final = 5000
"""At most so many samples a direction of a run in virtual time: of a longer one every second, third... is kept."""

_COUNTS: Final = ("backlog_bytes", "drops", "kv_wire_bytes", "kv_bytes", "unsent_bytes", "retransmits")
_WORDS: Final = ("before", "after", "outage")

Events = Sequence[Mapping[str, Any]]


def timeline_table(
    events: Events,
    counters: Path | None = None,
    *,
    t0_ns: int = 0,
    end_ns: int = 0,
    time_scale: float = 1.0,
    byte_scale: float = 1.0,
    accounts: Accounts | None = None,
) -> pd.DataFrame:
    """Events and, of a load on the wire, samples of the link from t = 0 to the end, in the order of time.

    Columns TIMELINE_COLUMNS; rates in model bits/s, bytes in model bytes. events: each as a scheduler's change
    (`testbed.report.changes`); `kind` is then the event. counters: the agent's file; the rest is for it.
    """
    parts = []
    if counters is not None:
        parts = _samples(counters, t0_ns, end_ns, time_scale, byte_scale, accounts)
    return _joined(parts, events)


def virtual_timeline(events: Events, history: array[float], nominal_bps: float) -> pd.DataFrame:
    """The same of a run in virtual time. history: `testbed.world.World.link_history`; nominal_bps: the link's rate
    before its first step. There is no shaper's queue, no drop and no retransmission: these stay empty, they are not 0.
    """
    told = np.frombuffer(history, dtype=np.float64).reshape(-1, 5)
    stride = -(-len(told) // SAMPLES) or 1
    told = told[stride - 1 :: stride]  # counters are cumulative: what is left out is in the next one kept
    parts = []
    for i, direction in enumerate(DIRECTIONS):
        sent, waits = told[:, 1 + 2 * i], told[:, 2 + 2 * i]
        if not sent.any() and not waits.any():
            continue  # nobody ever sent anything there
        elapsed_s = np.diff(told[:, 0], prepend=0.0)
        parts.append(
            pd.DataFrame(
                {
                    "t_s": told[:, 0],
                    "direction": direction,
                    "rate_asked_bps": _rates(events, direction, nominal_bps, told[:, 0]),
                    "rate_measured_bps": np.diff(sent, prepend=0.0) * 8 / elapsed_s / TCP_EFFICIENCY,
                    "kv_bytes": sent.round(),
                    "unsent_bytes": waits.round(),
                }
            )
        )
    return _joined(parts, events)


def _rates(events: Events, direction: str, nominal_bps: float, times_s: np.ndarray[Any, Any]) -> Any:
    """What the link's steps make its rate at given times."""
    steps = [(one["t_s"], one["after"]) for one in events if one["kind"] == "link" and one["direction"] == direction]
    values = np.array([nominal_bps, *(after for _, after in steps)])
    return values[np.searchsorted(np.array([at_s for at_s, _ in steps]), times_s, "right")]


def _joined(parts: list[pd.DataFrame], events: Events) -> pd.DataFrame:
    if events:
        parts = [*parts, pd.DataFrame(list(events)).rename(columns={"kind": "event"})]
    if not parts:
        return pd.DataFrame(columns=list(TIMELINE_COLUMNS))
    table = pd.concat(parts, ignore_index=True).reindex(columns=list(TIMELINE_COLUMNS))
    table = table.astype({**dict.fromkeys(_COUNTS, "Int64"), **dict.fromkeys(_WORDS, "object")})
    return table.sort_values(["t_s", "direction"], ignore_index=True, kind="stable")


def _samples(
    counters: Path, t0_ns: int, end_ns: int, time_scale: float, byte_scale: float, accounts: Accounts | None
) -> list[pd.DataFrame]:
    """The link's counters, a table a direction."""
    samples = pd.read_csv(counters)
    samples = samples[(samples["t_ns"] >= t0_ns - 10**9) & (samples["t_ns"] <= end_ns + 10**9)]
    parts = []
    for direction, part in samples.groupby("direction", sort=True):
        elapsed_s = part["t_ns"].diff() * 1e-9
        at_s = (part["t_ns"] - t0_ns) * 1e-9 * time_scale
        made = pd.DataFrame(
            {
                "t_s": at_s,
                "direction": direction,
                "rate_asked_bps": part["rate_bps"] / (time_scale * byte_scale),
                "rate_measured_bps": part["kv_bytes"].diff() * 8 / elapsed_s / (time_scale * byte_scale),
                "backlog_bytes": (part["backlog_bytes"] / byte_scale).round().astype("int64"),
                "drops": part["drops"],
                "kv_wire_bytes": part["kv_bytes"] - part["kv_bytes"].iloc[0],
            }
        )
        if accounts is not None:
            told = accounts.at(str(direction), at_s.to_numpy(np.float64))
            for column in ACCOUNT_COLUMNS:
                made[column] = told[column].round() if column in _COUNTS else told[column]
        for column in ("outage", "line_held", "line_lost", "line_down"):
            if column in part:
                made[column] = part[column]
        if "line_late_s" in part:
            made["line_late_s"] = part["line_late_s"] * time_scale
        parts.append(made)
    return parts
