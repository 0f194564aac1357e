"""`prfaas gate` as a command: what cannot be asked is a usage error, and --json is one object."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest


def prfaas(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "testbed.cli", "gate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of --candidate POLICY, --a-a and --calibrate"),
        (("--candidate", "naive", "--a-a"), "give one of"),
        (("--calibrate", "--seed", "5"), "--calibrate records the suite's own seeds; leave --seed out"),
        (("--candidate", "naif"), "--candidate naif: did you mean naive"),
        (("--candidate", "naive", "--suite", "quik"), "suite 'quik': not one of the shipped ones (full, quick, wire)"),
        (("--candidate", "naive", "--out", "tests"), "is there already"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(words, said, tmp_path):
    done = prfaas(*words, *(() if "--out" in words else ("--out", str(tmp_path / "out"))))
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_json_is_one_object_on_standard_output(tmp_path):
    done = prfaas("--candidate", "prfaas", "--json", "--out", str(tmp_path / "out"))
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"], told["results"]) == (0, "same", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["same_policy"] is True


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_gate_leaves_no_process_and_goes_on_from_what_it_had(by, tmp_path):
    suite = tmp_path / "small.yaml"
    suite.write_text(
        "name: small\ndescription: x\nseeds: {least: 200, most: 200}\nscenarios:\n"
        "  - {name: one, description: x, scenario: toy, set: [workload.duration_s=30, workload.warmup_s=1],\n"
        "     objectives: [{metric: ttft_s.p90, better: lower, minimum: 2%}]}\n"
    )
    command = [sys.executable, "-m", "testbed.cli", "gate", "--candidate", "naive", "--baseline", "static"]
    command += ["--suite", str(suite), "--jobs", "2", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PRFAAS_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as gate:
        deadline_s = time.monotonic() + 100
        while len(list((tmp_path / "cache").rglob("*.json"))) < 5 and time.monotonic() < deadline_s:
            time.sleep(0.1)
        workers = psutil.Process(gate.pid).children(recursive=True)
        gate.send_signal(by)
        out, err = gate.communicate(timeout=60)
    assert gate.returncode == 130, err
    assert out == ""
    assert "the same command goes on from it" in err
    assert "Traceback" not in err
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, timeout=10)[1] == []
