"""What `prfaas explain` and `prfaas replay-decisions` print for people."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from testbed.policies import CAVEAT
from testbed.show import CLOCK, out


def show_explained(found: dict[str, Any]) -> None:
    """A request's life, its decision, its cache, and what had changed before."""
    error = found["error"] or found["client_error"]
    ended = found["status"] + (f" ({error}: {found['error_message'] or 'the client says so'})" if error else "")
    _say(f"{found['request_id']}: {ended}; {found['scenario']}, {found['deployment']} under {found['policy']},")
    _say(
        f"{CLOCK[found['clock']]} (model seconds); {found['input_tokens']:,} tokens in, "
        f"{_number(found['output_tokens'], ',.0f')} of {found['output_tokens_asked']:,} out"
    )
    if found["knows_future"]:
        _say(f"{found['policy']}: {CAVEAT}")
    if found["same_id"] > 1:
        _say(f"{found['same_id']} requests had this id; this is the last of them")
    _show_life(found)
    _show_decision(found)
    if found["cache"]:
        _show_cache(found["cache"])
    _show_changes(found["changes_before"])


def _show_life(found: dict[str, Any]) -> None:
    table = Table(title="its life")
    for column in ("", "at, s", "after, s"):
        table.add_column(column, justify="left" if not column else "right")
    for one in found["stamps"]:
        table.add_row(one["what"], f"{one['at_s']:,.3f}", _number(one["after_s"], "+,.3f"))
    out.print(table)
    if found["ttft_s"] is not None:
        parts = [f"{part} {value:.3f}" for part, value in found["ttft_parts_s"].items() if value is not None]
        _say(f"TTFT {found['ttft_s']:.3f} s = {' + '.join(parts)}")
    if found["e2e_s"] is not None:
        _say(f"end to end {found['e2e_s']:.3f} s, TPOT {_number(found['tpot_s'], '.4f')} s")


def _show_decision(found: dict[str, Any]) -> None:
    decision = found["decision"]
    if decision is None:
        _say("decision: none; control never decided on it")
        return
    tries = f", in attempt {found['attempts']}; the rows keep the last one's" if found["attempts"] > 1 else ""
    _say(f"decision: {decision['reason']}{tries}")
    if decision["prefill_node"]:
        _say(
            f"  prefill at {decision['prefill_node']} ({decision['prefill_site']}), decode at {decision['decode_node']}"
        )
    t = decision["threshold_tokens"]
    words = ["no threshold" if t is None else "t was above every length" if math.isinf(t) else f"t was {t:,.0f} tokens"]
    if decision["regime"]:
        words.append(f"bandwidth {decision['regime']}")
    _say(f"  {', '.join(words)}")
    _say(
        f"  l_total {decision['l_total']:,}; cached: l_pd {decision['l_pd']:,}, l_prfaas {decision['l_prfaas']:,}; so "
        f"uncached {decision['uncached_pd']:,} locally, {decision['uncached_best']:,} with the longer prefix of both"
    )
    if decision["prefill_queue_s"] is not None and decision["prefill_node"]:
        _say(
            f"  {decision['prefill_queue_s']:.3f} s of prefill waited there (the one running counted whole), its own "
            f"would take {_number(decision['prefill_cost_s'], '.3f')} s"
        )
    if decision["policy_error"]:
        _say(f"  the policy failed ({decision['policy_error']}), and a fallback decided where its reason says so")


def _show_cache(cache: dict[str, Any]) -> None:
    saved = ""
    if cache["saved_s"] is not None:
        saved = f": {cache['saved_s']:.3f} s of prefill and {cache['saved_kv_bytes'] / 1e6:,.1f} MB of KV saved"
    meant = "" if cache["meant_tokens"] == cache["used_tokens"] else f" of {cache['meant_tokens']:,} meant"
    _say(f"cached prefix: {cache['used_tokens']:,} tokens{meant} reused, from {cache['from']}{saved}")


def _show_changes(changes: list[dict[str, Any]]) -> None:
    if not changes:
        _say("nothing of the link, the nodes or the scheduler had changed before")
        return
    table = Table(title="what had changed before it was routed (the latest of each kind)")
    for column in ("at, s", "s before", "", "node", "from", "to", "trigger"):
        table.add_column(column, justify="right" if column in ("at, s", "s before", "from", "to") else "left")
    for one in changes:
        values = [_value(one["kind"], one[key]) for key in ("before", "after")]
        table.add_row(f"{one['t_s']:,.3f}", f"{one['ago_s']:,.3f}", one["kind"], one["node"], *values, one["trigger"])
    out.print(table)


def _value(kind: str, value: str) -> str:
    if kind == "threshold":
        return f"{float(value):,.0f}" if value and math.isfinite(float(value)) else "all local"
    return f"{float(value) / 1e9:g} Gbps" if kind == "link" else value


def show_verified_decisions(result: dict[str, Any]) -> None:
    """How many agree, and the first that do not."""
    decisions, changes = result["decisions"], result["changes"]
    _say(f"{result['run']}: {result['events']:,} events, policy {result['policy']}")
    _say(f"decisions: {decisions['agree']:,} of {decisions['compared']:,} the same")
    for what, count in decisions["not_compared"].items():
        _say(f"  not compared: {count} {what}")
    _say(f"changes of the scheduler: {changes['agree']:,} of {changes['compared']:,} the same")
    for note in result["notes"]:
        _say(f"note: {note}")
    for one in result["differences"]:
        if "change" in one:
            change = one["change"]
            what = " ".join(str(change[key]) for key in ("kind", "node", "before", "after") if change[key])
            _say(f"  only {one['only']}: at {float(change['t_s']):,.3f} s {what} ({change['trigger']})")
        else:
            fields = ", ".join(f"{name} {was or '-'} -> {now or '-'}" for name, (was, now) in one["fields"].items())
            _say(f"  {one['request_id']}, attempt {one['attempt']}: {fields}")
    out.print("[bold green]agrees[/]" if result["agree"] else "[bold red]differs[/] (recorded -> replayed)")


def show_instead(result: dict[str, Any]) -> None:
    """What another policy would have decided."""
    of = result["decisions"]
    _say(f"{result['run']}: {result['events']:,} events, decided by {result['policy']}; by {result['instead']}:")
    _say(f"  {of['same']:,} of {of['compared']:,} first decisions the same")
    moves = ", ".join(f"{move}: {count:,}" for move, count in result["site_moves"].items())
    _say(f"  {of['other_site']:,} at another site{f' ({moves})' if moves else ''}")
    _say(f"  {of['other_prefill_node']:,} at another prefill node of the site")
    _say(f"  {of['other_decode_node']:,} at another decode node only")
    if of["not_compared"] or result["retried"]:
        _say(f"  not compared: {of['not_compared']} without events, {result['retried']} that were tried again")
    _say(f"  {result['threshold_changes']} changes of its threshold")
    for kind, count in result["policy_errors"].items():
        _say(f"  the policy failed {count} times: {kind} (contained: a fallback decided)")
    for note in result["notes"]:
        _say(f"note: {note}")
    _say("on the run's own events: queues and links are those that the run's decisions made")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(text: str) -> None:
    out.print(text, markup=False)
