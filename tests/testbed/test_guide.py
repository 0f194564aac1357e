"""Pages of docs/ as documentation that runs: their files are written, their commands are called, in their order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs/write-a-policy.md"
FLEET = ROOT / "docs/your-fleet.md"


def read(page: Path) -> tuple[dict[str, str], list[str]]:
    """A page's files by name, and its commands."""
    blocks = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    files = {name: text for language, name, text in blocks if name}
    return files, [text.strip() for language, name, text in blocks if language == "bash"]


FILES, COMMANDS = read(GUIDE)


def prfaas(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command of the guide's, called where its reader stands."""
    words = command.replace("--suite SUITE", "--suite suite.yaml --no-cache").split()
    assert words[0] == "prfaas"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "testbed.cli", *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody follows the guide: its files are there."""
    folder = tmp_path_factory.mktemp("guide")
    write(folder, FILES)
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_the_guide_has_its_files_and_commands() -> None:
    assert set(FILES) == {"soonest.py", "suite.yaml"}
    assert [command.split()[1] for command in COMMANDS] == ["policy", "policy", "simulate", "gate"]


def test_the_policy_is_as_short_as_it_says() -> None:
    assert len(FILES["soonest.py"].strip().splitlines()) <= 30


def test_new_check_simulate_gate(reader: Path) -> None:
    new, check, simulate, gate = COMMANDS
    made = prfaas(reader, new)
    assert made.returncode == 0, made.stderr
    lines = len((reader / "my_policy.py").read_text().splitlines())
    assert f"{lines} lines" in GUIDE.read_text(encoding="utf-8")
    for command, expected in (
        (made.stdout.rpartition("next: ")[2].strip(), "keeps its contract"),
        (check, "keeps its contract"),
        (simulate, "soonest:Soonest"),
    ):
        done = prfaas(reader, command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout
    verdict = prfaas(reader, gate)
    assert verdict.returncode in (0, 1, 4), verdict.stdout + verdict.stderr  # whatever it is, it is one
    assert "ttft_s.p90" in verdict.stdout


def test_a_fleet_of_ones_own_is_planned_and_simulated(tmp_path: Path) -> None:
    files, (plan, simulate) = read(FLEET)
    write(tmp_path, files)
    planned = prfaas(tmp_path, f"{plan} --json")
    assert planned.returncode == 0, planned.stderr
    (ours,) = json.loads(planned.stdout)["deployments"]
    assert ours["lambda_max_rps"] > 0
    done = prfaas(tmp_path, simulate)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prfaas" in done.stdout
    assert "static" in done.stdout
