"""The rooms of the house: who may import whom, and which modules are pure. `design/architecture.md` says why."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "emulator": {"emulator"},
    "netem": {"netem"},
    "traces": {"traces"},
    "testbed": {"testbed", "emulator", "netem", "traces"},
}
PURE_PARTS = {  # of the standard library: no clock, no chance, no sockets, no files, no processes
    "__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum", "fractions", "functools",
    "heapq", "itertools", "math", "numbers", "operator", "statistics", "types", "typing",
}  # fmt: skip
PURE = {  # modules that decide, and what else they may import
    "emulator/computed.py": {
        "emulator.computing",
        "emulator.decode_instance",
        "emulator.instance",
        "emulator.kvcache",
        "emulator.messages",
        "emulator.prefix_cache",
    },
    "emulator/computing.py": {"msgspec"},
    "emulator/decode_instance.py": {"emulator.messages", "msgspec"},
    "emulator/instance.py": {"emulator.kvcache", "emulator.messages", "emulator.prefix_cache", "msgspec"},
    "emulator/kvcache.py": {"hashlib", "emulator.messages", "emulator.profile"},
    "emulator/messages.py": {"emulator.computing", "msgspec"},
    "emulator/prefix_cache.py": {"emulator.kvcache", "emulator.messages", "msgspec"},
    "netem/binomial.py": set(),
    "netem/cells.py": {"netem.binomial", "netem.link", "netem.schedule"},
    "netem/courses.py": {"netem.link"},
    "netem/cross.py": {"netem.courses", "netem.link"},
    "netem/fluid.py": {"netem.link", "netem.schedule"},
    "netem/link.py": {"re"},
    "netem/schedule.py": {
        "difflib",
        "hashlib",
        "json",
        "netem.courses",
        "netem.link",
        "netem.schedule_files",
        "netem.token_bucket",
    },
    "netem/schedule_files.py": {"netem.courses", "netem.link"},
    "netem/timelines.py": {"netem.link"},
    "netem/token_bucket.py": {"netem.courses"},
    "testbed/control/copies.py": {
        "emulator.messages",
        "testbed.control.events",
        "testbed.control.nodes",
        "testbed.scheduler.api",
    },
    "testbed/control/judge.py": {"testbed.scheduler.api"},
    "testbed/control/events.py": {"msgspec", "emulator.messages", "testbed.scheduler.api"},
    "testbed/control/life.py": {
        "emulator.kvcache",
        "emulator.messages",
        "testbed.control.copies",
        "testbed.control.events",
        "testbed.control.judge",
        "testbed.control.nodes",
        "testbed.scheduler.api",
        "testbed.scheduler.estimators",
    },
    "testbed/control/nodes.py": {
        "emulator.messages",
        "testbed.control.events",
        "testbed.directory",
        "testbed.scheduler.api",
    },
    "testbed/directory.py": {"testbed.scheduler.api"},
    "traces/request.py": set(),
}
SUBJECT = sorted((ROOT / "testbed/scheduler").glob("*.py"))
ALL = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, by its full name: `from a import b` is a.b where that is a module of ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            inner = {f"{module}.{alias.name}" for alias in node.names if is_module(f"{module}.{alias.name}")}
            found |= inner or {module}
    return frozenset(found)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def top(module: str) -> str:
    return module.split(".", 1)[0]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", ALL, ids=named)
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert {top(module) for module in imports(path)} & (set(ROOMS) | {"tests"}) <= ROOMS[room]


@pytest.mark.parametrize("path", SUBJECT, ids=named)
def test_the_scheduler_imports_itself_the_pure_parts_and_numpy(path: Path) -> None:
    outside = {m for m in imports(path) if m != "testbed.scheduler" and not m.startswith("testbed.scheduler.")}
    assert {top(module) for module in outside} <= PURE_PARTS | {"numpy"}


@pytest.mark.parametrize("name", sorted(PURE))
def test_what_decides_knows_no_clock_no_chance_and_no_socket(name: str) -> None:
    outside = {m for m in imports(ROOT / name) if top(m) not in PURE_PARTS | {"numpy"}}
    assert outside <= PURE[name]


@pytest.mark.parametrize("path", [*SUBJECT, *(ROOT / name for name in sorted(PURE))], ids=named)
def test_what_is_pure_uses_no_randomness_and_no_files(path: Path) -> None:
    """What an import does not tell: numpy's generators, and the builtins that do input and output.

    A generator made from a seed that is data, as in `netem/courses.py`, is imported by its name and is no chance.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert not (node.attr == "random" and isinstance(node.value, ast.Name)), f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval", "__import__"}, f"line {node.lineno}"


@pytest.mark.parametrize(
    "module", ["testbed.scheduler.prfaas", "testbed.scheduler.baselines", "testbed.control", "emulator.instance"]
)
def test_what_decides_can_be_imported_without_the_rest(module: str) -> None:
    """No package's __init__ pulls in the web framework, the event loop, the kernel's or the load's libraries."""
    heavy = [
        "aiohttp",
        "asyncio",
        "locust",
        "gevent",
        "pyroute2",
        "uvloop",
        "pydantic",
        "matplotlib",
        "pandas",
        "torch",
    ]
    code = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
