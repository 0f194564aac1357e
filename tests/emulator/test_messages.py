"""Messages on the wire: every kind survives it unchanged, and what is no message is refused."""

from __future__ import annotations

import contextlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator import messages
from emulator.computing import ComputeMessage, Sampling
from emulator.messages import Grant, Message, PathSample, Prefill, WireMessage, decode, encode

KINDS = get_args(WireMessage)


EXTREMES: dict[object, list[object]] = {
    str: ["", "p-1", "naïve \N{ROCKET}\n\x00"],
    int: [0, -(2**63), 2**63 - 1],
    float: [0.1, -1e-300, float("inf")],
    tuple[int, ...]: [(), (0, -1), (2**64 - 1, 2**63)],
    dict[str, int]: [{}, {"p-1": 1}, {"a": 2**63 - 1, "": 0}],
    bytes: [b"", b"\x00", bytes(range(256))],
    Sampling | None: [None, Sampling(), Sampling(0.5, 0.9, 2**63 - 1, ("end", ""), True)],
    tuple[PathSample, ...]: [(), (PathSample("d", 0.1, 1, 2, 0.3, 4),), (PathSample("", 0.0, 0, 0, 0.0, 0),) * 2],
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_comes_out_as_it_went_in(kind: type[Message], which: int) -> None:
    message = kind(*(EXTREMES[field.type][which] for field in msgspec.structs.fields(kind)))
    assert decode(encode(message)) == message
    assert type(decode(encode(message))) is kind


def test_every_message_that_is_defined_can_travel() -> None:
    defined = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert defined - {Message} == set(KINDS)


def test_what_machine_and_backend_say_to_each_other_cannot_come_from_outside() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(msgspec.msgpack.encode({"type": "Joined", "token": 1, "ended": ""}))
    assert not any(issubclass(kind, ComputeMessage) for kind in KINDS)


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Grant("a", 1, 2).token = 3  # type: ignore[misc]


def test_kinds_with_the_same_fields_are_told_apart() -> None:
    assert messages.Cancel("a", 1) != messages.Abort("a", 1)
    assert type(decode(encode(messages.Abort("a", 1)))) is messages.Abort


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Grant", "request_id": "a", "attempt": 1}),
        msgspec.msgpack.encode({"type": "Grant", "request_id": "a", "attempt": "1", "token": 0}),
        msgspec.msgpack.encode([1, 2]),
        encode(Prefill("a", 1, 2, 0, 1, "d"))[:-1],
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(body)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_message_or_refused(body: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError):
        assert isinstance(decode(body), Message)
