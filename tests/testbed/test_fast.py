"""Compiled modules give the same bytes, and only of the very sources that they were compiled from."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from testbed import fast, fast_build

ROOT = Path(__file__).parents[2]
RUN = """
import hashlib, json, sys, testbed, testbed.world
from testbed.simulate import simulate
tables = [simulate(name, sets=sets) for name, sets in json.loads(sys.argv[1])]
told = [hashlib.sha256(t.requests.to_csv().encode() + t.timeline.to_csv().encode()).hexdigest() for t in tables]
from testbed.points import code_version
told.append(code_version())  # the sources', whatever runs
print(json.dumps({"compiled": testbed.COMPILED, "file": testbed.world.__file__, "told": told}))
"""
RUNS = [
    ["paper", ["workload.duration_s=400", "workload.warmup_s=50"]],
    ["link-drop", []],
    ["toy", ["link.delay_s=0.05", "decode.step={base_s: 0.02, per_request_s: 0.0001}"]],
    [
        "steady",
        [
            "cache_bytes=1099511627776",
            "workload.duration_s=300",
            "workload.warmup_s=20",
            "workload.sessions={turns_mean: 4, think_s: 20}",
        ],
    ],
]


def run(folder: Path, **environment: str) -> dict[str, object]:
    """What a new process makes of RUNS, with builds kept in `folder`."""
    own = {name: value for name, value in os.environ.items() if name != fast.PURE}
    command = [sys.executable, "-c", RUN, json.dumps(RUNS)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**own, "PRFAAS_FAST_DIR": str(folder), **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_an_edited_source_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("emulator", "netem", "testbed"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fast, "ROOT", tmp_path)
    before = fast.key()
    edited = fast.source("netem.fluid")
    edited.write_text(edited.read_text() + "\n# edited\n")
    assert fast.key() != before


@pytest.mark.parametrize("there", [[], ["netem.fluid"]])
def test_without_a_whole_build_nothing_is_installed(
    there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(fast.PURE, raising=False)
    monkeypatch.setattr(fast, "STORE", tmp_path)
    (tmp_path / fast.key()).mkdir()
    for module in there:
        (tmp_path / fast.key() / (module + fast.SUFFIX)).touch()
    before = list(sys.meta_path)
    assert not fast.install()
    assert sys.meta_path == before


@pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")) or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="there is no C compiler, or this Python has no headers",
)
def test_compiled_or_not_the_results_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "STORE", tmp_path)
    monkeypatch.setenv("MYPYC_OPT_LEVEL", "0")  # what it computes is asked, not how fast
    fast_build.build()
    compiled, pure = run(tmp_path), run(tmp_path, **{fast.PURE: "1"})
    assert (compiled["compiled"], pure["compiled"]) == (True, False)
    assert str(compiled["file"]).endswith(fast.SUFFIX)
    assert str(pure["file"]).endswith(".py")
    assert compiled["told"] == pure["told"]
