"""The gateway and real workers, as processes on loopback: what clients see, and what is left when things end badly."""

from __future__ import annotations

import csv
import json
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from emulator.profile import load_profile
from testbed.report.rows import GATEWAY_COLUMNS
from testbed.scenario import load
from tests.wire.loopback import Loopback, Stream, until

SHORT, LONG = 1024, 32768
"""Prompts on either side of the threshold of 8192: 0.5 s (model time) on pd-p-0, and 2 s on a prfaas node."""

POLICIES = """
import sys
import time
from testbed.scheduler.api import Decision, Reject

class Base:
    def start(self, setup):
        pass

class Raises(Base):
    def route(self, request, view):
        raise RuntimeError("no, thanks, and\\nnot today")

class Loops(Base):
    def route(self, request, view):
        while True:
            try:
                time.sleep(0.001)
            except Exception:
                pass

class LoopsDeaf(Base):
    def route(self, request, view):
        while True:
            try:
                for _ in range(1000):
                    pass
            except:
                pass

class Quits(Base):
    def route(self, request, view):
        sys.exit("bye")

class NamesDead(Base):
    def route(self, request, view):
        return Decision(next(n.name for n in view.nodes.values() if not n.alive), view.decode()[0].name, "dead")

class NamesNobody(Base):
    def route(self, request, view):
        return Decision("nobody", view.decode()[0].name, "unknown")

class NamesWrongRole(Base):
    def route(self, request, view):
        return Decision(view.decode()[0].name, view.decode()[0].name, "wrong role")

class AnswersNothing(Base):
    def route(self, request, view):
        return None

class RejectsAll(Base):
    def route(self, request, view):
        return Reject("full house", 2.2)

class QuitsAtStart(Raises):
    def start(self, setup):
        raise SystemExit(7)

class LoopsAtStart(Raises):
    def start(self, setup):
        while True:
            pass

class CannotStart(Base):
    def start(self, setup):
        raise ValueError("no threshold")
    def route(self, request, view):
        return None

class NoRoute:
    def start(self, setup):
        pass

class Counts(Base):
    def route(self, request, view):
        seen = view.observed.lengths.count
        return Decision(view.prefill("pd")[0].name, view.decode()[0].name, f"{seen} were seen", 7.0 * seen)
"""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    (folder / "bad.py").write_text(textwrap.dedent(POLICIES))
    return folder


@pytest.fixture(scope="module")
def shared(policies: Path) -> Iterator[Loopback]:
    sets = ["scale.time_scale=4", "scale.byte_scale=0.001", "decode.stream_interval=1", "telemetry_s=0.4"]
    with Loopback(load("toy", sets).only("prfaas-pd"), policies) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: Loopback) -> Iterator[Loopback]:
    """Two prfaas prefill nodes, one local one, two decode nodes; whole and idle before a test and after it."""
    yield shared
    workers = [node["name"] for node in shared.status()["nodes"]]
    shared.revive(*workers)
    shared.wait_idle()


@pytest.fixture
def client(fleet: Loopback) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(tokens: int) -> str:
    return "".join(f" {k}" for k in range(tokens))


