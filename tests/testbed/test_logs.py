"""`prfaas logs`: many files as one account, filtered, followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from testbed.cli import main
from testbed.launch.state import TestbedError
from testbed.logs import Event, Reader, Wanted, find


def line(second: int, process: str, event: str, level: str = "info", **fields: str) -> str:
    more = "".join(f" {name}={value}" for name, value in fields.items())
    return f"time=2026-11-30T21:00:{second:02d}.000Z level={level} process={process} event={event}{more}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory's logs: two processes that took turns on two requests."""
    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path))
    logs = tmp_path / "logs"
    logs.mkdir()
    routed = line(1, "gateway", "routed", request_id="r1") + line(3, "gateway", "routed", request_id="r2")
    (logs / "gateway.log").write_text(routed + line(5, "gateway", "ended", level="warning", request_id="r1"))
    (logs / "pd-p-0.log").write_text(line(2, "pd-p-0", "prefilled", request_id="r1") + line(4, "pd-p-0", "serves"))
    return logs


def seconds(events: list[Event]) -> list[int]:
    return [int(one.time[17:19]) for one in events]


def test_events_of_all_files_are_in_the_order_of_time(folder: Path) -> None:
    assert seconds(Reader(find(folder)).more()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(), [1, 2, 3, 4, 5]),
        (Wanted(request_id="r1"), [1, 2, 5]),
        (Wanted(level="warning"), [5]),
        (Wanted(level="error"), []),
        (Wanted(request_id="r"), []),
    ],
)
def test_events_are_chosen_by_request_and_level(folder: Path, wanted: Wanted, found: list[int]) -> None:
    assert seconds([event for event in Reader(find(folder)).more() if wanted(event)]) == found


def test_a_process_without_a_log_is_named_with_those_that_have_one(folder: Path) -> None:
    with pytest.raises(TestbedError, match="no log of 'gatway'; there are: gateway, pd-p-0"):
        find(folder, ["gatway"])


@pytest.mark.parametrize("names", [(), ("gateway",)])
def test_where_no_testbed_was_started_that_is_said(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(TestbedError, match="no testbed was started; start one"):
        find(tmp_path / "logs", names)


def test_what_is_no_event_stays_with_the_one_before(folder: Path) -> None:
    with (folder / "gateway.log").open("a") as log:
        log.write("Traceback (most recent call last):\nValueError: x\n")
    last = Reader(find(folder, ["gateway"])).more()[-1]
    assert last.fields["event"] == "ended"
    assert last.text().splitlines()[1:] == ["    Traceback (most recent call last):", "    ValueError: x"]


def test_a_process_that_died_before_it_logged_is_an_error(folder: Path) -> None:
    path = folder / "agent.log"
    path.write_text("error: no such link\n")
    os.utime(path, (1, 1))
    (event,) = Reader([path]).more()
    assert (event.level, event.fields["process"], event.time) == ("error", "agent", "1970-01-01T00:00:01.000Z")
    assert "error: no such link" in event.text()


def test_a_reader_has_what_was_added_and_no_half_line(folder: Path) -> None:
    path = folder / "pd-p-0.log"
    reader = Reader([path])
    assert seconds(reader.more(ended=False)) == [2, 4]
    whole = line(6, "pd-p-0", "prefilled")
    with path.open("a") as log:
        log.write(whole[:30])
        log.flush()
        assert reader.more(ended=False) == []
        log.write(whole[30:])
    assert seconds(reader.more(ended=False)) == [6]
    assert reader.more(ended=False) == []


def test_a_log_that_begins_anew_is_read_from_its_beginning(folder: Path) -> None:
    path = folder / "pd-p-0.log"
    reader = Reader([path])
    reader.more()
    path.write_text(line(9, "pd-p-0", "serves"))
    assert seconds(reader.more()) == [9]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["logs", *words])
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out, told.err


def test_the_command_shows_one_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--request", "r1")
    assert code == 0
    assert [one.split("event=")[1].split()[0] for one in out.splitlines()] == ["routed", "prefilled", "ended"]


def test_the_command_shows_the_last_lines_of_the_processes_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "gateway", "-n", "1")[1].count("\n") == 1
    assert "event=serves" in run(capsys, "gateway", "pd-p-0", "-n", "2")[1]


def test_the_commands_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = json.loads(run(capsys, "--json", "--level", "warning")[1])["events"]
    assert [(one["event"], one["request_id"], one["more"]) for one in events] == [("ended", "r1", [])]


@pytest.mark.parametrize("words", [("nobody",), ("--level", "loud"), ("--json", "--follow")])
def test_a_usage_error_is_exit_code_2_and_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
