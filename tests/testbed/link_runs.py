"""A run on the wire as the link doctor reads it, made by hand: a minute at 8 Gbps, at 2 from 20 to 40 s."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from netem.fluid import TCP_EFFICIENCY
from netem.link import DIRECTIONS
from testbed.report.link_axis import Axis, make_axis
from testbed.report.timeline import timeline_table

WIDE, NARROW = 8e9, 2e9
END_S = 60


def link(t_s: float, before: float, after: float, trigger: str = "phase", late_s: float = 0.0) -> list[dict[str, Any]]:
    """A step of both directions."""
    words = {"kind": "link", "node": "", "trigger": trigger, "late_s": late_s}
    return [{"t_s": t_s, "direction": one, **words, "before": before, "after": after} for one in DIRECTIONS]


def moved(t_s: float, before: float, after: float, kind: str = "threshold", trigger: str = "why") -> dict[str, Any]:
    return {"t_s": t_s, "kind": kind, "node": "", "before": before, "after": after, "trigger": trigger}


EVENTS = [*link(20, WIDE, NARROW, "phase drop"), moved(23, 4000.0, 9000.0), *link(40, NARROW, WIDE, "phase after")]


def samples(**changes: Any) -> pd.DataFrame:
    """A sample a second and direction. A change is a value, or a function of the time (an array), for to_pd."""
    parts = []
    for direction in DIRECTIONS:
        t_s = np.arange(END_S + 1.0)
        rate = np.where((t_s >= 20) & (t_s < 40), NARROW, WIDE)
        table = {
            "t_s": t_s, "direction": direction, "rate_asked_bps": rate, "rate_measured_bps": 0.0, "backlog_bytes": 0,
            "drops": 0, "kv_wire_bytes": 0, "kv_bytes": 0.0, "unsent_bytes": 0, "retransmits": 0, "outage": None,
        }  # fmt: skip
        if direction == "to_pd":
            table |= {name: value(t_s) if callable(value) else value for name, value in changes.items()}
        parts.append(pd.DataFrame(table))
    return pd.concat(parts, ignore_index=True)


def carrying(share: float, waits_s: float = 0.0, shaper: bool = False) -> dict[str, Any]:
    """The changes of a link that carries a share of what TCP can get, with bytes waiting for so many seconds of it."""

    def rate(t_s: Any) -> Any:
        return np.where((t_s > 20) & (t_s <= 40), NARROW, WIDE) * share

    def waiting(t_s: Any) -> Any:
        return (np.where((t_s >= 20) & (t_s < 40), NARROW, WIDE) * TCP_EFFICIENCY * waits_s / 8).astype(int)

    kv = {"kv_bytes": lambda t_s: np.cumsum(np.concatenate([[0.0], rate(t_s)[1:] * TCP_EFFICIENCY / 8]))}
    return {"rate_measured_bps": rate, **kv, "backlog_bytes" if shaper else "unsent_bytes": waiting}


def requests(count: int = 60, **changes: Any) -> pd.DataFrame:
    """A request a second, half of them remote; TTFT is 1 s of prefill and what `changes` says of the other parts."""
    sched = np.arange(count, dtype=np.float64)
    parts = {"queue": 0.0, "prefill": 1.0, "transfer": 0.0, "admission": 0.0, **changes}
    stamps = sched.copy()
    table: dict[str, Any] = {"status": "ok", "client_error": "", "sched_s": sched, "arrive_s": sched}
    for stamp, part in (("prefill_start_s", "queue"), ("prefill_end_s", "prefill"), ("landed_s", "transfer")):
        stamps = stamps + parts[part]
        table[stamp] = stamps
    table["admitted_s"] = stamps + parts["admission"]
    table["finished_s"] = table["admitted_s"] + 10
    table["ttft_s"] = table["admitted_s"] - sched
    table["prefill_site"] = np.where(np.arange(count) % 2, "prfaas", "pd")
    return pd.DataFrame({**table, **{f"ttft_{part}_s": value for part, value in parts.items()}})


def summary(clock: str = "wire", **link_figures: Any) -> dict[str, Any]:
    names = (("before", 0, 20, 4000.0), ("drop", 20, 40, 9000.0), ("after", 40, 60, 4000.0))
    optima = [{"name": n, "start_s": a, "end_s": b, "threshold_tokens": t} for n, a, b, t in names]
    return {
        "scenario": "made", "deployment": "prfaas-pd", "policy": "prfaas", "clock": clock, "seed": 1,
        "verdict": {"status": "valid", "reasons": []}, "requests": {"completed": 60, "scheduled": 60},
        "window_s": [0, END_S], "scheduler": {"threshold_tokens": 9000.0}, "closed_form": {"optima": optima},
        "link": {"asked": {"nominal_bps": WIDE}, "direct_packets": 0, "wan_tx_bytes": 10**8, **link_figures},
        "meter": {"time_scale": 10.0 if clock == "wire" else None}, "slo": {"ttft_p90_s": 6},
    }  # fmt: skip


def axis(
    events: list[dict[str, Any]] = EVENTS,
    link: pd.DataFrame | None = None,
    rows: pd.DataFrame | None = None,
    told: dict[str, Any] | None = None,
) -> Axis:
    """The axis of such a run."""
    timeline = pd.concat([samples() if link is None else link, timeline_table(events)], ignore_index=True)
    return make_axis(timeline, requests() if rows is None else rows, told or summary())
