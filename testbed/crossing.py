"""What competes with the KV on the link, of a scenario: its sources, and the traffic itself during a load on the wire.

Virtual time is told the sources (`testbed.world`); on the wire a process in each site (`netem.rivals`) makes the
traffic, for as long as this module holds its connections.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from netem.cross import Present, Source
from netem.link import DIRECTIONS
from netem.topology import ADDRESSES
from testbed.launch.client import TIMEOUT_S
from testbed.launch.state import StateDir, TestbedError
from testbed.scenario import Scale, Scenario
from testbed.scenario_cross import sources

TRIGGER: Final = "cross-traffic"
SENDS: Final = {"prfaas": "to_pd", "pd": "to_prfaas"}
"""The direction of what leaves a site."""
MOST_HELD_BACK: Final = 0.02
"""Of a source's datagrams: with more, something else competed than was asked for."""
MOST_LATE: Final = 0.01
"""Of a load's time: so long in all may a source come late and stay too long."""
LAND_S: Final = 0.2
"""Wall seconds, beside a round trip, in which what was sent last has landed: the shaper's queue holds 14 ms."""


def wall_sources(scenario: Scenario) -> list[Source]:
    """What competes on this machine's wire: the spells of virtual time, in wall time; rates scaled as the link's."""
    return [_on_the_wall(one, scenario.scale) for one in sources(scenario.link.cross_traffic, scenario.seed)]


def _on_the_wall(source: Source, scale: Scale) -> Source:
    def wall_s(model_s: float | None) -> float | None:
        return None if model_s is None else scale.wall_s(model_s)

    return replace(
        source,
        start_s=scale.wall_s(source.start_s),
        duration_s=wall_s(source.duration_s),
        on_s=wall_s(source.on_s),
        off_s=wall_s(source.off_s),
        rate_bps=None if source.rate_bps is None else scale.wall_bps(source.rate_bps),
    )


def event(at_s: float, direction: str, before: Present, now: Present) -> dict[str, Any]:
    """A change of what competes, as a row of the timeline."""
    words = {"t_s": at_s, "direction": direction, "kind": "cross", "node": "", "trigger": TRIGGER}
    return {**words, "before": in_words(before), "after": in_words(now)}


def in_words(now: Present) -> str:
    """`3 flows + 1.5 Gbps`, or `nothing`."""
    flows = [f"{now.flows} flow{'s' if now.flows != 1 else ''}"] if now.flows else []
    constant = [f"{now.constant_bps / 1e9:g} Gbps"] if now.constant_bps else []
    return " + ".join(flows + constant) or "nothing"


