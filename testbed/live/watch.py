"""What a watcher is told: first who is who and what has been (`hello`), then what is, again and again (`look`).

One `Watch` serves all watchers, from the first one's coming to the last one's leaving.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from netem.link import DIRECTIONS
from testbed.control import Change
from testbed.live import picture, words
from testbed.live.link_log import LinkLog, Sample, Step
from testbed.live.recent import Recent, figures, reasons
from testbed.live.troubles import Troubles
from testbed.scenario import Deployment, Scenario
from testbed.session import Session

PERIOD_S: Final = 1.0
"""Wall seconds between two looks."""
SPAN_S: Final = 10.0
"""Wall seconds of requests that a look's figures are of."""
HISTORY_S: Final = 180.0
"""Wall seconds of what has been, at most."""
MOST_EVENTS: Final = 100
JOIN_S: Final = 1.0
"""Wall seconds of a session in which its nodes come up."""
_UNIX_S: Final = time.time() - time.monotonic()


class Watch:
    """folder: the state directory. session: the present one. late_s: the gateway's own lateness, p99, wall seconds."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        session: Callable[[], Session],
        troubles: Troubles,
        late_s: Callable[[], float],
    ) -> None:
        self._scenario, self._scale, self._folder = scenario, scenario.scale, folder
        self._session_now, self._troubles, self._late_s = session, troubles, late_s
        self._link = LinkLog(folder, scenario.scale, time.monotonic_ns())
        self._link.steps()  # what it does now
        self._follow(session())

    def _follow(self, session: Session) -> None:
        self._session = session
        self._flows = picture.Flows()
        self._recent = Recent(session.rows_path, 2 * SPAN_S * self._scale.time_scale, back_bytes=64 << 10)
        self._recent.read()
        self._recent.errors.clear()
        self._told_changes = len(session.control.changes)

    def look(self) -> dict[str, Any]:
        """The testbed now, and what has happened since the last look."""
        events = []
        session = self._session_now()
        if session is not self._session:
            events += self._changes(self._session)
            events.append(_began(session))
            self._follow(session)
            self._told_changes = 0
        recent, control = self._recent, session.control
        recent.read()
        recent.look(control)
        now_s = session.clock.now_s()
        of_late = recent.within(now_s - SPAN_S * self._scale.time_scale, now_s)
        samples, steps = self._link.samples(), self._link.steps()
        events += [*self._changes(session), *self._failures(session, now_s), *_steps(steps, session)]
        late_s = max((told.late_p99_s for told in session.telemetry.values()), default=0.0)
        return {
            "t_s": _unix_s(time.monotonic()),
            "model_s": now_s,
            "session": {
                "id": session.id,
                "load": _is_load(session),
                "policy": session.policy,
                "in_flight": len(control.live),
                "ended": dict(session.counts),
            },
            "nodes": picture.nodes(session, self._flows),
            "stages": picture.stages(control.live.values()),
            "scheduler": picture.scheduler(control),
            "link": self._link.states,
            "samples": _by_direction(samples),
            "recent": {**figures(of_late), "reasons": reasons(of_late)},
            "troubles": self._troubles.told(),
            "events": sorted(events, key=lambda event: event["t_s"])[-MOST_EVENTS:],
            "late_p99_s": {"workers": late_s, "gateway": self._late_s()},
        }

    async def hello(self, deployment: Deployment, since_s: float | None) -> dict[str, Any]:
        """Who is who, and what has been since `since_s` (Unix seconds), at most HISTORY_S of it."""
        session, scale = self._session, self._scale
        now_s = time.monotonic()
        start_s = max(now_s - HISTORY_S, 0.0 if since_s is None else since_s - _UNIX_S)
        changes, control = list(session.control.changes), session.control
        threshold = picture.scheduler(control)["threshold_tokens"]
        link = LinkLog(self._folder, scale, round(start_s * 1e9))
        recent = Recent(session.rows_path, (HISTORY_S + SPAN_S) * scale.time_scale, back_bytes=1 << 20)
        await asyncio.to_thread(recent.read)
        recent.look(control)
        samples, steps = await asyncio.to_thread(lambda: (link.samples(), link.steps()))
        events = [
            *_told(session, [one for one in changes if session.clock.monotonic_s(one.t_s) > start_s]),
            *_steps(steps, session),
        ]
        return {
            "scenario": self._scenario.name,
            "deployment": deployment.name,
            "scale": scale.model_dump(),
            "period_s": PERIOD_S,
            "span_s": SPAN_S,
            "slo": self._scenario.slo.model_dump(),
            "link_nominal_bps": self._scenario.link.rate_bps,
            "cache": self._scenario.cache_bytes > 0,
            "controls": self._troubles.possible(),
            "samples": _by_direction(samples),
            "history": _history(session, recent, changes, threshold, start_s, now_s, scale.time_scale),
            "events": sorted(events, key=lambda event: event["t_s"])[-MOST_EVENTS:],
        }

    def _changes(self, session: Session) -> list[dict[str, Any]]:
        first, changes = self._told_changes, session.control.changes
        self._told_changes = len(changes)
        return _told(session, changes[first:])

    def _failures(self, session: Session, now_s: float) -> list[dict[str, Any]]:
        errors = self._recent.errors
        told = [
            _event(session, f"failed/{now_s:.3f}/{kind}", now_s, "failed", _requests(count, "failed"), kind)
            for kind, count in errors.items()
        ]
        errors.clear()
        return told


def _requests(count: int, what: str) -> str:
    return f"{count} request{'' if count == 1 else 's'} {what}"


def _is_load(session: Session) -> bool:
    return not session.id.startswith("adhoc-")


def _unix_s(monotonic_s: float) -> float:
    return round(monotonic_s + _UNIX_S, 3)


def _by_direction(samples: Iterable[Sample]) -> dict[str, list[list[float | None]]]:
    """[Unix seconds, bits/s set, bits/s measured] by direction."""
    out: dict[str, list[list[float | None]]] = {direction: [] for direction in DIRECTIONS}
    for one in samples:
        out[one.direction].append([_unix_s(one.t_ns * 1e-9), one.set_bps, one.measured_bps])
    return out


def _event(session: Session, name: str, model_s: float, kind: str, text: str, why: str) -> dict[str, Any]:
    t_s = _unix_s(session.clock.monotonic_s(model_s))
    return {"id": f"{session.id}/{name}", "t_s": t_s, "model_s": model_s, "kind": kind, "text": text, "why": why}


def _began(session: Session) -> dict[str, Any]:
    what = f"load {session.id} begins" if _is_load(session) else "no load: whoever comes is served"
    return _event(session, "began", 0.0, "load", what, f"policy {session.told.policy}")


def _told(session: Session, changes: list[Change]) -> list[dict[str, Any]]:
    return [
        _event(
            session,
            f"{change.kind}/{change.t_s:.6f}/{change.node}/{change.before}",
            change.t_s,
            change.kind,
            text,
            why,
        )
        for change, text, why in words.changes(one for one in changes if not _joins(one, session))
    ]


def _joins(change: Change, session: Session) -> bool:
    """Whether a node only serves since the session's workers began anew."""
    return change.kind == "node" and change.after == "up" and change.t_s < JOIN_S * session.clock.scale


