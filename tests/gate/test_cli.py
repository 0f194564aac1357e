"""`prfaas gate` as a command: what cannot be asked is a usage error, and --json is one object."""

import json
import subprocess
import sys

import pytest


def prfaas(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "testbed.cli", "gate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of --candidate POLICY, --a-a and --calibrate"),
        (("--candidate", "naive", "--a-a"), "give one of"),
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
