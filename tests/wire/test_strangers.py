"""Whoever does not know the testbed's token: refused by every worker, in time, counted where people look."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
from collections.abc import Iterator

import pytest

from emulator.frames import encode_hello
from emulator.messages import CONTROL, Cancel, Hello, encode
from testbed.scenario import load
from tests.wire.loopback import PATIENCE_S, Loopback, Stream, until

WORKER = "pd-d-0"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Loopback]:
    sets = ["scale.time_scale=10", "scale.byte_scale=0.001", "telemetry_s=1"]
    with Loopback(load("toy", sets).only("prfaas-pd")) as fleet:
        yield fleet


def framed(*messages: Hello | Cancel) -> bytes:
    return b"".join(len(body).to_bytes(4, "big") + body for body in map(encode, messages))


def shut_out(port: int, first: bytes) -> bool:
    """Whether the other side ends the connection."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(first)
            assert sock.recv(1) == b""
        return True


def refused(fleet: Loopback) -> dict[str, int]:
    found: dict[str, int] = fleet.node(WORKER)["refused_connections"]
    return found


def test_strangers_are_refused_and_counted_while_clients_are_served(fleet: Loopback) -> None:
    config = fleet.config(WORKER)
    stream = Stream(fleet, {"prfaas": {"input_tokens": 1024}, "max_tokens": 400})
    events = stream.events()
    next(events)
    assert shut_out(config["control_port"], framed(Hello(CONTROL, "a guess"), Cancel("r", 1)))
    assert shut_out(config["control_port"], framed(Hello(CONTROL, config["secret"], 99)))
    assert shut_out(config["control_port"], framed(Hello("a stranger's name", config["secret"])))
    assert shut_out(config["data_port"], encode_hello("prfaas-0", "a guess"))
    assert shut_out(config["data_port"], b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
    assert shut_out(config["control_port"], b"")  # it says nothing, and its time is over
    want = {"wrong_token": 2, "wrong_version": 1, "unknown_node": 1, "malformed": 1, "no_hello": 1}
    until(lambda: refused(fleet) == want, lambda: f"{refused(fleet)}")
    assert list(events)[-1] == "[DONE]"
    assert fleet.node(WORKER)["alive"]
    _, _, text = fleet.call("GET", f"/metrics/{WORKER}")
    for reason, count in want.items():
        line = f'prfaas_refused_connections_total{{node="{WORKER}",reason="{reason}",site="pd"}} {count}.0'
        assert line in text.splitlines()
    load_id = fleet.begin()
    assert fleet.end(load_id)["accounts"][WORKER]["refused_connections"] == want  # a new epoch forgets none


def test_the_token_is_in_configurations_alone_and_those_are_the_users_own(fleet: Loopback) -> None:
    secret = fleet.config(WORKER)["secret"]
    assert len(secret) >= 32
    holding = [path for path in fleet.root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert {path.parent.name for path in holding} == {"config"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holding)
    for process in fleet.processes.values():
        for file in ("cmdline", "environ"):
            with open(f"/proc/{process.pid}/{file}", "rb") as told:
                assert secret.encode() not in told.read()
    assert secret not in json.dumps(fleet.status())
