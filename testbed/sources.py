"""What a run in virtual time depends on: source files, found by following imports, and files that a scenario names."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from importlib import resources
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

from testbed import fast

if TYPE_CHECKING:
    from testbed.scenario import Scenario

ROOMS: Final = ("emulator", "netem", "testbed", "traces")


def code_sha256(module: str, but: str | None = None) -> str:
    """Of a module with all of ours that it imports, and of the shipped profiles. but: a package that is left out."""
    whole = hashlib.sha256()
    for name, source in sources(module).items():
        if but is None or not name.startswith(but):
            whole.update(f"{name}\0".encode() + hashlib.sha256(source).digest())
    for profile in sorted(resources.files("emulator").joinpath("profiles").iterdir(), key=lambda entry: entry.name):
        whole.update(profile.read_bytes())
    return whole.hexdigest()


def files_sha256(scenario: Scenario) -> list[str]:
    """Of the files that a scenario of one deployment names and that are there: trace, profiles, the link's record."""
    profiles, schedule = scenario.deployments[0].profiles, scenario.link.schedule or {}
    named = [scenario.workload.trace, profiles.prfaas, profiles.pd, schedule.get("file")]
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in named if name and Path(name).is_file()]


def sources(module: str, folder: Path | None = None) -> dict[str, bytes]:
    """The source of a module, and of every module of the four rooms that it imports, directly or not, by name.

    folder: for somebody's own code: the module's package, wherever it lies, and whatever lies below the folder are
    followed as well. Never a compiled build.
    """
    package = None if folder is None else module.partition(".")[0]
    found: dict[str, bytes] = {}
    specs: dict[str, ModuleSpec | None] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        spec = None if name in found or (folder is None and not _ours(name)) else _spec(name, specs)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        if not (_ours(name) or name.partition(".")[0] == package or _below(spec.origin, folder)):
            continue
        found[name] = (fast.source(name) if name in fast.MODULES else Path(spec.origin)).read_bytes()
        todo += imported(found[name], name if spec.submodule_search_locations else name.rpartition(".")[0])
    return {name: found[name] for name in sorted(found)}


def imported(source: bytes, package: str) -> Iterator[str]:
    """Every name that may be a module in what a source imports: `from a import b` names a and a.b. package: where
    relative imports begin. Raises SyntaxError, or ValueError, for what is no source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec(name: str, known: dict[str, ModuleSpec | None]) -> ModuleSpec | None:
    """Where a module lies, with nothing imported for it; None for what is none, such as a class of a module."""
    if name not in known:
        parent = name.rpartition(".")[0]
        if not parent:
            known[name] = importlib.util.find_spec(name) if name else None
        else:
            package = _spec(parent, known)
            where = None if package is None else package.submodule_search_locations
            known[name] = None if where is None else PathFinder.find_spec(name, list(where))
    return known[name]


def _ours(name: str) -> bool:
    return name.partition(".")[0] in ROOMS


def _below(origin: str, folder: Path | None) -> bool:
    path = Path(origin)
    return folder is not None and "site-packages" not in path.parts and path.is_relative_to(folder)
