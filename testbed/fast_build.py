"""Compiles virtual time's innermost modules, with mypyc, for `testbed.fast` to find.

make fast                             # or python -m testbed.fast_build build; needs mypy and a C compiler
python -m testbed.fast_build show     # is there a build of these very sources? Exit code 1 when not
python -m testbed.fast_build remove
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testbed import fast


def build() -> Path:
    """Compile the modules as they are now; the folder of the build. Raises RuntimeError when that is impossible."""
    if importlib.util.find_spec("mypyc") is None:
        raise RuntimeError("mypyc is not installed; pip install 'prfaas-testbed[fast]'")
    folder = fast.STORE / fast.key()
    with tempfile.TemporaryDirectory(prefix="prfaas-fast-") as name:
        work = Path(name)
        for room in ("emulator", "netem", "testbed", "traces"):
            shutil.copytree(fast.ROOT / room, work / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(fast.ROOT / "pyproject.toml", work)
        open_to_subclasses(work / "testbed/scheduler/prfaas.py", "Prfaas")
        files = [str(fast.source(module).relative_to(fast.ROOT)) for module in fast.MODULES]
        command = [sys.executable, "-m", "mypyc", *files]
        environment = {**os.environ, fast.PURE: "1", "PYTHONPATH": ""}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"mypyc failed; is there a C compiler?\n{(done.stdout + done.stderr)[-2000:]}")
        made = work / "made"
        made.mkdir()
        for module in fast.MODULES:
            shutil.copy(work / (module.replace(".", "/") + fast.SUFFIX), made / (module + fast.SUFFIX))
        for shared in work.glob(f"*__mypyc{fast.SUFFIX}"):
            shutil.copy(shared, made)
        remove()
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, folder)
    return folder


def open_to_subclasses(module: Path, name: str) -> None:
    """Let a compiled class have subclasses that are not: people derive their own policies from the shipped one.

    The module itself knows nothing of it, as it imports the standard library and numpy alone.
    """
    text, head = module.read_text(encoding="utf-8"), f"\nclass {name}:"
    if head not in text:
        raise RuntimeError(
            f"{module.name} has no class {name} any more; fast_build has to name the one that people derive from"
        )
    text = text.replace(head, f"\n@mypyc_attr(allow_interpreted_subclasses=True){head}")
    after = "from __future__ import annotations\n"
    module.write_text(text.replace(after, f"{after}\nfrom mypy_extensions import mypyc_attr\n", 1), encoding="utf-8")


def remove() -> None:
    """Every build, of whatever sources."""
    shutil.rmtree(fast.STORE, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    match list(arguments):
        case ["build"]:
            try:
                print(f"compiled {', '.join(fast.MODULES)} into {build()}")
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        case ["remove"]:
            remove()
        case ["show"]:
            there = (fast.STORE / fast.key()).is_dir()
            print(f"there is {'a' if there else 'no'} build of these sources ({', '.join(fast.MODULES)})")
            return 0 if there else 1
        case _:
            print("usage: python -m testbed.fast_build build | show | remove", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
