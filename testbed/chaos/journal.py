"""The journal of an experiment: what was done when, what the hypothesis came to, and apart from that the rollback.

A failed rollback is never a success, and it is written down after the verdict, which it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from testbed.chaos.experiment import Experiment
from testbed.chaos.faults import describe
from traces.client_rows import FAILED, INCONCLUSIVE, INVALID, PASS

EXIT_CODES: Final = {"passed": PASS, "broken": FAILED, "invalid": INVALID, "inconclusive": INCONCLUSIVE}


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that was done to the system, model seconds. asked_s: when it should have been; true_s: when it was."""

    what: str
    asked_s: float
    true_s: float
    detail: str = ""

    def line(self) -> str:
        late_s = self.true_s - self.asked_s
        late = f"  ({late_s:+.3f} s)" if abs(late_s) >= 0.0005 else ""
        return f"{self.true_s:10.3f} s  {self.what}{': ' if self.detail else ''}{self.detail}{late}"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at after the rollback. found: as it is."""

    what: str
    ok: bool
    found: Any


class Journal:
    """The journal of one run of an experiment, on a clock (virtual, wire), under a policy."""

    def __init__(self, experiment: Experiment, clock: str, policy: str, seed: int) -> None:
        self.experiment, self.clock, self.policy, self.seed = experiment, clock, policy, seed
        self.deeds: list[Deed] = []
        self.rollback: list[Check] = []
        self.verdict: dict[str, Any] = {"status": "inconclusive", "reasons": ["it was not judged"]}
        self.interrupted = False
        self.unsound: list[str] = []  # why the run is no measurement
        self.windows: dict[str, Any] = {}
        self.recovered_s: float | None = None

    def did(self, what: str, *, asked_s: float, true_s: float, detail: str = "") -> None:
        """Write down what was done, model seconds."""
        self.deeds.append(Deed(what, asked_s, true_s, detail))

    def checks(self, checks: Sequence[Check]) -> None:
        """Write down what was looked at after the rollback."""
        self.rollback += checks

    def judged(self, judgement: dict[str, Any]) -> None:
        """Take over what `judge.judge` answered."""
        self.windows, self.recovered_s = judgement["windows"], judgement["recovered_s"]
        self.verdict = judgement["verdict"]
        if self.unsound:
            self.verdict = {"status": "invalid", "reasons": [*self.unsound, *self.verdict["reasons"]]}

    def cut_short(self, why: str) -> None:
        """There is nothing to judge."""
        self.interrupted = True
        self.verdict = {"status": "inconclusive", "reasons": [why, *self.unsound]}

    @property
    def left_behind(self) -> list[str]:
        """What the rollback did not put right, a sentence each."""
        return [f"{one.what}: {one.found}" for one in self.rollback if not one.ok]

    @property
    def clean(self) -> bool:
        """Whether the rollback was looked at, and everything was as it should be."""
        return bool(self.rollback) and not self.left_behind

    @property
    def exit_code(self) -> int:
        """Of the verdict; of a failed rollback 1 at least."""
        code = EXIT_CODES[self.verdict["status"]]
        return code if self.clean else max(code, FAILED)

    def to_json(self) -> dict[str, Any]:
        """As journal.json has it."""
        failed = self.left_behind
        return {
            "experiment": self.experiment.name,
            "clock": self.clock,
            "policy": self.policy,
            "seed": self.seed,
            "verdict": self.verdict,
            "windows": self.windows,
            "recovered_s": self.recovered_s,
            "rollback": {
                "status": "clean" if self.clean else "failed" if failed else "not verified",
                "failed": failed,
                "checks": [asdict(one) for one in self.rollback],
            },
            "journal": [asdict(one) for one in sorted(self.deeds, key=lambda deed: deed.true_s)],
            "method": [fault.model_dump(mode="json") for fault in self.experiment.method],
        }

    def lines(self) -> list[str]:
        """For people."""
        data = self.to_json()
        out = [f"{self.experiment.name}: {', '.join(describe(fault) for fault in self.experiment.method)}"]
        out += [deed.line() for deed in sorted(self.deeds, key=lambda deed: deed.true_s)]
        for name, window in self.windows.items():
            said = {key: window["values"][key] for key in window["bounds"]} or {
                key: window["values"][key] for key in ("goodput", "ttft_p90_s", "queue")
            }
            shown = ", ".join(f"{key} {'-' if value is None else format(value, '.3g')}" for key, value in said.items())
            span = f"{window['from_s']:g} to {window['to_s']:g} s, {window['values']['requests']} requests"
            out.append(f"{name} ({span}): {shown}")
        if self.windows:
            came = "never" if self.recovered_s is None else f"after {self.recovered_s:.1f} s"
            out.append(f"the queue was as it had been before: {came}")
        reasons = "; ".join(self.verdict["reasons"])
        out.append(f"verdict: {self.verdict['status']}{f' ({reasons})' if reasons else ''}")
        rollback = data["rollback"]
        out.append(
            f"rollback: {rollback['status']}" + (f" ({'; '.join(rollback['failed'])})" if rollback["failed"] else "")
        )
        return out

    def write(self, folder: Path) -> None:
        """journal.json and journal.txt."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "journal.json").write_bytes(
            orjson.dumps(self.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)
        )
        (folder / "journal.txt").write_text("\n".join(self.lines()) + "\n")
