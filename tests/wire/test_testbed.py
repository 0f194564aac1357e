"""The whole testbed as its users run it, by its command: real processes, namespaces, Locust and a shaped link.

What is asserted holds on a busy machine too: counts, bytes, order, and sums. Figures that need a quiet machine are in
`tests/bench`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyroute2 import IPRoute

from testbed.launch import namespaces, processes
from testbed.report.rows import PARTS

REFUSAL = namespaces.refusal() if sys.platform == "linux" else "not Linux"
pytestmark = [pytest.mark.wire, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

TRACES = Path(__file__).parents[3] / "shared" / "traces"
STAMPS = ["sched_s", "send_s", "arrive_s", "route_s", "prefill_start_s", "prefill_end_s", "landed_s", "admitted_s"]
INSIDE = ["ttft_queue_s", "ttft_prefill_s", "ttft_transfer_s", "ttft_admission_s"]


@dataclass(frozen=True)
class Command:
    """`prfaas`, with a state directory and a port of its own."""

    folder: Path
    port: int

    def __call__(self, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "testbed.cli", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PRFAAS_STATE": str(self.folder / "state"), "PYTHONPATH": str(Path(__file__).parents[2])}

    def json(self, *words: str, expect: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """The command's JSON. Exit code 3 is allowed for loads: a busy machine makes a run invalid, not wrong."""
        done = self(*words, "--json")
        assert done.returncode in expect, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def load(self, *words: str) -> tuple[dict[str, Any], pd.DataFrame]:
        summary = self.json("load", *words, expect=(0, 3))
        return summary, pd.read_csv(self.folder / summary["results"] / "requests.csv")


def host_network() -> list[tuple[str, ...]]:
    """The host's interfaces and qdiscs."""
    with IPRoute() as ip:
        links = [("link", one.get_attr("IFLA_IFNAME"), str(one["flags"])) for one in ip.get_links()]
        qdiscs = [("qdisc", str(one["index"]), str(one.get_attr("TCA_KIND"))) for one in ip.get_qdiscs()]
    return sorted(links + qdiscs)


@pytest.fixture(scope="module")
def prfaas() -> Iterator[Command]:
    """A running smoke testbed; afterwards it is gone, and the host's network is what it was."""
    before = host_network()
    with tempfile.TemporaryDirectory(prefix="prf") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = Command(Path(folder), port)
        try:
            done = command("up", "smoke", "--port", str(port))
            assert done.returncode == 0, done.stderr
            yield command
        finally:
            down = command("down")
            left = command("doctor", "--leftovers")
        assert down.returncode == 0, down.stderr
        assert folder not in left.stdout  # another testbed of this user may be up, and is none of ours
        assert host_network() == before


def test_a_second_up_finds_the_first(prfaas: Command) -> None:
    assert prfaas.json("up", "smoke", "--port", str(prfaas.port))["already"]


@pytest.mark.parametrize("command", ["up", "run"])
def test_another_testbed_is_refused_with_the_remedy_and_leaves_the_first(prfaas: Command, command: str) -> None:
    done = prfaas(command, "toy", "--port", str(prfaas.port))
    assert done.returncode == 2
    assert "prfaas down" in done.stderr
    assert prfaas.json("status")["up"]


