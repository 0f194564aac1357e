"""`link.html`: the axis as a page that needs nothing else: panels over one axis of time, and the doctor's words.

The page is `link_page.html` with the figures put in as JSON: some hundred kilobytes, drawn by a script of its own, in
the reader's light or dark, at any width. It opens without a network.
"""

from __future__ import annotations

import html
import math
from pathlib import Path
from string import Template
from typing import Any, Final

import orjson

from testbed.report.link_axis import OF_A_DIRECTION, Axis
from testbed.report.link_doctor import Diagnosis

CLOCK: Final = {"wire": "on the wire", "virtual": "in virtual time"}
_SHARED: Final = (
    "t_s", "end_s", "threshold_tokens", "optimum_tokens", "regime", "arrivals", "failed", "ttft_p50_s", "ttft_p90_s",
    "waiting_pd", "waiting_prfaas", "sending", "admitting",
)  # fmt: skip


def page(axis: Axis, told: Diagnosis) -> str:
    """The whole page as text."""
    summary = axis.summary
    template = Template((Path(__file__).parent / "link_page.html").read_text(encoding="utf-8"))
    title = f"{summary['scenario']}: {summary['deployment']} under {summary['policy']}, {CLOCK[summary['clock']]}"
    data = orjson.dumps(_data(axis), option=orjson.OPT_SERIALIZE_NUMPY).decode().replace("</", "<\\/")
    # Not `substitute`: the page's script has template strings of its own.
    return template.safe_substitute(
        TITLE=html.escape(title), SUBTITLE=_subtitle(summary), DOCTOR=_doctor(told), DATA=data
    )


def _subtitle(summary: dict[str, Any]) -> str:
    verdict = summary["verdict"]["status"]
    requests = summary["requests"]
    return (
        f'<span class="{verdict}">{verdict}</span>, {requests["completed"]} of {requests["scheduled"]} requests '
        f"completed, seed {summary['seed']}. Times, rates and bytes are the modelled system's."
    )


def _doctor(told: Diagnosis) -> str:
    items = [
        *(f'<li><span class="wrong">wrong:</span> {html.escape(one.text)}</li>' for one in told.wrong),
        *(f"<li>{html.escape(span.sentence())}</li>" for span in told.spans),
        *(f"<li>{html.escape(one.text)}</li>" for one in told.findings if one.level == "note"),
    ]
    return f"<ul>{''.join(items)}</ul>"


def _data(axis: Axis) -> dict[str, Any]:
    columns = [*_SHARED, *(f"{direction}_{column}" for direction in axis.used for column in OF_A_DIRECTION)]
    table = {column: [_short(value) for value in axis.table[column].tolist()] for column in columns}
    phases = [one for one in axis.summary["closed_form"]["optima"] if one["name"] is not None]
    return {
        "table": table,
        "ways": axis.used,
        "wire": axis.summary["clock"] == "wire",
        "events": [_event(one) for one in axis.events],
        "steps": [{"t_s": at_s, "direction": "to_pd"} for at_s, *_ in axis.steps],
        "outages": axis.outages,
        "faults": axis.faults,
        "phases": [{key: one[key] for key in ("name", "start_s", "end_s")} for one in phases],
        "slo_s": axis.summary["slo"]["ttft_p90_s"],
        "about": (
            f"Bins of {axis.width_s:g} s. Rates are means over a bin, what waits is the most in it; a dashed line is a "
            "step of the link, red an outage (a red bar below: a fault), grey every other phase, an orange bar a time "
            "when the policy takes bandwidth for scarce. Point at a panel for the figures and the reasons of changes."
        ),
    }


def _short(value: Any) -> Any:
    """A number in five digits; None for none, and for an infinite threshold."""
    if isinstance(value, str):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _event(one: dict[str, Any]) -> dict[str, Any]:
    who = f" {one['node']}" if one["node"] else ""
    late = f", {one['late_s']:.3g} s late" if one["late_s"] else ""
    moved = f"{_word(one, 'before')} → {_word(one, 'after')}"
    why = f" ({one['trigger']})" if one["trigger"] else ""
    words = f"{one['t_s']:.4g} s, {one['event']}{who}: {moved}{late}{why}"
    after = one["after"] if isinstance(one["after"], float) and math.isfinite(one["after"]) else None
    return {"t_s": one["t_s"], "event": one["event"], "direction": one["direction"], "after": after, "words": words}


def _word(one: dict[str, Any], key: str) -> str:
    value = one[key]
    if one["event"] == "link":
        return f"{float(value) / 1e9:.4g} Gbps"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}"
    if one["event"] == "threshold":
        return "infinity"
    return "" if value is None else str(value)