def ask(tokens: int = SHORT, output: int = 4, **more: Any) -> dict[str, Any]:
    return {"prfaas": {"input_tokens": tokens}, "max_tokens": output, **more}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class TestTheOpenAiClient:
    def test_completes(self, client: openai.OpenAI) -> None:
        whole = client.completions.create(model="prfaas", prompt="hello", max_tokens=7)
        assert whole.choices[0].text == answer(7)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 7)

    def test_streams_whole_and_in_order(self, client: openai.OpenAI) -> None:
        stream = client.completions.create(
            model="prfaas", prompt=[7] * 100, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert [chunk.choices[0].text for chunk in chunks[:-2]] == [f" {k}" for k in range(50)]
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (100, 50)

    def test_chats(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(
            model="prfaas", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
        )
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].message.content == answer(3)
        assert whole.choices[0].finish_reason == "length"

    def test_streams_a_chat(self, client: openai.OpenAI) -> None:
        parts: list[Any] = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
        stream = client.chat.completions.create(
            model="prfaas", messages=[{"role": "user", "content": parts}], max_tokens=20, stream=True
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer(20)
        assert chunks[-1].choices[0].finish_reason == "length"

    def test_lists_the_model(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["prfaas"]

    def test_gets_its_own_kinds_of_error(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="gpt-4o"):
            client.completions.create(model="gpt-4o", prompt="hello")
        with pytest.raises(openai.BadRequestError, match="must be a whole number") as refusal:
            client.completions.create(model="prfaas", prompt="hello", max_tokens=0)
        assert refusal.value.param == "max_tokens"


class TestHttp:
    def test_a_stream_is_server_sent_events(self, fleet: Loopback) -> None:
        stream = Stream(fleet, ask(output=2), **{"X-Request-Id": "mine"})
        assert stream.response.status == 200
        assert stream.response.getheader("Content-Type") == "text/event-stream"
        assert stream.response.getheader("X-Request-Id") == "mine"
        events = list(stream.events())
        assert [event["choices"][0]["text"] for event in events[:-1]] == [" 0", " 1", ""]
        assert events[-1] == "[DONE]"

    def test_many_streams_at_once_are_each_whole(self, fleet: Loopback) -> None:
        streams = [Stream(fleet, ask(tokens=tokens, output=30)) for tokens in [100, SHORT, LONG] * 4]
        for stream in streams:
            *chunks, done = stream.events()
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer(30)
            assert done == "[DONE]"

    def test_an_id_comes_back_on_answers_and_on_errors(self, fleet: Loopback) -> None:
        for body, status in ((ask(), 200), (ask(stream=3), 400)):
            answered = fleet.call("POST", "/v1/completions", body, {"X-Request-Id": "mine"})
            assert (answered[0], answered[1]["x-request-id"]) == (status, "mine")

    def test_an_id_is_made_where_there_is_none(self, fleet: Loopback) -> None:
        _, headers, body = fleet.call("POST", "/v1/completions", ask())
        assert headers["x-request-id"] == body["id"]
        assert body["id"].startswith("cmpl-")

    def test_an_id_under_way_is_refused_and_an_ended_one_is_free(self, fleet: Loopback) -> None:
        own = {"X-Request-Id": "twice"}
        first = Stream(fleet, ask(output=40), **own)
        events = first.events()
        assert next(events)["choices"][0]["text"] == " 0"
        status, headers, body = fleet.call("POST", "/v1/completions", ask(), own)
        assert (status, body["error"]["param"], headers["x-request-id"]) == (409, "X-Request-Id", "twice")
        assert list(events)[-1] == "[DONE]"  # the first did not suffer
        assert fleet.call("POST", "/v1/completions", ask(), own)[0] == 200

    @pytest.mark.parametrize("name", ["x" * 129, "invisible\u200b"])
    def test_an_id_that_no_log_could_hold_is_refused(self, fleet: Loopback, name: str) -> None:
        with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\nContent-Length: 15\r\n\r\n"
            sock.sendall(head.encode() + b'{"prompt":"hi"}')
            assert sock.recv(65536).startswith(b"HTTP/1.1 400")

    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "part"),
        [
            ("POST", "/v1/completions", b"{", 400, "not JSON"),
            ("POST", "/v1/completions", b"[]", 400, "a list of 0"),
            ("POST", "/v1/completions", {"model": "gpt-4o", "prompt": "x"}, 404, "'gpt-4o'"),
            ("POST", "/v1/completions", {"prompt": "x", "n": 2}, 400, "n = 2"),
            ("POST", "/v1/completions", ask(tokens=LONG + 1), 400, "32769 tokens"),
            ("POST", "/v1/chat/completions", {}, 400, "messages"),
            ("POST", "/v1/completions", b"x" * (16 << 20) + b"x", 413, "prfaas extension"),
            ("GET", "/v1/completions", None, 405, "GET /v1/completions"),
            ("POST", "/v1/embeddings", {}, 404, "/v1/embeddings"),
            ("POST", "/prfaas/loads", b"\xff", 400, "not JSON"),
            ("POST", "/prfaas/loads/nope/end", None, 404, "'nope'"),
            ("GET", "/prfaas/loads/nope", None, 404, "'nope'"),
        ],
    )
    def test_an_error_has_openais_shape_and_no_traceback(
        self, fleet: Loopback, method: str, path: str, body: Any, status: int, part: str
    ) -> None:
        got, _, answered = fleet.call(method, path, body)
        assert got == status
        assert set(answered["error"]) == {"message", "type", "param", "code"}
        assert part in answered["error"]["message"]
        assert "Traceback" not in json.dumps(answered)

    def test_what_is_no_http_is_answered_without_a_traceback(self, fleet: Loopback) -> None:
        with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as sock:
            sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
            received = sock.recv(65536)
        assert received.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
        assert b"Traceback" not in received

    def test_health_status_and_metrics(self, fleet: Loopback) -> None:
        assert fleet.call("GET", "/health")[2] == {"status": "ok", "live": {"prefill": 3, "decode": 2}}
        assert fleet.status()["policy"] == "testbed.scheduler.baselines:Static"
        metrics = fleet.call("GET", "/metrics")[2]
        assert 'prfaas_nodes_up{role="prefill",site="prfaas"} 2.0' in metrics
        assert "prfaas_threshold_tokens 8192.0" in metrics

    def test_everybodys_metrics_go_through_the_gateway(self, fleet: Loopback) -> None:
        """But the agent's: there is none on the loopback."""
        targets = fleet.call("GET", "/metrics/targets")[2]
        paths = {one["labels"]["process"]: one["labels"]["__metrics_path__"] for one in targets}
        assert paths.pop("gateway") == "/metrics"
        assert paths.pop("agent") == "/metrics/agent"
        assert "prfaas-0" in paths
        for name, path in paths.items():
            status, _, text = fleet.call("GET", path)
            assert status == 200
            assert f'prfaas_timer_late_p99_wall_seconds{{node="{name}"' in text
        assert fleet.call("GET", "/metrics/nobody")[0] == 404
        status, _, body = fleet.call("GET", "/metrics/agent")
        assert status == 502
        assert "agent does not answer" in body["error"]["message"]


class TestAClientThatLeaves:
    def test_while_tokens_come(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        stream = Stream(fleet, ask(output=1000))
        assert next(stream.events())["choices"][0]["text"] == " 0"
        stream.close()
        fleet.wait_idle()
        self.is_noted(fleet, begun)

    @pytest.mark.parametrize("streamed", [True, False])
    def test_while_its_prompt_is_prefilled(self, fleet: Loopback, streamed: bool) -> None:
        begun = fleet.begin()
        stream = Stream(fleet, ask(LONG, stream=streamed))
        until(lambda: not fleet.is_idle(), lambda: "it never arrived")
        stream.close()
        fleet.wait_idle()
        self.is_noted(fleet, begun)

    def test_in_a_queue(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        streams = [Stream(fleet, ask(LONG)) for _ in range(6)]  # on two nodes
        until(lambda: fleet.session()["in_flight"] == 6, lambda: "they never arrived")
        for stream in streams:
            stream.close()
        fleet.wait_idle()
        assert fleet.end(begun)["ended"] == {"aborted": 6}

    def is_noted(self, fleet: Loopback, begun: dict[str, Any]) -> None:
        assert fleet.end(begun)["ended"] == {"aborted": 1}
        (row,) = rows(begun["rows"])
        assert (row["status"], row["error"]) == ("aborted", "client_gone")
        assert fleet.call("POST", "/v1/completions", ask(LONG))[0] == 200  # the slot and the outbox are free


class TestAWorkerThatDies:
    def test_in_the_middle_of_a_prefill_is_tried_again_elsewhere(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        stream = Stream(fleet, ask(LONG, output=5))
        until(lambda: fleet.node("prfaas-0")["queued_requests"], lambda: "it never arrived")
        fleet.kill("prfaas-0")
        assert list(stream.events())[-1] == "[DONE]"
        assert fleet.end(begun)["ended"] == {"ok": 1}
        (row,) = rows(begun["rows"])
        assert (row["attempts"], row["prefill_node"]) == ("2", "prfaas-1")

    def test_the_other_site_helps_out(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        fleet.kill("pd-p-0")
        assert fleet.call("POST", "/v1/completions", ask(SHORT))[0] == 200
        fleet.end(begun)
        (row,) = rows(begun["rows"])
        assert row["prefill_site"] == "prfaas"
        assert "no live prefill node at pd" in row["reason"]

    def test_in_the_middle_of_a_decode_ends_the_stream_with_an_error(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        stream = Stream(fleet, ask(output=1000))
        events = stream.events()
        next(events)
        until(lambda: fleet.node("pd-d-0")["decoding_requests"], lambda: "it does not decode on pd-d-0")
        fleet.kill("pd-d-0")
        *_, last = events
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "pd-d-0" in last["error"]["message"]
        assert fleet.end(begun)["errors"] == {"node_lost": 1}
        (row,) = rows(begun["rows"])
        assert (row["status"], row["error"], row["attempts"]) == ("failed", "node_lost", "1")

    def test_the_last_decode_node_leaves_a_clear_503_and_a_time_to_come_back(self, fleet: Loopback) -> None:
        fleet.kill("pd-d-0")
        fleet.kill("pd-d-1")
        until(lambda: fleet.call("GET", "/health")[0] == 503, lambda: "health is still ok")
        status, headers, body = fleet.call("POST", "/v1/completions", ask())
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "unavailable")
        assert "no live decode node" in body["error"]["message"]

    def test_is_taken_back_when_it_returns(self, fleet: Loopback) -> None:
        fleet.kill("pd-d-0")
        fleet.kill("pd-p-0")
        fleet.revive("pd-d-0", "pd-p-0")
        begun = fleet.begin()
        for _ in range(2):
            assert fleet.call("POST", "/v1/completions", ask())[2]["choices"][0]["text"] == answer(4)
        fleet.end(begun)
        assert {row["prefill_node"] for row in rows(begun["rows"])} == {"pd-p-0"}

    def test_is_given_nothing_before_it_reaches_the_others(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        workers = ("pd-d-0", "pd-d-1", "pd-p-0")
        for name in workers:
            fleet.kill(name)
        fleet.revive(*workers)
        for _ in range(4):
            assert fleet.call("POST", "/v1/completions", ask())[2]["choices"][0]["text"] == answer(4)
        fleet.end(begun)
        assert {row["attempts"] for row in rows(begun["rows"])} == {"1"}


class TestAPolicy:
    @pytest.mark.parametrize(
        ("policy", "kind"),
        [
            ("Raises", "RuntimeError"),
            ("Loops", "PolicyTooSlowError"),
            ("LoopsDeaf", "PolicyTooSlowError"),
            ("Quits", "PolicyQuitError"),
            ("NamesNobody", "unknown node"),
            ("NamesWrongRole", "wrong role"),
            ("AnswersNothing", "not a decision"),
        ],
    )
    def test_that_fails_is_contained_counted_and_shown(self, fleet: Loopback, policy: str, kind: str) -> None:
        begun = fleet.begin(policy=f"bad:{policy}")
        for _ in range(2):
            assert fleet.call("POST", "/v1/completions", ask())[2]["choices"][0]["text"] == answer(4)
        assert fleet.end(begun)["policy_errors"] == {kind: 2}
        for row in rows(begun["rows"]):
            assert row["policy_error"].startswith(kind)
            assert (row["status"], row["prefill_node"], row["reason"]) == ("ok", "pd-p-0", "fallback: all local")

    def test_that_names_a_dead_node_is_contained(self, fleet: Loopback) -> None:
        fleet.kill("prfaas-1")
        begun = fleet.begin(policy="bad:NamesDead")
        assert fleet.call("POST", "/v1/completions", ask())[0] == 200
        assert fleet.end(begun)["policy_errors"] == {"dead node": 1}
        assert rows(begun["rows"])[0]["policy_error"] == "dead node: prfaas-1"

    def test_that_rejects_says_when_to_come_back(self, fleet: Loopback) -> None:
        begun = fleet.begin(policy="bad:RejectsAll")
        status, headers, body = fleet.call("POST", "/v1/completions", ask(stream=True))
        assert (status, headers["retry-after"]) == (429, "3")
        assert body["error"]["message"] == "full house"
        assert fleet.end(begun)["errors"] == {"rejected": 1}

    @pytest.mark.parametrize(
        ("policy", "part"),
        [
            ("bad:CannotStart", "no threshold"),
            ("bad:QuitsAtStart", "cannot start: PolicyQuitError: SystemExit: 7"),
            ("bad:LoopsAtStart", "cannot start: PolicyTooSlowError: not ready within"),
            ("bad:NoRoute", "no method route"),
            ("bad:Missing", "no class"),
            ("nowhere:Policy", "nowhere"),
            ("naiv", "did you mean naive?"),
            (5, "must be a policy's name"),
        ],
    )
    def test_that_cannot_serve_is_refused_before_the_load(self, fleet: Loopback, policy: Any, part: str) -> None:
        status, _, body = fleet.call("POST", "/prfaas/loads", {"policy": policy})
        assert (status, body["error"]["param"]) == (400, "policy")
        assert part in body["error"]["message"]
        assert fleet.call("POST", "/v1/completions", ask())[0] == 200


class TestSettingThePolicy:
    def test_changes_what_is_decided_from_then_on_and_keeps_what_was_observed(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        for _ in range(3):
            fleet.call("POST", "/v1/completions", ask())
        status, _, answer = fleet.call("POST", "/prfaas/policy", {"policy": "bad:Counts"})
        assert (status, answer["policy"], answer["session"]) == (200, "bad:Counts", begun["id"])
        fleet.call("POST", "/v1/completions", ask())
        totals = fleet.end(begun)
        reasons = [row["reason"] for row in rows(begun["rows"])]
        assert reasons == ["not longer than t"] * 3 + ["4 were seen"]
        assert ["policy", "bad:Counts"] in [[one["kind"], one["after"]] for one in totals["changes"]]
        assert fleet.session()["threshold_tokens"] == 8192  # the next session has the scenario's own again

    def test_works_while_requests_are_under_way(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        stream = Stream(fleet, ask(output=100))
        events = stream.events()
        next(events)
        assert fleet.call("POST", "/prfaas/policy", {"policy": "homogeneous"})[0] == 200
        assert list(events)[-1] == "[DONE]"
        fleet.call("POST", "/v1/completions", ask(LONG))
        fleet.end(begun)
        assert [row["reason"] for row in rows(begun["rows"])] == ["not longer than t", "all local"]

    def test_takes_its_parameters(self, fleet: Loopback) -> None:
        body = {"policy": "static", "parameters": {"threshold_tokens": 100}}
        begun = fleet.begin()
        assert fleet.call("POST", "/prfaas/policy", body)[2]["threshold_tokens"] == 100
        assert fleet.end(begun)["threshold_tokens"] == 100

    @pytest.mark.parametrize(
        ("policy", "part"),
        [
            ("bad:CannotStart", "no threshold"),
            ("bad:LoopsAtStart", "cannot start: PolicyTooSlowError: not ready within"),
            ("bad:NoRoute", "no method route"),
            ("nowhere:Policy", "nowhere"),
            ("naiv", "did you mean naive?"),
            (5, "must be a policy's name"),
            (None, "say which"),
            ("oracle", "has to be told the future when a load begins"),
        ],
    )
    def test_that_cannot_serve_is_refused_and_the_old_one_stays(self, fleet: Loopback, policy: Any, part: str) -> None:
        begun = fleet.begin()
        status, _, body = fleet.call("POST", "/prfaas/policy", {"policy": policy})
        assert (status, body["error"]["param"]) == (400, "policy")
        assert part in body["error"]["message"]
        fleet.call("POST", "/v1/completions", ask())
        fleet.end(begun)
        assert rows(begun["rows"])[0]["reason"] == "not longer than t"

    def test_an_oracle_may_be_set_where_the_future_is_known(self, fleet: Loopback) -> None:
        lengths = {"values": [SHORT, LONG]}
        begun = fleet.begin(lengths=lengths, future={"link_bps": [[0, 1e9]], "lengths": [[0, lengths]]})
        assert fleet.call("POST", "/prfaas/policy", {"policy": "oracle"})[0] == 200
        fleet.call("POST", "/v1/completions", ask())
        fleet.end(begun)
        assert rows(begun["rows"])[0]["reason"].startswith("sooner at ")


class TestALoad:
    def test_has_a_row_and_events_for_every_request(self, fleet: Loopback) -> None:
        begun = fleet.begin(lead_s=0.1)
        for i, tokens in enumerate([SHORT, LONG, SHORT]):
            fleet.call("POST", "/v1/completions", ask(tokens, output=6), {"X-Request-Id": f"r{i}"})
        totals = fleet.end(begun)
        assert (totals["arrived"], totals["in_flight"], totals["ended"]) == (3, 0, {"ok": 3})
        found = rows(begun["rows"])
        assert [row["request_id"] for row in found] == ["r0", "r1", "r2"]
        assert tuple(found[0]) == GATEWAY_COLUMNS
        events = [json.loads(line) for line in begun["events"].read_text().splitlines()]
        arrived = [one["event"]["request_id"] for one in events if one["event"]["type"] == "Arrive"]
        assert arrived == ["r0", "r1", "r2"]
        assert [one["t_s"] for one in events] == sorted(one["t_s"] for one in events)

    def test_its_stamps_are_in_order_and_the_emulated_times_exact(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        for tokens in (SHORT, LONG):
            fleet.call("POST", "/v1/completions", ask(tokens, output=6))
        fleet.end(begun)
        toy = load_profile("toy")
        order = ("arrive", "route", "prefill_start", "prefill_end", "landed", "admitted", "finished")
        for row, site in zip(rows(begun["rows"]), ("pd", "prfaas"), strict=True):
            stamps = {name: float(row[f"{name}_s"]) for name in order}
            assert list(stamps.values()) == sorted(stamps.values())
            took_s = stamps["prefill_end"] - stamps["prefill_start"]
            assert took_s == pytest.approx(toy.t_prefill(int(row["input_tokens"])), abs=1e-8)
            assert stamps["finished"] - stamps["admitted"] == pytest.approx(5 * 0.025, abs=1e-8)
            assert int(row["kv_bytes"]) == round(toy.s_kv(int(row["input_tokens"])))
            assert row["prefill_site"] == site

    def test_counts_the_bytes_that_landed_by_site(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        fleet.call("POST", "/v1/completions", ask(LONG))
        totals = fleet.end(begun)
        assert totals["wire_landed_bytes"] == {"prfaas": 800_000}
        assert totals["kv_landed_bytes"] == {"prfaas": 800_000_000}
        assert totals["refused_frames"] == 0

    def test_is_not_begun_while_requests_are_under_way(self, fleet: Loopback) -> None:
        stream = Stream(fleet, ask(output=100))
        next(stream.events())
        status, _, body = fleet.call("POST", "/prfaas/loads", {})
        assert (status, body["error"]["code"]) == (409, "busy")
        stream.close()

    @pytest.mark.parametrize(
        ("field", "value", "part"),
        [
            ("lead", 1, "known: future, lead_s, lengths, parameters, policy, rate_rps"),
            ("lead_s", -1, "0 to 60"),
            ("lead_s", True, "0 to 60"),
            ("rate_rps", "fast", "must be a finite number"),
            ("parameters", [1], "must be an object"),
            ("parameters", {"threshold_tokens": "8k"}, "threshold_tokens"),
            ("lengths", 5, "must be an object with values"),
            ("lengths", {"values": []}, "give some"),
            ("lengths", {"values": ["long"]}, "lists of numbers"),
            ("lengths", {"values": [1, 2], "weights": [1]}, "give one a length"),
            ("lengths", {"values": [1, 2], "edges": [1, 2]}, "edges"),
        ],
    )
    def test_wrong_fields_are_refused(self, fleet: Loopback, field: str, value: Any, part: str) -> None:
        status, _, body = fleet.call("POST", "/prfaas/loads", {field: value})
        assert status == 400
        assert body["error"]["param"].startswith(field)
        assert part in body["error"]["message"]

    def test_takes_parameters_and_lengths_for_its_own_policy(self, fleet: Loopback) -> None:
        begun = fleet.begin(policy="static", parameters={"threshold_tokens": 100})
        assert begun["threshold_tokens"] == 100
        fleet.end(begun)
        lengths = {"values": [SHORT, LONG], "weights": [1, 1]}
        begun = fleet.begin(policy="prfaas", lengths=lengths, rate_rps=1.5)
        assert SHORT < begun["threshold_tokens"] < LONG
        fleet.end(begun)
        assert fleet.session()["threshold_tokens"] == 8192  # between loads, the scenario's own policy

    def test_its_end_waits_for_its_last_request_and_makes_newcomers_wait(self, fleet: Loopback) -> None:
        begun = fleet.begin()
        last = Stream(fleet, ask(LONG, output=20))
        until(lambda: fleet.session()["in_flight"], lambda: "it never arrived")
        ended: list[dict[str, Any]] = []
        ending = threading.Thread(target=lambda: ended.append(fleet.end(begun)))
        ending.start()
        assert list(last.events())[-1] == "[DONE]"
        newcomer = fleet.call("POST", "/v1/completions", ask())
        ending.join()
        assert newcomer[0] == 200
        assert ended[0]["in_flight"] == 0
        assert sum(ended[0]["ended"].values()) == len(rows(begun["rows"]))

    def test_a_client_that_leaves_while_it_begins_leaves_the_door_open(self, fleet: Loopback) -> None:
        fleet.signal("prfaas-1", signal.SIGSTOP)  # so that the begin has to wait for it
        try:
            with socket.create_connection(("127.0.0.1", fleet.port)) as sock:
                sock.sendall(b"POST /prfaas/loads HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                time.sleep(0.3)
        finally:
            fleet.signal("prfaas-1", signal.SIGCONT)
        assert fleet.call("POST", "/v1/completions", ask(LONG))[0] == 200
        fleet.wait_alive("prfaas-1")

    def test_goes_on_without_a_worker_that_does_not_answer(self, fleet: Loopback) -> None:
        fleet.kill("prfaas-0")
        fleet.kill("prfaas-1")
        begun = fleet.begin()
        assert fleet.call("POST", "/v1/completions", ask(LONG))[0] == 200
        fleet.end(begun)
        assert rows(begun["rows"])[0]["prefill_node"] == "pd-p-0"


class TestSigterm:
    """Last: these end processes of the shared fleet."""

    @pytest.mark.parametrize("name", ["prfaas-0", "pd-d-0"])
    def test_a_worker_leaves_with_0(self, fleet: Loopback, name: str) -> None:
        assert fleet.terminate(name) == 0

    def test_a_prefill_worker_leaves_with_0_while_it_waits_for_decode_nodes(self, fleet: Loopback) -> None:
        fleet.kill("pd-d-0")
        fleet.kill("pd-p-0")
        fleet.start("pd-p-0")
        until(lambda: self.listens(fleet, "pd-p-0"), lambda: fleet.log("pd-p-0"))
        assert fleet.terminate("pd-p-0") == 0

    def test_the_gateway_leaves_with_0_and_lets_go_of_its_clients(self, shared: Loopback) -> None:
        begun = shared.begin()
        stream = Stream(shared, ask(output=1000))
        next(stream.events())
        assert shared.terminate("gateway") == 0
        assert "Traceback" not in shared.log("gateway")
        assert [row["status"] for row in rows(begun["rows"])] == ["aborted"]

    def listens(self, fleet: Loopback, name: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", fleet.control_port(name)), timeout=1).close()
        except OSError:
            return False
        return True
