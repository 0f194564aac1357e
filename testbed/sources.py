"""The source files that code depends on, found by following imports: what digests of code are made of."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from testbed import fast

ROOMS: Final = ("emulator", "netem", "testbed", "traces")


def sources(module: str, folder: Path | None = None) -> dict[str, bytes]:
    """The source of a module, and of every module of the four rooms that it imports, directly or not, by name.

    folder: whatever lies below it is followed as well: somebody's own code. Never a compiled build.
    """
    found: dict[str, bytes] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        spec = None if name in found or (folder is None and not _ours(name)) else _spec(name)
        if spec is None or spec.origin is None or not (_ours(name) or _below(spec.origin, folder)):
            continue
        found[name] = (fast.source(name) if name in fast.MODULES else Path(spec.origin)).read_bytes()
        todo += _imported(found[name], name if spec.submodule_search_locations else name.rpartition(".")[0])
    return {name: found[name] for name in sorted(found)}


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Every name that may be a module: `from a import b` names a and a.b. package: where relative imports begin."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a class of a module, an optional module that is not there
        return None


def _ours(name: str) -> bool:
    return name.partition(".")[0] in ROOMS


def _below(origin: str, folder: Path | None) -> bool:
    path = Path(origin)
    return (
        folder is not None
        and path.suffix == ".py"
        and "site-packages" not in path.parts
        and path.is_relative_to(folder)
    )
