"""The two policies under comparison: from what was typed to code that can be run, and what identifies it.

A policy is a shipped name, `package.module:Class`, or `git:REV`, which is `prfaas` as that revision has it;
`git:REV:POLICY` is another of its policies: a shipped name, with the whole scheduler of that revision, or
`package.module:Class` of the repository that one stands in, with what it imports there as it was.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from testbed.gate.environment import Environment
from testbed.gate.result import ArmResult
from testbed.policies import SHIPPED, load_policy, unknown, wants_future
from testbed.scenario_data import ScenarioError
from testbed.scheduler.api import API_VERSION
from testbed.sources import ROOMS, imported, sources

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = "testbed/scheduler"
NEVER_MADE: Final = "git is not there; install git, or name the policy as package.module:Class"


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy that can be run. told: what a result says of it. environment: of the processes that run it."""

    told: ArmResult
    environment: Environment

    @property
    def policy(self) -> str:
        return self.told.policy

    @property
    def identity(self) -> str:
        """Equal for equal code under equal names."""
        return f"{self.told.policy} {self.told.source_sha256}"


def resolve(given: str, option: str, scratch: Path) -> Arm:
    """An arm. option: that it was given with. scratch: a folder for code of other revisions. Raises ScenarioError."""
    try:
        return _of_revision(given, scratch) if given.startswith("git:") else _of_tree(given)
    except ScenarioError as error:
        raise ScenarioError(f"{option} {given}: {error}") from None


def _of_tree(given: str) -> Arm:
    """A policy as it is here and now."""
    if (why := unknown(given)) is not None:
        raise ScenarioError(f"{why}, or git:REV")
    made = load_policy(given)
    kind: Literal["shipped", "class"] = "shipped" if given in SHIPPED else "class"
    files = _modules(ROOT, FOLDER)
    repository, within = ROOT, FOLDER
    if kind == "class":
        files |= sources(given.partition(":")[0], Path.cwd())
        repository, within = Path.cwd(), "."
    revision, dirty = _checkout(repository, within)
    return Arm(
        ArmResult(
            given=given,
            kind=kind,
            policy=given,
            revision=revision,
            dirty=dirty,
            source_sha256=_digest(files),
            api_version=API_VERSION,
            knows_future=wants_future(made),
        ),
        Environment(),
    )


def _of_revision(given: str, scratch: Path) -> Arm:
    """A policy of a revision, extracted by `git archive`: nothing is checked out, and nothing here is touched."""
    _, _, rest = given.partition(":")
    asked, _, policy = rest.partition(":")
    policy = policy or "prfaas"
    if (why := unknown(policy)) is not None:
        raise ScenarioError(why)
    shipped = policy in SHIPPED
    repository = ROOT if shipped else Path.cwd()
    revision = _revision(repository, asked, shipped)
    folder = scratch / f"{revision[:16]}-{'scheduler' if shipped else policy.partition(':')[0]}"
    if shipped:
        files = _extract(repository, revision, f"./{FOLDER}", folder, asked)
        version = _api_version(folder / FOLDER / "api.py", asked)
        environment, scheduler = Environment(scheduler=folder), files
    else:
        top = policy.partition(":")[0].partition(".")[0]
        files = _extract_own(repository, revision, top, folder, asked)
        scheduler, version, environment = _modules(ROOT, FOLDER), API_VERSION, Environment(own=folder)
    return Arm(
        ArmResult(
            given=given,
            kind="git",
            policy=policy,
            revision=revision,
            dirty=False,
            source_sha256=_digest(scheduler | files),
            api_version=version,
            knows_future=policy == "oracle",
        ),
        environment,
    )


def _modules(root: Path, within: str = ".") -> dict[str, bytes]:
    """Every module that lies there, imported or not, by the name that it has from `root`."""
    return {_module_name(path.relative_to(root)): path.read_bytes() for path in sorted((root / within).rglob("*.py"))}


def _digest(files: dict[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return whole.hexdigest()


def _git(repository: Path, *words: str) -> bytes:
    """What git answers. Raises ScenarioError without git, and CalledProcessError when it refuses."""
    try:
        return subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True).stdout
    except OSError:
        raise ScenarioError(NEVER_MADE) from None


def _revision(repository: Path, asked: str, shipped: bool) -> str:
    try:
        _git(repository, "rev-parse", "--show-toplevel")
    except subprocess.CalledProcessError:
        where = "the testbed does not run from a git checkout" if shipped else f"{repository} is in no git checkout"
        raise ScenarioError(f"{where}, so there are no revisions; name the policy instead") from None
    try:
        return _git(repository, "rev-parse", "--verify", "--end-of-options", f"{asked}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError:
        raise ScenarioError(
            f"no revision {asked!r} in {repository}; a shallow clone has few: fetch more (git fetch --unshallow)"
        ) from None


def _checkout(repository: Path, within: str) -> tuple[str | None, bool | None]:
    """The revision of a checkout and whether what is `within` was changed since; (None, None) outside one."""
    try:
        revision = _git(repository, "rev-parse", "HEAD").decode().strip()
        return revision, bool(_git(repository, "status", "--porcelain", "--", within).strip())
    except (ScenarioError, subprocess.CalledProcessError):
        return None, None


def _extract_own(repository: Path, revision: str, top: str, folder: Path, asked: str) -> dict[str, bytes]:
    """Lay a top-level module of a revision into `folder`, with all beside it that it imports, directly or not."""
    there = _git(repository, "ls-tree", "-z", "--name-only", revision, "./").decode().split("\0")
    entries = {name.removesuffix(".py"): name for name in there if name.endswith(".py")}
    entries |= {name: name for name in there}  # a package goes before a module, as Python has it
    if top not in entries:
        raise ScenarioError(f"revision {asked} has neither {top}/ nor {top}.py here; stand where it is imported from")
    files: dict[str, bytes] = {}
    todo, done = [top], set(ROOMS)
    while todo:
        name = todo.pop()
        if name in entries and name not in done:
            done.add(name)
            files = _extract(repository, revision, f"./{entries[name]}", folder, asked)
            todo += _tops(files.values())
    return files


def _tops(files: Iterable[bytes]) -> Iterator[str]:
    """The top-level modules that sources import; of what is no source, none."""
    for source in files:
        with contextlib.suppress(SyntaxError, ValueError):
            yield from {name.partition(".")[0] for name in imported(source, "")}


def _extract(repository: Path, revision: str, entry: str, folder: Path, asked: str) -> dict[str, bytes]:
    """Lay a folder or file of a revision into `folder`; its modules by name. entry: relative to the repository."""
    try:
        archive = _git(repository, "archive", "--format=tar", revision, entry)
    except subprocess.CalledProcessError as error:
        raise ScenarioError(f"revision {asked} has no {entry[2:]} ({error.stderr.decode().strip()})") from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return _modules(folder)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _api_version(api: Path, asked: str) -> int:
    """API_VERSION of another revision's contract, which has to be this one's: the testbed around it is."""
    version: int | None = None
    if api.is_file():
        for node in ast.parse(api.read_text()).body:
            match node:
                case ast.AnnAssign(target=ast.Name(id="API_VERSION"), value=ast.Constant(value=int(found))):
                    version = found
    if version != API_VERSION:
        raise ScenarioError(
            f"its policies are of API version {version}, this testbed runs version {API_VERSION}; take a later one, "
            "or compare with the testbed of that one (results of two testbeds are not alike)"
        )
    return version
