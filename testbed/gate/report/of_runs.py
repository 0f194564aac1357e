"""Any runs as a report: one by itself, or several beside the first of them, if they are alike in all but their policy.

Runs of one policy under several seeds are one arm, and figures are then means over seeds with their intervals; what is
drawn is the first run of each arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testbed.compare import compare
from testbed.explain import Explainer
from testbed.gate.report.alike import CLOCK, Run
from testbed.gate.report.arm import drawn
from testbed.gate.report.figures import ROWS, signed
from testbed.gate.report.requests import lost_most, worst
from testbed.gate.report.view import Cell, Requests, Section, Table, View
from testbed.gate.report.words import INVARIANTS, MEANINGS, plural, value
from testbed.policies import CAVEAT
from testbed.runs import read_scenario


def comparison(arms: dict[str, dict[int, Run]]) -> dict[str, Any]:
    """The figures of all, as `summary.json` has them (`testbed.compare`)."""
    return compare({name: {seed: run.summary for seed, run in by.items()} for name, by in arms.items()})


def view(arms: dict[str, dict[int, Run]], notes: Sequence[str] = ()) -> View:
    """The report. notes: what has to be said of it, such as that the runs are not alike. Raises RunError."""
    data = comparison(arms)
    names = list(arms)
    firsts = [next(iter(by.values())) for by in arms.values()]
    first = firsts[0].summary
    state, sentence = _verdict(arms)
    what = f"{first['scenario']}: {first['deployment']} {CLOCK[first['clock']]}"
    caveats = [f"{name}: {CAVEAT}" for name, run in zip(names, firsts, strict=True) if run.summary.get("knows_future")]
    return View(
        title=f"{what}, {' against '.join(reversed(names)) if len(names) == 2 else ', '.join(names)}",
        state=state,
        sentence=sentence if len(names) == 1 else f"{sentence} {_largest(data, names)}",
        reasons=[
            f"{name}, seed {seed}: {reason}"
            for name, by in arms.items()
            for seed, run in by.items()
            for reason in run.summary["verdict"]["reasons"]
        ],
        notes=[*notes, *caveats],
        overview=_figures(data, names),
        sections=[_section(arms, names, firsts)],
        facts=_facts(arms),
        meanings=list(MEANINGS),
        heading="What happened, and where" if len(names) == 1 else "What differs, and where",
    )


def _verdict(arms: dict[str, dict[int, Run]]) -> tuple[str, str]:
    statuses = [run.summary["verdict"]["status"] for by in arms.values() for run in by.values()]
    state = max(statuses, key=("valid", "failed", "invalid").index)
    if len(statuses) == 1:
        requests = next(iter(next(iter(arms.values())).values())).summary["requests"]
        return state, (
            f"{state.capitalize()}: {requests['completed']:,} of {requests['scheduled']:,} requests completed"
            + (", and the measurement can be believed." if state == "valid" else ".")
        )
    bad = sum(status != "valid" for status in statuses)
    words = "all of them valid" if not bad else f"{bad} of them not valid: believe nothing of an invalid one"
    return state, f"{plural(len(statuses), 'run')}, {words}."


def _largest(data: dict[str, Any], names: list[str]) -> str:
    """How P90 TTFT compares, in a sentence."""
    base = data["figures"][names[0]]["ttft_p90_s"]["mean"]
    told = []
    for name in names[1:]:
        mean = data["figures"][name]["ttft_p90_s"]["mean"]
        if base is None or mean is None:
            continue
        between = data["differences"][name]["ttft_p90_s"]
        span = "" if between["low"] is None else f" ({signed(between['low'], 's')} to {signed(between['high'], 's')})"
        told.append(f"P90 TTFT is {value(mean, 's')} under {name}, {value(base, 's')} under {names[0]}{span}")
    return f"{'; '.join(told)}." if told else "No P90 TTFT can be compared."


def _figures(data: dict[str, Any], names: list[str]) -> Table:
    several = len(data["runs"][names[0]]["seeds"]) > 1
    rows = []
    for title, key, unit in ROWS:
        cells = [Cell(title)]
        for name in names:
            figure = data["figures"][name][key]
            difference = data["differences"].get(name, {}).get(key)
            more = "" if difference is None else _difference(difference, unit)
            if difference is None and figure["low"] is not None:
                more = f"{value(figure['low'], unit)} to {value(figure['high'], unit)}"
            cells.append(Cell(value(figure["mean"], unit), more))
        rows.append(cells)
    note = f"Small: the difference to {names[0]}" if len(names) > 1 else ""
    if several:
        seeds = len(data["runs"][names[0]]["seeds"])
        over = f"means over {seeds} seeds, intervals 95 % over seeds"
        note = f"{note}; {over}." if note else f"{over.capitalize()}."
    elif note:
        note = f"{note}, seed by seed; one run each has no interval, and chance alone makes differences."
    return Table("Figures", [("", False), *((name, True) for name in names)], rows, note, compact=True)


def _difference(of: dict[str, float | None], unit: str) -> str:
    if of["mean"] is None:
        return "no seed in common"
    if not any(of.values()):
        return "the same"
    mean = signed(of["mean"], unit)
    if of["low"] is None or of["high"] is None:
        return mean
    return f"{mean} ({signed(of['low'], unit)} to {signed(of['high'], unit)})"


def _section(arms: dict[str, dict[int, Run]], names: list[str], firsts: list[Run]) -> Section:
    told = [Explainer(run.folder) for run in firsts]
    charts = {
        "arms": [drawn(run.folder, each.requests) for run, each in zip(firsts, told, strict=True)],
        "slo_s": read_scenario(firsts[0].folder).slo.ttft_p90_s,
        "load": None,
        "differences": None,
    }
    requests = []
    for name, run, each in zip(names, firsts, told, strict=True):
        same = run.trace_sha256 is not None and run.trace_sha256 == firsts[0].trace_sha256
        lost = lost_most(each, told[0]) if each is not told[0] and same else []
        note = f"The very same requests in both runs; what each waited under {names[0]} stands beside it."
        requests.append(Requests(f"Where {name} lost most against {names[0]}", note, lost, beside=names[0]))
        slowest = worst(each, besides=lost)
        requests.append(Requests(f"The slowest requests of {name}", "Those that failed come first.", slowest))
    seeds = ", ".join(f"{name}: seed {run.summary['seed']}" for name, run in zip(names, firsts, strict=True))
    several = any(len(by) > 1 for by in arms.values())
    return Section(
        title="the run" if len(firsts) == 1 else "the runs",
        state=_verdict(arms)[0],
        sentence=seeds,
        description=str(read_scenario(firsts[0].folder).description or ""),
        arms=names,
        runs="Drawn is the first run of each." if several else "",
        charts=charts,
        tables=[_invariants(names, firsts)] if any(run.summary.get("invariants") for run in firsts) else [],
        requests=requests,
        open=True,
    )


def _invariants(names: list[str], firsts: list[Run]) -> Table:
    found = [{one["name"]: one for one in run.summary.get("invariants") or []} for run in firsts]
    every = list(dict.fromkeys(name for each in found for name in each))
    rows = []
    for invariant in every:
        meaning, unit = INVARIANTS.get(invariant, ("", ""))
        cells = [Cell(invariant.replace("_", " "), meaning)]
        for each in found:
            one = each.get(invariant, {"status": "not_checked", "sentence": "", "value": None, "bound": None})
            bound = "" if one["bound"] is None else f"; bound {value(one['bound'], unit)}"
            cells.append(Cell(one["status"].replace("_", " "), f"{one['sentence']}{bound}", state=one["status"]))
        rows.append(cells)
    broken = any(one["status"] == "broken" for each in found for one in each.values())
    columns = [("invariant", False), *((name, False) for name in names)]
    return Table("Invariants", columns, rows, "What has to hold in every run.", folded=not broken)


def _facts(arms: dict[str, dict[int, Run]]) -> list[tuple[str, str]]:
    return [(name, "; ".join(_fact(seed, run) for seed, run in by.items())) for name, by in arms.items()]


def _fact(seed: int, run: Run) -> str:
    return f"seed {seed}: {run.folder}, requests {(run.trace_sha256 or 'unknown')[:12]}"