class Crossing:
    """A context: while it is open, the scenario's cross-traffic is on the link. t0_ns: the load's t = 0, monotonic.

    Read when it is closed: `events`, rows of the timeline; `faults`, sentences; `wire_bytes`, what was cross-traffic's
    of each direction of the link, headers counted, None without any. Raises TestbedError on entering when the processes
    for it are not there.
    """

    def __init__(self, scenario: Scenario, state: StateDir, t0_ns: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.wire_bytes: dict[str, int] | None = None
        self._sources, self._t0_ns = wall_sources(scenario), t0_ns
        self._scenario, self._state = scenario, state
        self._sites: dict[str, _Site] = {}

    def __enter__(self) -> Crossing:
        if self._sources:
            try:
                for site in ADDRESSES:
                    self._sites[site] = _Site(self._state, site)
                for one in self._sites.values():
                    one.begin({"t0_ns": self._t0_ns, "sources": [asdict(source) for source in self._sources]})
            except TestbedError:
                self._close()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._sites:
            return
        try:
            for one in self._sites.values():
                one.ask("stop", "stopped")
            time.sleep(LAND_S + 2 * self._scenario.scale.wall_s(self._scenario.link.delay_s))
            counted = [one.ask("count", "landed") for one in self._sites.values()]
            self.wire_bytes = _wire_bytes(counted, self._sources)
            self.faults += _held_back(counted)
        except TestbedError as error:
            self.faults.append(f"cross-traffic was lost, nobody counted its bytes: {error}")
        finally:
            self._close()
        self._judge()

    def _close(self) -> None:
        for one in self._sites.values():
            one.close()

    def _judge(self) -> None:
        """The timeline's rows, and whether what competed was what was asked for."""
        scale = self._scenario.scale
        told = sorted((row for one in self._sites.values() for row in one.told), key=lambda row: row["t_ns"])
        now = dict.fromkeys(DIRECTIONS, Present(0.0, 0, 0.0))
        late_s = dict.fromkeys(range(len(self._sources)), 0.0)
        for row in told:
            source = self._sources[row["source"]]
            sign = 1 if row["on"] else -1
            before = now[source.direction]
            constant_bps = before.constant_bps + sign * scale.model_bps(source.rate_bps or 0.0)
            at_s = (row["t_ns"] - self._t0_ns) * 1e-9
            after = Present(at_s * scale.time_scale, before.flows + sign * (source.flows or 0), round(constant_bps, 3))
            row_late_s = (row["t_ns"] - row["due_ns"]) * 1e-9
            late_s[row["source"]] += row_late_s
            changed = event(after.at_s, source.direction, before, after)
            self.events.append({**changed, "late_s": row_late_s * scale.time_scale})
            now[source.direction] = after
        lasted_s = self._scenario.workload.duration_s / scale.time_scale
        for place, one_s in late_s.items():
            if one_s > MOST_LATE * lasted_s:
                self.faults.append(
                    f"link.cross_traffic.{place}: came and went late, {one_s:.2f} of {lasted_s:.0f} s of wall time it "
                    "was not what was asked for"
                )


def _wire_bytes(counted: Sequence[dict[str, Any]], all_sources: Sequence[Source]) -> dict[str, int]:
    """By direction, what crossed: the sources' own, and the acknowledgements of those of the other direction."""
    out = dict.fromkeys(DIRECTIONS, 0)
    for site in counted:
        for place, landed in site["landed"].items():
            there = all_sources[int(place)].direction
            back = DIRECTIONS[1 - DIRECTIONS.index(there)]
            out[there] += landed["wire_bytes"]
            out[back] += landed["answered_bytes"]
    return out


def _held_back(counted: Sequence[dict[str, Any]]) -> list[str]:
    """Whose datagrams were not sent although they were due."""
    faults = []
    for place, one in (item for site in counted for item in site["noted"].items()):
        due = one["datagrams"] + one["held_back"]
        if one["held_back"] > MOST_HELD_BACK * due:
            faults.append(
                f"link.cross_traffic.{place}: {one['held_back']} of {due} datagrams were not sent in time, the machine "
                "was too busy"
            )
    return faults


class _Site:
    """The connection to one site's process. told: its rows so far."""

    def __init__(self, state: StateDir, site: str) -> None:
        self.told: list[dict[str, Any]] = []
        self._answers: list[dict[str, Any]] = []
        self._turn = threading.Condition()
        self._ended = False
        self._path = state.cross_socks[site]
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            self._sock.connect(str(self._path))
        except OSError:
            self._sock.close()
            raise TestbedError(
                f"{self._path}: no process for cross-traffic serves there; was the testbed started with "
                "link.cross_traffic? prfaas down, prfaas up"
            ) from None
        self._lines = self._sock.makefile("rb")
        self._thread = threading.Thread(target=self._listen, name=f"cross-{site}", daemon=True)
        self._thread.start()

    def begin(self, asked: dict[str, Any]) -> None:
        self._say(asked, "ready")

    def ask(self, what: str, answer: str) -> dict[str, Any]:
        return self._say({what: True}, answer)

    def close(self) -> None:
        """End the traffic. The process closes its end when nothing is sent any more, and serves the next load."""
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            with contextlib.suppress(OSError):  # the process is gone already
                self._sock.shutdown(how)
            self._thread.join(TIMEOUT_S)
        with self._turn:
            self._ended = True
        self._lines.close()  # it, too, holds the descriptor
        self._sock.close()

    def _say(self, line: dict[str, Any], answer: str) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # whoever is gone, or does not listen, has answered why or never will
            self._sock.sendall(json.dumps(line).encode() + b"\n")
        with self._turn:
            self._turn.wait_for(lambda: self._answers or self._ended, TIMEOUT_S)
            got = self._answers.pop(0) if self._answers else {"error": "it does not answer"}
        if answer not in got:
            raise TestbedError(f"{self._path}: {got.get('error', got)}; see `prfaas logs`")
        return got

    def _listen(self) -> None:
        try:
            for line in self._lines:
                row = json.loads(line)
                with self._turn:
                    (self.told if "due_ns" in row else self._answers).append(row)
                    self._turn.notify_all()
        except (OSError, ValueError):
            pass  # as an end: whoever waits for an answer is told that there is none
        with self._turn:
            self._ended = True
            self._turn.notify_all()
