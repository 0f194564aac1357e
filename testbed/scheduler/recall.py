"""Requests taken back from a remote site whose link is nearly dead.

A link that is down is told by silence: its site's nodes are heard of no more, and control tries elsewhere what waited
there. One that still carries a little, a thousandth of what it should, keeps everybody in earshot, and whatever was
sent before the threshold could follow would wait for minutes. What would be here sooner if it were computed here is
taken back, the youngest first: of the oldest most has crossed.
"""

from __future__ import annotations

from testbed.scheduler.api import PD, Recall, SystemView
from testbed.scheduler.rules import CostTable

PAYS = 2.0
"""How many times sooner a request has to be done here: it is not known how much of its KV has crossed."""

BEHIND_S = 10.0
"""Prefill work that waits at every local node, s, with which whatever is taken back would only make others wait."""


def recalls(view: SystemView, here: CostTable, there: CostTable, longest_s: float) -> list[Recall]:
    """What to take back while what waits at the senders needs more than `longest_s` model seconds to cross.

    here, there: what a prefill costs at the local and at the remote site.
    """
    link, local = view.observed.link, view.prefill(PD)
    bps = max(link.bps, 1.0)
    if not link.backlogged or not local or 8 * link.unsent_bytes <= longest_s * bps:
        return []
    away = view.away()
    waiting = link.unsent_bytes + sum(there.kv_bytes(one.prefill_tokens) for one in away if not one.kv_bytes)
    queues_s = [node.queued_s for node in local]
    taken = []
    for one in reversed(away):
        crosses_s = 8 * waiting / bps
        if crosses_s <= longest_s:
            break
        idlest = min(range(len(queues_s)), key=queues_s.__getitem__)
        if queues_s[idlest] > BEHIND_S:
            break
        done_s = queues_s[idlest] + here(one.input_tokens - one.l_pd)
        if PAYS * done_s > crosses_s:
            continue
        queues_s[idlest] = done_s
        waiting -= one.kv_bytes or there.kv_bytes(one.prefill_tokens)
        told = f"{crosses_s:.3g} s until it would be here at {bps / 1e9:.3g} Gbps, {done_s:.3g} s to compute it here"
        taken.append(Recall(one.request_id, told))
    return taken
