"""Public traces are fetched by name, whole and with the right sum, or not at all."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.traces.files import AZURE, MOONCAKE, needs
from traces import fetch as fetching
from traces.fetch import PUBLIC, expected_sum, fetch, find
from traces.request import TraceError

BODY = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" * 50_000
SUM = hashlib.sha256(BODY).hexdigest()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/file")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:1000] if self.path == "/cut" else BODY)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.parametrize("path", ["file", "moved"])
def test_a_file_with_the_right_sum_is_kept(server: str, tmp_path: Path, path: str) -> None:
    out = tmp_path / "t.csv"
    assert fetch(f"{server}/{path}", SUM, out) == len(BODY)
    assert out.read_bytes() == BODY
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("path", "sha256", "said"),
    [
        ("file", "0" * 64, f"the sha256 of its {len(BODY)} bytes is {SUM}, expected 000"),
        ("missing", SUM, "the server answered 404"),
        ("cut", SUM, f"the connection ended after 1000 of {len(BODY)} bytes"),
    ],
)
def test_what_goes_wrong_is_said_and_leaves_nothing(
    server: str, tmp_path: Path, path: str, sha256: str, said: str
) -> None:
    with pytest.raises(TraceError) as refusal:
        fetch(f"{server}/{path}", sha256, tmp_path / "t.csv")
    assert f"{server}/{path}" in str(refusal.value)
    assert said in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_said(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as closed:
        address = f"http://127.0.0.1:{closed.server_port}/file"
    with pytest.raises(TraceError, match=r"cannot be fetched \(.*refused.*--url"):
        fetch(address, SUM, tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT_S", 0.05)
    released = threading.Event()

    class Silent(Answers):
        def do_GET(self) -> None:
            released.wait(10)

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(TraceError, match="timed out"):
                fetch(f"http://127.0.0.1:{listening.server_port}/file", SUM, tmp_path / "t.csv")
        finally:
            released.set()
            listening.shutdown()
            thread.join()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def update(self, chunk: bytes) -> None:
            assert [entry.suffix for entry in tmp_path.iterdir()] == [".part"]
            raise KeyboardInterrupt

    monkeypatch.setattr(hashlib, "sha256", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(f"{server}/file", SUM, tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_not_touched(server: str, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    out.write_text("mine")
    with pytest.raises(TraceError, match="exists already; remove it, or name another file with --out"):
        fetch(f"{server}/file", SUM, out)
    assert out.read_text() == "mine"


def test_a_place_where_no_file_can_be_made_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no folder"):
        fetch("http://127.0.0.1:1/file", SUM, tmp_path / "missing" / "t.csv")
    with pytest.raises(TraceError, match="is a folder"):
        fetch("http://127.0.0.1:1/file", SUM, tmp_path)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/t.csv", "t.csv"])
def test_only_the_web_is_fetched_from(tmp_path: Path, url: str) -> None:
    with pytest.raises(TraceError, match="begins with https://"):
        fetch(url, SUM, tmp_path / "t.csv")


def test_every_known_trace_says_where_it_is_from_and_whether_its_sum_is_known() -> None:
    assert {"mooncake-conversation", "azure-2023-conv"} <= set(PUBLIC)
    for name, trace in PUBLIC.items():
        assert trace.name == name
        assert trace.url.startswith("https://")
        assert trace.licence in ("Apache-2.0", "CC-BY-4.0")
        assert trace.file_name.endswith((".csv", ".jsonl"))
        assert (trace.sha256 is None) == (trace.sum_from == fetching.UNKNOWN_SUM)
        assert trace.sha256 is None or re.fullmatch("[0-9a-f]{64}", trace.sha256)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param("mooncake-conversation", MOONCAKE, marks=needs(MOONCAKE)),
        pytest.param("azure-2023-conv", AZURE, marks=needs(AZURE)),
    ],
)
def test_the_sums_are_those_of_the_files(name: str, path: Path) -> None:
    assert PUBLIC[name].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert PUBLIC[name].file_name == path.name


def test_a_trace_without_a_known_sum_needs_one() -> None:
    with pytest.raises(TraceError, match=r"trace burstgpt-3: its sha256 is not known here.*give .*--sha256"):
        expected_sum(find("burstgpt-3"), None)
    assert expected_sum(find("burstgpt-3"), SUM.upper()) == SUM


def test_a_known_sum_is_taken_unless_another_is_given() -> None:
    known = find("mooncake-conversation")
    assert expected_sum(known, None) == known.sha256
    assert expected_sum(known, SUM) == SUM


@pytest.mark.parametrize("given", ["", "abc", "g" * 64, SUM + "0"])
def test_what_is_no_sum_is_refused(given: str) -> None:
    with pytest.raises(TraceError, match="must be 64 hexadecimal digits"):
        expected_sum(find("mooncake-conversation"), given)


def test_an_unknown_name_shows_the_near_one_and_all() -> None:
    with pytest.raises(TraceError, match=r"did you mean mooncake-conversation\? known: mooncake-conversation, "):
        find("mooncake-conversations")
