"""A run's log, replayed: the same policy decides the same again, what does not is named, another policy is compared.

The runs are recorded from virtual time, in the files that the gateway and a load write.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.agreement import instead, verify
from testbed.assemble import build_workload, lengths_to_json, workload_lengths
from testbed.cli import main
from testbed.control import Arrive, ClientGone, Control, NodeLost, NodeUp, PolicySet, Record
from testbed.load import GATEWAY_LOST
from testbed.policies import load_policy, start_policy, wants_future
from testbed.replay import replay
from testbed.report.rows import GATEWAY_COLUMNS, gateway_row
from testbed.report.timeline import timeline_table
from testbed.runs import RunError
from testbed.scenario import Scenario, load
from testbed.session import PolicyTooSlowError
from testbed.told import KnownFuture, Told
from testbed.world import World

DROP = ["phases.0.duration_s=60", "phases.1.duration_s=60", "phases.2.duration_s=60", "workload.warmup_s=0"]
TALKS = [
    "phases=[]",
    "workload.duration_s=120",
    "workload.warmup_s=0",
    "workload.lengths={kind: lognormal, mu: 8.5, sigma: 1.0, min_tokens: 128, max_tokens: 32768}",
    "workload.sessions={turns_mean: 4, think_s: 10, system_tokens: 2000, max_input_tokens: 131072}",
    "cache_bytes=1099511627776",
]

POLICIES = """
from itertools import count
from testbed.scheduler.rules import send

calls = count()

class Counts:
    "Decides by how often anybody was asked, which no log knows."
    def start(self, setup):
        pass
    def route(self, request, view):
        return send(view, "pd", f"call {next(calls)}")

class Quits:
    def start(self, setup):
        pass
    def route(self, request, view):
        raise SystemExit(7)