def _as_from_a_terminal() -> None:
    """Whoever runs the tests may ignore these signals (nohup does), and a child would inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_takes_its_testbed_down(prfaas: Command, tmp_path: Path, number: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(prefix="prf") as state, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        own = {**prfaas.environment, "PRFAAS_STATE": state}
        words = [sys.executable, "-m", "testbed.cli", "run", "toy", "--port", str(port)]
        with subprocess.Popen(
            words, env=own, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=_as_from_a_terminal
        ) as run:
            assert run.stderr is not None
            assert any(line.startswith("up after") for line in run.stderr)
            run.send_signal(number)
            rest = run.stderr.read()
        assert run.returncode == 130
        assert "Traceback" not in rest
        assert processes.find(Path(state)) == []


def test_the_link_carries_what_was_asked(prfaas: Command) -> None:
    directions = prfaas.json("link", "verify", expect=(0, 3))["directions"]
    for one in directions.values():
        assert one["asked_bps"] == 16e9
        assert one["measured_bps"] <= one["expected_bps"] * 1.05


EVEN = (
    *("--policy", "static", "--arrivals", "uniform"),
    *("--duration-s", "100", "--warmup-s", "10", "--rate-rps", "1.0"),
)


@pytest.fixture(scope="module")
def wide(prfaas: Command) -> tuple[dict[str, Any], pd.DataFrame]:
    """An even load over the link as it is."""
    return prfaas.load(*EVEN)


def test_every_byte_and_token_arrives_and_every_part_adds_up(wide: tuple[dict[str, Any], pd.DataFrame]) -> None:
    summary, rows = wide
    assert summary["requests"]["completed"] == summary["requests"]["scheduled"] == len(rows) > 20
    assert (rows["output_tokens"] == rows["output_tokens_asked"]).all()
    for earlier, later in pairwise(STAMPS):
        assert (rows[later] >= rows[earlier] - 1e-9).all(), f"{later} before {earlier}"
    parts = rows[[f"ttft_{part}_s" for part in PARTS]].sum(axis=1)
    assert (parts - rows["ttft_s"]).abs().max() < 1e-6
    link = summary["link"]
    assert link["direct_packets"] == 0
    assert link["kv_bytes"] > 10e6
    assert link["kv_bytes"] <= link["wan_tx_bytes"] <= 1.08 * link["kv_bytes"]


def test_a_narrow_link_delays_the_offloaded_and_nobody_else(
    prfaas: Command, wide: tuple[dict[str, Any], pd.DataFrame]
) -> None:
    before, before_rows = wide
    assert prfaas("link", "set", "--rate", "2gbps", "--direction", "to_pd").returncode == 0
    try:
        narrow, narrow_rows = prfaas.load(*EVEN)
    finally:
        assert prfaas("link", "set", "--rate", "16gbps").returncode == 0
    assert narrow["requests"]["failed"] == before["requests"]["failed"] == 0
    assert narrow["egress_queue_s"]["mean"] > 3 * before["egress_queue_s"]["mean"]
    local = [rows[rows["prefill_site"] == "pd"][INSIDE].sum(axis=1).mean() for rows in (before_rows, narrow_rows)]
    assert local[1] == pytest.approx(local[0], rel=0.10)


def test_the_link_follows_the_phases_and_is_then_what_it_was(prfaas: Command) -> None:
    phases = "phases=[{name: wide, duration_s: 60}, {name: narrow, duration_s: 60, link_rate_bps: 2gbps}]"
    words = ("--policy", "naive", "--duration-s", "120", "--warmup-s", "10", "--rate-rps", "0.5", "--set", phases)
    summary, _ = prfaas.load(*words)
    wide, narrow = summary["phases"]
    assert narrow["egress_queue_s"]["mean"] > 3 * wide["egress_queue_s"]["mean"]
    rows = pd.read_csv(prfaas.folder / summary["results"] / "timeline.csv")
    steps = rows[rows["event"] == "link"]
    assert set(steps["direction"]) == {"to_pd", "to_prfaas"}
    assert (steps["trigger"] == "phase narrow").all()
    assert (steps["t_s"] >= 60).all()
    asked = rows[(rows["direction"] == "to_pd") & rows["event"].isna()].set_index("t_s")["rate_asked_bps"]
    assert set(asked.loc[10:55]) == {16e9}
    assert set(asked.loc[70:115]) == {2e9}
    assert {one["rate_bps"] for one in prfaas.json("link", "show").values()} == {16e9}
    axis = pd.read_csv(prfaas.folder / summary["results"] / "link.csv").set_index("t_s")
    assert set(axis.loc[10:55, "to_pd_applied_bps"]) == {16e9}
    assert set(axis.loc[70:110, "to_pd_applied_bps"]) == {2e9}
    landed = axis["to_pd_goodput_bps"].sum() * (axis["end_s"] - axis.index).iloc[0] / 8
    sent = pd.read_csv(prfaas.folder / summary["results"] / "requests.csv").query("prefill_site == 'prfaas'")
    assert landed == pytest.approx(sent["kv_bytes"].sum(), rel=0.02)
    assert axis["to_pd_retransmits"].sum() >= 0
    assert axis["to_pd_queue_s"].loc[70:110].max() > axis["to_pd_queue_s"].loc[10:55].max()
    told = prfaas.json("report", "link", summary["results"])
    assert [span["name"] for span in told["spans"]] == ["wide", "narrow"]
    assert "unshaped" not in {one["kind"] for one in told["findings"]}


def test_a_loads_decisions_are_made_again_from_its_log_through_a_change_of_policy(prfaas: Command) -> None:
    words = ("load", "--duration-s", "240", "--rate-rps", "0.7", "--out", "swapped", "--json")
    with subprocess.Popen(
        [sys.executable, "-m", "testbed.cli", *words],
        env=prfaas.environment, cwd=prfaas.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as child:  # fmt: skip
        deadline = time.monotonic() + 60
        while (prfaas.json("status")["gateway"]["session"]["ended"].get("ok", 0) < 10) and time.monotonic() < deadline:
            time.sleep(0.1)
        session = prfaas.json("policy", "set", "homogeneous")["session"]
        summary = json.loads(child.communicate(timeout=120)[0])
    assert summary["load_id"] == session, "the load had ended before the policy was set"
    rows = pd.read_csv(prfaas.folder / "swapped" / "requests.csv").sort_values("route_s")
    reasons = rows["reason"].tolist()
    first = reasons.index("all local")
    assert 0 < first < len(reasons)
    assert set(reasons[:first]) <= {"longer than t", "not longer than t"}
    assert set(reasons[first:]) == {"all local"}
    found = prfaas.json("replay-decisions", "swapped")
    assert found["agree"], found
    assert found["decisions"]["compared"] == summary["requests"]["scheduled"]
    other = prfaas.json("replay-decisions", "swapped", "--policy", "naive")
    assert set(other["site_moves"]) == {"pd to prfaas"}
    told = prfaas("explain", "swapped", str(rows["request_id"].iloc[-1]))
    assert "decision: all local" in told.stdout
    assert "asked for" in told.stdout


def test_policies_take_turns_with_the_same_requests(prfaas: Command) -> None:
    series = ("--policy", "naive,homogeneous", "--repeats", "2", "--out", "turns", "--plot", "turns.svg")
    found = prfaas.json("load", *series, "--duration-s", "20", "--rate-rps", "1", expect=(0, 3))
    assert {name: runs["seeds"] for name, runs in found["runs"].items()} == {"naive": [1, 2], "homogeneous": [1, 2]}
    rows = {
        (name, seed): pd.read_csv(prfaas.folder / f"turns/{name}/seed-{seed}/requests.csv")
        for name in found["runs"]
        for seed in (1, 2)
    }
    for seed in (1, 2):
        naive, homogeneous = (rows[name, seed] for name in ("naive", "homogeneous"))
        assert list(naive["input_tokens"]) == list(homogeneous["input_tokens"])
        assert (set(naive["prefill_site"]), set(homogeneous["prefill_site"])) == ({"prfaas"}, {"pd"})
    assert list(rows["naive", 1]["input_tokens"]) != list(rows["naive", 2]["input_tokens"])
    assert found["differences"]["homogeneous"]["offload_fraction"] == {"mean": -1, "low": -1, "high": -1}
    assert (prfaas.folder / "turns.svg").read_text().count(">homogeneous<") == 2  # a curve and a bar


def test_repeats_that_are_interrupted_keep_the_runs_that_ended(prfaas: Command) -> None:
    words = ("load", "--repeats", "3", "--duration-s", "20", "--rate-rps", "1", "--out", "repeats", "--json")
    with subprocess.Popen(
        [sys.executable, "-m", "testbed.cli", *words],
        env=prfaas.environment,
        cwd=prfaas.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_as_from_a_terminal,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert any(line.startswith("run 2 of 3") for line in child.stderr)
        child.send_signal(signal.SIGINT)
        told, output = child.stderr.read(), child.stdout.read()
    assert child.returncode == 4, told
    assert "Traceback" not in told
    repeated = json.loads(output)["repeats"]
    assert (repeated["n"], repeated["seeds"]) == (1, [1])
    assert json.loads((prfaas.folder / "repeats/repeats.json").read_text()) == repeated
    assert (prfaas.folder / "repeats/seed-1/requests.csv").exists()


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize(
    "name", ["mooncake-fast25/conversation_trace.jsonl", "azure-llm-2023/AzureLLMInferenceTrace_conv.csv"]
)
def test_a_real_trace_is_served(prfaas: Command, name: str) -> None:
    words = ("--trace", str(TRACES / name), "--arrivals", "spread", "--duration-s", "60", "--load-fraction", "0.4")
    summary, rows = prfaas.load(*words)
    assert summary["requests"]["completed"] == summary["requests"]["scheduled"] == len(rows) > 20


def test_a_killed_prefill_worker_loses_no_request(prfaas: Command) -> None:
    """The last test of the module: it leaves the testbed without one worker."""
    words = ("load", "--duration-s", "100", "--arrivals", "uniform", "--rate-rps", "1.8", "--policy", "naive", "--json")
    child = subprocess.Popen(
        [sys.executable, "-m", "testbed.cli", *words],
        env=prfaas.environment,
        cwd=prfaas.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    processes_up = prfaas.json("status", expect=(0, 1))["supervisor"]["processes"]
    pids = {one["name"]: one["host_pid"] for one in processes_up}
    deadline = time.monotonic() + 60
    victim = None
    while victim is None and time.monotonic() < deadline:  # of the gateway itself: a command would tell of long ago
        with urllib.request.urlopen(f"http://127.0.0.1:{prfaas.port}/prfaas/status", timeout=10) as answer:
            nodes = json.load(answer)["nodes"]
        busy = [n["name"] for n in nodes if n["site"] == "prfaas" and n["queued_requests"] > 0]
        victim = busy[0] if busy else None
    assert victim is not None, "no prefill worker was ever busy"
    os.kill(pids[victim], signal.SIGKILL)
    output, _ = child.communicate(timeout=240)
    summary = json.loads(output)
    assert summary["requests"]["completed"] == summary["requests"]["scheduled"]
    assert summary["requests"]["retried"] >= 1
    status = prfaas.json("status", expect=(1,))
    dead = [one["name"] for one in status["supervisor"]["processes"] if one["state"] == "dead"]
    assert dead == [victim]
