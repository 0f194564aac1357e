"""The KV transport: layer-wise transfers over k TCP connections a (sender, receiver) pair. Bytes are scaled here only.

Read `emulator/frames.py` first (the same without sockets), then `sender.py`, then `receiver.py`.

Sender. Transfers of a pair go first granted, first sent; when the head's next piece is not produced yet, the bytes of a
later transfer that exist go first instead (work-conserving). A connection takes the next frame when its socket has
room, so a slow one does not hold the others.
Receiver. Every frame is checked against what was expected before a byte of it is stored; what does not belong is
received, discarded and counted, and the connection stays usable.
Lost connections. The receiver acknowledges every frame that it has dealt with, in order, on the connection it came by.
A frame is therefore always in exactly one place: waiting, unacknowledged on one live connection, or acknowledged. When
a connection breaks, its unacknowledged frames wait again, for any connection of the pair; the receiver drops those it
already had as duplicates. A transfer is given up only when told so (`stop`, `unexpect`, `forget_peer`): the transport
itself dials on, however long the peer is silent. Tokens must never repeat, also not after a restart of the receiver.
"""


def wire_bytes(kv_bytes: int, byte_scale: float) -> int:
    """The bytes that stand for `kv_bytes` model bytes on the wire: round(kv_bytes x byte_scale), at least 1."""
    return max(1, round(kv_bytes * byte_scale))
