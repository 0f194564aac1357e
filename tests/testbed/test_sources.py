"""What code depends on: its imports are followed, those of somebody's own package too."""

import sys
from pathlib import Path

import pytest

from testbed.scenario import load
from testbed.sources import files_sha256, sources


@pytest.fixture
def own(tmp_path: Path, monkeypatch):
    """A policy's package beside a helper module, importable from its folder."""
    (tmp_path / "ownpolicy").mkdir()
    (tmp_path / "ownpolicy" / "__init__.py").write_text("")
    (tmp_path / "ownpolicy" / "mine.py").write_text(
        "import json\nimport ownhelper\nfrom . import rules\nfrom testbed.scheduler.api import Decision\n"
    )
    (tmp_path / "ownpolicy" / "rules.py").write_text("LIMIT = 1\n")
    (tmp_path / "ownhelper.py").write_text("from ownpolicy.rules import LIMIT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own")]:
        del sys.modules[name]


def test_imports_are_followed_within_the_rooms():
    found = sources("testbed.scheduler.prfaas")
    assert {"testbed.scheduler.prfaas", "testbed.scheduler.model", "testbed.scheduler.estimators"} <= set(found)
    assert found["testbed.scheduler.model"] == Path("testbed/scheduler/model.py").read_bytes()
    assert not any(name.startswith("numpy") for name in found)


def test_somebodys_own_code_is_followed_below_their_folder(own):
    found = sources("ownpolicy.mine", own)
    assert {"ownpolicy", "ownpolicy.mine", "ownpolicy.rules", "ownhelper", "testbed.scheduler.api"} <= set(found)
    assert "json" not in found


def test_a_package_from_elsewhere_counts_whole(own, tmp_path_factory):
    found = sources("ownpolicy.mine", tmp_path_factory.mktemp("elsewhere"))
    assert {"ownpolicy", "ownpolicy.mine", "ownpolicy.rules"} <= set(found)
    assert "ownhelper" not in found


def test_without_a_folder_only_the_rooms_count(own):
    assert sources("ownpolicy.mine") == {}


def test_every_file_that_a_scenario_names_counts_by_its_content(tmp_path):
    profile, rates = tmp_path / "mine.yaml", tmp_path / "rates.csv"
    profile.write_text((Path("emulator") / "profiles" / "toy.yaml").read_text())
    rates.write_text("t_s,rate_bps\n0,8e9\n")
    sets = (f"deployments.naive.profiles.prfaas={profile}", f"link.schedule={{kind: csv, file: {rates}}}")
    scenario = load("toy", sets).only("naive")
    before = files_sha256(scenario)
    rates.write_text("t_s,rate_bps\n0,4e9\n")
    assert (len(before), [one in before for one in files_sha256(scenario)]) == (2, [True, False])
    assert files_sha256(load("toy").only("naive")) == []
