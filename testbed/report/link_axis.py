"""The link and what it did to the load on one axis of time: `link.csv`, which the link doctor and its picture read.

    from testbed.report.link_axis import link_axis
    axis = link_axis(Path("results/RUN"))
    axis.table               # AXIS_COLUMNS, a row a bin of time; axis.events, axis.outages: what happened, and why

Pure: from a run's tables (or its folder) to one table. All in model units. What a run did not record, or its clock does
not have (virtual time sends nothing again), is NaN: never 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pandas as pd

from netem.fluid import TCP_EFFICIENCY
from netem.link import DIRECTIONS
from testbed.report import steps
from testbed.report.changes import thresholds
from testbed.report.rows import TIMELINE_COLUMNS, WORDS
from testbed.report.steps import Array, Steps
from testbed.report.window import completed
from testbed.runs import RunError, read_summary

OF_A_DIRECTION: Final = (
    "asked_bps",  # mean of the rate that was asked for: by the schedule, a phase, a fault, or by hand
    "applied_bps",  # mean of the rate that the kernel (or the modelled link) had, in its true time; 0 in an outage
    "wire_bps",  # mean of what the KV class sent, headers included
    "goodput_bps",  # mean of the KV that crossed, payload
    "backlog_bytes",  # the most that waited in the shaper's queue
    "unsent_bytes",  # the most that waited at the senders
    "queue_s",  # the longest that what waited, in both, needs at the rate it had: bytes x 8 / (0.956 x rate)
    "drops",  # packets
    "retransmits",  # TCP segments
    "rtt_s",  # mean of the longest smoothed round trip
    "outage_s",  # of the bin
    "line_held",  # packets: the most in the delay line
    "line_lost",  # packets, on purpose
    "line_late_s",  # p99, the latest
)
AXIS_COLUMNS: Final = (
    "t_s",  # the bin's start
    "end_s",
    *(f"{direction}_{column}" for direction in DIRECTIONS for column in OF_A_DIRECTION),
    "threshold_tokens",  # t in force at the bin's end; inf above every length
    "optimum_tokens",  # the closed form's best t of the phase
    "regime",  # of the scheduler at the bin's end, where it tells any apart
    "arrivals",  # requests scheduled in the bin; the figures below are of those of them that completed
    "failed",
    "offload_fraction",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_queue_s",  # means of the parts of their TTFT
    "ttft_prefill_s",
    "ttft_transfer_s",
    "ttft_admission_s",
    "waiting_prfaas",  # completed requests that were, at the bin's end: waiting for a prefill node of that site,
    "waiting_pd",
    "prefilling",  # being prefilled,
    "sending",  # prefilled, with KV still on its way,
    "admitting",  # landed, waiting for a decode slot,
    "decoding",
)
"""Times in model seconds, rates in model bits/s, bytes in model bytes."""

BINS: Final = 600
"""An axis has at most so many bins."""

HEALED: Final = ": healed"
"""How an experiment's journal says that a fault is over."""

