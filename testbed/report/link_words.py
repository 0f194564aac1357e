"""The link doctor's words, from a summary's `link_doctor`: for `report.md`, and for the terminal at a run's end."""

from __future__ import annotations

from typing import Any, Final

CSV: Final = "link.csv"
PAGE: Final = "link.html"
SPANS_SHOWN: Final = 8
"""More of them are for the page."""


def doctor_lines(summary: dict[str, Any]) -> list[str]:
    """The doctor's words as Markdown; none of a summary from before there was one."""
    told = summary.get("link_doctor")
    if told is None:
        return []
    wrong, notes = ([one for one in told["findings"] if one["level"] == level] for level in ("wrong", "note"))
    spans = told["spans"][:SPANS_SHOWN]
    more = len(told["spans"]) - len(spans)
    return [
        "## The link",
        "",
        f"What limited the run when, on one axis of time: [{PAGE}]({PAGE}) (figures: [{CSV}]({CSV})).",
        "",
        *(f"- **wrong**: {one['text']}" for one in wrong),
        *(f"- {one['sentence']}" for one in spans),
        *([f"- and {more} spans more"] if more > 0 else ()),
        *(f"- {one['text']}" for one in notes),
        "",
    ]


def doctor_line(summary: dict[str, Any]) -> str | None:
    """One line for the end of a run, when something is wrong with its link."""
    wrong = [one for one in summary.get("link_doctor", {}).get("findings", ()) if one["level"] == "wrong"]
    if not wrong:
        return None
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"link doctor: {wrong[0]['text']}{more}; see {PAGE} in the results, or prfaas report link RUN --text"


def verified_lines(link: dict[str, Any]) -> list[str]:
    """What `prfaas link verify` measured before the load, of a summary's link, as Markdown; none where it did not."""
    verified = link.get("measured")
    if not verified:
        return []
    titles = ("direction", "asked", "TCP can get", "measured", "error", "first second", "RTT asked", "RTT p50")
    rows = [[*titles, "jitter", "lost"], ["---"] * (len(titles) + 2)]
    for direction, one in verified["directions"].items():
        asked, can_get, measured = (one[key] / 1e9 for key in ("asked_bps", "expected_bps", "measured_bps"))
        first, bound = (one[f"first_second_{which}bps"] / 1e9 for which in ("", "bound_"))
        rtt_ms = [one[key] * 1e3 for key in ("asked_rtt_s", "rtt_p50_s", "rtt_jitter_s")]
        rows.append(
            [
                direction + ("" if one["ok"] else f" (**not** what was asked: {', '.join(one['wrong'])})"),
                *(f"{gbps:.3f} Gbps" for gbps in (asked, can_get, measured)),
                f"{one['error']:+.2%}",
                f"{first:.3f} of at most {bound:.3f} Gbps",
                *(f"{ms:.2f} ms" for ms in rtt_ms),
                f"{one['train']['lost']} of {one['train']['sent']}",
            ]
        )
    return [
        "Before the load the link was asked for and measured to be:",
        "",
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]


def cross_words(link: dict[str, Any]) -> str:
    """What crossed beside the KV, of a summary's link; empty without cross-traffic."""
    crossed = link.get("cross_bytes") or {}
    parts = [f"{size:,} bytes {direction}" for direction, size in crossed.items() if size]
    return f"beside the KV, not counted in it, cross-traffic: {', '.join(parts) or 'nothing'}" if crossed else ""
