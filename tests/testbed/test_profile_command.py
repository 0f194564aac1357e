"""`prfaas profile`: what it writes is a profile that virtual time takes; what it cannot measure it refuses in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.backends.hybrid.config import TINY
from emulator.backends.hybrid.parcel import parcel_bytes
from emulator.profile import load_profile
from testbed.cli import main
from testbed.cli import profile as command
from testbed.profiling import Found

QUICK = ["--lengths", "64,2048", "--batches", "1,2", "--rounds", "3"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_model_is_measured_into_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    code, out, _ = run(capsys, "--out", str(file), *QUICK, "--force", "--json")  # --force: this machine may be busy
    assert code == 0
    told = json.loads(out)
    profile = load_profile(file)
    assert [row["tokens"] for row in told["prefill"]] == [64, 2048]
    assert profile.s_kv(2048) == told["prefill"][1]["kv_bytes"] == parcel_bytes(TINY, 2048, answer=True)
    assert profile.t_prefill(2048) == pytest.approx(told["prefill"][1]["seconds"], rel=1e-3)
    assert profile.decode_slots == 2
    assert profile.pieces >= 1
    assert profile.measurement is not None
    assert profile.measurement["threads"] == 1
    assert profile.measurement["model"] == {"preset": "tiny", "fingerprint": TINY.fingerprint}


def test_a_machine_that_is_busy_is_no_meter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found("text", command.MOST_UNCERTAIN + 0.01, {"prefill": [], "decode": []})
    monkeypatch.setattr("testbed.profiling.measure_alone", lambda *arguments, **more: found)
    file = tmp_path / "here.yaml"
    code, _, err = run(capsys, "--out", str(file))
    assert code == 3
    assert "this machine is doing something else" in " ".join(err.split())
    assert not file.exists()
    assert run(capsys, "--out", str(file), "--force", "--json")[0] == 0
    assert file.read_text() == "text"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "64"], "lengths: [64]: give at least two"),
        (["--lengths", "64,x"], "'64,x': give whole numbers"),
        (["--batches", "9"], "batches: [9]"),
        (["--preset", "huge"], "use one of tiny, small"),
        (["--pattern", "LXF"], "pattern: 'LXF'"),
        (["--device", "tpu"], "device: 'tpu': use cpu or cuda"),
        (["--threads", "4000"], "threads: 4000: this machine has"),
        (["--backend", "timing"], "only hybrid computes"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--out", str(tmp_path / "here.yaml"), *arguments)
    assert code == 2
    assert said in " ".join(err.split())


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    file.write_text("mine")
    code, _, err = run(capsys, "--out", str(file))
    assert code == 2
    assert "replace it with --force" in " ".join(err.split())
    assert file.read_text() == "mine"
    assert run(capsys, "--out", str(tmp_path / "here.txt"))[0] == 2


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.profiling.measure_alone", lambda *arguments, **more: pytest.fail("measured"))
    code, _, err = run(capsys, "--out", str(tmp_path / "nowhere" / "here.yaml"))
    assert code == 2
    assert "there is no folder" in " ".join(err.split())