_EVENTS: Final = ("t_s", "direction", "event", "node", "before", "after", "trigger", "late_s")
_PARTS: Final = ("queue", "prefill", "transfer", "admission")
_REQUESTS: Final = (
    "status", "client_error", "sched_s", "arrive_s", "prefill_start_s", "prefill_end_s", "landed_s", "admitted_s",
    "finished_s", "ttft_s", "prefill_site", *(f"ttft_{part}_s" for part in _PARTS),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Axis:
    """table: AXIS_COLUMNS. events: what happened, in order, a dict of `_EVENTS` each. outages: (start, end, direction).
    summary: the run's. answered: when each completed request was scheduled, and its TTFT; None when no rows are kept.
    steps: of the rate to_pd, (model second, bits/s before and after, what brought it about: "" when nobody said so).
    faults: (start, end, what) of those that an experiment's journal beside the results tells of.
    """

    table: pd.DataFrame
    events: list[dict[str, Any]]
    outages: list[tuple[float, float, str]]
    summary: dict[str, Any]
    answered: tuple[Array, Array] | None
    steps: list[tuple[float, float, float, str]]
    faults: list[tuple[float, float, str]] = field(default_factory=list)

    def of(self, direction: str, column: str) -> Array:
        """A direction's column as numbers."""
        return self.table[f"{direction}_{column}"].to_numpy(np.float64)

    @property
    def width_s(self) -> float:
        """Of every bin."""
        return float(self.table["end_s"].iloc[0] - self.table["t_s"].iloc[0])

    @property
    def end_s(self) -> float:
        """Of the last bin."""
        return float(self.table["end_s"].iloc[-1])

    @property
    def used(self) -> list[str]:
        """The directions that ever carried KV, and not only what acknowledges it; to_pd always."""
        return list(DIRECTIONS) if np.nansum(self.of("to_prfaas", "goodput_bps")) > 0 else ["to_pd"]


def link_axis(folder: Path) -> Axis:
    """The axis of a results folder. Of one that kept no row a request: as its own link.csv has it.

    Raises RunError for a folder without its timeline, and without both rows and link.csv.
    """
    summary = read_summary(folder)
    path = folder / "timeline.csv"
    if not path.is_file():
        raise RunError(f"{path}: is not there; take the whole results folder of a run")
    timeline = pd.read_csv(path, dtype=dict.fromkeys(("event", "outage", "before", "after"), "str"))
    timeline = timeline.reindex(columns=list(TIMELINE_COLUMNS))
    requests, faults = _requests(folder), _faults(folder)
    if requests is not None:
        return replace(make_axis(timeline, requests, summary), faults=faults)
    try:
        kept = pd.read_csv(folder / "link.csv", dtype={"regime": "str"})
    except OSError as error:
        raise RunError(
            f"{folder / 'link.csv'}: cannot be read ({error.strerror}), and the run kept no row a request to make it "
            "of; prfaas simulate keeps them with --requests csv"
        ) from None
    events = _events(timeline)
    samples, table = _samples(timeline), kept.reindex(columns=list(AXIS_COLUMNS))
    ends = _outages(events, samples, float(kept["end_s"].iloc[-1]))
    return Axis(table, events, ends, summary, None, _steps(events, samples), faults)


def make_axis(timeline: pd.DataFrame, requests: pd.DataFrame, summary: dict[str, Any]) -> Axis:
    """The axis of a run by its tables (TIMELINE_COLUMNS, and of REQUEST_COLUMNS those it needs) and its summary."""
    events, samples = _events(timeline), _samples(timeline)
    edges = _edges(samples, requests, summary)
    nominal_bps = float(summary["link"]["asked"].get("nominal_bps", math.nan))
    table: dict[str, Any] = {"t_s": edges[:-1], "end_s": edges[1:]}
    for direction in DIRECTIONS:
        of = samples[samples["direction"] == direction].reset_index(drop=True)
        for column, values in _of_direction(direction, of, events, edges, nominal_bps).items():
            table[f"{direction}_{column}"] = values
    table |= _scheduler(events, summary, edges)
    table |= _load(requests, edges)
    made = pd.DataFrame(table)[list(AXIS_COLUMNS)]
    ok = requests.loc[completed(requests), ["sched_s", "ttft_s"]].to_numpy(np.float64)
    outages = _outages(events, samples, float(edges[-1]))
    return Axis(made, events, outages, summary, (ok[:, 0], ok[:, 1]), _steps(events, samples))


def _requests(folder: Path) -> pd.DataFrame | None:
    if (folder / "requests.csv").is_file():
        texts = dict.fromkeys((*WORDS, "client_error"), "str")
        table = pd.read_csv(folder / "requests.csv", dtype=texts, usecols=lambda name: name in _REQUESTS)
        words = ["status", "client_error", "prefill_site"]
        table[words] = table[words].fillna("")
        return table
    if (folder / "requests.parquet").is_file():
        return pd.read_parquet(folder / "requests.parquet", columns=list(_REQUESTS))
    return None


def _faults(folder: Path) -> list[tuple[float, float, str]]:
    """What an experiment did, from its journal: from when it was done until it was healed, else for a moment."""
    path = folder / "journal.json"
    if not path.is_file():
        return []
    found: list[tuple[float, float, str]] = []
    for deed in orjson.loads(path.read_bytes())["journal"]:
        at_s, what = deed["true_s"], deed["what"].replace(HEALED, "")
        begun = next((i for i, (start_s, end_s, name) in enumerate(found) if name == what and end_s == start_s), None)
        if what != deed["what"] and begun is not None:
            found[begun] = (found[begun][0], at_s, what)
        else:
            found.append((at_s, at_s, deed["what"]))
    return found


def _events(timeline: pd.DataFrame) -> list[dict[str, Any]]:
    """The events as plain data: numbers where before and after are numbers, words where not, None for none."""
    rows = timeline.loc[timeline["event"].notna(), list(_EVENTS)].to_dict("records")
    return [{str(key): _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return None if value is None or value is pd.NA or value != value else value


def _samples(timeline: pd.DataFrame) -> pd.DataFrame:
    return timeline[timeline["event"].isna()]


def _edges(samples: pd.DataFrame, requests: pd.DataFrame, summary: dict[str, Any]) -> Array:
    """Bins from t = 0 until the last first token, or the load's end: even, round, no finer than the link's samples."""
    last_s = requests.loc[completed(requests), "landed_s"].max()
    end_s = max(summary["window_s"][1], 0.0 if pd.isna(last_s) else float(last_s))
    gaps = samples.loc[samples["direction"] == "to_pd", "t_s"].diff()
    least_s = max(end_s / BINS, 0.0 if gaps.dropna().empty else 0.99 * float(gaps.median()))
    power = 10.0 ** math.floor(math.log10(least_s))
    step_s = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= least_s)
    return np.arange(math.ceil(end_s / step_s) + 1) * step_s


# the link
def _of_direction(
    direction: str, samples: pd.DataFrame, events: list[dict[str, Any]], edges: Array, nominal_bps: float
) -> dict[str, Array]:
    asked, applied = rates(direction, samples, events, nominal_bps)
    count, nothing = len(edges) - 1, np.full(len(edges) - 1, np.nan)
    out = dict.fromkeys(OF_A_DIRECTION, nothing)
    out["asked_bps"], out["applied_bps"] = asked.means(edges), applied.means(edges)
    down = Steps(float(applied.values[0] == 0), list(zip(applied.times, applied.values[1:] == 0, strict=True)))
    out["outage_s"] = down.means(edges) * np.diff(edges)
    if samples.empty:
        return out
    at_s = samples["t_s"].to_numpy(np.float64)
    bins = steps.bin_of(at_s, edges)

    def column(name: str) -> Array:
        return samples[name].astype("float64").to_numpy()

    moved = np.nan_to_num(column("rate_measured_bps")) * np.diff(at_s, prepend=at_s[0])
    out["wire_bps"] = _mean_rates(at_s, np.cumsum(moved), edges)
    out["goodput_bps"] = _mean_rates(at_s, column("kv_bytes") * 8, edges)
    backlog, unsent = column("backlog_bytes"), column("unsent_bytes")
    out["backlog_bytes"] = steps.largest(backlog, bins, count)
    out["unsent_bytes"] = steps.largest(unsent, bins, count)
    waits = np.where(np.isnan(unsent), backlog, np.nan_to_num(backlog) + unsent)
    rate = applied.at(at_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        queue_s = np.where(rate > 0, waits * 8 / (rate * TCP_EFFICIENCY), np.nan)
    out["queue_s"] = steps.largest(queue_s, bins, count)
    for name in ("drops", "retransmits", "line_lost"):
        counted = column(name)
        if not np.isnan(counted).all():
            gained = np.clip(np.diff(counted, prepend=counted[0]), 0, None)
            out[name] = steps.counts(bins, count, np.nan_to_num(gained)).astype(np.float64)
    out["rtt_s"] = steps.means(column("rtt_s"), bins, count)
    out["line_held"] = steps.largest(column("line_held"), bins, count)
    out["line_late_s"] = steps.largest(column("line_late_s"), bins, count)
    return out


def rates(
    direction: str, samples: pd.DataFrame, events: list[dict[str, Any]], nominal_bps: float
) -> tuple[Steps, Steps]:
    """The rate asked and the rate applied over time, bits/s. An event says when a step was due and when the kernel had
    it; what a sample says beyond the events (`prfaas link set`, in the middle of a load) was asked as it was applied.
    """
    own = [one for one in events if one["event"] == "link" and one["direction"] == direction]
    noted = [(one["t_s"], float(one["after"])) for one in own]
    due = [(one["t_s"] - (one["late_s"] or 0.0), float(one["after"])) for one in own]
    at_s = samples["t_s"].to_numpy(np.float64)
    down = (samples["outage"].fillna("") != "").to_numpy()
    rate_bps = np.where(down, 0.0, samples["rate_asked_bps"].astype("float64").to_numpy())
    base = float(own[0]["before"]) if own else float(rate_bps[0]) if len(rate_bps) else nominal_bps
    noticed = []
    if len(at_s) > 1:
        near_s = 2 * float(np.median(np.diff(at_s)))
        step_s = np.array([one[0] for one in noted])
        now = Steps(base, noted).at(at_s)
        free = np.ones(len(at_s), bool)
        for one in step_s:  # a sample beside a step may have been taken a moment before it, or after
            free &= np.abs(at_s - one) > near_s
        apart = free & ~np.isnan(rate_bps) & ~np.isclose(rate_bps, now, rtol=1e-6)
        begins = apart & ~np.concatenate([[False], apart[:-1] & (rate_bps[1:] == rate_bps[:-1])])
        ends = ~apart & np.concatenate([[False], apart[:-1]]) & free
        noticed = [(float(at_s[i]), float(rate_bps[i])) for i in np.flatnonzero(begins)]
        noticed += [(float(at_s[i]), float(now[i])) for i in np.flatnonzero(ends)]
    return Steps(base, due + noticed), Steps(base, noted + noticed)


def _steps(events: list[dict[str, Any]], samples: pd.DataFrame) -> list[tuple[float, float, float, str]]:
    """Every change of the rate to_pd, those that only the samples show among them."""
    of = samples[samples["direction"] == "to_pd"].reset_index(drop=True)
    _, applied = rates("to_pd", of, events, math.nan)
    told = {one["t_s"]: one["trigger"] for one in events if one["event"] == "link" and one["direction"] == "to_pd"}
    changes = zip(applied.times.tolist(), pairwise(applied.values.tolist()), strict=True)
    return [(at_s, was, now, told.get(at_s) or "") for at_s, (was, now) in changes if was != now]


def _mean_rates(at_s: Array, cumulative: Array, edges: Array) -> Array:
    """The mean growth in each bin of a counter that was sampled; NaN where no sample reaches."""
    known = ~np.isnan(cumulative)
    if known.sum() < 2:
        return np.full(len(edges) - 1, np.nan)
    at_s, cumulative = at_s[known], cumulative[known]
    grown = np.diff(np.interp(edges, at_s, cumulative)) / np.diff(edges)
    grown[(edges[1:] <= at_s[0]) | (edges[:-1] >= at_s[-1])] = np.nan
    return grown


def _outages(events: list[dict[str, Any]], samples: pd.DataFrame, end_s: float) -> list[tuple[float, float, str]]:
    """When the link was down, in each direction."""
    found = []
    for direction in DIRECTIONS:
        of = samples[samples["direction"] == direction].reset_index(drop=True)
        _, applied = rates(direction, of, events, 1.0)
        times = applied.times.tolist()
        spans = zip([0.0, *times], [*times, end_s], applied.values.tolist(), strict=True)
        found += [(start_s, until_s, direction) for start_s, until_s, rate in spans if rate == 0 and start_s < end_s]
    return sorted(found)


# the scheduler and the load
def _scheduler(events: list[dict[str, Any]], summary: dict[str, Any], edges: Array) -> dict[str, Any]:
    changes = [{**one, "kind": one["event"]} for one in events]
    over_time = thresholds(changes, summary["scheduler"]["threshold_tokens"])
    optima = summary["closed_form"]["optima"]
    middle = (edges[:-1] + edges[1:]) / 2
    best = np.full(len(middle), np.nan)
    for one in optima:
        inside = (middle >= one["start_s"]) & (middle < one["end_s"])
        best[inside] = math.nan if one["threshold_tokens"] is None else one["threshold_tokens"]
    last = np.nextafter(edges[1:], 0.0)  # a change on the edge belongs to the bin that begins there
    if over_time is None:
        threshold = np.full(len(last), np.nan)
    else:
        threshold = Steps(over_time.values[0], over_time.steps()[1:]).at(last)
    moods = [one for one in events if one["event"] == "regime"]
    words = [moods[0]["before"], *(one["after"] for one in moods)] if moods else [""]
    index = np.searchsorted(np.array([one["t_s"] for one in moods]), last, "right")
    return {"threshold_tokens": threshold, "optimum_tokens": best, "regime": np.array(words, dtype=object)[index]}


def _load(requests: pd.DataFrame, edges: Array) -> dict[str, Any]:
    """What came in each bin and how it fared, and how many were where at its end."""
    count = len(edges) - 1
    ok = completed(requests).to_numpy(bool)
    bins = steps.bin_of(requests["sched_s"].to_numpy(np.float64), edges)
    remote = (requests["prefill_site"] == "prfaas").to_numpy(bool)
    well = np.where(ok, bins, -1)
    ttft = requests["ttft_s"].to_numpy(np.float64)
    p50, p90 = steps.quantiles(ttft, well, count, (0.5, 0.9))
    arrivals = steps.counts(bins, count)
    out: dict[str, Any] = {
        "arrivals": arrivals,
        "failed": arrivals - steps.counts(well, count),
        "offload_fraction": steps.means(remote.astype(np.float64), well, count),
        "ttft_p50_s": p50,
        "ttft_p90_s": p90,
    }
    for part in _PARTS:
        out[f"ttft_{part}_s"] = steps.means(requests[f"ttft_{part}_s"].to_numpy(np.float64), well, count)

    def inside(start: str, end: str, rows: Array) -> Array:
        """How many of these had passed the one stamp and not the other, at each bin's end."""
        passed = []
        for stamp in (start, end):
            at_s = requests[stamp].to_numpy(np.float64)
            at = np.where(rows, np.clip(np.floor(at_s / edges[1]), 0, count), -1).astype(np.int64)
            passed.append(np.cumsum(np.bincount(at[at >= 0], minlength=count + 1))[:count])
        return passed[0] - passed[1]

    out["waiting_prfaas"] = inside("arrive_s", "prefill_start_s", ok & remote)
    out["waiting_pd"] = inside("arrive_s", "prefill_start_s", ok & ~remote)
    out["prefilling"] = inside("prefill_start_s", "prefill_end_s", ok)
    out["sending"] = inside("prefill_end_s", "landed_s", ok)
    out["admitting"] = inside("landed_s", "admitted_s", ok)
    out["decoding"] = inside("admitted_s", "finished_s", ok)
    return out
