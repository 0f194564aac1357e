"""SIGTERM at every line of `prfaas run` between a testbed that is up and its load: always down again, always 130."""

from __future__ import annotations

import asyncio
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import orjson
import pytest
import typer

from netem.link import DIRECTIONS
from testbed import cli, fleet, linkctl
from testbed.cli import clocks
from testbed.launch import launchers

REPOSITORY = Path(__file__).parents[2]
WATCHED = (
    str(REPOSITORY / "testbed/cli/shared.py"),
    str(REPOSITORY / "testbed/cli/clocks.py"),
    str(REPOSITORY / "testbed/linkctl.py"),
    asyncio.runners.__file__,
)
ASKED = {"rate_bps": 1e9, "delay_s": 0.0, "jitter_s": 0.0, "loss": 0.0, "per_flow_bps": None, "mtu": 1500}
MEASURED = {
    "goodput_bps": 0.956e9, "first_second_bps": 0.9e9, "congestion_control": "cubic", "window_s": 2.0,
    **{f"rtt_{which}_s": 1e-4 for which in linkctl.RTT_FIGURES},
    "train": {"sent": 100, "lost": 0, "reordered": 0, "repeated": 0},
}  # fmt: skip


class Wire:
    """What stands for the launcher, the agent and the supervisor. reached: called when the testbed is up."""

    def __init__(self, reached: Callable[[], None]) -> None:
        self.is_up = False
        self._reached = reached

    def up(self, spec: Any, launcher: str | None = None) -> Any:
        self.is_up = True
        self._reached()
        return SimpleNamespace(already=False, port=spec.port)

    def down(self) -> list[str]:
        self.is_up = False
        return []

    def status(self) -> dict[str, Any]:
        return {"up": self.is_up}


class Client:
    """Of the agent and the supervisor."""

    def __init__(self, path: Path, timeout_s: float = 0.0) -> None:
        pass

    async def get(self, path: str) -> Any:
        await asyncio.sleep(0)
        return {direction: {"asked": ASKED} for direction in DIRECTIONS}

    async def post(self, path: str, body: Any) -> Any:
        await asyncio.sleep(60 if "serve" in body["argv"] else 0)
        return {"rc": 0, "stdout": orjson.dumps(MEASURED)}


class Points:
    """The places passed since `begin`, each once; SIGTERM at the one of that number."""

    def __init__(self, number: int | None = None) -> None:
        self.passed: list[tuple[str, int]] = []
        self._number = number

    def begin(self) -> None:
        sys.settrace(self._enter)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # whoever called is watched from its next line on
            frame.f_trace = self._enter(frame, "call", None)
            frame = frame.f_back

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in WATCHED else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in self.passed:
            self.passed.append(place)
            if len(self.passed) == self._number:
                signal.raise_signal(signal.SIGTERM)
        return self._line


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own, nearly: signals as a shell starts it with, and afterwards as they were."""
    monkeypatch.setenv("PRFAAS_STATE", str(tmp_path / "state"))
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)}
    hook = sys.unraisablehook
    trace = sys.gettrace()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.settrace(trace)
    sys.unraisablehook = hook
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def run(points: Points, monkeypatch: pytest.MonkeyPatch) -> tuple[int, bool]:
    """(exit code, whether the testbed is still up) of `prfaas run`."""
    wire = Wire(points.begin)
    for name in ("up", "down", "status"):
        monkeypatch.setattr(launchers, name, getattr(wire, name))
    monkeypatch.setattr(fleet, "launch_spec", lambda *given, port, **options: SimpleNamespace(port=port))
    monkeypatch.setattr(linkctl, "AsyncUnixClient", Client)
    monkeypatch.setattr(clocks, "offer", lambda *args, **options: 0)
    alone = typer.Typer()  # all commands take their time to be made, each time
    alone.command()(clocks.run)
    monkeypatch.setattr(cli, "app", alone)
    try:
        cli.main(["toy"])
    except SystemExit as left:
        return int(left.code or 0), wire.is_up
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise AssertionError("the command did not leave")


def test_wherever_it_is_ended_it_leaves_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Points()
    assert run(whole, monkeypatch) == (0, False)
    assert len(whole.passed) > 50
    assert {file for file, _ in whole.passed} == set(WATCHED)
    wrong = {}
    for number in range(1, len(whole.passed) + 1):
        points = Points(number)
        found = run(points, monkeypatch)
        if found != (130, False):
            wrong[points.passed[number - 1] if len(points.passed) >= number else number] = found
    assert not wrong


def test_an_end_that_python_can_only_ignore_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        pass

    def ended(reference: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        for _ in range(100):  # the signal is seen in here, where what is raised is ignored
            pass

    def offer(*args: Any, **options: Any) -> int:
        thing = Thing()
        reference = weakref.ref(thing, ended)
        del thing
        signal.pause()
        assert reference() is None
        return 0

    wire = Wire(lambda: None)
    for name in ("up", "down", "status"):
        monkeypatch.setattr(launchers, name, getattr(wire, name))
    monkeypatch.setattr(linkctl, "AsyncUnixClient", Client)
    monkeypatch.setattr(clocks, "offer", offer)
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "toy"])
    assert left.value.code == 130
    assert not wire.is_up
