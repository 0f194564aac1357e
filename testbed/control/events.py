"""What control is told and what it answers: events, commands, a request's record, a change of the scheduler's.

Workers' own messages (`Prefilled`, `Admitted`, `Finished`, `AttemptFailed`, `CacheChanged`, `Brought`, `Telemetry`)
are events too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from emulator.messages import (
    Admitted,
    AttemptFailed,
    Bring,
    Brought,
    CacheChanged,
    Cancel,
    Convert,
    Finished,
    Prefill,
    Prefilled,
    Telemetry,
)
from testbed.scheduler.api import RequestView, Role, Site

CLIENT: Final = "client"


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """A request has arrived. output_tokens is for the workers; a policy never sees it."""

    request_id: str
    input_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    block_size: int = 0
    session: str = ""


class ClientGone(msgspec.Struct, frozen=True, tag=True):
    """The client no longer waits for the request."""

    request_id: str


class NodeUp(msgspec.Struct, frozen=True, tag=True):
    """The node serves `role` and is empty."""

    node: str
    role: Role


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """The node is dead or out of reach."""

    node: str
    reason: str


class Tick(msgspec.Struct, frozen=True, tag=True):
    """The time that `Control.next_s` asked for has come."""


class PolicySet(msgspec.Struct, frozen=True, tag=True):
    """Another policy is in charge from now on, by `Control.set_policy`. For the record, and for a replay."""

    name: str
    parameters: dict[str, float] = {}


class Disturbed(msgspec.Struct, frozen=True, tag=True):
    """Somebody at the testbed that is up makes something go wrong, or heals it. For the record: control does nothing.

    what: in words. node: the worker it is about, "" for the link.
    """

    what: str
    node: str = ""
    healed: bool = False


Event = (
    Arrive
    | ClientGone
    | NodeUp
    | NodeLost
    | Tick
    | PolicySet
    | Disturbed
    | Prefilled
    | Admitted
    | Finished
    | AttemptFailed
    | CacheChanged
    | Brought
    | Telemetry
)


class Change(msgspec.Struct, frozen=True):
    """A change of the scheduler's, for the timeline. t_s: model seconds.

    kind: threshold (tokens), regime (scarce, abundant), role (of `node`), joined (the node serves its new role), node
    (up, silent, lost), policy, replicate (to `node`, from the node in `before`, a prefix of so many tokens), replicated
    (bytes that came of it), recall (the request in `before` is taken from `node`), policy_error (an action that could
    not be done; the same one is written down once), fault (somebody's, by hand; `none` before and after it). trigger:
    what brought it about.
    """

    t_s: float
    kind: str
    node: str
    before: float | str
    after: float | str
    trigger: str


class Record(msgspec.Struct, gc=False, eq=False):
    """Everything known of one request; one row of the results when it ends. Times: model seconds, nan for none.

    status: ok | failed | aborted (its client left). error: a short kind. policy_error: how the policy failed, when a
    fallback decided.
    """

    view: RequestView
    request_id: str
    input_tokens: int
    output_tokens_asked: int
    arrive_s: float
    cached_tokens: int = 0
    fetched_bytes: int = 0  # KV that came from `cache_node` for its prefill
    output_tokens: int = 0
    attempts: int = 0
    kv_bytes: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    prefill_site: str = ""
    reason: str = ""
    status: str = ""
    error: str = ""
    error_message: str = ""
    policy_error: str = ""
    threshold_tokens: float = math.nan
    route_s: float = math.nan
    prefill_start_s: float = math.nan
    prefill_end_s: float = math.nan
    landed_s: float = math.nan
    admitted_s: float = math.nan
    finished_s: float = math.nan
    l_pd: int = 0  # cached at either site when it was routed, as the directory had it
    l_prfaas: int = 0
    cache_node: str = ""  # where its cached prefix was to come from, when not from its prefill node
    cache_site: str = ""
    regime: str = ""
    block_ids: tuple[int, ...] = ()
    prefill_tokens: int = 0  # to compute, as its prefill node is charged with
    prefill_cost_s: float = 0.0
    prefill_queue_s: float = 0.0  # the prefill work that waited there before it
    finish_reason: str = "length"
    placed: bool = False  # counted at its nodes
    prefilled: bool = False  # no longer counted at its prefill node

    @classmethod
    def of(cls, view: RequestView, output_tokens: int) -> Record:
        """A request that has just arrived."""
        return cls(view, view.request_id, view.input_tokens, output_tokens, view.arrival_s)

    @property
    def admitted(self) -> bool:
        """Whether it has a decode slot, and tokens of its answer may have been sent."""
        return self.admitted_s == self.admitted_s


class Completed(msgspec.Struct, frozen=True):
    """For the client: the last token has left."""

    record: Record


class Failed(msgspec.Struct, frozen=True):
    """For the client: the request ends with an error. http_status counts when nothing was sent yet."""

    record: Record
    http_status: int
    retry_after_s: float | None = None


Command = tuple[str, Prefill | Bring | Cancel | Convert | Completed | Failed]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """An instance of the fleet. slots: BS_max, for a node that can decode."""

    name: str
    site: Site
    role: Role
    slots: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What control itself keeps to. Model seconds.

    max_attempts: tries of a request before it fails. tick_s: between two looks around. telemetry_s: between two
    accounts that a node gives of itself; it is silent after SILENT of them. reload_s: what a node takes to change its
    role. deadline_s: until a request's first token, None for no deadline. waiting_requests: most requests that wait
    for their first token, None for no bound. block_tokens: of the prefix cache, 0 without one. pieces: of a transfer
    from the remote site.
    """

    max_attempts: int = 3
    tick_s: float = 1.0
    telemetry_s: float = 1.0
    reload_s: float = 60.0
    deadline_s: float | None = None
    waiting_requests: int | None = None
    block_tokens: int = 0
    pieces: int = 1