def _steps(steps: Iterable[Step], session: Session) -> list[dict[str, Any]]:
    out = []
    for one in steps:
        text, why = words.step(one)
        model_s = (one.t_ns - session.clock.t0_ns) * 1e-9 * session.clock.scale
        told = _event(session, "", model_s, "link", text, why)
        out.append({**told, "id": f"link/{one.t_ns}"})
    return out


def _history(
    session: Session,
    recent: Recent,
    changes: list[Change],
    threshold: float | None,
    start_s: float,
    now_s: float,
    time_scale: float,
) -> list[dict[str, Any]]:
    """The load's figures at each look that might have been between two moments (CLOCK_MONOTONIC) of this session."""
    begun_s = session.clock.monotonic_s(0.0)
    moves = [change for change in changes if change.kind == "threshold"]
    at_s = [change.t_s for change in moves]
    values: list[float | str | None] = [
        *(change.before for change in moves[:1]),
        *(change.after for change in moves),
    ] or [threshold]
    points = []
    for wall_s in np.arange(max(start_s, begun_s), now_s, PERIOD_S).tolist():
        model_s = (wall_s - begun_s) * time_scale
        of_late = figures(recent.within(model_s - SPAN_S * time_scale, model_s))
        held = values[int(np.searchsorted(at_s, model_s, side="right"))]
        finite = isinstance(held, int | float) and np.isfinite(held)
        points.append({"t_s": _unix_s(wall_s), **of_late, "threshold_tokens": held if finite else None})
    return points