"""


class Recorder:
    """A control whose events, rows and changes are kept as a load on the wire keeps them.

    meanwhile: (model second, what to do then), done before the first event at or after that time.
    """

    def __init__(self, told: Told, folder: Path, scenario: Scenario, control: Control) -> None:
        self.told, self.folder, self.scenario, self.control = told, folder, scenario, control
        self.lines: list[bytes] = []
        self.rows: list[list[object]] = []
        self.meanwhile: list[tuple[float, Callable[[float], list[Any]]]] = []
        self._handle = control.handle

    def handle(self, now_s: float, event: Any) -> list[Any]:
        commands = []
        while self.meanwhile and self.meanwhile[0][0] <= now_s:
            commands += self.meanwhile.pop(0)[1](now_s)
        return commands + self.feed(now_s, event)

    def feed(self, now_s: float, event: Any) -> list[Any]:
        self.lines.append(msgspec.json.encode({"t_s": now_s, "event": event}))
        return self._handle(now_s, event)

    def swap(self, now_s: float, name: str, **parameters: float) -> list[Any]:
        policy = load_policy(name)
        told = msgspec.structs.replace(self.told, policy=name, parameters=parameters)
        policy.start(told.setup(self.scenario, self.scenario.deployments[0], policy))
        self.control.set_policy(policy)
        return self.feed(now_s, PolicySet(name, parameters))

    def ended(self, record: Record) -> None:
        self.rows.append(gateway_row(record))

    def write(self, reasons: tuple[str, ...] = ()) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.told.save(self.folder)
        (self.folder / "scenario.yaml").write_text(self.scenario.to_yaml())
        (self.folder / "events.jsonl").write_bytes(b"\n".join(self.lines) + b"\n")
        with (self.folder / "gateway.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([GATEWAY_COLUMNS, *self.rows])
        changes = [msgspec.to_builtins(change) for change in self.control.changes]
        timeline_table(json.loads(json.dumps(changes))).to_csv(
            self.folder / "timeline.csv", index=False, float_format="%.6f"
        )
        errors = self.control.policy_errors
        summary = {"verdict": {"reasons": list(reasons)}, "policy_errors": errors}
        (self.folder / "summary.json").write_text(json.dumps(summary))
        return self.folder


def recorder(folder: Path, policy: str = "prfaas", sets: list[str] = DROP) -> tuple[Recorder, World]:
    scenario = load("link-drop", sets).only(None, policy)
    deployment = scenario.deployments[0]
    trace, _ = build_workload(scenario, deployment)
    made = load_policy(policy)
    future = KnownFuture.of(scenario, deployment, trace).to_json() if wants_future(made) else None
    told = Told(policy, deployment.policy.told, lengths_to_json(workload_lengths(scenario, trace)), future)
    start_policy(made, policy, told.setup(scenario, deployment, made))
    rows: list[Callable[[Record], None]] = []
    world = World(
        scenario, deployment, made, trace.requests, lambda record: rows[0](record), steps=[(60, 5e9), (120, 100e9)]
    )
    kept = Recorder(told, folder, scenario, world.control)
    for spec in world.control.view.nodes.values():  # the world told control of them before anybody listened
        kept.lines.append(msgspec.json.encode({"t_s": 0.0, "event": NodeUp(spec.name, spec.role)}))
    world.control.handle = kept.handle  # type: ignore[method-assign]
    rows.append(kept.ended)
    return kept, world


def recorded(folder: Path, policy: str = "prfaas") -> Path:
    kept, world = recorder(folder, policy)
    world.run()
    return kept.write()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short link-drop under the paper's policy."""
    return recorded(tmp_path_factory.mktemp("run") / "drop")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    for path in run.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "of_the_replay.py").write_text(POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("of_the_replay", None)


def edit(path: Path, change: Callable[[list[dict[str, str]]], None]) -> None:
    """Change the rows of a CSV."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    change(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class TestTheSamePolicy:
    def test_decides_and_changes_the_same_again(self, run: Path) -> None:
        found = verify(str(run))
        assert found["agree"]
        assert found["decisions"]["agree"] == found["decisions"]["compared"] > 150
        assert found["changes"]["agree"] == found["changes"]["compared"] >= 2
        assert (found["differences"], found["notes"], found["decisions"]["not_compared"]) == ([], [], {})

    def test_gives_the_same_every_time(self, run: Path) -> None:
        assert verify(str(run)) == verify(str(run))

    @pytest.mark.parametrize("policy", ["static", "naive", "homogeneous", "oracle"])
    def test_whichever_it_is(self, tmp_path: Path, policy: str) -> None:
        assert verify(str(recorded(tmp_path / "run", policy)))["agree"]

    def test_with_prefix_caches(self, tmp_path: Path) -> None:
        kept, world = recorder(tmp_path / "run", sets=TALKS)
        world.run()
        found = verify(str(kept.write()))
        assert any(int(row[GATEWAY_COLUMNS.index("l_pd")]) for row in kept.rows)  # type: ignore[call-overload]
        assert found["agree"]

    def test_through_lost_nodes_and_clients_that_leave(self, tmp_path: Path) -> None:
        kept, world = recorder(tmp_path / "run")
        kept.meanwhile = [
            (30.0, lambda now_s: kept.feed(now_s, ClientGone(next(iter(world.control.live))))),
            (40.0, lambda now_s: kept.feed(now_s, NodeLost("pd-p-0", "killed"))),
        ]
        world.run()
        found = verify(str(kept.write()))
        assert found["agree"]
        assert found["decisions"]["not_compared"]["earlier attempts, of which the run keeps no row"] >= 1

    def test_through_an_id_that_comes_again(self, tmp_path: Path) -> None:
        kept, _ = recorder(tmp_path / "run", "static")
        for at_s, tokens in ((1.0, 500), (2.0, 100_000)):
            kept.feed(at_s, Arrive("twice", tokens, 4))
            for _, command in kept.feed(at_s + 0.5, ClientGone("twice")):
                if hasattr(command, "record"):
                    kept.ended(command.record)
        found = verify(str(kept.write()))
        assert (found["decisions"]["compared"], found["agree"]) == (2, True)

    def test_through_a_change_of_policy(self, tmp_path: Path) -> None:
        kept, world = recorder(tmp_path / "run")
        kept.meanwhile = [(90.0, lambda now_s: kept.swap(now_s, "static", threshold_tokens=9000.0))]
        world.run()
        folder = kept.write()
        moved = [one.after for one in kept.control.changes if one.trigger == "policy static"]
        assert moved == [9000.0]  # the timeline has the threshold that came with it
        assert verify(str(folder))["agree"]
        edit(folder / "gateway.csv", lambda rows: rows[-1].update(threshold_tokens="9001.0"))
        (difference,) = verify(str(folder))["differences"]
        assert difference["fields"] == {"threshold_tokens": ["9001.0", "9000.0"]}

    def test_where_the_clock_took_the_decision_from_it(self, tmp_path: Path) -> None:
        kept, world = recorder(tmp_path / "run")
        ask = world.control._ask

        def slow_once(policy: Any, request: Any, view: Any) -> Any:
            if request.request_id == "r0000010":
                raise PolicyTooSlowError("no decision within 0.05 s")
            return ask(policy, request, view)

        world.control._ask = slow_once
        world.run()
        found = verify(str(kept.write()))
        assert found["agree"]

    def test_that_would_end_the_process_only_fails(self, tmp_path: Path, mine: None, run: Path) -> None:
        assert instead(str(run), "of_the_replay:Quits")["policy_errors"].keys() == {"PolicyQuitError"}


class TestWhatDiffers:
    def test_a_decision_is_named_with_what_was_recorded_and_what_came_now(self, copy: Path) -> None:
        edit(copy / "gateway.csv", lambda rows: rows[5].update(prefill_node="pd-p-9"))
        found = verify(str(copy))
        (difference,) = found["differences"]
        assert found["decisions"]["compared"] - found["decisions"]["agree"] == 1
        assert difference["fields"]["prefill_node"][0] == "pd-p-9"
        assert not found["agree"]

    def test_a_change_is_named_by_who_has_it(self, copy: Path) -> None:
        def move(rows: list[dict[str, str]]) -> None:
            first = next(row for row in rows if row["event"] == "threshold")
            first["t_s"] = f"{float(first['t_s']) + 1:.6f}"

        edit(copy / "timeline.csv", move)
        found = verify(str(copy))
        assert [one["only"] for one in found["differences"]] == ["replayed", "recorded"]
        assert found["changes"]["compared"] - found["changes"]["agree"] == 2
        assert not found["agree"]

    def test_a_policy_that_decides_by_more_than_it_is_told_is_found_out(self, tmp_path: Path, mine: None) -> None:
        found = verify(str(recorded(tmp_path / "run", "of_the_replay:Counts")))
        assert found["decisions"]["agree"] == 0
        assert not found["agree"]

    def test_only_the_first_are_given_in_full(self, copy: Path) -> None:
        edit(copy / "gateway.csv", lambda rows: [row.update(reason="whim") for row in rows] and None)
        found = verify(str(copy), differences=3)
        assert len(found["differences"]) == 3
        assert found["decisions"]["agree"] == 0


class TestWhatCannotBeReplayed:
    def test_an_event_that_was_cut_off_is_said(self, copy: Path) -> None:
        log = (copy / "events.jsonl").read_bytes()
        (copy / "events.jsonl").write_bytes(log[:-20])
        found = verify(str(copy))
        assert any("cut off" in note for note in found["notes"])
        assert found["agree"]

    def test_decisions_beyond_the_end_of_the_log_are_not_held_against_it(self, copy: Path) -> None:
        lines = (copy / "events.jsonl").read_bytes().splitlines(keepends=True)
        (copy / "events.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
        found = verify(str(copy))
        assert found["decisions"]["not_compared"]["decisions whose events are not in the log"] > 20
        assert found["decisions"]["agree"] == found["decisions"]["compared"] > 20
        assert any("had not ended when the log did" in note for note in found["notes"])

    def test_changes_that_a_lost_gateway_could_not_tell_are_not_compared(self, tmp_path: Path) -> None:
        kept, world = recorder(tmp_path / "run")
        world.run()
        kept.control.changes, told = [], f"{GATEWAY_LOST}: it does not answer"
        found = verify(str(kept.write((told,))))
        assert (found["changes"], found["agree"]) == ({"compared": 0, "agree": 0}, True)
        assert any("changes are not compared" in note for note in found["notes"])

    def test_a_line_that_is_no_event_is_refused_with_its_number(self, copy: Path) -> None:
        lines = (copy / "events.jsonl").read_bytes().splitlines(keepends=True)
        (copy / "events.jsonl").write_bytes(b"".join([*lines[:3], b'{"t_s": 1, "event": {"type": "Whim"}}\n']))
        with pytest.raises(RunError, match="line 4: no event of control's"):
            replay(copy)

    @pytest.mark.parametrize("missing", ["events.jsonl", "setup.json"])
    def test_a_run_without_a_log_is_refused(self, copy: Path, missing: str) -> None:
        (copy / missing).unlink()
        with pytest.raises(RunError, match=f"no {missing} in it: only a run on the wire"):
            verify(str(copy))


class TestAnotherPolicy:
    def test_differs_where_it_would_have_sent_requests_elsewhere(self, run: Path) -> None:
        found = instead(str(run), "naive")
        of = found["decisions"]
        assert set(found["site_moves"]) == {"pd to prfaas"}
        assert of["other_site"] == found["site_moves"]["pd to prfaas"] > 50
        kinds = ("same", "other_site", "other_prefill_node", "other_decode_node")
        assert sum(of[kind] for kind in kinds) == of["compared"]

    def test_is_the_same_where_it_is_the_same(self, run: Path) -> None:
        of = instead(str(run), "prfaas")["decisions"]
        assert of["same"] == of["compared"] > 150

    def test_is_told_the_future_if_it_is_an_oracle(self, run: Path) -> None:
        assert instead(str(run), "oracle")["threshold_changes"] == 2

    def test_stays_in_charge_where_the_run_changed_its_own(self, tmp_path: Path) -> None:
        kept, world = recorder(tmp_path / "run", "naive")
        kept.meanwhile = [(90.0, lambda now_s: kept.swap(now_s, "homogeneous"))]
        world.run()
        found = instead(str(kept.write()), "naive")
        assert set(found["site_moves"]) == {"pd to prfaas"}
        assert any("homogeneous" in note for note in found["notes"])


class TestTheCommand:
    def test_exits_with_0_when_all_agree_and_1_when_not(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("replay-decisions", str(copy)) == 0
        assert "agrees" in capsys.readouterr().out
        edit(copy / "gateway.csv", lambda rows: rows[5].update(reason="whim"))
        assert command("replay-decisions", str(copy)) == 1
        told = capsys.readouterr().out
        assert "reason whim -> " in told
        assert "differs" in told

    def test_gives_no_verdict_on_another_policy(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command("replay-decisions", str(run), "--policy", "naive", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert "agree" not in found
        assert command("replay-decisions", str(run), "--policy", "naive") == 0
        assert "at another site (pd to prfaas: " in capsys.readouterr().out

    @pytest.mark.parametrize("words", [("nosuch",), ("nosuch", "--policy", "naive")])
    def test_refuses_what_is_not_there(self, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
        assert command("replay-decisions", *words) == 2
        assert "nosuch: no such run" in capsys.readouterr().err


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    assert isinstance(exit_.value.code, int)
    return exit_.value.code
