"""The columns of the result tables: the gateway's own of every request, `requests.csv`, `timeline.csv`.

They are stable: a column keeps its name and meaning, and a new one is added at the end of its group (the gateway's, the
client's) or not at all; read them by name. Times are model seconds since the load's t = 0 unless a name ends in `_ns`.
"""

from __future__ import annotations

from typing import Final

from testbed.control import Record

GATEWAY_COLUMNS: Final = (
    "request_id",
    "status",  # ok | failed | aborted (its client left)
    "error",  # a short kind, when not ok
    "error_message",
    "input_tokens",
    "cached_tokens",
    "output_tokens_asked",
    "output_tokens",
    "attempts",
    "prefill_site",  # prfaas | pd
    "prefill_node",
    "decode_node",
    "reason",  # the rule that routed it
    "threshold_tokens",  # t at the time
    "policy_error",  # how the policy failed, when the fallback decided
    "kv_bytes",  # S_kv(l - cached), model bytes
    "arrive_s",
    "route_s",  # of the last attempt
    "prefill_start_s",
    "prefill_end_s",
    "landed_s",  # the last KV byte at the decode node
    "admitted_s",  # a decode slot taken; the first token leaves
    "finished_s",  # the last token left
    # What the decision of the last attempt knew, enough to redo it by hand.
    "l_pd",  # the longest prefix cached at a node of either site, tokens, as the directory had it
    "l_prfaas",
    "regime",  # scarce | abundant, when the policy tells them apart
    "cache_node",  # where the cached prefix was to be fetched from; empty for the prefill node itself, or none
    "prefill_tokens",  # to compute: input_tokens less the cached prefix that the decision meant to use
    "prefill_queue_s",  # prefill work that waited at the chosen node before this request, by its profile
    "prefill_cost_s",  # T_prefill(prefill_tokens) there
    "cache_site",  # of cache_node
    "fetched_bytes",  # KV that came from there before the prefill, model bytes
)

WORDS: Final = (
    "status",
    "error",
    "error_message",
    "policy_error",
    "reason",
    "prefill_site",
    "prefill_node",
    "decode_node",
    "regime",
    "cache_node",
    "cache_site",
)
"""The columns that hold texts from a small stock, whatever a text looks like."""

PARTS: Final = ("client", "queue", "prefill", "transfer", "admission", "return")
"""The parts of a TTFT, in order; they add up to it exactly. client: t_sched to arrival at control. queue: to the start
of the prefill (routing, retries, the way to the worker and waiting there). prefill. transfer: exposed, from prefill end
to the last KV byte landed. admission: to a decode slot. return: the first token's way to the client."""

REQUEST_COLUMNS: Final = (
    *GATEWAY_COLUMNS,
    "sched_s",
    "send_s",
    "headers_s",
    "first_token_s",
    "last_token_s",
    "done_s",
    "client_error",
    "late_s",  # send - sched: how late the client was
    "ttft_s",  # first_token - sched (without a client's stamps: admitted - arrive)
    "tpot_s",  # (last_token - first_token) / (tokens - 1)
    "e2e_s",  # done - sched
    *(f"ttft_{part}_s" for part in PARTS),
    "in_window",  # t_sched in [warm-up, duration)
)

TIMELINE_COLUMNS: Final = (
    "t_s",
    "direction",  # to_pd | to_prfaas; empty for what is not of the link
    "rate_asked_bps",  # of the link's state at that time
    "rate_measured_bps",  # KV class, IP and Ethernet headers included
    "backlog_bytes",  # in the shaper's queue
    "drops",
    "kv_wire_bytes",  # cumulative since t = 0, on the wire (wall bytes)
    "kv_bytes",  # KV that crossed, cumulative since t = 0, payload: landed (wire) or sent (virtual time), model bytes
    "unsent_bytes",  # KV that is computed and waits at its senders, model bytes
    "retransmits",  # TCP segments sent again by the senders' sockets, cumulative
    "rtt_s",  # the longest smoothed round trip of theirs
    "outage",  # its kind while there is one: stall | blackhole | down
    "line_held",  # packets in the delay line
    "line_lost",  # packets it lost on purpose, cumulative
    "line_late_s",  # how late it lets packets go, p99, model seconds
    "line_down",  # 1 while it is dead
    "event",  # empty for a sample of the link; link (its rate stepped) | cross (what competes) | threshold | role | ...
    "node",  # that changed, empty for none
    "before",  # bits/s, tokens, or a word, by the event
    "after",
    "trigger",  # what brought it about: a phase's name, or the scheduler's reason
    "late_s",  # of a step on the wire: how long after it was due the kernel had it, model seconds
)
"""A row is a sample of the link (up to line_down), or an event (from there on). What a clock does not have is empty."""

SCHEDULER_STATES: Final = ("threshold", "regime", "role", "joined", "node", "policy")
"""The events of the timeline after which something of the scheduler stays as it is said."""

SCHEDULER_EVENTS: Final = (*SCHEDULER_STATES, "replicate", "replicated", "recall", "policy_error", "fault")
"""The events of the timeline that are control's own changes."""


def gateway_row(record: Record) -> list[object]:
    """A record as a row of GATEWAY_COLUMNS; a time or threshold there is none of is empty."""
    row: list[object] = []
    for column in GATEWAY_COLUMNS:
        value = getattr(record, column)
        if isinstance(value, float):
            value = "" if value != value else repr(round(value, 9))
        row.append(value)
    return row
