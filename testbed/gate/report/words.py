"""Metrics in the words of people: what a dotted path in a summary is called, and what it means; figures with units."""

from __future__ import annotations

import re
from typing import Final

ROOTS: Final = {
    "ttft_s": ("TTFT", "time to first token, from when the workload schedules a request to its first at the client"),
    "tpot_s": ("TPOT", "time per output token after the first"),
    "e2e_s": ("end-to-end time", "from when the workload schedules a request to its last token"),
    "egress_queue_s": ("egress wait", "how long the KV of an offloaded request is on its way after its prefill ended"),
    "ttft_split_s": ("TTFT part", "one part of the time to first token; the parts add up to it"),
    "ttft_by_route_s": ("TTFT by site", "time to first token of the requests prefilled at that site"),
    "offered_rps": ("offered load", "requests a second that the workload schedules"),
    "throughput_rps": ("throughput", "requests a second that complete in the window"),
    "goodput_rps": ("goodput", "requests a second that meet every SLO"),
    "lambda_max_rps": ("λ_max", "the rate at which P90 TTFT reaches its SLO: what the system can carry"),
    "slo": ("SLO", "how many of all scheduled requests kept it"),
    "offload_fraction": ("offloaded", "the share of requests prefilled at the PrfaaS site"),
    "egress_bps": ("egress", "bits a second that leave the PrfaaS site"),
    "requests": ("requests", "how many"),
    "scheduler": ("scheduler", "what it did"),
}

MEANINGS: Final = [
    (
        "model seconds",
        "All times, rates and bytes are the modelled system's, whatever the clock that ran it.",
    ),
    (
        "TTFT",
        "Time to first token, from when the workload schedules a request, so that a queue or a late client "
        "cannot hide. P90: nine of ten requests wait no longer.",
    ),
    (
        "parts of TTFT",
        "client (the way in), queue (until a prefill instance takes it), prefill, transfer (KV still on its "
        "way when the prefill has ended), admission (to a decode slot), return (the way back). They add up to "
        "it exactly.",
    ),
    (
        "threshold",
        "Prompts with more uncached tokens than t are prefilled at the PrfaaS site. The dashed line is the "
        "best t of the closed form.",
    ),
    (
        "link",
        "What the link from the PrfaaS site can carry (applied), and the KV that crossed it (goodput).",
    ),
    (
        "queues",
        "Requests that wait for a prefill instance of each site, whose KV is on its way, or that wait for a "
        "decode slot.",
    ),
    (
        "invariants",
        "What has to hold in every run whatever the policy. One that the scenario promises and the candidate "
        "alone breaks makes it worse.",
    ),
]
"""What the words of every report mean."""

GATE_MEANINGS: Final = [
    (
        "better, worse",
        "The interval excludes no change at all, and the change is at least the least effect that counts.",
    ),
    (
        "same",
        "A regression as large as counts is excluded, and no improvement is shown.",
    ),
    (
        "inconclusive",
        "Neither a change that counts nor its absence is shown by as many seeds as the suite allows.",
    ),
    ("invalid", "A meter failed: the figures must not be believed."),
    (
        "interval",
        "Holds at every look at once, for all objectives of the suite together. The smaller one beside it is "
        "a 95 % bootstrap over seeds, for that objective alone.",
    ),
    (
        "the small scale",
        "The change and its interval in units of the least effect that counts; better is to the right, and "
        "the shaded middle is what does not count. A hollow dot is further out than the scale.",
    ),
]

INVARIANTS: Final = {
    "requests complete": ("requests that failed", "requests"),
    "policy decides": ("decisions in which the policy failed and a fallback decided", "decisions"),
    "conserved": ("every request ends once, with all its tokens or with a reason", "requests"),
    "causal": ("no stamp is before one that has to come first; the largest breach", "s"),
    "bytes": ("what landed is what was made; landed over made, less 1", ""),
    "littles_law": ("mean number = rate × mean time, in every stage; the largest difference", "requests"),
    "work": ("no instance idles while its own queue holds a request that it may start; idle over working time", ""),
    "deterministic": ("the same events give the same decisions", "decisions"),
    "drained": ("how long queues take to come back after a burst", "s"),
    "not_starved": ("the longest that any request waits", "s"),
    "threshold_changes": ("the most changes of the threshold in any minute", "changes"),
    "role_changes": ("the most changes of roles in any ten minutes", "changes"),
    "no_cycle": ("how strongly the threshold comes back in circles while nothing else changes", "autocorrelation"),
    "recovered": ("how long after a step of the link what waited for it had crossed", "s"),
}
"""What each is about, and the unit of its value; `testbed.invariants` has the definitions."""

QUANTILE: Final = re.compile(r"p\d\d?")


def metric_name(metric: str) -> str:
    """`phases.drop.ttft_s.p90`: P90 TTFT, phase drop."""
    steps = metric.split(".")
    phase = ""
    if steps[0] == "phases" and len(steps) > 2:
        phase, steps = f", phase {steps[1]}", steps[2:]
    name = ROOTS.get(steps[0], (steps[0], ""))[0]
    inner = [step for step in steps[1:-1] if step != "overall"]
    if len(steps) > 1:
        last = steps[-1]
        if QUANTILE.fullmatch(last) or last in ("mean", "max", "min"):
            name = f"{last.upper() if last[0] == 'p' else last} {name}"
        else:
            inner = [*inner, last]
    return name + "".join(f" {step.replace('_', ' ')}" for step in inner) + phase


def metric_root(metric: str) -> str:
    """What it is a figure of: TTFT, goodput ..."""
    return ROOTS.get(_root(metric), (metric, ""))[0]


def metric_meaning(metric: str) -> str:
    """What it measures; empty for one that nobody described."""
    return ROOTS.get(_root(metric), ("", ""))[1]


def _root(metric: str) -> str:
    steps = metric.split(".")
    return steps[2] if steps[0] == "phases" and len(steps) > 2 else steps[0]


def value(number: float | None, unit: str) -> str:
    """`4.06 s`, `-` for none; bits a second as Gbps, shares as percent."""
    if number is None:
        return "-"
    if unit == "bit/s":
        return f"{number / 1e9:.3g} Gbps"
    if unit == "share":
        return f"{number:.1%}".replace("%", " %")
    return f"{number:,.4g} {unit}".rstrip()


def plural(count: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
