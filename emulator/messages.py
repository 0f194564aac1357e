"""What the machines accept and emit: the objects of virtual time, and, in msgpack, the control messages of the wire.

Times are model seconds, sizes model bytes. `attempt` counts the tries of one request (a retry is a new attempt), so
that a message about an abandoned attempt is never mistaken for one about its successor.
A machine returns `Out` pairs (destination, message); the destination is a node's name, `CONTROL`, or `WIRE` (the KV
transport beside the machine: real sockets on the wire, `netem.fluid` in virtual time).
"""

from __future__ import annotations

from typing import Final

import msgspec

from emulator.computing import ComputeMessage, Sampling

CONTROL: Final = "control"
CONTROL_VERSION: Final = 1  # of these messages between processes; a Hello has it
WIRE: Final = "wire"


class Message(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all messages."""


class Wake(Message, frozen=True, gc=False):
    """The time a machine asked for with `next_s()` has come. `handle` is called with that *scheduled* time."""


WAKE: Final = Wake()


# control -> prefill
class Prefill(Message, frozen=True, gc=False):
    """Prefill `input_tokens`, then send the KV of what was computed to `decode_node`.

    cached_tokens: what control believes is held and wants reused; a node with a pool re-checks it, one without takes it
    as given. block_ids: the prompt's whole pool blocks (`kvcache.aligned`), none for a prompt that is not to be cached.
    cache_node: where to fetch the cached prefix from when this node holds less of it; "" is nowhere. prompt, sampling:
    where a model computes, the tokens themselves, a byte each, and how the answer's are chosen.
    """

    request_id: str
    attempt: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    decode_node: str
    block_ids: tuple[int, ...] = ()
    cache_node: str = ""
    prompt: bytes = b""
    sampling: Sampling | None = None


class Bring(Message, frozen=True, gc=False):
    """Fetch a cached prefix of these blocks from `node` although no prefill waits for it. Answered by Brought."""

    request_id: str
    attempt: int
    block_ids: tuple[int, ...]
    node: str


# control -> prefill, control -> decode
class Cancel(Message, frozen=True, gc=False):
    """The attempt is over (client gone, peer dead, deadline): free all of it. Unknown attempts are ignored."""

    request_id: str
    attempt: int


class Hinder(Message, frozen=True, gc=False):
    """A fault for the node, in place of the one before; as it is by default, it heals.

    slowdown: whatever computation begins from now on takes so many times as long. held_bytes: model bytes of landing
    room that somebody else has taken.
    """

    slowdown: float = 1.0
    held_bytes: int = 0


class PeerLost(Message, frozen=True, gc=False):
    """The connection to `node` is gone: everything under way with it is over."""

    node: str


# prefill -> decode
class Announce(Message, frozen=True, gc=False):
    """A transfer of `kv_bytes` is about to begin; send nothing until it is granted."""

    request_id: str
    attempt: int
    prefill_node: str
    kv_bytes: int
    input_tokens: int
    output_tokens: int
    sampling: Sampling | None = None


class Abort(Message, frozen=True, gc=False):
    """The sender gives an announced transfer up."""

    request_id: str
    attempt: int


# decode -> prefill
class Grant(Message, frozen=True, gc=False):
    """Room for all of the transfer's bytes is reserved; `token` admits its bytes, and only them."""

    request_id: str
    attempt: int
    token: int


class Refuse(Message, frozen=True, gc=False):
    """The receiver will never take this transfer."""

    request_id: str
    attempt: int
    reason: str


class Received(Message, frozen=True, gc=False):
    """All bytes of the transfer have landed and were verified: the sender may forget them."""

    request_id: str
    attempt: int


# prefill -> prefill: a cached prefix moves from the node that holds it to the one that wants it
class Fetch(Message, frozen=True, gc=False):
    """`node` wants the first `blocks` blocks of `block_ids`, and the snapshot after them. The holder pins them."""

    request_id: str
    attempt: int
    node: str
    block_ids: tuple[int, ...]
    blocks: int


class FetchOffer(Message, frozen=True, gc=False):
    """`node` holds `blocks` blocks of what was asked for: `kv_bytes` in all, pinned until FetchDone."""

    request_id: str
    attempt: int
    node: str
    kv_bytes: int
    blocks: int


class FetchMiss(Message, frozen=True, gc=False):
    """The node asked holds nothing usable of it (any more)."""

    request_id: str
    attempt: int


class FetchGrant(Message, frozen=True, gc=False):
    """Room for all of the offered bytes is reserved; `token` admits them, and only them."""

    request_id: str
    attempt: int
    token: int


class FetchDone(Message, frozen=True, gc=False):
    """The fetch has landed or was given up: the holder may unpin, and stops what it still sends."""

    request_id: str
    attempt: int


# prefill -> WIRE
class Transmit(Message, frozen=True, gc=False):
    """Send `kv_bytes` to `decode_node` under `token`, in `pieces` equal pieces.

    Piece i (from 0) exists from start_s + (i + 1) / pieces x (end_s - start_s): layer-wise prefill pipelining.
    """

    request_id: str
    attempt: int
    decode_node: str
    token: int
    kv_bytes: int
    pieces: int
    start_s: float
    end_s: float


class StopTransmit(Message, frozen=True, gc=False):
    """Stop sending an attempt's KV, granted under `token`, and drop what waits."""

    request_id: str
    attempt: int
    decode_node: str
    token: int


# decode -> WIRE, prefill -> WIRE (a fetch)
class Expect(Message, frozen=True, gc=False):
    """Accept bytes under `token`, `kv_bytes` in all, from `prefill_node`: the state after `tokens` tokens."""

    token: int
    kv_bytes: int
    prefill_node: str
    tokens: int = 0


class Unexpect(Message, frozen=True, gc=False):
    """No longer accept bytes under `token`; late ones are discarded and never touch memory."""

    token: int


# WIRE -> decode, WIRE -> prefill (a fetch)
class Landed(Message, frozen=True, gc=False):
    """The last byte of the transfer has arrived and its checksum is right."""

    token: int


class Damaged(Message, frozen=True, gc=False):
    """The transfer cannot complete: a checksum failed, or its sender's connections were lost."""

    token: int
    reason: str


# prefill -> control
class Prefilled(Message, frozen=True, gc=False):
    """Sent at end_s, when the computation ended. cached_tokens: what was really reused; the rest was computed.

    fetched_bytes: KV that came from another node for this prefill, whether it could be reused in the end or not.
    """

    request_id: str
    attempt: int
    start_s: float
    end_s: float
    kv_bytes: int
    cached_tokens: int = 0
    fetched_bytes: int = 0


class Brought(Message, frozen=True, gc=False):
    """What was to be brought is here, `kv_bytes` of it, or never comes (0)."""

    request_id: str
    attempt: int
    kv_bytes: int


class CacheChanged(Message, frozen=True, gc=False):
    """added, removed: block ids at which a prefix is, or is no longer, usable at `node`. `removed` came first."""

    node: str
    added: tuple[int, ...]
    removed: tuple[int, ...]


# decode -> control
class Admitted(Message, frozen=True, gc=False):
    """A decode slot is taken and the first token leaves now, at admitted_s."""

    request_id: str
    attempt: int
    landed_s: float
    admitted_s: float


class Tokens(Message, frozen=True, gc=False):
    """Tokens first .. first + count - 1 (from 0) of the answer exist. `text` is filled in by the worker's backend, and
    `ids` where a model computes: then the text may come later than its tokens (a character is not whole yet)."""

    request_id: str
    attempt: int
    first: int
    count: int
    text: str = ""
    ids: tuple[int, ...] = ()


class Finished(Message, frozen=True, gc=False):
    """The last token left at finished_s; the slot is free again at freed_s. reason: OpenAI's finish_reason."""

    request_id: str
    attempt: int
    finished_s: float
    freed_s: float
    tokens: int
    reason: str = "length"


# prefill -> control, decode -> control
class AttemptFailed(Message, frozen=True, gc=False):
    """The attempt cannot go on at this node; everything of it here is freed."""

    request_id: str
    attempt: int
    reason: str


class PathSample(msgspec.Struct, frozen=True):
    """TCP_INFO of a sender-receiver pair, summed or averaged over its connections.

    Wall units where the transport takes the sample; model units inside a Telemetry message.
    """

    peer: str
    rtt_s: float
    retransmits: int
    cwnd_packets: int
    delivery_rate_bps: float
    unsent_bytes: int


class Telemetry(Message, frozen=True, gc=False):
    """A node's own account of itself at t_s. Counters are cumulative since the node's epoch.

    kv_landed_bytes: verified KV by the prefill node it came from, model bytes; wire_landed_bytes: the same as bytes
    on the wire. late_p99_s, late_max_s: how late its timers fired, *wall* seconds. slowdown: of a Hinder. On the wire
    also: held_blocks, those of its pool that a prefill or transfer holds; open_transfers, sent and not acknowledged
    whole, or expected and not landed; lost_connections, of its KV connections to others; refused_connections, those of
    strangers by reason (`emulator.door`), since the process began; refused_states, transfers that landed whole and were
    not the state that was to come, likewise.
    """

    node: str
    t_s: float
    queued_requests: int
    queued_tokens: int
    running_requests: int
    outbox_bytes: int
    landing_bytes: int
    waiting_grants: int
    kv_sent_bytes: int
    kv_landed_bytes: dict[str, int]
    wire_landed_bytes: dict[str, int]
    refused_frames: int
    late_p99_s: float
    late_max_s: float
    paths: tuple[PathSample, ...] = ()
    slowdown: float = 1.0
    held_blocks: int = 0
    open_transfers: int = 0
    lost_connections: int = 0
    refused_connections: dict[str, int] = msgspec.field(default_factory=dict)
    refused_states: int = 0


# control connection only
class Hello(Message, frozen=True, gc=False):
    """The first message on a control connection, from its dialler: who it is, the data plane's token, and the version
    of what it speaks."""

    node: str
    secret: str
    version: int = CONTROL_VERSION


class Epoch(Message, frozen=True, gc=False):
    """t = 0 is `t0_ns` on CLOCK_MONOTONIC: start afresh, with empty machines. Answered by Ready."""

    epoch: int
    t0_ns: int


class Ready(Message, frozen=True, gc=False):
    """The node is at this epoch and serves `role` (prefill or decode), with an empty machine."""

    node: str
    epoch: int
    role: str


class Convert(Message, frozen=True, gc=False):
    """Serve `role` from now on: the node, which was drained, drops its machine and what it caches.

    For whoever carries the machine: an empty one of the new role takes its place, and after `reload_s` model seconds
    Ready says so. A prefill machine with a pool hears it as its last message, to take back what it offered to lend. An
    Epoch ends a conversion: it puts a node back to the role it was configured with.
    """

    role: str
    reload_s: float


WireMessage = (
    Wake
    | Prefill
    | Bring
    | Cancel
    | Hinder
    | PeerLost
    | Announce
    | Abort
    | Grant
    | Refuse
    | Received
    | Fetch
    | FetchOffer
    | FetchMiss
    | FetchGrant
    | FetchDone
    | Transmit
    | StopTransmit
    | Expect
    | Unexpect
    | Landed
    | Damaged
    | Prefilled
    | Brought
    | CacheChanged
    | Admitted
    | Tokens
    | Finished
    | AttemptFailed
    | Telemetry
    | Hello
    | Epoch
    | Ready
    | Convert
)
AnyMessage = WireMessage | ComputeMessage
Out = tuple[str, AnyMessage]
Key = tuple[str, int]
"""An attempt: its request_id and its number."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(WireMessage).decode
