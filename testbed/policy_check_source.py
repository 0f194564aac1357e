"""What a policy's source says about its purity: imports, builtins and attributes that a scheduler has no business with.

It reads the policy's module and the modules of its author's that this one imports, without running any of them. What
source cannot show, `policy_check_run.py` finds by running the policy.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent

PURE: Final = frozenset(
    (
        "__future__", "abc", "array", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses", "decimal",
        "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "re",
        "statistics", "string", "struct", "types", "typing",
    )
)  # fmt: skip
"""Of the standard library: no clock, no chance, no files, no sockets, no processes."""

OURS: Final = frozenset(("testbed", "emulator", "netem", "traces"))
SUBJECT: Final = "testbed.scheduler"

CLOCKS: Final = frozenset(("time", "datetime", "calendar", "sched", "timeit"))
CALLS: Final = {
    "open": "reads or writes a file",
    "print": "writes to standard output",
    "input": "reads standard input",
    "exec": "runs code that nobody can read",
    "eval": "runs code that nobody can read",
    "compile": "runs code that nobody can read",
    "__import__": "imports what nobody can read",
    "breakpoint": "stops the testbed",
    "globals": "reaches past what it is told",
    "vars": "reaches past what it is told",
    "hash": "differs from process to process for a text",
    "id": "differs from process to process",
}
REACHING: Final = frozenset(
    (
        "__self__", "__func__", "__globals__", "__closure__", "__dict__", "__code__", "__builtins__", "__subclasses__",
        "gi_frame", "f_back",
    )
)  # fmt: skip
NAMED_TUPLE: Final = frozenset(("_replace", "_asdict", "_make", "_fields"))
"""Public, whatever they begin with."""
SEEDED: Final = frozenset(("Random", "default_rng", "Generator", "SeedSequence", "PCG64", "Philox", "SFC64", "MT19937"))


class Violation(NamedTuple):
    """What of the contract a policy breaks. rule: purity, determinism, speed, sight or contract. where: file:line.
    remedy: what to do instead."""

    rule: str
    where: str
    what: str
    remedy: str


def read_source(file: Path) -> list[Violation]:
    """The violations in a policy's module and in those of the same author that it imports, in the order of lines."""
    found: list[Violation] = []
    todo, seen = [file.resolve()], set[Path]()
    while todo:
        path = todo.pop(0)
        if path in seen:
            continue
        seen.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found += sorted(_violations(tree, path), key=lambda one: int(one.where.rpartition(":")[2]))
        todo += [module for name in _imported(tree) if (module := _own(name)) is not None]
    return found


def _violations(tree: ast.AST, path: Path) -> Iterator[Violation]:
    for node in ast.walk(tree):
        where = f"{_shown(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _names(node):
                yield from _import(name, where)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            remedy = "decide by the request and the view alone; put what is to be on record into a Note"
            yield Violation("purity", where, f"{node.func.id}() {CALLS[node.func.id]}", remedy)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node, where)
        elif isinstance(node, ast.Constant) and node.value in REACHING and not isinstance(node.value, bytes):
            yield _reaches(str(node.value), where)


def _import(name: str, where: str) -> Iterator[Violation]:
    top = name.partition(".")[0]
    if top in CLOCKS:
        remedy = "view.now_s is the time, in model seconds, on every clock"
        yield Violation("purity", where, f"imports {name}, a clock", remedy)
    elif top in ("random", "secrets"):
        if name != "random.Random":
            remedy = "from random import Random, and make Random(seed) in start: the same run then decides the same"
            yield Violation("purity", where, f"imports {name}, which is seeded by chance", remedy)
    elif top in OURS:
        if name != SUBJECT and not name.startswith(f"{SUBJECT}."):
            remedy = f"import {SUBJECT} alone: what a policy may know is in Setup, RequestView and SystemView"
            yield Violation("sight", where, f"imports {name}, which knows what no scheduler can", remedy)
        elif name.startswith(f"{SUBJECT}.oracle"):
            remedy = "decide by what is observed: view.observed"
            yield Violation("sight", where, f"imports {name}, which is told the future", remedy)
    elif top in sys.stdlib_module_names and top not in PURE:
        remedy = "a policy has no input or output: what it wants on record is a Note, what it has to know a parameter"
        yield Violation("purity", where, f"imports {name}, which reaches outside", remedy)


def _attribute(node: ast.Attribute, where: str) -> Iterator[Violation]:
    base = node.value
    if node.attr in REACHING:
        yield _reaches(node.attr, where)
    elif node.attr.startswith("_") and node.attr not in NAMED_TUPLE and node.attr[1:2] != "_" and not _is_self(base):
        remedy = "use what has a name of its own in testbed.scheduler.api and estimators"
        yield Violation("sight", where, f".{node.attr} is somebody else's private matter", remedy)
    elif isinstance(base, ast.Attribute) and base.attr == "random" and node.attr not in SEEDED:
        remedy = "make numpy.random.default_rng(seed) in start, and draw from that"
        yield Violation("purity", where, f"random.{node.attr} draws from a generator that everybody shares", remedy)


def _reaches(name: str, where: str) -> Violation:
    return Violation(
        "sight", where, f"{name} reaches past what a policy is told", "decide by the request and the view alone"
    )


def _is_self(node: ast.expr) -> bool:
    """self, cls, super(), or something of theirs."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "other")


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:  # of the author's own package
        return []
    module = node.module or ""
    if module == "random" or module in ("testbed", SUBJECT):
        return [f"{module}.{alias.name}" for alias in node.names]
    return [module]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _names(node)


def _own(name: str) -> Path | None:
    """The file of a module that is neither the standard library's, nor ours, nor installed."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in OURS:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin).resolve()
    return None if {"site-packages", "dist-packages"} & set(path.parts) else path


def _shown(path: Path) -> str:
    """Relative to where one stands, if it lies there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
