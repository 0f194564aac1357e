"""Policies under comparison: shipped, somebody's own, and those of another revision; nothing here is touched."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.gate import arms
from testbed.gate.arms import resolve
from testbed.gate.environment import Environment
from testbed.scenario import ScenarioError
from testbed.scheduler.api import API_VERSION

MINE = """
from testbed.scheduler.baselines import Static
class Mine(Static):
    pass
"""


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(
        ["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A repository of two revisions: the scheduler, with a comment more in the second, and a policy of one's own."""
    folder = tmp_path / "repository"
    shutil.copytree(arms.ROOT / "testbed" / "scheduler", folder / "testbed" / "scheduler")
    shutil.rmtree(folder / "testbed" / "scheduler" / "__pycache__", ignore_errors=True)
    (folder / "minepolicy.py").write_text(MINE)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    rules = folder / "testbed" / "scheduler" / "rules.py"
    rules.write_text(rules.read_text() + "\n# changed\n")
    git(folder, "commit", "-qam", "two")
    monkeypatch.setattr(arms, "ROOT", folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("minepolicy", None)


def test_a_shipped_policy_and_that_of_its_own_revision_are_the_same_code(checkout, tmp_path):
    now, head, before = (resolve(name, "--candidate", tmp_path) for name in ("prfaas", "git:HEAD", "git:HEAD~1"))
    assert now.identity == head.identity != before.identity
    assert (head.told.kind, head.told.policy, head.told.revision) == (
        "git",
        "prfaas",
        git(checkout, "rev-parse", "HEAD"),
    )
    assert (now.told.dirty, head.told.dirty) == (False, False)
    assert now.environment == Environment()
    assert before.environment.scheduler is not None
    assert (before.environment.scheduler / "testbed" / "scheduler" / "rules.py").is_file()


def test_a_change_that_is_not_committed_is_told(checkout, tmp_path):
    before = resolve("prfaas", "--candidate", tmp_path)
    (checkout / "testbed" / "scheduler" / "rules.py").write_text("# another\n")
    after = resolve("prfaas", "--candidate", tmp_path)
    assert after.told.dirty is True
    assert after.identity != before.identity


def test_ones_own_policy_of_a_revision_is_imported_from_there(checkout, tmp_path):
    (checkout / "minepolicy.py").write_text(MINE + "    # edited\n")
    now = resolve("minepolicy:Mine", "--candidate", tmp_path)
    before = resolve("git:HEAD:minepolicy:Mine", "--baseline", tmp_path)
    assert (now.told.kind, now.told.dirty) == ("class", True)
    assert before.told.policy == "minepolicy:Mine"
    assert before.environment.own is not None
    assert (before.environment.own / "minepolicy.py").read_text() == MINE
    assert now.identity != before.identity
    assert not (checkout / ".git" / "index.lock").exists()


def test_what_a_policy_of_a_revision_imports_is_of_that_revision_too(checkout, tmp_path):
    (checkout / "minepolicy.py").write_text("import ownrules\n" + MINE)
    (checkout / "ownrules").mkdir()
    (checkout / "ownrules" / "__init__.py").write_text("from ownlimits import LIMIT\n")
    (checkout / "ownlimits.py").write_text("LIMIT = 1\n")
    (checkout / "unused.py").write_text("")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "three")
    before = resolve("git:HEAD:minepolicy:Mine", "--baseline", tmp_path / "before")
    (checkout / "ownlimits.py").write_text("LIMIT = 2\n")
    git(checkout, "commit", "-qam", "four")
    after = resolve("git:HEAD:minepolicy:Mine", "--baseline", tmp_path / "after")
    assert before.identity != after.identity
    own = before.environment.own
    assert own is not None
    assert (own / "ownlimits.py").read_text() == "LIMIT = 1\n"
    assert sorted(path.name for path in own.iterdir()) == ["minepolicy.py", "ownlimits.py", "ownrules"]


def test_ones_own_policy_of_a_revision_is_another_under_another_scheduler(checkout, tmp_path):
    before = resolve("git:HEAD:minepolicy:Mine", "--baseline", tmp_path)
    (checkout / "testbed" / "scheduler" / "baselines.py").write_text("# another\n")
    assert resolve("git:HEAD:minepolicy:Mine", "--baseline", tmp_path).identity != before.identity


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("prfas", "did you mean prfaas.*git:REV"),
        ("git:nowhere", "no revision 'nowhere'.*shallow"),
        ("git:--help", "no revision '--help'"),
        ("git:HEAD:prfas", "did you mean prfaas"),
        ("git:HEAD:elsewhere:Mine", "neither elsewhere/ nor elsewhere.py"),
        ("minepolicy:Yours", "no class 'Yours'"),
    ],
)
def test_what_is_no_policy_is_refused_with_its_option(checkout, tmp_path, given, said):
    with pytest.raises(ScenarioError, match=said) as caught:
        resolve(given, "--candidate", tmp_path)
    assert str(caught.value).startswith(f"--candidate {given}: ")


def test_another_contract_is_refused(checkout, tmp_path):
    api = checkout / "testbed" / "scheduler" / "api.py"
    api.write_text(api.read_text().replace(f"API_VERSION: Final = {API_VERSION}", "API_VERSION: Final = 1"))
    git(checkout, "commit", "-qam", "old contract")
    with pytest.raises(ScenarioError, match=f"API version 1, this testbed runs version {API_VERSION}"):
        resolve("git:HEAD", "--baseline", tmp_path)


def test_outside_a_checkout_there_are_no_revisions(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ScenarioError, match="does not run from a git checkout"):
        resolve("git:HEAD", "--baseline", tmp_path)
